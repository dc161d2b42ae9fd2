package jobs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/command"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
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

var guestProgram string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "berth-jobs-")
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

// harness is the job ledger over a real store, real links and real machines, or ones whose guests lie.
type harness struct {
	*Service
	t         *testing.T
	ctx       context.Context
	dir       string
	outputDir string
	ledger    *store.Store
	hub       *events.Hub
	keys      *vault.Vault
	provider  providers.Provider
	fake      *fake.Provider // nil where guests lie
	links     *guestlink.Links
	sandboxes *lifecycle.Service
	log       *logged
	// guestTimeout and retention are options of what start makes.
	guestTimeout, retention time.Duration
}

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

func (l *logged) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// newHarness makes one whose guests are real.
func newHarness(t *testing.T) *harness {
	t.Helper()
	w := bareHarness(t)
	made, err := fake.New(fake.Options{
		Dir: filepath.Join(w.dir, "m"), BrokerID: w.ledger.Instance(), Log: w.log.logger(),
		GuestPath: func(string) (string, error) { return guestProgram, nil },
	})
	must(t, err)
	w.fake, w.provider = made, made
	w.start()
	t.Cleanup(func() {
		w.stop()
		must(t, made.Harness().Close(context.Background()))
		must(t, made.Close())
		must(t, w.ledger.Close())
	})
	return w
}

func bareHarness(t *testing.T) *harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "jb-") // short, for sockets
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w := &harness{t: t, ctx: ctx, dir: dir, outputDir: filepath.Join(dir, "output"), log: &logged{}}
	t.Cleanup(func() {
		cancel()
		_ = os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("the log:\n%s", w.log)
		}
	})
	w.ledger, err = store.Open(filepath.Join(dir, "ledger.db"), store.Options{Log: w.log.logger()})
	must(t, err)
	w.hub = events.New()
	w.ledger.OnCommit(w.hub.Publish)
	w.keys, err = vault.Open(dir)
	must(t, err)
	return w
}

// start makes the services, as a broker does that is started, and opens the link to every machine.
func (w *harness) start() {
	w.t.Helper()
	w.links = guestlink.New(guestlink.Options{Build: "test", Log: w.log.logger(), Events: guestlink.Events{
		Up:   func(machineID string, hello *guestv1.HelloResponse) { w.Follow(machineID, hello) },
		Down: func(machineID string, _ error) { w.Unfollow(machineID) },
	}, GuestTimeout: w.guestTimeout})
	w.sandboxes = lifecycle.New(lifecycle.Options{
		Store: w.ledger, Events: w.hub, Vault: w.keys, Links: w.links, Providers: []machines.Named{{Name: "fake", Provider: w.provider}},
		SocketDir: filepath.Join(w.dir, "s"), Log: w.log.logger(),
	})
	var err error
	w.Service, err = New(Options{
		Store: w.ledger, Events: w.hub, Vault: w.keys, Links: w.links, Sandboxes: w.sandboxes, OutputDir: w.outputDir, Log: w.log.logger(), Retention: w.retention,
	})
	must(w.t, err)
	w.sandboxes.SetHooks(lifecycle.Hooks{
		PrepareWorkspace: func(context.Context, *recordv1.SandboxRecord) error { return nil },
		TerminateJobs:    w.TerminateJobs, LoseJobs: w.LoseJobs,
	})
	var machines []*recordv1.MachineRecord
	must(w.t, w.ledger.View(func(tx *store.Tx) (err error) {
		machines, err = tx.LiveMachines()
		return err
	}))
	for _, record := range machines {
		must(w.t, w.sandboxes.Machines().OpenLink(record))
	}
}

// stop ends the services as a crash does, as far as the ledger and the guests can tell.
// rest records that a sandbox's machine is stopped or gone, as daemon/reconcile does.
func (w *harness) rest(sandbox *recordv1.SandboxRecord, state berthv1.SandboxState) {
	w.t.Helper()
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		now, err := tx.Sandbox(sandbox.GetId())
		if err != nil {
			return err
		}
		now.State = state
		if state == berthv1.SandboxState_SANDBOX_STATE_LOST {
			err = w.LoseJobs(tx, sandbox.GetMachineId(), "machine_gone")
		}
		return errors.Join(err, tx.PutSandbox(now, "", ""))
	}))
	w.links.Drop(sandbox.GetMachineId())
}

func (w *harness) stop() {
	w.sandboxes.Close()
	w.Close()
	w.links.Close()
}

func (w *harness) restart() {
	w.t.Helper()
	w.stop()
	w.start()
}

func call(method, requestID string) request.Call {
	return request.Call{Namespace: namespace, RequestID: requestID, Method: method, BodyHash: []byte("body"), HashVersion: 1}
}

