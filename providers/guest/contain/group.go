package contain

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// freezeTimeout bounds how long a kill spends on stopping the processes before it kills them. A storm of 1,800 processes
// takes under a second.
const freezeTimeout = 3 * time.Second

// groups is a Tracker that finds a job's processes by a tag that they inherit, where tags work, by session
// and process group, by descent, and by the job's id in their environment. A daemon that left all of these
// escapes, unless it can be nobody else's.
type groups struct {
	machineID atomic.Value // string
	oom       oomCounter
	tags      *tags // nil where limits cannot be set or read
	strays    strays
	offer     *oomOffer
}

func newGroups(machineID string, oom oomCounter) *groups {
	m := &groups{oom: oom, strays: strays{leaders: make(map[int]*group)}, offer: newOOMOffer()}
	m.machineID.Store(machineID)
	if tags := newTags(machineID); tags.try() == nil {
		m.tags = tags
	}
	return m
}

func (m *groups) Kind() guestv1.Containment {
	if m.tags != nil {
		return guestv1.Containment_CONTAINMENT_TAG
	}
	return guestv1.Containment_CONTAINMENT_PROCESS_GROUP
}

func (m *groups) Prepare(jobID string) (ProcessGroup, error) {
	g := &group{tracker: m, jobID: jobID}
	g.oomBefore, _ = m.oom.read()
	if m.tags != nil {
		g.tag = m.tags.make()
	}
	return g, nil
}

// Clear kills every process that has this machine's tag, or its id in its environment, and orphans without both.
func (m *groups) Clear(ctx context.Context) []int { return (&group{tracker: m}).Kill(ctx) }

func (m *groups) Occupied(trees []ProcessGroup) []ProcessGroup {
	if len(trees) == 0 {
		return nil
	}
	var occupied []ProcessGroup
	all := snapshot()
	for _, tree := range trees {
		if g, ours := tree.(*group); ours && len(g.among(all, nil)) > 0 {
			occupied = append(occupied, tree)
		}
	}
	return occupied
}

func (m *groups) Rename(machineID string) { m.machineID.Store(machineID) }

func (m *groups) Close() { m.offer.close() }

// group is the processes of one job, or of the whole machine when it names no job.
type group struct {
	tracker   *groups
	jobID     string
	tag       tag    // zero: none
	oomBefore uint64 // oom's count before the start
	period    period

	mu     sync.Mutex
	leader int  // its pid, session and group; 0 before the start
	reaped bool // the leader's pid may be reused
}

func (g *group) StartIn(_ *syscall.SysProcAttr, fork func() (int, error)) (pid int, err error) {
	g.tracker.strays.begin(g)
	defer func() { g.tracker.strays.begun(g, pid, err) }()
	return g.tracker.offer.during(func() (int, error) {
		if g.tag == 0 {
			return fork()
		}
		return g.tracker.tags.startTagged(g.tag, fork)
	})
}

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

func (g *group) Empty() bool { return len(g.among(snapshot(), nil)) == 0 }

func (g *group) Terminate() {
	for _, p := range g.among(snapshot(), nil) {
		p.signal(syscall.SIGTERM)
	}
}

// Kill stops the tree first, until a full scan finds nothing that still runs: stopped processes have no
// children, so none is missed by the kill. What may be the group's, and as well another's, is spared and
// returned.
func (g *group) Kill(ctx context.Context) []int {
	// Processes that were found once stay known: a child of a killed process is reparented to the guest and no
	// longer descends from the leader.
	known := make(map[process]bool)
	g.freeze(ctx, known)
	var left []process
	poll(ctx, killTimeout, func() bool {
		left = g.among(snapshot(), known)
		for _, p := range left {
			p.signal(syscall.SIGKILL)
		}
		return len(left) == 0
	})
	left = append(left, g.unsure(snapshot(), known)...)
	pids := make([]int, 0, len(left))
	for _, p := range left {
		pids = append(pids, p.pid)
	}
	return pids
}

