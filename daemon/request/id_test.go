package request

import (
	"crypto/rand"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
)

func TestIDsSortInTheOrderInWhichTheyWereMade(t *testing.T) {
	const hour = uint64(time.Hour / time.Millisecond)
	made := ids{entropy: ulid.Monotonic(rand.Reader, 0)}
	now := ulid.Now()
	last := made.next(now)
	for _, at := range []uint64{now, now + 1, now + 1, now - hour, now - hour, now, now + 2, now - 23*hour, now + hour} {
		id := made.next(at)
		if id.Compare(last) <= 0 {
			t.Fatalf("the id made at %d sorts before the one before it", at)
		}
		last = id
	}
	if id := made.next(now - 48*hour); id.Time() != now-48*hour {
		t.Errorf("behind a clock that had been days ahead an id is of %d, want %d", id.Time(), now-48*hour)
	}
}
