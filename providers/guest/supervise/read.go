package supervise

import (
	"context"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
	"github.com/berth-sandbox/berth/providers/guest/spool"
	"github.com/berth-sandbox/berth/providers/guest/stdio"
)

// Run begins a job, waits for it, and returns the first and last bytes of its output. When ctx ends
// first, the job's disconnect rule applies.
//
// A run that is to be forgotten is not announced to List, since its caller knows.
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
	limit := min(r.GetMaxOutputBytes(), maxRunOutput)
	if response.Stdout, err = excerpt(j.streams[0], limit); err != nil {
		return nil, refusal.New(refusal.Failed, "", "%s is done, but its stdout cannot be read: %v", j.id, err)
	}
	if response.Stderr, err = excerpt(j.streams[1], limit); err != nil {
		return nil, refusal.New(refusal.Failed, "", "%s is done, but its stderr cannot be read: %v", j.id, err)
	}
	if r.GetForget() {
		j.forgetWhenSealed()
	}
	return response, nil
}

// forgetWhenSealed forgets a finished job, at once unless a child still has its output open.
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

// Wait returns when the job is done or the wait is over. It does not count as a reader: the broker itself
// waits for commands whose caller is gone, and that must not keep them alive.
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
		return nil, refusal.New(refusal.Invalid, "", "%v is no stream", r.GetStream())
	}
	limit := r.GetMaxBytes()
	if limit == 0 {
		limit = readDefault
	}
	limit = min(limit, maxRead)
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
		return nil, refusal.New(refusal.Failed, "", "read the output of %s: %v", j.id, err)
	}
	return &guestv1.ReadResponse{Data: data, Stats: stream.Stats(), NextKept: next}, nil
}

// Input writes to a job's stdin at an offset, as far as there is space in its buffer.
func (s *Supervisor) Input(ctx context.Context, r *guestv1.InputRequest) (*guestv1.InputResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	over, cancel := wait(inputTimeout)
	defer cancel()
	for {
		before, _, changed := j.input.State()
		whole, err := j.input.Accept(nil, r.GetOffset(), r.GetData(), false, stdio.StdinBuffer)
		if err != nil {
			return nil, err
		}
		if taken, _, _ := j.input.State(); whole || taken > max(before, r.GetOffset()) {
			return &guestv1.InputResponse{NextOffset: taken}, nil
		}
		select {
		case <-changed:
		case <-over:
			return &guestv1.InputResponse{NextOffset: before}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// AppendInput writes behind what a job's stdin was given before, all of it or nothing.
func (s *Supervisor) AppendInput(ctx context.Context, r *guestv1.AppendInputRequest) (*guestv1.AppendInputResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	over, cancel := wait(inputTimeout)
	defer cancel()
	for {
		_, _, changed := j.input.State()
		offset, whole, err := j.input.Append(r.GetRequestId(), r.GetData(), r.GetEof())
		if err != nil {
			return nil, err
		}
		if whole {
			return &guestv1.AppendInputResponse{Offset: offset, NextOffset: offset + uint64(len(r.GetData()))}, nil
		}
		select {
		case <-changed:
		case <-over:
			return &guestv1.AppendInputResponse{Offset: offset, NextOffset: offset}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// CloseInput closes a job's stdin.
func (s *Supervisor) CloseInput(r *guestv1.CloseInputRequest) (*guestv1.CloseInputResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	taken, closed, _ := j.input.State()
	switch {
	case closed:
		return &guestv1.CloseInputResponse{}, nil
	case r.GetOffset() > taken:
		return nil, refusal.New(refusal.Precondition, refusal.ReasonInputMissing, "the job's input is to end at offset %d, but only %d bytes were taken", r.GetOffset(), taken)
	}
	if _, err := j.input.Accept(nil, r.GetOffset(), nil, true, stdio.StdinBuffer); err != nil {
		return nil, err
	}
	return &guestv1.CloseInputResponse{}, nil
}

// Resize sets the size of a job's terminal.
func (s *Supervisor) Resize(r *guestv1.ResizeRequest) (*guestv1.ResizeResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	if err := j.resize(nil, r.GetSize()); err != nil {
		return nil, err
	}
	return &guestv1.ResizeResponse{}, nil
}

// resize sets the size on behalf of an attached caller, or of nil for one that is not.
func (j *job) resize(by *stdio.Feeder, size *berthv1.TerminalSize) error {
	if err := stdio.CheckSize(size); err != nil {
		return err
	}
	if err := j.input.Allow(by); err != nil {
		return err
	}
	select {
	case <-j.done:
		return nil // a terminal that is no longer read
	default:
	}
	if !j.tty {
		return refusal.New(refusal.Precondition, refusal.ReasonNoTerminal, "%s has no terminal", j.id)
	}
	stdio.Resize(j.pipes[0].File, size)
	return nil
}
