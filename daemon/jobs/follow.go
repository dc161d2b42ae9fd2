package jobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	listWait    = 30 * time.Second // one long poll for a machine's job changes
	listLimit   = 500              // statuses an answer: far below the message limit
	homeAtOnce  = 8                // receipts brought home at once a machine: they share commits
	followRetry = time.Second      // after an error that is not the link's
	// askEvery and askSeldom pace a guest that answers before it was to: at most two hundred answers a
	// second, and one a second where they say nothing new again and again.
	askEvery      = 5 * time.Millisecond
	askSeldom     = time.Second
	attachedPolls = 10 * time.Second // one wait for a leftover attached command
	// maxNamed is how many jobs a guest may name when stock is taken, pages counted in; and maxAdopted
	// how many a machine that no record has: attached commands that were left by a crash, of which
	// there are some hundreds. A guest that names more makes them up, to fill the ledger.
	maxNamed   = 100_000
	maxAdopted = 10_000
)

// follower follows the jobs of one machine's guest, for as long as one connection lasts.
type follower struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// Follow begins to follow a machine's jobs; call it when a connection to its guest was opened. It
// first takes stock of every job that the guest knows and settles what the ledger has open, and then
// takes each change as it comes.
func (s *Service) Follow(machineID string, hello *guestv1.HelloResponse) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	before := s.followers[machineID]
	ctx, cancel := context.WithCancel(s.ctx)
	f := &follower{cancel: cancel, done: make(chan struct{})}
	s.followers[machineID] = f
	s.wg.Add(1)
	s.mu.Unlock()
	go func() {
		defer s.wg.Done()
		defer close(f.done)
		defer cancel()
		if before != nil {
			before.cancel()
			<-before.done
		}
		s.follow(ctx, machineID, hello)
	}()
}

// Forsake forgets what is kept in memory of a machine to which no link is kept any more.
func (s *Service) Forsake(machineID string) {
	s.Unfollow(machineID)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.stocked, machineID)
	delete(s.adopted, machineID)
}

// Unfollow ends the follower of a machine whose connection is gone.
func (s *Service) Unfollow(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.followers[machineID]; f != nil {
		f.cancel()
		delete(s.followers, machineID)
	}
}

func (s *Service) follow(ctx context.Context, machineID string, hello *guestv1.HelloResponse) {
	log := s.opts.Log.With("machine", machineID)
	for ctx.Err() == nil {
		if _, err := s.opts.Sandboxes.BootChanged(ctx, machineID, hello); err == nil {
			break
		} else if ctx.Err() == nil {
			log.Warn("cannot record the guest's boot", "error", err)
			pause(ctx, followRetry)
		}
	}
	request := &guestv1.ListRequest{Limit: listLimit} // everything, attached commands included
	known, named := map[string]bool{}, 0
	var settled time.Time
	var pace pacer
	warned := false
	for ctx.Err() == nil {
		response, err := s.list(ctx, machineID, request)
		if err == nil && response.GetBootId() != hello.GetBootId() {
			// Was it started again, the connection is about to break, and the next one's follower takes over.
			err = fmt.Errorf("it answers as boot %q, and was connected to as %q", boundedText(response.GetBootId()), hello.GetBootId())
		}
		if err != nil {
			if ctx.Err() == nil {
				log.Log(ctx, severity(warned || errors.Is(err, context.Canceled)), "cannot list the guest's jobs", "error", err)
				warned = true
				pause(ctx, followRetry)
			}
			continue
		}
		warned = false
		if !s.takeAll(ctx, machineID, response.GetStatuses()) {
			pause(ctx, followRetry)
			continue // the same again: a job that is done announces no further change
		}
		pace.await(ctx, response.GetNextCursor() > request.GetSinceCursor())
		request.SinceCursor = response.GetNextCursor()
		named += len(response.GetStatuses()) + 1
		if known == nil {
			if s.opts.Now().Sub(settled) >= listWait {
				settled = s.opts.Now()
				s.settleReserved(ctx, machineID, hello)
			}
			continue
		}
		if response.GetMore() && named < maxNamed {
			note(known, response)
			continue
		}
		note(known, response)
		s.settleOpen(ctx, machineID, hello, known)
		s.tookStock(machineID)
		known, settled = nil, s.opts.Now()
		request.Wait, request.DurableOnly = durationpb.New(listWait), true
	}
}

