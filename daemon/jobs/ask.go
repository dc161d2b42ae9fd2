package jobs

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
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

const (
	// settleAtOnce is how many of a doomed machine's jobs are stopped at once.
	settleAtOnce = 16
	// maxStopGrace is the longest that a job's own grace can be; the API bounds it.
	maxStopGrace = time.Hour
)

// Poll returns a job; with a wait, when it is done or the wait is over. A job whose machine cannot
// be asked is returned as the ledger has it where waiting is no use, and is an error that says to
// come back where the broker is still on its way to the machine.
func (s *Service) Poll(ctx context.Context, namespace, id string, wait time.Duration) (*recordv1.JobRecord, error) {
	job, err := s.find(namespace, id)
	if err != nil || isDone(job) {
		return job, err
	}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	job, err = s.until(limited, id, isDone)
	switch {
	case fault.Is(err, fault.WrongState):
		job.State = berthv1.JobState_JOB_STATE_UNKNOWN
		return job, nil
	case err == nil, ctx.Err() != nil, !errors.Is(err, context.DeadlineExceeded):
		return job, err
	}
	return s.live(ctx, job)
}

// live adds to a job that is not done what its guest knows of it now.
func (s *Service) live(ctx context.Context, job *recordv1.JobRecord) (*recordv1.JobRecord, error) {
	if !hasBegun(job) || s.frozen(job) {
		return job, nil
	}
	status, err := s.waitInGuest(ctx, job.GetMachineId(), job.GetId(), 0)
	if errors.Is(err, guestlink.ErrNoJob) {
		return s.find(job.GetNamespace(), job.GetId()) // its receipt came home meanwhile
	}
	if err != nil {
		return nil, err
	}
	if !status.GetDone() {
		job.Stdout, job.Stderr = boundedFacts(status.GetStdout()), boundedFacts(status.GetStderr())
		return job, nil
	}
	return s.bringHome(ctx, job.GetMachineId(), status)
}

// frozen reports whether a job's machine is suspended, so that its guest can't be asked.
func (s *Service) frozen(job *recordv1.JobRecord) bool {
	sandbox, _, err := s.opts.Sandboxes.Get(job.GetNamespace(), job.GetSandboxId())
	if err != nil {
		return false
	}
	switch sandbox.GetState() {
	case berthv1.SandboxState_SANDBOX_STATE_SUSPENDING, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_RESUMING:
		return true
	}
	return false
}

// notFrozen returns an error when a job's machine is suspended, so that nothing can be done to the job.
func (s *Service) notFrozen(job *recordv1.JobRecord) error {
	if !s.frozen(job) {
		return nil
	}
	return fault.New(fault.WrongState, "job %s is suspended with its sandbox %s: resume it first", job.GetId(), job.GetSandboxId()).
		With("state", "SUSPENDED").With("wanted", "RUNNING")
}

// machineStopped returns an error when a job's machine is stopped, so that nobody can tell what became
// of the job until the sandbox is resumed.
func (s *Service) machineStopped(job *recordv1.JobRecord) error {
	sandbox, _, err := s.opts.Sandboxes.Get(job.GetNamespace(), job.GetSandboxId())
	switch {
	case fault.Is(err, fault.SandboxNotFound):
		return nil
	case err == nil && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_STOPPED:
		return fault.New(fault.WrongState, "what became of job %s is not known, for its machine is STOPPED: resume sandbox %s to learn it, or destroy it",
			job.GetId(), sandbox.GetId()).With("state", "STOPPED").With("wanted", "RUNNING")
	}
	return err
}

// machineGone reports whether a job's machine is gone for good.
func (s *Service) machineGone(job *recordv1.JobRecord) bool {
	gone := false
	err := s.opts.Store.View(func(tx *store.Tx) error {
		machine, err := tx.Machine(job.GetMachineId())
		if err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(job.GetSandboxId())
		gone = machine == nil || machine.GetState() == recordv1.MachineState_MACHINE_STATE_GONE ||
			sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_LOST
		return err
	})
	return err == nil && gone
}

