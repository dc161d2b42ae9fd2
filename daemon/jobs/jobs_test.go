package jobs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	stdout = berthv1.Stream_STREAM_STDOUT
	stderr = berthv1.Stream_STREAM_STDERR
)

// firstKept is where an error says that output goes on.
func firstKept(err error) (uint64, bool) {
	var known *fault.Error
	if !errors.As(err, &known) || known.Reason != fault.OutputExpired {
		return 0, false
	}
	next, err := strconv.ParseUint(known.Metadata["first_kept"], 10, 64)
	return next, err == nil
}

func TestAJobThatWasReservedBeforeACrashIsStartedOnce(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	spec := &berthv1.JobSpec{
		Shell: `echo ran >> ran; printf %s "$WORD"; cat; exit 7`, SecretEnv: map[string]string{"WORD": "secret "},
		Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte("input")}},
	}
	job := w.reserved(sandbox, spec)
	if strings.Contains(job.String(), "secret ") || strings.Contains(job.String(), "input") {
		t.Errorf("a secret is in the record: %v", job)
	}
	w.restart()
	done := w.done(job.GetId())
	w.wantExit(done, 7)
	w.restart()
	background.Pause(w.ctx, 200*time.Millisecond)
	if data, _ := w.readAll(job.GetId(), stdout); string(data) != "secret input" {
		t.Errorf("it wrote %q", data)
	}
	ran, err := os.ReadFile(filepath.Join(sandbox.GetWorkspacePath(), "ran"))
	if err != nil || string(ran) != "ran\n" {
		t.Errorf("it ran as often as %q says (%v)", ran, err)
	}
	if len(done.GetSealedSecrets()) > 0 {
		t.Error("its secrets are still kept")
	}
}

