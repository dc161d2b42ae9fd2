package api

import (
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// atTheGuest are commands that mean some server of theirs, or their parent, and hit the guest. In a script's own
// command line the words would be found too.
var atTheGuest = []*berthv1.JobSpec{
	shell("kill $PPID"),
	shell("kill 1"), shell("kill -HUP 1"), shell("kill -INT 1"), shell("kill -QUIT 1"), shell("kill -ABRT 1"), shell("kill -SEGV 1"),
	shell("kill -KILL 1"), shell("kill -STOP 1"),
	argv("pkill", "berth-guest"), argv("pkill", "-KILL", "-f", "berth-guest"), argv("pkill", "-f", "serve"), argv("pkill", "-f", "config"),
}

func TestAJobThatSignalsItsGuestEndsNoMachine(t *testing.T) {
	t.Parallel()
	check := (*harness).ignoresItsJobs
	switch fixture.ProviderName() {
	case "local":
		testenv.Namespaces(t)
	case "local-plain", "fake":
		check = (*harness).diesHonestly
	}
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	check(w, t, sandbox)
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

func (w *harness) ignoresItsJobs(t *testing.T, sandbox string) {
	t.Helper()
	if parent := w.run(t, sandbox, "echo $PPID").GetStdout().GetText(); parent != "1\n" {
		t.Fatalf("the guest is process %q, not its machine's first", parent)
	}
	neighbour := w.start(t, sandbox, "while [ ! -e go ]; do sleep 0.05; done; exit 6").GetId()
	for _, spec := range atTheGuest {
		reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: spec})
		if err != nil {
			t.Fatalf("%s: %v", command(spec), err)
		}
		if outcome := reply.GetJob().GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_EXITED {
			t.Errorf("%s ended as %v", command(spec), outcome)
		}
	}
	w.run(t, sandbox, "touch go")
	wantExit(t, w.wait(t, neighbour), 6)
	reply, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
	if err != nil || reply.GetSandbox().GetGeneration() != 1 {
		t.Errorf("the sandbox is %v (%v), want its first generation", reply.GetSandbox(), err)
	}
}

// diesHonestly is of a guest that is a plain process of the host, which anybody of its user may end.
func (w *harness) diesHonestly(t *testing.T, sandbox string) {
	t.Helper()
	neighbour := w.start(t, sandbox, "sleep 1000").GetId()
	culprit := w.start(t, sandbox, "kill -KILL $PPID; sleep 1000").GetId()
	eventually(t, "the sandbox is STOPPED", func() bool {
		return w.state(t, sandbox) == berthv1.SandboxState_SANDBOX_STATE_STOPPED
	})
	resumed, err := w.Sandboxes().ResumeSandbox(w.ctx, &berthv1.ResumeSandboxRequest{SandboxId: sandbox})
	if err != nil || resumed.GetSandbox().GetGeneration() != 2 {
		t.Fatalf("resumed: %v, %v; want generation 2", resumed, err)
	}
	for _, job := range []string{neighbour, culprit} {
		if outcome := w.wait(t, job).GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_LOST || outcome.Exit != nil {
			t.Errorf("a job whose guest was killed by a job ended as %v, want LOST without a code", outcome)
		}
	}
}

func command(spec *berthv1.JobSpec) string {
	return strings.Join(spec.GetArgv(), " ") + spec.GetShell()
}