// Stop ends a job and everything that it started, and returns it with its outcome. A job that is
// done keeps its outcome; what it left running is killed. A grace of nil is the job's own.
func (s *Service) Stop(ctx context.Context, call lifecycle.Call, id string, grace *durationpb.Duration) (*recordv1.JobRecord, error) {
	job, err := s.mayTouch(ctx, call, id)
	if err != nil {
		return nil, err
	}
	for {
		if err := cmp.Or(s.machineStopped(job), s.notFrozen(job)); err != nil && !isDone(job) {
			return nil, err
		}
		status, err := s.stopInGuest(ctx, job.GetMachineId(), stopGrace(job, grace), &guestv1.StopRequest{
			JobId: id, Grace: grace, Reason: "stop_requested: by StopJob",
		})
		switch {
		case err == nil:
			return s.bringHome(ctx, job.GetMachineId(), status)
		case isDone(job) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded):
			return job, nil // the guest has forgotten it, or is gone: nothing of it is left to kill
		case !errors.Is(err, guestlink.ErrNoJob):
			return nil, err
		}
		// The guest has not begun it yet, or its receipt came home just now.
		if job, err = s.until(ctx, id, s.beyond(job)); err != nil {
			return nil, err
		}
		if isDone(job) {
			return job, nil
		}
	}
}

// mayTouch returns a job that a mutating call is about, and remembers the call; or why the call may
// not touch the job.
func (s *Service) mayTouch(ctx context.Context, call lifecycle.Call, id string) (*recordv1.JobRecord, error) {
	job, repeated, err := s.look(call, id)
	if err != nil || repeated || call.RequestID == "" {
		return job, err
	}
	return job, s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		if prior, err := call.Prior(tx); err != nil || prior != "" {
			return err
		}
		return call.Remember(tx, id, s.opts.Now())
	})
}

// look returns a job that a mutating call is about, and whether the same call was made before.
func (s *Service) look(call lifecycle.Call, id string) (job *recordv1.JobRecord, repeated bool, err error) {
	if job, err = s.find(call.Namespace, id); err != nil {
		return nil, false, err
	}
	err = s.opts.Store.View(func(tx *store.Tx) error {
		prior, err := call.Prior(tx)
		if repeated = prior != ""; err != nil || repeated {
			return err
		}
		if _, err := call.Sandbox(tx, job.GetSandboxId()); err != nil && !fault.Is(err, fault.SandboxNotFound) {
			return err
		}
		return nil
	})
	return job, repeated, err
}

// stopInGuest has a job stopped that may take a grace for it.
func (s *Service) stopInGuest(ctx context.Context, machineID string, grace time.Duration, request *guestv1.StopRequest) (*guestv1.Status, error) {
	var status *guestv1.Status
	err := s.ask(ctx, machineID, grace, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		response, err := guest.Stop(ctx, request)
		status = response.GetStatus()
		return err
	})
	if err != nil {
		return nil, err
	}
	return ended(status, machineID, request.GetJobId())
}

// stopGrace is how long a job may take to end when it is stopped. One that was found with its guest may have
// any grace.
func stopGrace(job *recordv1.JobRecord, asked *durationpb.Duration) time.Duration {
	if asked != nil {
		return asked.AsDuration()
	}
	if len(job.GetSpec().GetArgv()) == 0 && job.GetSpec().GetShell() == "" {
		return maxStopGrace
	}
	return killGrace(job)
}

// ask runs fn with a machine's guest, and waits for an answer that is due within wait no longer than the
// patience beyond it: a guest that keeps its connection and says nothing holds nobody up. Errors are those
// of a call through the link; GUEST_UNREACHABLE when the guest said nothing.
func (s *Service) ask(ctx context.Context, machineID string, wait time.Duration, fn func(context.Context, guestv1.GuestServiceClient) error) error {
	limited, cancel := context.WithTimeout(ctx, wait+s.opts.GuestPatience)
	defer cancel()
	err := s.opts.Links.Call(limited, machineID, fn)
	// The guest counts the deadline too, and may be the first to say that it is over.
	late := limited.Err() != nil || errors.Is(err, context.DeadlineExceeded)
	theirs, _ := ctx.Deadline()
	if ours, _ := limited.Deadline(); err != nil && late && ctx.Err() == nil && !ours.Equal(theirs) {
		return fault.New(fault.GuestUnreachable, "the guest of machine %s is connected and has not answered for %s: try again, or destroy the sandbox",
			machineID, wait+s.opts.GuestPatience).Retry(time.Second)
	}
	return err
}

