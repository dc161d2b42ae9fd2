package lifecycle

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

const (
	running   = berthv1.SandboxState_SANDBOX_STATE_RUNNING
	stopped   = berthv1.SandboxState_SANDBOX_STATE_STOPPED
	failed    = berthv1.SandboxState_SANDBOX_STATE_FAILED
	destroyed = berthv1.SandboxState_SANDBOX_STATE_DESTROYED
)

func TestACreateTakesEachAnswerOfItsProviderForWhatItIs(t *testing.T) {
	for _, test := range []struct {
		name   string
		faults []fake.Fault
		reason fault.Reason // empty: it runs
		boots  int
	}{
		{"a reply that was lost", []fake.Fault{{Call: fake.CallCreate, Kind: fake.LoseReply, Times: 1}}, "", 1},
		{"replies that are lost again and again", []fake.Fault{{Call: fake.CallCreate, Kind: fake.LoseReply, Times: 3}}, "", 1},
		{"a late reply", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Late, DelayMillis: 100}}, "", 1},
		{"an act that is done twice", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Twice, DelayMillis: 10}}, "", 1},
		{"unavailable for a while", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Unavailable, Times: 2}}, "", 1},
		{"an error of no known kind", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Fail, Times: 2}}, "", 1},
		{"no dialer for a while", []fake.Fault{{Call: fake.CallDialer, Kind: fake.Unavailable, Times: 2}}, "", 1},
		{"no word on itself at the end", []fake.Fault{{Call: fake.CallDialer, Kind: fake.Refuse, Times: 2}}, "", 1},
		{"a machine that stops once while it is set up", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Kill, Times: 1}}, "", 2},
		{"a refusal", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Refuse}}, fault.ProviderRefused, 0},
		{"a refusal after an ambiguous answer", []fake.Fault{
			{Call: fake.CallCreate, Kind: fake.LoseReply, Times: 1}, {Call: fake.CallCreate, Kind: fake.Refuse},
		}, fault.ProviderRefused, 0},
		{"no capacity", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Capacity}}, fault.QuotaExceeded, 0},
		{"a machine that stops each time", []fake.Fault{{Call: fake.CallCreate, Kind: fake.Kill}}, fault.ProviderRefused, 0},
		{"a machine that vanishes before its guest answered", []fake.Fault{
			{Call: fake.CallCreate, Kind: fake.Unresponsive}, {Call: fake.CallInspect, Kind: fake.Vanish, Times: 1},
		}, fault.MachineGone, 0},
		{"a refusal, and a destroy that fails at first", []fake.Fault{
			{Call: fake.CallCreate, Kind: fake.LoseReply, Times: 1}, {Call: fake.CallCreate, Kind: fake.Refuse},
			{Call: fake.CallDestroy, Kind: fake.Unavailable, Times: 1}, {Call: fake.CallDestroy, Kind: fake.LoseReply, Times: 1},
		}, fault.ProviderRefused, 0},
		{"a refusal in too many words, cut in the middle of a letter", []fake.Fault{
			{Call: fake.CallCreate, Kind: fake.Refuse, Message: "x" + strings.Repeat("ü", 3000)},
		}, fault.ProviderRefused, 0},
		{"a refusal in too many words, cut there one byte further", []fake.Fault{
			{Call: fake.CallCreate, Kind: fake.Refuse, Message: strings.Repeat("ü", 3000)},
		}, fault.ProviderRefused, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			w.script(test.faults...)
			sandbox, err := w.create("c")
			if test.reason == "" {
				must(t, err)
				w.wantState(running)
				w.wantBoots(test.boots)
				if sandbox.GetGeneration() != 1 || sandbox.GetWorkspacePath() == "" || sandbox.GetLastError() != nil || w.operation() != nil {
					t.Errorf("the sandbox is %v, and its operation %v", sandbox, w.operation())
				}
				return
			}
			if !fault.Is(err, test.reason) {
				t.Fatalf("the error is %v, want %s", err, test.reason)
			}
			w.wantState(failed)
			w.wantNothing()
			w.script()
			if again, err := w.Create(w.ctx, call("create", "other"), &berthv1.SandboxSpec{SessionKey: "the-session"}); err != nil || again.GetState() != running {
				t.Errorf("the session key cannot be used again: %v (%v)", again, err)
			}
		})
	}
}

