package robust

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// tailTimeout bounds one that follows a job over kills.
const tailTimeout = 6 * time.Second

func (a *actor) poll(ctx context.Context) {
	job, found := a.job()
	if !found {
		return
	}
	e := a.event("PollJob")
	e.ID = job.id
	request := &berthv1.PollJobRequest{JobId: job.id, Wait: milliseconds(a.random.IntN(maxWaitMillis)), Tails: a.random.IntN(2) == 0}
	_ = a.s.attempt(ctx, e, callTimeout, func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().PollJob(ctx, request)
		if err == nil {
			e.told(reply.GetJob())
			if request.GetTails() {
				e.bounded(reply.GetJob(), false, reply.GetStdout())
				e.bounded(reply.GetJob(), true, reply.GetStderr())
			}
		}
		return err
	})
}

func (a *actor) read(ctx context.Context) {
	job, found := a.job()
	if !found {
		return
	}
	e := a.event("ReadJobOutput")
	e.ID = job.id
	stream, all := berthv1.Stream_STREAM_STDOUT, job.plan.Stdout()
	if a.random.IntN(3) == 0 {
		stream, all = berthv1.Stream_STREAM_STDERR, job.plan.Stderr()
	}
	request := &berthv1.ReadJobOutputRequest{
		JobId: job.id, Stream: stream, Offset: uint64(a.random.IntN(len(all) + 1)), MaxBytes: uint64(1 + a.random.IntN(256<<10)),
		Wait: milliseconds(a.random.IntN(maxWaitMillis)),
	}
	_ = a.s.attempt(ctx, e, callTimeout, func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().ReadJobOutput(ctx, request)
		if err == nil {
			e.Chunks = []Chunk{{
				Stderr: stream == berthv1.Stream_STREAM_STDERR, Offset: reply.GetOffset(), Bytes: uint64(len(reply.GetData())), Sum: Sum(reply.GetData()),
			}}
		}
		return err
	})
}

// follow follows a job for a while, or to its end.
func (a *actor) follow(ctx context.Context) {
	job, found := a.job()
	if !found {
		return
	}
	e := a.event("FollowJob")
	e.ID = job.id
	most := time.Duration(100+a.random.IntN(1500)) * time.Millisecond
	_ = a.s.attempt(ctx, e, most, func(ctx context.Context, e *Event) error {
		stream, err := a.client.Jobs().FollowJob(ctx, &berthv1.FollowJobRequest{JobId: job.id})
		if err != nil {
			return err
		}
		// From the first byte on: a first chunk that does not begin there is a byte that was left out.
		e.Chunks = []Chunk{{Sum: Sum(nil)}, {Stderr: true, Sum: Sum(nil)}}
		for {
			reply, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			e.followed(reply)
		}
	})
}

// tail follows a job as the client does that comes back by itself, over kills of the broker.
func (a *actor) tail(ctx context.Context) {
	job, found := a.job(WorkLines, WorkBulk, WorkCat, WorkChild)
	if !found {
		return
	}
	e := a.event("FollowOutput")
	e.ID = job.id
	_ = a.s.attempt(ctx, e, tailTimeout, func(ctx context.Context, e *Event) error {
		sink := &chunks{all: []Chunk{{Sum: Sum(nil)}}}
		_, err := a.s.patient.FollowOutput(ctx, job.id, berthv1.Stream_STREAM_STDOUT, 0, client.UntilDone, sink)
		e.Chunks = sink.all
		return err
	})
}

func (e *Event) followed(reply *berthv1.FollowJobResponse) {
	switch message := reply.GetMessage().(type) {
	case *berthv1.FollowJobResponse_Chunk:
		chunk := message.Chunk
		e.Chunks = append(e.Chunks, Chunk{
			Stderr: chunk.GetStream() == berthv1.Stream_STREAM_STDERR, Offset: chunk.GetOffset(), Bytes: uint64(len(chunk.GetData())), Sum: Sum(chunk.GetData()),
		})
	case *berthv1.FollowJobResponse_Gap:
		gap := message.Gap
		e.Chunks = append(e.Chunks, Chunk{
			Stderr: gap.GetStream() == berthv1.Stream_STREAM_STDERR, Offset: gap.GetRange().GetFrom(), Bytes: gap.GetRange().GetTo() - gap.GetRange().GetFrom(), Gap: true,
		})
	case *berthv1.FollowJobResponse_Done:
		e.told(message.Done)
	}
}

func (a *actor) listJobs(ctx context.Context) {
	sandbox := a.sandbox()
	_ = a.s.attempt(ctx, a.event("ListJobs"), callTimeout, func(ctx context.Context, e *Event) error {
		reply, err := a.client.Jobs().ListJobs(ctx, &berthv1.ListJobsRequest{SandboxId: sandbox, PageSize: 50})
		for _, job := range reply.GetJobs() {
			e.Jobs = append(e.Jobs, showJob(job))
		}
		return err
	})
}
