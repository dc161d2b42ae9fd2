package api

import (
	"slices"
	"strings"
	"testing"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// leaving are ways for a process to leave its job's session, its parent, its environment and its limits, by which
// a guest without cgroups knows it.
var leaving = map[string]string{
	"by itself": "env -i bash -c 'ulimit -S -x 77; (setsid setsid MARKER >/dev/null 2>&1 &)'",
	"by su":     `su nobody -s /bin/sh -c "(setsid setsid MARKER >/dev/null 2>&1 &)"`,
}

func TestWhatLeavesItsJobIsKilledWithItOrReported(t *testing.T) {
	t.Parallel()
	w := start(t)
	made := w.create(t, nil)
	g := &ground{harness: w, sandbox: made.GetId()}
	strong, weak := slices.Contains(made.GetCapabilities(), "containment.strong"), slices.Contains(made.GetCapabilities(), "containment.weak")
	if strong == weak {
		t.Errorf("it has the capabilities %v, want one of containment.strong and containment.weak", made.GetCapabilities())
	}
	root := w.run(t, g.sandbox, "id -u").GetStdout().GetText() == "0\n"
	for name, script := range leaving {
		if name == "by su" && !root {
			continue // which asks others for a password
		}
		t.Run(name, func(t *testing.T) {
			// Alone, it can be no other job's.
			marker := "sleep " + unique()
			outcome := g.leaves(t, script, marker)
			if outcome.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || len(outcome.GetSurvivors()) > 0 {
				t.Errorf("alone it ended as %v, want TIMED_OUT with nothing left", outcome)
			}
			g.wantAlive(t, g.sandbox, marker, 0, "the only job")

			neighbour, itsMarker := g.neighbour(t)
			marker = "sleep " + unique()
			outcome = g.leaves(t, script, marker)
			if left := g.alive(t, g.sandbox, marker); outcome.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || len(outcome.GetSurvivors()) != left || strong && left > 0 {
				t.Errorf("beside another it ended as %v, and %d processes are left", outcome, left)
			}
			g.wantAlive(t, g.sandbox, itsMarker, 2, "its neighbour")
			g.run(t, g.sandbox, "pkill -KILL -f '^"+marker+"$'; true")
			g.stop(t, neighbour, 0)
			g.wantAlive(t, g.sandbox, itsMarker, 0, "a neighbour that was stopped")
		})
	}
	g.destroy(t, g.sandbox)
	g.WantNothingLeft(t)
}

// leaves runs a script, waits in the same command until what left it is there, so that there is no other job, and
// then for its timeout.
func (g *ground) leaves(t *testing.T, script, marker string) *berthv1.Outcome {
	t.Helper()
	script = strings.ReplaceAll(script, "MARKER", marker) + "; until pgrep -fx '" + marker + "' >/dev/null; do sleep 0.05; done; exec sleep 1000"
	reply, err := g.Jobs().RunCommand(g.ctx, &berthv1.RunCommandRequest{SandboxId: g.sandbox, Spec: limited(shell(script), 0)})
	if err != nil {
		t.Fatal(err)
	}
	return reply.GetJob().GetOutcome()
}