func TestADestroyIsNeverGivenUp(t *testing.T) {
	for _, kind := range []fake.Kind{
		fake.Refuse, fake.Capacity, fake.Unavailable, fake.Fail, fake.LoseReply, fake.Late, fake.Twice, fake.Vanish,
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.created()
			w.script(fake.Fault{Call: fake.CallDestroy, Kind: kind, Times: 2, DelayMillis: 20})
			_, err := w.Destroy(w.ctx, call("destroy", "d"), sandbox.GetId())
			must(t, err)
			w.wantState(destroyed)
			w.wantNothing()
			if w.terminated.Load() != 1 {
				t.Errorf("jobs were terminated %d times", w.terminated.Load())
			}
		})
	}
	t.Run("an unresponsive guest", func(t *testing.T) {
		t.Parallel()
		w := newHarness(t)
		sandbox := w.created()
		must(t, w.fake.Harness().Freeze(sandbox.GetMachineId()))
		_, err := w.Destroy(w.ctx, call("destroy", "d"), sandbox.GetId())
		must(t, err)
		w.wantNothing()
	})
}

func TestAResumeTakesEachAnswerOfItsProviderForWhatItIs(t *testing.T) {
	for _, test := range []struct {
		kind   fake.Kind
		times  int
		reason fault.Reason // empty: it runs
		boots  int
	}{
		{fake.LoseReply, 2, "", 2},
		{fake.Unavailable, 2, "", 2},
		{fake.Fail, 1, "", 2},
		{fake.Twice, 1, "", 2},
		{fake.Kill, 1, "", 3},
		{fake.Refuse, 0, fault.ProviderRefused, 1},
		{fake.Capacity, 0, fault.QuotaExceeded, 1},
		{fake.Kill, 0, fault.ProviderRefused, 4}, // each time: it is stopped, and can be resumed all the same
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.stopped()
			w.script(fake.Fault{Call: fake.CallCreate, Kind: test.kind, Times: test.times})
			resumed, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
			if test.reason != "" {
				if !fault.Is(err, test.reason) {
					t.Fatalf("the error is %v, want %s", err, test.reason)
				}
				w.wantState(stopped) // its disk is there
				w.wantBoots(test.boots)
				w.script()
				if resumed, err = w.Resume(w.ctx, call("resume", "r2"), sandbox.GetId()); err != nil {
					t.Fatalf("resume it again: %v", err)
				}
				test.boots++
			}
			must(t, err)
			w.wantState(running)
			w.wantBoots(test.boots)
			if resumed.GetGeneration() != 2 {
				t.Errorf("it is in generation %d, want 2", resumed.GetGeneration())
			}
		})
	}
}

// crash is a moment in an operation at which the service is ended, and what to do before it is begun
// again.
type crash struct {
	name    string
	arrange func(*harness)
	reached func(*harness) bool
	calm    func(*harness)
}

// hangUntilEnd blocks a hook until the service ends.
func hangUntilEnd(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

var bootCrashes = []crash{
	{"before the machine is booted",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Hang}) },
		func(w *harness) bool { return w.step() == "boot" && w.calls(fake.CallCreate) > w.before }, nil},
	{"after it was booted, before that is recorded",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.HangAfter}) },
		func(w *harness) bool { return w.step() == "boot" && w.boots() > w.before }, nil},
	{"before its guest has answered",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unresponsive}) },
		func(w *harness) bool { return w.step() == "connect" },
		func(w *harness) { must(w.t, w.fake.Harness().Thaw(w.only().GetMachineId())) }},
}

func (w *harness) step() string { return w.operation().GetStep() }

func TestACreateGoesOnAfterACrashAtEachStep(t *testing.T) {
	for _, test := range append([]crash{
		{"while the workspace is prepared",
			func(w *harness) { w.setHooks(hangUntilEnd, nil) },
			func(w *harness) bool { return w.prepared.Load() == 1 },
			func(w *harness) { w.setHooks(nil, nil) }},
		{"before it is ready",
			func(w *harness) {
				w.setHooks(func(context.Context) error {
					return w.fake.Harness().Script(fake.Fault{Call: fake.CallInfo, Kind: fake.Hang})
				}, nil)
			},
			func(w *harness) bool { return w.step() == "ready" && w.calls(fake.CallInfo) > 1 }, nil},
	}, bootCrashes...) {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			test.arrange(w)
			first := make(chan error, 1)
			go func() {
				_, err := w.create("c")
				first <- err
			}()
			w.wait("the moment of the crash", func() bool { return test.reached(w) })
			w.stop()
			if err := <-first; !fault.Is(err, fault.Stopping) {
				t.Errorf("the caller was told %v", err)
			}
			w.restart(test.calm)
			sandbox := w.created() // the same request joins
			w.wantState(running)
			w.wantBoots(1)
			if machines, err := w.fake.Harness().Machines(); err != nil || len(machines) != 1 {
				t.Errorf("machines %v (%v)", machines, err)
			}
			if sandbox.GetGeneration() != 1 {
				t.Errorf("it is in generation %d", sandbox.GetGeneration())
			}
		})
	}
}

