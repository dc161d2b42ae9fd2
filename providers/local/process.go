package local

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process names a process for as long as the kernel runs: a pid alone is used again.
type process struct {
	PID        int    `json:"pid"`
	StartTicks uint64 `json:"start_ticks"`    // since the kernel's boot, field 22 of /proc/<pid>/stat
	KernelBoot string `json:"kernel_boot_id"` // /proc/sys/kernel/random/boot_id
}

// identify names the process that has this pid now.
func identify(pid int) (*process, error) {
	boot, err := kernelBoot()
	if err != nil {
		return nil, err
	}
	_, ticks, err := stat(pid)
	if err != nil {
		return nil, err
	}
	return &process{PID: pid, StartTicks: ticks, KernelBoot: boot}, nil
}

// alive reports whether the process still exists. A zombie does not: of a machine's first process
// it says that all the others are gone too.
func (p *process) alive() bool {
	if p == nil {
		return false
	}
	boot, err := kernelBoot()
	if err != nil || boot != p.KernelBoot {
		return false
	}
	state, ticks, err := stat(p.PID)
	return err == nil && ticks == p.StartTicks && state != 'Z' && state != 'X'
}

// signal sends a signal to exactly this process, or to none. That it is gone is no error.
func (p *process) signal(sig syscall.Signal) error {
	target, err := os.FindProcess(p.PID) // holds the process by descriptor where the kernel can
	if err != nil {
		return fmt.Errorf("finding process %d: %w", p.PID, err)
	}
	defer func() { _ = target.Release() }()
	if !p.alive() {
		return nil
	}
	if err := target.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("sending %v to process %d: %w", sig, p.PID, err)
	}
	return nil
}

var kernelBoot = sync.OnceValues(func() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("reading the kernel's boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
})

// stat returns a process's state and its start time.
func stat(pid int) (state byte, ticks uint64, err error) {
	content, err := os.ReadFile(procPath(pid, "stat"))
	if err != nil {
		return 0, 0, err
	}
	// The second field is the program's name in parentheses, which may hold anything.
	const stateField, startField = 3, 22
	fields := strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
	if len(fields) <= startField-stateField {
		return 0, 0, fmt.Errorf("%s has too few fields", procPath(pid, "stat"))
	}
	ticks, err = strconv.ParseUint(fields[startField-stateField], 10, 64)
	return fields[0][0], ticks, err
}

func procPath(pid int, file string) string { return "/proc/" + strconv.Itoa(pid) + "/" + file }

// number reads a name that is a decimal number, as those of processes and descriptors in /proc.
func number(name string) (int, bool) {
	n, err := strconv.Atoi(name)
	return n, err == nil && n >= 0
}

// guestsOf finds the guests of the machine with this BootConfig by their command line: those that
// a crash kept from being recorded. The oldest comes first: what a guest forked bears its command
// line too, until it executes something.
func guestsOf(bootConfig string) ([]*process, error) {
	found, err := processesThat(func(pid int) bool {
		line, err := os.ReadFile(procPath(pid, "cmdline"))
		return err == nil && bytes.Contains(line, []byte("\x00--config\x00"+bootConfig+"\x00"))
	})
	slices.SortFunc(found, func(a, b *process) int {
		return cmp.Or(cmp.Compare(a.StartTicks, b.StartTicks), cmp.Compare(a.PID, b.PID))
	})
	return found, err
}

// machineVariable is in the environment of everything that a machine starts.
const machineVariable = "BERTH_MACHINE_ID"

// membersOf finds the processes that bear the machine in their environment.
func membersOf(id string) ([]*process, error) {
	mark := []byte("\x00" + machineVariable + "=" + id + "\x00")
	return processesThat(func(pid int) bool {
		environment, err := os.ReadFile(procPath(pid, "environ"))
		return err == nil && bytes.Contains(append([]byte{0}, environment...), mark)
	})
}

// processesThat returns the living processes that match, this one never. A process that ends
// meanwhile is none.
func processesThat(match func(pid int) bool) ([]*process, error) {
	directory, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("looking for processes: %w", err)
	}
	names, err := directory.Readdirnames(-1)
	if err = errors.Join(err, directory.Close()); err != nil {
		return nil, fmt.Errorf("looking for processes: %w", err)
	}
	var found []*process
	for _, name := range names {
		pid, ok := number(name)
		if !ok || pid == os.Getpid() || !match(pid) {
			continue
		}
		if p, err := identify(pid); err == nil && p.alive() {
			found = append(found, p)
		}
	}
	return found, nil
}

// reaper collects the exit of the guests that this process started, so that they leave no zombies.
// One goroutine waits for each; close ends them without waiting for the guests.
type reaper struct {
	log *slog.Logger
	*reaping
}

type reaping struct {
	mu       sync.Mutex
	closed   bool
	closing  chan struct{}
	children map[int]*os.Process   // by pid, until collected
	exits    map[*os.File]struct{} // descriptors of guests, whose deadline ends the wait
	waits    sync.WaitGroup
}

// exitPoll is how often a guest's exit is looked for on kernels that can't tell of it.
const exitPoll = 200 * time.Millisecond

func newReaper(log *slog.Logger) reaper {
	return reaper{log: log, reaping: &reaping{
		closing:  make(chan struct{}),
		children: map[int]*os.Process{},
		exits:    map[*os.File]struct{}{},
	}}
}

// watch takes a guest over that was just started. After close it is left to whoever inherits it.
func (r reaper) watch(id string, child *os.Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		_ = child.Release() // gives up a descriptor, which can't fail
		return
	}
	r.children[child.Pid] = child
	r.waits.Go(func() {
		if !r.ended(child.Pid) {
			_ = child.Release()
			return
		}
		state, err := child.Wait()
		r.mu.Lock()
		if r.children[child.Pid] == child { // else the pid is another child's already
			delete(r.children, child.Pid)
		}
		r.mu.Unlock()
		r.log.Info("a guest has ended", "machine", id, "pid", child.Pid, "how", state, "error", err)
	})
}

// holds reports whether the pid is that of a child of ours that is to be collected yet.
func (r reaper) holds(pid int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.children[pid] != nil && !r.closed
}

// ended waits until the child has ended, and reports false when close came first. No thread waits
// with it: the descriptor lies with Go's poller.
func (r reaper) ended(pid int) bool {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return r.endedByPolling(pid)
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	defer func() { _ = file.Close() }() // nothing was written to it
	if !r.register(file) {
		return false
	}
	defer r.unregister(file)
	raw, err := file.SyscallConn()
	if err != nil {
		return r.endedByPolling(pid)
	}
	err = raw.Read(func(fd uintptr) bool {
		ask := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(ask, 0)
		return err == nil && n > 0
	})
	if err == nil {
		return true
	}
	select {
	case <-r.closing:
		return false
	default:
		return r.endedByPolling(pid)
	}
}

func (r reaper) register(exit *os.File) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.exits[exit] = struct{}{}
	return true
}

func (r reaper) unregister(exit *os.File) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.exits, exit)
}

func (r reaper) endedByPolling(pid int) bool {
	ticker := time.NewTicker(exitPoll)
	defer ticker.Stop()
	for {
		if state, _, err := stat(pid); err != nil || state == 'Z' {
			return true
		}
		select {
		case <-r.closing:
			return false
		case <-ticker.C:
		}
	}
}

func (r reaper) close() {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.closing)
		for exit := range r.exits {
			_ = exit.SetReadDeadline(time.Unix(1, 0)) // where it can't be set, nobody waits on it
		}
	}
	r.mu.Unlock()
	r.waits.Wait()
}
