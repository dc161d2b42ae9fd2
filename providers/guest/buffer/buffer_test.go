package buffer

import (
	"context"
	"errors"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestABufferIsAsLargeAsItsContent(t *testing.T) {
	for want, size := range map[int]int{0: 4 << 10, 1: 4 << 10, 4 << 10: 4 << 10, 4<<10 + 1: 16 << 10, 64 << 10: 64 << 10, Max: Max, 1 << 30: Max} {
		b := Get(want)
		if len(*b) != size {
			t.Errorf("for %d bytes a buffer of %d, want %d", want, len(*b), size)
		}
		Put(b)
	}
}

func TestReadersThatMakeNoProgressTakeTheBudgetAndNoMore(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	const all = 1 << 20
	budget := NewBudget(all)
	total := 0
	accounts := make([]*Account, 100)
	for i := range accounts {
		accounts[i] = budget.Account()
		for { // as long as it gets something without waiting
			n, _, err := accounts[i].Reserve(ended, Max)
			if errors.Is(err, context.Canceled) {
				break
			}
			total += n
		}
	}
	if most := all + len(accounts)*minReserve; total > most || total < all/2 {
		t.Errorf("%d bytes are in flight, want at most %d", total, most)
	}
	// One that does make progress depends on none of the others.
	quick := budget.Account()
	for range 1000 {
		n, release, err := quick.Reserve(ended, Max)
		if err != nil || n == 0 {
			t.Fatalf("a reader with nothing in flight gets %d bytes, %v", n, err)
		}
		release()
		release() // once more changes nothing
	}
	for _, a := range append(accounts, quick) {
		a.Close()
	}
	if budget.free != all {
		t.Errorf("%d bytes are free in the end, want %d", budget.free, all)
	}
}

func TestAReaderGoesOnWhenAChunkOfItsOwnWasSent(t *testing.T) {
	budget := NewBudget(Max + overhead)
	a := budget.Account()
	defer a.Close()
	_, release, err := a.Reserve(t.Context(), Max)
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan int)
	go func() {
		n, _, _ := a.Reserve(context.Background(), Max)
		got <- n
	}()
	release()
	if n := <-got; n != Max {
		t.Errorf("got %d bytes, want %d", n, Max)
	}
}
