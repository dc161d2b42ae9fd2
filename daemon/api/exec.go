package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// thanksMost is how long a caller may take to half-close after the end, which says that it has it.
const thanksMost = 5 * time.Second

func (j *jobService) Exec(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]) error {
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return fault.Invalid("start", "the first message must be start or reattach")
	}
	if err != nil {
		return err
	}
	peer := &execPeer{stream: stream, received: make(chan received), closed: make(chan struct{}), over: make(chan struct{})}
	defer close(peer.over)
	go peer.receive()
	switch message := first.GetMessage().(type) {
	case *berthv1.ExecRequest_Start:
		err = j.execStart(stream.Context(), message.Start, peer)
	case *berthv1.ExecRequest_Reattach:
		if err := required("reattach.job_id", message.Reattach.GetJobId()); err != nil {
			return err
		}
		err = j.Jobs.Reattach(stream.Context(), DefaultNamespace, message.Reattach.GetJobId(),
			message.Reattach.GetStdoutOffset(), message.Reattach.GetStderrOffset(), peer)
	default:
		return fault.Invalid("start", "the first message must be start or reattach")
	}
	if peer.ended != nil {
		j.Jobs.Thanked(peer.ended, err == nil && peer.thanked(stream.Context()))
	}
	return err
}

func (j *jobService) execStart(ctx context.Context, start *berthv1.ExecStart, peer *execPeer) error {
	call, err := j.call("berth.v1.JobService/Exec", start)
	if err != nil {
		return err
	}
	if err := validJobRequest(start.GetSandboxId(), start.GetSpec()); err != nil {
		return err
	}
	return j.Jobs.Exec(ctx, call, start.GetSandboxId(), start.GetSpec(), peer)
}

// execPeer is the caller of an Exec.
type execPeer struct {
	stream   grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]
	received chan received
	closed   chan struct{} // closed when the caller has half-closed, whoever took that from received
	over     chan struct{} // closed when the call ends
	ended    *recordv1.JobRecord
}

type received struct {
	request *berthv1.ExecRequest
	err     error
}

// receive reads the caller's messages as they come: it ends with the stream, which gRPC ends when the
// handler has returned.
func (p *execPeer) receive() {
	for {
		request, err := p.stream.Recv()
		if errors.Is(err, io.EOF) {
			close(p.closed)
		}
		select {
		case p.received <- received{request, err}:
		case <-p.over:
			return
		}
		if err != nil {
			return
		}
	}
}

func (p *execPeer) Receive() (*guestv1.AttachRequest, error) {
	select {
	case got := <-p.received:
		if got.err != nil {
			return nil, got.err
		}
		return toGuest(got.request)
	case <-p.over:
		return nil, io.EOF
	case <-p.stream.Context().Done():
		return nil, p.stream.Context().Err()
	}
}

// thanked waits for the caller's half-close after the end.
func (p *execPeer) thanked(ctx context.Context) bool {
	timer := time.NewTimer(thanksMost)
	defer timer.Stop()
	for {
		select {
		case <-p.closed:
			return true
		case got := <-p.received:
			if got.err != nil {
				return errors.Is(got.err, io.EOF)
			}
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// toGuest maps what a caller sends after its first message.
func toGuest(request *berthv1.ExecRequest) (*guestv1.AttachRequest, error) {
	switch message := request.GetMessage().(type) {
	case *berthv1.ExecRequest_Input:
		if len(message.Input.GetData()) > maxRead {
			return nil, fault.Invalid("input.data", "must be at most %d bytes a message", maxRead)
		}
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Input{Input: &guestv1.AttachInput{
			Offset: message.Input.GetOffset(), Data: message.Input.GetData(), Eof: message.Input.GetEof(),
		}}}, nil
	case *berthv1.ExecRequest_Resize:
		if err := validTerminal(message.Resize); err != nil {
			return nil, err
		}
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Resize{Resize: message.Resize}}, nil
	case *berthv1.ExecRequest_Signal:
		if err := validSignal(message.Signal); err != nil {
			return nil, err
		}
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Signal{Signal: message.Signal}}, nil
	default:
		return nil, fault.Invalid("message", "must be input, resize or signal after the first")
	}
}

