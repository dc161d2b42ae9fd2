// Package events fans out what the ledger's commits changed: to waiters, which only want to look again,
// and to subscribers, which want every change once and in order. It keeps no record and never reads the
// ledger; whoever is notified reads that.
package events

import (
	"sync"

	"github.com/berth-sandbox/berth/daemon/store"
)

// maxQueued bounds the changes that a subscriber may be behind. At 64 bytes each a stalled one holds 256 KiB.
const maxQueued = 4096

// Key names a record.
type Key struct {
	Kind store.Kind
	ID   string
}

// Sandbox is the key of a sandbox's record.
func Sandbox(id string) Key { return Key{store.KindSandbox, id} }

// Machine is the key of a machine's record.
func Machine(id string) Key { return Key{store.KindMachine, id} }

// Job is the key of a job's record.
func Job(id string) Key { return Key{store.KindJob, id} }

// Operation is the key of an operation's record.
func Operation(id string) Key { return Key{store.KindOperation, id} }

// Hub passes commits on. Publish never blocks: it costs the ledger's writer a map lookup for each changed
// record and an append for each subscriber, however slow those are.
type Hub struct {
	mu          sync.Mutex
	waiters     map[Key]map[*Waiter]struct{}
	subscribers map[*Subscription]struct{}
}

// New returns a hub; hand its Publish to store.OnCommit before the first Update.
func New() *Hub {
	return &Hub{waiters: map[Key]map[*Waiter]struct{}{}, subscribers: map[*Subscription]struct{}{}}
}

// Publish passes a commit on.
func (h *Hub) Publish(commit store.Commit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, change := range commit.Changes {
		h.wake(Key{change.Kind, change.ID})
	}
	for subscription := range h.subscribers {
		subscription.add(commit)
	}
}

// Notify wakes who waits for a record although no commit has changed it; subscribers see nothing of it.
func (h *Hub) Notify(key Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wake(key)
}

func (h *Hub) wake(key Key) {
	for waiter := range h.waiters[key] {
		waiter.notify()
	}
}

// Waiter is woken when one of its records changes.
type Waiter struct {
	hub     *Hub
	keys    []Key
	changed chan struct{}
}

// Wait returns a waiter on records. Call it before reading them: then no change is missed. Close it.
func (h *Hub) Wait(keys ...Key) *Waiter {
	w := &Waiter{hub: h, keys: keys, changed: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, key := range keys {
		if h.waiters[key] == nil {
			h.waiters[key] = map[*Waiter]struct{}{}
		}
		h.waiters[key][w] = struct{}{}
	}
	return w
}

// Changed yields a value after each change, or one after several: read the records again.
func (w *Waiter) Changed() <-chan struct{} { return w.changed }

// Close ends the waiter.
func (w *Waiter) Close() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	for _, key := range w.keys {
		delete(w.hub.waiters[key], w)
		if len(w.hub.waiters[key]) == 0 {
			delete(w.hub.waiters, key)
		}
	}
}

func (w *Waiter) notify() {
	select {
	case w.changed <- struct{}{}:
	default: // the last one is not taken yet, and whoever takes it reads the newest record
	}
}

// Subscription yields every change that is committed after Subscribe, once and in order.
type Subscription struct {
	hub    *Hub
	filled chan struct{}

	mu     sync.Mutex
	queue  []store.Change
	missed bool
}

// Subscribe returns a subscription to all changes. Call it before reading a list: then list and changes
// together lack nothing. Close it.
func (h *Hub) Subscribe() *Subscription {
	s := &Subscription{hub: h, filled: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.subscribers[s] = struct{}{}
	return s
}

// Filled yields a value when there is something to Take.
func (s *Subscription) Filled() <-chan struct{} { return s.filled }

// Take returns the changes since the last Take. With missed, the subscriber was more than maxQueued
// behind: changes from before the returned ones were dropped, and it must list again.
func (s *Subscription) Take() (changes []store.Change, missed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changes, missed = s.queue, s.missed
	s.queue, s.missed = nil, false
	return changes, missed
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	delete(s.hub.subscribers, s)
}

func (s *Subscription) add(commit store.Commit) {
	if len(commit.Changes) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue)+len(commit.Changes) > maxQueued {
		s.queue, s.missed = nil, true
	}
	s.queue = append(s.queue, commit.Changes...)
	select {
	case s.filled <- struct{}{}:
	default:
	}
}
