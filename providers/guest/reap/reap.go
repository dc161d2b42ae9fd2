// Package reap owns the exit status of every child of this process: those that were
// spawned through it are reported to their owner, inherited orphans are only reaped. It never uses os/exec,
// and nothing else in this process may wait for a child, or statuses get lost.
package reap

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// siginfoPidOffset is where the kernel puts si_pid of a SIGCHLD in a siginfo_t, in bytes, on 64-bit
// Linux: after signo, errno, code and four bytes that align the union.
const siginfoPidOffset = 16

// Exit is what the kernel reported about a child's end.
type Exit struct {
	Status  syscall.WaitStatus
	CPUTime time.Duration // user and system, of the child and the children that it waited for
	Time    time.Time     // when it was reaped
}

// Reaper owns exit statuses. Make it with Start.
type Reaper struct {
	// forks is locked shared from before a fork until its pid is in owners, and exclusively by the sweep before
	// it treats a pid as an orphan. So a fast exit is never taken for one.
	forks sync.RWMutex

	// mu guards owners and is locked while an owned child is reaped: a pid that is in owners is not reaped, so
	// it can be signalled without hitting another process.
	mu     sync.Mutex
	owners map[int]func(Exit)

	children chan os.Signal
	stop     chan struct{}
	stopped  chan struct{}
}

// Start starts reaping; Close ends it.
func Start() *Reaper {
	r := &Reaper{
		owners:   make(map[int]func(Exit)),
		children: make(chan os.Signal, 1),
		stop:     make(chan struct{}),
		stopped:  make(chan struct{}),
	}
	signal.Notify(r.children, unix.SIGCHLD)
	go r.loop()
	return r
}

// Close ends the reaping and waits for it. Remaining children stay unreaped.
func (r *Reaper) Close() {
	close(r.stop)
	<-r.stopped
}

// Spawn calls fork and makes exited the owner of the pid that it returns. exited is called once, on
// the reaper's goroutine: it must not block.
func (r *Reaper) Spawn(fork func() (int, error), exited func(Exit)) (int, error) {
	r.forks.RLock()
	defer r.forks.RUnlock()
	pid, err := fork()
	if err != nil {
		return 0, err
	}
	r.mu.Lock()
	r.owners[pid] = exited
	r.mu.Unlock()
	return pid, nil
}

// AwaitForks waits for every Spawn in progress: until then the forked process has open whatever this process
// had open.
func (r *Reaper) AwaitForks() {
	r.forks.Lock()
	defer r.forks.Unlock()
}

// SignalGroup sends a signal to the process group that the spawned child pid leads, and says
// whether the child was still running then: a zombie that waits to be reaped was not.
func (r *Reaper) SignalGroup(pid int, sig syscall.Signal) (running bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, owned := r.owners[pid]; !owned {
		return false, nil
	}
	ended, err := peek(unix.P_PID, pid)
	if err != nil {
		return false, err
	}
	return ended == 0, syscall.Kill(-pid, sig)
}

func (r *Reaper) loop() {
	defer close(r.stopped)
	defer signal.Stop(r.children)
	for {
		r.sweep()
		select {
		case <-r.children:
		case <-r.stop:
			return
		}
	}
}

// sweep reaps every child that has ended.
func (r *Reaper) sweep() {
	for {
		pid, err := peek(unix.P_ALL, 0)
		if err != nil || pid == 0 {
			return
		}
		if !r.reapOwned(pid) {
			r.reapUnknown(pid)
		}
	}
}

// reapUnknown reaps a pid that has no owner, once no fork is under way that might give it one.
func (r *Reaper) reapUnknown(pid int) {
	r.forks.Lock()
	owned := r.reapOwned(pid)
	if !owned {
		_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
	}
	r.forks.Unlock()
}

func (r *Reaper) reapOwned(pid int) bool {
	r.mu.Lock()
	exited, owned := r.owners[pid]
	if !owned {
		r.mu.Unlock()
		return false
	}
	delete(r.owners, pid)
	var exit Exit
	var usage syscall.Rusage
	for {
		_, err := syscall.Wait4(pid, &exit.Status, 0, &usage)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	r.mu.Unlock()
	exit.CPUTime = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	exit.Time = time.Now()
	exited(exit)
	return true
}

// peek returns the pid of a child that has ended, without reaping it; 0 when none has.
func peek(idType, id int) (int, error) {
	var info unix.Siginfo
	for {
		err := unix.Waitid(idType, id, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, err
		}
		pid := (*int32)(unsafe.Add(unsafe.Pointer(&info), siginfoPidOffset)) //nolint:gosec // the union has no accessor
		return int(*pid), nil
	}
}
