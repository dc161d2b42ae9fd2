// Package relay stays with a job for a caller who is attached to it: it carries output and input between
// the caller and the job's guest, and replays what a receipt keeps. It never interprets a byte.
package relay

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/lookup"
	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
	"github.com/berth-sandbox/berth/daemon/jobs/unrecorded"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/request"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// DefaultDisconnectGrace is how long a command whose caller stayed attached waits for it to come back; the
// API documents it.
const DefaultDisconnectGrace = 60 * time.Second

// Peer is who is attached to a job, as far as this package needs to know it.
type Peer interface {
	// Started is called once, first, with the job and where its stdin stands.
	Started(job *recordv1.JobRecord, inputOffset uint64) error
	// Chunk is given output, in order for each stream, and Gap what was dropped.
	output.Receiver
	// InputTaken is given how far stdin was taken.
	InputTaken(offset uint64) error
	// Done is called last.
	Done(job *recordv1.JobRecord) error
	// Receive returns input, sizes and signals; io.EOF when no more will come. It returns at the
	// latest when the context of the call ends.
	Receive() (*guestv1.AttachRequest, error)
}

// Relay relays.
type Relay struct {
	Links      *guestlink.Links
	Jobs       *lookup.Jobs
	Starter    *start.Starter
	Unrecorded *unrecorded.Commands
	Receipts   *receipt.Receipts
	Output     *output.Store
	Background *background.Group
}

// view is what a peer wants to see of a job.
type view struct {
	offsets     map[berthv1.Stream]uint64 // from here, for each stream that is wanted; moves on
	untilSealed bool
	ownInput    bool
}

func bothFrom(stdout, stderr uint64) map[berthv1.Stream]uint64 {
	return map[berthv1.Stream]uint64{berthv1.Stream_STREAM_STDOUT: stdout, berthv1.Stream_STREAM_STDERR: stderr}
}

// Exec starts an attached command and stays with it until it is done. With a request id it is
// recorded beforehand and goes on without its caller; without one it is killed, by its guest, when no
// caller was attached for its disconnect_grace.
func (r *Relay) Exec(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, peer Peer) error {
	v := &view{offsets: bothFrom(0, 0), ownInput: spec.GetTty() != nil || spec.GetStdin().GetOpen()}
	if call.RequestID != "" {
		job, joined, err := r.Starter.Start(ctx, call, sandboxID, spec, false)
		if err == nil && joined {
			job, err = r.Jobs.Until(ctx, job, record.HasBegun)
		}
		if err != nil {
			return err
		}
		return r.attach(ctx, job, v, peer)
	}
	return r.execUnrecorded(ctx, call, sandboxID, spec, v, peer)
}

func (r *Relay) execUnrecorded(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, v *view, peer Peer) error {
	job, command, err := r.Unrecorded.Add(call, sandboxID, spec)
	if err != nil {
		return err
	}
	grace := DefaultDisconnectGrace
	if spec.GetDisconnectGrace() != nil {
		grace = spec.GetDisconnectGrace().AsDuration()
	}
	err = r.relay(ctx, job, v, &guestv1.StartRequest{
		JobId: job.GetId(), BootId: job.GetBootId(), Command: command,
		KillOnDisconnect: spec.GetOnDisconnect() != berthv1.OnDisconnect_ON_DISCONNECT_KEEP,
		DisconnectGrace:  durationpb.New(max(grace, unrecorded.LinkGrace)),
	}, peer)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, guestlink.ErrOtherBoot), errors.Is(err, guestlink.ErrOtherGeneration):
		r.Unrecorded.Refused(job, err)
		return fault.New(fault.Recovering, "the machine of sandbox %s was started again just now: nothing was begun, try again", sandboxID).Retry(time.Second)
	case errors.Is(err, guestlink.ErrRefused):
		r.Unrecorded.Refused(job, err)
	default:
		r.Unrecorded.Abandon(job) // it may run on, for as long as its caller may come back
	}
	return err
}

