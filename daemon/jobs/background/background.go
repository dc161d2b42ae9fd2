// Package background runs what outlives the call that began it, and waits for it when the broker stops. It
// decides nothing.
package background

import (
	"context"
	"sync"
	"time"
)

// Group is goroutines with one owner.
type Group struct {
	ctx    context.Context //nolint:containedctx // ends the goroutines, which outlive every call
	cancel context.CancelFunc

	mu     sync.Mutex
	wg     sync.WaitGroup // under mu until closed, so that nothing is added while Close waits
	closed bool
}

// NewGroup returns a group; Close it.
func NewGroup() *Group {
	ctx, cancel := context.WithCancel(context.Background())
	return &Group{ctx: ctx, cancel: cancel}
}

// Go runs fn on a goroutine, with a context that Close ends. It reports false, and does nothing, after
// Close.
func (g *Group) Go(fn func(context.Context)) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.wg.Go(func() { fn(g.ctx) })
	return true
}

// Close ends what runs and waits for it.
func (g *Group) Close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	g.wg.Wait()
}

// Pause waits and reports whether the context still holds.
func Pause(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// The pace of a loop that asks a guest which answers before it was to: 200 times a second, backing off to
// once a second while it has nothing new.
const (
	minPollInterval = 5 * time.Millisecond
	maxPollInterval = time.Second
)

// Pacer keeps a loop from running at its peer's speed.
type Pacer struct {
	last  time.Time
	empty int // answers in a row that had nothing new
}

// Await waits until the peer may be asked again, after an answer that had something new, or nothing.
func (p *Pacer) Await(ctx context.Context, something bool) {
	wait := minPollInterval - time.Since(p.last)
	if p.empty++; something {
		p.empty = 0
	}
	if p.empty > 1 && wait > 0 {
		wait = min(minPollInterval<<min(p.empty, 16), maxPollInterval)
	}
	if wait > 0 {
		Pause(ctx, wait)
	}
	p.last = time.Now()
}
