package api

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// alive counts the machine's processes whose command line holds a text, by reading /proc as any image
// can.
func (w *world) alive(t *testing.T, sandbox, text string) string {
	t.Helper()
	script := fmt.Sprintf(`n=0; for p in /proc/[0-9]*; do case "$(tr '\0' ' ' < $p/cmdline 2>/dev/null)" in "%s"*) n=$((n+1)) ;; esac; done; echo $n`, text)
	return strings.TrimSpace(w.run(t, sandbox, script).GetStdout().GetText())
}

func TestATreeThatHidesIsGoneAndItsNeighbourLives(t *testing.T) {
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	neighbour := w.start(t, sandbox, "(setsid sleep 4001 >/dev/null 2>&1 &); sleep 4002").GetId()
	hostile := `trap '' TERM
(trap '' TERM; setsid env -i /bin/sh -c 'trap "" TERM; (/bin/sleep 4003 &) ; exec /bin/sleep 4003' &)
env -i setsid /bin/sh -c '(trap "" TERM; /bin/sleep 4003 &)' &
/bin/sleep 4003 & wait; wait`
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{
		Shell: hostile, Timeout: durationpb.New(time.Second), KillGrace: durationpb.New(300 * time.Millisecond),
	}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the tree has grown", func() bool { return w.alive(t, sandbox, "/bin/sleep 4003") == "4" })
	outcome := w.wait(t, reply.GetJob().GetId()).GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || outcome.GetExitCode() != 124 || len(outcome.GetSurvivors()) > 0 {
		t.Errorf("it ended as %v, want TIMED_OUT with nothing left", outcome)
	}
	if got := w.alive(t, sandbox, "/bin/sleep 4003"); got != "0" {
		t.Errorf("%s processes of the tree are left", got)
	}
	if got := w.alive(t, sandbox, "sleep 400"); got != "2" {
		t.Errorf("of the neighbour's two processes %s live", got)
	}
	if _, err := w.Jobs().StopJob(w.ctx, &berthv1.StopJobRequest{JobId: neighbour, Grace: durationpb.New(0)}); err != nil {
		t.Error(err)
	}
	if got := w.alive(t, sandbox, "sleep 400"); got != "0" {
		t.Errorf("%s processes of a stopped neighbour live", got)
	}
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

func TestOrphansLeaveNoZombies(t *testing.T) {
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	ran := w.run(t, sandbox, "i=0; while [ $i -lt 2000 ]; do (sleep 0.01 &); i=$((i+1)); done; exit 9")
	wantExit(t, ran.GetJob(), 9)
	zombies := `n=0; for s in /proc/[0-9]*/stat; do case "$(cat $s 2>/dev/null)" in *") Z "*) n=$((n+1)) ;; esac; done; echo $n`
	eventually(t, "no zombie is left", func() bool {
		return strings.TrimSpace(w.run(t, sandbox, zombies).GetStdout().GetText()) == "0"
	})
	w.destroy(t, sandbox)
}

func TestOddCommandsAreToldApart(t *testing.T) {
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	many := map[string]string{}
	for i := range 10000 {
		many[fmt.Sprintf("VARIABLE_%d", i)] = "x"
	}
	for name, c := range map[string]struct {
		spec   *berthv1.JobSpec
		cause  berthv1.Cause
		code   int32
		stdout string
	}{
		"ten thousand variables":        {&berthv1.JobSpec{Shell: "env | grep -c ^VARIABLE_", Env: many}, berthv1.Cause_CAUSE_EXITED, 0, "10000\n"},
		"an argument too long":          {&berthv1.JobSpec{Argv: []string{"true", strings.Repeat("x", 1<<20)}}, berthv1.Cause_CAUSE_FAILED_TO_START, 126, ""},
		"a user that is not there":      {&berthv1.JobSpec{Argv: []string{"true"}, User: "nobody-here"}, berthv1.Cause_CAUSE_FAILED_TO_START, 126, ""},
		"a script that execs":           {&berthv1.JobSpec{Shell: "exec sh -c 'exit 8'"}, berthv1.Cause_CAUSE_EXITED, 8, ""},
		"a script that stops at errors": {&berthv1.JobSpec{Shell: "set -e; echo a; false; echo b"}, berthv1.Cause_CAUSE_EXITED, 1, "a\n"},
		"a script that closes stdout":   {&berthv1.JobSpec{Shell: "echo a; exec >&-; sleep 0.2; exit 2"}, berthv1.Cause_CAUSE_EXITED, 2, "a\n"},
		"a script that stops itself":    {&berthv1.JobSpec{Shell: "kill -STOP $$; exit 3", Timeout: durationpb.New(300 * time.Millisecond), KillGrace: durationpb.New(0)}, berthv1.Cause_CAUSE_TIMED_OUT, 124, ""},
		"death by SEGV":                 {&berthv1.JobSpec{Shell: "kill -SEGV $$"}, berthv1.Cause_CAUSE_SIGNALED, 139, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: c.spec})
			if err != nil {
				t.Fatal(err)
			}
			outcome := ran.GetJob().GetOutcome()
			if outcome.GetCause() != c.cause || outcome.GetExitCode() != c.code || string(ran.GetStdout().GetHead()) != c.stdout {
				t.Errorf("it ended as %v and wrote %q, want %s, %d and %q", outcome, ran.GetStdout().GetHead(), c.cause, c.code, c.stdout)
			}
		})
	}
	w.destroy(t, sandbox)
}
