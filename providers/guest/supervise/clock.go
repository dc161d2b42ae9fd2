package supervise

import (
	"sync"
	"time"
)

// quiesceTicks divide the longest time without counting: a freeze lasts one of them at most for the
// guest, however long it is for the world, so that what is bounded is the guest's own running time.
const quiesceTicks = 60

// clock is the time that counts for jobs: it stands still from a quiesce until the machine goes on.
type clock struct {
	supervisor *Supervisor
	most       time.Duration // of running time that it stands still without being told to go on

	mu      sync.Mutex
	began   time.Time
	lost    time.Duration // for which it stood still, so far
	stopped time.Time     // when it was stopped; zero while it goes
	ended   bool          // it stands still no more
	pending map[*countdown]struct{}
	waking  *timer // the next tick of the guest's running time while it stands still
	ticks   int    // that are left
}

// moment is a point in the time that counts.
type moment time.Duration

func newClock(s *Supervisor, most time.Duration) *clock {
	return &clock{supervisor: s, most: most, began: time.Now(), pending: make(map[*countdown]struct{})}
}

func (c *clock) now() moment {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

func (c *clock) nowLocked() moment {
	if !c.stopped.IsZero() {
		return moment(c.stopped.Sub(c.began) - c.lost)
	}
	return moment(time.Since(c.began) - c.lost)
}

// until returns what is left until a moment, and whether it becomes less.
func (c *clock) until(m moment) (left time.Duration, counting bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(m - c.nowLocked()), c.stopped.IsZero()
}

// halt makes the clock stand still until proceed, or until most of the guest's running time is over:
// a broker that died in between must not leave jobs without deadlines. Once more begins that anew.
func (c *clock) halt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	if c.stopped.IsZero() {
		c.stopped = time.Now()
		for d := range c.pending {
			d.timer.stop()
			d.timer = nil
		}
	}
	c.ticks = quiesceTicks
	if c.waking == nil {
		c.waking = c.supervisor.after(c.most/quiesceTicks, c.tick)
	}
}

// tick counts the guest's running time while the clock stands still.
func (c *clock) tick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waking = nil
	if c.stopped.IsZero() {
		return
	}
	if c.ticks--; c.ticks > 0 {
		c.waking = c.supervisor.after(c.most/quiesceTicks, c.tick)
		return
	}
	c.supervisor.Log.Warn("nobody said that the machine goes on, so its jobs' time counts again", "after", c.most)
	c.proceedLocked()
}

// proceed lets the clock go on, if it stands still.
func (c *clock) proceed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proceedLocked()
}

func (c *clock) proceedLocked() {
	if c.waking != nil {
		c.waking.stop()
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

// end lets the clock go on for good.
func (c *clock) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.proceedLocked()
}

// countdown is a timer by a clock.
type countdown struct {
	clock    *clock
	deadline moment
	then     func()
	timer    *timer // nil while the clock stands still
}

// after calls then once d was counted, unless the countdown is stopped before.
func (c *clock) after(d time.Duration, then func()) *countdown {
	c.mu.Lock()
	defer c.mu.Unlock()
	down := &countdown{clock: c, deadline: c.nowLocked() + moment(d), then: then}
	c.pending[down] = struct{}{}
	if c.stopped.IsZero() {
		down.arm()
	}
	return down
}

// arm starts the timer for what is left. The clock's lock is held.
func (d *countdown) arm() {
	d.timer = d.clock.supervisor.after(time.Duration(d.deadline-d.clock.nowLocked()), d.fire)
}

func (d *countdown) fire() {
	c := d.clock
	c.mu.Lock()
	_, due := c.pending[d]
	// A timer that ran out just when the clock was stopped finds it standing still, or going again
	// with another timer in its place: then that one is the one that counts.
	due = due && c.stopped.IsZero() && d.deadline <= c.nowLocked()
	if due {
		delete(c.pending, d)
	}
	c.mu.Unlock()
	if due {
		d.then()
	}
}

// stop is right on a nil countdown, too.
func (d *countdown) stop() {
	if d == nil {
		return
	}
	d.clock.mu.Lock()
	defer d.clock.mu.Unlock()
	if _, pending := d.clock.pending[d]; pending {
		delete(d.clock.pending, d)
		d.timer.stop()
	}
}
