package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// attached runs a command with everything that an attached caller can give it.
func (w *harness) attached(t *testing.T, sandbox string, spec *berthv1.JobSpec, input io.Reader) (job *berthv1.Job, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	job, err := w.Exec(w.ctx, sandbox, spec, client.ExecIO{Stdin: input, Stdout: &out, Stderr: &errs})
	if err != nil {
		t.Fatalf("exec %v%s: %v", spec.GetArgv(), spec.GetShell(), err)
	}
	return job, out.String(), errs.String()
}

func TestADetachedJobCanBeFed(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{
		Argv: []string{"cat"}, Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	job := reply.GetJob().GetId()
	write := func(offset uint64, data string, eof bool) uint64 {
		reply, err := w.Jobs().WriteJobInput(w.ctx, &berthv1.WriteJobInputRequest{JobId: job, Position: &berthv1.WriteJobInputRequest_Offset{Offset: offset}, Data: []byte(data), Eof: eof})
		if err != nil {
			t.Fatalf("write %q at %d: %v", data, offset, err)
		}
		return reply.GetNextOffset()
	}
	if next := write(0, "one ", false); next != 4 {
		t.Errorf("stdin stands at %d", next)
	}
	w.restart(t)
	write(0, "one ", false) // again: it is not taken twice
	write(2, "e two ", false)
	write(8, "three", true)
	wantExit(t, w.wait(t, job), 0)
	if got := w.output(t, job); got != "one two three" {
		t.Errorf("the job was fed %q", got)
	}
	w.destroy(t, sandbox)
}

// TestAnAttachedCallerLosesNothingWhenTheBrokerDies streams both ways while the broker is killed.
func TestAnAttachedCallerLosesNothingWhenTheBrokerDies(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	size := 24 << 20
	data := make([]byte, size)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	over, known := make(chan struct{}), make(chan struct{})
	var killing sync.WaitGroup
	kills := 0
	killing.Go(func() {
		select {
		case <-known: // before, a command without a request_id is not started again
		case <-over:
		}
		for {
			select {
			case <-over:
				return
			case <-time.After(time.Duration(50+mathrand.IntN(200)) * time.Millisecond):
				if kills < 12 {
					w.restart(t)
					kills++
				}
			}
		}
	})
	hash := sha256.New()
	job, err := w.Exec(w.ctx, sandbox, &berthv1.JobSpec{Argv: []string{"cat"}}, client.ExecIO{
		Stdin: &slowly{from: bytes.NewReader(data)}, Stdout: hash, Started: func(*berthv1.Job) { close(known) },
	})
	close(over)
	killing.Wait()
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, job, 0)
	if got, want := fmt.Sprintf("%x", hash.Sum(nil)), fmt.Sprintf("%x", sha256.Sum256(data)); got != want || job.GetStdout().GetTotalBytes() != uint64(size) {
		t.Errorf("after %d kills %d bytes came back, with checksum %s, want %d with %s", kills, job.GetStdout().GetTotalBytes(), got, size, want)
	}
	if kills == 0 {
		t.Error("the broker was never killed")
	}
	t.Logf("the broker was killed %d times", kills)
	w.destroy(t, sandbox)
}

func TestACallerThatGoesAwayIsWaitedForAsLongAsItSaid(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil)
	ctx, leave := context.WithCancel(w.ctx)
	var job string
	_, err := w.Exec(ctx, sandbox.GetId(), &berthv1.JobSpec{
		Shell: "echo here; sleep 0.5; echo still here; sleep 1000", DisconnectGrace: durationpb.New(25 * time.Second),
	}, client.ExecIO{Started: func(j *berthv1.Job) { job = j.GetId() }, Stdout: writerFunc(func(p []byte) (int, error) { leave(); return len(p), nil })})
	if err == nil || job == "" {
		t.Fatalf("the call ended with %v, and job %q", err, job)
	}
	w.restart(t)
	back, leave := context.WithTimeout(w.ctx, time.Minute) // the machine may take a while to be heard from
	defer leave()
	var out lockedBuffer
	_, _ = w.Attach(back, job, 0, 0, client.ExecIO{Stdout: writerFunc(func(p []byte) (int, error) { // it ends with its context
		n, err := out.Write(p)
		if out.String() == "here\nstill here\n" {
			leave()
		}
		return n, err
	})})
	if out.String() != "here\nstill here\n" {
		t.Errorf("who came back saw %q", out.String())
	}
	begin := time.Now()
	if outcome := w.wait(t, job).GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_STOPPED || !strings.HasPrefix(outcome.GetReason(), "disconnected") {
		t.Errorf("a command that nobody came back to ended as %v", outcome)
	}
	if took := time.Since(begin); took < 5*time.Second {
		t.Errorf("it was killed after %s, before its disconnect_grace was over", took)
	}
	w.destroy(t, sandbox.GetId())
}

func TestASuspendedSandboxGoesOnWhereItWas(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil)
	able := false
	for _, capability := range sandbox.GetCapabilities() {
		able = able || capability == "suspend"
	}
	suspend := func() error {
		_, err := w.Sandboxes().SuspendSandbox(w.ctx, &berthv1.SuspendSandboxRequest{SandboxId: sandbox.GetId()})
		return err
	}
	if !able {
		wantReason(t, suspend(), berthv1.Reason_REASON_CAPABILITY_MISSING)
		w.destroy(t, sandbox.GetId())
		return
	}
	job := w.start(t, sandbox.GetId(), "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.1; done; while [ ! -e go ]; do sleep 0.1; done; exit 3").GetId()
	if err := suspend(); err != nil {
		t.Fatal(err)
	}
	if err := suspend(); err != nil {
		t.Errorf("a second suspend: %v", err)
	}
	w.restart(t)
	pause(1500 * time.Millisecond)
	if state := w.state(t, sandbox.GetId()); state != berthv1.SandboxState_SANDBOX_STATE_SUSPENDED {
		t.Fatalf("a suspended sandbox is %s", state)
	}
	polled, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: job})
	if err != nil || polled.GetJob().GetState() == berthv1.JobState_JOB_STATE_DONE {
		t.Errorf("a job of a suspended sandbox is %v (%v)", polled, err)
	}
	_, err = w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox.GetId(), Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
	wantReason(t, err, berthv1.Reason_REASON_WRONG_STATE)
	resumed, err := w.Sandboxes().ResumeSandbox(w.ctx, &berthv1.ResumeSandboxRequest{SandboxId: sandbox.GetId()})
	if err != nil || resumed.GetSandbox().GetGeneration() != sandbox.GetGeneration() {
		t.Fatalf("resumed: %v, %v; want the same generation, for its processes survived", resumed, err)
	}
	w.run(t, sandbox.GetId(), "touch go")
	wantExit(t, w.wait(t, job), 3)
	if got := w.output(t, job); got != "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n" {
		t.Errorf("its output is %q", got)
	}
	if err := suspend(); err != nil {
		t.Fatal(err)
	}
	w.destroy(t, sandbox.GetId()) // also from there
	w.WantNothingLeft(t)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// zeros is an endless reader.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// slowly gives its bytes in pieces with pauses between them, so that a kill finds it in the middle.
type slowly struct{ from io.Reader }

func (s *slowly) Read(p []byte) (int, error) {
	pause(time.Millisecond)
	return s.from.Read(p[:min(len(p), 32<<10)])
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