func validSignal(signal uint32) error {
	if signal < 1 || signal > maxSignal {
		return fault.Invalid("signal", "must be a signal's number, 1 to %d", maxSignal)
	}
	return nil
}

func (p *execPeer) Started(job *recordv1.JobRecord, inputOffset uint64) error {
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Started{Started: &berthv1.ExecStarted{
		Job: showJob(job), InputOffset: inputOffset,
	}}})
}

func (p *execPeer) Chunk(chunk *berthv1.OutputChunk) error {
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Chunk{Chunk: chunk}})
}

func (p *execPeer) Gap(gap *berthv1.OutputGap) error {
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Gap{Gap: gap}})
}

func (p *execPeer) InputTaken(offset uint64) error {
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_InputAcknowledged{InputAcknowledged: offset}})
}

func (p *execPeer) Done(job *recordv1.JobRecord) error {
	p.ended = job
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Done{Done: showJob(job)}})
}

func (j *jobService) FollowJob(request *berthv1.FollowJobRequest, stream grpc.ServerStreamingServer[berthv1.FollowJobResponse]) error {
	if err := required("job_id", request.GetJobId()); err != nil {
		return err
	}
	wanted := request.GetStreams()
	if len(wanted) == 0 {
		wanted = []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}
	}
	offsets := map[berthv1.Stream]uint64{}
	for i, s := range wanted {
		switch s {
		case berthv1.Stream_STREAM_STDOUT:
			offsets[s] = request.GetStdoutOffset()
		case berthv1.Stream_STREAM_STDERR:
			offsets[s] = request.GetStderrOffset()
		default:
			return fault.Invalid(fmt.Sprintf("streams[%d]", i), "is not one of STREAM_STDOUT, STREAM_STDERR")
		}
	}
	return j.Jobs.FollowOutput(stream.Context(), DefaultNamespace, request.GetJobId(), offsets, request.GetUntilSealed(), followPeer{stream})
}

// followPeer is the caller of a FollowJob: it only listens.
type followPeer struct {
	stream grpc.ServerStreamingServer[berthv1.FollowJobResponse]
}

func (p followPeer) Started(*recordv1.JobRecord, uint64) error { return nil }
func (p followPeer) InputTaken(uint64) error                   { return nil }

func (p followPeer) Receive() (*guestv1.AttachRequest, error) { return nil, io.EOF }

func (p followPeer) Chunk(chunk *berthv1.OutputChunk) error {
	return p.stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Chunk{Chunk: chunk}})
}

func (p followPeer) Gap(gap *berthv1.OutputGap) error {
	return p.stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Gap{Gap: gap}})
}

func (p followPeer) Done(job *recordv1.JobRecord) error {
	return p.stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Done{Done: showJob(job)}})
}

func (j *jobService) WriteJobInput(ctx context.Context, request *berthv1.WriteJobInputRequest) (*berthv1.WriteJobInputResponse, error) {
	call, err := j.call("berth.v1.JobService/WriteJobInput", request)
	if err != nil {
		return nil, err
	}
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	if len(request.GetData()) > maxStdinBytes {
		return nil, fault.Invalid("data", "must be at most 1 MiB: write the rest at the next offset")
	}
	next, err := j.Jobs.WriteInput(ctx, call, request.GetJobId(), request.GetOffset(), request.GetData(), request.GetEof())
	if err != nil {
		return nil, err
	}
	return &berthv1.WriteJobInputResponse{NextOffset: next}, nil
}

func (j *jobService) SignalJob(ctx context.Context, request *berthv1.SignalJobRequest) (*berthv1.SignalJobResponse, error) {
	call, err := j.call("berth.v1.JobService/SignalJob", request)
	if err != nil {
		return nil, err
	}
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	if err := validSignal(request.GetSignal()); err != nil {
		return nil, err
	}
	job, err := j.Jobs.Signal(ctx, call, request.GetJobId(), request.GetSignal())
	if err != nil {
		return nil, err
	}
	return &berthv1.SignalJobResponse{Job: showJob(job)}, nil
}

var _ jobs.Peer = (*execPeer)(nil)
var _ jobs.Peer = followPeer{}