func note(known map[string]bool, response *guestv1.ListResponse) {
	if known == nil {
		return
	}
	for _, status := range response.GetStatuses() {
		if validJobID(status.GetJobId()) { // anything else is no open job's, and may be long
			known[status.GetJobId()] = true
		}
	}
}

// severity is what a failure is worth that happens again and again: a warning the first time.
func severity(warned bool) slog.Level {
	if warned {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// pacer keeps a loop that asks a guest from running at the guest's speed.
type pacer struct {
	last  time.Time
	empty int // answers in a row that said nothing new
}

// await waits until the guest may be asked again, after an answer that said something new, or nothing.
func (p *pacer) await(ctx context.Context, news bool) {
	wait := askEvery - time.Since(p.last)
	if p.empty++; news {
		p.empty = 0
	}
	if p.empty > 1 && wait > 0 {
		wait = min(askEvery<<min(p.empty, 16), askSeldom)
	}
	if wait > 0 {
		pause(ctx, wait)
	}
	p.last = time.Now()
}

func (s *Service) list(ctx context.Context, machineID string, request *guestv1.ListRequest) (*guestv1.ListResponse, error) {
	var response *guestv1.ListResponse
	err := s.ask(ctx, machineID, request.GetWait().AsDuration(), func(ctx context.Context, guest guestv1.GuestServiceClient) (err error) {
		response, err = guest.List(ctx, request)
		return err
	})
	return response, err
}

// takeAll takes statuses, several at once, and reports whether all could be taken.
func (s *Service) takeAll(ctx context.Context, machineID string, statuses []*guestv1.Status) bool {
	var group errgroup.Group
	group.SetLimit(homeAtOnce)
	for _, status := range statuses {
		group.Go(func() error {
			err := s.take(ctx, machineID, status)
			if err != nil && ctx.Err() == nil {
				s.opts.Log.Warn("cannot take a job's change; it is tried again", "machine", machineID, "job", status.GetJobId(), "error", err)
			}
			return err
		})
	}
	return group.Wait() == nil
}

// take brings the ledger up to what a guest says of one job.
func (s *Service) take(ctx context.Context, machineID string, status *guestv1.Status) error {
	if !status.GetDone() && s.attachedHere(status.GetJobId()) != nil {
		return nil // its caller is attached here, and gives it its record
	}
	job, err := s.adopt(ctx, machineID, status)
	if err != nil || job == nil {
		return err
	}
	switch {
	case status.GetDone():
		_, err = s.bringHome(ctx, machineID, status)
		return err
	case isDone(job):
		// The ledger's word is final: what runs against it, a start that arrived too late, is ended.
		s.opts.Log.Warn("a command runs although its job has ended; it is stopped", "machine", machineID, "job", job.GetId())
		_, err = s.stopInGuest(ctx, machineID, 0, &guestv1.StopRequest{
			JobId: job.GetId(), Grace: durationpb.New(0), Reason: "too_late: its job had ended in the ledger",
		})
		return err
	case !hasBegun(job):
		s.recordRunning(ctx, status)
	}
	if !status.GetDurable() {
		s.spawn(func() { s.await(s.ctx, machineID, job.GetId()) })
		return nil
	}
	return s.copyHead(ctx, machineID, job, status)
}

// adopt returns the ledger's record of a job that a guest names. A command that was attached, and
// so was not written down before it began, gets its record now; so does one that was started after the
// backup that this ledger is: that one was durable, and its output is kept. Nil: it is none of this
// machine's.
func (s *Service) adopt(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	job, err := s.job(status.GetJobId())
	if err == nil && job.GetMachineId() == machineID {
		return job, nil
	}
	if !validJobID(status.GetJobId()) {
		return nil, nil
	}
	if err == nil {
		s.opts.Log.Warn("a guest names a job of another machine; ignored", "machine", machineID, "job", job.GetId())
		return nil, nil
	}
	if s.outlived(status) {
		s.forget(ctx, machineID, status.GetJobId())
		return nil, nil
	}
	if !s.mayAdopt(machineID) {
		return nil, nil
	}
	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		job, err = tx.Job(status.GetJobId())
		if err != nil || job != nil {
			return err
		}
		machine, err := tx.Machine(machineID)
		if err != nil || machine == nil || lifecycle.IsSetupJob(machine.GetSandboxId(), status.GetJobId()) {
			return err
		}
		job = &recordv1.JobRecord{
			Id: status.GetJobId(), Namespace: machine.GetNamespace(), SandboxId: machine.GetSandboxId(), MachineId: machineID,
			Generation: machine.GetGeneration(), BootId: boundedText(status.GetBootId()),
			State: berthv1.JobState_JOB_STATE_RUNNING, Spec: &berthv1.JobSpec{KeepOutput: proto.Bool(status.GetDurable())},
			CreateTime: timestamppb.New(s.opts.Now()), StartTime: boundedTime(status.GetStartTime(), s.opts.Now()),
			Detached: status.GetDurable(), KeepOutput: status.GetDurable(),
		}
		return tx.PutJob(job, "job.found", "a command of before the broker's start that no record had")
	})
	if err != nil || job.GetMachineId() != machineID {
		return nil, err
	}
	return job, nil
}

