package local_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
)

func TestAMachineWhoseDestroyWasBegunIsNotBootedAgain(t *testing.T) {
	for _, at := range []string{"localBeforeKill", "localAfterKill", "localBeforeRemove"} {
		t.Run(at, func(t *testing.T) {
			eachMode(t, func(t *testing.T, y yard) {
				p, id := y.provider(t), newID()
				y.create(t, p, id)
				if !y.crash(t, provider.Destroy, y.spec(id), at) {
					t.Fatalf("the broker did not reach %s", at)
				}
				if got := state(t, p, id); got != providers.MachinePartial {
					t.Errorf("it is %v", got)
				}
				if _, err := p.Create(t.Context(), y.spec(id)); !errors.Is(err, providers.ErrRefused) {
					t.Errorf("Create: %v, want ErrRefused", err)
				}
				if _, err := p.Dialer(t.Context(), y.machine(id)); !errors.Is(err, providers.ErrRefused) {
					t.Errorf("Dialer: %v, want ErrRefused", err)
				}
				y.destroy(t, p, id)
			})
		})
	}
}

func TestADirectoryHalfMadeOrHalfRemovedIsFound(t *testing.T) {
	for _, prefix := range []string{".new-", ".gone-"} {
		y := newYard(t, "")
		p, id := y.provider(t), newID()
		if err := os.MkdirAll(y.dir+"/"+prefix+id+"/workspace/deep", 0o700); err != nil {
			t.Fatal(err)
		}
		if got := state(t, p, id); got != providers.MachinePartial {
			t.Errorf("%s: Inspect says %v", prefix, got)
		}
		if listed, err := p.List(t.Context()); err != nil || len(listed) != 1 || listed[0].ID != id {
			t.Errorf("%s: List says %+v, %v", prefix, listed, err)
		}
		y.destroy(t, p, id)
	}
}

func TestABrokerKilledAtAnyMomentLeavesOneGuestOrNone(t *testing.T) {
	rounds := 50
	if testing.Short() {
		rounds = 10
	}
	eachMode(t, func(t *testing.T, y yard) {
		p := y.provider(t)
		outcomes := map[string]int{}
		for round := range rounds {
			id := newID()
			broker := y.broker(t, programs.creator, "create", id)
			if err := broker.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(rand.Int64N(int64(25 * time.Millisecond))))
			kill(t, broker)
			eventually(t, "what the broker forked to probe the host has ended", func() bool {
				return len(processesNamed(t, "\x00"+id+"\x00")) == 0
			})
			found, err := p.Inspect(t.Context(), id)
			switch {
			case errors.Is(err, providers.ErrNotFound):
				outcomes["nothing"]++
			case err != nil:
				t.Fatal(err)
			default:
				outcomes[found.State.String()]++
			}
			if round%2 == 0 {
				if _, err := p.Create(t.Context(), y.spec(id)); err != nil {
					t.Fatalf("round %d: %v", round, err)
				}
				if got := y.guests(t, id); len(got) != 1 {
					t.Errorf("round %d: guests %v", round, got)
				}
			} else if got := y.guests(t, id); len(got) > 1 {
				t.Errorf("round %d: guests %v", round, got)
			}
			y.destroy(t, p, id)
		}
		t.Logf("found after %d kills: %v", rounds, outcomes)
	})
}

func TestADestroyKilledAtAnyMomentIsFinishedByTheNext(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p := y.provider(t)
		for range 10 {
			id := newID()
			if _, err := p.Create(t.Context(), y.spec(id)); err != nil {
				t.Fatal(err)
			}
			broker := y.broker(t, programs.creator, "destroy", id)
			if err := broker.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(rand.Int64N(int64(25 * time.Millisecond))))
			kill(t, broker)
			y.destroy(t, p, id)
		}
	})
}

func TestADestroyThatIsCancelledIsFinishedByTheNext(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := p.Destroy(ctx, y.machine(id)); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		} else if err != nil && !strings.Contains(err.Error(), id) {
			t.Errorf("%q does not name the machine", err)
		}
		y.destroy(t, p, id)
	})
}
