package hostfaults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// disk is a small file system of its own, on which a broker's state lies.
type disk struct{ dir string }

// newDisk mounts one of that many bytes until the test ends. Make it before its broker, so that it goes
// after that.
func newDisk(t *testing.T, bytes int) disk {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "berth-d-")
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("berth-around", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", bytes)); err != nil {
		t.Fatal(errors.Join(err, os.Remove(dir)))
	}
	t.Cleanup(func() {
		if err := errors.Join(syscall.Unmount(dir, 0), os.Remove(dir)); err != nil {
			t.Errorf("take the test's disk away: %v", err)
			_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		}
	})
	return disk{dir}
}

// holds makes the disk the place of the broker's state. A link, so that the broker's own directory can
// be removed around it.
func (d disk) holds(t *testing.T, b *fixture.Broker) {
	t.Helper()
	if err := os.Symlink(d.dir, b.State()); err != nil {
		t.Fatal(err)
	}
}

// fill leaves no byte free.
func (d disk) fill(t *testing.T) {
	t.Helper()
	file, err := os.OpenFile(d.filler(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(file, zeros{})
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("filling the disk ended with %v", err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
}

func (d disk) free(t *testing.T) {
	t.Helper()
	if err := os.Remove(d.filler()); err != nil {
		t.Fatal(err)
	}
}

func (d disk) filler() string { return filepath.Join(d.dir, "filler") }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// onDisk starts a broker whose state lies on a disk of that many bytes.
func onDisk(t *testing.T, bytes int) (*harness, disk) {
	t.Helper()
	programs := asked(t)
	d := newDisk(t, bytes)
	b := fixture.NewBroker(t, programs, "--provider", "local")
	d.holds(t, b)
	w := newHarness(t, b)
	w.Start(t)
	return w, d
}

const (
	noSpace   = "no space left on device"
	diskBytes = 48 << 20    // a ledger and its reserve, some machines, and what a few jobs write
	refusedIn = time.Minute // a call on a full disk is refused; it does not hang
)

// refusedWhileFull makes a call again and again until the full disk shows: what free pages the ledger has
// may serve some first.
func (w *harness) refusedWhileFull(t *testing.T, doing string, call func(ctx context.Context, try int) error) {
	t.Helper()
	for try := range 2000 {
		ctx, cancel := context.WithTimeout(w.ctx, refusedIn)
		err := call(ctx, try)
		cancel()
		if err == nil {
			continue
		}
		reason := berthv1.Reason_REASON_STORE_FULL
		if client.Is(err, berthv1.Reason_REASON_QUOTA_EXCEEDED) {
			reason = berthv1.Reason_REASON_QUOTA_EXCEEDED // the machine's disk is the same one, and was looked at first
		}
		wantRefused(t, doing, err, codes.ResourceExhausted, reason, "free disk space")
		return
	}
	t.Errorf("%s was never refused on a full disk", doing)
}

func TestAFullDiskRefusesWritesServesReadsAndLosesNothing(t *testing.T) {
	t.Parallel()
	w, d := onDisk(t, diskBytes)
	sandbox, doomed, idle := w.create(t), w.create(t), w.create(t)
	type promise struct {
		job, output string
		code        int32
	}
	var promised []promise
	for i := range int32(5) { // these end while the disk is full
		promised = append(promised, promise{w.begin(t, sandbox, fmt.Sprintf("echo begun; while [ ! -e go ]; do sleep 0.05; done; exit %d", i)), "begun\n", i})
	}
	endless := w.begin(t, sandbox, "sleep 1000")
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	w.run(t, sandbox, "echo warm") // the first run of all opens what later ones find open
	d.fill(t)

	var acknowledged []string
	w.refusedWhileFull(t, "StartJob", func(ctx context.Context, try int) error {
		reply, err := w.impatient.Jobs().StartJob(ctx, &berthv1.StartJobRequest{
			RequestId: fmt.Sprintf("full-%d", try), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "exit 7"},
		})
		switch outcome := reply.GetJob().GetOutcome(); {
		case err != nil:
		case outcome.GetCause() == berthv1.Cause_CAUSE_FAILED_TO_START: // its machine had no room, and it never will run
			if !strings.Contains(outcome.GetReason(), "free disk space") {
				t.Errorf("a job that found no room ended as %v", outcome)
			}
		default:
			acknowledged = append(acknowledged, reply.GetJob().GetId())
		}
		return err
	})
	w.refusedWhileFull(t, "RunCommand with a request id", func(ctx context.Context, try int) error {
		_, err := w.impatient.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
			RequestId: fmt.Sprintf("run-%d", try), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "true"},
		})
		return err
	})
	w.refusedWhileFull(t, "CreateSandbox", func(ctx context.Context, _ int) error {
		_, err := w.impatient.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
		return err
	})
	// What ends something is done. What it frees is taken at once.
	stop := &berthv1.StopJobRequest{RequestId: "stop-on-full", JobId: endless}
	if stopped, err := w.impatient.Jobs().StopJob(w.ctx, stop); err != nil || stopped.GetJob().GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
		t.Errorf("StopJob on a full disk: %v (%v)", stopped.GetJob().GetOutcome(), err)
	}
	d.fill(t)
	if gone, err := w.impatient.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: doomed}); err != nil ||
		gone.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		t.Errorf("DestroySandbox on a full disk: %v (%v)", gone.GetSandbox().GetState(), err)
	}
	d.fill(t)
	w.refusedWhileFull(t, "CreateSandbox after what freed some space", func(ctx context.Context, _ int) error {
		_, err := w.impatient.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
		return err
	})

	// The jobs end now, and commands whose callers are attached run: they need no ledger to begin, and their
	// callers are told how they ended before that is written down.
	failures := len(w.logged(t, noSpace))
	d.letGo(t, w, sandbox)
	var ran []string
	for range 100 {
		reply, err := w.impatient.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "exit 9"}})
		if err != nil || reply.GetJob().GetOutcome().GetExitCode() != 9 {
			t.Fatalf("an attached command on a full disk ended as %v (%v)", reply.GetJob().GetOutcome(), err)
		}
		ran = append(ran, reply.GetJob().GetId())
	}
	eventually(t, "the broker has tried to write down what has ended", func() error {
		if len(w.logged(t, noSpace)) == failures {
			return errors.New("its log does not say so")
		}
		return nil
	})
	w.wantReads(t, sandbox, finished)
	if got := w.state(t, sandbox); got != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("the sandbox is %s on a full disk", got)
	}

	before := w.Pid()
	d.free(t)
	for _, p := range promised {
		job := w.wantExit(t, p.job, p.code)
		w.wantHonest(t, job, p.output)
	}
	for _, job := range acknowledged {
		w.wantExit(t, job, 7)
	}
	for _, job := range ran {
		w.wantExit(t, job, 9)
	}
	if stopped, err := w.Jobs().StopJob(w.ctx, stop); err != nil || stopped.GetJob().GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
		t.Errorf("the stopped job is %v (%v)", stopped.GetJob().GetOutcome(), err)
	}
	w.wantExit(t, w.begin(t, sandbox, "exit 4"), 4)
	another := w.create(t)
	if w.Pid() != before || len(w.logged(t, "ending; a restart finds out")) > 0 {
		t.Errorf("the broker did not live through a full disk")
	}

	w.Kill(t)
	w.Start(t)
	for _, p := range promised {
		w.wantExit(t, p.job, p.code)
	}
	for _, job := range ran {
		w.wantExit(t, job, 9)
	}
	for _, id := range []string{sandbox, doomed, idle, another} {
		w.destroy(t, id)
	}
	w.quiet(t)
}