// restart begins the service again, without faults.
func (w *harness) restart(calm func(*harness)) {
	w.t.Helper()
	w.script()
	if calm != nil {
		calm(w)
	}
	w.start()
	must(w.t, w.ResumeOperations())
}

func TestAResumeGoesOnAfterACrashAtEachStep(t *testing.T) {
	for _, test := range bootCrashes {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			w.stopped()
			w.before = 1
			test.arrange(w)
			first := make(chan error, 1)
			go func() {
				_, err := w.Resume(w.ctx, call("resume", "r"), w.only().GetId())
				first <- err
			}()
			w.wait("the moment of the crash", func() bool { return test.reached(w) })
			w.stop()
			if err := <-first; !fault.Is(err, fault.Stopping) {
				t.Errorf("the caller was told %v", err)
			}
			w.restart(test.calm)
			sandbox, err := w.Resume(w.ctx, call("resume", "r"), w.only().GetId())
			must(t, err)
			w.wantBoots(2)
			if sandbox.GetGeneration() != 2 {
				t.Errorf("it is in generation %d, want 2", sandbox.GetGeneration())
			}
		})
	}
}

var destroyCrashes = []crash{
	{"before the machine is destroyed",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallDestroy, Kind: fake.Hang}) },
		func(w *harness) bool { return w.calls(fake.CallDestroy) == 1 }, nil},
	{"after it was destroyed, before that is recorded",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallDestroy, Kind: fake.HangAfter}) },
		func(w *harness) bool {
			machines, err := w.fake.Harness().Machines()
			return err == nil && len(machines) == 0 && w.calls(fake.CallDestroy) == 1
		}, nil},
	{"before it is known to be gone",
		func(w *harness) { w.script(fake.Fault{Call: fake.CallInspect, Kind: fake.Hang}) },
		func(w *harness) bool { return w.calls(fake.CallInspect) > 0 && w.calls(fake.CallDestroy) == 1 }, nil},
}

func TestADestroyGoesOnAfterACrashAtEachStep(t *testing.T) {
	for _, test := range append([]crash{
		{"while its jobs are terminated",
			func(w *harness) { w.setHooks(nil, func(ctx context.Context) { <-ctx.Done() }) },
			func(w *harness) bool { return w.terminated.Load() == 1 },
			func(w *harness) { w.setHooks(nil, nil) }},
	}, destroyCrashes...) {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			id := w.created().GetId()
			test.arrange(w)
			first := make(chan error, 1)
			go func() {
				_, err := w.Destroy(w.ctx, call("destroy", "d"), id)
				first <- err
			}()
			w.wait("the moment of the crash", func() bool { return test.reached(w) })
			w.stop()
			if err := <-first; !fault.Is(err, fault.Stopping) {
				t.Errorf("the caller was told %v", err)
			}
			w.restart(test.calm)
			_, err := w.Destroy(w.ctx, call("destroy", "d"), id)
			must(t, err)
			w.wantState(destroyed)
			w.wantNothing()
		})
	}
}

func TestAFailedCreateIsUndoneAfterACrashAtEachStep(t *testing.T) {
	for _, test := range destroyCrashes[:2] { // who undoes it looks at the machine beforehand, too
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			cause := fault.New(fault.WorkspaceFailed, "no such repository")
			w.setHooks(func(context.Context) error { test.arrange(w); return cause }, nil)
			first := make(chan error, 1)
			go func() {
				_, err := w.create("c")
				first <- err
			}()
			w.wait("the moment of the crash", func() bool { return test.reached(w) })
			w.stop()
			if err := <-first; !fault.Is(err, fault.Stopping) {
				t.Errorf("the caller was told %v", err)
			}
			w.restart(test.calm)
			if _, err := w.create("c"); !fault.Is(err, fault.WorkspaceFailed) {
				t.Errorf("the error is %v", err)
			}
			w.wantState(failed)
			w.wantNothing()
		})
	}
}

