// Package jobs is the API's jobs: it starts and runs them, waits for them, stops them, feeds them and reads
// their output, from the ledger once a job is done and from its guest while it runs. Its parts lie in
// packages of their own, which it joins. It never makes up an outcome, never starts a command twice, and
// never boots or destroys a machine.
package jobs

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"time"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/command"
	"github.com/berth-sandbox/berth/daemon/jobs/follow"
	"github.com/berth-sandbox/berth/daemon/jobs/lookup"
	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/relay"
	"github.com/berth-sandbox/berth/daemon/jobs/retention"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
	"github.com/berth-sandbox/berth/daemon/jobs/unrecorded"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Options configure a Service. All but Now and Retention are required.
type Options struct {
	Store     *store.Store
	Events    *events.Hub // fed by the store's commits
	Vault     *vault.Vault
	Links     *guestlink.Links
	Sandboxes *lifecycle.Service
	OutputDir string // receipts' output lies here, a directory for each job
	Log       *slog.Logger
	Now       func() time.Time
	// Retention is how long receipts are kept: a job that ended longer ago and that no record has is not
	// recovered. Default: no limit.
	Retention time.Duration
}

// Service is the API's jobs. Follower, Relay and Retention are the parts of it that others call directly.
type Service struct {
	*follow.Follower
	*relay.Relay
	*retention.Retention

	store      *store.Store
	links      *guestlink.Links
	jobs       *lookup.Jobs
	commands   command.Builder
	starter    *start.Starter
	unrecorded *unrecorded.Commands
	receipts   *receipt.Receipts
	output     *output.Store
	background *background.Group
	now        func() time.Time
	drain      context.CancelFunc
}

// Peer is who is attached to a job.
type Peer = relay.Peer

// New makes a service over a directory of output, which is made if it is missing.
func New(opts Options) (*Service, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Retention == 0 {
		opts.Retention = math.MaxInt64
	}
	kept, err := output.Open(opts.OutputDir)
	if err != nil {
		return nil, err
	}
	draining, drain := context.WithCancel(context.Background())
	s := &Service{
		store: opts.Store, links: opts.Links, output: kept, now: opts.Now, drain: drain,
		background: background.NewGroup(), commands: command.Builder{Vault: opts.Vault},
	}
	s.receipts = receipt.New(receipt.Options{
		Store: opts.Store, Links: opts.Links, Output: kept, Background: s.background, Log: opts.Log, Now: opts.Now,
	})
	s.starter = start.New(start.Options{
		Store: opts.Store, Links: opts.Links, Commands: s.commands, Receipts: s.receipts, Background: s.background, Log: opts.Log, Now: opts.Now,
	})
	s.unrecorded = unrecorded.New(unrecorded.Options{
		Store: opts.Store, Links: opts.Links, Builder: s.commands, Receipts: s.receipts, Background: s.background, Log: opts.Log, Now: opts.Now,
	})
	s.Follower = follow.New(follow.Options{
		Store: opts.Store, Links: opts.Links, Starter: s.starter, Unrecorded: s.unrecorded, Receipts: s.receipts,
		Background: s.background, Log: opts.Log, Now: opts.Now, BootChanged: opts.Sandboxes.BootChanged, Retention: opts.Retention,
	})
	s.jobs = &lookup.Jobs{
		Store: opts.Store, Events: opts.Events, Unrecorded: s.unrecorded, Syncing: s.Syncing, Draining: draining.Done(),
	}
	s.Relay = &relay.Relay{
		Links: opts.Links, Jobs: s.jobs, Starter: s.starter, Unrecorded: s.unrecorded, Receipts: s.receipts, Output: kept, Background: s.background,
	}
	s.Retention = &retention.Retention{Store: opts.Store, Output: kept, Receipts: s.receipts, Log: opts.Log}
	return s, nil
}

// Drain ends the calls that only wait, so that the broker can stop soon.
func (s *Service) Drain() { s.drain() }

// Close ends what runs in the background and waits for it. Jobs go on in their guests.
func (s *Service) Close() {
	s.drain()
	s.background.Close()
}

