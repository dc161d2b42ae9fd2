package supervise

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/launch"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
	"github.com/berth-sandbox/berth/providers/guest/spool"
	"github.com/berth-sandbox/berth/providers/guest/stdio"
)

// Start starts a job, or returns the one that was started before.
func (s *Supervisor) Start(r *guestv1.StartRequest) (*guestv1.StartResponse, error) {
	j, already, err := s.begin(r)
	if err != nil {
		return nil, err
	}
	if !already {
		s.table.announce(j)
		j.watchReaders()
	}
	return &guestv1.StartResponse{Status: j.status(), AlreadyStarted: already}, nil
}

// begin registers the job and starts its command, unless it is already registered.
func (s *Supervisor) begin(r *guestv1.StartRequest) (j *job, already bool, err error) {
	ulid, err := validate(r)
	if err != nil {
		return nil, false, err
	}
	// Locked until the command runs, so that a wipe finds all jobs of the identity before.
	s.identity.RLock()
	defer s.identity.RUnlock()
	if known := s.table.find(r.GetJobId()); known != nil {
		return joined(known)
	}
	if err := s.admit(r, ulid); err != nil {
		return nil, false, err
	}
	j = newJob(s, r, ulid)
	if known := s.table.add(j); known != nil {
		return joined(known)
	}
	// Stop reads the table after it has set closing, so one of the two sees the other.
	err = s.open()
	if err == nil {
		err = s.reserve(j, r)
	}
	if err != nil {
		j.refused = err
		s.table.drop(j)
		close(j.begun)
		return nil, false, err
	}
	if failure := j.launch(r.GetCommand()); failure != nil {
		j.failToStart(failure)
	}
	close(j.begun)
	return j, false, nil
}

// joined waits for the call that starts the job.
func joined(j *job) (*job, bool, error) {
	<-j.begun
	return j, true, j.refused
}

// open refuses when the guest is ending.
func (s *Supervisor) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return refusal.New(refusal.Precondition, refusal.ReasonStopping, "the guest is stopping and starts no more jobs")
	}
	return nil
}

// admit refuses a job that must not start. The identity's lock is held.
func (s *Supervisor) admit(r *guestv1.StartRequest, ulid record.ULID) error {
	switch {
	case r.GetGeneration() != 0 && r.GetGeneration() != s.identity.generation:
		return refusal.New(refusal.Precondition, refusal.ReasonOtherGeneration, "the job was reserved for generation %d, the machine is in generation %d",
			r.GetGeneration(), s.identity.generation)
	//mutation:boot-fence case false:
	case r.GetBootId() != "" && r.GetBootId() != s.BootID:
		return refusal.New(refusal.Precondition, refusal.ReasonOtherBoot, "the job was reserved for guest boot %s, this is boot %s", r.GetBootId(), s.BootID)
	}
	switch err := s.Records.Check(ulid); {
	//mutation:tombstone case false:
	case errors.Is(err, record.ErrForgotten):
		return refusal.New(refusal.Precondition, refusal.ReasonForgotten, "%s: %v", r.GetJobId(), err)
	case errors.Is(err, record.ErrExpired):
		return refusal.New(refusal.Precondition, refusal.ReasonExpired, "%s: %v", r.GetJobId(), err)
	}
	return nil
}

// reserve creates the job's entry, on disk if it is durable. After this it is never started again.
func (s *Supervisor) reserve(j *job, r *guestv1.StartRequest) error {
	err := s.Records.Create(&guestv1.JobRecord{
		JobId: j.id, Generation: j.generation, BootId: s.BootID, Durable: j.durable,
		AcceptTime: timestamppb.Now(), OutputLimitBytes: r.GetCommand().GetOutputLimitBytes(),
	})
	if errors.Is(err, record.ErrExists) {
		// It is being forgotten at the same time.
		return refusal.New(refusal.Precondition, refusal.ReasonForgotten, "%s: %v", j.id, record.ErrForgotten)
	}
	if err != nil {
		return refusal.System(err, "%s did not start", j.id)
	}
	return nil
}

