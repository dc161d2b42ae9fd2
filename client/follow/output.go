package follow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client/connection"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// maxReadBytes is asked for in one read of output: the most that the API gives.
const maxReadBytes = 1 << 20

// Extent is how far a read of output goes.
type Extent int

// The extents.
const (
	// UntilDone reads to the output's length at the exit of the job's command.
	UntilDone Extent = iota
	// UntilSealed reads until no more can come, children that kept the pipe included.
	UntilSealed
	// SoFar ends where the output ends now.
	SoFar
)

// OutputSink receives what a read of output finds, in the order of offsets; every byte of the range is
// either data or gap, once.
type OutputSink interface {
	// Data is called with bytes and the offset of the first; they are valid during the call only.
	Data(offset uint64, data []byte) error
	// Gap is called where bytes were dropped, [from, to).
	Gap(from, to uint64) error
}

// Output reads one stream of a job from an offset on and returns the offset after the last byte or gap
// that sink was given, also beside an error, so that a caller can go on from there. Bytes come as the
// command writes them. It outlasts restarts of the broker as Wait does. Errors: JOB_NOT_FOUND, what sink
// returned, *UnreachableError, *UnknownOutcomeError (a stopped machine; not with SoFar), ctx's end.
func Output(ctx context.Context, conn *connection.Conn, jobID string, stream berthv1.Stream, offset uint64, extent Extent, sink OutputSink) (uint64, error) {
	f := &follower{conn: conn, jobID: jobID, stream: stream, extent: extent, sink: sink, offset: offset, gapFrom: offset}
	err := f.run(ctx)
	if gapErr := f.flushGap(); err == nil {
		err = gapErr
	}
	return f.gapFrom, err
}

// follower is one read of one stream.
type follower struct {
	conn    *connection.Conn
	jobID   string
	stream  berthv1.Stream
	extent  Extent
	sink    OutputSink
	offset  uint64 // read on here
	gapFrom uint64 // the sink was given everything before; a gap up to offset is not reported yet
	polling bool   // by ReadJobOutput: only what is there now is wanted, or the broker does not stream
}

func (f *follower) run(ctx context.Context) error {
	f.polling = f.extent == SoFar
	for idle := 0; ; idle++ {
		begun, from := time.Now(), f.offset
		var over bool
		var err error
		if f.polling {
			over, err = f.poll(ctx)
		} else {
			over, err = f.receive(ctx)
		}
		var sink *sinkError
		switch to, dropped := f.droppedUntil(err); {
		case dropped:
			f.offset, idle = to, -1
			continue
		case errors.As(err, &sink):
			return sink.cause
		case err != nil && (f.extent == SoFar || !f.conn.KeepWaiting(ctx, err)):
			return f.conn.Unanswered(ctx, err)
		case over:
			return nil
		case err == nil && (f.offset > from || time.Since(begun) >= time.Second):
			idle = -1 // it gave something, or waited as asked: go on at once
			continue
		case f.offset > from:
			idle = 0
		}
		if !connection.Pause(ctx, connection.BackoffFor(idle, err)) {
			return connection.EndedWhile(ctx, "reading the output of "+f.jobID)
		}
	}
}

// sinkError is what the sink returned, which ends the read.
type sinkError struct{ cause error }

func (e *sinkError) Error() string { return e.cause.Error() }