// Environment returns a sandbox's environment, its secrets included.
func (s *Service) Environment(sandbox *recordv1.SandboxRecord) (map[string]string, error) {
	return s.commands.Environment(sandbox)
}

// LoseJobs ends, in the transaction, every job of a machine that is gone.
func (s *Service) LoseJobs(tx *store.Tx, machineID, reason string) error {
	return s.receipts.LoseJobs(tx, machineID, reason)
}

// IsOpen reports whether a job is not done.
func IsOpen(job *recordv1.JobRecord) bool { return !record.IsDone(job) }

// IsOrphaned reports whether a job is open although its sandbox is gone or lost, so that nobody will ever
// end it.
func IsOrphaned(job *recordv1.JobRecord, sandbox *recordv1.SandboxRecord) bool {
	return retention.IsOrphaned(job, sandbox)
}

// Start starts a detached job. It returns once the job's record is on disk and the guest has begun
// the command, durably; or with the outcome of a command that could not be started.
func (s *Service) Start(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec) (*recordv1.JobRecord, error) {
	job, joined, err := s.starter.Start(ctx, call, sandboxID, spec, true)
	if err != nil || !joined {
		return job, err
	}
	return s.jobs.Until(ctx, job, record.HasBegun)
}

// Poll returns a job; with a wait, when it is done or the wait is over. A job whose machine cannot
// be asked is returned as the ledger has it where waiting is no use, and is an error that says to
// come back where the broker is still on its way to the machine.
func (s *Service) Poll(ctx context.Context, namespace, id string, wait time.Duration) (*recordv1.JobRecord, error) {
	job, err := s.jobs.Find(namespace, id)
	if err != nil || record.IsDone(job) {
		return job, err
	}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	job, err = s.jobs.Until(limited, job, record.IsDone)
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
	if !record.HasBegun(job) || s.jobs.Suspended(job) {
		return job, nil
	}
	status, err := s.links.WaitJob(ctx, job.GetMachineId(), job.GetId(), 0)
	if isNoJob(err) {
		return s.jobs.Find(job.GetNamespace(), job.GetId()) // its receipt was imported meanwhile
	}
	if err != nil {
		return nil, err
	}
	if !status.GetDone() {
		job.Stdout, job.Stderr = status.GetStdout(), status.GetStderr()
		return job, nil
	}
	return s.imported(ctx, job, status)
}

// imported is the record of a job that its guest says is done.
func (s *Service) imported(ctx context.Context, job *recordv1.JobRecord, status *guestv1.Status) (*recordv1.JobRecord, error) {
	held := s.unrecorded.Find(job.GetId())
	switch {
	case held == nil:
		return s.receipts.Import(ctx, job.GetMachineId(), status)
	case record.IsDone(held):
		return held, nil
	}
	return s.unrecorded.Done(held, status), nil
}

// updater is how a call is written down: the ledger's Update, or UpdateUrgent for one that ends a job.
type updater func(context.Context, func(*store.Tx) error) error

// mayTouch returns a job that a mutating call is about, and remembers the call; or why the call may
// not touch the job.
func (s *Service) mayTouch(ctx context.Context, call request.Call, id string, update updater) (*recordv1.JobRecord, error) {
	job, repeated, err := s.check(call, id)
	if err != nil || repeated || call.RequestID == "" {
		return job, err
	}
	return job, update(ctx, func(tx *store.Tx) error {
		if prior, err := call.Prior(tx); err != nil || prior != "" {
			return err
		}
		return call.Remember(tx, id, s.now())
	})
}

// check returns a job that a mutating call is about, and whether the same call was made before.
func (s *Service) check(call request.Call, id string) (job *recordv1.JobRecord, repeated bool, err error) {
	if job, err = s.jobs.Find(call.Namespace, id); err != nil {
		return nil, false, err
	}
	err = s.store.View(func(tx *store.Tx) error {
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

func isNoJob(err error) bool { return errors.Is(err, guestlink.ErrNoJob) }

func isContextEnd(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
