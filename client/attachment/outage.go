package attachment

import (
	"sync"
	"time"
)

// outage tells a caller that the broker is away for longer than a moment, and that it is back.
type outage struct {
	away, back func() // may be nil

	mu    sync.Mutex // held while the caller is told
	timer *time.Timer
	told  bool
}

// begin notes that the broker is away, unless that is known.
func (o *outage) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer == nil && o.away != nil {
		o.timer = time.AfterFunc(awayAfter, o.tell)
	}
}

func (o *outage) tell() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer == nil {
		return // it was over when this began
	}
	o.told = true
	o.away()
}

// end notes that the broker is there.
func (o *outage) end() {
	if o.leave() && o.back != nil {
		o.back()
	}
}

// leave tells nothing more of this outage, and reports whether the caller was told of it.
func (o *outage) leave() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.timer != nil {
		o.timer.Stop()
	}
	told := o.told
	o.timer, o.told = nil, false
	return told
}
