package supervise

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/launch"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

// Start begins a job, or finds it begun.
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

// begin makes the job known and starts its command, unless it is known already.
func (s *Supervisor) begin(r *guestv1.StartRequest) (j *job, already bool, err error) {
	ulid, err := validate(r)
	if err != nil {
		return nil, false, err
	}
	// Held until the command runs, so that what drops the jobs of an era finds all of them.
	s.era.RLock()
	defer s.era.RUnlock()
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
	// Stop looks at the table after it has set closing, so one of the two sees the other.
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

// joined waits for the call that begins the job.
func joined(j *job) (*job, bool, error) {
	<-j.begun
	return j, true, j.refused
}

// open refuses when the guest is ending.
func (s *Supervisor) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return refuse(Precondition, ReasonStopping, "the guest is ending and begins no job")
	}
	return nil
}

// admit refuses what must not begin here and now. The era's lock is held.
func (s *Supervisor) admit(r *guestv1.StartRequest, ulid record.ULID) error {
	switch {
	case r.GetGeneration() != 0 && r.GetGeneration() != s.era.generation:
		return refuse(Precondition, ReasonOtherGeneration, "the job was reserved for generation %d, the machine is in generation %d",
			r.GetGeneration(), s.era.generation)
	case r.GetBootId() != "" && r.GetBootId() != s.BootID:
		return refuse(Precondition, ReasonOtherBoot, "the job was reserved for guest boot %s, this is boot %s", r.GetBootId(), s.BootID)
	}
	switch err := s.Records.Check(ulid); {
	case errors.Is(err, record.ErrForgotten):
		return refuse(Precondition, ReasonForgotten, "job %s: %v", r.GetJobId(), err)
	case errors.Is(err, record.ErrExpired):
		return refuse(Precondition, ReasonExpired, "job %s: %v", r.GetJobId(), err)
	}
	return nil
}

// reserve makes the job's entry, which is on disk if it is durable. After this it is
// never begun again.
func (s *Supervisor) reserve(j *job, r *guestv1.StartRequest) error {
	err := s.Records.Create(&guestv1.JobRecord{
		JobId: j.id, Generation: j.generation, BootId: s.BootID, Durable: j.durable,
		AcceptTime: timestamppb.Now(), OutputLimitBytes: r.GetCommand().GetOutputLimitBytes(),
	})
	if errors.Is(err, record.ErrExists) {
		// It was being forgotten when this call came.
		return refuse(Precondition, ReasonForgotten, "job %s: %v", j.id, record.ErrForgotten)
	}
	if err != nil {
		return failed(err, "job %s did not begin", j.id)
	}
	return nil
}

func validate(r *guestv1.StartRequest) (record.ULID, error) {
	ulid, err := record.ParseID(r.GetJobId())
	if err != nil {
		return ulid, refuse(Invalid, "", "%v", err)
	}
	c := r.GetCommand()
	switch {
	case (len(c.GetArgv()) == 0) == (c.GetShell() == ""):
		return ulid, refuse(Invalid, "", "a command has exactly one of argv and shell")
	case strings.Contains(c.GetShell()+c.GetCwd()+c.GetUser(), "\x00"):
		return ulid, refuse(Invalid, "", "shell, cwd and user hold no NUL bytes")
	}
	if c.GetTty() != nil {
		if err := checkSize(c.GetTty()); err != nil {
			return ulid, err
		}
	}
	for _, arg := range c.GetArgv() {
		if strings.Contains(arg, "\x00") {
			return ulid, refuse(Invalid, "", "arguments hold no NUL bytes")
		}
	}
	for name, value := range c.GetEnv() {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			return ulid, refuse(Invalid, "", "%q is no environment variable: names are not empty and hold no =, neither part holds NUL bytes", name)
		}
	}
	return ulid, nil
}

