package supervise

import (
	"container/list"
	"context"
	"slices"
	"sync"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/clock"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

// table has the jobs by id and in the order of their last change.
type table struct {
	mu      sync.Mutex
	jobs    map[string]*job
	order   list.List // of *job, by cursor
	cursor  uint64
	changed chan struct{}     // closed at the next change, if a call waits
	durable chan struct{}     // likewise, of a durable job
	grown   map[*job]struct{} // since growth was last announced
	growth  *clock.Timer

	// Forgotten jobs that may still have processes, by id, and the next probe for them.
	leftovers map[string]*job
	poll      *clock.Timer
	pollDelay time.Duration
}

func (t *table) find(id string) *job {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.jobs[id]
}

func (t *table) all() []*job {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]*job, 0, len(t.jobs))
	for _, j := range t.jobs {
		all = append(all, j)
	}
	return all
}

// add registers a job, or returns the one with the same id. It announces nothing.
func (t *table) add(j *job) (known *job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known := t.jobs[j.id]; known != nil {
		return known
	}
	t.jobs[j.id] = j
	t.cursor++
	j.cursor.Store(t.cursor)
	j.element = t.order.PushBack(j)
	return nil
}

func (t *table) drop(j *job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.jobs[j.id] == j {
		delete(t.jobs, j.id)
		t.order.Remove(j.element)
		delete(t.grown, j)
	}
}

// announce notifies List that jobs changed.
func (t *table) announce(jobs ...*job) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, j := range jobs {
		if t.jobs[j.id] != j {
			continue
		}
		t.cursor++
		j.cursor.Store(t.cursor)
		t.order.MoveToBack(j.element)
	}
	if t.changed != nil {
		close(t.changed)
		t.changed = nil
	}
	if t.durable != nil && slices.ContainsFunc(jobs, func(j *job) bool { return j.durable }) {
		close(t.durable)
		t.durable = nil
	}
}

// grew announces within growthInterval that a job's output grew.
func (s *Supervisor) grew(j *job) {
	if !j.grown.CompareAndSwap(false, true) {
		return
	}
	t := &s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.jobs[j.id] != j {
		return
	}
	if t.grown == nil {
		t.grown = make(map[*job]struct{})
	}
	t.grown[j] = struct{}{}
	if t.growth == nil {
		t.growth = s.work.After(growthInterval, s.announceGrowth)
	}
}

func (s *Supervisor) announceGrowth() {
	t := &s.table
	t.mu.Lock()
	jobs := make([]*job, 0, len(t.grown))
	for j := range t.grown {
		j.grown.Store(false)
		jobs = append(jobs, j)
	}
	t.grown, t.growth = nil, nil
	t.mu.Unlock()
	t.announce(jobs...)
}

func (t *table) cancelTimers() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.growth.Stop()
	t.poll.Stop()
}

// changes returns at most limit jobs, or durable jobs only, that changed after a cursor, in order,
// and a channel that is closed at the next change.
func (t *table) changes(since uint64, limit int, durableOnly bool) (jobs []*job, next uint64, more bool, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if since > t.cursor {
		since = 0 // a cursor of another boot
	}
	for e := t.order.Back(); e != nil; e = e.Prev() {
		j := e.Value.(*job)
		if j.cursor.Load() <= since {
			break
		}
		if (j.durable || !durableOnly) && j.hasBegun() {
			jobs = append(jobs, j)
		}
	}
	slices.Reverse(jobs)
	if more = len(jobs) > limit; more {
		jobs = slices.Clip(jobs[:limit])
	}
	next = t.cursor
	if more {
		next = jobs[limit-1].cursor.Load()
	}
	awaited := &t.changed
	if durableOnly {
		awaited = &t.durable
	}
	if *awaited == nil {
		*awaited = make(chan struct{})
	}
	return jobs, next, more, *awaited
}