// receive takes the output as the broker sends it, and says whether it is over.
func (f *follower) receive(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := f.conn.Jobs().FollowJob(ctx, &berthv1.FollowJobRequest{
		JobId: f.jobID, StdoutOffset: f.offset, StderrOffset: f.offset,
		Streams: []berthv1.Stream{f.stream}, UntilSealed: f.extent == UntilSealed,
	})
	for err == nil {
		var reply *berthv1.FollowJobResponse
		if reply, err = stream.Recv(); err != nil {
			break
		}
		switch message := reply.GetMessage().(type) {
		case *berthv1.FollowJobResponse_Chunk:
			if message.Chunk.GetOffset()+uint64(len(message.Chunk.GetData())) > f.offset {
				err = f.take(message.Chunk.GetOffset(), message.Chunk.GetData())
			}
		case *berthv1.FollowJobResponse_Gap:
			f.offset = max(f.offset, message.Gap.GetRange().GetTo())
		case *berthv1.FollowJobResponse_Done:
			// Where the broker sent less than there is, polling gets the rest, or says why not.
			f.polling = !f.hasAll(message.Done)
			return !f.polling, nil
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		return f.jobIsOver(ctx)
	case connection.Code(err) == codes.Unimplemented:
		f.polling = true
		return false, nil
	case MayBeStopped(err):
		if unknown := Unknown(ctx, f.conn, f.jobID); unknown != nil {
			return false, unknown
		}
	}
	return false, err
}

// hasAll says whether everything of a job that is done was read, as far as it goes.
func (f *follower) hasAll(job *berthv1.Job) bool {
	stats := statsOf(job, f.stream)
	if f.extent == UntilSealed {
		return f.offset >= stats.GetTotalBytes()
	}
	return f.offset >= stats.GetEndAtExit()
}

func statsOf(job *berthv1.Job, stream berthv1.Stream) *berthv1.OutputStats {
	if stream == berthv1.Stream_STREAM_STDERR {
		return job.GetStderr()
	}
	return job.GetStdout()
}

// poll reads one chunk and says whether it was the last.
func (f *follower) poll(ctx context.Context) (bool, error) {
	reply, err := f.read(ctx)
	switch {
	case err != nil:
		return false, err
	case len(reply.GetData()) > 0:
		err := f.take(reply.GetOffset(), reply.GetData())
		return f.reachedEnd(reply), err
	}
	f.offset = max(f.offset, reply.GetNextOffset())
	if f.reachedEnd(reply) || f.extent == SoFar {
		return true, nil
	}
	return f.jobIsOver(ctx)
}

func (f *follower) read(ctx context.Context) (*berthv1.ReadJobOutputResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, connection.PollWait+connection.AnswerSlack)
	defer cancel()
	request := &berthv1.ReadJobOutputRequest{JobId: f.jobID, Stream: f.stream, Offset: f.offset, MaxBytes: maxReadBytes}
	if f.extent != SoFar {
		request.Wait = durationpb.New(connection.PollWait)
	}
	return f.conn.Jobs().ReadJobOutput(ctx, request)
}

// droppedUntil says where to read on when the asked offset was dropped.
func (f *follower) droppedUntil(err error) (uint64, bool) {
	if !connection.Is(err, berthv1.Reason_REASON_OUTPUT_EXPIRED) {
		return 0, false
	}
	to, parseErr := strconv.ParseUint(connection.Metadata(err)["first_kept"], 10, 64)
	return to, parseErr == nil && to > f.offset
}

// take gives the sink a chunk, without the bytes that it has already.
func (f *follower) take(from uint64, data []byte) error {
	if from < f.offset {
		known := min(f.offset-from, uint64(len(data)))
		from, data = from+known, data[known:]
	}
	if len(data) == 0 {
		return fmt.Errorf("reading the output of %s: asked for offset %d, got bytes before it", f.jobID, f.offset)
	}
	f.offset = from
	if err := f.flushGap(); err != nil {
		return &sinkError{cause: err}
	}
	if err := f.sink.Data(from, data); err != nil {
		return &sinkError{cause: err}
	}
	f.offset += uint64(len(data))
	f.gapFrom = f.offset
	return nil
}

// flushGap reports to the sink the bytes that were skipped since its last data.
func (f *follower) flushGap() error {
	if f.offset <= f.gapFrom {
		return nil
	}
	if err := f.sink.Gap(f.gapFrom, f.offset); err != nil {
		return err
	}
	f.gapFrom = f.offset
	return nil
}

func (f *follower) reachedEnd(reply *berthv1.ReadJobOutputResponse) bool {
	if reply.GetEof() {
		return true
	}
	stats := reply.GetStats()
	return f.extent == UntilDone && stats != nil && stats.Exit != nil && f.offset >= stats.GetEndAtExit()
}

// jobIsOver decides about a stream that is not sealed and has no byte now: a job that is DONE and
// whose whole output was read ends it, and a lost one will never seal it.
func (f *follower) jobIsOver(ctx context.Context) (bool, error) {
	reply, err := f.conn.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: f.jobID})
	if err != nil {
		if f.conn.KeepWaiting(ctx, err) {
			return false, nil
		}
		return false, err
	}
	job := reply.GetJob()
	stats := statsOf(job, f.stream)
	switch job.GetState() {
	case berthv1.JobState_JOB_STATE_UNKNOWN:
		return false, &UnknownOutcomeError{Job: job}
	case berthv1.JobState_JOB_STATE_DONE:
		lost := job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST
		return f.offset >= stats.GetTotalBytes() && (lost || f.extent == UntilDone), nil
	}
	return false, nil
}