func TestAJobThatItsGuestBeganBeforeACrashIsNotStartedAgain(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.reserved(sandbox, shell("echo ran >> ran; sleep 0.3; exit 3"))
	w.begin(sandbox, job)
	w.restart()
	w.wantExit(w.done(job.GetId()), 3)
	if ran, err := os.ReadFile(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err != nil || string(ran) != "ran\n" {
		t.Errorf("it ran as often as %q says (%v)", ran, err)
	}
}

func TestAJobWhoseDeadlineIsOverIsNotStarted(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.reserved(sandbox, &berthv1.JobSpec{Shell: "echo ran >> ran", StartDeadline: durationpb.New(time.Millisecond)})
	background.Pause(w.ctx, 10*time.Millisecond)
	w.restart()
	w.wantCause(w.done(job.GetId()), berthv1.Cause_CAUSE_FAILED_TO_START, "expired:")
	if _, err := os.Stat(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err == nil {
		t.Error("it ran all the same")
	}
}

func TestAJobThatWasReservedForAnotherBootIsLost(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	reserved := w.reserved(sandbox, shell("echo ran >> ran"))
	running := w.started(sandbox, shell("sleep 100"))
	must(t, w.fake.Harness().Kill(w.ctx, sandbox.GetMachineId()))
	w.rest(sandbox, berthv1.SandboxState_SANDBOX_STATE_STOPPED)

	begin := time.Now()
	unknown, err := w.Poll(w.ctx, namespace, running.GetId(), soon)
	if err != nil || unknown.GetState() != berthv1.JobState_JOB_STATE_UNKNOWN || time.Since(begin) > soon/2 {
		t.Errorf("a job of a stopped machine is %v (%v)", unknown, err)
	}
	if _, err := w.Stop(w.ctx, call("stop", ""), running.GetId(), nil); !fault.Is(err, fault.WrongState) {
		t.Errorf("stopping a job of a stopped machine: %v", err)
	}
	_, err = w.sandboxes.Resume(w.ctx, call("resume", ""), sandbox.GetId())
	must(t, err)
	for _, id := range []string{reserved.GetId(), running.GetId()} {
		w.wait("job "+id, func() bool { return record.IsDone(w.record(id)) })
		if outcome := w.record(id).GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_LOST || outcome.Exit != nil {
			t.Errorf("job %s ended as %v", id, outcome)
		}
	}
	if _, err := os.Stat(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err == nil {
		t.Error("the reserved job ran in another boot")
	}
}

func TestFiftyCallersOfOneRequestShareOneJob(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	ids := make(chan string, 50)
	var group sync.WaitGroup
	for range cap(ids) {
		group.Go(func() {
			job, err := w.Start(w.ctx, call("start", "r"), sandbox.GetId(), shell("echo ran >> ran"))
			if err != nil {
				t.Errorf("start: %v", err)
			}
			ids <- job.GetId()
		})
	}
	group.Wait()
	close(ids)
	first := <-ids
	for id := range ids {
		if id != first {
			t.Errorf("one caller got job %s, another %s", first, id)
		}
	}
	w.wantExit(w.done(first), 0)
	if ran, err := os.ReadFile(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err != nil || string(ran) != "ran\n" {
		t.Errorf("it ran as often as %q says (%v)", ran, err)
	}
}

func TestAPollWaitsAsLongAsItWasToldAndNoLonger(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.started(sandbox, shell("echo some; sleep 100"))
	w.wait("its output", func() bool {
		polled, err := w.Poll(w.ctx, namespace, job.GetId(), 0)
		return err == nil && polled.GetStdout().GetTotalBytes() == 5
	})
	for _, test := range []struct {
		name     string
		wait     time.Duration
		min, max time.Duration
	}{
		{"not at all", 0, 0, time.Second},
		{"a while", 200 * time.Millisecond, 200 * time.Millisecond, 5 * time.Second},
	} {
		begin := time.Now()
		polled, err := w.Poll(w.ctx, namespace, job.GetId(), test.wait)
		took := time.Since(begin)
		if err != nil || polled.GetState() != berthv1.JobState_JOB_STATE_RUNNING || took < test.min || took > test.max {
			t.Errorf("%s: %s after %s (%v)", test.name, polled.GetState(), took, err)
		}
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if polled, err := w.Poll(w.ctx, namespace, job.GetId(), soon); err != nil || !record.IsDone(polled) {
			t.Errorf("a poll of a job that ends meanwhile: %s (%v)", polled.GetState(), err)
		}
	}()
	stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), durationpb.New(time.Second))
	must(t, err)
	w.wantCause(stopped, berthv1.Cause_CAUSE_STOPPED, "stop_requested")
	<-ended
	begin := time.Now()
	if polled, err := w.Poll(w.ctx, namespace, job.GetId(), soon); err != nil || !record.IsDone(polled) || time.Since(begin) > soon/2 {
		t.Errorf("a poll of a job that is done: %s (%v)", polled.GetState(), err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	other := w.started(sandbox, shell("sleep 100"))
	if _, err := w.Poll(ctx, namespace, other.GetId(), soon); !errors.Is(err, context.Canceled) {
		t.Errorf("a poll whose caller has gone: %v", err)
	}
	if _, err := w.Poll(w.ctx, "other", other.GetId(), 0); !fault.Is(err, fault.JobNotFound) {
		t.Errorf("a poll from another namespace: %v", err)
	}
	if _, err := w.Poll(w.ctx, namespace, request.NewID("job"), 0); !fault.Is(err, fault.JobNotFound) {
		t.Errorf("a poll of no job: %v", err)
	}
	drained := make(chan error, 1)
	go func() {
		_, err := w.Poll(w.ctx, namespace, other.GetId(), soon)
		drained <- err
	}()
	background.Pause(w.ctx, 50*time.Millisecond)
	w.Drain()
	if err := <-drained; !fault.Is(err, fault.Stopping) {
		t.Errorf("a poll while the broker is stopped: %v", err)
	}
}

func TestAReceiptSaysWhatItDropped(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.done(w.started(sandbox, &berthv1.JobSpec{
		Shell: "for i in $(seq 10000 19999); do echo $i; done; echo oops >&2; exit 5", OutputLimitBytes: 1200,
	}).GetId())
	w.wantExit(job, 5)
	stats := job.GetStdout()
	if stats.GetTotalBytes() != 60000 || len(stats.GetKept()) != 2 || stats.GetDroppedBytes() != 60000-output.Length(stats.GetKept()) ||
		output.Length(stats.GetKept()) > 1200 || stats.GetKept()[0].GetFrom() != 0 || stats.GetKept()[1].GetTo() != 60000 || !stats.GetSealed() {
		t.Fatalf("the stats are %v", stats)
	}
	for _, when := range []string{"at once", "after a restart"} {
		data, gaps := w.readAll(job.GetId(), stdout)
		head, tail := stats.GetKept()[0], stats.GetKept()[1]
		var all strings.Builder
		for i := 10000; i < 20000; i++ {
			fmt.Fprintln(&all, i)
		}
		if want := all.String()[:head.GetTo()] + all.String()[tail.GetFrom():]; gaps != 1 || string(data) != want {
			t.Errorf("%s: %d gaps, %d bytes", when, gaps, len(data))
		}
		ran, err := w.fromReceipt(job, 100)
		if err != nil || string(ran.Stdout.GetHead())+string(ran.Stdout.GetTail()) != all.String()[:50]+all.String()[60000-50:] || ran.Stdout.GetTailOffset() != 60000-50 {
			t.Errorf("%s: the head and tail are %v (%v)", when, ran, err)
		}
		tails, err := w.Tails(w.ctx, job, 12)
		if err != nil || string(tails.Stdout.GetTail()) != "19998\n19999\n" || string(tails.Stderr.GetHead()) != "oops\n" {
			t.Errorf("%s: the tails are %v (%v)", when, tails, err)
		}
		for offset, want := range map[uint64]fault.Reason{head.GetTo(): fault.OutputExpired, 60001: fault.InvalidField} {
			if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, offset, 10, 0); !fault.Is(err, want) {
				t.Errorf("%s: reading at %d: %v, want %s", when, offset, err, want)
			}
		}
		w.restart()
	}
}

func TestAJobThatKeepsNoOutputHasItsOutcome(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	keep := false
	job := w.done(w.started(w.sandbox(), &berthv1.JobSpec{Shell: "echo some; exit 4", Keep: &berthv1.JobSpec_KeepOutput{KeepOutput: keep}}).GetId())
	w.wantExit(job, 4)
	if job.GetStdout().GetTotalBytes() != 5 || job.GetStdout().GetDroppedBytes() != 5 || len(job.GetStdout().GetKept()) > 0 {
		t.Errorf("the stats are %v", job.GetStdout())
	}
	if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, 0, 10, 0); !fault.Is(err, fault.OutputExpired) {
		t.Errorf("reading it: %v", err)
	}
}

func TestAFullDiskLosesOutputAndNeverTheOutcome(t *testing.T) {
	testenv.Root(t)
	for name, options := range map[string]string{"no room for the bytes": "size=64k", "no room for a file": "nr_inodes=1"} {
		t.Run(name, func(t *testing.T) {
			w := newHarness(t)
			if err := syscall.Mount("tmpfs", w.outputDir, "tmpfs", 0, options); err != nil {
				t.Skipf("a tmpfs cannot be mounted: %v", err)
			}
			t.Cleanup(func() { must(t, syscall.Unmount(w.outputDir, syscall.MNT_DETACH)) })
			job := w.done(w.started(w.sandbox(), shell("head -c 1000000 /dev/zero; exit 9")).GetId())
			w.wantExit(job, 9)
			stats := job.GetStdout()
			if stats.GetTotalBytes() != 1000000 || stats.GetDroppedBytes() == 0 || stats.GetDroppedBytes()+output.Length(stats.GetKept()) != 1000000 {
				t.Errorf("the stats are %v", stats)
			}
			for _, kept := range stats.GetKept() {
				if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, kept.GetFrom(), 10, 0); err != nil {
					t.Errorf("reading what is kept: %v", err)
				}
			}
			if !strings.Contains(w.log.String(), "output is not kept") {
				t.Error("nothing was logged")
			}
		})
	}
}

func TestReceiptsAreDroppedWithTheirOutputWhenTheirTimeIsOver(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	old := w.done(w.started(sandbox, shell("echo old")).GetId())
	between := time.Now()
	young := w.done(w.started(sandbox, shell("echo young")).GetId())
	open := w.started(sandbox, shell("sleep 100"))
	if removed, err := w.RemoveReceipts(w.ctx, between, 10); err != nil || removed != 1 {
		t.Fatalf("%d receipts were dropped (%v), want 1", removed, err)
	}
	if _, err := w.Poll(w.ctx, namespace, old.GetId(), 0); !fault.Is(err, fault.JobNotFound) {
		t.Errorf("the old one: %v", err)
	}
	if _, err := os.Stat(filepath.Join(w.outputDir, old.GetId())); !os.IsNotExist(err) {
		t.Errorf("its output: %v", err)
	}
	if data, _ := w.readAll(young.GetId(), stdout); string(data) != "young\n" {
		t.Errorf("the young one has %q", data)
	}
	if bytes := w.OutputBytes(); bytes != 6 {
		t.Errorf("%d bytes of output are kept, want 6", bytes)
	}
	if removed, err := w.RemoveReceipts(w.ctx, time.Now().Add(time.Hour), 10); err != nil || removed != 1 {
		t.Errorf("%d receipts were dropped (%v), want 1", removed, err)
	}
	if job, err := w.Poll(w.ctx, namespace, open.GetId(), 0); err != nil || record.IsDone(job) {
		t.Errorf("the open job: %v (%v)", job, err)
	}
}

func TestTheOldestReceiptsGoWhenThereAreTooMany(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	var ids []string
	for range 3 {
		ids = append(ids, w.done(w.started(sandbox, shell("echo it")).GetId()).GetId())
	}
	for want := range []int{2, 1} { // the first time more go than at once, and then there are no more too many
		removed, err := w.RemoveExcess(w.ctx, 1, 1)
		if err != nil || removed != 1 {
			t.Fatalf("%d receipts were dropped at look %d (%v), want 1", removed, want, err)
		}
	}
	if removed, err := w.RemoveExcess(w.ctx, 1, 1); err != nil || removed != 0 {
		t.Errorf("%d receipts were dropped (%v), want 0", removed, err)
	}
	for i, id := range ids {
		_, err := w.Poll(w.ctx, namespace, id, 0)
		if gone := fault.Is(err, fault.JobNotFound); gone != (i < 2) || err != nil && !gone {
			t.Errorf("job %d: %v", i, err)
		}
	}
	if bytes := w.OutputBytes(); bytes != 3 {
		t.Errorf("%d bytes of output are kept, want 3", bytes)
	}
}

func TestTheOldestOutputGoesWhenThereIsTooMuch(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	var ids []string
	for range 4 {
		ids = append(ids, w.done(w.started(sandbox, shell("head -c 1000 /dev/zero")).GetId()).GetId())
	}
	must(t, w.BoundOutput(w.ctx, 4000))
	if bytes := w.OutputBytes(); bytes != 4000 {
		t.Fatalf("%d bytes of output are kept, want all 4000", bytes)
	}
	last := w.done(w.started(sandbox, shell("head -c 1000 /dev/zero")).GetId())
	must(t, w.BoundOutput(w.ctx, 4000))
	if bytes := w.OutputBytes(); bytes != 3000 { // some room is left
		t.Errorf("%d bytes of output are kept, want 3000", bytes)
	}
	for i, id := range append(ids, last.GetId()) {
		job, err := w.Poll(w.ctx, namespace, id, 0)
		must(t, err)
		_, readErr := w.ReadOutput(w.ctx, namespace, id, stdout, 0, 10, 0)
		expired := fault.Is(readErr, fault.OutputExpired)
		if stats := job.GetStdout(); expired != (i < 2) || readErr != nil && !expired ||
			stats.GetTotalBytes() != 1000 || (stats.GetDroppedBytes() == 1000) != expired || job.GetOutcome().GetExitCode() != 0 {
			t.Errorf("job %d: %v, %v", i, stats, readErr)
		}
	}
}

func TestASandboxHasNoMoreOpenJobsThanItMay(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		for range start.MaxOpenJobs {
			if err := tx.PutJob(&recordv1.JobRecord{
				Id: request.NewID("job"), Namespace: namespace, SandboxId: sandbox.GetId(), Spec: shell("true"),
				State: berthv1.JobState_JOB_STATE_RESERVED, MachineId: "m_other", // so that nobody reconciles it
			}, "", ""); err != nil {
				return err
			}
		}
		return nil
	}))
	if _, err := w.Start(w.ctx, call("start", ""), sandbox.GetId(), shell("true")); !fault.Is(err, fault.TooManyJobs) {
		t.Errorf("one more job: %v", err)
	}
}