// outlived reports whether a job ended so long ago that its receipt, which nobody told its guest is at
// home, may have been dropped again.
func (s *Service) outlived(status *guestv1.Status) bool {
	now := s.opts.Now()
	ended := boundedTime(status.GetEndTime(), now)
	if !status.GetDone() || ended == nil {
		return false
	}
	dropped, err := s.droppedThrough()
	return err == nil && (now.Sub(ended.AsTime()) > s.opts.Retention || !ended.AsTime().After(dropped))
}

// mayAdopt counts a job that is to be adopted, and reports whether there are not too many of its
// machine.
func (s *Service) mayAdopt(machineID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.adopted[machineID]++
	if s.adopted[machineID] == maxAdopted+1 {
		s.opts.Log.Error("a guest names more jobs than there can be; no more are taken from it", "machine", machineID)
	}
	return s.adopted[machineID] <= maxAdopted
}

// await waits for a leftover attached command to end, and brings its outcome home. It does nothing where
// somebody waits for it already.
func (s *Service) await(ctx context.Context, machineID, jobID string) {
	if !s.setAwaited(jobID) {
		return
	}
	defer s.unsetAwaited(jobID)
	var pace pacer
	for ctx.Err() == nil {
		status, err := s.waitInGuest(ctx, machineID, jobID, attachedPolls)
		if err != nil {
			return // the next connection takes stock again
		}
		if status.GetDone() {
			if err := s.take(ctx, machineID, status); err != nil && ctx.Err() == nil {
				s.opts.Log.Warn("cannot record an attached command's outcome", "job", jobID, "error", err)
			}
			return
		}
		pace.await(ctx, false)
	}
}

func (s *Service) setAwaited(jobID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.awaited[jobID] {
		return false
	}
	s.awaited[jobID] = true
	return true
}

func (s *Service) unsetAwaited(jobID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.awaited, jobID)
}

