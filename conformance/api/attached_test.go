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
func (w *world) attached(t *testing.T, sandbox string, spec *berthv1.JobSpec, input io.Reader) (job *berthv1.Job, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	job, err := w.Exec(w.ctx, sandbox, spec, client.ExecIO{Stdin: input, Stdout: &out, Stderr: &errs})
	if err != nil {
		t.Fatalf("exec %v%s: %v", spec.GetArgv(), spec.GetShell(), err)
	}
	return job, out.String(), errs.String()
}

func TestAnAttachedCommandSeesItsCaller(t *testing.T) {
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	t.Run("output of both streams, live", func(t *testing.T) {
		first := make(chan time.Time, 1)
		begin := time.Now()
		var stderr bytes.Buffer
		job, err := w.Exec(w.ctx, sandbox, &berthv1.JobSpec{Shell: "echo one; sleep 1; echo two >&2; exit 7"}, client.ExecIO{
			Stdout: writerFunc(func(p []byte) (int, error) {
				select {
				case first <- time.Now():
				default:
				}
				return len(p), nil
			}), Stderr: &stderr,
		})
		if err != nil {
			t.Fatal(err)
		}
		wantExit(t, job, 7)
		if early := (<-first).Sub(begin); early > 900*time.Millisecond || stderr.String() != "two\n" {
			t.Errorf("the first line came after %s, and stderr is %q", early, stderr.String())
		}
	})
	t.Run("stdin, half-closed", func(t *testing.T) {
		job, out, _ := w.attached(t, sandbox, &berthv1.JobSpec{Argv: []string{"cat"}}, strings.NewReader("hello\n"))
		wantExit(t, job, 0)
		if out != "hello\n" {
			t.Errorf("cat gave back %q", out)
		}
	})
	t.Run("without stdin a reader gets its end at once", func(t *testing.T) {
		job, out, _ := w.attached(t, sandbox, &berthv1.JobSpec{Argv: []string{"cat"}}, nil)
		wantExit(t, job, 0)
		if out != "" {
			t.Errorf("cat gave %q from nothing", out)
		}
	})
	t.Run("merged streams in the order written", func(t *testing.T) {
		_, out, errs := w.attached(t, sandbox, &berthv1.JobSpec{Shell: "for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done", MergeStderr: true}, nil)
		if out != "o1\ne1\no2\ne2\no3\ne3\no4\ne4\no5\ne5\n" || errs != "" {
			t.Errorf("merged they are %q and %q", out, errs)
		}
	})
	t.Run("bytes that are no text", func(t *testing.T) {
		every := make([]byte, 256)
		for i := range every {
			every[i] = byte(i)
		}
		_, out, _ := w.attached(t, sandbox, &berthv1.JobSpec{Argv: []string{"cat"}}, bytes.NewReader(bytes.Repeat(every, 300)))
		if out != string(bytes.Repeat(every, 300)) {
			t.Errorf("%d bytes came back, and not the same", len(out))
		}
	})
	t.Run("a terminal of its size, and its resize", func(t *testing.T) {
		sizes := make(chan *berthv1.TerminalSize, 1)
		var out lockedBuffer
		seen := writerFunc(func(p []byte) (int, error) {
			n, err := out.Write(p)
			if strings.Contains(out.String(), "ready") && !strings.Contains(out.String(), "50 200") {
				select {
				case sizes <- &berthv1.TerminalSize{Cols: 200, Rows: 50}:
				default:
				}
			}
			return n, err
		})
		job, err := w.Exec(w.ctx, sandbox, &berthv1.JobSpec{
			Shell: "test -t 0 && test -t 1 && stty size; trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.1; done",
			Tty:   &berthv1.TerminalSize{Cols: 120, Rows: 40}, Timeout: durationpb.New(20 * time.Second),
		}, client.ExecIO{Stdout: seen, Resize: sizes})
		if err != nil {
			t.Fatal(err)
		}
		wantExit(t, job, 4)
		if got := out.String(); !strings.HasPrefix(got, "40 120\r\n") || !strings.Contains(got, "50 200") {
			t.Errorf("the terminal said %q", got)
		}
	})
	t.Run("no terminal unless it is asked for", func(t *testing.T) {
		job, _, _ := w.attached(t, sandbox, &berthv1.JobSpec{Shell: "exec 3</dev/tty"}, nil)
		if job.GetOutcome().GetExitCode() == 0 {
			t.Error("a command without a terminal opened /dev/tty")
		}
	})
	t.Run("signals", func(t *testing.T) {
		signals := make(chan int, 1)
		job, err := w.Exec(w.ctx, sandbox, &berthv1.JobSpec{Shell: "trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done", Timeout: durationpb.New(20 * time.Second)}, client.ExecIO{
			Stdout:  writerFunc(func(p []byte) (int, error) { signals <- 10; return len(p), nil }),
			Signals: signals,
		})
		if err != nil {
			t.Fatal(err)
		}
		wantExit(t, job, 5)
	})
	t.Run("stdin to a command that never reads it", func(t *testing.T) {
		job, _, _ := w.attached(t, sandbox, &berthv1.JobSpec{Shell: "sleep 0.3; exit 6"}, io.LimitReader(zeros{}, 8<<20))
		wantExit(t, job, 6)
	})
	w.destroy(t, sandbox)
}

