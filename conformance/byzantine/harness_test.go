package byzantine

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

func TestMain(m *testing.M) { fixture.Main(m) }

const (
	// callTimeout is how long a call to a machine whose guest lies is waited for: an answer may never come.
	callTimeout = 8 * time.Second
	// honestTimeout is how long a command in another machine may take meanwhile, on a busy host.
	honestTimeout = 2 * time.Minute
	// maxRecordBytes is the largest that a job may be shown as, in bytes.
	maxRecordBytes = 64 << 10
	// script and its truth are what a lying machine is asked to run.
	script   = "printf 12345; printf 678 >&2; exit 7"
	truth    = "12345"
	trueCode = 7
)

// harness is a broker on the fake provider, a client of it, and the rules that change what its guests say.
type harness struct {
	*fixture.Broker
	*client.Client
	ctx    context.Context
	fake   fake.Harness
	honest string // a sandbox whose guest never lies

	mu    sync.Mutex
	rules map[string][]faultproxy.Rule // by machine
}

func start(t *testing.T) *harness {
	t.Helper()
	b := fixture.NewBroker(t, fixture.Build(t), "--provider", "fake")
	b.Start(t)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Minute)
	t.Cleanup(cancel)
	w := &harness{Broker: b, Client: b.Client(t), ctx: ctx, fake: fake.At(filepath.Join(b.State(), "fake")), rules: map[string][]faultproxy.Rule{}}
	if err := w.fake.SetRules(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.fake.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	w.honest = w.create(t).GetId()
	return w
}

func (w *harness) create(t *testing.T) *berthv1.Sandbox {
	t.Helper()
	reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{})
	if err != nil {
		t.Fatalf("create a sandbox: %v", err)
	}
	return reply.GetSandbox()
}

// setRules has these rules and no others change what a machine's guest says.
func (w *harness) setRules(t *testing.T, machine string, rules ...faultproxy.Rule) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range rules {
		rules[i].Machine = machine
		rules[i].ID = ruleID(machine, i)
	}
	w.rules[machine] = rules
	var all []faultproxy.Rule
	for _, some := range w.rules {
		all = append(all, some...)
	}
	if err := w.fake.SetRules(all...); err != nil {
		t.Fatal(err)
	}
}

func ruleID(machine string, i int) string { return fmt.Sprintf("%s-%d", machine, i) }

// wantApplied fails a test whose rules were never applied, for it has shown nothing.
func (w *harness) wantApplied(t *testing.T, machine string, rules []faultproxy.Rule) {
	t.Helper()
	eventually(t, "none of its rules was applied", func() bool {
		times := 0
		for i := range rules {
			n, err := w.fake.Applied(ruleID(machine, i))
			if err != nil {
				t.Fatal(err)
			}
			times += n
		}
		return times > 0
	})
}

// eventually fails the test with what is wrong unless it is right after a while.
func eventually(t *testing.T, wrong string, right func() bool) {
	t.Helper()
	for deadline := time.Now().Add(recoverTimeout); !right(); fixture.Pause(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error(wrong)
			return
		}
	}
}

// wantOthersServed fails when a machine whose guest does not lie is not served as ever.
func (w *harness) wantOthersServed(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, honestTimeout)
	defer cancel()
	ran, err := w.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: w.honest, Spec: &berthv1.JobSpec{Shell: script}})
	if err != nil || ran.GetJob().GetOutcome().GetExitCode() != trueCode || string(ran.GetStdout().GetHead()) != truth {
		t.Errorf("a command in an honest machine: %v (%v)", ran, err)
	}
}

