package jobs

import "sync"

// news tells waiting calls that a job's record has changed. It holds nothing of its own: who is told
// reads the ledger again.
type news struct {
	mu      sync.Mutex
	waiting map[string]map[chan struct{}]bool // by job
}

func newNews() *news { return &news{waiting: map[string]map[chan struct{}]bool{}} }

// about returns a channel that gets a value after each change of a job, and how to stop listening.
// Subscribe before reading the record: then no change is missed.
func (n *news) about(jobID string) (<-chan struct{}, func()) {
	changed := make(chan struct{}, 1)
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.waiting[jobID] == nil {
		n.waiting[jobID] = map[chan struct{}]bool{}
	}
	n.waiting[jobID][changed] = true
	return changed, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.waiting[jobID], changed)
		if len(n.waiting[jobID]) == 0 {
			delete(n.waiting, jobID)
		}
	}
}

// tell wakes who waits for a job.
func (n *news) tell(jobID string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for changed := range n.waiting[jobID] {
		select {
		case changed <- struct{}{}:
		default: // it has not yet taken the last one, and will read the newest record
		}
	}
}
