package contain

import (
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ticksPerSecond is the unit of a process's start time in /proc, the same on every architecture.
const ticksPerSecond = 100

// strays attributes orphans of jobs that have lost every mark, for example by way of su. The guest is the parent
// of all orphans, and one that began while a single job was there is that job's.
type strays struct {
	mu      sync.Mutex
	leaders map[int]*group // of groups that are not released, by pid
	first   *group         // of this phase; nil once another has begun
	phase   uint64         // grows when a group begins in an empty machine, so that none of the earlier ones has a process

	forking      int    // groups whose leader is being forked
	forkingSince uint64 // ticks
}

// period is when a group began, and for how long it was the only one. The lock of strays guards it.
type period struct {
	phase uint64
	begun uint64 // ticks
	alone bool   // from begun to until
	until uint64 // ticks; 0: still
}

// begin is called before a group's leader is forked, and begun after that.
func (s *strays) begin(g *group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g.period = period{begun: ticks(), alone: s.forking == 0 && childless()}
	if s.first != nil {
		s.first.period.until = g.period.begun
		s.first = nil
	}
	if g.period.alone {
		s.phase++
		s.first = g
	}
	g.period.phase = s.phase
	if s.forking == 0 {
		s.forkingSince = g.period.begun
	}
	s.forking++
}

func (s *strays) begun(g *group, pid int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forking--
	if err == nil {
		s.leaders[pid] = g
	}
}

func (s *strays) release(g *group, leader int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leaders[leader] == g {
		delete(s.leaders, leader)
	}
}

// claim is what can be said of a process without a mark.
type claim int

const (
	foreign claim = iota // it is not the group's
	unsure               // it is the group's, another's, or came from outside of the machine
	certain              // it is the group's
)

// claim says whether an unmarked process is a group's, or any job's for the group of the whole machine.
func (s *strays) claim(p *stats, g *group) claim {
	if p.parent != os.Getpid() {
		return foreign
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, leader := range []int{p.pid, p.group, p.session} {
		if other := s.leaders[leader]; other != nil && other != g {
			return foreign
		}
	}
	last := certain
	if os.Getpid() == 1 && oomScore(p.pid) <= g.tracker.offer.own {
		// The first process inherits orphans of processes from outside, too, as of `docker exec`. Unlike a job they
		// have not been offered to the kernel, but a job may have changed that for itself.
		last = unsure
	}
	own := g.period
	switch {
	case g.jobID == "" && last == unsure:
		return foreign
	case g.jobID == "":
		return certain
	case own.phase != s.phase || p.started < own.begun:
		return foreign
	case own.alone && (own.until == 0 || p.started < own.until):
		return last
	case s.forking > 0 && p.started >= s.forkingSince:
		return foreign // a leader that is not noted yet
	}
	return unsure
}

// ticks is the time since the kernel's boot.
func ticks() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // which every kernel has
	return uint64(t.Nano()) / (1e9 / ticksPerSecond)
}

// childless says whether the guest has no child, not even a zombie, so that no process of any job is left.
func childless() bool {
	for {
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, nil)
		if !errors.Is(err, unix.EINTR) {
			return errors.Is(err, unix.ECHILD)
		}
	}
}