// letGo lets the jobs that wait for the file go end. An empty file needs no room.
func (d disk) letGo(t *testing.T, w *harness, sandbox string) {
	t.Helper()
	got, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(got.GetSandbox().GetWorkspacePath(), "go"), nil, 0o600); err != nil {
		t.Fatalf("let the jobs go: %v", err)
	}
}

// wantReads checks that what only reads goes on.
func (w *harness) wantReads(t *testing.T, sandbox, finished string) {
	t.Helper()
	if list, err := w.impatient.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{}); err != nil || len(list.GetSandboxes()) < 2 {
		t.Errorf("list sandboxes: %v (%v)", list, err)
	}
	if list, err := w.impatient.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox}); err != nil || len(list.GetJobs()) == 0 {
		t.Errorf("list jobs: %v (%v)", list, err)
	}
	w.wantExit(t, finished, 3)
	w.wantOutput(t, finished, "whole\n")
}

// wantHonest checks that a job's output is what it wrote, or counted as dropped.
func (w *harness) wantHonest(t *testing.T, job *berthv1.Job, wrote string) {
	t.Helper()
	stats := job.GetStdout()
	if stats.GetTotalBytes() != uint64(len(wrote)) {
		t.Errorf("job %s wrote %d bytes, and %d are counted", job.GetId(), len(wrote), stats.GetTotalBytes())
	}
	data, gaps, err := w.ReadAllOutput(w.ctx, job.GetId(), berthv1.Stream_STREAM_STDOUT)
	if err != nil || uint64(len(data))+stats.GetDroppedBytes() != uint64(len(wrote)) || !strings.Contains(wrote, string(data)) {
		t.Errorf("job %s wrote %d bytes: %d are kept, %d dropped (gaps %v, %v)", job.GetId(), len(wrote), len(data), stats.GetDroppedBytes(), gaps, err)
	}
}

