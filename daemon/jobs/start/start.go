// Package start writes a job down before its guest begins it, and has it begun: at most once, also over a
// crash in between. It never makes up whether a command runs; a job of which that is open stays RESERVED.
package start

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/command"
	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Defaults and bounds that the API documents.
const (
	DefaultDeadline = time.Minute
	// MaxOpenJobs a sandbox: each costs the guest a few descriptors and the ledger a record.
	MaxOpenJobs = 1024
)

const (
	activityInterval = 30 * time.Second // last_activity_time is written this often at most
	tooManyRetry     = 5 * time.Second
)

// Options configure a Starter. All are required.
type Options struct {
	Store      *store.Store
	Links      *guestlink.Links
	Commands   command.Builder
	Receipts   *receipt.Receipts
	Background *background.Group
	Log        *slog.Logger
	Now        func() time.Time
}

// Starter starts jobs.
type Starter struct {
	Options

	mu       sync.Mutex
	underway map[string]bool // jobs that this process is starting
}

// New returns a starter.
func New(opts Options) *Starter { return &Starter{Options: opts, underway: map[string]bool{}} }

// Start writes a job down and returns it when its guest has begun the command, durably; or with the outcome
// of a command that could not be started. A request that was made before joins its job, as it is then.
func (s *Starter) Start(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, detached bool) (job *recordv1.JobRecord, joined bool, err error) {
	id := request.NewID("job")
	s.set(id, true)
	job, command, err := s.reserve(ctx, call, s.newJob(id, call.Namespace, sandboxID, spec, detached), spec)
	if err != nil || job.GetId() != id {
		s.set(id, false)
		return job, true, err
	}
	// gofail: var jobsAfterReserve struct{}
	// fault.Die()
	type answer struct {
		job *recordv1.JobRecord
		err error
	}
	began := make(chan answer, 1)
	if !s.Background.Go(func(ctx context.Context) {
		s.begin(ctx, job, command, func(job *recordv1.JobRecord, err error) { began <- answer{job, err} })
	}) {
		s.set(id, false)
		return nil, false, fault.New(fault.Stopping, "the broker is being stopped; %s is started when it is back", id).Retry(time.Second)
	}
	select {
	case answer := <-began:
		return answer.job, false, answer.err
	case <-ctx.Done():
		return nil, false, fmt.Errorf("%s is reserved, and its start continues in the background: %w", id, ctx.Err())
	}
}

func (s *Starter) newJob(id, namespace, sandboxID string, spec *berthv1.JobSpec, detached bool) *recordv1.JobRecord {
	now := s.Now()
	deadline := DefaultDeadline
	if spec.GetStartDeadline() != nil {
		deadline = spec.GetStartDeadline().AsDuration()
	}
	return &recordv1.JobRecord{
		Id: id, Namespace: namespace, SandboxId: sandboxID, Spec: command.Redacted(spec),
		State: berthv1.JobState_JOB_STATE_RESERVED, Detached: detached, CreateTime: timestamppb.New(now),
		StartDeadline: timestamppb.New(now.Add(deadline)), KeepOutput: spec.Keep == nil || spec.GetKeepOutput(),
	}
}

// reserve writes the job down for the machine that runs now, with its secrets sealed, and returns its
// command; or it finds the job of the same request.
func (s *Starter) reserve(ctx context.Context, call request.Call, job *recordv1.JobRecord, spec *berthv1.JobSpec) (reserved *recordv1.JobRecord, command *guestv1.Command, err error) {
	err = s.Store.Update(ctx, func(tx *store.Tx) error {
		reserved, command = nil, nil
		prior, err := call.Prior(tx)
		if err != nil {
			return err
		}
		if prior != "" {
			reserved, err = priorJob(tx, prior)
			return err
		}
		sandbox, machine, err := s.target(tx, call, job.GetSandboxId())
		if err != nil {
			return err
		}
		reserved = proto.CloneOf(job)
		reserved.MachineId, reserved.Generation, reserved.BootId = machine.GetId(), sandbox.GetGeneration(), machine.GetBootId()
		if command, reserved.SealedSecrets, err = s.Commands.Sealed(sandbox, job.GetId(), spec); err != nil {
			return err
		}
		return errors.Join(
			tx.PutJob(reserved, "job.reserved", ""),
			call.Remember(tx, reserved.GetId(), s.Now()),
			Touch(tx, sandbox, s.Now()),
		)
	})
	return reserved, command, err
}

// target returns where a job is to run, unless there are too many already.
func (s *Starter) target(tx *store.Tx, call request.Call, sandboxID string) (*recordv1.SandboxRecord, *recordv1.MachineRecord, error) {
	sandbox, machine, err := command.Target(tx, call, sandboxID)
	if err != nil {
		return nil, nil, err
	}
	open, err := tx.CountOpenJobs(sandbox.GetId())
	if err == nil && open >= MaxOpenJobs {
		err = fault.New(fault.TooManyJobs, "sandbox %s has %d jobs that are not done: stop some, or wait for them", sandbox.GetId(), open).
			With("limit", fmt.Sprint(MaxOpenJobs)).Retry(tooManyRetry)
	}
	return sandbox, machine, err
}

