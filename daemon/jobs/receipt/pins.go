package receipt

import (
	"context"
	"sync"

	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// pins counts who reads from a guest.
type pins struct {
	mu         sync.Mutex
	held       map[string]int  // by job
	releasable map[string]bool // pinned jobs that their guest may forget when the last reader is done
}

// Pin keeps a job's guest from being told to forget it while somebody reads from there, and returns how
// to unpin it.
func (r *Receipts) Pin(job *recordv1.JobRecord) (unpin func()) {
	r.pins.pin(job.GetId())
	return func() {
		if r.pins.unpin(job.GetId()) {
			r.Background.Go(func(ctx context.Context) { r.Forget(ctx, job.GetMachineId(), job.GetId()) })
		}
	}
}

// MayForget reports whether nobody reads from a job's guest; if somebody does, the guest is told when the
// last reader is done.
func (r *Receipts) MayForget(id string) bool { return r.pins.release(id) }

func (p *pins) pin(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id]++
}

// unpin reports whether it was the last pin of a job that its guest may forget.
func (p *pins) unpin(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held[id]--
	if p.held[id] > 0 {
		return false
	}
	forget := p.releasable[id]
	delete(p.held, id)
	delete(p.releasable, id)
	return forget
}

func (p *pins) release(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held[id] > 0 {
		p.releasable[id] = true
		return false
	}
	return true
}
