package local_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/providers"
)

// crash runs a broker that ends itself at a failpoint as kill -9 would.
func (y yard) crash(t *testing.T, verb, id, at string) {
	t.Helper()
	out, err := y.broker(t, programs.crasher, verb, id, "CRASH_AT="+at).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 137 {
		t.Fatalf("the broker did not reach %s: %v\n%s", at, err, out)
	}
}

func TestACrashWhileCreatingNeverBootsTwoAndLosesNone(t *testing.T) {
	for _, c := range []struct {
		at     string
		finds  []providers.MachineState // nothing: ErrNotFound
		guests int
	}{
		{"localBeforeDir", nil, 0},
		{"localAfterDir", []providers.MachineState{providers.MachinePartial}, 0},
		{"localBeforeSpawn", []providers.MachineState{providers.MachinePartial}, 0},
		{"localAfterSpawn", []providers.MachineState{providers.MachineRunning}, 1},
		{"localAfterRecord", []providers.MachineState{providers.MachineRunning}, 1},
	} {
		for _, then := range []string{"it is created again", "it is destroyed"} {
			t.Run(c.at+" and then "+then, func(t *testing.T) {
				eachMode(t, func(t *testing.T, y yard) {
					id := newID()
					y.crash(t, "create", id, c.at)
					p := y.provider(t)
					found, err := p.Inspect(t.Context(), id)
					switch {
					case c.finds == nil && !errors.Is(err, providers.ErrNotFound):
						t.Errorf("Inspect: %+v, %v, want ErrNotFound", found, err)
					case c.finds != nil && (err != nil || !slices.Contains(c.finds, found.State)):
						t.Errorf("Inspect: %v, %v, want %v", found.State, err, c.finds)
					}
					listed, err := p.List(t.Context())
					if err != nil || len(listed) != len(c.finds) {
						t.Errorf("List: %+v, %v", listed, err)
					}
					before := y.guests(t, id)
					if len(before) != c.guests {
						t.Errorf("guests %v, want %d", before, c.guests)
					}
					if then == "it is destroyed" {
						y.destroy(t, p, id)
						return
					}
					y.create(t, p, id)
					after := y.guests(t, id)
					if len(after) != 1 || c.guests == 1 && after[0] != before[0] {
						t.Errorf("guests %v before, %v after", before, after)
					}
					g := y.dial(t, p, id)
					if got := g.run(t, "printf %s hello"); got != "hello" {
						t.Errorf("a job says %q", got)
					}
					g.close()
					y.destroy(t, p, id)
				})
			})
		}
	}
}

func TestACrashWhileDestroyingIsFinishedByTheNextDestroy(t *testing.T) {
	for _, at := range []string{"localBeforeKill", "localAfterKill", "localBeforeRemove", "localAfterRemove"} {
		t.Run(at, func(t *testing.T) {
			eachMode(t, func(t *testing.T, y yard) {
				id := newID()
				broker := y.brokerUntilDone(t, "create", id)
				y.crash(t, "destroy", id, at)
				kill(t, broker)
				p := y.provider(t)
				found, err := p.Inspect(t.Context(), id)
				if at == "localAfterRemove" {
					if !errors.Is(err, providers.ErrNotFound) {
						t.Errorf("Inspect: %+v, %v", found, err)
					}
				} else {
					if err != nil || found.State != providers.MachinePartial {
						t.Errorf("Inspect: %v, %v, want half-made", found.State, err)
					}
					if listed, err := p.List(t.Context()); err != nil || len(listed) != 1 {
						t.Errorf("List: %+v, %v", listed, err)
					}
					if _, err := p.Create(t.Context(), y.spec(id)); !errors.Is(err, providers.ErrRefused) {
						t.Errorf("Create of a doomed machine: %v, want ErrRefused", err)
					}
					if _, err := p.Dialer(t.Context(), y.machine(id)); !errors.Is(err, providers.ErrRefused) {
						t.Errorf("Dialer of a doomed machine: %v, want ErrRefused", err)
					}
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
