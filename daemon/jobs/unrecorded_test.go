package jobs

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// blocked runs, without a request id, a command that exits when release is called, and returns its job once
// it is listed and runs.
func (w *harness) blocked(ctx context.Context, sandbox *recordv1.SandboxRecord, script string) (job *recordv1.JobRecord, result chan runAnswer, release func()) {
	w.t.Helper()
	fifo := filepath.Join(sandbox.GetWorkspacePath(), "go")
	must(w.t, syscall.Mkfifo(fifo, 0o600))
	result = make(chan runAnswer, 1)
	go func() {
		ran, err := w.Run(ctx, call("run", ""), sandbox.GetId(), shell("read line < go; "+script), 100)
		result <- runAnswer{ran, err}
	}()
	w.wait("the command to be listed", func() bool {
		listed, _, _, err := w.List(namespace, Filter{SandboxID: sandbox.GetId()}, store.Page{Size: 10})
		must(w.t, err)
		if len(listed) == 1 {
			job = listed[0]
		}
		return job != nil
	})
	var writer *os.File
	w.wait("the command to read", func() (reads bool) {
		var err error
		writer, err = os.OpenFile(fifo, os.O_WRONLY|syscall.O_NONBLOCK, 0)
		return err == nil
	})
	w.t.Cleanup(func() { _ = writer.Close() })
	return job, result, func() {
		_, err := writer.WriteString("\n")
		must(w.t, err)
	}
}

type runAnswer struct {
	ran *RunResult
	err error
}

func TestACommandWithoutARequestIDIsListedCountedAndStopped(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job, result, _ := w.blocked(w.ctx, sandbox, "exit 3")
	if open, err := w.Open(sandbox.GetId()); err != nil || open != 1 || job.GetState() != berthv1.JobState_JOB_STATE_RUNNING {
		t.Errorf("%d jobs are open (%v), and it is %s", open, err, job.GetState())
	}
	stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), durationpb.New(0))
	must(t, err)
	w.wantCause(stopped, berthv1.Cause_CAUSE_STOPPED, "stop_requested")
	got := <-result
	must(t, got.err)
	w.wantCause(got.ran.Job, berthv1.Cause_CAUSE_STOPPED, "stop_requested")
}

func TestACommandWithoutARequestIDIsSuspendedWithItsMachineAndAnswered(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	_, result, release := w.blocked(w.ctx, sandbox, "echo it; exit 3")
	_, err := w.sandboxes.Suspend(w.ctx, call("suspend", ""), sandbox.GetId())
	must(t, err)
	_, err = w.sandboxes.Resume(w.ctx, call("resume", ""), sandbox.GetId())
	must(t, err)
	release()
	got := <-result
	must(t, got.err)
	w.wantExit(got.ran.Job, 3)
	if string(got.ran.Stdout.GetHead()) != "it\n" {
		t.Errorf("its output is %q", got.ran.Stdout.GetHead())
	}
}

func TestACommandWhoseCallerLeavesIsFoundAtEveryInstant(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	ctx, leave := context.WithCancel(w.ctx)
	job, result, _ := w.blocked(ctx, w.sandbox(), "exit 3")
	leave()
	for ended := false; !ended; {
		found, err := w.jobs.Find(namespace, job.GetId())
		must(t, err)
		ended = record.IsDone(found)
	}
	if got := <-result; !errors.Is(got.err, context.Canceled) {
		t.Errorf("its caller is told %v", got.err)
	}
	w.wantCause(w.done(job.GetId()), berthv1.Cause_CAUSE_STOPPED, "disconnected")
}

func TestWhatARunSaysIsKeptCanBeRead(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	ran, err := w.Run(w.ctx, call("run", ""), w.sandbox().GetId(), shell("echo hello"), 100)
	must(t, err)
	stats := ran.Job.GetStdout()
	if len(stats.GetKept()) > 0 || stats.GetTotalBytes() != 6 || stats.GetDroppedBytes() != 6 {
		t.Errorf("its reply says %v", stats)
	}
	if polled := w.done(ran.Job.GetId()); !same(polled.GetStdout(), stats) {
		t.Errorf("its receipt says %v", polled.GetStdout())
	}
}
