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

// maxAckWait is how long a caller may take to half-close after the end, which says that it has it.
const maxAckWait = 5 * time.Second

func (j *jobService) Exec(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if errors.Is(err, io.EOF) {
		return fault.Invalid("start", "the first message must be start or reattach")
	}
	if err != nil {
		return err
	}
	peer := &execPeer{stream: stream, received: make(chan received), closed: make(chan struct{}), done: make(chan struct{}), over: make(chan struct{})}
	defer close(peer.over)
	go peer.receive()
	switch message := first.GetMessage().(type) {
	case *berthv1.ExecRequest_Start:
		err = j.execStart(ctx, message.Start, peer)
	case *berthv1.ExecRequest_Reattach:
		if err := required("reattach.job_id", message.Reattach.GetJobId()); err != nil {
			return err
		}
		if err := j.notBeyond(ctx, message.Reattach.GetJobId(), message.Reattach.GetStdoutOffset(), message.Reattach.GetStderrOffset()); err != nil {
			return under("reattach", err)
		}
		err = j.Jobs.Reattach(ctx, namespace(ctx), message.Reattach.GetJobId(),
			message.Reattach.GetStdoutOffset(), message.Reattach.GetStderrOffset(), peer)
	default:
		return fault.Invalid("start", "the first message must be start or reattach")
	}
	if peer.ended != nil {
		j.Jobs.Acknowledge(peer.ended, err == nil && peer.acknowledged(ctx))
	}
	return err
}

func (j *jobService) execStart(ctx context.Context, start *berthv1.ExecStart, peer *execPeer) error {
	call, err := j.call(ctx, "berth.v1.JobService/Exec", start)
	if err != nil {
		return under("start", err)
	}
	if err := validJobRequest(start.GetSandboxId(), start.GetSpec()); err != nil {
		return under("start", err)
	}
	return j.Jobs.Exec(ctx, call, start.GetSandboxId(), start.GetSpec(), peer)
}

// execPeer is the caller of an Exec.
type execPeer struct {
	stream   grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]
	received chan received
	closed   chan struct{} // closed when the caller has half-closed, whoever took that from received
	early    bool          // it did so before it was sent the end; good once closed is
	done     chan struct{} // closed when the caller is sent the end
	over     chan struct{} // closed when the call ends
	ended    *recordv1.JobRecord

	// Of stdin, set when the command has started: whether it takes any, where the caller's next piece goes
	// that names no offset, and whether its end was passed on.
	takesInput bool
	next       uint64
	inputEnded bool
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
			select {
			case <-p.done:
			default:
				p.early = true
			}
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
	if p.inputEnded {
		return nil, io.EOF
	}
	select {
	case got := <-p.received:
		switch {
		case errors.Is(got.err, io.EOF) && p.early && p.takesInput:
			p.inputEnded = true
			return inputToGuest(p.next, nil, true), nil
		case got.err != nil:
			return nil, got.err
		}
		return p.toGuest(got.request)
	case <-p.over:
		return nil, io.EOF
	case <-p.stream.Context().Done():
		return nil, p.stream.Context().Err()
	}
}

// acknowledged waits for the caller's half-close after the end.
func (p *execPeer) acknowledged(ctx context.Context) bool {
	timer := time.NewTimer(maxAckWait)
	defer timer.Stop()
	for {
		select {
		case <-p.closed:
			return !p.early
		case got := <-p.received:
			if got.err != nil && !errors.Is(got.err, io.EOF) {
				return false
			}
		case <-timer.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// toGuest maps what a caller sends after its first message.
func (p *execPeer) toGuest(request *berthv1.ExecRequest) (*guestv1.AttachRequest, error) {
	switch message := request.GetMessage().(type) {
	case *berthv1.ExecRequest_Input:
		offset, data := p.next, message.Input.GetData()
		if message.Input.GetPosition() != nil {
			offset = message.Input.GetOffset()
		}
		if err := validInput("input", offset, data); err != nil {
			return nil, err
		}
		p.next = max(p.next, offset+uint64(len(data)))
		return inputToGuest(offset, data, message.Input.GetEof()), nil
	case *berthv1.ExecRequest_Resize:
		if err := validTerminal("resize", message.Resize); err != nil {
			return nil, err
		}
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Resize{Resize: message.Resize}}, nil
	case *berthv1.ExecRequest_Signal, *berthv1.ExecRequest_SignalName:
		signal, err := signalOf(request)
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Signal{Signal: signal}}, err
	default:
		return nil, fault.Invalid("message", "must be input, resize, signal or signal_name after the first")
	}
}

func inputToGuest(offset uint64, data []byte, eof bool) *guestv1.AttachRequest {
	return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Input{Input: &guestv1.AttachInput{Offset: offset, Data: data, Eof: eof}}}
}

func (p *execPeer) Started(job *recordv1.JobRecord, inputOffset uint64) error {
	p.takesInput, p.next = job.GetSpec().GetTty() != nil || job.GetSpec().GetStdin().GetOpen(), inputOffset
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Started{Started: &berthv1.ExecStarted{
		Job: jobToProto(job, basicSpec), InputOffset: inputOffset,
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
	close(p.done)
	return p.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Done{Done: jobToProto(job, basicSpec)}})
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
	ctx := stream.Context()
	if err := j.notBeyond(ctx, request.GetJobId(), offsets[berthv1.Stream_STREAM_STDOUT], offsets[berthv1.Stream_STREAM_STDERR]); err != nil {
		return err
	}
	return j.Jobs.FollowOutput(ctx, namespace(ctx), request.GetJobId(), offsets, request.GetUntilSealed(), followPeer{stream})
}

// notBeyond refuses offsets beyond what a job has written.
func (j *jobService) notBeyond(ctx context.Context, id string, stdout, stderr uint64) error {
	if stdout == 0 && stderr == 0 {
		return nil
	}
	job, err := j.Jobs.Poll(ctx, namespace(ctx), id, 0)
	if err != nil {
		return err
	}
	for _, stream := range []struct {
		field  string
		offset uint64
		stats  *berthv1.OutputStats
	}{{"stdout_offset", stdout, job.GetStdout()}, {"stderr_offset", stderr, job.GetStderr()}} {
		// Without stats nobody knows how much there is: the machine is suspended or stopped.
		if stream.stats != nil && stream.offset > stream.stats.GetTotalBytes() {
			return fault.Invalid(stream.field, "%d is beyond the end: there are %d bytes", stream.offset, stream.stats.GetTotalBytes())
		}
	}
	return nil
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
	return p.stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Done{Done: jobToProto(job, basicSpec)}})
}

var _ jobs.Peer = (*execPeer)(nil)
var _ jobs.Peer = followPeer{}