func TestJobsOfADestroyedSandboxKeepWhatIsKnownOfThem(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	running := w.started(sandbox, shell("echo some; sleep 100"))
	reserved := w.reserved(sandbox, shell("true"))
	w.wait("its output", func() bool {
		polled, err := w.Poll(w.ctx, namespace, running.GetId(), 0)
		return err == nil && polled.GetStdout().GetTotalBytes() == 5
	})
	_, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId())
	must(t, err)
	w.wantCause(w.record(running.GetId()), berthv1.Cause_CAUSE_STOPPED, "destroyed")
	w.wantCause(w.record(reserved.GetId()), berthv1.Cause_CAUSE_LOST, "machine_gone")
	if data, _ := w.readAll(running.GetId(), stdout); string(data) != "some\n" {
		t.Errorf("it wrote %q", data)
	}
	if _, err := w.Start(w.ctx, call("start", ""), sandbox.GetId(), shell("true")); !fault.Is(err, fault.WrongState) {
		t.Errorf("a job in a destroyed sandbox: %v", err)
	}
}

func TestAJobThatIsOverTakesNoInputEvenWhenItsMachineIsGone(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.started(sandbox, &berthv1.JobSpec{Shell: "cat", Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}})
	_, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId())
	must(t, err)
	if _, err := w.WriteInput(w.ctx, call("input", ""), job.GetId(), 0, []byte("late"), false); !fault.Is(err, fault.WrongState) {
		t.Errorf("its input is refused with %v, want WRONG_STATE: it would be fed again and again", err)
	}
}

