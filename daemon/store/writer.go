package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// Update runs fn in a write transaction and returns after its commit is on disk. fn may share the
// transaction with other callers' functions, sees what those before it wrote, and may be run more
// than once: it must touch nothing but the transaction and variables that it sets afresh each time.
//
// It returns fn's error as it is, and then nothing of fn's writes remains; ctx.Err() when ctx ended
// before fn was picked up (after that it waits for the result); STORE_FULL when the disk is full, up to what
// is held in reserve, and nothing was written; STOPPING after Close; STORE_FAILED when the ledger can't be
// written any more; INTERNAL when fn panicked.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	return s.update(ctx, &change{fn: fn, done: make(chan error, 1)})
}

// UpdateUrgent is Update for what ends jobs and sandboxes or drops what is no longer needed, and for nothing
// else: on a full disk it may use the space that is held in reserve.
func (s *Store) UpdateUrgent(ctx context.Context, fn func(*Tx) error) error {
	return s.update(ctx, &change{fn: fn, urgent: true, done: make(chan error, 1)})
}

func (s *Store) update(ctx context.Context, c *change) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !s.queue.add(c) {
		return errStopping()
	}
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
		if c.withdraw() {
			return ctx.Err()
		}
		return <-c.done
	}
}

// UpdateLater hands fn to the same queue as Update and does not wait: fn is committed with the next
// Update, or after batchDelay when there is none, and at the latest by Close. Its error is logged. What is handed in and not yet committed is lost in a
// crash, so fn only writes what can be found out again.
func (s *Store) UpdateLater(fn func(*Tx) error) {
	if !s.queue.add(&change{fn: fn}) {
		s.log.Error("a write-behind to the ledger came after its end and is lost", "ledger", s.path)
	}
}

// change is one function on its way through the writer.
type change struct {
	fn          func(*Tx) error
	urgent      bool       // it may use the reserve
	done        chan error // nil when nobody waits
	state       atomic.Int32
	failed      error // fn's own error, kept until the fate of what it may have seen is known
	othersWrote bool  // others wrote before it in the transaction in which it failed
}

// The states of a change. Whoever leaves waiting first decides: the writer or the caller.
const (
	waiting int32 = iota
	taken
	withdrawn
)

func (c *change) take() bool     { return c.state.CompareAndSwap(waiting, taken) }
func (c *change) withdraw() bool { return c.state.CompareAndSwap(waiting, withdrawn) }

// batchDelay is how long a change that nobody waits for may wait for others: a short attached command
// writes one behind its answer, and a commit for each would cost more than the command.
const batchDelay = 50 * time.Millisecond

// queue is the changes that wait for the writer, oldest first.
type queue struct {
	mu      sync.Mutex
	filled  sync.Cond
	changes []*change
	awaited int         // how many of them somebody waits for
	due     bool        // those that nobody waits for have waited long enough
	timer   *time.Timer // will say so; nil while there are none
	closed  bool
}

func (q *queue) init() { q.filled.L = &q.mu }

// add appends c; false once the queue is closed.
func (q *queue) add(c *change) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.changes = append(q.changes, c)
	if c.done != nil {
		q.awaited++
	} else if q.timer == nil {
		q.timer = time.AfterFunc(batchDelay, q.hurry)
	}
	if q.ready() {
		q.filled.Signal()
	}
	return true
}

// ready reports whether there is something that should be committed now.
func (q *queue) ready() bool {
	return len(q.changes) > 0 && (q.awaited > 0 || q.due || q.closed || len(q.changes) >= maxBatch)
}

func (q *queue) hurry() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.due = true
	q.filled.Signal()
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.filled.Broadcast()
}

// next waits for changes and takes what has gathered, at most maxBatch; nil when the queue is
// closed and empty.
func (q *queue) next() []*change {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for !q.ready() {
			if q.closed {
				return nil
			}
			q.filled.Wait()
		}
		gathered := q.changes[:min(len(q.changes), maxBatch)]
		q.due = false
		if q.timer != nil {
			q.timer.Stop()
			q.timer = nil
		}
		batch := make([]*change, 0, len(gathered))
		for _, c := range gathered {
			if c.done != nil {
				q.awaited--
			}
			if c.take() {
				batch = append(batch, c)
			}
		}
		rest := copy(q.changes, q.changes[len(gathered):])
		clear(q.changes[rest:])
		q.changes = q.changes[:rest]
		if rest > 0 && q.awaited == 0 {
			q.due = true // the rest has waited with those that were taken
		}
		if len(batch) > 0 {
			return batch
		}
	}
}

// write is the writer goroutine: the only place that begins a write transaction once the ledger is
// open. It ends when the queue is closed and empty.
func (s *Store) write() {
	defer close(s.finished)
	for batch := s.queue.next(); batch != nil; batch = s.queue.next() {
		err := s.commit(batch)
		if !fault.Is(err, fault.StoreFull) {
			s.answerAll(batch, err)
			continue
		}
		urgent, others := split(batch)
		s.answerAll(others, err)
		s.writeUrgent(urgent)
	}
}

func split(batch []*change) (urgent, others []*change) {
	for _, c := range batch {
		if c.urgent {
			urgent = append(urgent, c)
		} else {
			others = append(others, c)
		}
	}
	return urgent, others
}

