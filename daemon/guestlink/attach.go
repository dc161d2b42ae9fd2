package guestlink

import (
	"context"
	"errors"
	"io"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Attachment is a stream to a job: output as it comes, and input to it. Receive and Send may run at the
// same time.
type Attachment struct {
	links     *Links
	machineID string
	jobID     string
	stream    guestv1.GuestService_AttachClient
	next      map[berthv1.Stream]uint64 // where the next byte of each stream that is wanted belongs
	opened    bool
}

// Attach opens a stream to a job and runs fn with it; the stream ends with fn. Like Stream it is opened once.
func (l *Links) Attach(ctx context.Context, machineID string, open *guestv1.AttachOpen, fn func(context.Context, *Attachment) error) error {
	return l.Stream(ctx, machineID, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := guest.Attach(ctx)
		if err != nil {
			return err
		}
		if err := stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		a := &Attachment{links: l, machineID: machineID, jobID: open.GetJobId(), stream: stream, next: map[berthv1.Stream]uint64{}}
		for _, wanted := range open.GetStreams() {
			a.next[wanted] = open.GetStdoutOffset()
			if wanted == berthv1.Stream_STREAM_STDERR {
				a.next[wanted] = open.GetStderrOffset()
			}
		}
		return fn(ctx, a)
	})
}

// Send sends input, a size or a signal. After io.EOF the stream has ended, and Receive says why.
func (a *Attachment) Send(message *guestv1.AttachRequest) error { return a.stream.Send(message) }

// Receive returns the guest's next message, unless it cannot follow on those before it: with it passed on,
// a caller would have bytes in places where they never were.
func (a *Attachment) Receive() (*guestv1.AttachResponse, error) {
	message, err := a.stream.Recv()
	if err != nil {
		return nil, err
	}
	if _, opens := message.GetMessage().(*guestv1.AttachResponse_Opened); opens == a.opened {
		if opens {
			return nil, protocolError(a.machineID, "sent a second beginning of %s", a.jobID)
		}
		return nil, protocolError(a.machineID, "sent output of %s before its beginning", a.jobID)
	}
	a.opened = true
	switch m := message.GetMessage().(type) {
	case *guestv1.AttachResponse_Opened:
		m.Opened, err = a.links.status(a.machineID, a.jobID, m.Opened)
	case *guestv1.AttachResponse_Done:
		m.Done, err = a.links.finalStatus(a.machineID, a.jobID, m.Done)
	case *guestv1.AttachResponse_Chunk:
		err = a.chunk(m.Chunk)
	case *guestv1.AttachResponse_Gap:
		err = a.gap(m.Gap)
	case *guestv1.AttachResponse_InputAcknowledged:
	default:
		err = protocolError(a.machineID, "sent a message of no known kind about %s", a.jobID)
	}
	return message, err
}

func (a *Attachment) chunk(chunk *berthv1.OutputChunk) error {
	at, wanted := a.next[chunk.GetStream()]
	length := uint64(len(chunk.GetData()))
	if !wanted || chunk.GetOffset() != at || length == 0 || length > maxChunk {
		return protocolError(a.machineID, "sent %d bytes of stream %d of %s at %d, where %d was next",
			length, chunk.GetStream(), a.jobID, chunk.GetOffset(), at)
	}
	a.next[chunk.GetStream()] = at + length
	return nil
}

func (a *Attachment) gap(gap *berthv1.OutputGap) error {
	at, wanted := a.next[gap.GetStream()]
	if from, to := gap.GetRange().GetFrom(), gap.GetRange().GetTo(); !wanted || from != at || to <= at {
		return protocolError(a.machineID, "sent a gap in stream %d of %s from %d to %d, where %d was next",
			gap.GetStream(), a.jobID, from, to, at)
	}
	a.next[gap.GetStream()] = gap.GetRange().GetTo()
	return nil
}
