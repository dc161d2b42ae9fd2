package fake

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"
	contract "github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
)

func TestMain(m *testing.M) { fixture.Main(m) }

const broker = contract.BrokerID

// open makes a provider over a directory of its own; what is left when the test ends is removed.
func open(t *testing.T) (*Provider, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "fk-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := At(filepath.Join(dir, "m")).Close(context.Background()); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return again(t, dir), dir
}

// again makes another provider over the same directory, as a broker does that is started again.
func again(t *testing.T, dir string) *Provider {
	t.Helper()
	p, err := New(Options{Dir: filepath.Join(dir, "m"), BrokerID: broker, Log: slog.New(slog.DiscardHandler), GuestPath: guestPath(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func guestPath(t testing.TB) func(string) (string, error) {
	guest := fixture.Guest(t)
	return func(string) (string, error) { return guest, nil }
}

func spec(dir, id string) providers.MachineSpec {
	return providers.MachineSpec{
		MachineID: id, BrokerID: broker, Generation: 1, Token: make([]byte, 32), ListenDir: filepath.Join(dir, "s", id),
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantState(t *testing.T, p *Provider, id string, want providers.MachineState) {
	t.Helper()
	found, err := p.Inspect(t.Context(), id)
	if err != nil || found.State != want {
		t.Fatalf("machine %s is %v (%v), want %v", id, found.State, err, want)
	}
}

func wantAbsent(t *testing.T, p *Provider, id string) {
	t.Helper()
	if found, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Fatalf("machine %s is %v (%v), want none", id, found.State, err)
	}
	if left, err := (&machine{dir: filepath.Join(p.harness.dir, id)}).members(); err != nil || len(left) > 0 {
		t.Fatalf("processes %v of machine %s are left (%v)", left, id, err)
	}
}

func wantBoots(t *testing.T, p *Provider, id string, want int) {
	t.Helper()
	if boots, err := p.Harness().Boots(id); err != nil || boots != want {
		t.Fatalf("machine %s was booted %d times (%v), want %d", id, boots, err, want)
	}
}

func TestEachFaultDoesWhatItsNameSays(t *testing.T) {
	unavailable := func(err error) bool {
		var u *providers.UnavailableError
		return errors.As(err, &u)
	}
	is := func(target error) func(error) bool { return func(err error) bool { return errors.Is(err, target) } }
	none := func(err error) bool { return err == nil }
	for _, test := range []struct {
		kind  Kind
		want  func(error) bool
		boots int // after the call
		calm  int // after a second call, which the script leaves alone
	}{
		{Refuse, is(providers.ErrRefused), 0, 1},
		{Capacity, is(providers.ErrCapacity), 0, 1},
		{Unavailable, unavailable, 0, 1},
		{Fail, func(err error) bool { return err != nil }, 0, 1},
		{Hang, is(context.DeadlineExceeded), 0, 1},
		{LoseReply, is(providers.ErrAmbiguous), 1, 1},
		{HangAfter, is(context.DeadlineExceeded), 1, 1},
		{Late, none, 1, 1},
		{Twice, none, 1, 1},
		{Kill, none, 1, 2},
		{Unresponsive, none, 1, 1},
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			p, dir := open(t)
			id := "m_x"
			must(t, p.Harness().Script(Fault{Call: CallCreate, Kind: test.kind, Times: 1, DelayMillis: 20}))
			limit := 5 * time.Second
			if test.kind == Hang || test.kind == HangAfter {
				limit = 300 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			begin := time.Now()
			_, err := p.Create(ctx, spec(dir, id))
			if !test.want(err) {
				t.Fatalf("the error is %v", err)
			}
			if test.kind == Late && time.Since(begin) < 20*time.Millisecond {
				t.Fatal("it was not late")
			}
			wantBoots(t, p, id, test.boots)
			_, err = p.Create(t.Context(), spec(dir, id))
			must(t, err)
			wantBoots(t, p, id, test.calm)
		})
	}
}

func TestAFaultStrikesItsMachineAndNoOther(t *testing.T) {
	p, dir := open(t)
	must(t, p.Harness().Script(Fault{Call: CallCreate, Machine: "m_a", Kind: Refuse}))
	if _, err := p.Create(t.Context(), spec(dir, "m_a")); !errors.Is(err, providers.ErrRefused) {
		t.Fatalf("the error is %v", err)
	}
	_, err := p.Create(t.Context(), spec(dir, "m_b"))
	must(t, err)
	must(t, p.Harness().Script())
	_, err = p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	if calls, err := p.Harness().Calls(CallCreate, "m_a"); err != nil || calls != 2 {
		t.Fatalf("%d calls (%v), want 2", calls, err)
	}
}

func TestAFaultIsCountedAcrossACrash(t *testing.T) {
	p, dir := open(t)
	must(t, p.Harness().Script(Fault{Call: CallInfo, Kind: Fail, Times: 2}))
	for i, provider := range []*Provider{p, again(t, dir), again(t, dir)} {
		if _, err := provider.Info(t.Context()); (err != nil) != (i < 2) {
			t.Fatalf("call %d: %v", i, err)
		}
	}
}

func TestTwiceBringsBackAMachineThatWasDestroyedMeanwhile(t *testing.T) {
	p, dir := open(t)
	must(t, p.Harness().Script(Fault{Call: CallCreate, Kind: Twice, Times: 1, DelayMillis: 300}))
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	must(t, p.Destroy(t.Context(), providers.Machine{ID: "m_a"}))
	must(t, await(t.Context(), 5*time.Second, "the machine", func() (bool, error) {
		_, err := p.Inspect(t.Context(), "m_a")
		return err == nil, nil
	}))
}

func TestAStaleListIsTheLastOne(t *testing.T) {
	p, dir := open(t)
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	first, err := p.List(t.Context())
	must(t, err)
	must(t, p.Harness().Script(Fault{Call: CallList, Kind: Stale, Times: 1}))
	_, err = p.Create(t.Context(), spec(dir, "m_b"))
	must(t, err)
	stale, err := p.List(t.Context())
	must(t, err)
	fresh, err := p.List(t.Context())
	must(t, err)
	if len(first) != 1 || len(stale) != 1 || stale[0].ID != "m_a" || len(fresh) != 2 {
		t.Fatalf("first %v, stale %v, fresh %v", first, stale, fresh)
	}
}

func TestAMuteGuestIsStoppedAndWakes(t *testing.T) {
	p, dir := open(t)
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	must(t, p.Harness().Freeze("m_a"))
	wantState(t, p, "m_a", providers.MachineRunning)
	must(t, p.Harness().Thaw("m_a"))
	must(t, p.Harness().Freeze("m_a"))
	must(t, p.Destroy(t.Context(), providers.Machine{ID: "m_a", ListenDir: filepath.Join(dir, "s", "m_a")}))
	wantAbsent(t, p, "m_a")
}

func TestVanishLeavesNothing(t *testing.T) {
	p, dir := open(t)
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	must(t, p.Harness().Script(Fault{Call: CallInspect, Kind: Vanish, Times: 1}))
	wantAbsent(t, p, "m_a")
}

func TestAHalfDestroyedMachineIsFoundAndFinished(t *testing.T) {
	p, dir := open(t)
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	m, err := p.Harness().machine("m_a")
	must(t, err)
	must(t, appendLine(m.path(terminatingFile), ""))
	wantState(t, p, "m_a", providers.MachinePartial)
	if _, err := p.Create(t.Context(), spec(dir, "m_a")); !errors.Is(err, providers.ErrRefused) {
		t.Fatalf("a machine that is to be destroyed was booted: %v", err)
	}
	must(t, p.Harness().Kill(t.Context(), "m_a"))
	must(t, os.Rename(m.dir, p.Harness().gone("m_a")))
	wantState(t, p, "m_a", providers.MachinePartial)
	listed, err := p.List(t.Context())
	if err != nil || len(listed) != 1 || listed[0].ID != "m_a" {
		t.Fatalf("it is listed as %v (%v)", listed, err)
	}
	must(t, p.Destroy(t.Context(), providers.Machine{ID: "m_a"}))
	wantAbsent(t, p, "m_a")
}

func TestAMachineThatACrashLeftHalfMadeIsRemovedAtTheNextStart(t *testing.T) {
	p, dir := open(t)
	must(t, p.Close())
	must(t, os.Mkdir(filepath.Join(dir, "m", newPrefix+"123"), 0o700))
	p = again(t, dir)
	if left, err := p.Harness().Machines(); err != nil || len(left) > 0 {
		t.Fatalf("machines %v are left (%v)", left, err)
	}
}

func TestAMachineWhoseBrokerWasKilledRightAfterItsBootIsStoppedAndNotHalfMade(t *testing.T) {
	p, dir := open(t)
	const id = "m_1"
	_, err := p.Create(t.Context(), spec(dir, id))
	must(t, err)
	must(t, os.Remove(filepath.Join(dir, "m", id, bootsFile))) // it was not noted yet
	must(t, p.Harness().Kill(t.Context(), id))
	wantState(t, p, id, providers.MachineStopped)
}
