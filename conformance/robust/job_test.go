package robust

import (
	"bytes"
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	tokenLabel  = "token"
	stopGrace   = 300              // milliseconds
	execTimeout = 20 * time.Second // of an attached command, its reconnections included
)

func (s *suite) spec(plan Plan) *berthv1.JobSpec {
	counter := s.counter
	if counter == "" {
		counter = "starts"
	}
	spec := &berthv1.JobSpec{Shell: plan.Script(counter), Labels: map[string]string{tokenLabel: plan.Token}, KillGrace: milliseconds(stopGrace)}
	switch plan.Work {
	case WorkCat:
		spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	case WorkGiven:
		spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: plan.Input()}}
	}
	if plan.TimeoutMS > 0 {
		spec.Timeout = milliseconds(plan.TimeoutMS)
	}
	return spec
}

func showJob(job *berthv1.Job) Job {
	outcome := job.GetOutcome()
	shown := Job{
		ID: job.GetId(), Sandbox: job.GetSandboxId(), Machine: job.GetMachineId(), Generation: job.GetGeneration(), Token: job.GetSpec().GetLabels()[tokenLabel],
		State: strings.TrimPrefix(job.GetState().String(), "JOB_STATE_"), Signal: outcome.GetWaitStatus().GetSignal(), Reason: outcome.GetReason(),
		Kept: job.GetSpec().Keep == nil || job.GetSpec().GetKeepOutput(),
	}
	if outcome != nil {
		shown.Cause = strings.TrimPrefix(outcome.GetCause().String(), "CAUSE_")
		if outcome.Exit != nil {
			shown.Code = new(outcome.GetExitCode())
		}
	}
	return shown
}

// told writes down that a reply names a job.
func (e *Event) told(job *berthv1.Job) {
	e.ID = job.GetId()
	e.Jobs = append(e.Jobs, showJob(job))
}

// bounded adds the bytes of a bounded output that hang together.
func (e *Event) bounded(job *berthv1.Job, stderr bool, output *berthv1.BoundedOutput) {
	chunks := []Chunk{{Bytes: uint64(len(output.GetHead())), Sum: Sum(output.GetHead())}}
	if tail := output.GetTail(); len(tail) > 0 && output.GetTailOffset() != chunks[0].Bytes {
		chunks = []Chunk{{Offset: output.GetTailOffset(), Bytes: uint64(len(tail)), Sum: Sum(tail)}}
	} else if len(tail) > 0 {
		chunks = append(chunks, Chunk{Offset: output.GetTailOffset(), Bytes: uint64(len(tail)), Sum: Sum(tail)})
	}
	for _, chunk := range chunks {
		chunk.Job, chunk.Stderr = job.GetId(), stderr
		e.Chunks = append(e.Chunks, chunk)
	}
}

func (s *suite) noteJob(job *berthv1.Job, plan Plan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.jobs) - 1; i >= 0; i-- {
		if s.jobs[i].id == job.GetId() {
			return
		}
	}
	s.jobs = append(s.jobs, known{job.GetId(), job.GetSandboxId(), plan})
}

func (a *actor) start(ctx context.Context) {
	sandbox := a.sandbox()
	if sandbox == "" {
		return
	}
	e := a.event("StartJob")
	e.RequestID = a.requestID()
	make := func() variant {
		plan := NewPlan(a.random, a.token(), WorkLines, WorkLines, WorkBulk, WorkEndless, WorkCat, WorkCat, WorkGiven, WorkChild)
		return variant{plan.Token, &plan, func(ctx context.Context, e *Event) error {
			reply, err := a.client.Jobs().StartJob(ctx, &berthv1.StartJobRequest{RequestId: e.RequestID, SandboxId: sandbox, Spec: a.s.spec(plan)})
			if err == nil {
				e.told(reply.GetJob())
				a.s.noteJob(reply.GetJob(), plan)
			}
			return err
		}}
	}
	meant := make()
	a.request(ctx, e, meant, make())
	if meant.plan.Work == WorkCat {
		a.feedLater(meant.plan.Token)
	}
}

// feedLater takes a job on whose input is open, if it was started.
func (a *actor) feedLater(token string) {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	for _, job := range a.s.jobs {
		if job.plan.Token == token {
			a.feeding = append(a.feeding, &feed{job: job})
		}
	}
}

// runVariant is a command whose caller waits for it.
func (a *actor) runVariant(sandbox string) variant {
	plan := NewPlan(a.random, a.token(), WorkLines, WorkGiven, WorkBulk)
	return variant{plan.Token, &plan, func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{RequestId: e.RequestID, SandboxId: sandbox, Spec: a.s.spec(plan)})
		if err == nil {
			e.told(reply.GetJob())
			e.bounded(reply.GetJob(), false, reply.GetStdout())
			e.bounded(reply.GetJob(), true, reply.GetStderr())
			e.Whole = reply.GetStdout().GetOmittedBytes() == 0 && reply.GetStderr().GetOmittedBytes() == 0 && !reply.GetJob().GetOutcome().GetOutputStillOpen()
			a.s.noteJob(reply.GetJob(), plan)
		}
		return err
	}}
}

// run runs a command without a request id: it is tried once.
func (a *actor) run(ctx context.Context) {
	if sandbox := a.sandbox(); sandbox != "" {
		v := a.runVariant(sandbox)
		most := callTimeout
		if a.random.IntN(5) == 0 {
			most = time.Duration(1+a.random.IntN(100)) * time.Millisecond
		}
		_ = a.s.attempt(ctx, with(a.event("RunCommand"), v), most, v.call)
	}
}