// wholeLog is all that the broker has logged.
func (w *harness) wholeLog(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(w.Dir, "berthd.log"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// observed is what the broker said of a machine whose guest lies.
type observed struct {
	*harness
	t        *testing.T
	row      row
	sandbox  string
	outcomes map[string]*berthv1.Outcome // by job
}

func (h *observed) call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(h.ctx, callTimeout)
}

// job checks a job as the broker shows it: an outcome is the true one or none that anybody could take for
// one, and it never changes.
func (h *observed) job(job *berthv1.Job) {
	h.t.Helper()
	if job == nil {
		return
	}
	if size := proto.Size(job); size > maxRecordBytes {
		h.t.Errorf("job %s is shown in %d bytes", job.GetId(), size)
	}
	outcome := job.GetOutcome()
	if start, end := job.GetStartTime(), job.GetEndTime(); start != nil && end != nil && end.AsTime().Before(start.AsTime()) {
		h.t.Errorf("job %s ended at %v, before it began at %v", job.GetId(), end.AsTime(), start.AsTime())
	}
	for _, when := range []time.Time{job.GetStartTime().AsTime(), job.GetEndTime().AsTime()} {
		if off := time.Until(when).Abs(); when.Unix() != 0 && off > 25*time.Hour {
			h.t.Errorf("job %s has the time %v", job.GetId(), when)
		}
	}
	if cpu := job.GetCpuTime(); cpu != nil && cpu.AsDuration() < 0 {
		h.t.Errorf("job %s took %v", job.GetId(), cpu.AsDuration())
	}
	for _, stats := range []*berthv1.OutputStats{job.GetStdout(), job.GetStderr()} {
		h.stats(stats)
	}
	if job.GetState() != berthv1.JobState_JOB_STATE_DONE {
		if outcome != nil {
			h.t.Errorf("job %s is %s and has an outcome: %v", job.GetId(), job.GetState(), outcome)
		}
		return
	}
	if before := h.outcomes[job.GetId()]; before != nil && !proto.Equal(before, outcome) {
		h.t.Errorf("the outcome of job %s was %v and is %v", job.GetId(), before, outcome)
	}
	h.outcomes[job.GetId()] = outcome
	switch {
	case h.row.outcome != nil:
		if !h.row.outcome(outcome) {
			h.t.Errorf("job %s ended as %v", job.GetId(), outcome)
		}
	case outcome.GetCause() == berthv1.Cause_CAUSE_LOST, outcome.GetCause() == berthv1.Cause_CAUSE_STOPPED:
		if outcome.GetCause() == berthv1.Cause_CAUSE_LOST && outcome.Exit != nil {
			h.t.Errorf("job %s is lost and has a code: %v", job.GetId(), outcome)
		}
	case outcome.GetCause() != berthv1.Cause_CAUSE_EXITED || outcome.Exit == nil || outcome.GetExitCode() != trueCode:
		h.t.Errorf("job %s ended as %v", job.GetId(), outcome)
	}
}

// stats checks that there is a place for every byte that is said to be kept.
func (h *observed) stats(stats *berthv1.OutputStats) {
	h.t.Helper()
	var end, kept uint64
	for _, r := range stats.GetKept() {
		if r.GetFrom() < end || r.GetTo() < r.GetFrom() || r.GetTo() > stats.GetTotalBytes() {
			h.t.Errorf("output is said to be kept that cannot be: %v", stats)
			return
		}
		end, kept = r.GetTo(), kept+r.GetTo()-r.GetFrom()
	}
	if len(stats.GetKept()) > 2 || kept > stats.GetTotalBytes() {
		h.t.Errorf("output is said to be kept that cannot be: %v", stats)
	}
}

// bytes checks output that is said to be of an offset of stdout.
func (h *observed) bytes(data []byte, offset uint64, most int) {
	h.t.Helper()
	if len(data) > most {
		h.t.Errorf("%d bytes were handed out, of %d that were asked for", len(data), most)
	}
	if h.row.anyOutput || len(data) == 0 {
		return
	}
	if offset > uint64(len(truth)) || !strings.HasPrefix(truth[offset:], string(data)) {
		h.t.Errorf("%q was handed out as stdout from %d on", data[:min(len(data), 100)], offset)
	}
}

// work uses a machine in every way there is, without asking that any of it succeeds.
func (h *observed) work() (job string) {
	ctx, cancel := h.call()
	started, err := h.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: h.sandbox, RequestId: h.sandbox, Spec: &berthv1.JobSpec{Shell: script}})
	cancel()
	if err == nil {
		job = started.GetJob().GetId()
		h.job(started.GetJob())
	}
	h.run()
	h.exec()
	h.read(job)
	h.interact()
	return job
}

func (h *observed) run() {
	ctx, cancel := h.call()
	defer cancel()
	const most = 100
	ran, err := h.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: h.sandbox, MaxOutputBytes: most, Spec: &berthv1.JobSpec{Shell: script}})
	if err != nil {
		return
	}
	h.job(ran.GetJob())
	h.bytes(ran.GetStdout().GetHead(), 0, most)
	h.bytes(ran.GetStdout().GetTail(), ran.GetStdout().GetTailOffset(), most-len(ran.GetStdout().GetHead()))
}

func (h *observed) exec() {
	ctx, cancel := h.call()
	defer cancel()
	var out bytes.Buffer
	spec := &berthv1.JobSpec{Shell: "cat >/dev/null; " + script, Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}}
	job, _ := h.Exec(ctx, h.sandbox, spec, client.ExecIO{Stdout: &out, Stdin: strings.NewReader("some input")})
	h.job(job)
	h.bytes(out.Bytes(), 0, 4<<20)
}

func (h *observed) read(job string) {
	if job == "" {
		return
	}
	ctx, cancel := h.call()
	defer cancel()
	polled, err := h.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: job, Wait: durationpb.New(time.Second), Tails: true})
	if err == nil {
		h.job(polled.GetJob())
		h.bytes(polled.GetStdout().GetHead(), 0, 8<<10)
		h.bytes(polled.GetStdout().GetTail(), polled.GetStdout().GetTailOffset(), 8<<10)
	}
	const most = 50
	piece, err := h.Jobs().ReadJobOutput(ctx, &berthv1.ReadJobOutputRequest{JobId: job, MaxBytes: most, Wait: durationpb.New(time.Second)})
	if err == nil {
		h.bytes(piece.GetData(), 0, most)
		h.stats(piece.GetStats())
	}
	follow, cancelFollow := h.call()
	defer cancelFollow()
	if data, _, err := h.ReadAllOutput(follow, job, berthv1.Stream_STREAM_STDOUT); err == nil {
		h.bytes(data, 0, 4<<20)
	}
}

// interact has a job that takes input, a signal and a stop.
func (h *observed) interact() {
	ctx, cancel := h.call()
	defer cancel()
	started, err := h.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: h.sandbox, Spec: &berthv1.JobSpec{
		Shell: "cat; exit 7", Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}, KillGrace: durationpb.New(0),
	}})
	if err != nil {
		return
	}
	id := started.GetJob().GetId()
	_, _ = h.Jobs().WriteJobInput(ctx, &berthv1.WriteJobInputRequest{JobId: id, Data: []byte("12345")})
	_, _ = h.Jobs().WriteJobInput(ctx, &berthv1.WriteJobInputRequest{
		JobId: id, Position: &berthv1.WriteJobInputRequest_Offset{Offset: 5}, Data: []byte("678"),
	})
	_, _ = h.Jobs().SignalJob(ctx, &berthv1.SignalJobRequest{JobId: id, Signal: 18}) // SIGCONT changes nothing
	if stopped, err := h.Jobs().StopJob(ctx, &berthv1.StopJobRequest{JobId: id, Grace: durationpb.New(0)}); err == nil {
		h.job(stopped.GetJob())
	}
}