// SettleJobs kills everything that runs in a machine which is about to be destroyed, and brings the
// receipts home, as far as that goes before the context ends.
func (s *Service) SettleJobs(ctx context.Context, machineID string) {
	request := &guestv1.ListRequest{Limit: listLimit}
	var pace pacer
	for {
		response, err := s.list(ctx, machineID, request)
		if err != nil {
			return
		}
		var group errgroup.Group
		group.SetLimit(settleAtOnce)
		for _, status := range response.GetStatuses() {
			group.Go(func() error {
				s.settleDoomed(ctx, machineID, status)
				return nil
			})
		}
		_ = group.Wait()
		if !response.GetMore() {
			return
		}
		pace.await(ctx, response.GetNextCursor() > request.GetSinceCursor())
		request.SinceCursor = response.GetNextCursor()
	}
}

func (s *Service) settleDoomed(ctx context.Context, machineID string, status *guestv1.Status) {
	if !status.GetDone() || !sealed(status) { // of one that is done, what it left running holds its output
		stopped, err := s.stopInGuest(ctx, machineID, 0, &guestv1.StopRequest{
			JobId: status.GetJobId(), Grace: durationpb.New(0), Reason: "destroyed: its sandbox was destroyed",
		})
		if err != nil {
			return
		}
		status = stopped
	}
	if err := s.take(ctx, machineID, status); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("a receipt did not come home before its machine was destroyed", "job", status.GetJobId(), "error", err)
	}
}

// Piece is a piece of a stream.
type Piece struct {
	Data  []byte
	EOF   bool // the stream is sealed and ends after Data
	Facts *berthv1.OutputFacts
}

// ReadOutput returns bytes of one stream from an offset, waiting for one if asked to.
func (s *Service) ReadOutput(ctx context.Context, namespace, id string, stream berthv1.Stream, offset, limit uint64, wait time.Duration) (*Piece, error) {
	job, err := s.find(namespace, id)
	if err != nil {
		return nil, err
	}
	facts := factsOf(job, stream)
	if isDone(job) && !facts.GetSealed() && s.machineGone(job) {
		// Who held the output is gone with the machine: what is at home is all there will ever be.
		return s.readRanges(job, stream, s.closedFacts(id, stream, facts), offset, limit)
	}
	if !isDone(job) || !facts.GetSealed() && offset >= facts.GetTotalBytes() {
		piece, err := s.readLive(ctx, job, stream, offset, limit, wait)
		if err == nil || !errors.Is(err, guestlink.ErrNoJob) {
			return piece, err
		}
		// Its receipt came home between the look at the ledger and the call.
		if job, err = s.find(namespace, id); err != nil {
			return nil, err
		}
		if !isDone(job) {
			return nil, fault.New(fault.Recovering, "job %s is being started: try again", id).Retry(time.Second)
		}
	}
	return s.readRanges(job, stream, factsOf(job, stream), offset, limit)
}