func TestAMachineThatVanishesWhileItsWorkspaceIsPreparedFailsItsCreateAtOnce(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.setHooks(func(ctx context.Context) error {
		return errors.Join(w.fake.Harness().Vanish(ctx, w.only().GetMachineId()), errors.New("the connection was lost"))
	}, nil)
	if _, err := w.create("c"); !fault.Is(err, fault.MachineGone) {
		t.Fatalf("the error is %v", err)
	}
	w.wantNothing()
}

// halfDestroy leaves of the only machine what a provider does that is killed in the middle of a destroy.
func (w *harness) halfDestroy(ctx context.Context) error {
	id := w.only().GetMachineId()
	if err := os.WriteFile(filepath.Join(w.dir, "m", id, "doomed"), nil, 0o600); err != nil {
		return err
	}
	return w.fake.Harness().Kill(ctx, id)
}

func TestAMachineThatIsHalfDestroyedWhileItIsSetUpFailsItsCreateAtOnce(t *testing.T) {
	t.Run("its workspace is prepared", func(t *testing.T) {
		t.Parallel()
		w := newHarness(t)
		w.setHooks(func(ctx context.Context) error {
			return errors.Join(w.halfDestroy(ctx), errors.New("the connection was lost"))
		}, nil)
		if _, err := w.create("c"); !fault.Is(err, fault.MachineGone) {
			t.Fatalf("the error is %v", err)
		}
		w.wantNothing()
	})
	t.Run("its guest is waited for", func(t *testing.T) {
		t.Parallel()
		w := newHarness(t)
		w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unresponsive})
		answer := make(chan error, 1)
		go func() {
			_, err := w.create("c")
			answer <- err
		}()
		w.wait("the machine to boot", func() bool { op := w.operation(); return op != nil && op.GetStep() == "connect" })
		must(t, w.halfDestroy(w.ctx))
		select {
		case err := <-answer:
			if !fault.Is(err, fault.MachineGone) {
				t.Fatalf("the error is %v", err)
			}
		case <-time.After(soon):
			t.Fatalf("it is still waited for after %s", soon)
		}
		w.wantNothing()
	})
}

func TestADestroySupersedesWhatIsInProgress(t *testing.T) {
	for _, test := range append([]crash{
		{"a create that prepares its workspace", func(w *harness) { w.setHooks(hangUntilEnd, nil) },
			func(w *harness) bool { return w.prepared.Load() == 1 }, nil},
		{"a create whose provider is unavailable",
			func(w *harness) { w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unavailable}) },
			func(w *harness) bool { return w.operation().GetAttempts() > 1 }, nil},
	}, bootCrashes...) {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			test.arrange(w)
			first := make(chan error, 1)
			go func() {
				_, err := w.create("c")
				first <- err
			}()
			w.wait("the moment of the destroy", func() bool { return test.reached(w) })
			_, err := w.Destroy(w.ctx, call("destroy", "d"), w.only().GetId())
			must(t, err)
			if err := <-first; !fault.Is(err, fault.WrongState) {
				t.Errorf("the caller of the create was told %v", err)
			}
			w.wantState(destroyed)
			w.wantNothing()
		})
	}
	for _, test := range bootCrashes {
		t.Run("a resume, "+test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			id := w.stopped().GetId()
			w.before = 1
			test.arrange(w)
			first := make(chan error, 1)
			go func() {
				_, err := w.Resume(w.ctx, call("resume", "r"), id)
				first <- err
			}()
			w.wait("the moment of the destroy", func() bool { return test.reached(w) })
			_, err := w.Destroy(w.ctx, call("destroy", "d"), id)
			must(t, err)
			if err := <-first; !fault.Is(err, fault.WrongState) {
				t.Errorf("the caller of the resume was told %v", err)
			}
			w.wantNothing()
		})
	}
}

func TestAnUnknownStepBlocksLoudlyAndCanStillBeDestroyed(t *testing.T) {
	for name, kind := range map[string]recordv1.OperationKind{
		"of a kind that is known": recordv1.OperationKind_OPERATION_KIND_CREATE, "of a kind that only a newer build knows": 99,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			unknownStep(t, kind)
		})
	}
}

