// Package harness is what tests of packages above daemon/jobs stand on: a real ledger, real guests, and the
// services over machines that fail as a test has it. It makes no assertion of its own but that this works.
package harness

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake"
)

// Namespace is that of everything that a harness makes. Soon is the time for what must happen.
const (
	Namespace = "default"
	Soon      = 60 * time.Second
)

// Harness is the services over one ledger. Its clock is as far ahead as the test says. Nothing runs by itself
// but operations and jobs.
type Harness struct {
	T         *testing.T
	Ctx       context.Context //nolint:containedctx // the test's
	Dir       string
	Ledger    *store.Store
	Hub       *events.Hub
	Fake      *fake.Provider
	Links     *guestlink.Links
	Sandboxes *lifecycle.Service
	Jobs      *jobs.Service

	keys  *vault.Vault
	guest string
	ahead atomic.Int64 // of the clock, in nanoseconds
}

// New makes a harness and starts it; it ends with the test.
func New(t *testing.T) *Harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "hn-") // short, for sockets
	Must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 3*Soon)
	h := &Harness{T: t, Ctx: ctx, Dir: dir, Hub: events.New(), guest: fixture.Guest(t)}
	h.OpenLedger()
	h.keys, err = vault.Open(dir)
	Must(t, err)
	h.Fake = h.Provider(h.Ledger.Instance())
	h.Start()
	t.Cleanup(func() {
		h.Stop()
		Must(t, h.Fake.Harness().Close(context.Background()))
		Must(t, h.Fake.Close())
		Must(t, h.Ledger.Close())
		cancel()
		_ = os.RemoveAll(dir)
	})
	return h
}

// OpenLedger opens the ledger, also again after a test has closed it.
func (h *Harness) OpenLedger() {
	h.T.Helper()
	var err error
	h.Ledger, err = store.Open(filepath.Join(h.Dir, "ledger.db"), store.Options{})
	Must(h.T, err)
	h.Ledger.OnCommit(h.Hub.Publish)
}

// Provider makes a provider of a broker whose machines lie among those of the harness.
func (h *Harness) Provider(broker string) *fake.Provider {
	h.T.Helper()
	provider, err := fake.New(fake.Options{
		Dir: filepath.Join(h.Dir, "m"), BrokerID: broker, Log: slog.New(slog.DiscardHandler),
		GuestPath: func(string) (string, error) { return h.guest, nil },
	})
	Must(h.T, err)
	return provider
}

// Now is the harness's clock.
func (h *Harness) Now() time.Time { return time.Now().Add(time.Duration(h.ahead.Load())) }

// Later sets the clock ahead.
func (h *Harness) Later(d time.Duration) { h.ahead.Add(int64(d)) }

// Start makes the services, as a broker does that is started. It opens no link and resumes nothing.
func (h *Harness) Start() {
	h.T.Helper()
	log := slog.New(slog.DiscardHandler)
	h.Links = guestlink.New(guestlink.Options{Build: "test", Log: log, Events: guestlink.Events{
		Up:   func(machineID string, hello *guestv1.HelloResponse) { h.Jobs.Follow(machineID, hello) },
		Down: func(machineID string, _ error) { h.Jobs.Unfollow(machineID) },
	}})
	h.Sandboxes = lifecycle.New(lifecycle.Options{
		Store: h.Ledger, Events: h.Hub, Vault: h.keys, Links: h.Links, Providers: []machines.Named{{Name: "fake", Provider: h.Fake}},
		SocketDir: filepath.Join(h.Dir, "s"), Log: log, Now: h.Now,
	})
	var err error
	h.Jobs, err = jobs.New(jobs.Options{
		Store: h.Ledger, Events: h.Hub, Vault: h.keys, Links: h.Links, Sandboxes: h.Sandboxes, OutputDir: filepath.Join(h.Dir, "output"), Log: log, Now: h.Now,
	})
	Must(h.T, err)
	h.Sandboxes.SetHooks(lifecycle.Hooks{
		PrepareWorkspace: func(context.Context, *recordv1.SandboxRecord) error { return nil },
		TerminateJobs:    h.Jobs.TerminateJobs, LoseJobs: h.Jobs.LoseJobs,
	})
}