func TestWhatFillsTheDiskCanBeStoppedAndRemoved(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ name, command string }{
		{"a job that ends when it is told to", "while :; do cat /dev/zero >>full; sleep 0.01; done"},
		{"a job that has to be killed", "trap '' TERM; while :; do cat /dev/zero >>full; sleep 0.01; done"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w, d := onDisk(t, diskBytes)
			sandbox := w.create(t)
			culprit := w.begin(t, sandbox, test.command)
			eventually(t, "the job has filled the disk", func() error {
				var stat syscall.Statfs_t
				if err := syscall.Statfs(d.dir, &stat); err != nil {
					return err
				}
				if stat.Bavail > 0 {
					return fmt.Errorf("%d blocks are free", stat.Bavail)
				}
				return nil
			})
			w.refusedWhileFull(t, "CreateSandbox", func(ctx context.Context, _ int) error {
				_, err := w.impatient.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
				return err
			})
			stopped, err := w.impatient.Jobs().StopJob(w.ctx, &berthv1.StopJobRequest{
				RequestId: "stop", JobId: culprit, Grace: durationpb.New(time.Second),
			})
			if err != nil || stopped.GetJob().GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
				t.Errorf("stopping what fills the disk: %v (%v)", stopped.GetJob().GetOutcome(), err)
			}
			d.fill(t)
			w.destroy(t, sandbox)
			d.free(t)
			w.destroy(t, w.create(t))
			w.quiet(t)
		})
	}
}

func TestABrokerBootsOnAFullDisk(t *testing.T) {
	t.Parallel()
	w, d := onDisk(t, diskBytes)
	sandbox := w.create(t)
	job := w.begin(t, sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 6")
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	second := w.create(t)
	w.Kill(t)
	d.fill(t)
	d.letGoAt(t, w, sandbox)
	w.Start(t)
	w.wantReads(t, sandbox, finished)
	d.free(t)
	w.wantHonest(t, w.wantExit(t, job, 6), "begun\n")
	w.destroy(t, sandbox)
	w.destroy(t, second)
	w.quiet(t)
}

// letGoAt is letGo while the broker is away.
func (d disk) letGoAt(t *testing.T, w *harness, _ string) {
	t.Helper()
	workspaces, err := filepath.Glob(filepath.Join(w.State(), "local", "*", "workspace"))
	if err != nil || len(workspaces) == 0 {
		t.Fatalf("there is no workspace in %s (%v)", w.State(), err)
	}
	for _, workspace := range workspaces {
		if err := os.WriteFile(filepath.Join(workspace, "go"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestANewLedgerOnAFullDiskIsRefusedInOneLine(t *testing.T) {
	t.Parallel()
	programs := asked(t)
	d := newDisk(t, 1<<20)
	b := fixture.NewBroker(t, programs, "--provider", "local")
	d.holds(t, b)
	d.fill(t)
	wantOneLine(t, b, noSpace, "free disk space")
	d.free(t)
	b.Start(t)
	b.Stop(t)
}

// wantOneLine starts a broker that cannot serve: it says why in one line, and exits with 1.
func wantOneLine(t *testing.T, b *fixture.Broker, words ...string) {
	t.Helper()
	out, err := b.Command("--log-level", "error").CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err == nil || len(lines) != 1 || !strings.HasPrefix(lines[0], "berthd: ") {
		t.Errorf("it says %q (%v), want one line that begins with berthd:", out, err)
	}
	for _, word := range words {
		if !strings.Contains(string(out), word) {
			t.Errorf("it says %q, want %q in it", out, word)
		}
	}
}

func TestAGuestOnAFullDiskCountsWhatItDrops(t *testing.T) {
	t.Parallel()
	w, d := onDisk(t, diskBytes)
	sandbox := w.create(t)
	const wrote = 4 << 20
	job := w.begin(t, sandbox, fmt.Sprintf("while [ ! -e go ]; do sleep 0.05; done; head -c %d /dev/zero; exit 5", wrote))
	// It writes through its pipe, so that only the guest's own files need room.
	d.fill(t)
	d.letGo(t, w, sandbox)
	// Its outcome is the guest's to write down, and needs room too: it waits for that, and is true.
	eventually(t, "the command has ended", func() error {
		if out := w.Processes(); commandRuns(out) {
			return errors.New("it runs")
		}
		return nil
	})
	d.free(t)
	done := w.wantExit(t, job, 5)
	if stats := done.GetStdout(); stats.GetTotalBytes() != wrote || stats.GetDroppedBytes() == 0 {
		t.Errorf("of %d bytes %d are counted and %d dropped, although there was no room for any", wrote, stats.GetTotalBytes(), stats.GetDroppedBytes())
	}
	w.wantExit(t, w.begin(t, sandbox, "exit 8"), 8)
	w.destroy(t, sandbox)
	w.quiet(t)
}

// commandRuns reports whether one of the processes is the command that was waiting for the file go.
func commandRuns(map[int]string) bool {
	entries, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, entry := range entries {
		if text, err := os.ReadFile(entry); err == nil && strings.Contains(string(text), "head\x00-c\x00"+fmt.Sprint(4<<20)) {
			return true
		}
	}
	return false
}