func unknownStep(t *testing.T, kind recordv1.OperationKind) {
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Hang})
	go func() { _, _ = w.create("c") }()
	w.wait("the boot", func() bool { return w.calls(fake.CallCreate) == 1 })
	w.stop()
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		operation := w.operation()
		operation.Kind, operation.Step = kind, "teleport"
		return tx.PutOperation(operation)
	}))
	w.restart(nil)
	if _, err := w.create("c"); !fault.Is(err, fault.Internal) || !strings.Contains(err.Error(), "teleport") {
		t.Fatalf("the caller was told %v", err)
	}
	w.wait("the sandbox to say so", func() bool { return strings.Contains(w.only().GetLastError().GetMessage(), "teleport") })
	w.wantState(berthv1.SandboxState_SANDBOX_STATE_CREATING)
	if !strings.Contains(w.log.String(), "level=ERROR msg=\"blocked") {
		t.Error("nothing was logged as an error")
	}
	if w.calls(fake.CallCreate) != 1 || w.step() != "teleport" {
		t.Error("the step was skipped or taken for another")
	}
	_, err := w.Destroy(w.ctx, call("destroy", "d"), w.only().GetId())
	must(t, err)
	w.wantNothing()
}

func TestFiftyCallersOfOneRequestShareOneSandbox(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.LoseReply, Times: 1})
	ids := make(chan string, 50)
	var group sync.WaitGroup
	for range cap(ids) {
		group.Go(func() {
			sandbox, err := w.create("c")
			if err != nil {
				t.Errorf("create: %v", err)
			}
			ids <- sandbox.GetId()
		})
	}
	group.Wait()
	close(ids)
	want := w.only().GetId()
	for id := range ids {
		if id != want {
			t.Errorf("a caller got sandbox %q, another %q", id, want)
		}
	}
	w.wantBoots(1)
	other := call("create", "c")
	other.BodyHash = []byte("another body")
	if _, err := w.Create(w.ctx, other, &berthv1.SandboxSpec{}); !fault.Is(err, fault.RequestIDReused) {
		t.Errorf("the same id with another body: %v", err)
	}
	if _, err := w.create("another"); !fault.Is(err, fault.SessionKeyInUse) {
		t.Errorf("the session key of another sandbox: %v", err)
	}
	for range cap(ids) {
		group.Go(func() {
			if _, err := w.Destroy(w.ctx, call("destroy", "d"), want); err != nil {
				t.Errorf("destroy: %v", err)
			}
		})
	}
	group.Wait()
	w.wantNothing()
	if calls := w.calls(fake.CallDestroy); calls != 1 {
		t.Errorf("the provider was told %d times to destroy", calls)
	}
}

func TestARequestIDBelongsToOneBody(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	first, err := w.Create(w.ctx, call("create", "r"), &berthv1.SandboxSpec{})
	must(t, err)
	for _, test := range []struct {
		name string
		harm func(*request.Call)
	}{
		{"another body", func(c *request.Call) { c.BodyHash = []byte("another") }},
		{"another call", func(c *request.Call) { c.Method = "another" }},
		{"another way to hash", func(c *request.Call) { c.HashVersion++ }},
	} {
		again := call("create", "r")
		test.harm(&again)
		if made, err := w.Create(w.ctx, again, &berthv1.SandboxSpec{}); !fault.Is(err, fault.RequestIDReused) {
			t.Errorf("%s: %v (%v), want REQUEST_ID_REUSED", test.name, made.GetId(), err)
		}
	}
	if again, err := w.Create(w.ctx, call("create", "r"), &berthv1.SandboxSpec{}); err != nil || again.GetId() != first.GetId() {
		t.Errorf("the same body: %v (%v), want %s", again.GetId(), err, first.GetId())
	}
}

func TestACallerThatGoesAwayLeavesTheOperationGoingOn(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Late, DelayMillis: 300})
	ctx, cancel := context.WithTimeout(w.ctx, 50*time.Millisecond)
	defer cancel()
	_, err := w.Create(ctx, call("create", "c"), &berthv1.SandboxSpec{})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the error is %v", err)
	}
	w.wait("the sandbox", func() bool { return w.only().GetState() == running })
	w.wantBoots(1)
}

func TestACreateIsGivenUpWhenItsProviderStaysAway(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unavailable})
	done := make(chan error, 1)
	go func() {
		_, err := w.create("c")
		done <- err
	}()
	w.wait("some attempts", func() bool { return w.operation().GetAttempts() > 1 })
	if w.only().GetState() != berthv1.SandboxState_SANDBOX_STATE_CREATING {
		t.Error("it was given up too early")
	}
	w.ahead.Store(int64(time.Hour))
	if err := <-done; !fault.Is(err, fault.ProviderUnavailable) {
		t.Errorf("the error is %v", err)
	}
	w.wantState(failed)
	w.wantNothing()
}

