// Package jobs is the job ledger: it reserves a job before its guest begins it, follows every
// machine's jobs, brings outcomes and output home as receipts, and answers from the ledger once a
// job is done and from the guest while it runs. It never makes up an outcome, never starts a command
// twice, and never boots or destroys a machine.
package jobs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Defaults and bounds that the API documents.
const (
	DefaultKillGrace     = 5 * time.Second
	DefaultOutputLimit   = 64 << 20
	DefaultStartDeadline = time.Minute
	// MaxOpenJobs a sandbox: each costs the guest a few descriptors and the ledger a record.
	MaxOpenJobs = 1024
)

// Tuning.
const (
	activityEvery = 30 * time.Second // last_activity is written this often at most, or every command would cost a commit
	activeMost    = 4096             // sandboxes whose last use is in memory; then those are forgotten whose use is long enough ago
	tooManyRetry  = 5 * time.Second
	guestPatience = 30 * time.Second // far above what a guest under load takes
)

// Options configure a Service. All but Now and GuestPatience are required.
type Options struct {
	Store     *store.Store
	Vault     *vault.Vault
	Links     *guestlink.Links
	Sandboxes *lifecycle.Service
	OutputDir string // receipts' output lies here, a directory for each job
	Log       *slog.Logger
	Now       func() time.Time
	// Retention is how long receipts are kept: a job that ended longer ago and that no record has is not
	// taken up again. Default: however long ago.
	Retention time.Duration
	// GuestPatience is how long a guest that is connected may take to answer beyond what the call itself
	// waits for. Default: 30 s.
	GuestPatience time.Duration
}

// Service runs jobs and keeps their receipts.
type Service struct {
	opts   Options
	output *homeOutput
	news   *news

	ctx     context.Context //nolint:containedctx // ends the followers, which outlive every call
	cancel  context.CancelFunc
	drain   context.CancelFunc
	drained <-chan struct{}

	mu        sync.Mutex
	wg        sync.WaitGroup // under mu until closed, so that nothing is added while Close waits
	closed    bool
	followers map[string]*follower           // by machine
	beginning map[string]bool                // jobs whose start is under way in this process
	spent     map[string][]string            // attached commands that their guests may forget, by machine
	recorded  map[string]bool                // attached commands whose record is in the ledger's queue
	spending  bool                           // somebody waits for the commit of those
	attached  map[string]*recordv1.JobRecord // commands whose caller is attached here, until their record is written
	active    map[string]time.Time           // when last_activity was last written, by sandbox
	held      map[string]int                 // who reads from a guest, by job
	// forgettable are held jobs that their guest may forget when nobody reads from there any more.
	forgettable map[string]bool
	stocked     map[string]bool // machines whose jobs were taken stock of since the start
	adopted     map[string]int  // jobs that a guest named and no record had, by machine
	awaited     map[string]bool // jobs whose end somebody here waits for

	importing singleflight.Group // by job
}

// New makes a service over a directory of output, which is made if it is missing.
func New(opts Options) (*Service, error) {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.Retention == 0 {
		opts.Retention = math.MaxInt64
	}
	if opts.GuestPatience == 0 {
		opts.GuestPatience = guestPatience
	}
	output, err := openHomeOutput(opts.OutputDir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	draining, drain := context.WithCancel(ctx)
	return &Service{
		opts: opts, output: output, news: newNews(), ctx: ctx, cancel: cancel, drain: drain, drained: draining.Done(),
		followers: map[string]*follower{}, beginning: map[string]bool{}, attached: map[string]*recordv1.JobRecord{}, active: map[string]time.Time{},
		held: map[string]int{}, spent: map[string][]string{}, recorded: map[string]bool{}, forgettable: map[string]bool{}, stocked: map[string]bool{}, adopted: map[string]int{}, awaited: map[string]bool{},
	}, nil
}

// Drain ends the calls that only wait, so that the broker can stop soon.
func (s *Service) Drain() { s.drain() }

// Close ends the followers and waits for them. Jobs go on in their guests.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.wg.Wait()
}

// spawn runs fn on a goroutine that Close waits for; not after Close.
func (s *Service) spawn(fn func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		fn()
	}()
	return true
}

// Start starts a detached job. It returns once the job's record is on disk and the guest has begun
// the command, durably; or with the outcome of a command that could not be started.
func (s *Service) Start(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec) (*recordv1.JobRecord, error) {
	s.touch(sandboxID)
	return s.reserveAndBegin(ctx, call, sandboxID, spec, true)
}