// List returns what changed since a cursor, waiting for a change if there is none.
func (s *Supervisor) List(ctx context.Context, r *guestv1.ListRequest) (*guestv1.ListResponse, error) {
	limit := int(r.GetLimit())
	if limit == 0 || limit > listLimit {
		limit = listLimit
	}
	over, cancel := wait(r.GetWait().AsDuration())
	defer cancel()
	for {
		jobs, next, more, changed := s.table.changes(r.GetSinceCursor(), limit, r.GetDurableOnly())
		if len(jobs) == 0 && over != nil {
			select {
			case <-changed:
				continue
			case <-over:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		response := &guestv1.ListResponse{NextCursor: next, More: more, BootId: s.BootID}
		for _, j := range jobs {
			response.Statuses = append(response.Statuses, j.status())
		}
		return response, nil
	}
}

// Forget removes finished jobs. It returns those that are not finished or whose output is not sealed.
func (s *Supervisor) Forget(r *guestv1.ForgetRequest) (*guestv1.ForgetResponse, error) {
	if len(r.GetJobIds()) > maxForget {
		return nil, refusal.New(refusal.Invalid, "", "%d jobs to forget at once, at most %d", len(r.GetJobIds()), maxForget)
	}
	response := &guestv1.ForgetResponse{}
	var jobs []*job
	for _, id := range r.GetJobIds() {
		j := s.table.find(id)
		switch {
		case j == nil || slices.Contains(jobs, j):
		case j.finished():
			jobs = append(jobs, j)
		default:
			response.KeptJobIds = append(response.KeptJobIds, id)
		}
	}
	return response, s.forget(jobs...)
}

// forget drops finished jobs. Their tombstones are written before they leave the table, so that none could
// start again in between.
func (s *Supervisor) forget(jobs ...*job) error {
	var durable, others []record.ULID
	for _, j := range jobs {
		if j.durable {
			durable = append(durable, j.ulid)
		} else {
			others = append(others, j.ulid)
		}
	}
	if err := s.Records.WriteTombstone(durable, others); err != nil {
		return refusal.System(err, "forget %d jobs", len(jobs))
	}
	for _, j := range jobs {
		s.table.drop(j)
		s.keepLeftover(j)
		if j.dropped.CompareAndSwap(false, true) {
			s.memory.Add(-j.inMemory.Load())
		}
		if !j.durable && !j.onDisk() {
			s.remove(j) // a single unlink
			continue
		}
		select {
		case s.removals <- j:
		default:
			s.remove(j)
		}
	}
	return nil
}

// keepLeftover keeps a forgotten job findable for Stop while it has processes. A later probe checks that for
// all of them at once.
func (s *Supervisor) keepLeftover(j *job) {
	if j.group == nil {
		return
	}
	t := &s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leftovers == nil {
		t.leftovers = make(map[string]*job)
	}
	t.leftovers[j.id] = j
	if t.poll == nil {
		t.pollDelay = firstLeftoverPoll
		t.poll = s.work.After(t.pollDelay, s.pollLeftovers)
	}
}

func (t *table) findLeftover(id string) *job {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.leftovers[id]
}

// pollLeftovers drops the forgotten jobs that have no more processes.
func (s *Supervisor) pollLeftovers() {
	t := &s.table
	t.mu.Lock()
	jobs := make(map[contain.ProcessGroup]*job, len(t.leftovers))
	trees := make([]contain.ProcessGroup, 0, len(t.leftovers))
	for _, j := range t.leftovers {
		jobs[j.group] = j
		trees = append(trees, j.group)
	}
	t.mu.Unlock()
	for _, tree := range s.Tracker.Occupied(trees) {
		delete(jobs, tree)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, j := range jobs {
		delete(t.leftovers, j.id)
	}
	t.poll = nil
	if len(t.leftovers) > 0 {
		t.pollDelay = min(2*t.pollDelay, lastLeftoverPoll)
		t.poll = s.work.After(t.pollDelay, s.pollLeftovers)
	}
}

// wait returns a channel that fires after d, or nil for no wait.
func wait(d time.Duration) (over <-chan time.Time, cancel func()) {
	if d <= 0 {
		return nil, func() {}
	}
	t := time.NewTimer(d)
	return t.C, func() { t.Stop() }
}
