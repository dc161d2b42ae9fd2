package jobs

import (
	"bytes"
	"context"
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

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
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

// world is the job ledger over a real store, real links and real machines, or ones whose guests lie.
type world struct {
	*Service
	t         *testing.T
	ctx       context.Context
	dir       string
	outputDir string
	ledger    *store.Store
	keys      *vault.Vault
	provider  providers.Provider
	fake      *fake.Provider // nil where guests lie
	links     *guestlink.Links
	sandboxes *lifecycle.Service
	log       *logged
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

// newWorld makes a world whose guests are real.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := bareWorld(t)
	made, err := fake.New(fake.Options{
		Dir: filepath.Join(w.dir, "m"), BrokerID: w.ledger.Instance(), Log: w.log.logger(),
		GuestPath: func(string) (string, error) { return guestProgram, nil },
	})
	must(t, err)
	w.fake, w.provider = made, made
	w.start()
	t.Cleanup(func() {
		w.stop()
		must(t, made.World().Strike(context.Background()))
		must(t, made.Close())
		must(t, w.ledger.Close())
	})
	return w
}

func bareWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "jb-") // short, for sockets
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w := &world{t: t, ctx: ctx, dir: dir, outputDir: filepath.Join(dir, "output"), log: &logged{}}
	t.Cleanup(func() {
		cancel()
		_ = os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("the log:\n%s", w.log)
		}
	})
	w.ledger, err = store.Open(filepath.Join(dir, "ledger.db"), store.Options{Log: w.log.logger()})
	must(t, err)
	w.keys, err = vault.Open(dir)
	must(t, err)
	return w
}

// start makes the services, as a broker does that is started, and opens the link to every machine.
func (w *world) start() {
	w.t.Helper()
	w.links = guestlink.New(guestlink.Options{Build: "test", Log: w.log.logger(), Events: guestlink.Events{
		Up:   func(machineID string, hello *guestv1.HelloResponse) { w.Follow(machineID, hello) },
		Down: func(machineID string, _ error) { w.Unfollow(machineID) },
	}})
	w.sandboxes = lifecycle.New(lifecycle.Options{
		Store: w.ledger, Vault: w.keys, Links: w.links, Providers: []lifecycle.Named{{Name: "fake", Provider: w.provider}},
		SocketDir: filepath.Join(w.dir, "s"), Log: w.log.logger(),
	})
	var err error
	w.Service, err = New(Options{
		Store: w.ledger, Vault: w.keys, Links: w.links, Sandboxes: w.sandboxes, OutputDir: w.outputDir, Log: w.log.logger(),
	})
	must(w.t, err)
	w.sandboxes.SetHooks(lifecycle.Hooks{
		PrepareWorkspace: func(context.Context, *recordv1.SandboxRecord) error { return nil },
		SettleJobs:       w.SettleJobs, LoseJobs: w.LoseJobs, JobsChanged: w.JobsChanged,
	})
	var machines []*recordv1.MachineRecord
	must(w.t, w.ledger.View(func(tx *store.Tx) (err error) {
		machines, err = tx.LiveMachines()
		return err
	}))
	for _, machine := range machines {
		must(w.t, w.sandboxes.OpenLink(machine))
	}
}

// stop ends the services as a crash does, as far as the ledger and the guests can tell.
func (w *world) stop() {
	w.sandboxes.Close()
	w.Close()
	w.links.Close()
}

func (w *world) restart() {
	w.t.Helper()
	w.stop()
	w.start()
}

func call(method, requestID string) lifecycle.Call {
	return lifecycle.Call{Namespace: namespace, RequestID: requestID, Method: method, BodyHash: []byte("body"), HashVersion: 1}
}

func (w *world) sandbox() *recordv1.SandboxRecord {
	w.t.Helper()
	sandbox, err := w.sandboxes.Create(w.ctx, call("create", ""), &berthv1.SandboxSpec{})
	must(w.t, err)
	return sandbox
}

func shell(script string) *berthv1.JobSpec { return &berthv1.JobSpec{Shell: script} }

// reserved is a job that was written down and not begun, as a crash between the two leaves it.
func (w *world) reserved(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec) *recordv1.JobRecord {
	w.t.Helper()
	job, _, err := w.newJob(namespace, sandbox.GetId(), spec, true)
	must(w.t, err)
	w.setBeginning(job.GetId(), true)
	job, err = w.reserve(w.ctx, call("start", ""), job)
	must(w.t, err)
	return job
}

func (w *world) started(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.Start(w.ctx, call("start", ""), sandbox.GetId(), spec)
	must(w.t, err)
	return job
}

func (w *world) done(id string) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.Poll(w.ctx, namespace, id, soon)
	must(w.t, err)
	if !isDone(job) {
		w.t.Fatalf("job %s is %s after %s", id, job.GetState(), soon)
	}
	return job
}

func (w *world) record(id string) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.job(id)
	must(w.t, err)
	return job
}

func (w *world) wantExit(job *recordv1.JobRecord, code int32) {
	w.t.Helper()
	outcome := job.GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_EXITED || outcome.ExitCode == nil || outcome.GetExitCode() != code {
		w.t.Fatalf("job %s ended as %v, want exit %d", job.GetId(), outcome, code)
	}
}

func (w *world) wantCause(job *recordv1.JobRecord, cause berthv1.Cause, reason string) {
	w.t.Helper()
	outcome := job.GetOutcome()
	if outcome.GetCause() != cause || !bytes.HasPrefix([]byte(outcome.GetReason()), []byte(reason)) {
		w.t.Fatalf("job %s ended as %v, want %s %s", job.GetId(), outcome, cause, reason)
	}
}

// readAll reads a whole stream, with the ranges that are missing.
func (w *world) readAll(id string, stream berthv1.Stream) (data []byte, gaps int) {
	w.t.Helper()
	var offset uint64
	for {
		piece, err := w.ReadOutput(w.ctx, namespace, id, stream, offset, 1<<20, 0)
		if next, missing := firstKept(err); missing {
			offset, gaps = next, gaps+1
			continue
		}
		must(w.t, err)
		data, offset = append(data, piece.Data...), offset+uint64(len(piece.Data))
		if piece.EOF {
			return data, gaps
		}
		if len(piece.Data) == 0 {
			w.t.Fatalf("no byte at %d of %v, and no end", offset, piece.Facts)
		}
	}
}

// wait waits until something is so.
func (w *world) wait(what string, so func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(soon); !so(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not so after %s", what, soon)
		}
		pause(w.ctx, 5*time.Millisecond)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func bytesRange(from, to uint64) *berthv1.ByteRange { return &berthv1.ByteRange{From: from, To: to} }

func same(a, b proto.Message) bool { return proto.Equal(a, b) }