func priorJob(tx *store.Tx, id string) (*recordv1.JobRecord, error) {
	job, err := tx.Job(id)
	if err == nil && job == nil {
		err = fault.New(fault.JobNotFound, "this request made %s, whose receipt is no longer kept (berthd --retention, --retention-jobs): it is not done again", id).
			With("job_id", id)
	}
	return job, err
}

// IsStale reports whether a sandbox's last activity is old enough to be written again.
func IsStale(sandbox *recordv1.SandboxRecord, now time.Time) bool {
	age := now.Sub(sandbox.GetLastActivityTime().AsTime())
	return age >= activityInterval || age < 0
}

// Touch writes down that a running sandbox is used.
func Touch(tx *store.Tx, sandbox *recordv1.SandboxRecord, now time.Time) error {
	if !IsStale(sandbox, now) {
		return nil
	}
	sandbox.LastActivityTime = timestamppb.New(now)
	return tx.PutSandbox(sandbox, "", "")
}

// Again has a guest begin a job that was reserved before a crash and that it has not begun.
func (s *Starter) Again(job *recordv1.JobRecord) error {
	var sandbox *recordv1.SandboxRecord
	err := s.Store.View(func(tx *store.Tx) (err error) {
		sandbox, err = tx.Sandbox(job.GetSandboxId())
		return err
	})
	if err != nil {
		return err
	}
	command, err := s.Commands.Unsealed(sandbox, job)
	if err != nil {
		return err
	}
	s.set(job.GetId(), true)
	if !s.Background.Go(func(ctx context.Context) {
		s.begin(ctx, job, command, func(_ *recordv1.JobRecord, err error) {
			if err != nil && ctx.Err() == nil {
				s.Log.Warn("cannot start a reserved job", "job", job.GetId(), "error", err)
			}
		})
	}) {
		s.set(job.GetId(), false)
	}
	return nil
}

// begin has the guest begin a reserved job, answers, and then writes RUNNING behind the answer, for the
// record and the guest together already decide. Until the guest has answered, one way or the other, the job
// stays RESERVED: whether the command runs is then not known, and the follower finds out when the machine
// is heard from again.
func (s *Starter) begin(ctx context.Context, job *recordv1.JobRecord, command *guestv1.Command, answer func(*recordv1.JobRecord, error)) {
	defer s.set(job.GetId(), false)
	status, err := s.inGuest(ctx, job, command)
	// gofail: var jobsAfterStart struct{}
	// fault.Die()
	switch {
	case err != nil:
		answer(s.notBegun(ctx, job, err))
	case status.GetDone():
		answer(s.Receipts.Import(ctx, job.GetMachineId(), status))
	default:
		running := proto.CloneOf(job)
		record.SetRunning(running, status)
		answer(running, nil)
		s.Running(ctx, status)
	}
}

func (s *Starter) inGuest(ctx context.Context, job *recordv1.JobRecord, command *guestv1.Command) (*guestv1.Status, error) {
	ctx, cancel := context.WithDeadline(ctx, job.GetStartDeadline().AsTime())
	defer cancel()
	return s.Links.StartJob(ctx, job.GetMachineId(), &guestv1.StartRequest{
		JobId: job.GetId(), BootId: job.GetBootId(), Command: command, Durable: true, // the boot fences more strictly than the generation
		KillOnDisconnect: job.GetSpec().GetOnDisconnect() == berthv1.OnDisconnect_ON_DISCONNECT_KILL,
		DisconnectGrace:  job.GetSpec().GetDisconnectGrace(),
	})
}

// notBegun ends a job that its guest refused for good; any other error leaves it RESERVED.
func (s *Starter) notBegun(ctx context.Context, job *recordv1.JobRecord, cause error) (*recordv1.JobRecord, error) {
	var outcome *berthv1.Outcome
	switch {
	case errors.Is(cause, guestlink.ErrOtherBoot), errors.Is(cause, guestlink.ErrOtherGeneration):
		outcome = record.Lost("guest_restarted: the machine's guest was started again before it had begun the job")
	case errors.Is(cause, guestlink.ErrExpired):
		outcome = record.FailedToStart("expired: its guest has seen much younger jobs, so it was not started")
	case errors.Is(cause, guestlink.ErrForgotten):
		outcome = record.Lost("forgotten: the guest was told to forget the job before its receipt was stored")
	case errors.Is(cause, guestlink.ErrRefused):
		outcome = record.FailedToStart("refused: " + cause.Error())
	default:
		return nil, cause
	}
	return s.Receipts.Close(ctx, job.GetId(), outcome)
}

// Running writes down that a job was begun, unless it is known already.
func (s *Starter) Running(ctx context.Context, status *guestv1.Status) {
	err := s.Store.Update(ctx, func(tx *store.Tx) error {
		job, err := tx.Job(status.GetJobId())
		if err != nil || job == nil || record.HasBegun(job) {
			return err
		}
		record.SetRunning(job, status)
		return tx.PutJob(job, "job.running", "")
	})
	if err != nil && ctx.Err() == nil {
		s.Log.Warn("cannot record that a job runs; its guest remembers", "job", status.GetJobId(), "error", err)
	}
}

// Underway reports whether this process is starting a job.
func (s *Starter) Underway(jobID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.underway[jobID]
}

func (s *Starter) set(jobID string, underway bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if underway {
		s.underway[jobID] = true
	} else {
		delete(s.underway, jobID)
	}
}