// Reattach comes back to a job: output from the given offsets on, and its input.
func (r *Relay) Reattach(ctx context.Context, namespace, id string, stdout, stderr uint64, peer Peer) error {
	job, err := r.Jobs.Find(namespace, id)
	if err != nil {
		return err
	}
	return r.attach(ctx, job, &view{offsets: bothFrom(stdout, stderr), ownInput: true}, peer)
}

// FollowOutput streams a job's output from the given offsets until it is done, or sealed.
func (r *Relay) FollowOutput(ctx context.Context, namespace, id string, offsets map[berthv1.Stream]uint64, untilSealed bool, peer Peer) error {
	job, err := r.Jobs.Find(namespace, id)
	if err != nil {
		return err
	}
	return r.attach(ctx, job, &view{offsets: offsets, untilSealed: untilSealed}, peer)
}

// attach stays with a job, wherever its output is: in its guest until the receipt is stored, then here.
func (r *Relay) attach(ctx context.Context, job *recordv1.JobRecord, v *view, peer Peer) error {
	peer = &startedOnce{Peer: peer}
	for {
		if record.IsDone(job) && (record.IsComplete(job) && job.GetKeepOutput() || !r.Links.Awaited(job.GetMachineId())) {
			return r.replay(job, v, peer)
		}
		if err := r.Jobs.MachineStopped(job); err != nil {
			return err
		}
		err := r.relay(ctx, job, v, nil, peer)
		if !errors.Is(err, guestlink.ErrNoJob) {
			return err
		}
		// The guest has not begun it yet, or has forgotten it because its receipt is stored.
		if job, err = r.Jobs.Until(ctx, job, lookup.Beyond(job)); err != nil {
			return err
		}
		if record.IsDone(job) {
			return r.replay(job, v, peer)
		}
	}
}

// startedOnce tells a peer only once that it started, however often the job is attached to.
type startedOnce struct {
	Peer
	told bool
}

func (p *startedOnce) Started(job *recordv1.JobRecord, inputOffset uint64) error {
	if p.told {
		return nil
	}
	p.told = true
	return p.Peer.Started(job, inputOffset)
}

