// Package contain keeps the processes of a job together, so that a kill takes all of them: by a
// cgroup2 directory per job where the guest may make one, else by a tag that processes inherit,
// besides process group, descent and environment. It starts nothing and reaps nothing, but for its
// own probe.
package contain

import (
	"context"
	"log/slog"
	"syscall"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// killPatience bounds how long a kill waits for the tree to be gone before what is left counts
	// as survivors. A storm of 1,000 processes takes 60 ms; a process in uninterruptible sleep
	// never goes.
	killPatience = 10 * time.Second
	// firstPoll and lastPoll bound the pauses between looks at a tree that is being killed.
	firstPoll = 500 * time.Microsecond
	lastPoll  = 50 * time.Millisecond
	// machineMarker and jobMarker are in the environment of every job's processes.
	machineMarker = "BERTH_MACHINE_ID="
	jobMarker     = "BERTH_JOB_ID="
)

// Means makes a tree for each job.
type Means interface {
	// Kind is what the broker is told.
	Kind() guestv1.Containment
	// Prepare returns the tree of a job that is about to start.
	Prepare(jobID string) (Tree, error)
	// Clear kills everything that any job left, forgotten ones included, and returns the pids that
	// would not go.
	Clear(ctx context.Context) []int
	// Occupied returns those of the trees that still have processes. It looks once for all of them.
	Occupied(trees []Tree) []Tree
	// Rename tells the means another id of the machine, which marks the environment of later jobs.
	Rename(machineID string)
	// Close ends the background work of the means. Trees are released before.
	Close()
}

// Tree is the processes of one job.
type Tree interface {
	// Enclose makes fork, which uses attr, start its process in the tree, and returns its pid.
	Enclose(attr *syscall.SysProcAttr, fork func() (int, error)) (int, error)
	// Started tells the tree its leader. It is called before any of the calls below.
	Started(pid int)
	// LeaderReaped tells it that the leader's pid may belong to somebody else from now on.
	LeaderReaped()
	// Empty says whether no process is left, zombies aside.
	Empty() bool
	// Terminate sends TERM to every process, once.
	Terminate()
	// Kill sends KILL to every process until none is left, or patience or ctx is over; it returns
	// the pids that are left.
	Kill(ctx context.Context) []int
	// OOMKills counts the processes of the tree that the kernel killed for memory.
	OOMKills() uint64
	// Release gives the tree up. Processes that are still in it live on.
	Release()
}

// Probe finds the best means: a cgroup per job below cgroupDir where a trial succeeds, else tags,
// else process groups. machineID marks the environment of this machine's jobs.
func Probe(cgroupDir, machineID string, log *slog.Logger) Means {
	if cgroupDir != "" {
		means, err := newCgroups(cgroupDir, log)
		if err == nil {
			return means
		}
		log.Warn("no cgroup per job here; a kill takes what has the job's tag, group, descent or environment",
			"cgroup_dir", cgroupDir, "error", err)
	}
	return newGroups(machineID)
}

// poll calls look with growing pauses until it returns true, or patience or ctx is over.
func poll(ctx context.Context, patience time.Duration, look func() bool) bool {
	deadline := time.Now().Add(patience)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		if look() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		pause.Reset(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return false
		}
	}
}