func validate(r *guestv1.StartRequest) (record.ULID, error) {
	ulid, err := record.ParseID(r.GetJobId())
	if err != nil {
		return ulid, refusal.New(refusal.Invalid, "", "%v", err)
	}
	c := r.GetCommand()
	switch {
	case (len(c.GetArgv()) == 0) == (c.GetShell() == ""):
		return ulid, refusal.New(refusal.Invalid, "", "a command has exactly one of argv and shell")
	case strings.Contains(c.GetShell()+c.GetCwd()+c.GetUser(), "\x00"):
		return ulid, refusal.New(refusal.Invalid, "", "shell, cwd and user must not contain NUL bytes")
	}
	if c.GetTty() != nil {
		if err := stdio.CheckSize(c.GetTty()); err != nil {
			return ulid, err
		}
	}
	for _, arg := range c.GetArgv() {
		if strings.Contains(arg, "\x00") {
			return ulid, refusal.New(refusal.Invalid, "", "arguments must not contain NUL bytes")
		}
	}
	for name, value := range c.GetEnv() {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return ulid, refusal.New(refusal.Invalid, "", "%q is not an environment variable: names must not be empty or contain =, and neither part may contain NUL bytes", name)
		}
	}
	return ulid, nil
}

// newJob returns a job of this identity, whose lock is held.
func newJob(s *Supervisor, r *guestv1.StartRequest, ulid record.ULID) *job {
	c := r.GetCommand()
	j := &job{
		supervisor:       s,
		id:               r.GetJobId(),
		ulid:             ulid,
		generation:       s.identity.generation,
		durable:          r.GetDurable(),
		killGrace:        defaultKillGrace,
		killOnDisconnect: r.GetKillOnDisconnect(),
		disconnectGrace:  positive(r.GetDisconnectGrace()),
		begun:            make(chan struct{}),
		done:             make(chan struct{}),
		sealed:           make(chan struct{}),
		startTime:        time.Now(),
	}
	if c.GetKillGrace() != nil {
		j.killGrace = positive(c.GetKillGrace())
	}
	inMemory := !j.durable && s.memory.Load() < memoryBudget
	for i, name := range streamNames {
		j.streams[i] = spool.New(spool.Options{Dir: s.Records.OutputDir(j.id, j.durable), Name: name, Limit: c.GetOutputLimitBytes(), Memory: inMemory})
	}
	return j
}

// launch starts the command. The job's lock is held until everything is set, so that a fast exit waits.
func (j *job) launch(c *guestv1.Command) *launch.Failure {
	s := j.supervisor
	program, err := s.identity.machine.Resolve(c, j.id)
	if err != nil {
		return failureOf(err)
	}
	p, err := stdio.Open(s.null, c)
	if err != nil {
		return failureOf(err)
	}
	p.Give(program.Credential)
	defer p.CloseChild()
	tree, err := s.Tracker.Prepare(j.id)
	if err != nil {
		p.CloseOurs()
		return failureOf(err)
	}
	attr := &syscall.SysProcAttr{Setsid: true}
	if p.Terminal {
		stdio.SetControllingTerminal(attr)
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	// gofail: var guestBeforeSpawn struct{}
	// os.Exit(137)
	pid, err := s.Reaper.Spawn(func() (int, error) {
		return tree.StartIn(attr, func() (int, error) { return program.Fork(p.Child[:], attr) })
	}, j.exited)
	if err != nil {
		tree.Release()
		p.CloseOurs()
		return failureOf(err)
	}
	// gofail: var guestAfterSpawn struct{}
	// os.Exit(137)
	tree.Started(pid)
	p.CloseChild()
	j.pid, j.group, j.shell, j.tty = pid, tree, program.Shell, p.Terminal
	if j.tty {
		j.exiting = make(chan struct{})
	}
	j.startReaders(p)
	offerToOOM(pid)
	j.input.Connect(&s.work, p, j.pipes[0].File, c.GetStdin())
	if timeout := positive(c.GetTimeout()); timeout > 0 {
		j.timeout = s.clock.After(timeout, func() {
			j.endRunning(berthv1.Cause_CAUSE_TIMED_OUT, fmt.Sprintf("timed_out: after %v", timeout), j.killGrace)
		})
	}
	return nil
}

func failureOf(err error) *launch.Failure {
	var failure *launch.Failure
	if errors.As(err, &failure) {
		return failure
	}
	return &launch.Failure{Reason: fmt.Sprintf("no_resources: %v", err), ExitCode: 126}
}

// offerToOOM lets the kernel kill the job before the guest, where that is permitted.
func offerToOOM(pid int) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, _ = unix.Write(fd, []byte(strconv.Itoa(contain.JobOOMScore)))
		_ = unix.Close(fd)
	}
}

func positive(d *durationpb.Duration) time.Duration { return max(d.AsDuration(), 0) }