// relay carries output and input between a peer and the job's guest until the job is done. With a
// start the guest begins the job in the same round trip.
func (r *Relay) relay(ctx context.Context, job *recordv1.JobRecord, v *view, start *guestv1.StartRequest, peer Peer) error {
	defer r.Receipts.Pin(job)()
	open := &guestv1.AttachOpen{
		JobId: job.GetId(), Start: start, OwnInput: v.ownInput, UntilSealed: v.untilSealed,
		StdoutOffset: v.offsets[berthv1.Stream_STREAM_STDOUT], StderrOffset: v.offsets[berthv1.Stream_STREAM_STDERR],
	}
	for _, stream := range output.Streams {
		if _, wanted := v.offsets[stream]; wanted {
			open.Streams = append(open.Streams, stream)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return r.Links.Attach(ctx, job.GetMachineId(), open, func(ctx context.Context, guest *guestlink.Attachment) error {
		s := &stream{Relay: r, job: job, view: v, peer: peer, guest: guest, starts: start != nil}
		return s.run(ctx, cancel)
	})
}

// stream is one relay at work.
type stream struct {
	*Relay
	job    *recordv1.JobRecord
	view   *view
	peer   Peer
	guest  *guestlink.Attachment
	starts bool

	sent atomic.Uint64 // stdin that the guest can have, from its beginning

	mu       sync.Mutex
	inputErr error // why input ended, when that ended the call
}

func (s *stream) run(ctx context.Context, cancel context.CancelFunc) error {
	for {
		message, err := s.guest.Receive()
		if err != nil {
			return s.explain(err)
		}
		switch message := message.GetMessage().(type) {
		case *guestv1.AttachResponse_Opened:
			err = s.opened(cancel, message.Opened)
		case *guestv1.AttachResponse_Chunk:
			chunk := message.Chunk
			s.view.offsets[chunk.GetStream()] += uint64(len(chunk.GetData()))
			err = s.peer.Chunk(chunk)
		case *guestv1.AttachResponse_Gap:
			s.view.offsets[message.Gap.GetStream()] = message.Gap.GetRange().GetTo()
			err = s.peer.Gap(message.Gap)
		case *guestv1.AttachResponse_InputAcknowledged:
			err = s.peer.InputTaken(min(message.InputAcknowledged, s.sent.Load()))
		case *guestv1.AttachResponse_Done:
			return s.done(ctx, message.Done)
		}
		if err != nil {
			return err
		}
	}
}

// opened tells the peer, records a command that this very call began, and begins to carry input.
func (s *stream) opened(cancel context.CancelFunc, status *guestv1.Status) error {
	s.sent.Store(status.GetInputOffset())
	if s.starts {
		s.job = s.Unrecorded.Running(s.job, status)
	}
	if err := s.peer.Started(s.job, status.GetInputOffset()); err != nil {
		return err
	}
	s.Background.Go(func(context.Context) { s.carryInput(cancel) })
	return nil
}

// carryInput ends with the call: the peer's Receive returns then.
func (s *stream) carryInput(cancel context.CancelFunc) {
	for {
		message, err := s.peer.Receive()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			if input := message.GetInput(); input != nil {
				s.sent.Store(max(s.sent.Load(), input.GetOffset()+uint64(len(input.GetData()))))
			}
			err = s.guest.Send(message)
		}
		if errors.Is(err, io.EOF) {
			return // the guest has ended the stream, and Receive says why
		}
		if err != nil {
			s.mu.Lock()
			s.inputErr = err
			s.mu.Unlock()
			cancel()
			return
		}
	}
}

// explain says why a relay ended: bad input rather than the cancellation that followed from it.
func (s *stream) explain(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.inputErr != nil {
		return s.inputErr
	}
	return err
}

// done gives the peer the outcome, once it can no longer change.
func (s *stream) done(ctx context.Context, status *guestv1.Status) error {
	job, err := s.receipt(ctx, s.job, status)
	if err != nil {
		return err
	}
	return s.peer.Done(job)
}

// receipt is the record of a job that its guest says is done: imported where it was written down
// beforehand, else written behind.
func (r *Relay) receipt(ctx context.Context, job *recordv1.JobRecord, status *guestv1.Status) (*recordv1.JobRecord, error) {
	switch {
	case !record.IsUnrecorded(job):
		return r.Receipts.Import(ctx, job.GetMachineId(), status)
	case record.IsDone(job):
		return job, nil
	}
	return r.Unrecorded.Done(job, status), nil
}

// Acknowledge has the guest of an attached command forget it: its caller has its end, so that the guest need
// not keep it for the caller to come back; or, unacknowledged, it may come back for a while.
func (r *Relay) Acknowledge(job *recordv1.JobRecord, acknowledged bool) {
	if job.GetKeepOutput() {
		return // its receipt has the output
	}
	r.Background.Go(func(ctx context.Context) {
		if !acknowledged && !background.Pause(ctx, receipt.ReplayWindow) {
			return
		}
		if r.Receipts.MayForget(job.GetId()) {
			// Its record is written behind its answer: until that is in the ledger, only the guest knows its end.
			//mutation:forget-after-commit r.Receipts.Forget(ctx, job.GetMachineId(), job.GetId())
			r.Unrecorded.Release(job)
		}
	})
}

// replay gives a peer what a receipt keeps of a job that is done.
func (r *Relay) replay(job *recordv1.JobRecord, v *view, peer Peer) error {
	if err := peer.Started(job, 0); err != nil {
		return err
	}
	for _, stream := range output.Streams {
		offset, wanted := v.offsets[stream]
		if !wanted {
			continue
		}
		if err := r.Output.Replay(job.GetId(), stream, record.Stats(job, stream), offset, peer); err != nil {
			return err
		}
	}
	return peer.Done(job)
}