func TestAnUnhealthyProviderIsRefusedBeforeAnythingIsMade(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallInfo, Kind: fake.Fail})
	if _, err := w.create("c"); !fault.Is(err, fault.ProviderUnavailable) {
		t.Errorf("the error is %v", err)
	}
	w.script()
	for name, spec := range map[string]*berthv1.SandboxSpec{
		"an image":             {Image: "alpine"},
		"a workspace's path":   {Workspace: &berthv1.Workspace{Path: "/w"}},
		"cpus":                 {Resources: &berthv1.Resources{Cpus: 1}},
		"memory":               {Resources: &berthv1.Resources{MemoryBytes: 1 << 30}},
		"disk":                 {Resources: &berthv1.Resources{DiskBytes: 1 << 30}},
		"pids":                 {Resources: &berthv1.Resources{Pids: 10}},
		"no egress":            {Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_NONE}},
		"an allow list":        {Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST}},
		"an option":            {ProviderOptions: map[string]string{"speed": "fast"}},
		"a checkpoint to copy": {FromCheckpoint: "cp_1"},
	} {
		if _, err := w.Create(w.ctx, call("create", ""), spec); !fault.Is(err, fault.CapabilityMissing) {
			t.Errorf("%s: the error is %v", name, err)
		}
	}
	if _, err := w.Create(w.ctx, call("create", ""), &berthv1.SandboxSpec{Provider: "other"}); !fault.Is(err, fault.ProviderNotFound) {
		t.Errorf("another provider: %v", err)
	}
	if w.calls(fake.CallCreate) > 0 {
		t.Error("the provider was asked to make something")
	}
}

func TestCallsAreHeldToTheirConditions(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	id := w.created().GetId()
	other := call("destroy", "")
	other.Namespace = "other"
	generation := call("destroy", "")
	generation.IfGeneration = 7
	lease := call("destroy", "")
	lease.Lease = &berthv1.LeaseRef{Id: "ls_1", Epoch: 3}
	for _, test := range []struct {
		name string
		call request.Call
		id   string
		want fault.Reason
	}{
		{"a sandbox that is not there", call("destroy", ""), "sb_none", fault.SandboxNotFound},
		{"another namespace", other, id, fault.SandboxNotFound},
		{"another generation", generation, id, fault.OtherGeneration},
		{"a lease that is not held", lease, id, fault.LeaseLost},
	} {
		if _, err := w.Destroy(w.ctx, test.call, test.id); !fault.Is(err, test.want) {
			t.Errorf("destroy, %s: %v, want %s", test.name, err, test.want)
		}
		if _, err := w.Resume(w.ctx, test.call, test.id); !fault.Is(err, test.want) {
			t.Errorf("resume, %s: %v, want %s", test.name, err, test.want)
		}
	}
	if resumed, err := w.Resume(w.ctx, call("resume", ""), id); err != nil || resumed.GetGeneration() != 1 {
		t.Errorf("resuming one that runs: %v (%v)", resumed, err)
	}
	_, err := w.Destroy(w.ctx, call("destroy", ""), id)
	must(t, err)
	if again, err := w.Destroy(w.ctx, call("destroy", ""), id); err != nil || again.GetState() != destroyed {
		t.Errorf("destroying it again: %v (%v)", again, err)
	}
	if _, err := w.Resume(w.ctx, call("resume", ""), id); !fault.Is(err, fault.WrongState) {
		t.Errorf("resuming a destroyed one: %v", err)
	}
	if _, err := w.Destroy(w.ctx, generation, id); !fault.Is(err, fault.NotRunning) {
		t.Errorf("destroying generation 7 of a destroyed one: %v", err)
	}
}

func TestEveryStepThatAnOperationNamesIsThere(t *testing.T) {
	t.Parallel()
	for kind, k := range (&Service{}).kinds() {
		if k.Steps[k.First] == nil {
			t.Errorf("%s begins with %q, which is no step of it", kind, k.First)
		}
		if k.Undo != "" && k.Steps[k.Undo] == nil {
			t.Errorf("%s is undone with %q, which is no step of it", kind, k.Undo)
		}
	}
}

func TestADestroyThatLostItsOperationIsDoneByAnother(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.created()
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, "op_gone"
		return tx.PutSandbox(sandbox, "", "")
	}))
	if _, err := w.Destroy(w.ctx, call("destroy", ""), sandbox.GetId()); err != nil {
		t.Fatal(err)
	}
	w.wantNothing()
}
