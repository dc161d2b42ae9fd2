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
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

// Caller is the other end of an Attach. Recv and Send may be called at the same time, by one each.
type Caller interface {
	Context() context.Context
	Recv() (*guestv1.AttachRequest, error)
	Send(*guestv1.AttachResponse) error
	// SendChunk sends an AttachResponse with output, and calls done when the chunk's bytes may change.
	SendChunk(chunk *berthv1.OutputChunk, done func()) error
}

// attachment is one caller that is attached to a job.
type attachment struct {
	job         *job
	caller      Caller
	untilSealed bool
	owned       bool // it has, or had, the input for itself
	readers     []*reader

	feeds        atomic.Bool   // it sends input, and wants to know what was taken
	due          chan struct{} // has a token when it must be told, even if nothing changed
	failed       chan error    // has the one error that what it sent made
	acknowledged uint64
}

// reader is where a caller stands in one stream.
type reader struct {
	stream *spool.Stream
	number berthv1.Stream
	cursor *spool.Cursor
}

// Attach stays with a caller until the job is done and its output, or all of it, was sent.
func (s *Supervisor) Attach(caller Caller) error {
	first, err := caller.Recv()
	if errors.Is(err, io.EOF) || err == nil && first.GetOpen() == nil {
		return refuse(Invalid, "", "the first message of an Attach is open")
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
	a := &attachment{job: j, caller: caller, untilSealed: open.GetUntilSealed(), owned: open.GetOwnInput(),
		due: make(chan struct{}, 1), failed: make(chan error, 1)}
	if err := a.follow(open); err != nil {
		return err
	}
	defer a.close()
	if a.owned {
		j.input.own(a)
		defer j.input.disown(a)
		a.feeds.Store(true)
	}
	status := j.status()
	a.acknowledged = status.GetInputOffset()
	if err := caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_Opened{Opened: status}}); err != nil {
		return err
	}
	// It ends with the call: Recv fails when the call is answered. Only then may its owner be gone.
	s.work.Go(a.receive)
	return a.send()
}

// attachTo finds the job, or begins it.
func (s *Supervisor) attachTo(open *guestv1.AttachOpen) (j *job, begun bool, err error) {
	start := open.GetStart()
	if start == nil {
		j, err = s.find(open.GetJobId())
		return j, false, err
	}
	if start.GetJobId() != open.GetJobId() {
		return nil, false, refuse(Invalid, "", "an Attach to job %q cannot start job %q", open.GetJobId(), start.GetJobId())
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
			return refuse(Invalid, "", "%v is no stream", number)
		}
	}
	return nil
}

func (a *attachment) close() {
	for _, r := range a.readers {
		r.cursor.Close()
	}
}

// receive takes what the caller sends until it half-closes, fails or is gone.
func (a *attachment) receive() {
	for {
		message, err := a.caller.Recv()
		if err != nil {
			return // the end of what it sends, or of the call
		}
		if err := a.obey(message); err != nil {
			a.failed <- err
			return
		}
	}
}

func (a *attachment) obey(message *guestv1.AttachRequest) error {
	switch m := message.GetMessage().(type) {
	case *guestv1.AttachRequest_Input:
		return a.feed(m.Input)
	case *guestv1.AttachRequest_Resize:
		return a.job.resize(a, m.Resize)
	case *guestv1.AttachRequest_Signal:
		return a.job.signal(m.Signal)
	case *guestv1.AttachRequest_Open:
		return refuse(Invalid, "", "an Attach is opened once")
	}
	return refuse(Invalid, "", "a message of an Attach holds input, a size or a signal")
}

// feed takes a piece of input, waiting for room.
func (a *attachment) feed(piece *guestv1.AttachInput) error {
	a.feeds.Store(true)
	for {
		_, _, changed := a.job.input.state()
		whole, err := a.job.input.accept(a.job.supervisor, a, piece.GetOffset(), piece.GetData(), piece.GetEof(), inputBuffer+inputAhead)
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

// remind has the caller told what was taken, even if that did not change.
func (a *attachment) remind() {
	select {
	case a.due <- struct{}{}:
	default:
	}
}

// send tells the caller all it is to know, in order, and the end last.
func (a *attachment) send() error {
	for {
		taken, _, inputChanged := a.job.input.state()
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
			more, err := a.sendPiece(r, total)
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

// over says whether all that is to come has come, and else what to wait for.
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

// sendPiece sends the next piece of one stream below an offset, if there is one.
func (a *attachment) sendPiece(r *reader, end uint64) (sent bool, err error) {
	offset := r.cursor.Offset()
	if offset >= end {
		return false, nil
	}
	buffer := largeBuffers.Get().(*[]byte)
	giveBack := func() { largeBuffers.Put(buffer) }
	piece, err := r.cursor.Next((*buffer)[:min(largeRead, end-offset)])
	switch {
	case err != nil:
		giveBack()
		return false, refuse(Failed, "", "read the output of job %s: %v", a.job.id, err)
	case piece.GapTo > piece.Offset:
		giveBack()
		return true, a.caller.Send(&guestv1.AttachResponse{Message: &guestv1.AttachResponse_Gap{Gap: &berthv1.OutputGap{
			Stream: r.number, Range: &berthv1.ByteRange{From: piece.Offset, To: piece.GapTo},
		}}})
	}
	chunk := &berthv1.OutputChunk{Stream: r.number, Offset: piece.Offset, Data: piece.Data}
	if !piece.Time.IsZero() {
		chunk.Time = timestamppb.New(piece.Time)
	}
	if piece.Shared {
		giveBack()
		giveBack = func() {}
	}
	return true, a.caller.SendChunk(chunk, giveBack)
}
