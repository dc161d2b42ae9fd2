package contain

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// groups knows a job's processes by its session and group, by descent from them, and by the job's
// id in their environment. A daemon that left all three escapes.
type groups struct{ machineID string }

func (m *groups) Kind() guestv1.Containment { return guestv1.Containment_CONTAINMENT_PROCESS_GROUP }

func (m *groups) Prepare(jobID string) (Tree, error) {
	return &group{marker: []byte(jobMarker + jobID)}, nil
}

// Clear kills every process that has this machine's id in its environment.
func (m *groups) Clear(ctx context.Context) []int {
	return (&group{marker: []byte(machineMarker + m.machineID)}).Kill(ctx)
}

func (m *groups) Close() {}

// group is the tree of one job.
type group struct {
	marker []byte // "NAME=value" in the environment of each process

	mu     sync.Mutex
	leader int  // its pid, session and group; 0 before the start
	reaped bool // the leader's pid may be somebody else's
}

func (g *group) Configure(*syscall.SysProcAttr) {}

func (g *group) Started(pid int) {
	g.mu.Lock()
	g.leader = pid
	g.mu.Unlock()
}

func (g *group) LeaderReaped() {
	g.mu.Lock()
	g.reaped = true
	g.mu.Unlock()
}

func (g *group) Empty() bool { return len(g.members(nil)) == 0 }

func (g *group) Terminate() {
	for _, pid := range g.members(nil) {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
}

func (g *group) Kill(ctx context.Context) []int {
	// What was once found stays ours, by pid and start time: a child of a killed process is
	// adopted by the guest, and its descent is gone.
	known := make(map[process]bool)
	var left []int
	poll(ctx, killPatience, func() bool {
		left = g.members(known)
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		return len(left) == 0
	})
	return left
}

func (g *group) OOMKills() uint64 { return 0 }

func (g *group) Release() {}

// process is one process for all time.
type process struct {
	pid     int
	started uint64 // clock ticks since boot
}

// processFacts is what a look at /proc says of a process.
type processFacts struct {
	process
	parent, group, session int
	zombie                 bool
}

// members returns the pids of the tree. known, which may be nil, is added to.
func (g *group) members(known map[process]bool) []int {
	g.mu.Lock()
	leader, reaped := g.leader, g.reaped
	g.mu.Unlock()
	all := processes()
	if reaped {
		for _, p := range all {
			if p.pid == leader {
				// Somebody else has the number, so the group and the session are empty: the kernel
				// gives a number away only then.
				leader = 0
			}
		}
	}
	ours := make(map[int]bool)
	for _, p := range all {
		if p.pid == os.Getpid() {
			continue // the guest is nobody's job, and its other children are not descent
		}
		mine := known[p.process] || leader != 0 && (p.pid == leader || p.group == leader || p.session == leader)
		if mine || g.marked(p.pid) {
			ours[p.pid] = true
		}
	}
	for grew := true; grew; {
		grew = false
		for _, p := range all {
			if !ours[p.pid] && ours[p.parent] && p.pid != os.Getpid() {
				ours[p.pid], grew = true, true
			}
		}
	}
	var pids []int
	for _, p := range all {
		if !ours[p.pid] {
			continue
		}
		if known != nil {
			known[p.process] = true
		}
		if !p.zombie {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

func (g *group) marked(pid int) bool {
	environment, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return false
	}
	for entry := range bytes.SplitSeq(environment, []byte{0}) {
		if bytes.Equal(entry, g.marker) {
			return true
		}
	}
	return false
}

// processes returns every process that /proc shows, the guest's ancestors included.
func processes() []processFacts {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	names, _ := proc.Readdirnames(-1)
	_ = proc.Close()
	var all []processFacts
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", name, "stat"))
		if err != nil {
			continue
		}
		if p, ok := parseStat(pid, string(stat)); ok {
			all = append(all, p)
		}
	}
	return all
}

// parseStat reads proc(5)'s stat line; what counts begins after the name's closing bracket.
func parseStat(pid int, line string) (processFacts, bool) {
	_, rest, found := cutLast(line, ")")
	f := strings.Fields(rest)
	if !found || len(f) < 20 {
		return processFacts{}, false
	}
	p := processFacts{process: process{pid: pid}, zombie: f[0] == "Z" || f[0] == "X"}
	var errs [4]error
	p.parent, errs[0] = strconv.Atoi(f[1])
	p.group, errs[1] = strconv.Atoi(f[2])
	p.session, errs[2] = strconv.Atoi(f[3])
	p.started, errs[3] = strconv.ParseUint(f[19], 10, 64)
	for _, err := range errs {
		if err != nil {
			return processFacts{}, false
		}
	}
	return p, true
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}