// newJob returns a job of this era, whose lock is held.
func newJob(s *Supervisor, r *guestv1.StartRequest, ulid record.ULID) *job {
	c := r.GetCommand()
	j := &job{
		supervisor:       s,
		id:               r.GetJobId(),
		ulid:             ulid,
		generation:       s.era.generation,
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

// launch starts the command. The job's lock is held until all is in place, so that a fast exit
// waits for it.
func (j *job) launch(c *guestv1.Command) *launch.Failure {
	s := j.supervisor
	program, err := s.era.machine.Resolve(c, j.id)
	if err != nil {
		return failureOf(err)
	}
	p, err := openPlumbing(s.null, c)
	if err != nil {
		return failureOf(err)
	}
	p.giveTerminal(program.Credential)
	defer p.closeChildEnds()
	tree, err := s.Means.Prepare(j.id)
	if err != nil {
		p.closeOurEnds()
		return failureOf(err)
	}
	attr := &syscall.SysProcAttr{Setsid: true}
	if p.terminal {
		terminalAttributes(attr)
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	// gofail: var guestBeforeSpawn struct{}
	// os.Exit(137)
	pid, err := s.Reaper.Spawn(func() (int, error) {
		return tree.Enclose(attr, func() (int, error) { return program.Fork(p.child[:], attr) })
	}, j.exited)
	if err != nil {
		tree.Release()
		p.closeOurEnds()
		return failureOf(err)
	}
	// gofail: var guestAfterSpawn struct{}
	// os.Exit(137)
	tree.Started(pid)
	p.closeChildEnds()
	j.pid, j.tree, j.shell, j.tty = pid, tree, program.Shell, p.terminal
	if j.tty {
		j.exiting = make(chan struct{})
	}
	j.startPumps(p)
	offerToOOM(pid)
	j.connectInput(p, c.GetStdin())
	if timeout := positive(c.GetTimeout()); timeout > 0 {
		j.timeout = s.clock.after(timeout, func() {
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

// plumbing is a command's pipes or its terminal: our ends, which do not block, and the command's.
type plumbing struct {
	child    [3]uintptr
	owned    []int // of child, those to close
	outputs  [2]int
	stdin    int
	terminal bool // outputs[0] is ours, for input as well
}

const noFile = -1

func openPlumbing(null *os.File, c *guestv1.Command) (*plumbing, error) {
	p := &plumbing{child: [3]uintptr{null.Fd()}, outputs: [2]int{noFile, noFile}, stdin: noFile}
	var err error
	if c.GetTty() != nil {
		err = p.openTerminal(c.GetTty())
	} else {
		err = p.openPipes(c)
	}
	if err != nil {
		p.closeChildEnds()
		p.closeOurEnds()
		return nil, err
	}
	return p, nil
}

func (p *plumbing) openTerminal(size *berthv1.TerminalSize) error {
	ours, theirs, err := openTerminal(size)
	if err != nil {
		return err
	}
	p.terminal, p.outputs[0], p.owned = true, ours, []int{theirs}
	for i := range p.child {
		p.child[i] = uintptr(theirs)
	}
	return nil
}

// giveTerminal makes the terminal its user's, who may want to open it by name. The guest can where
// it can run commands as others at all.
func (p *plumbing) giveTerminal(user *syscall.Credential) {
	if p.terminal && user != nil {
		_ = unix.Fchown(p.owned[0], int(user.Uid), -1)
	}
}

func (p *plumbing) openPipes(c *guestv1.Command) error {
	for i := range streamNames {
		if i == 1 && c.GetMergeStderr() {
			p.child[2] = p.child[1]
			break
		}
		read, write, err := pipe()
		if err != nil {
			return fmt.Errorf("open a pipe for output: %w", err)
		}
		p.outputs[i] = read
		p.childEnd(1+i, write)
		_ = unix.SetNonblock(read, true)
	}
	if c.GetStdin().GetOpen() || len(c.GetStdin().GetData()) > 0 {
		read, write, err := pipe()
		if err != nil {
			return fmt.Errorf("open a pipe for stdin: %w", err)
		}
		p.stdin = write
		p.childEnd(0, read)
		_ = unix.SetNonblock(write, true)
	}
	return nil
}

func pipe() (read, write int, err error) {
	var ends [2]int
	err = unix.Pipe2(ends[:], unix.O_CLOEXEC)
	return ends[0], ends[1], err
}

func (p *plumbing) childEnd(number, fd int) {
	p.child[number] = uintptr(fd)
	p.owned = append(p.owned, fd)
}

func (p *plumbing) closeChildEnds() {
	for _, fd := range p.owned {
		_ = unix.Close(fd)
	}
	p.owned = nil
}

func (p *plumbing) closeOurEnds() {
	for _, fd := range []int{p.outputs[0], p.outputs[1], p.stdin} {
		if fd != noFile {
			_ = unix.Close(fd)
		}
	}
}

// connectInput gives the command its stdin: the given bytes, of which a pipe that takes them at once
// needs no goroutine and no poller, or an open one. The job's lock is held, and nobody else knows
// the input yet.
func (j *job) connectInput(p *plumbing, stdin *berthv1.Stdin) {
	data := stdin.GetData()
	_, given := stdin.GetSource().(*berthv1.Stdin_Data)
	switch {
	case p.terminal:
		j.input.open(j.pipes[0].file, true, 0)
	case stdin.GetOpen():
		j.input.open(os.NewFile(uintptr(p.stdin), "stdin"), false, 0)
		return
	case p.stdin == noFile:
		j.input.none(0)
		return
	default:
		n, _ := unix.Write(p.stdin, data)
		n = max(n, 0)
		if n == len(data) {
			j.input.none(n)
			_ = unix.Close(p.stdin)
			return
		}
		j.input.open(os.NewFile(uintptr(p.stdin), "stdin"), false, n)
		data = data[n:]
	}
	if given {
		j.input.preload(j.supervisor, data)
	}
}

// offerToOOM lets the kernel take the job before the guest. Where that is not allowed, it is not.
func offerToOOM(pid int) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		_, _ = unix.Write(fd, []byte(jobOOMScore))
		_ = unix.Close(fd)
	}
}

func positive(d *durationpb.Duration) time.Duration { return max(d.AsDuration(), 0) }
