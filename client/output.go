package client

import (
	"bytes"
	"context"
	"io"

	"github.com/berth-sandbox/berth/client/follow"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// FollowOutput reads one stream of a job from an offset on and returns the offset after the last
// byte or gap that sink was given, also beside an error, so that a caller can go on from there. Bytes
// come as the command writes them. It outlasts restarts of the broker as WaitJob does. Errors: JOB_NOT_FOUND, what sink returned,
// *UnreachableError, *UnknownOutcomeError (a stopped machine; not with SoFar), ctx's end.
func (c *Client) FollowOutput(ctx context.Context, jobID string, stream berthv1.Stream, offset uint64, extent Extent, sink OutputSink) (uint64, error) {
	return follow.Output(ctx, c.conn, jobID, stream, offset, extent, sink)
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