func TestADetachedJobCanBeFed(t *testing.T) {
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
		reply, err := w.Jobs().WriteJobInput(w.ctx, &berthv1.WriteJobInputRequest{JobId: job, Offset: offset, Data: []byte(data), Eof: eof})
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
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	size := 24 << 20
	data := make([]byte, size)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	var killing sync.WaitGroup
	kills := 0
	killing.Go(func() {
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
		Stdin: &slowly{from: bytes.NewReader(data)}, Stdout: hash,
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
	w := start(t)
	sandbox := w.create(t, nil)
	ctx, leave := context.WithCancel(w.ctx)
	var job string
	_, err := w.Exec(ctx, sandbox.GetId(), &berthv1.JobSpec{
		Shell: "echo here; sleep 0.5; echo still here; sleep 1000", DisconnectGrace: durationpb.New(11 * time.Second),
	}, client.ExecIO{Started: func(j *berthv1.Job) { job = j.GetId() }, Stdout: writerFunc(func(p []byte) (int, error) { leave(); return len(p), nil })})
	if err == nil || job == "" {
		t.Fatalf("the call ended with %v, and job %q", err, job)
	}
	w.restart(t)
	back, leave := context.WithTimeout(w.ctx, 2*time.Second)
	defer leave()
	var out lockedBuffer
	_, _ = w.Attach(back, job, 0, 0, client.ExecIO{Stdout: &out}) // it ends with its context
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

func TestMuchOutputIsBoundedAndCounted(t *testing.T) {
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{
		Shell: "head -c 200000000 /dev/zero; printf end", OutputLimitBytes: 1 << 20,
	}})
	if err != nil {
		t.Fatal(err)
	}
	job := w.wait(t, reply.GetJob().GetId())
	wantExit(t, job, 0)
	facts := job.GetStdout()
	if facts.GetTotalBytes() != 200000003 || len(facts.GetKept()) != 2 || facts.GetKept()[0].GetFrom() != 0 || facts.GetKept()[1].GetTo() != 200000003 {
		t.Fatalf("the facts are %v", facts)
	}
	kept := uint64(0)
	for _, r := range facts.GetKept() {
		kept += r.GetTo() - r.GetFrom()
	}
	if kept > 1<<20 || kept < 1<<18 || facts.GetDroppedBytes() != 200000003-kept {
		t.Errorf("of 1 MiB %d bytes are kept, and %d dropped", kept, facts.GetDroppedBytes())
	}
	data, gaps, err := w.ReadAllOutput(w.ctx, job.GetId(), berthv1.Stream_STREAM_STDOUT)
	if err != nil || len(gaps) != 1 || uint64(len(data)) != kept || !bytes.HasSuffix(data, []byte("\x00end")) {
		t.Errorf("%d bytes and gaps %v can be read (%v)", len(data), gaps, err)
	}
	_, err = w.Jobs().ReadJobOutput(w.ctx, &berthv1.ReadJobOutputRequest{JobId: job.GetId(), Offset: facts.GetKept()[0].GetTo()})
	wantReason(t, err, berthv1.Reason_REASON_OUTPUT_EXPIRED)
	if got := client.Metadata(err)["first_kept"]; got != fmt.Sprint(facts.GetKept()[1].GetFrom()) {
		t.Errorf("the error says that %s is kept next", got)
	}
	w.destroy(t, sandbox)
}

func TestASuspendedSandboxGoesOnWhereItWas(t *testing.T) {
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
	job := w.start(t, sandbox.GetId(), "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.1; done; exit 3").GetId()
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