// writeUrgent commits urgent changes for which there was no space: each by itself, so that it needs least, and with
// what is held in reserve.
func (s *Store) writeUrgent(urgent []*change) {
	for _, c := range urgent {
		err := s.commit([]*change{c})
		for fault.Is(err, fault.StoreFull) && s.giveUp() {
			err = s.commit([]*change{c})
		}
		s.answer(c, err)
	}
}

func (s *Store) answerAll(changes []*change, err error) {
	for _, c := range changes {
		s.answer(c, err)
	}
}

// answer tells the caller of c how it ended; err is how the batch ended. A function that failed by
// itself gets its own error, unless that may rest on writes that did not last.
func (s *Store) answer(c *change, err error) {
	if c.failed != nil && (err == nil || !c.othersWrote) {
		err = c.failed
	}
	switch {
	case c.done != nil:
		c.done <- err
	case err != nil:
		s.log.Error("a write-behind to the ledger failed", "ledger", s.path, "error", err)
	}
}

// commit runs the functions of a batch in one transaction and commits it. The error is that of
// the transaction; a function's own error is noted in its change.
func (s *Store) commit(batch []*change) error {
	if broken := s.broken.Load(); broken != nil {
		return *broken
	}
	for _, c := range batch {
		c.failed, c.othersWrote = nil, false
	}
	tx, err := s.run(batch)
	if err != nil {
		return err
	}
	if tx.writes == 0 {
		_ = tx.bolt.Rollback()
		return nil
	}
	if err := tx.flushMeta(); err != nil {
		_ = tx.bolt.Rollback()
		return err
	}
	revision, number := tx.Revision(), tx.bolt.ID()

	// gofail: var storeBeforeCommit struct{}
	// os.Exit(137)
	err = commitSafely(tx)
	// gofail: var storeAfterCommit struct{}
	// os.Exit(137)

	if err != nil {
		return s.commitFailed(err, number)
	}
	s.revision.Store(revision)
	for _, notify := range s.onCommit {
		notify(Commit{Revision: revision, Changes: tx.changes})
	}
	return nil
}

// run runs the functions in order in one transaction and returns that, not yet committed. In a
// shared transaction the writes of a function that failed would survive: when one fails after it
// wrote, everything is rolled back and the others are run again without it.
func (s *Store) run(batch []*change) (*Tx, error) {
	pending := batch
	for {
		tx, err := s.begin(true)
		if err != nil {
			return nil, err
		}
		s.keepReserve(tx)
		rest, clean := s.runEach(tx, pending)
		if clean {
			return tx, nil
		}
		_ = tx.bolt.Rollback()
		pending = rest
	}
}

// runEach runs the functions and notes in their changes which failed. On a full disk one that is not urgent fails
// when it writes. When one failed after it had written, it stops and returns those that are to be run again.
func (s *Store) runEach(tx *Tx, pending []*change) (rest []*change, clean bool) {
	rest = make([]*change, 0, len(pending))
	for i, c := range pending {
		before := tx.writes
		err := call(c.fn, tx)
		if err == nil && s.reserve.low && !c.urgent && tx.writes > before {
			// What is left is for others. That is no word of fn, and rests on nobody's writes.
			c.failed = s.errFull(syscall.ENOSPC)
			return append(rest, pending[i+1:]...), false
		}
		if err == nil {
			rest = append(rest, c)
			continue
		}
		c.failed, c.othersWrote = err, before > 0
		//mutation:rerun-of-commit if false {
		if tx.writes > before {
			return append(rest, pending[i+1:]...), false
		}
	}
	return rest, true
}

// call runs fn; a panic in it is its error.
func call(fn func(*Tx) error, tx *Tx) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fault.New(fault.Internal, "a function on the ledger panicked: %v\n%s", reason, debug.Stack())
		}
	}()
	return fn(tx)
}

// commitSafely commits; a panic of bbolt, which means damage, is an error like a failed write.
func commitSafely(tx *Tx) (err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = fmt.Errorf("commit panicked: %v", reason)
		}
	}()
	return tx.bolt.Commit()
}

// commitFailed decides what a failed commit of the transaction with this number means. A full disk
// is clean as long as the new head was not written: the next transaction starts from the old one.
// Everything else leaves open what a restart would find, so this process must not go on.
func (s *Store) commitFailed(err error, number int) error {
	if full(err) && s.lastNumber() < number {
		return s.errFull(err)
	}
	failure := error(fault.New(fault.StoreFailed, "write the ledger %s: %w: whether it is on disk is open until berthd is restarted", s.path, err))
	s.broken.Store(&failure)
	s.fatal(failure)
	return failure
}

// full reports whether a disk, or a quota on it, is full.
func full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// lastNumber returns the number of the newest transaction whose head can be read.
func (s *Store) lastNumber() int {
	tx, err := s.db.Begin(false)
	if err != nil {
		return int(^uint(0) >> 1) // unknown: count it as written
	}
	defer func() { _ = tx.Rollback() }()
	return tx.ID()
}

// exit is the default of Options.Fatal.
func (s *Store) exit(err error) {
	s.log.Error("the ledger can't be trusted any more, ending; a restart finds out what was written", "ledger", s.path, "error", err)
	os.Exit(1)
}
