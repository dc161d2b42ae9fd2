package supervise

import (
	"context"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

// Run begins a job, waits for it, and returns the first and last bytes of its output. When ctx ends
// first, the job's disconnect rule holds.
//
// A run that is to be forgotten wakes no List at its start and its end, since its caller knows.
func (s *Supervisor) Run(ctx context.Context, r *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	j, already, err := s.begin(r.GetStart())
	if err != nil {
		return nil, err
	}
	detach := j.attach()
	defer detach()
	if !already {
		if r.GetForget() {
			s.grew(j)
		} else {
			s.table.announce(j)
		}
	}
	select {
	case <-j.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	response := &guestv1.RunResponse{Status: j.status()}
	limit := min(r.GetMaxOutputBytes(), runOutputMost)
	if response.Stdout, err = excerpt(j.streams[0], limit); err != nil {
		return nil, refuse(Failed, "", "job %s is done, but its stdout cannot be read: %v", j.id, err)
	}
	if response.Stderr, err = excerpt(j.streams[1], limit); err != nil {
		return nil, refuse(Failed, "", "job %s is done, but its stderr cannot be read: %v", j.id, err)
	}
	if r.GetForget() {
		j.forgetWhenSealed()
	}
	return response, nil
}

// forgetWhenSealed forgets a finished job, at once unless a child still holds its output.
func (j *job) forgetWhenSealed() {
	j.mu.Lock()
	j.forgetSealed = true
	sealed := j.open == 0
	j.mu.Unlock()
	if sealed {
		j.forgetQuietly()
	}
}

func excerpt(stream *spool.Stream, limit uint64) (*guestv1.Output, error) {
	head, tail, offset, err := stream.Excerpt(limit)
	if err != nil {
		return nil, err
	}
	return &guestv1.Output{Head: head, Tail: tail, TailOffset: offset}, nil
}

// Wait answers when the job is done, or the wait is over. Who only waits is no reader: the broker
// itself waits for commands whose caller went away, and that must not keep them alive.
func (s *Supervisor) Wait(ctx context.Context, r *guestv1.WaitRequest) (*guestv1.WaitResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	if over, cancel := wait(r.GetWait().AsDuration()); over != nil {
		defer cancel()
		select {
		case <-j.done:
		case <-over:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return &guestv1.WaitResponse{Status: j.status()}, nil
}

// Read returns bytes of one stream from an offset, waiting for the first.
func (s *Supervisor) Read(ctx context.Context, r *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	stream := j.streams[0]
	switch r.GetStream() {
	case berthv1.Stream_STREAM_UNSPECIFIED, berthv1.Stream_STREAM_STDOUT:
	case berthv1.Stream_STREAM_STDERR:
		stream = j.streams[1]
	default:
		return nil, refuse(Invalid, "", "%v is no stream", r.GetStream())
	}
	limit := r.GetMaxBytes()
	if limit == 0 {
		limit = readDefault
	}
	limit = min(limit, readMost)
	detach := j.attach()
	defer detach()
	over, cancel := wait(r.GetWait().AsDuration())
	defer cancel()
	for over != nil {
		changed, total, sealed := stream.Changed()
		if total > r.GetOffset() || sealed {
			break
		}
		select {
		case <-changed:
		case <-over:
			over = nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	data, next, err := stream.Read(r.GetOffset(), limit)
	if err != nil {
		return nil, refuse(Failed, "", "read the output of job %s: %v", j.id, err)
	}
	return &guestv1.ReadResponse{Data: data, Facts: stream.Facts(), NextKept: next}, nil
}
