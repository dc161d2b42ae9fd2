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

// process identifies one process, even after its pid is reused.
type process struct {
	pid     int
	started uint64 // clock ticks since boot
}

// signal sends a signal to this process, and never to another that reuses its pid.
func (p process) signal(sig syscall.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		// Gone, or the kernel has no pidfds: then the pid could be reused in between.
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
	now := readStats(p.pid)
	return now != nil && now.process == p
}

// stats is what /proc says about a process. The groups of one scan share them.
type stats struct {
	process
	parent, group, session int
	zombie                 bool

	tag         *tag
	environment *environment
}

// environment is what the process's initial environment says about its job.
type environment struct{ machine, job string }

func (p *stats) readTag() tag {
	if p.tag == nil {
		t := tagOf(p.pid)
		p.tag = &t
	}
	return *p.tag
}

func (p *stats) readEnvironment() environment {
	if p.environment == nil {
		p.environment = &environment{}
		// Not readable for every user; then it stays empty.
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

// snapshot returns every process that /proc shows, the guest's ancestors included.
func snapshot() []*stats {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := proc.Readdirnames(-1)
	_ = proc.Close()
	var all []*stats
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p := readStats(pid); p != nil {
			all = append(all, p)
		}
	}
	return all
}

// readStats returns nil for a process that is gone.
func readStats(pid int) *stats {
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
func parseStat(pid int, line string) (*stats, bool) {
	f := strings.Fields(line[strings.LastIndexByte(line, ')')+1:])
	if len(f) < 20 {
		return nil, false
	}
	p := &stats{process: process{pid: pid}, zombie: f[0] == "Z" || f[0] == "X"}
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