// reserveAndBegin writes a job down and has its guest begin it. A request that was made before joins
// its job.
func (s *Service) reserveAndBegin(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec, detached bool) (*recordv1.JobRecord, error) {
	job, secrets, err := s.newJob(call.Namespace, sandboxID, spec, detached)
	if err != nil {
		return nil, err
	}
	s.setBeginning(job.GetId(), true)
	reserved, err := s.reserve(ctx, call, job)
	if err != nil || reserved.GetId() != job.GetId() {
		s.setBeginning(job.GetId(), false)
		if err != nil {
			return nil, err
		}
		return s.until(ctx, reserved.GetId(), hasBegun)
	}
	// gofail: var jobsAfterReserve struct{}
	// fault.Die()
	type answer struct {
		job *recordv1.JobRecord
		err error
	}
	began := make(chan answer, 1)
	if !s.spawn(func() {
		s.begin(s.ctx, reserved, secrets, func(job *recordv1.JobRecord, err error) { began <- answer{job, err} })
	}) {
		s.setBeginning(job.GetId(), false)
		return nil, stopping(job.GetId())
	}
	select {
	case answer := <-began:
		return answer.job, answer.err
	case <-ctx.Done():
		return nil, fmt.Errorf("job %s is reserved and is being started, which goes on without you: %w", job.GetId(), ctx.Err())
	}
}

func hasBegun(job *recordv1.JobRecord) bool {
	return job.GetState() != berthv1.JobState_JOB_STATE_RESERVED
}

// newJob makes a job's record, with its secrets sealed and taken out of its spec.
func (s *Service) newJob(namespace, sandboxID string, spec *berthv1.JobSpec, detached bool) (*recordv1.JobRecord, *recordv1.JobSecrets, error) {
	now := s.opts.Now()
	job := &recordv1.JobRecord{
		Id: lifecycle.NewID("job"), Namespace: namespace, SandboxId: sandboxID, Spec: proto.CloneOf(spec),
		State: berthv1.JobState_JOB_STATE_RESERVED, Detached: detached, CreateTime: timestamppb.New(now),
		KeepOutput: spec.KeepOutput == nil || spec.GetKeepOutput(),
	}
	deadline := DefaultStartDeadline
	if spec.GetStartDeadline() != nil {
		deadline = spec.GetStartDeadline().AsDuration()
	}
	job.StartDeadline = timestamppb.New(now.Add(deadline))
	secrets := &recordv1.JobSecrets{Env: spec.GetSecretEnv(), Stdin: spec.GetStdin().GetData()}
	redact(job.GetSpec())
	if len(secrets.GetEnv()) == 0 && len(secrets.GetStdin()) == 0 {
		return job, secrets, nil
	}
	plain, err := proto.Marshal(secrets)
	if err != nil {
		return nil, nil, fmt.Errorf("encode the job's secrets: %w", err)
	}
	job.SealedSecrets, err = s.opts.Vault.Seal(job.GetId(), plain)
	return job, secrets, err
}

func redact(spec *berthv1.JobSpec) {
	if len(spec.GetSecretEnv()) > 0 {
		spec.SecretEnv = lifecycle.Redacted(spec.GetSecretEnv())
	}
	if len(spec.GetStdin().GetData()) > 0 {
		spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{}}
	}
}

// reserve writes the job down for the machine that runs now, or finds the job of the same request.
func (s *Service) reserve(ctx context.Context, call lifecycle.Call, job *recordv1.JobRecord) (*recordv1.JobRecord, error) {
	var reserved *recordv1.JobRecord
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		reserved = proto.CloneOf(job)
		prior, err := call.Prior(tx)
		if err != nil {
			return err
		}
		if prior != "" {
			reserved, err = tx.Job(prior)
			if err == nil && reserved == nil {
				err = fault.New(fault.JobNotFound, "this request made job %s, whose receipt is no longer kept (berthd --retention, --retention-jobs): it is not done again", prior).
					With("job_id", prior)
			}
			return err
		}
		sandbox, machine, err := runningMachine(tx, call, job.GetSandboxId())
		if err != nil {
			return err
		}
		open, err := tx.CountOpenJobs(sandbox.GetId())
		if err != nil {
			return err
		}
		if open >= MaxOpenJobs {
			return fault.New(fault.TooManyJobs, "sandbox %s has %d jobs that are not done: stop some, or wait for them", sandbox.GetId(), open).
				With("limit", fmt.Sprint(MaxOpenJobs)).Retry(tooManyRetry)
		}
		reserved.MachineId, reserved.Generation, reserved.BootId = machine.GetId(), sandbox.GetGeneration(), machine.GetBootId()
		return errors.Join(
			tx.PutJob(reserved, "job.reserved", ""),
			call.Remember(tx, reserved.GetId(), s.opts.Now()),
		)
	})
	return reserved, err
}

