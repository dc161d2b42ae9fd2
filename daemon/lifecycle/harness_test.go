package lifecycle

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

var guestProgram string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "berth-lifecycle-")
	if err == nil {
		guestProgram = filepath.Join(dir, "berth-guest")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", guestProgram, "../../providers/guest/cmd/berth-guest").CombinedOutput(); err != nil {
			err = fmt.Errorf("build the guest: %w: %s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

const (
	namespace = "default"
	soon      = 20 * time.Second // for what must happen
)

// harness is a service over a real ledger, real links and machines that fail as the test has it.
type harness struct {
	*Service
	t      *testing.T
	ctx    context.Context
	dir    string
	ledger *store.Store
	hub    *events.Hub
	keys   *vault.Vault
	fake   *fake.Provider
	links  *guestlink.Links
	log    *logged

	ahead           atomic.Int64 // of the clock, in nanoseconds
	prepared        atomic.Int32 // how often a workspace was begun to be prepared
	terminated      atomic.Int32
	providerTimeout time.Duration // zero: the default
	before          int           // boots and calls of Create before the operation that the test is about

	mu        sync.Mutex
	prepare   func(context.Context) error // what preparing a workspace does
	terminate func(context.Context)       // what terminating jobs does
}

// logged is a log that can be looked into.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "lc-") // short, for sockets
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w := &harness{t: t, ctx: ctx, dir: dir, log: &logged{}}
	t.Cleanup(func() {
		cancel()
		_ = os.RemoveAll(dir)
	})
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w.ledger, err = store.Open(filepath.Join(dir, "ledger.db"), store.Options{Log: log})
	must(t, err)
	w.hub = events.New()
	w.ledger.OnCommit(w.hub.Publish)
	w.keys, err = vault.Open(dir)
	must(t, err)
	w.fake, err = fake.New(fake.Options{
		Dir: filepath.Join(dir, "m"), BrokerID: w.ledger.Instance(), Log: log,
		GuestPath: func(string) (string, error) { return guestProgram, nil },
	})
	must(t, err)
	w.start()
	t.Cleanup(func() {
		w.stop()
		must(t, w.fake.Harness().Script())
		must(t, w.fake.Harness().Close(context.Background()))
		must(t, w.fake.Close())
		must(t, w.ledger.Close())
		if t.Failed() {
			t.Logf("the log:\n%s", w.log)
		}
	})
	return w
}

// start makes the service and its links, as a broker does that is started.
func (w *harness) start() {
	w.Service, w.links = w.another()
}

func (w *harness) another() (*Service, *guestlink.Links) {
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	links := guestlink.New(guestlink.Options{Build: "test", Log: log, Events: guestlink.Events{
		Up: func(string, *guestv1.HelloResponse) {}, Down: func(string, error) {},
	}})
	return New(Options{
		Store: w.ledger, Events: w.hub, Vault: w.keys, Links: links, Providers: []machines.Named{{Name: "fake", Provider: w.fake}},
		SocketDir: filepath.Join(w.dir, "s"), Log: log,
		Now:             func() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) },
		ProviderTimeout: w.providerTimeout,
		Hooks: Hooks{
			PrepareWorkspace: func(ctx context.Context, _ *recordv1.SandboxRecord) error {
				w.prepared.Add(1)
				if prepare, _ := w.hooks(); prepare != nil {
					return prepare(ctx)
				}
				return nil
			},
			TerminateJobs: func(ctx context.Context, _ string) {
				w.terminated.Add(1)
				if _, terminate := w.hooks(); terminate != nil {
					terminate(ctx)
				}
			},
			LoseJobs: func(*store.Tx, string, string) error { return nil },
		},
	}), links
}

