package client

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Extent is how far a read of output goes.
type Extent int

// The extents.
const (
	// UntilDone goes on to the output's length at the exit of the job's command.
	UntilDone Extent = iota
	// UntilSealed goes on until no more can come, children that kept the pipe included.
	UntilSealed
	// SoFar ends where the output ends now.
	SoFar
)

// OutputSink is told what a read of output finds, in the order of offsets; every byte of the range is
// either data or gap, once.
type OutputSink interface {
	// Data is called with bytes and the offset of the first; they are valid during the call only.
	Data(offset uint64, data []byte) error
	// Gap is called where bytes were dropped, [from, to).
	Gap(from, to uint64) error
}

// FollowOutput reads one stream of a job from an offset on and returns the offset after the last
// byte or gap that sink was told of, also beside an error, so that a caller can go on from there. It
// outlasts restarts of the broker as WaitJob does. Errors: JOB_NOT_FOUND, what sink returned,
// *UnreachableError, *UnknownOutcomeError (a stopped machine; not with SoFar), ctx's end.
func (c *Client) FollowOutput(ctx context.Context, jobID string, stream berthv1.Stream, offset uint64, extent Extent, sink OutputSink) (uint64, error) {
	f := &follower{client: c, jobID: jobID, stream: stream, extent: extent, sink: sink, offset: offset, gapFrom: offset}
	err := f.run(ctx)
	if gapErr := f.flushGap(); err == nil {
		err = gapErr
	}
	return f.gapFrom, err
}

// CopyOutput writes one stream of a job from an offset on to w until the job is done, and returns
// the offset after the last byte that it wrote and the ranges that were dropped, also beside an
// error. Errors as FollowOutput.
func (c *Client) CopyOutput(ctx context.Context, jobID string, stream berthv1.Stream, offset uint64, w io.Writer) (uint64, []*berthv1.ByteRange, error) {
	sink := &writerSink{w: w}
	next, err := c.FollowOutput(ctx, jobID, stream, offset, UntilDone, sink)
	return next, sink.gaps, err
}

// ReadAllOutput returns what there is of one stream of a job now, and the ranges that were dropped.
// The bytes are in memory as a whole: at most the job's output_limit_bytes.
func (c *Client) ReadAllOutput(ctx context.Context, jobID string, stream berthv1.Stream) ([]byte, []*berthv1.ByteRange, error) {
	var all bytes.Buffer
	sink := &writerSink{w: &all}
	_, err := c.FollowOutput(ctx, jobID, stream, 0, SoFar, sink)
	return all.Bytes(), sink.gaps, err
}

type writerSink struct {
	w    io.Writer
	gaps []*berthv1.ByteRange
}

func (s *writerSink) Data(_ uint64, data []byte) error {
	_, err := s.w.Write(data)
	return err
}

func (s *writerSink) Gap(from, to uint64) error {
	s.gaps = append(s.gaps, &berthv1.ByteRange{From: from, To: to})
	return nil
}

// follower is one read of one stream.
type follower struct {
	client  *Client
	jobID   string
	stream  berthv1.Stream
	extent  Extent
	sink    OutputSink
	offset  uint64 // read on here
	gapFrom uint64 // the sink was told of everything before; a gap up to offset is not told yet
}

func (f *follower) run(ctx context.Context) error {
	for idle := 0; ; idle++ {
		begun := time.Now()
		reply, err := f.read(ctx)
		if to, dropped := f.droppedUntil(err); dropped {
			f.offset, idle = to, -1
			continue
		}
		switch {
		case err != nil && (f.extent == SoFar || !f.client.keepWaiting(ctx, err)):
			return f.client.silent(ctx, err)
		case err != nil:
		case len(reply.GetData()) > 0:
			if err := f.take(reply); err != nil {
				return err
			}
			if f.reachedEnd(reply) {
				return nil
			}
			idle = -1
			continue
		default:
			f.offset = max(f.offset, reply.GetNextOffset())
			if f.reachedEnd(reply) || f.extent == SoFar {
				return nil
			}
			over, err := f.jobIsOver(ctx)
			if over || err != nil {
				return err
			}
			if time.Since(begun) >= time.Second {
				idle = -1 // it waited as asked: ask again at once
				continue
			}
		}
		if !pause(ctx, backoffFor(idle, nil)) {
			return endedWhile(ctx, "reading the output of job "+f.jobID)
		}
	}
}

func (f *follower) read(ctx context.Context) (*berthv1.ReadJobOutputResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, pollWait+answerSlack)
	defer cancel()
	request := &berthv1.ReadJobOutputRequest{JobId: f.jobID, Stream: f.stream, Offset: f.offset, MaxBytes: readBytes}
	if f.extent != SoFar {
		request.Wait = durationpb.New(pollWait)
	}
	return f.client.Jobs().ReadJobOutput(ctx, request)
}

// droppedUntil says where to read on when the asked offset was dropped.
func (f *follower) droppedUntil(err error) (uint64, bool) {
	if !Is(err, berthv1.Reason_REASON_OUTPUT_EXPIRED) {
		return 0, false
	}
	to, parseErr := strconv.ParseUint(Metadata(err)["first_kept"], 10, 64)
	return to, parseErr == nil && to > f.offset
}

// take hands the sink what a reply holds, skipping bytes that it was told of already.
func (f *follower) take(reply *berthv1.ReadJobOutputResponse) error {
	from, data := reply.GetOffset(), reply.GetData()
	if from < f.offset {
		known := min(f.offset-from, uint64(len(data)))
		from, data = from+known, data[known:]
	}
	if len(data) == 0 {
		return fmt.Errorf("reading the output of job %s: asked for offset %d, got bytes before it", f.jobID, f.offset)
	}
	f.offset = from
	if err := f.flushGap(); err != nil {
		return err
	}
	if err := f.sink.Data(from, data); err != nil {
		return err
	}
	f.offset += uint64(len(data))
	f.gapFrom = f.offset
	return nil
}

// flushGap tells the sink of the bytes that were skipped since its last data.
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
	facts := reply.GetFacts()
	return f.extent == UntilDone && facts != nil && facts.EndAtExit != nil && f.offset >= facts.GetEndAtExit()
}

// jobIsOver decides about a stream that is not sealed and has no byte now: a job that is DONE and
// whose whole output was read ends it, and a lost one will never seal it.
func (f *follower) jobIsOver(ctx context.Context) (bool, error) {
	reply, err := f.client.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: f.jobID})
	if err != nil {
		if f.client.keepWaiting(ctx, err) {
			return false, nil
		}
		return false, err
	}
	job := reply.GetJob()
	facts := job.GetStdout()
	if f.stream == berthv1.Stream_STREAM_STDERR {
		facts = job.GetStderr()
	}
	switch job.GetState() {
	case berthv1.JobState_JOB_STATE_UNKNOWN:
		return false, &UnknownOutcomeError{Job: job}
	case berthv1.JobState_JOB_STATE_DONE:
		lost := job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST
		return f.offset >= facts.GetTotalBytes() && (lost || f.extent == UntilDone), nil
	}
	return false, nil
}
