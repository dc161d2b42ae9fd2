// Package clock has the timers of a guest: plain ones that their owner can wait for, and a clock for
// the deadlines of jobs, which can be paused while the machine is about to be frozen. It knows no jobs
// and never steps the system's clock.
package clock

import (
	"log/slog"
	"sync"
	"time"
)

// pauseTicks divide the longest pause: a freeze takes at most one of them from the guest's point of view,
// however long it lasts, so that what is bounded is the guest's own running time.
const pauseTicks = 60

// Work is the goroutines and timers of an owner that waits for all of them.
type Work struct{ sync.WaitGroup }

// After calls f once d has passed, unless the timer is stopped before; Wait waits for it.
func (w *Work) After(d time.Duration, f func()) *Timer {
	w.Add(1)
	return &Timer{work: w, timer: time.AfterFunc(d, func() {
		defer w.Done()
		f()
	})}
}

// Timer is one that its owner waits for.
type Timer struct {
	work  *Work
	timer *time.Timer
}

// Stop stops the timer. It is safe on a nil timer.
func (t *Timer) Stop() {
	if t != nil && t.timer.Stop() {
		t.work.Done()
	}
}

// Clock measures the time that counts for jobs: it stops at Pause until Resume.
type Clock struct {
	work     *Work
	log      *slog.Logger
	maxPause time.Duration // of running time

	mu      sync.Mutex
	started time.Time
	lost    time.Duration // paused time so far
	stopped time.Time     // when it was paused; zero while it runs
	ended   bool          // it is never paused again
	pending map[*Countdown]struct{}
	waking  *Timer // the next tick of the guest's running time while paused
	ticks   int    // that are left
}

// Moment is a point on a Clock.
type Moment time.Duration

// New returns a running clock. A pause ends by itself after maxPause of running time.
func New(work *Work, maxPause time.Duration, log *slog.Logger) *Clock {
	return &Clock{work: work, log: log, maxPause: maxPause, started: time.Now(), pending: make(map[*Countdown]struct{})}
}

// Now returns the current moment.
func (c *Clock) Now() Moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

func (c *Clock) nowLocked() Moment {
	if !c.stopped.IsZero() {
		return Moment(c.stopped.Sub(c.started) - c.lost)
	}
	return Moment(time.Since(c.started) - c.lost)
}

// Until returns the time left until a moment, and whether the clock is running.
func (c *Clock) Until(m Moment) (left time.Duration, running bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(m - c.nowLocked()), c.stopped.IsZero()
}

// Pause stops the clock until Resume, or until the longest pause has passed in running time: a broker
// that died in between must not leave jobs without deadlines. Pausing again restarts that time.
func (c *Clock) Pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	if c.stopped.IsZero() {
		c.stopped = time.Now()
		for d := range c.pending {
			d.timer.Stop()
			d.timer = nil
		}
	}
	c.ticks = pauseTicks
	if c.waking == nil {
		c.waking = c.work.After(c.maxPause/pauseTicks, c.tick)
	}
}

// tick counts the guest's running time during a pause.
func (c *Clock) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waking = nil
	if c.stopped.IsZero() {
		return
	}
	if c.ticks--; c.ticks > 0 {
		c.waking = c.work.After(c.maxPause/pauseTicks, c.tick)
		return
	}
	c.log.Warn("the machine was quiesced and not resumed in time; deadlines of jobs count again", "after", c.maxPause)
	c.resumeLocked()
}

// Resume ends a pause, if there is one.
func (c *Clock) Resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resumeLocked()
}

func (c *Clock) resumeLocked() {
	if c.waking != nil {
		c.waking.Stop()
		c.waking = nil
	}
	if c.stopped.IsZero() {
		return
	}
	c.lost += time.Since(c.stopped)
	c.stopped = time.Time{}
	for d := range c.pending {
		d.arm()
	}
}

// End resumes the clock for good.
func (c *Clock) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.resumeLocked()
}

// Countdown is a timer on a Clock.
type Countdown struct {
	clock    *Clock
	deadline Moment
	then     func()
	timer    *Timer // nil during a pause
}

// After calls then once d has passed on this clock, unless the countdown is stopped before.
func (c *Clock) After(d time.Duration, then func()) *Countdown {
	c.mu.Lock()
	defer c.mu.Unlock()
	down := &Countdown{clock: c, deadline: c.nowLocked() + Moment(d), then: then}
	c.pending[down] = struct{}{}
	if c.stopped.IsZero() {
		down.arm()
	}
	return down
}

// arm starts the timer for what is left. The clock's lock is held.
func (d *Countdown) arm() {
	d.timer = d.clock.work.After(time.Duration(d.deadline-d.clock.nowLocked()), d.fire)
}

func (d *Countdown) fire() {
	c := d.clock
	c.mu.Lock()
	_, due := c.pending[d]
	// A timer that expired just as the clock was paused finds it paused, or running again with another
	// timer in its place: then that one counts.
	due = due && c.stopped.IsZero() && d.deadline <= c.nowLocked()
	if due {
		delete(c.pending, d)
	}
	c.mu.Unlock()
	if due {
		d.then()
	}
}

// Stop stops the countdown. It is safe on a nil countdown.
func (d *Countdown) Stop() {
	if d == nil {
		return
	}
	d.clock.mu.Lock()
	defer d.clock.mu.Unlock()
	if _, pending := d.clock.pending[d]; pending {
		delete(d.clock.pending, d)
		d.timer.Stop()
	}
}