// readLive asks the guest, which has all there is of a job until its receipt is home.
func (s *Service) readLive(ctx context.Context, job *recordv1.JobRecord, stream berthv1.Stream, offset, limit uint64, wait time.Duration) (*Piece, error) {
	if err := cmp.Or(s.machineStopped(job), s.notFrozen(job)); err != nil {
		return s.readStopped(job, stream, offset, limit, err)
	}
	response, err := s.readInGuest(ctx, job.GetMachineId(), &guestv1.ReadRequest{
		JobId: job.GetId(), Stream: stream, Offset: offset, MaxBytes: limit, Wait: durationpb.New(wait),
	})
	if err != nil {
		return nil, err
	}
	facts, data := boundedFacts(response.GetFacts()), response.GetData()
	total := facts.GetTotalBytes()
	if offset > total {
		return nil, beyond(stream, offset, total)
	}
	data = data[:min(uint64(len(data)), limit, total-offset)]
	if len(data) == 0 && offset < total {
		next := response.GetNextKept()
		if next <= offset || next > total {
			next = total // else the caller would ask here for ever
		}
		return nil, expired(job.GetId(), stream, offset, next)
	}
	return &Piece{
		Data: data, Facts: facts, EOF: facts.GetSealed() && offset+uint64(len(data)) == facts.GetTotalBytes(),
	}, nil
}

// readStopped returns what came home of a job whose machine is stopped, and then why there is no more.
func (s *Service) readStopped(job *recordv1.JobRecord, stream berthv1.Stream, offset, limit uint64, stopped error) (*Piece, error) {
	facts := s.closedFacts(job.GetId(), stream, factsOf(job, stream))
	facts.Sealed = false
	if offset >= facts.GetTotalBytes() {
		return nil, stopped
	}
	return s.readRanges(job, stream, facts, offset, limit)
}

// readRanges returns bytes of what is at home.
func (s *Service) readRanges(job *recordv1.JobRecord, stream berthv1.Stream, facts *berthv1.OutputFacts, offset, limit uint64) (*Piece, error) {
	if offset == facts.GetTotalBytes() {
		return &Piece{Facts: facts, EOF: facts.GetSealed()}, nil
	}
	if offset > facts.GetTotalBytes() {
		return nil, beyond(stream, offset, facts.GetTotalBytes())
	}
	for _, kept := range facts.GetKept() {
		if offset < kept.GetFrom() {
			return nil, expired(job.GetId(), stream, offset, kept.GetFrom())
		}
		if offset < kept.GetTo() {
			data, err := s.output.read(job.GetId(), stream, kept.GetFrom(), offset, min(limit, kept.GetTo()-offset))
			if errors.Is(err, errNotKept) { // it was dropped meanwhile, to make room
				return nil, expired(job.GetId(), stream, offset, kept.GetTo())
			}
			if err != nil {
				return nil, err
			}
			return &Piece{Data: data, Facts: facts, EOF: facts.GetSealed() && offset+uint64(len(data)) == facts.GetTotalBytes()}, nil
		}
	}
	return nil, expired(job.GetId(), stream, offset, facts.GetTotalBytes())
}

// Tails returns the last bytes of both streams.
func (s *Service) Tails(ctx context.Context, job *recordv1.JobRecord, limit uint64) (*Ran, error) {
	stdout, err := s.tail(ctx, job, berthv1.Stream_STREAM_STDOUT, limit)
	if err != nil {
		return nil, err
	}
	stderr, err := s.tail(ctx, job, berthv1.Stream_STREAM_STDERR, limit)
	return &Ran{Job: job, Stdout: stdout, Stderr: stderr}, err
}

func (s *Service) tail(ctx context.Context, job *recordv1.JobRecord, stream berthv1.Stream, limit uint64) (*guestv1.Output, error) {
	facts := factsOf(job, stream)
	kept := facts.GetKept()
	if len(kept) == 0 {
		return &guestv1.Output{}, nil
	}
	last := kept[len(kept)-1]
	from := max(last.GetFrom(), last.GetTo()-min(limit, last.GetTo()))
	piece, err := s.ReadOutput(ctx, job.GetNamespace(), job.GetId(), stream, from, last.GetTo()-from, 0)
	if fault.Is(err, fault.OutputExpired) {
		return &guestv1.Output{}, nil // it moved on meanwhile
	}
	if err != nil {
		return nil, err
	}
	if from == 0 {
		return &guestv1.Output{Head: piece.Data}, nil
	}
	return &guestv1.Output{Tail: piece.Data, TailOffset: from}, nil
}