// Stop ends the services as a crash does, as far as the ledger and the machines can tell.
func (h *Harness) Stop() {
	h.Sandboxes.Close()
	h.Jobs.Close()
	h.Links.Close()
}

// Call is a call of a method; without a request id it can't be repeated.
func Call(method, requestID string) request.Call {
	return request.Call{Namespace: Namespace, RequestID: requestID, Method: method, BodyHash: []byte("body")}
}

// Sandbox makes a sandbox.
func (h *Harness) Sandbox() *recordv1.SandboxRecord {
	h.T.Helper()
	sandbox, err := h.Sandboxes.Create(h.Ctx, Call("create", ""), &berthv1.SandboxSpec{})
	Must(h.T, err)
	return sandbox
}

// Job starts a job that goes on until it is stopped.
func (h *Harness) Job(sandbox *recordv1.SandboxRecord) *recordv1.JobRecord {
	h.T.Helper()
	job, err := h.Jobs.Start(h.Ctx, Call("start", ""), sandbox.GetId(), &berthv1.JobSpec{Shell: "sleep 1000"})
	Must(h.T, err)
	return job
}

// Destroy destroys a sandbox.
func (h *Harness) Destroy(sandbox *recordv1.SandboxRecord) {
	h.T.Helper()
	_, err := h.Sandboxes.Destroy(h.Ctx, Call("destroy", ""), sandbox.GetId())
	Must(h.T, err)
}

// Orphan boots a machine that no record names.
func (h *Harness) Orphan(id, broker string) {
	h.T.Helper()
	provider := h.Fake
	if broker != h.Ledger.Instance() {
		provider = h.Provider(broker)
		defer func() { Must(h.T, provider.Close()) }()
	}
	_, err := provider.Create(h.Ctx, providers.MachineSpec{
		MachineID: id, BrokerID: broker, Token: make([]byte, 32), ListenDir: h.Sandboxes.Machines().ListenDir(id),
	})
	Must(h.T, err)
}

// Update changes the ledger.
func (h *Harness) Update(fn func(*store.Tx) error) {
	h.T.Helper()
	Must(h.T, h.Ledger.Update(h.Ctx, fn))
}

// Silent waits until the machine's link is down.
func (h *Harness) Silent(sandbox *recordv1.SandboxRecord) {
	h.T.Helper()
	h.Wait("the end of the link", func() bool { return h.Links.Hello(sandbox.GetMachineId()) == nil })
}

// Wait waits until something is so.
func (h *Harness) Wait(what string, so func() bool) {
	h.T.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(Soon); !so(); <-ticker.C {
		if time.Now().After(deadline) {
			h.T.Fatalf("%s: not so after %s", what, Soon)
		}
	}
}

// WantState fails the test unless the sandbox is in a state.
func (h *Harness) WantState(sandbox *recordv1.SandboxRecord, want berthv1.SandboxState, when string) {
	h.T.Helper()
	now, _, err := h.Sandboxes.Get(Namespace, sandbox.GetId())
	if err != nil || now.GetState() != want {
		h.T.Fatalf("%s the sandbox is %s (%v), want %s", when, now.GetState(), err, want)
	}
}

// WantMachine fails the test unless a machine is there, or is not.
func (h *Harness) WantMachine(id string, want bool, when string) {
	h.T.Helper()
	there, err := h.Fake.Harness().Machines()
	Must(h.T, err)
	if found := slices.Contains(there, id); found != want {
		h.T.Fatalf("%s machine %s is there: %v", when, id, found)
	}
}

// WantLost fails the test unless a job ended as lost.
func (h *Harness) WantLost(jobID string) {
	h.T.Helper()
	done, err := h.Jobs.Poll(h.Ctx, Namespace, jobID, 0)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST || done.GetOutcome().Exit != nil {
		h.T.Errorf("its job ended as %v (%v)", done.GetOutcome(), err)
	}
}

// Must fails the test on an error.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
