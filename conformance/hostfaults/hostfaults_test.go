package hostfaults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	testTimeout   = 15 * time.Minute       // one test's calls, on a machine with better things to do
	comesBack     = 3 * time.Minute        // until what was disturbed is as it was: several backoffs of 15 s at most
	probeInterval = 100 * time.Millisecond // at something that is waited for
)

func TestMain(m *testing.M) { fixture.Main(m) }

// asked skips what `make hostfaults` was not asked for, and what this host cannot do.
func asked(t *testing.T) fixture.Programs {
	t.Helper()
	testenv.Asked(t, "hostfaults")
	testenv.Root(t)
	testenv.Namespaces(t)
	return fixture.Build(t)
}

// harness is a broker, and two clients of it: one that waits for a broker that is away, and one that
// says at once what it was told.
type harness struct {
	*fixture.Broker
	*client.Client
	impatient *client.Client
	ctx       context.Context
}

// newHarness makes a harness of a broker that is not yet started, with clients for it.
func newHarness(t *testing.T, b *fixture.Broker) *harness {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	t.Cleanup(cancel)
	impatient, err := client.Dial(b.Address, client.WithRetryTimeout(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = impatient.Close() })
	return &harness{Broker: b, Client: b.Client(t), impatient: impatient, ctx: ctx}
}

// start starts a broker with local machines.
func start(t *testing.T, args ...string) *harness {
	t.Helper()
	w := newHarness(t, fixture.NewBroker(t, asked(t), append([]string{"--provider", "local"}, args...)...))
	w.Start(t)
	return w
}

func (w *harness) create(t *testing.T) string {
	t.Helper()
	reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{})
	if err != nil {
		t.Fatalf("create a sandbox: %v", err)
	}
	return reply.GetSandbox().GetId()
}

func (w *harness) destroy(t *testing.T, id string) {
	t.Helper()
	reply, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	if err != nil || reply.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		t.Fatalf("destroy sandbox %s: %v, %v", id, reply, err)
	}
}

func (w *harness) begin(t *testing.T, sandbox, shell string) string {
	t.Helper()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell}})
	if err != nil {
		t.Fatalf("start %q: %v", shell, err)
	}
	return reply.GetJob().GetId()
}

func (w *harness) run(t *testing.T, sandbox, shell string) *berthv1.RunCommandResponse {
	t.Helper()
	reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
		SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell},
	})
	if err != nil {
		t.Fatalf("run %q: %v", shell, err)
	}
	return reply
}

// wantExit waits for a job and checks its code.
func (w *harness) wantExit(t *testing.T, job string, code int32) *berthv1.Job {
	t.Helper()
	done, err := w.WaitJob(w.ctx, job)
	if err != nil {
		t.Fatalf("wait for job %s: %v", job, err)
	}
	if got := done.GetOutcome(); got.GetCause() != berthv1.Cause_CAUSE_EXITED || got.GetExitCode() != code {
		t.Errorf("job %s ended as %v, want exit %d", job, got, code)
	}
	return done
}

// wantOutput checks what a job wrote, whole.
func (w *harness) wantOutput(t *testing.T, job, want string) {
	t.Helper()
	data, gaps, err := w.ReadAllOutput(w.ctx, job, berthv1.Stream_STREAM_STDOUT)
	if err != nil || len(gaps) > 0 || string(data) != want {
		t.Errorf("the output of job %s is %d bytes (gaps %v, %v), want %d", job, len(data), gaps, err, len(want))
	}
}

// wantRefused checks that an error has a code and a reason, and names the remedy.
func wantRefused(t *testing.T, doing string, err error, code codes.Code, reason berthv1.Reason, remedy string) {
	t.Helper()
	if status.Code(err) != code || !client.Is(err, reason) || !strings.Contains(status.Convert(err).Message(), remedy) {
		t.Errorf("%s gave %v, want %s with %s that says %q", doing, err, code, reason, remedy)
	}
}

func (w *harness) state(t *testing.T, sandbox string) berthv1.SandboxState {
	t.Helper()
	got, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
	if err != nil {
		t.Fatalf("get sandbox %s: %v", sandbox, err)
	}
	return got.GetSandbox().GetState()
}

// quiet checks that nothing is open when everything has ended.
func (w *harness) quiet(t *testing.T) {
	t.Helper()
	eventually(t, "nothing is open", func() error {
		info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
		if err == nil && (info.GetOpenOperations() != 0 || info.GetOpenJobs() != 0 || len(info.GetSandboxes()) != 0) {
			err = fmt.Errorf("the broker has %v", info)
		}
		return err
	})
	w.WantNothingLeft(t)
}

// eventually tries until what is said holds.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(comesBack); ; fixture.Pause(probeInterval) {
		if err = try(); err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %s: %v", what, comesBack, err)
		}
	}
}

// brief is a context that ends by itself.
func brief(t *testing.T, most time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), most)
	t.Cleanup(cancel)
	return ctx
}

// logged returns the lines of the broker's whole log that hold a text.
func (w *harness) logged(t *testing.T, text string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(w.Dir, "berthd.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, text) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}
