package api

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// The table's rows of what a command starts and leaves.

func (w *harness) stop(t *testing.T, job string, grace time.Duration) *berthv1.Job {
	t.Helper()
	reply, err := w.Jobs().StopJob(w.ctx, &berthv1.StopJobRequest{JobId: job, Grace: durationpb.New(grace)})
	if err != nil {
		t.Fatalf("stop job %s: %v", job, err)
	}
	return reply.GetJob()
}

func daemonised(t *testing.T, g *ground) {
	marker := "sleep " + unique()
	job := g.start(t, g.sandbox, "(while [ ! -e later ]; do sleep 0.05; done; echo late; exec "+marker+") & echo hi").GetId()
	done := g.wait(t, job)
	if !done.GetOutcome().GetOutputStillOpen() {
		t.Fatalf("it was done before its child has written, with %v", done.GetOutcome())
	}
	wantExit(t, done, 0)
	g.run(t, g.sandbox, "touch later")
	eventually(t, "what the child writes later can be read", func() bool {
		whole, err := g.Jobs().ReadJobOutput(g.ctx, &berthv1.ReadJobOutputRequest{JobId: job})
		more, moreErr := g.Jobs().ReadJobOutput(g.ctx, &berthv1.ReadJobOutputRequest{JobId: job, Offset: 3})
		return err == nil && moreErr == nil && strings.HasPrefix(string(whole.GetData()), "hi\n") && string(more.GetData()) == "late\n"
	})
	eventually(t, "the child lives on", func() bool { return g.alive(t, g.sandbox, marker) == 1 })
	wantExit(t, g.stop(t, job, 0), 0)
	g.wantAlive(t, g.sandbox, marker, 0, "a job that was stopped after its end")
	if got := g.read(t, job, berthv1.Stream_STREAM_STDOUT); got != "hi\nlate\n" {
		t.Errorf("the whole output is %q", got)
	}
}

func silentDaemon(t *testing.T, g *ground) {
	marker := "sleep " + unique()
	// Until it has let go of the pipe, the child that the shell forked does hold the output.
	letGo := "until [ /proc/$!/fd/1 -ef /dev/null ] && [ /proc/$!/fd/2 -ef /dev/null ]; do :; done"
	job := g.start(t, g.sandbox, marker+" >/dev/null 2>&1 & "+letGo).GetId()
	done := g.wait(t, job)
	wantExit(t, done, 0)
	if done.GetOutcome().GetOutputStillOpen() {
		t.Error("output that nobody holds is said to be open")
	}
	g.wantAlive(t, g.sandbox, marker, 1, "a finished job")
	wantExit(t, g.stop(t, job, 0), 0)
	g.wantAlive(t, g.sandbox, marker, 0, "a job that was stopped after its end")
}

// hidden is a script of which six processes ignore TERM; four of them left its session, its parent or
// its environment, in all the ways together.
func hidden(marker string) string {
	return strings.ReplaceAll(`trap '' TERM
(trap '' TERM; setsid env -i /bin/sh -c 'trap "" TERM; (MARKER &) ; exec MARKER' &)
env -i setsid /bin/sh -c '(trap "" TERM; MARKER &)' &
MARKER & echo grown; wait; wait; wait`, "MARKER", marker)
}

const hiddenProcesses = 4

// neighbour is another job with a daemon, which must outlive its neighbours.
func (g *ground) neighbour(t *testing.T) (job, marker string) {
	t.Helper()
	marker = "/bin/sleep " + unique()
	job = g.start(t, g.sandbox, fmt.Sprintf("(setsid %s >/dev/null 2>&1 &); %s; true", marker, marker)).GetId()
	eventually(t, "the neighbour is there", func() bool { return g.alive(t, g.sandbox, marker) == 2 })
	return job, marker
}

