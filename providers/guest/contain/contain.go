// Package contain tracks the processes of a job, so that a kill takes all of them: by a cgroup2 directory
// per job where the guest may create one, else by a tag that processes inherit, besides process group,
// descent and environment. It starts and reaps nothing, except for its own probe.
package contain

import (
	"context"
	"log/slog"
	"syscall"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// killTimeout bounds how long a kill waits for the tree to be gone before what is left counts
	// as survivors. A storm of 1,000 processes takes 60 ms; a process in uninterruptible sleep
	// cannot be killed.
	killTimeout = 10 * time.Second
	// firstPoll and lastPoll bound the poll interval while a tree is being killed.
	firstPoll = 500 * time.Microsecond
	lastPoll  = 50 * time.Millisecond
	// machineMarker and jobMarker are in the environment of every job's processes.
	machineMarker = "BERTH_MACHINE_ID="
	jobMarker     = "BERTH_JOB_ID="
)

// Tracker makes a ProcessGroup for each job.
type Tracker interface {
	// Kind is reported to the broker.
	Kind() guestv1.Containment
	// Prepare returns the group of a job that is about to start.
	Prepare(jobID string) (ProcessGroup, error)
	// Clear kills everything that any job left, forgotten ones included, and returns the pids that
	// survive.
	Clear(ctx context.Context) []int
	// Occupied returns the groups that still have processes, by one scan for all of them.
	Occupied(groups []ProcessGroup) []ProcessGroup
	// Rename changes the machine's id, which marks the environment of later jobs.
	Rename(machineID string)
	// Close ends the background work. Groups are released before.
	Close()
}

// ProcessGroup is all processes of one job, whatever process groups of the kernel they are in.
type ProcessGroup interface {
	// StartIn calls fork so that the process that it starts with attr is in the group, and returns its pid.
	StartIn(attr *syscall.SysProcAttr, fork func() (int, error)) (int, error)
	// Started sets the group's leader. It is called before any of the calls below.
	Started(pid int)
	// LeaderReaped notes that the leader's pid may be reused from now on.
	LeaderReaped()
	// Empty says whether no process is left, zombies aside.
	Empty() bool
	// Terminate sends TERM to every process, once.
	Terminate()
	// Kill sends KILL to every process until none is left, a timeout passes or ctx ends; it returns
	// the surviving pids.
	Kill(ctx context.Context) []int
	// OOMKills counts the processes of the group, or else of the machine since the group was prepared, that
	// the kernel killed for memory.
	OOMKills() uint64
	// Release gives the group up. Processes that are still in it keep running.
	Release()
}

// Probe finds the best tracker: a cgroup per job below cgroupDir where a trial succeeds, else tags,
// else process groups. machineID marks the environment of this machine's jobs.
func Probe(cgroupDir, machineID string, log *slog.Logger) Tracker {
	oom := newOOMCounter()
	if cgroupDir != "" {
		tracker, err := newCgroups(cgroupDir, oom, log)
		if err == nil {
			return tracker
		}
		log.Warn("no cgroup per job here; a kill takes what has the job's tag, group, descent or environment",
			"cgroup_dir", cgroupDir, "error", err)
	}
	return newGroups(machineID, oom)
}

// poll calls check with growing pauses until it returns true, the timeout passes or ctx ends.
func poll(ctx context.Context, timeout time.Duration, check func() bool) bool {
	deadline := time.Now().Add(timeout)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for wait := firstPoll; ; wait = min(2*wait, lastPoll) {
		if check() {
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
