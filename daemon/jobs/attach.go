package jobs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	// DefaultDisconnectGrace is how long a command whose caller stayed attached waits for it to come
	// back; the API documents it.
	DefaultDisconnectGrace = 60 * time.Second
	// replayFor is how long a guest keeps the output of an attached command that is done, for a caller
	// whose connection broke just before the end.
	replayFor = 2 * time.Minute
)

// Peer is who is attached to a job, as far as this room needs to know it.
type Peer interface {
	// Started is told once, first: the job, and where its stdin stands.
	Started(job *recordv1.JobRecord, inputOffset uint64) error
	// Chunk is told output, in order for each stream.
	Chunk(chunk *berthv1.OutputChunk) error
	// Gap is told what was dropped.
	Gap(gap *berthv1.OutputGap) error
	// InputTaken is told how far stdin was taken.
	InputTaken(offset uint64) error
	// Done is told last.
	Done(job *recordv1.JobRecord) error
	// Receive returns input, sizes and signals; io.EOF when no more will come. It returns at the
	// latest when the context of the call ends.
	Receive() (*guestv1.AttachRequest, error)
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
func (s *Service) Exec(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec, peer Peer) error {
	s.touch(sandboxID)
	v := &view{offsets: bothFrom(0, 0), ownInput: spec.GetTty() != nil || spec.GetStdin().GetOpen()}
	if call.RequestID != "" {
		job, err := s.reserveAndBegin(ctx, call, sandboxID, spec, false)
		if err != nil {
			return err
		}
		return s.attach(ctx, job, v, peer)
	}
	job, start, err := s.attachedStart(call, sandboxID, spec)
	if err != nil {
		return err
	}
	err = s.relay(ctx, job, v, start, peer)
	if err != nil {
		// It may run on, for as long as its caller may come back: somebody must see its end.
		s.unsetAttached(job.GetId())
		s.spawn(func() { s.await(s.ctx, job.GetMachineId(), job.GetId()) })
	}
	if errors.Is(err, guestlink.ErrOtherBoot) || errors.Is(err, guestlink.ErrOtherGeneration) {
		return fault.New(fault.Recovering, "the machine of sandbox %s was started again just now: nothing was begun, try again", sandboxID).Retry(time.Second)
	}
	return err
}

// attachedStart is the record and the guest's request of a command that is not written down before
// it runs.
func (s *Service) attachedStart(call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec) (*recordv1.JobRecord, *guestv1.StartRequest, error) {
	job, command, err := s.newAttached(call, sandboxID, spec)
	if err != nil {
		return nil, nil, err
	}
	grace := DefaultDisconnectGrace
	if spec.GetDisconnectGrace() != nil {
		grace = spec.GetDisconnectGrace().AsDuration()
	}
	return job, &guestv1.StartRequest{
		JobId: job.GetId(), BootId: job.GetBootId(), Command: command,
		KillOnDisconnect: spec.GetOnDisconnect() != berthv1.OnDisconnect_ON_DISCONNECT_KEEP,
		DisconnectGrace:  durationpb.New(max(grace, linkGrace)),
	}, nil
}

// Reattach comes back to a job: output from the given offsets on, and its input.
func (s *Service) Reattach(ctx context.Context, namespace, id string, stdout, stderr uint64, peer Peer) error {
	job, err := s.find(namespace, id)
	if err != nil {
		return err
	}
	return s.attach(ctx, job, &view{offsets: bothFrom(stdout, stderr), ownInput: true}, peer)
}

// FollowOutput streams a job's output from the given offsets until it is done, or sealed.
func (s *Service) FollowOutput(ctx context.Context, namespace, id string, offsets map[berthv1.Stream]uint64, untilSealed bool, peer Peer) error {
	job, err := s.find(namespace, id)
	if err != nil {
		return err
	}
	return s.attach(ctx, job, &view{offsets: offsets, untilSealed: untilSealed}, peer)
}

// attach stays with a job, wherever its output is: in its guest until the receipt is home, then here.
func (s *Service) attach(ctx context.Context, job *recordv1.JobRecord, v *view, peer Peer) error {
	peer = &startedOnce{Peer: peer}
	for {
		if isDone(job) && (isComplete(job) && job.GetKeepOutput() || !s.opts.Links.Awaited(job.GetMachineId())) {
			return s.replay(job, v, peer)
		}
		if err := s.machineStopped(job); err != nil {
			return err
		}
		err := s.relay(ctx, job, v, nil, peer)
		if !errors.Is(err, guestlink.ErrNoJob) {
			return err
		}
		// The guest has not begun it yet, or has forgotten it because its receipt came home.
		if job, err = s.until(ctx, job.GetId(), s.beyond(job)); err != nil {
			return err
		}
		if isDone(job) {
			return s.replay(job, v, peer)
		}
	}
}

// beyond waits for a job to go beyond what it was, where its guest does not know it.
func (s *Service) beyond(was *recordv1.JobRecord) func(*recordv1.JobRecord) bool {
	return func(job *recordv1.JobRecord) bool { return isDone(job) || hasBegun(job) && !hasBegun(was) }
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
func (s *Service) relay(ctx context.Context, job *recordv1.JobRecord, v *view, start *guestv1.StartRequest, peer Peer) error {
	defer s.hold(job)()
	open := &guestv1.AttachOpen{
		JobId: job.GetId(), Start: start, OwnInput: v.ownInput, UntilSealed: v.untilSealed,
		StdoutOffset: v.offsets[berthv1.Stream_STREAM_STDOUT], StderrOffset: v.offsets[berthv1.Stream_STREAM_STDERR],
	}
	for _, stream := range streams {
		if _, wanted := v.offsets[stream]; wanted {
			open.Streams = append(open.Streams, stream)
		}
	}
	return s.opts.Links.Stream(ctx, job.GetMachineId(), func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := guest.Attach(ctx)
		if err != nil {
			return err
		}
		if err := stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		r := &relaying{service: s, job: job, view: v, peer: peer, guest: stream, starts: start != nil}
		return r.run(ctx, cancel)
	})
}

// relaying is one relay at work.
type relaying struct {
	service *Service
	job     *recordv1.JobRecord
	view    *view
	peer    Peer
	guest   guestv1.GuestService_AttachClient
	starts  bool

	isOpen bool
	sent   atomic.Uint64 // stdin that the guest can have, from its beginning

	mu       sync.Mutex
	inputErr error // why input ended, when that ended the call
}

func (r *relaying) run(ctx context.Context, cancel context.CancelFunc) error {
	for {
		message, err := r.guest.Recv()
		if err != nil {
			return r.explain(err)
		}
		if err := r.sensible(message); err != nil {
			return err
		}
		switch message := message.GetMessage().(type) {
		case *guestv1.AttachResponse_Opened:
			err = r.opened(ctx, cancel, message.Opened)
		case *guestv1.AttachResponse_Chunk:
			chunk := message.Chunk
			r.view.offsets[chunk.GetStream()] += uint64(len(chunk.GetData()))
			err = r.peer.Chunk(chunk)
		case *guestv1.AttachResponse_Gap:
			r.view.offsets[message.Gap.GetStream()] = message.Gap.GetRange().GetTo()
			err = r.peer.Gap(message.Gap)
		case *guestv1.AttachResponse_InputAcknowledged:
			err = r.peer.InputTaken(min(message.InputAcknowledged, r.sent.Load()))
		case *guestv1.AttachResponse_Done:
			return r.done(ctx, message.Done)
		}
		if err != nil {
			return err
		}
	}
}

// sensible refuses a message that cannot follow on those before it: with it passed on, a peer would have
// bytes in places where they never were.
func (r *relaying) sensible(message *guestv1.AttachResponse) error {
	wrong := ""
	switch message := message.GetMessage().(type) {
	case *guestv1.AttachResponse_Opened:
		if _, err := about(message.Opened, r.job.GetMachineId(), r.job.GetId()); err != nil {
			return err
		}
		if r.isOpen {
			wrong = "a second beginning"
		}
	case *guestv1.AttachResponse_Chunk:
		at, wanted := r.view.offsets[message.Chunk.GetStream()]
		if !wanted || message.Chunk.GetOffset() != at || len(message.Chunk.GetData()) == 0 || len(message.Chunk.GetData()) > maxChunk {
			wrong = fmt.Sprintf("%d bytes of stream %d at %d, where %d was next", len(message.Chunk.GetData()), message.Chunk.GetStream(), message.Chunk.GetOffset(), at)
		}
	case *guestv1.AttachResponse_Gap:
		at, wanted := r.view.offsets[message.Gap.GetStream()]
		if gap := message.Gap.GetRange(); !wanted || gap.GetFrom() != at || gap.GetTo() <= at {
			wrong = fmt.Sprintf("a gap in stream %d from %d to %d, where %d was next", message.Gap.GetStream(), gap.GetFrom(), gap.GetTo(), at)
		}
	case *guestv1.AttachResponse_InputAcknowledged, *guestv1.AttachResponse_Done:
	default:
		wrong = "a message of no known kind"
	}
	if _, opens := message.GetMessage().(*guestv1.AttachResponse_Opened); wrong == "" && !r.isOpen && !opens {
		wrong = "output before it had begun"
	}
	if wrong == "" {
		return nil
	}
	return fault.New(fault.Internal, "the guest of machine %s makes no sense about job %s: it sent %s", r.job.GetMachineId(), r.job.GetId(), wrong)
}

// opened tells the peer, records a command that this very call began, and begins to carry input.
func (r *relaying) opened(ctx context.Context, cancel context.CancelFunc, status *guestv1.Status) error {
	r.isOpen = true
	r.sent.Store(status.GetInputOffset())
	if r.starts {
		r.service.recordBehind(r.job, status)
	}
	if err := r.peer.Started(r.job, status.GetInputOffset()); err != nil {
		return err
	}
	r.service.spawn(func() { r.carryInput(ctx, cancel) })
	return nil
}

// carryInput ends with the call: the peer's Receive returns then.
func (r *relaying) carryInput(ctx context.Context, cancel context.CancelFunc) {
	for ctx.Err() == nil {
		message, err := r.peer.Receive()
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			if input := message.GetInput(); input != nil {
				r.sent.Store(max(r.sent.Load(), input.GetOffset()+uint64(len(input.GetData()))))
			}
			err = r.guest.Send(message)
		}
		if errors.Is(err, io.EOF) {
			return // the guest has ended the stream, and Recv says why
		}
		if err != nil {
			r.mu.Lock()
			r.inputErr = err
			r.mu.Unlock()
			cancel()
			return
		}
	}
}