// headAndTail returns the first and the last bytes of what a receipt keeps of a stream.
func (s *Service) headAndTail(job *recordv1.JobRecord, stream berthv1.Stream, limit uint64) (*guestv1.Output, error) {
	facts := factsOf(job, stream)
	kept := facts.GetKept()
	if len(kept) == 0 {
		return &guestv1.Output{}, nil
	}
	first, last := kept[0], kept[len(kept)-1]
	half := limit / 2
	if facts.GetTotalBytes() <= limit && len(kept) == 1 {
		half = limit
	}
	output := &guestv1.Output{}
	if first.GetFrom() == 0 {
		head, err := s.output.read(job.GetId(), stream, 0, 0, min(half, first.GetTo()))
		if err != nil && !errors.Is(err, errNotKept) {
			return nil, err
		}
		output.Head = head
	}
	from := max(uint64(len(output.GetHead())), last.GetFrom(), last.GetTo()-min(limit-half, last.GetTo()))
	if from >= last.GetTo() {
		return output, nil
	}
	tail, err := s.output.read(job.GetId(), stream, last.GetFrom(), from, last.GetTo()-from)
	if errors.Is(err, errNotKept) {
		return output, nil
	}
	output.Tail, output.TailOffset = tail, from
	return output, err
}

// Filter says which jobs a list shows.
type Filter struct {
	SandboxID string
	States    []berthv1.JobState
	Labels    map[string]string // an empty value matches any
}

// List returns a page of jobs, newest first, and the ledger's revision that it shows.
func (s *Service) List(namespace string, filter Filter, page store.Page) (jobs []*recordv1.JobRecord, next string, revision uint64, err error) {
	stopped := map[string]bool{}
	err = s.opts.Store.View(func(tx *store.Tx) (err error) {
		revision = tx.Revision()
		jobs, next, err = tx.ListJobs(namespace, filter.SandboxID, page, func(job *recordv1.JobRecord) bool {
			if !isDone(job) && isStopped(tx, job.GetSandboxId(), stopped) {
				job.State = berthv1.JobState_JOB_STATE_UNKNOWN
			}
			return matchesState(job, filter.States) && lifecycle.MatchesLabels(job.GetSpec().GetLabels(), filter.Labels)
		})
		return err
	})
	return jobs, next, revision, err
}

func isStopped(tx *store.Tx, sandboxID string, seen map[string]bool) bool {
	if stopped, known := seen[sandboxID]; known {
		return stopped
	}
	sandbox, err := tx.Sandbox(sandboxID)
	seen[sandboxID] = err == nil && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_STOPPED
	return seen[sandboxID]
}

func matchesState(job *recordv1.JobRecord, states []berthv1.JobState) bool {
	for _, state := range states {
		if job.GetState() == state {
			return true
		}
	}
	return len(states) == 0
}

func factsOf(job *recordv1.JobRecord, stream berthv1.Stream) *berthv1.OutputFacts {
	facts := job.GetStdout()
	if stream == berthv1.Stream_STREAM_STDERR {
		facts = job.GetStderr()
	}
	if facts == nil {
		return &berthv1.OutputFacts{}
	}
	return proto.CloneOf(facts)
}

func expired(id string, stream berthv1.Stream, offset, next uint64) error {
	return fault.New(fault.OutputExpired, "byte %d of %s of job %s is not kept (output_limit_bytes, or keep_output is off): read on at %d",
		offset, streamName(stream), id, next).With("first_kept", strconv.FormatUint(next, 10))
}

func beyond(stream berthv1.Stream, offset, total uint64) error {
	return fault.Invalid("offset", "%d is beyond the end of %s, which has %d bytes so far", offset, streamName(stream), total)
}

// Open returns how many detached jobs of a sandbox are not done; with an empty id, how many jobs of all.
func (s *Service) Open(sandboxID string) (int, error) {
	open := 0
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		if sandboxID != "" {
			open, err = tx.CountOpenDetachedJobs(sandboxID)
			return err
		}
		all, err := tx.OpenJobs("")
		open = len(all)
		return err
	})
	return open, err
}
