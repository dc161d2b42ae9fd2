package supervise

import (
	"time"
)

// drain ends the wait for output after a period of silence, or at the deadline.
func (j *job) drain(deadline time.Time) {
	if j.drainLater(deadline) {
		return
	}
	// A process of another job that was forked but has not executed its program yet has this job's pipes open,
	// too, and is no child that keeps them open.
	j.supervisor.Reaper.AwaitForks()
	if j.drainLater(deadline) {
		return
	}
	j.mu.Lock()
	j.drained = true
	j.mu.Unlock()
	j.finalize()
}

// drainLater says whether output is still on its way; then it schedules another drain.
func (j *job) drainLater(deadline time.Time) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	now := time.Now()
	quietFor := drainSilence
	for i := range j.pipes {
		quietFor = min(quietFor, j.pipes[i].Quiet(now))
	}
	//mutation:bounded-drain if quietFor >= drainSilence {
	if quietFor >= drainSilence || !now.Before(deadline) {
		return false
	}
	next := min(drainSilence-quietFor, deadline.Sub(now))
	j.draining = j.supervisor.work.After(max(next, time.Millisecond), func() { j.drain(deadline) })
	return true
}