func (w *harness) hooks() (func(context.Context) error, func(context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.prepare, w.terminate
}

func (w *harness) setHooks(prepare func(context.Context) error, terminate func(context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.prepare, w.terminate = prepare, terminate
}

// stop ends the service as a crash does, as far as the ledger and the machines can tell.
func (w *harness) stop() {
	w.Close()
	w.links.Close()
}

func (w *harness) script(faults ...fake.Fault) {
	w.t.Helper()
	must(w.t, w.fake.Harness().Script(faults...))
}

func call(method, requestID string) request.Call {
	return request.Call{Namespace: namespace, RequestID: requestID, Method: method, BodyHash: []byte("body"), HashVersion: 1}
}

func (w *harness) create(requestID string) (*recordv1.SandboxRecord, error) {
	return w.Create(w.ctx, call("create", requestID), &berthv1.SandboxSpec{SessionKey: "the-session", SecretEnv: map[string]string{"KEY": "secret"}})
}

func (w *harness) created() *recordv1.SandboxRecord {
	w.t.Helper()
	sandbox, err := w.create("c")
	must(w.t, err)
	return sandbox
}

// stopped is a sandbox whose machine was killed.
func (w *harness) stopped() *recordv1.SandboxRecord {
	w.t.Helper()
	sandbox := w.created()
	must(w.t, w.fake.Harness().Kill(w.ctx, sandbox.GetMachineId()))
	w.markStopped()
	return sandbox
}

// markStopped records that the machine's processes are gone, as daemon/reconcile does.
func (w *harness) markStopped() {
	w.t.Helper()
	sandbox := w.only()
	sandbox.State = stopped
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error { return tx.PutSandbox(sandbox, "", "") }))
	w.links.Drop(sandbox.GetMachineId())
}

// only is the one sandbox that there is.
func (w *harness) only() *recordv1.SandboxRecord {
	w.t.Helper()
	var all []*recordv1.SandboxRecord
	must(w.t, w.ledger.View(func(tx *store.Tx) (err error) {
		all, _, err = tx.ListSandboxes(namespace, store.Page{Size: 10}, func(*recordv1.SandboxRecord) bool { return true })
		return err
	}))
	if len(all) != 1 {
		w.t.Fatalf("there are %d sandboxes, want 1", len(all))
	}
	return all[0]
}

func (w *harness) operation() *recordv1.OperationRecord {
	w.t.Helper()
	var open []*recordv1.OperationRecord
	must(w.t, w.ledger.View(func(tx *store.Tx) (err error) {
		open, err = tx.OpenOperations()
		return err
	}))
	if len(open) == 0 {
		return nil
	}
	return open[0]
}

func (w *harness) calls(c fake.Call) int {
	w.t.Helper()
	n, err := w.fake.Harness().Calls(c, "")
	must(w.t, err)
	return n
}

func (w *harness) boots() int {
	w.t.Helper()
	n, err := w.fake.Harness().Boots(w.only().GetMachineId())
	must(w.t, err)
	return n
}

func (w *harness) wantState(want berthv1.SandboxState) {
	w.t.Helper()
	if sandbox := w.only(); sandbox.GetState() != want {
		w.t.Fatalf("the sandbox is %s (%v), want %s", sandbox.GetState(), sandbox.GetLastError(), want)
	}
}

func (w *harness) wantBoots(want int) {
	w.t.Helper()
	if got := w.boots(); got != want {
		w.t.Fatalf("the machine was booted %d times, want %d", got, want)
	}
}

// wantNothing fails the test if anything is left of the sandbox: machine, sockets, session, secrets,
// operation.
func (w *harness) wantNothing() {
	w.t.Helper()
	machines, err := w.fake.Harness().Machines()
	must(w.t, err)
	if len(machines) > 0 {
		w.t.Errorf("machines %v are left", machines)
	}
	if sockets, err := os.ReadDir(filepath.Join(w.dir, "s")); err == nil && len(sockets) > 0 {
		w.t.Errorf("sockets %v are left", sockets)
	}
	if operation := w.operation(); operation != nil {
		w.t.Errorf("operation %v is left", operation)
	}
	sandbox := w.only()
	if len(sandbox.GetSealedEnv()) > 0 || sandbox.GetOperationId() != "" || sandbox.GetDestroyTime() == nil {
		w.t.Errorf("the sandbox is not at its end: %v", sandbox)
	}
	must(w.t, w.ledger.View(func(tx *store.Tx) error {
		machine, err := tx.Machine(sandbox.GetMachineId())
		if err != nil || machine.GetState() != recordv1.MachineState_MACHINE_STATE_GONE || len(machine.GetSealedToken()) > 0 {
			w.t.Errorf("the machine's record is %v (%v)", machine, err)
		}
		held, err := tx.Session(namespace, "the-session")
		if held != nil {
			w.t.Errorf("the session key is still held by %v", held)
		}
		return err
	}))
}

// wait waits until something is so.
func (w *harness) wait(what string, so func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(soon); !so(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not so after %s", what, soon)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