// explain says why a relay ended: bad input rather than the cancellation that followed from it.
func (r *relaying) explain(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inputErr != nil {
		return r.inputErr
	}
	return err
}

// done gives the peer the outcome, once it can no longer change.
func (r *relaying) done(ctx context.Context, status *guestv1.Status) error {
	status, err := ended(status, r.job.GetMachineId(), r.job.GetId())
	if err != nil {
		return err
	}
	job, err := r.service.receipt(ctx, r.job, status)
	if err != nil {
		return err
	}
	return r.peer.Done(job)
}

// receipt is the record of a job that its guest says is done: brought home where it was written down
// beforehand, else written behind.
func (s *Service) receipt(ctx context.Context, job *recordv1.JobRecord, status *guestv1.Status) (*recordv1.JobRecord, error) {
	// Only what was written down beforehand has a deadline, and only that and what was found after a restore
	// keeps output.
	if job.GetStartDeadline() != nil || job.GetKeepOutput() {
		return s.bringHome(ctx, job.GetMachineId(), status)
	}
	if isDone(job) {
		return job, nil
	}
	done := proto.CloneOf(job)
	s.fill(done, status)
	s.recordAttached(done)
	return done, nil
}

// recordBehind writes behind that an attached command was begun.
func (s *Service) recordBehind(job *recordv1.JobRecord, status *guestv1.Status) {
	s.setTimes(job, status)
	job.EndTime, job.CpuNanos = nil, 0
	record := proto.CloneOf(job)
	s.opts.Store.UpdateLater(func(tx *store.Tx) error {
		known, err := tx.Job(record.GetId())
		if err != nil || known != nil {
			return err
		}
		return tx.PutJob(record, "job.running", "attached")
	})
}

