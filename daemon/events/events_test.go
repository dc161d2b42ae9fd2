package events_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newLedger returns a real ledger whose commits a hub passes on.
func newLedger(t *testing.T) (*store.Store, *events.Hub) {
	t.Helper()
	ledger, err := store.Open(filepath.Join(t.TempDir(), "ledger.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ledger.Close() })
	hub := events.New()
	ledger.OnCommit(hub.Publish)
	return ledger, hub
}

func put(ctx context.Context, ledger *store.Store, id string) error {
	return ledger.Update(ctx, func(tx *store.Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{Id: id, Namespace: "default", State: berthv1.SandboxState_SANDBOX_STATE_RUNNING}, "", "")
	})
}

func TestAWaiterIsWokenWithoutACommitWhenThatIsAskedFor(t *testing.T) {
	hub := events.New()
	waiter, changes := hub.Wait(events.Operation("op")), hub.Subscribe()
	defer waiter.Close()
	defer changes.Close()
	hub.Notify(events.Operation("other"))
	select {
	case <-waiter.Changed():
		t.Error("woken for another operation")
	default:
	}
	hub.Notify(events.Operation("op"))
	<-waiter.Changed()
	if got, _ := changes.Take(); len(got) > 0 {
		t.Errorf("a subscriber was told %v", got)
	}
}

func TestAWaiterIsWokenByItsRecordsAndByNoOthers(t *testing.T) {
	ledger, hub := newLedger(t)
	waiter := hub.Wait(events.Sandbox("sb_mine"), events.Job("job_mine"))
	defer waiter.Close()
	if err := put(t.Context(), ledger, "sb_other"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-waiter.Changed():
		t.Fatal("woken by another sandbox")
	default: // a commit notifies before it is answered
	}
	if err := put(t.Context(), ledger, "sb_mine"); err != nil {
		t.Fatal(err)
	}
	<-waiter.Changed()
}

func TestAClosedWaiterIsForgotten(t *testing.T) {
	ledger, hub := newLedger(t)
	waiter := hub.Wait(events.Sandbox("sb_1"))
	waiter.Close()
	if err := put(t.Context(), ledger, "sb_1"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-waiter.Changed():
		t.Error("a closed waiter was woken")
	default:
	}
}

// Writers race for commits while subscribers come and go; each must see exactly the revisions after its
// own beginning, in order.
func TestNoChangeIsLostDoubledOrReorderedUnderLoad(t *testing.T) {
	ledger, hub := newLedger(t)
	const writers, each, subscribers = 16, 60, 8
	var group sync.WaitGroup
	for range subscribers {
		group.Go(func() {
			subscription := hub.Subscribe()
			defer subscription.Close()
			var seen []uint64
			for len(seen) == 0 || seen[len(seen)-1] < writers*each {
				<-subscription.Filled()
				changes, missed := subscription.Take()
				if missed {
					t.Error("a subscriber that keeps up missed something")
				}
				for _, change := range changes {
					seen = append(seen, change.Revision)
				}
			}
			for i, revision := range seen {
				if revision != seen[0]+uint64(i) {
					t.Errorf("revision %d came %d after %d", revision, i, seen[0])
					return
				}
			}
		})
	}
	for w := range writers {
		group.Go(func() {
			for i := range each {
				if err := put(t.Context(), ledger, fmt.Sprintf("sb_%d_%d", w, i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
}

func TestEveryWaiterOfManySeesTheLastState(t *testing.T) {
	ledger, hub := newLedger(t)
	const waiters = 100
	var group sync.WaitGroup
	for i := range waiters {
		group.Go(func() {
			id := fmt.Sprintf("sb_%d", i%10)
			waiter := hub.Wait(events.Sandbox(id))
			defer waiter.Close()
			for {
				found := false
				err := ledger.View(func(tx *store.Tx) error {
					sandbox, err := tx.Sandbox(id)
					found = sandbox != nil
					return err
				})
				if err != nil {
					t.Error(err)
				}
				if found || err != nil {
					return
				}
				<-waiter.Changed() // a missed wake-up ends the test by its timeout
			}
		})
	}
	for i := range 10 {
		if err := put(t.Context(), ledger, fmt.Sprintf("sb_%d", i)); err != nil {
			t.Error(err)
		}
	}
	group.Wait()
}

func TestASlowSubscriberIsToldThatItMissedSomethingAndHoldsUpNobody(t *testing.T) {
	hub := events.New()
	slow, quick := hub.Subscribe(), hub.Subscribe()
	defer slow.Close()
	defer quick.Close()
	const total = 20_000
	var seen []uint64
	for revision := range uint64(total) {
		hub.Publish(store.Commit{Revision: revision, Changes: []store.Change{{Kind: store.KindJob, ID: "job_1", Revision: revision}}})
		<-quick.Filled()
		changes, _ := quick.Take()
		for _, change := range changes {
			seen = append(seen, change.Revision)
		}
	}
	if len(seen) != total || !slices.IsSorted(seen) {
		t.Errorf("the quick one saw %d changes of %d, sorted: %v", len(seen), total, slices.IsSorted(seen))
	}
	<-slow.Filled()
	changes, missed := slow.Take()
	if !missed || len(changes) == 0 || len(changes) > 4096 {
		t.Fatalf("the slow one got %d changes, missed: %v", len(changes), missed)
	}
	for i, change := range changes {
		if want := uint64(total - len(changes) + i); change.Revision != want {
			t.Fatalf("change %d is of revision %d, want %d: what follows a gap must have none", i, change.Revision, want)
		}
	}
	hub.Publish(store.Commit{Revision: total, Changes: []store.Change{{Kind: store.KindJob, ID: "job_1", Revision: total}}})
	if changes, missed := slow.Take(); missed || len(changes) != 1 {
		t.Errorf("after it caught up: %d changes, missed: %v", len(changes), missed)
	}
}

// BenchmarkPublish shows what a commit of one change costs with a thousand waiters on other records.
func BenchmarkPublish(b *testing.B) {
	hub := events.New()
	for i := range 1000 {
		waiter := hub.Wait(events.Job(fmt.Sprintf("job_%d", i)))
		defer waiter.Close()
	}
	commit := store.Commit{Changes: []store.Change{{Kind: store.KindJob, ID: "job_7", Revision: 1}}}
	b.ReportAllocs()
	for b.Loop() {
		hub.Publish(commit)
	}
}
