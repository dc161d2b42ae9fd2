// Package buffer has the memory for output on its way: buffers as large as their content, and a budget that
// bounds the sum of what is sent to slow readers, however many there are. It knows no streams and no jobs.
package buffer

import (
	"context"
	"sync"
)

const (
	// Max is the size of the largest buffer, in bytes: the best chunk for throughput.
	Max = 256 << 10
	// minReserve is what a reader may have in flight whatever the others have, in bytes.
	minReserve = 16 << 10
	// overhead is what a chunk costs beside its bytes, in bytes: messages and queues of the transport, and the
	// 2 KiB that the transport needs for the smallest.
	overhead = 2560
)

// sizes are the sizes of the buffers, in bytes.
var sizes = [...]int{4 << 10, 16 << 10, 64 << 10, Max}

var pools [len(sizes)]sync.Pool

// Get returns a buffer of at least n bytes, or of Max. Put it back.
func Get(n int) *[]byte {
	class := 0
	for class < len(sizes)-1 && sizes[class] < n {
		class++
	}
	if b, ok := pools[class].Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, sizes[class])
	return &b
}

// Put returns a buffer that Get returned.
func Put(b *[]byte) {
	for class, size := range sizes {
		if len(*b) == size {
			pools[class].Put(b)
		}
	}
}

// Budget bounds what all its accounts have in flight together.
type Budget struct {
	mu   sync.Mutex
	free int
}

// NewBudget returns a budget of a number of bytes.
func NewBudget(bytes int) *Budget { return &Budget{free: bytes} }

// Account is the share of one reader.
type Account struct {
	budget *Budget

	// The budget's lock guards these.
	chunks  int           // in flight
	charged int           // what they took from the budget
	moved   chan struct{} // closed when a chunk is released, if the reader waits
	closed  bool
}

// Account returns a new account. Close it.
func (b *Budget) Account() *Account { return &Account{budget: b} }

// Reserve returns how much of a number of bytes may be put in flight now, which is never nothing. While the
// budget is exhausted, a reader waits until it has nothing in flight itself, and then gets a small amount: it
// depends on no other reader. release is called when the bytes are no longer in memory.
func (a *Account) Reserve(ctx context.Context, bytes int) (reserved int, release func(), err error) {
	b := a.budget
	b.mu.Lock()
	for {
		cost := bytes + overhead
		if b.free < cost && a.chunks == 0 {
			bytes, cost = min(bytes, minReserve), 0
		}
		if b.free >= cost || cost == 0 {
			b.free -= cost
			a.charged += cost
			a.chunks++
			b.mu.Unlock()
			return bytes, sync.OnceFunc(func() { a.release(cost) }), nil
		}
		if a.moved == nil {
			a.moved = make(chan struct{})
		}
		moved := a.moved
		b.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			return 0, nil, ctx.Err()
		}
		b.mu.Lock()
	}
}

func (a *Account) release(cost int) {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	if a.closed {
		return
	}
	a.budget.free += cost
	a.charged -= cost
	a.chunks--
	if a.moved != nil {
		close(a.moved)
		a.moved = nil
	}
}

// Close releases what is still in flight: a connection that breaks may never say that it is not.
func (a *Account) Close() {
	a.budget.mu.Lock()
	defer a.budget.mu.Unlock()
	a.budget.free += a.charged
	a.closed = true
}