func (s *Service) waitInGuest(ctx context.Context, machineID, jobID string, wait time.Duration) (*guestv1.Status, error) {
	var status *guestv1.Status
	err := s.ask(ctx, machineID, wait, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		response, err := guest.Wait(ctx, &guestv1.WaitRequest{JobId: jobID, Wait: durationpb.New(wait)})
		status = response.GetStatus()
		return err
	})
	if err != nil {
		return nil, err
	}
	return about(status, machineID, jobID)
}

// settleOpen settles the jobs that the ledger has open and that the guest did not name: those it
// never began are started if that is still right, and end as expired or lost if not.
func (s *Service) settleOpen(ctx context.Context, machineID string, hello *guestv1.HelloResponse, known map[string]bool) {
	var open []*recordv1.JobRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		open, err = tx.OpenJobs(machineID)
		return err
	})
	if err != nil {
		s.opts.Log.Error("cannot read a machine's open jobs", "machine", machineID, "error", err)
		return
	}
	for _, job := range open {
		if ctx.Err() != nil {
			return
		}
		if known[job.GetId()] || s.isBeginning(job.GetId()) {
			continue
		}
		if err := s.settle(ctx, machineID, hello, job); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("cannot settle an open job; it is tried again at the next connection", "job", job.GetId(), "error", err)
		}
	}
}

// settleReserved settles jobs whose start came to nothing although the connection holds.
func (s *Service) settleReserved(ctx context.Context, machineID string, hello *guestv1.HelloResponse) {
	begun := map[string]bool{}
	err := s.opts.Store.View(func(tx *store.Tx) error {
		open, err := tx.OpenJobs(machineID)
		for _, job := range open {
			begun[job.GetId()] = hasBegun(job)
		}
		return err
	})
	if err == nil {
		s.settleOpen(ctx, machineID, hello, begun)
	}
}

func (s *Service) settle(ctx context.Context, machineID string, hello *guestv1.HelloResponse, job *recordv1.JobRecord) error {
	status, err := s.waitInGuest(ctx, machineID, job.GetId(), 0)
	if err == nil {
		return s.take(ctx, machineID, status)
	}
	if !errors.Is(err, guestlink.ErrNoJob) {
		return err
	}
	sameBoot := job.GetBootId() == hello.GetBootId()
	switch {
	case hasBegun(job) || !sameBoot:
		reason := "guest_restarted: the machine's guest was started again and has no record of it"
		switch {
		case sameBoot && job.GetStartDeadline() == nil:
			// Its guest may never have heard of it, or kept its end for the caller as long as it does.
			reason = "disconnected: its caller went away, and the machine's guest has no record of it"
		case job.GetBootId() == "":
			reason = "restored: it was reserved in the backup that this ledger is, and may have run since"
		case sameBoot:
			reason = "no_record: the machine's guest no longer has a record of it"
		}
		_, err = s.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) { s.close(job, lost(reason)) })
	case s.opts.Now().After(job.GetStartDeadline().AsTime()):
		_, err = s.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) {
			s.close(job, &berthv1.Outcome{
				Cause:  berthv1.Cause_CAUSE_FAILED_TO_START,
				Reason: "expired: the broker was away until after the job's start_deadline, so it was not started",
			})
		})
	default:
		err = s.beginAgain(job)
	}
	return err
}

// beginAgain begins a job that was reserved before a crash and that its guest has not begun.
func (s *Service) beginAgain(job *recordv1.JobRecord) error {
	secrets, err := s.secrets(job)
	if err != nil {
		return err
	}
	s.setBeginning(job.GetId(), true)
	if !s.spawn(func() {
		s.begin(s.ctx, job, secrets, func(_ *recordv1.JobRecord, err error) {
			if err != nil && s.ctx.Err() == nil {
				s.opts.Log.Warn("cannot start a reserved job", "job", job.GetId(), "error", err)
			}
		})
	}) {
		s.setBeginning(job.GetId(), false)
	}
	return nil
}

// pause waits and reports whether the context still holds.
func pause(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
