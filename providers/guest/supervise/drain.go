package supervise

import (
	"time"

	"golang.org/x/sys/unix"
)

// drain ends the wait for output when there was none for a while, or for too long.
func (j *job) drain(deadline time.Time) {
	if j.drainLater(deadline) {
		return
	}
	// Another job's process that was forked but has not executed its program yet has this job's pipes, too,
	// and is no child that holds them.
	j.supervisor.Reaper.AwaitForks()
	if j.drainLater(deadline) {
		return
	}
	j.mu.Lock()
	j.drained = true
	j.mu.Unlock()
	j.settle()
}

// drainLater says whether output is still on its way, and looks again then.
func (j *job) drainLater(deadline time.Time) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	now := time.Now()
	quietFor := drainSilence
	for i := range j.pipes {
		quietFor = min(quietFor, j.pipes[i].quiet(now))
	}
	if quietFor >= drainSilence || !now.Before(deadline) {
		return false
	}
	next := min(drainSilence-quietFor, deadline.Sub(now))
	j.draining = j.supervisor.after(max(next, time.Millisecond), func() { j.drain(deadline) })
	return true
}

// quiet returns for how long nothing came, 0 while something is on its way: bytes, or the end, which a
// machine that was frozen or busy has not come to yet.
func (o *outlet) quiet(now time.Time) time.Duration {
	if o.file == nil {
		return drainSilence
	}
	// The pipe first, and then whether somebody is about to spool what was in it: the other way round the
	// bytes could move on in between and be seen in neither place.
	pending := false
	if conn, err := o.file.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			pending = err == nil && n > 0 || hungUp(fd)
		})
	}
	if pending || o.busy.Load() {
		return 0
	}
	return now.Sub(time.Unix(0, o.last.Load()))
}

// hungUp says whether nobody has the other end of a pipe or terminal open.
func hungUp(fd uintptr) bool {
	look := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(look, 0)
	return err == nil && look[0].Revents&unix.POLLHUP != 0
}
