package supervise

import (
	"container/list"
	"context"
	"slices"
	"sync"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/record"
)

// table is the jobs, by id and in the order of their last change.
type table struct {
	mu      sync.Mutex
	jobs    map[string]*job
	order   list.List // of *job, by cursor
	cursor  uint64
	changed chan struct{}     // closed at the next change, if anyone waits
	durable chan struct{}     // likewise, of a durable job
	grown   map[*job]struct{} // since the last announcement of growth
	growth  *timer

	// Forgotten jobs of which something may run, by id, and the next look whether it does.
	left      map[string]*job
	look      *timer
	lookAfter time.Duration
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

// add makes a job known, or returns the one that has its id already. It tells nobody yet.
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

// announce tells that jobs changed, at once.
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

// grew tells that a job's output grew, within growthEvery.
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
		t.growth = s.after(growthEvery, s.announceGrowth)
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
	t.growth.stop()
	t.look.stop()
}

// changes returns at most limit jobs, or durable jobs only, that changed after a cursor, in order,
// and what to wait for when there are none.
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

// List answers with what changed since a cursor, waiting for a change if there is none.
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

// Forget removes finished jobs; those that are not finished, or whose output is not sealed, are
// named in the answer.
func (s *Supervisor) Forget(r *guestv1.ForgetRequest) (*guestv1.ForgetResponse, error) {
	if len(r.GetJobIds()) > forgetMost {
		return nil, refuse(Invalid, "", "%d jobs to forget at once, at most %d", len(r.GetJobIds()), forgetMost)
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

// forget drops finished jobs. Their ids are remembered before they stop being known, so that at no
// time one of them could begin again.
func (s *Supervisor) forget(jobs ...*job) error {
	var durable, others []record.ULID
	for _, j := range jobs {
		if j.durable {
			durable = append(durable, j.ulid)
		} else {
			others = append(others, j.ulid)
		}
	}
	if err := s.Records.Bury(durable, others); err != nil {
		return failed(err, "forget %d jobs", len(jobs))
	}
	for _, j := range jobs {
		s.table.drop(j)
		s.leave(j)
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

// leave keeps a forgotten job findable for Stop, as long as something of it runs. Whether it does is
// looked at later, for all that were forgotten meanwhile at once.
func (s *Supervisor) leave(j *job) {
	if j.tree == nil {
		return
	}
	t := &s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.left == nil {
		t.left = make(map[string]*job)
	}
	t.left[j.id] = j
	if t.look == nil {
		t.lookAfter = firstLeftLook
		t.look = s.after(t.lookAfter, s.lookAtLeft)
	}
}

func (t *table) findLeft(id string) *job {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.left[id]
}

// lookAtLeft drops the forgotten jobs of which nothing runs any more.
func (s *Supervisor) lookAtLeft() {
	t := &s.table
	t.mu.Lock()
	jobs := make(map[contain.Tree]*job, len(t.left))
	trees := make([]contain.Tree, 0, len(t.left))
	for _, j := range t.left {
		jobs[j.tree] = j
		trees = append(trees, j.tree)
	}
	t.mu.Unlock()
	for _, tree := range s.Means.Occupied(trees) {
		delete(jobs, tree)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, j := range jobs {
		delete(t.left, j.id)
	}
	t.look = nil
	if len(t.left) > 0 {
		t.lookAfter = min(2*t.lookAfter, lastLeftLook)
		t.look = s.after(t.lookAfter, s.lookAtLeft)
	}
}

// wait returns a channel that fires after d; nil when there is nothing to wait for.
func wait(d time.Duration) (over <-chan time.Time, cancel func()) {
	if d <= 0 {
		return nil, func() {}
	}
	t := time.NewTimer(d)
	return t.C, func() { t.Stop() }
}