func (a *actor) runRecorded(ctx context.Context) {
	if sandbox := a.sandbox(); sandbox != "" {
		e := a.event("RunCommand")
		e.RequestID = a.requestID()
		a.request(ctx, e, a.runVariant(sandbox), a.runVariant(sandbox))
	}
}

// exec runs an attached command with standard input, over as many connections as it takes.
func (a *actor) exec(ctx context.Context) {
	sandbox := a.sandbox()
	if sandbox == "" {
		return
	}
	plan := NewPlan(a.random, a.token(), WorkLines, WorkCat, WorkCat)
	e := with(a.event("Exec"), variant{body: plan.Token, plan: &plan})
	if a.random.IntN(2) == 0 {
		e.RequestID = a.requestID()
	}
	slow := a.random.IntN(2) == 0
	_ = a.s.attempt(ctx, e, execTimeout, func(ctx context.Context, e *Event) error {
		stdout, stderr := &attachedOutput{}, &attachedOutput{stderr: true}
		streams := client.ExecIO{Stdout: stdout, Stderr: stderr, RequestID: e.RequestID, Gap: func(stream berthv1.Stream, from, to uint64) {
			if stream == berthv1.Stream_STREAM_STDERR {
				stderr.gap(from, to)
			} else {
				stdout.gap(from, to)
			}
		}}
		if plan.Work == WorkCat {
			streams.Stdin = io.Reader(bytes.NewReader(plan.Input()))
			if slow {
				streams.Stdin = &slowReader{rest: plan.Input()}
			}
		}
		job, err := a.s.patient.Exec(ctx, sandbox, a.s.spec(plan), streams)
		if job == nil {
			return err
		}
		e.told(job)
		e.Chunks = append(stdout.chunks, stderr.chunks...)
		e.Whole = err == nil && !job.GetOutcome().GetOutputStillOpen()
		a.s.noteJob(job, plan)
		return err
	})
}

// attachedOutput writes down what an attached command's caller is given of one stream, and what it is told
// was dropped.
type attachedOutput struct {
	stderr bool
	next   uint64
	chunks []Chunk
}

func (o *attachedOutput) Write(data []byte) (int, error) {
	o.chunks = append(o.chunks, Chunk{Stderr: o.stderr, Offset: o.next, Bytes: uint64(len(data)), Sum: Sum(data)})
	o.next += uint64(len(data))
	return len(data), nil
}

func (o *attachedOutput) gap(from, to uint64) {
	o.chunks = append(o.chunks, Chunk{Stderr: o.stderr, Offset: from, Bytes: to - from, Gap: true})
	o.next = to
}

// slowReader gives its bytes in chunks, with pauses, so that a kill comes between them.
type slowReader struct{ rest []byte }

func (r *slowReader) Read(into []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	fixture.Pause(20 * time.Millisecond)
	n := copy(into[:min(len(into), 8<<10)], r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// feedSome writes the next chunk of a job's input, some of them twice at once, some again what was
// written before.
func (a *actor) feedSome(ctx context.Context) {
	if len(a.feeding) == 0 {
		return
	}
	i := a.random.IntN(len(a.feeding))
	f := a.feeding[i]
	input := f.job.plan.Input()
	from := f.next
	if from > 0 && a.random.IntN(2) == 0 {
		from -= uint64(a.random.IntN(int(from)))
	}
	to := min(uint64(len(input)), from+1+uint64(a.random.IntN(maxInputBytes/6)))
	eof := to == uint64(len(input))
	var mu sync.Mutex
	next := f.next
	e := a.event("WriteJobInput")
	e.ID = f.job.id
	write := func(ctx context.Context, e *Event) error {
		e.Sent = to
		reply, err := a.client.Jobs().WriteJobInput(ctx, &berthv1.WriteJobInputRequest{JobId: f.job.id, Position: &berthv1.WriteJobInputRequest_Offset{Offset: from}, Data: input[from:to], Eof: eof})
		mu.Lock()
		defer mu.Unlock()
		e.Taken = reply.GetNextOffset()
		next = max(next, e.Taken)
		return err
	}
	var group sync.WaitGroup
	if a.random.IntN(4) == 0 {
		group.Go(func() { _ = a.s.attempt(ctx, e, callTimeout, write) })
	}
	err := a.insist(ctx, a.random, e, write)
	group.Wait()
	f.next = next
	if err != nil || eof && next == to || next > uint64(len(input)) {
		// What is not written yet is written when all is quiet. That more was taken than there is, the check says.
		a.feeding = slices.Delete(a.feeding, i, i+1)
	}
}

func (a *actor) signal(ctx context.Context) {
	job, found := a.job(WorkEndless)
	if !found {
		return
	}
	number := []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM, syscall.SIGINT}[a.random.IntN(3)]
	e := a.event("SignalJob")
	e.RequestID, e.ID, e.Count = a.requestID(), job.id, int(number)
	a.request(ctx, e, variant{body: job.id, call: func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().SignalJob(ctx, &berthv1.SignalJobRequest{RequestId: e.RequestID, JobId: job.id, Signal: uint32(number)})
		if err == nil {
			e.told(reply.GetJob())
		}
		return err
	}})
}

func (a *actor) stop(ctx context.Context) {
	works := []Work{WorkEndless}
	if a.random.IntN(4) == 0 {
		works = nil
	}
	job, found := a.job(works...)
	if !found {
		return
	}
	grace := milliseconds(a.random.IntN(stopGrace))
	e := a.event("StopJob")
	e.RequestID, e.ID = a.requestID(), job.id
	a.request(ctx, e, variant{body: job.id, call: func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().StopJob(ctx, &berthv1.StopJobRequest{RequestId: e.RequestID, JobId: job.id, Grace: grace})
		if err == nil {
			e.told(reply.GetJob())
		}
		return err
	}})
}