func TestAJobThatLeftAChildBehindIsSealedWhenItsSandboxIsDestroyed(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.started(sandbox, shell("sleep 100 & echo left"))
	done := w.done(job.GetId())
	w.wantExit(done, 0)
	if done.GetStdout().GetSealed() {
		t.Fatal("its output is sealed although a child holds it")
	}
	_, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId())
	must(t, err)
	if data, _ := w.readAll(job.GetId(), stdout); string(data) != "left\n" {
		t.Errorf("it wrote %q", data)
	}
	w.wantExit(w.record(job.GetId()), 0)
}

func TestJobsOfAMuteGuestThatIsDestroyedAreLost(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.started(sandbox, shell("sleep 100"))
	must(t, w.fake.Harness().Vanish(w.ctx, sandbox.GetMachineId()))
	w.rest(sandbox, berthv1.SandboxState_SANDBOX_STATE_LOST)
	done := w.record(job.GetId())
	w.wantCause(done, berthv1.Cause_CAUSE_LOST, "machine_gone")
	if done.GetOutcome().Exit != nil {
		t.Error("an exit code was made up")
	}
	if _, err := w.Run(w.ctx, call("run", ""), sandbox.GetId(), shell("true"), 100); !fault.Is(err, fault.MachineGone) {
		t.Errorf("a command in a lost sandbox: %v", err)
	}
}

func TestAnAttachedCommandEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	ran, err := w.Run(w.ctx, call("run", ""), sandbox.GetId(), shell("echo hello; echo oops >&2; exit 6"), 3)
	must(t, err)
	w.wantExit(ran.Job, 6)
	if got := string(ran.Stdout.GetHead()) + "|" + string(ran.Stdout.GetTail()); len(got) != 4 || ran.Job.GetStdout().GetTotalBytes() != 6 {
		t.Errorf("its output is %q, its stats %v", got, ran.Job.GetStdout())
	}
	ctx, cancel := context.WithTimeout(w.ctx, 200*time.Millisecond)
	defer cancel()
	_, err = w.Run(ctx, call("run", ""), sandbox.GetId(), shell("echo $$ > pid; sleep 100"), 100)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the error is %v", err)
	}
	w.wait("its end", func() bool {
		jobs, _, _, err := w.List(namespace, Filter{SandboxID: sandbox.GetId(), States: []berthv1.JobState{berthv1.JobState_JOB_STATE_DONE}}, store.Page{Size: 10})
		return err == nil && len(jobs) == 2
	})
	text, err := os.ReadFile(filepath.Join(sandbox.GetWorkspacePath(), "pid"))
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	must(t, err)
	w.wait("its process's end", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

func TestAnAnsweredCommandIsKnownAfterARestart(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	ran, err := w.Run(w.ctx, call("run", ""), w.sandbox().GetId(), shell("exit 9"), 100)
	must(t, err)
	id := ran.Job.GetId()
	w.wait("its record, which is written behind", func() bool { return w.unrecorded.Find(id) == nil })
	w.restart() // its guest was told to forget it by now
	job := w.done(id)
	w.wantExit(job, 9)
	if !same(job.GetOutcome(), ran.Job.GetOutcome()) {
		t.Errorf("it ended as %v and now as %v", ran.Job.GetOutcome(), job.GetOutcome())
	}
}

func TestAnAcknowledgedCommandIsForgottenOnlyAfterItsRecordIsInTheLedger(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job, command, err := w.unrecorded.Add(call("exec", ""), sandbox.GetId(), shell("exit 4"))
	must(t, err)
	must(t, w.links.Call(w.ctx, job.GetMachineId(), func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Start(ctx, &guestv1.StartRequest{JobId: job.GetId(), Command: command})
		return err
	}))
	status, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), soon)
	must(t, err)
	busy, release := make(chan struct{}), make(chan struct{})
	go func() {
		_ = w.ledger.Update(w.ctx, func(*store.Tx) error {
			close(busy)
			<-release
			return nil
		})
	}()
	<-busy // nothing is committed from here on
	w.Acknowledge(w.unrecorded.Done(job, status), true)
	background.Pause(w.ctx, 500*time.Millisecond) // several rounds of what would tell it
	if _, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), 0); err != nil {
		t.Errorf("its guest was told to forget it while the ledger did not know its end: %v", err)
	}
	close(release)
	w.wait("its guest to forget it", func() bool {
		_, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), 0)
		return errors.Is(err, guestlink.ErrNoJob)
	})
	w.wantExit(w.record(job.GetId()), 4)
}