// hold keeps a job's guest from being told to forget it while somebody reads from there, and returns
// how to let go.
func (s *Service) hold(job *recordv1.JobRecord) func() {
	id := job.GetId()
	s.mu.Lock()
	s.held[id]++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.held[id]--
		last := s.held[id] == 0
		forget := last && s.forgettable[id]
		if last {
			delete(s.held, id)
			delete(s.forgettable, id)
		}
		s.mu.Unlock()
		if forget {
			s.spawn(func() { s.forget(s.ctx, job.GetMachineId(), id) })
		}
	}
}

// mayForget reports whether nobody reads from a job's guest; if somebody does, the guest is told when
// the last one lets go.
func (s *Service) mayForget(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id] > 0 {
		s.forgettable[id] = true
		return false
	}
	return true
}

// Thanked tells that the caller of an attached command has its end, so that the guest need not keep
// it for the caller to come back; or, unthanked, that it may come back for a while.
func (s *Service) Thanked(job *recordv1.JobRecord, thanked bool) {
	if job.GetKeepOutput() {
		return // its receipt is at home
	}
	s.spawn(func() {
		if !thanked && !pause(s.ctx, replayFor) {
			return
		}
		if s.mayForget(job.GetId()) {
			// Its record is written behind its answer: until that is in the ledger, only the guest knows its end.
			s.afterCommit(job.GetId(), job.GetMachineId())
		}
	})
}

