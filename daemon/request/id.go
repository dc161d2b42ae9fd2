package request

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
)

// maxStepBack is the longest step back of the wall clock that ids bridge. Behind one that is longer the clock
// had been wrong, and its time is not to be in ids for ever.
const maxStepBack = 24 * time.Hour

// ids makes ids that sort in the order in which this process made them, also where the wall clock is
// stepped back meanwhile: lists are in the order of ids.
type ids struct {
	mu      sync.Mutex
	latest  uint64 // milliseconds since 1970 in the id made last
	entropy *ulid.MonotonicEntropy
}

var made = ids{entropy: ulid.Monotonic(rand.Reader, 0)}

// NewID makes an id of a kind: its prefix, and a ULID.
func NewID(prefix string) string { return prefix + "_" + made.next(ulid.Now()).String() }

func (i *ids) next(now uint64) ulid.ULID {
	i.mu.Lock()
	defer i.mu.Unlock()
	if now > i.latest || i.latest-now > uint64(maxStepBack.Milliseconds()) {
		i.latest = now
	}
	id, err := ulid.New(i.latest, i.entropy)
	if err != nil { // no more ids fit behind the last one in its millisecond
		i.latest++
		id = ulid.MustNew(i.latest, i.entropy)
	}
	return id
}
