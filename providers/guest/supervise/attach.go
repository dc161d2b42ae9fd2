package supervise

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/buffer"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
	"github.com/berth-sandbox/berth/providers/guest/spool"
	"github.com/berth-sandbox/berth/providers/guest/stdio"
)

// Caller is the other end of an Attach. One goroutine may call Recv while another calls Send.
type Caller interface {
	Context() context.Context
	Recv() (*guestv1.AttachRequest, error)
	Send(*guestv1.AttachResponse) error
	// SendChunk sends an AttachResponse with output, and calls done when the chunk's bytes may change.
	SendChunk(chunk *berthv1.OutputChunk, done func()) error
}

// attachment is one caller attached to a job.
type attachment struct {
	job         *job
	caller      Caller
	untilSealed bool
	feeder      stdio.Feeder
	readers     []*reader

	feeds        atomic.Bool   // it sends input and is sent acknowledgements
	due          chan struct{} // has a token when an acknowledgement must be sent, even if nothing changed
	failed       chan error    // has the error caused by what it sent
	acknowledged uint64
	account      *buffer.Account // what is in flight to it
}

// reader is a caller's position in one stream.
type reader struct {
	stream *spool.Stream
	number berthv1.Stream
	cursor *spool.Cursor
}

// Attach serves a caller until the job is done and its output up to the exit, or all of it, was sent.
func (s *Supervisor) Attach(caller Caller) error {
	first, err := caller.Recv()
	if errors.Is(err, io.EOF) || err == nil && first.GetOpen() == nil {
		return refusal.New(refusal.Invalid, "", "the first message of an Attach is open")
	}
	if err != nil {
		return err
	}
	open := first.GetOpen()
	j, begun, err := s.attachTo(open)
	if err != nil {
		return err
	}
	detach := j.attach()
	defer detach()
	if begun {
		s.table.announce(j)
	}
	a := &attachment{job: j, caller: caller, untilSealed: open.GetUntilSealed(), feeder: stdio.Feeder{Exclusive: open.GetOwnInput()},
		account: s.sending.Account(), due: make(chan struct{}, 1), failed: make(chan error, 1)}
	if err := a.follow(open); err != nil {
		return err
	}
	defer a.close()
	if a.feeder.Exclusive {
		j.input.Own(&a.feeder)
		defer j.input.Disown(&a.feeder)
		a.feeds.Store(true)
	}
	status := j.status()
	a.acknowledged = status.GetInputOffset()
	if err := caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_Opened{Opened: status}}); err != nil {
		return err
	}
	// It ends with the call: Recv fails once the call has returned.
	s.work.Go(a.receive)
	return a.send()
}

// attachTo finds the job, or starts it.
func (s *Supervisor) attachTo(open *guestv1.AttachOpen) (j *job, begun bool, err error) {
	start := open.GetStart()
	if start == nil {
		j, err = s.find(open.GetJobId())
		return j, false, err
	}
	if start.GetJobId() != open.GetJobId() {
		return nil, false, refusal.New(refusal.Invalid, "", "an Attach to job %q cannot start job %q", open.GetJobId(), start.GetJobId())
	}
	j, already, err := s.begin(start)
	return j, !already, err
}

func (a *attachment) follow(open *guestv1.AttachOpen) error {
	for i, number := range []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR} {
		offset := open.GetStdoutOffset()
		if i == 1 {
			offset = open.GetStderrOffset()
		}
		if wanted := open.GetStreams(); len(wanted) == 0 || slices.Contains(wanted, number) {
			stream := a.job.streams[i]
			a.readers = append(a.readers, &reader{stream: stream, number: number, cursor: stream.Follow(offset)})
		}
	}
	for _, number := range open.GetStreams() {
		if number != berthv1.Stream_STREAM_STDOUT && number != berthv1.Stream_STREAM_STDERR {
			a.close()
			return refusal.New(refusal.Invalid, "", "%v is no stream", number)
		}
	}
	return nil
}

func (a *attachment) close() {
	a.account.Close()
	for _, r := range a.readers {
		r.cursor.Close()
	}
}

// receive handles what the caller sends until it half-closes, fails or disconnects.
func (a *attachment) receive() {
	for {
		message, err := a.caller.Recv()
		if err != nil {
			return // half-closed, or the call has ended
		}
		if err := a.handle(message); err != nil {
			a.failed <- err
			return
		}
	}
}