// replay gives a peer what is at home of a job that is done.
func (s *Service) replay(job *recordv1.JobRecord, v *view, peer Peer) error {
	if err := peer.Started(job, 0); err != nil {
		return err
	}
	for _, stream := range streams {
		offset, wanted := v.offsets[stream]
		if !wanted {
			continue
		}
		if err := s.replayStream(job, stream, offset, peer); err != nil {
			return err
		}
	}
	return peer.Done(job)
}

func (s *Service) replayStream(job *recordv1.JobRecord, stream berthv1.Stream, offset uint64, peer Peer) error {
	facts := factsOf(job, stream)
	for _, kept := range facts.GetKept() {
		if offset < kept.GetFrom() {
			if err := peer.Gap(gap(stream, offset, kept.GetFrom())); err != nil {
				return err
			}
			offset = kept.GetFrom()
		}
		for offset < kept.GetTo() {
			data, err := s.output.read(job.GetId(), stream, kept.GetFrom(), offset, min(chunkBytes, kept.GetTo()-offset))
			if errors.Is(err, errNotKept) {
				break // and what is missing is part of the next gap
			}
			if err != nil {
				return err
			}
			if err := peer.Chunk(&berthv1.OutputChunk{Stream: stream, Offset: offset, Data: data}); err != nil {
				return err
			}
			offset += uint64(len(data))
		}
	}
	if offset < facts.GetTotalBytes() {
		return peer.Gap(gap(stream, offset, facts.GetTotalBytes()))
	}
	return nil
}

func gap(stream berthv1.Stream, from, to uint64) *berthv1.OutputGap {
	return &berthv1.OutputGap{Stream: stream, Range: &berthv1.ByteRange{From: from, To: to}}
}