func (g *group) freeze(ctx context.Context, known map[process]bool) {
	stopped := make(map[process]bool)
	for deadline := time.Now().Add(freezeTimeout); time.Now().Before(deadline) && ctx.Err() == nil; {
		fresh := false
		for _, p := range g.among(snapshot(), known) {
			if !stopped[p] {
				p.signal(syscall.SIGSTOP)
				stopped[p], fresh = true, true
			}
		}
		if !fresh {
			return
		}
	}
}

func (g *group) OOMKills() uint64 { return g.tracker.oom.since(g.oomBefore) }

func (g *group) Release() {
	g.mu.Lock()
	leader := g.leader
	g.mu.Unlock()
	g.tracker.strays.release(g, leader)
}

// among returns the processes of the tree, zombies aside. known, which may be nil, is added to.
func (g *group) among(all []*stats, known map[process]bool) []process {
	g.mu.Lock()
	leader, reaped := g.leader, g.reaped
	g.mu.Unlock()
	if reaped {
		for _, p := range all {
			if p.pid == leader {
				// The pid was reused, so the process group and the session are empty: the kernel reuses a pid
				// only then.
				leader = 0
			}
		}
	}
	self := os.Getpid()
	ours := make(map[int]bool)
	for _, p := range all {
		if p.pid == self {
			continue // the guest is in no job, and its other children do not descend from one
		}
		if known[p.process] || leader != 0 && (p.pid == leader || p.group == leader || p.session == leader) || g.marked(p) ||
			g.claim(p) == certain {
			ours[p.pid] = true
		}
	}
	addDescendants(all, ours)
	var members []process
	for _, p := range all {
		if !ours[p.pid] {
			continue
		}
		if known != nil {
			known[p.process] = true
		}
		if !p.zombie {
			members = append(members, p.process)
		}
	}
	return members
}

// unsure returns the processes that may be the tree's, and none of known.
func (g *group) unsure(all []*stats, known map[process]bool) []process {
	perhaps := make(map[int]bool)
	for _, p := range all {
		if p.pid != os.Getpid() && g.claim(p) == unsure {
			perhaps[p.pid] = true
		}
	}
	addDescendants(all, perhaps)
	var members []process
	for _, p := range all {
		if perhaps[p.pid] && !p.zombie && !known[p.process] {
			members = append(members, p.process)
		}
	}
	return members
}

// addDescendants adds the descendants of processes to them. The guest is nobody's.
func addDescendants(all []*stats, pids map[int]bool) {
	for grew := len(pids) > 0; grew; {
		grew = false
		for _, p := range all {
			if !pids[p.pid] && pids[p.parent] && p.pid != os.Getpid() {
				pids[p.pid], grew = true, true
			}
		}
	}
}

// claim says whether an orphan without any mark is the tree's.
func (g *group) claim(p *stats) claim {
	if p.parent != os.Getpid() || p.zombie {
		return foreign
	}
	if tags := g.tracker.tags; tags != nil {
		if t := p.readTag(); t.valid() && tags.ours(t) {
			return foreign // of a job, which is found by it
		}
	}
	if e := p.readEnvironment(); e.job != "" && e.machine == g.tracker.machineID.Load() {
		return foreign
	}
	return g.tracker.strays.claim(p, g)
}

// marked says whether a process has the tree's tag or, when it has no valid tag, its marker.
func (g *group) marked(p *stats) bool {
	if g.tracker.tags != nil {
		if t := p.readTag(); t.valid() {
			//mutation:sibling-containment return g.tracker.tags.ours(t)
			return g.tag == t || g.jobID == "" && g.tracker.tags.ours(t)
		}
	}
	if g.jobID == "" {
		return p.readEnvironment().machine == g.tracker.machineID.Load()
	}
	return p.readEnvironment().job == g.jobID
}