func (w *harness) sandbox() *recordv1.SandboxRecord {
	w.t.Helper()
	sandbox, err := w.sandboxes.Create(w.ctx, call("create", ""), &berthv1.SandboxSpec{})
	must(w.t, err)
	return sandbox
}

func shell(script string) *berthv1.JobSpec { return &berthv1.JobSpec{Shell: script} }

// reserved is a job that was written down and not begun, as a crash between the two leaves it.
func (w *harness) reserved(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec) *recordv1.JobRecord {
	w.t.Helper()
	w.wait("the initial sync", func() bool { return !w.Syncing() }) // it would start what is reserved
	now := time.Now()
	deadline := start.DefaultDeadline
	if spec.GetStartDeadline() != nil {
		deadline = spec.GetStartDeadline().AsDuration()
	}
	job := &recordv1.JobRecord{
		Id: request.NewID("job"), Namespace: namespace, SandboxId: sandbox.GetId(), Spec: command.Redacted(spec), Detached: true,
		State: berthv1.JobState_JOB_STATE_RESERVED, CreateTime: timestamppb.New(now), StartDeadline: timestamppb.New(now.Add(deadline)),
		KeepOutput: true, MachineId: sandbox.GetMachineId(), Generation: sandbox.GetGeneration(),
	}
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		machine, err := tx.Machine(sandbox.GetMachineId())
		if err != nil {
			return err
		}
		job.BootId = machine.GetBootId()
		if _, job.SealedSecrets, err = w.commands.Sealed(sandbox, job.GetId(), spec); err != nil {
			return err
		}
		return tx.PutJob(job, "job.reserved", "")
	}))
	return job
}

// begin has a job's guest begin it, as a broker does that dies before it hears of that.
func (w *harness) begin(sandbox *recordv1.SandboxRecord, job *recordv1.JobRecord) {
	w.t.Helper()
	built, err := w.commands.Unsealed(sandbox, job)
	must(w.t, err)
	_, err = w.links.StartJob(w.ctx, job.GetMachineId(), &guestv1.StartRequest{JobId: job.GetId(), BootId: job.GetBootId(), Command: built, Durable: true})
	must(w.t, err)
}

func (w *harness) started(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.Start(w.ctx, call("start", ""), sandbox.GetId(), spec)
	must(w.t, err)
	return job
}

func (w *harness) done(id string) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.Poll(w.ctx, namespace, id, soon)
	must(w.t, err)
	if !record.IsDone(job) {
		w.t.Fatalf("job %s is %s after %s", id, job.GetState(), soon)
	}
	return job
}

func (w *harness) record(id string) *recordv1.JobRecord {
	w.t.Helper()
	var job *recordv1.JobRecord
	must(w.t, w.ledger.View(func(tx *store.Tx) (err error) {
		job, err = tx.Job(id)
		return err
	}))
	if job == nil {
		w.t.Fatalf("there is no record of job %s", id)
	}
	return job
}

func (w *harness) wantExit(job *recordv1.JobRecord, code int32) {
	w.t.Helper()
	outcome := job.GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_EXITED || outcome.Exit == nil || outcome.GetExitCode() != code {
		w.t.Fatalf("job %s ended as %v, want exit %d", job.GetId(), outcome, code)
	}
}

func (w *harness) wantCause(job *recordv1.JobRecord, cause berthv1.Cause, reason string) {
	w.t.Helper()
	outcome := job.GetOutcome()
	if outcome.GetCause() != cause || !bytes.HasPrefix([]byte(outcome.GetReason()), []byte(reason)) {
		w.t.Fatalf("job %s ended as %v, want %s %s", job.GetId(), outcome, cause, reason)
	}
}

// readAll reads a whole stream, with the ranges that are missing.
func (w *harness) readAll(id string, stream berthv1.Stream) (data []byte, gaps int) {
	w.t.Helper()
	var offset uint64
	for {
		chunk, err := w.ReadOutput(w.ctx, namespace, id, stream, offset, 1<<20, 0)
		if next, missing := firstKept(err); missing {
			offset, gaps = next, gaps+1
			continue
		}
		must(w.t, err)
		data, offset = append(data, chunk.Data...), offset+uint64(len(chunk.Data))
		if chunk.EOF {
			return data, gaps
		}
		if len(chunk.Data) == 0 {
			w.t.Fatalf("no byte at %d of %v, and no end", offset, chunk.Stats)
		}
	}
}

// wait waits until something is so.
func (w *harness) wait(what string, so func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(soon); !so(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not so after %s", what, soon)
		}
		background.Pause(w.ctx, 5*time.Millisecond)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func byteRange(from, to uint64) *berthv1.ByteRange { return &berthv1.ByteRange{From: from, To: to} }

func same(a, b proto.Message) bool { return proto.Equal(a, b) }
