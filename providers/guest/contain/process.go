package contain

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// process is one process for all time.
type process struct {
	pid     int
	started uint64 // clock ticks since boot
}

// signal sends a signal to this process, and never to another that has its number now.
func (p process) signal(sig syscall.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		// Gone, or there are no such descriptors here: then a moment remains in which the number
		// could change hands.
		if p.lives() {
			_ = syscall.Kill(p.pid, sig)
		}
		return
	}
	if p.lives() {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
	_ = unix.Close(fd)
}

func (p process) lives() bool {
	now := readFacts(p.pid)
	return now != nil && now.process == p
}

// facts is what a look at /proc says of a process. A look shares them between trees.
type facts struct {
	process
	parent, group, session int
	zombie                 bool

	tag         *tag
	environment *environment
}

// environment is what a process's environment said of its job when it began.
type environment struct{ machine, job string }

func (p *facts) readTag() tag {
	if p.tag == nil {
		t := tagOf(p.pid)
		p.tag = &t
	}
	return *p.tag
}

func (p *facts) readEnvironment() environment {
	if p.environment == nil {
		p.environment = &environment{}
		// Not readable for every user: nothing, then.
		data, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.pid), "environ"))
		for entry := range bytes.SplitSeq(data, []byte{0}) {
			if machine, found := bytes.CutPrefix(entry, []byte(machineMarker)); found {
				p.environment.machine = string(machine)
			} else if job, found := bytes.CutPrefix(entry, []byte(jobMarker)); found {
				p.environment.job = string(job)
			}
		}
	}
	return *p.environment
}

// look returns every process that /proc shows, the guest's ancestors included.
func look() []*facts {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := proc.Readdirnames(-1)
	_ = proc.Close()
	var all []*facts
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p := readFacts(pid); p != nil {
			all = append(all, p)
		}
	}
	return all
}

// readFacts returns nil for a process that is gone.
func readFacts(pid int) *facts {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return nil
	}
	p, ok := parseStat(pid, string(stat))
	if !ok {
		return nil
	}
	return p
}

// parseStat reads proc(5)'s stat line; what counts begins after the name's closing bracket.
func parseStat(pid int, line string) (*facts, bool) {
	f := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if len(f) < 20 {
		return nil, false
	}
	p := &facts{process: process{pid: pid}, zombie: f[0] == "Z" || f[0] == "X"}
	var errs [4]error
	p.parent, errs[0] = strconv.Atoi(f[1])
	p.group, errs[1] = strconv.Atoi(f[2])
	p.session, errs[2] = strconv.Atoi(f[3])
	p.started, errs[3] = strconv.ParseUint(f[19], 10, 64)
	for _, err := range errs {
		if err != nil {
			return nil, false
		}
	}
	return p, true
}