func (a *attachment) handle(message *guestv1.AttachRequest) error {
	switch m := message.GetMessage().(type) {
	case *guestv1.AttachRequest_Input:
		return a.feed(m.Input)
	case *guestv1.AttachRequest_Resize:
		return a.job.resize(&a.feeder, m.Resize)
	case *guestv1.AttachRequest_Signal:
		return a.job.signal(m.Signal)
	case *guestv1.AttachRequest_Open:
		return refusal.New(refusal.Invalid, "", "an Attach is opened once")
	}
	return refusal.New(refusal.Invalid, "", "a message of an Attach is input, a size or a signal")
}

// feed takes input, waiting for space in the buffer.
func (a *attachment) feed(message *guestv1.AttachInput) error {
	a.feeds.Store(true)
	for {
		_, _, changed := a.job.input.State()
		whole, err := a.job.input.Accept(&a.feeder, message.GetOffset(), message.GetData(), message.GetEof(), stdio.StdinBuffer+stdio.StdinAhead)
		if err != nil {
			return err
		}
		if whole {
			break
		}
		select {
		case <-changed:
		case <-a.caller.Context().Done():
			return a.caller.Context().Err()
		}
	}
	a.remind()
	return nil
}

// remind requests an acknowledgement, even if nothing changed.
func (a *attachment) remind() {
	select {
	case a.due <- struct{}{}:
	default:
	}
}

// send sends acknowledgements and output in order, and the final status last.
func (a *attachment) send() error {
	for {
		taken, _, inputChanged := a.job.input.State()
		if err := a.acknowledge(taken); err != nil {
			return err
		}
		over, awaited := a.over()
		changed, sent := [2]<-chan struct{}{}, false
		for i, r := range a.readers {
			var total uint64
			changed[i], total, _ = r.stream.Changed()
			if over && !a.untilSealed {
				total = min(total, r.stream.EndAtExit())
			}
			more, err := a.sendChunk(r, total)
			if err != nil {
				return err
			}
			sent = sent || more
		}
		select {
		case err := <-a.failed:
			return err
		default:
		}
		switch {
		case sent:
			continue
		case over:
			return a.caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_Done{Done: a.job.status()}})
		}
		if !a.feeds.Load() {
			inputChanged = nil
		}
		select {
		case <-changed[0]:
		case <-changed[1]:
		case <-inputChanged:
		case <-awaited:
		case <-a.due:
			a.remind()
		case err := <-a.failed:
			a.failed <- err
		case <-a.caller.Context().Done():
			return a.caller.Context().Err()
		}
	}
}

// over says whether there is no more to come, and otherwise what to wait for.
func (a *attachment) over() (over bool, awaited <-chan struct{}) {
	select {
	case <-a.job.done:
	default:
		return false, a.job.done
	}
	if a.untilSealed {
		select {
		case <-a.job.sealed:
		default:
			return false, a.job.sealed
		}
	}
	return true, nil
}

func (a *attachment) acknowledge(taken uint64) error {
	due := false
	select {
	case <-a.due:
		due = true
	default:
	}
	if !a.feeds.Load() || taken == a.acknowledged && !due {
		return nil
	}
	a.acknowledged = taken
	return a.caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_InputAcknowledged{InputAcknowledged: taken}})
}

// sendChunk sends the next chunk of one stream below an offset, if there is one.
func (a *attachment) sendChunk(r *reader, end uint64) (sent bool, err error) {
	offset := r.cursor.Offset()
	if offset >= end {
		return false, nil
	}
	size, release, err := a.account.Reserve(a.caller.Context(), int(min(buffer.Max, end-offset)))
	if err != nil {
		return false, err
	}
	b := buffer.Get(size)
	done := func() {
		buffer.Put(b)
		release()
	}
	chunk, err := r.cursor.Next((*b)[:size])
	switch {
	case err != nil:
		done()
		return false, refusal.New(refusal.Failed, "", "read the output of %s: %v", a.job.id, err)
	case chunk.GapTo > chunk.Offset:
		done()
		return true, a.caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_Gap{Gap: &berthv1.OutputGap{
			Stream: r.number, Range: &berthv1.ByteRange{From: chunk.Offset, To: chunk.GapTo},
		}}})
	}
	message := &berthv1.OutputChunk{Stream: r.number, Offset: chunk.Offset, Data: chunk.Data}
	if !chunk.Time.IsZero() {
		message.Time = timestamppb.New(chunk.Time)
	}
	if chunk.Shared {
		buffer.Put(b)
		done = release
	}
	return true, a.caller.SendChunk(message, done)
}