func hiding(t *testing.T, g *ground) {
	neighbour, itsMarker := g.neighbour(t)
	marker := "/bin/sleep " + unique()
	reply, err := g.Jobs().StartJob(g.ctx, &berthv1.StartJobRequest{SandboxId: g.sandbox, Spec: &berthv1.JobSpec{
		Shell: hidden(marker), Timeout: durationpb.New(8 * time.Second), KillGrace: durationpb.New(300 * time.Millisecond),
	}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the tree has grown", func() bool { return g.alive(t, g.sandbox, marker) == hiddenProcesses })
	timedOut(9).writing("grown\n").checkStored(t, g, reply.GetJob().GetId())
	g.wantAlive(t, g.sandbox, marker, 0, "a job that was killed")
	g.wantAlive(t, g.sandbox, itsMarker, 2, "its neighbour")
	g.stop(t, neighbour, 0)
	g.wantAlive(t, g.sandbox, itsMarker, 0, "a neighbour that was stopped")
}

// checkStored is check of a job once it is done.
func (e ending) checkStored(t *testing.T, g *ground, job string) {
	t.Helper()
	done := g.wait(t, job)
	e.check(t, "detached", done, g.read(t, job, berthv1.Stream_STREAM_STDOUT), g.read(t, job, berthv1.Stream_STREAM_STDERR))
}

func stoppedHiding(t *testing.T, g *ground) {
	neighbour, itsMarker := g.neighbour(t)
	marker := "/bin/sleep " + unique()
	job := g.start(t, g.sandbox, hidden(marker)).GetId()
	eventually(t, "the tree has grown", func() bool { return g.alive(t, g.sandbox, marker) == hiddenProcesses })
	outcome := g.stop(t, job, 200*time.Millisecond).GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_STOPPED || outcome.GetWaitStatus().GetSignal() != 9 || len(outcome.GetSurvivors()) > 0 {
		t.Errorf("it ended as %v, want STOPPED by signal 9 with nothing left", outcome)
	}
	g.wantAlive(t, g.sandbox, marker, 0, "a job that was stopped")
	g.wantAlive(t, g.sandbox, itsMarker, 2, "its neighbour")
	g.stop(t, neighbour, 0)
}

func forkStorm(t *testing.T, g *ground) {
	size := testenv.Size(1000, 200)
	// Each is in a process group of its own and stops itself whenever it is continued, as the kernel does
	// when its parent is gone, so that nothing but KILL ends it; there are more of them while they are
	// killed. All bear the script, and so the marker, as their command line.
	marker := ": " + unique()
	script := fmt.Sprintf("%s; trap '' TERM HUP; set -m; one() { while :; do kill -STOP $BASHPID; done; }; for i in $(seq %d); do one & done; while :; do one & sleep 0.02; done", marker, size)
	marker = "/bin/bash -c " + marker
	reply, err := g.Jobs().StartJob(g.ctx, &berthv1.StartJobRequest{SandboxId: g.sandbox, Spec: shell(script)})
	if err != nil {
		t.Fatal(err)
	}
	job := reply.GetJob().GetId()
	eventually(t, "the storm rages", func() bool { return g.alive(t, g.sandbox, marker) >= size })
	begin := time.Now()
	outcome := g.stop(t, job, 0).GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_STOPPED || len(outcome.GetSurvivors()) > 0 {
		t.Errorf("it ended as %v, want STOPPED with nothing left", outcome)
	}
	t.Logf("killed in %s", time.Since(begin))
	g.wantAlive(t, g.sandbox, marker, 0, "a storm that was stopped")
	wantExit(t, g.run(t, g.sandbox, "exit 3").GetJob(), 3)
}

func orphans(t *testing.T, g *ground) {
	// Each child has a child, and leaves without it.
	job, out, errs := g.attached(t, g.sandbox, shell(fmt.Sprintf("for i in $(seq %d); do (: &); done; echo made", testenv.Size(10_000, 1000))), nil)
	wantExit(t, job, 0)
	if out != "made\n" {
		t.Fatalf("they were not made: %q, %q", out, errs)
	}
	// Orphans are the guest's, which is this shell's parent.
	zombies := `n=0; for s in /proc/[0-9]*/stat; do { IFS= read -r line <$s; } 2>/dev/null || continue; set -- ${line##*) }
[ "$1 $2" = "Z $PPID" ] && n=$((n+1)); done; echo $n`
	eventually(t, "no zombie is left", func() bool {
		return g.run(t, g.sandbox, zombies).GetStdout().GetText() == "0\n"
	})
}