func TestAChangeBetweenTheReadAndTheWaitIsSeen(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	job := w.reserved(w.sandbox(), shell("true"))
	looks := 0
	ctx, cancel := context.WithTimeout(w.ctx, soon/4)
	defer cancel()
	_, err := w.jobs.Until(ctx, job, func(seen *recordv1.JobRecord) bool {
		if looks++; looks == 1 { // it ends just after it was read, and before anybody waits
			_, err := w.receipts.Close(w.ctx, job.GetId(), record.Lost("test: so"))
			must(t, err)
		}
		return record.IsDone(seen)
	})
	if err != nil || looks != 2 {
		t.Errorf("looked %d times (%v), want 2", looks, err)
	}
}

func TestAPinnedJobIsForgottenWhenTheLastReaderIsDone(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.started(sandbox, shell("true"))
	first, second := w.receipts.Pin(job), w.receipts.Pin(job)
	w.done(job.GetId())
	status, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), soon)
	must(t, err)
	_, err = w.receipts.Import(w.ctx, job.GetMachineId(), status) // and its guest may forget it now
	must(t, err)
	first()
	if _, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), 0); err != nil {
		t.Errorf("it was forgotten while somebody reads: %v", err)
	}
	second()
	w.wait("it to be forgotten", func() bool {
		_, err := w.links.WaitJob(w.ctx, job.GetMachineId(), job.GetId(), 0)
		return err != nil
	})
	if !w.receipts.MayForget(job.GetId()) {
		t.Error("it is still pinned")
	}
}

// The record of an attached command's end is written behind its answer, and nobody else is told of it.
func TestAPollOfAnAttachedCommandAnswersWhenItEnds(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	fifo := filepath.Join(sandbox.GetWorkspacePath(), "go")
	must(t, syscall.Mkfifo(fifo, 0o600))
	peer := &listener{started: make(chan string, 1)}
	ended := make(chan error, 1)
	go func() {
		ended <- w.Exec(w.ctx, call("exec", ""), sandbox.GetId(), shell("read line < go; exit 4"), peer)
	}()
	job, err := w.jobs.Find(namespace, <-peer.started)
	must(t, err)
	var seen sync.Once
	job, err = w.jobs.Until(w.ctx, job, func(job *recordv1.JobRecord) bool {
		seen.Do(func() { must(t, os.WriteFile(fifo, []byte("\n"), 0o600)) }) // it ends only when it is waited for
		return record.IsDone(job)
	})
	must(t, err)
	w.wantExit(job, 4)
	must(t, <-ended)
}

// listener is a peer that only listens.
type listener struct {
	started chan string
}

func (l *listener) Started(job *recordv1.JobRecord, _ uint64) error {
	l.started <- job.GetId()
	return nil
}
func (l *listener) Chunk(*berthv1.OutputChunk) error         { return nil }
func (l *listener) Gap(*berthv1.OutputGap) error             { return nil }
func (l *listener) InputTaken(uint64) error                  { return nil }
func (l *listener) Done(*recordv1.JobRecord) error           { return nil }
func (l *listener) Receive() (*guestv1.AttachRequest, error) { return nil, io.EOF }