// runningMachine returns the sandbox of a call and the machine that it runs in.
func runningMachine(tx *store.Tx, call lifecycle.Call, sandboxID string) (*recordv1.SandboxRecord, *recordv1.MachineRecord, error) {
	sandbox, err := call.Sandbox(tx, sandboxID)
	if err != nil {
		return nil, nil, err
	}
	if err := lifecycle.WantRunning(sandbox); err != nil {
		return nil, nil, err
	}
	machine, err := tx.Machine(sandbox.GetMachineId())
	if err == nil && machine == nil {
		err = fault.New(fault.Internal, "sandbox %s is RUNNING, and its machine %s has no record", sandboxID, sandbox.GetMachineId())
	}
	return sandbox, machine, err
}

// begin has the guest begin a reserved job, answers, and then follows it up in the ledger: RUNNING
// behind the answer, for the record and the guest together already decide. Until the guest has
// answered, one way or the other, the job stays RESERVED: whether the command runs is then not
// known, and the follower finds out when the machine is heard from again.
func (s *Service) begin(ctx context.Context, job *recordv1.JobRecord, secrets *recordv1.JobSecrets, answer func(*recordv1.JobRecord, error)) {
	defer s.setBeginning(job.GetId(), false)
	status, err := s.startInGuest(ctx, job, secrets)
	// gofail: var jobsAfterStart struct{}
	// fault.Die()
	switch {
	case err != nil:
		answer(s.notBegun(ctx, job, err))
	case status.GetDone():
		answer(s.bringHome(ctx, job.GetMachineId(), status))
	default:
		running := proto.CloneOf(job)
		s.setRunning(running, status)
		answer(running, nil)
		s.recordRunning(ctx, status)
	}
}

func (s *Service) startInGuest(ctx context.Context, job *recordv1.JobRecord, secrets *recordv1.JobSecrets) (*guestv1.Status, error) {
	sandbox, _, err := s.opts.Sandboxes.Get(job.GetNamespace(), job.GetSandboxId())
	if err != nil {
		return nil, err
	}
	command, err := s.command(sandbox, job.GetSpec(), secrets)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithDeadline(ctx, job.GetStartDeadline().AsTime())
	defer cancel()
	request := &guestv1.StartRequest{
		JobId: job.GetId(), BootId: job.GetBootId(), Command: command, Durable: true, // the boot fences more strictly than the generation
		KillOnDisconnect: job.GetSpec().GetOnDisconnect() == berthv1.OnDisconnect_ON_DISCONNECT_KILL,
		DisconnectGrace:  job.GetSpec().GetDisconnectGrace(),
	}
	var status *guestv1.Status
	err = s.opts.Links.Call(ctx, job.GetMachineId(), func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		response, err := guest.Start(ctx, request)
		status = response.GetStatus()
		return err
	})
	if err != nil {
		return nil, err
	}
	return about(status, job.GetMachineId(), job.GetId())
}

// notBegun ends a job that its guest refused for good; any other error leaves it RESERVED.
func (s *Service) notBegun(ctx context.Context, job *recordv1.JobRecord, cause error) (*recordv1.JobRecord, error) {
	var outcome *berthv1.Outcome
	switch {
	case errors.Is(cause, guestlink.ErrOtherBoot), errors.Is(cause, guestlink.ErrOtherGeneration):
		outcome = lost("guest_restarted: the machine's guest was started again before it had begun the job")
	case errors.Is(cause, guestlink.ErrExpired):
		outcome = &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: "expired: its guest has seen much younger jobs, so it was not started"}
	case errors.Is(cause, guestlink.ErrForgotten):
		outcome = lost("forgotten: the guest was told to forget the job before its receipt was at home")
	case fault.KindOf(cause) == fault.KindInvalid, fault.Is(cause, fault.CapabilityMissing), fault.Is(cause, fault.QuotaExceeded):
		outcome = &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: "refused: " + boundedText(cause.Error())}
	default:
		return nil, cause
	}
	return s.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) { s.close(job, outcome) })
}

// recordRunning writes down that a job was begun, unless it is done already.
func (s *Service) recordRunning(ctx context.Context, status *guestv1.Status) {
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		job, err := tx.Job(status.GetJobId())
		if err != nil || job == nil || hasBegun(job) {
			return err
		}
		s.setRunning(job, status)
		return tx.PutJob(job, "job.running", "")
	})
	if err != nil {
		if ctx.Err() == nil {
			s.opts.Log.Warn("cannot record that a job runs; its guest remembers", "job", status.GetJobId(), "error", err)
		}
		return
	}
	s.news.tell(status.GetJobId())
}

func (s *Service) setRunning(job *recordv1.JobRecord, status *guestv1.Status) {
	job.State, job.SealedSecrets = berthv1.JobState_JOB_STATE_RUNNING, nil
	s.setTimes(job, status)
	job.EndTime, job.CpuNanos = nil, 0
}

func (s *Service) setBeginning(jobID string, underWay bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if underWay {
		s.beginning[jobID] = true
	} else {
		delete(s.beginning, jobID)
	}
}

func (s *Service) isBeginning(jobID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.beginning[jobID]
}

// setAttached notes a command whose caller is attached here: it is known by its id although its record
// is written behind, and nobody else makes one of it meanwhile.
func (s *Service) setAttached(job *recordv1.JobRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached[job.GetId()] = proto.CloneOf(job)
}

func (s *Service) unsetAttached(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.attached, id)
}

func (s *Service) attachedHere(id string) *recordv1.JobRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	if job := s.attached[id]; job != nil {
		return proto.CloneOf(job)
	}
	return nil
}

// touch notes that a sandbox is used.
func (s *Service) touch(sandboxID string) {
	now := s.opts.Now()
	s.mu.Lock()
	last, known := s.active[sandboxID]
	if known && now.Sub(last) < activityEvery && now.After(last) {
		s.mu.Unlock()
		return
	}
	if len(s.active) >= activeMost {
		maps.DeleteFunc(s.active, func(_ string, last time.Time) bool { return now.Sub(last) >= activityEvery })
	}
	s.active[sandboxID] = now
	s.mu.Unlock()
	s.opts.Store.UpdateLater(func(tx *store.Tx) error {
		sandbox, err := tx.Sandbox(sandboxID)
		if err != nil || lifecycle.WantRunning(sandbox) != nil {
			return err // what was refused is no use
		}
		sandbox.LastActivityTime = timestamppb.New(now)
		return tx.PutSandbox(sandbox, "", "")
	})
}

// until waits until a job is as wanted and returns it. Its error is the context's, or WRONG_STATE
// when the job's machine is stopped: then nobody knows what became of it until that is resumed.
func (s *Service) until(ctx context.Context, jobID string, wanted func(*recordv1.JobRecord) bool) (*recordv1.JobRecord, error) {
	changed, stop := s.news.about(jobID)
	defer stop()
	for {
		job, err := s.job(jobID)
		if fault.Is(err, fault.JobNotFound) {
			if attached := s.attachedHere(jobID); attached != nil {
				job, err = attached, nil
			}
		}
		if err != nil || wanted(job) {
			return job, err
		}
		if err := s.machineStopped(job); err != nil {
			return job, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return job, ctx.Err()
		case <-s.drained:
			return job, stopping(jobID)
		}
	}
}

func (s *Service) job(id string) (*recordv1.JobRecord, error) {
	var job *recordv1.JobRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		if job, err = tx.Job(id); err == nil && job == nil {
			err = noJob(id)
		}
		return err
	})
	return job, err
}

// find returns a job of a namespace. A job that the ledger does not have may be an attached command
// that only a guest knows which has not been heard from yet: that is RECOVERING, not NOT_FOUND.
func (s *Service) find(namespace, id string) (*recordv1.JobRecord, error) {
	job, err := s.job(id)
	if fault.Is(err, fault.JobNotFound) {
		if attached := s.attachedHere(id); attached != nil {
			job, err = attached, nil
		}
	}
	switch {
	case fault.Is(err, fault.JobNotFound) && validJobID(id) && s.takingStock():
		return nil, fault.New(fault.Recovering, "the broker has just started and does not know of job %s yet: try again", id).Retry(time.Second)
	case err == nil && job.GetNamespace() != namespace:
		return nil, noJob(id)
	}
	return job, err
}

// takingStock reports whether a machine that should run has not told its jobs since the start.
func (s *Service) takingStock() bool {
	var machines []*recordv1.MachineRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		machines, err = tx.LiveMachines()
		return err
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, machine := range machines {
		if machine.GetState() == recordv1.MachineState_MACHINE_STATE_BOOTED && !s.stocked[machine.GetId()] && s.opts.Links.Awaited(machine.GetId()) {
			return true
		}
	}
	return err != nil
}

func (s *Service) tookStock(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stocked[machineID] = true
}

func noJob(id string) error {
	return fault.New(fault.JobNotFound, "no job %s: `berth jobs` shows those there are", id).With("job_id", id)
}

func isDone(job *recordv1.JobRecord) bool { return job.GetState() == berthv1.JobState_JOB_STATE_DONE }

func lost(reason string) *berthv1.Outcome {
	return &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST, Reason: reason}
}

func stopping(jobID string) error {
	return fault.New(fault.Stopping, "the broker is being stopped; job %s goes on, or is started when the broker is back", jobID).Retry(time.Second)
}
