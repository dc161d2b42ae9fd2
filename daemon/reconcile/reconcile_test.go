package reconcile

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/harness"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/store"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

func TestMain(m *testing.M) { fixture.Main(m) }

const retention = 24 * time.Hour

// harnessed is a service that is not running: the test does what Run does.
type harnessed struct {
	*harness.Harness
	*Service
}

func newHarness(t *testing.T) *harnessed {
	t.Helper()
	t.Parallel()
	w := &harnessed{Harness: harness.New(t)}
	w.make()
	return w
}

func (w *harnessed) make() {
	w.Service = New(Options{
		Store: w.Ledger, Links: w.Links, Sandboxes: w.Sandboxes, Jobs: w.Jobs, Log: slog.New(slog.DiscardHandler), Now: w.Now,
		Retention: retention, MaxReceipts: 1000, MaxOutput: 1 << 20,
	})
}

// start begins anew, as a broker that is started.
func (w *harnessed) start() {
	w.Harness.Start()
	w.make()
}

const (
	running   = berthv1.SandboxState_SANDBOX_STATE_RUNNING
	suspended = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED
	stopped   = berthv1.SandboxState_SANDBOX_STATE_STOPPED
	lost      = berthv1.SandboxState_SANDBOX_STATE_LOST
)

func TestAMachineThatVanishedIsLostWhenThatWasSeenTwice(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	job := w.Job(sandbox)
	harness.Must(t, w.Fake.Harness().Vanish(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	w.observeSilent(w.Ctx)
	w.WantState(sandbox, running, "after one observation")
	w.observeSilent(w.Ctx)
	w.WantState(sandbox, running, "after another look in the same moment")
	w.Later(ObserveInterval)
	w.observeSilent(w.Ctx)
	w.WantState(sandbox, lost, "after a second look")
	w.WantLost(job.GetId())
	w.Later(ObserveInterval)
	w.observeSilent(w.Ctx)
	if _, err := w.Sandboxes.Destroy(w.Ctx, harness.Call("destroy", ""), sandbox.GetId()); err != nil {
		t.Errorf("destroying a lost sandbox: %v", err)
	}
}

func TestAProviderThatDoesNotSayChangesNothing(t *testing.T) {
	for _, kind := range []fake.Kind{fake.Unavailable, fake.Fail, fake.Refuse} {
		t.Run(string(kind), func(t *testing.T) {
			w := newHarness(t)
			sandbox := w.Sandbox()
			harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
			w.Silent(sandbox)
			w.observeSilent(w.Ctx)
			harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallInspect, Kind: kind}))
			for range 3 {
				w.Later(time.Hour)
				w.observeSilent(w.Ctx)
			}
			w.WantState(sandbox, running, "after looks without an answer")
			harness.Must(t, w.Fake.Harness().Script())
			w.Later(time.Hour)
			w.observeSilent(w.Ctx)
			w.WantState(sandbox, running, "after one observation with an answer")
			w.Later(ObserveInterval)
			w.observeSilent(w.Ctx)
			w.WantState(sandbox, stopped, "after a second one")
		})
	}
}

func TestASuspendedMachineWhoseProcessesDiedIsStopped(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	job := w.Job(sandbox)
	_, err := w.Sandboxes.Suspend(w.Ctx, harness.Call("suspend", ""), sandbox.GetId())
	harness.Must(t, err)
	w.observeResting(w.Ctx)
	w.Later(ObserveInterval)
	w.observeResting(w.Ctx)
	w.WantState(sandbox, suspended, "while it is frozen")
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.observeResting(w.Ctx)
	w.WantState(sandbox, suspended, "after one observation")
	w.Later(ObserveInterval)
	w.observeSilent(w.Ctx) // it is in doubt, so that it is looked at soon again
	w.WantState(sandbox, stopped, "after a second observation")
	if now, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), 0); err != nil || now.GetState() != berthv1.JobState_JOB_STATE_UNKNOWN {
		t.Errorf("its job is %s (%v), want UNKNOWN", now.GetState(), err)
	}
	_, err = w.Sandboxes.Resume(w.Ctx, harness.Call("resume", ""), sandbox.GetId())
	harness.Must(t, err)
	if done, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), harness.Soon); err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST {
		t.Errorf("once it was resumed its job is %v (%v)", done, err)
	}
}

func TestAStoppedMachineThatVanishesIsLost(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	w.observeSilent(w.Ctx)
	w.Later(ObserveInterval)
	w.observeSilent(w.Ctx)
	w.WantState(sandbox, stopped, "after two looks")
	harness.Must(t, w.Fake.Harness().Vanish(w.Ctx, sandbox.GetMachineId()))
	for range 2 {
		w.Later(SweepInterval)
		w.observeSilent(w.Ctx)
		w.observeResting(w.Ctx)
	}
	w.WantState(sandbox, lost, "after two looks more")
}

func TestAnUnresponsiveGuestHoldsUpNobodyAndItsMachineStays(t *testing.T) {
	w := newHarness(t)
	unresponsive, other := w.Sandbox(), w.Sandbox()
	w.Stop()
	harness.Must(t, w.Fake.Harness().Freeze(unresponsive.GetMachineId()))
	w.start()
	harness.Must(t, w.Service.Start()) // does not wait for it
	if _, err := w.Jobs.Run(w.Ctx, harness.Call("run", ""), other.GetId(), &berthv1.JobSpec{Shell: "true"}, 10); err != nil {
		t.Errorf("a command in another sandbox: %v", err)
	}
	for range 3 {
		w.Later(time.Hour)
		w.observeSilent(w.Ctx)
		w.sweep(w.Ctx)
	}
	w.WantState(unresponsive, running, "while its guest is unresponsive")
	w.WantMachine(unresponsive.GetMachineId(), true, "while its guest is unresponsive")
	harness.Must(t, w.Fake.Harness().Thaw(unresponsive.GetMachineId()))
	if _, err := w.Jobs.Run(w.Ctx, harness.Call("run", ""), unresponsive.GetId(), &berthv1.JobSpec{Shell: "true"}, 10); err != nil && !fault.Is(err, fault.Recovering) {
		t.Errorf("a command in it when it woke: %v", err)
	}
}

func TestAMachineWithoutARecordIsDestroyedWhenItWasSeenTwiceAGraceApart(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	w.Harness.Orphan("m_orphan", w.Ledger.Instance())
	w.Harness.Orphan("m_foreign", "another")
	w.sweep(w.Ctx)
	w.WantMachine("m_orphan", true, "after one sweep")
	w.Later(OrphanGrace / 2)
	w.sweep(w.Ctx)
	w.WantMachine("m_orphan", true, "within the grace")
	if count, oldest := w.Orphans(); count != 1 || oldest < OrphanGrace/2 {
		t.Errorf("%d orphans, the oldest for %s", count, oldest)
	}
	w.Later(OrphanGrace)
	w.sweep(w.Ctx)
	w.WantMachine("m_orphan", false, "after the grace")
	if sockets, err := os.ReadDir(filepath.Join(w.Dir, "s")); err != nil || len(sockets) != 2 {
		t.Errorf("sockets %v are there (%v), want the sandbox's and the foreign one's", sockets, err)
	}
	w.sweep(w.Ctx)
	if count, _ := w.Orphans(); count != 0 {
		t.Errorf("%d orphans are left", count)
	}
	w.WantMachine("m_foreign", true, "always")
	w.WantMachine(sandbox.GetMachineId(), true, "always")
	w.WantState(sandbox, running, "always")
}

func TestAnOrphanIsLeftAloneWhileItsProviderIsNotWell(t *testing.T) {
	w := newHarness(t)
	w.Harness.Orphan("m_orphan", w.Ledger.Instance())
	w.sweep(w.Ctx)
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallInfo, Kind: fake.Unavailable}))
	w.Later(time.Hour)
	w.sweep(w.Ctx)
	w.WantMachine("m_orphan", true, "while its provider is not well")
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallList, Kind: fake.Fail}))
	w.Later(time.Hour)
	w.sweep(w.Ctx)
	w.WantMachine("m_orphan", true, "while its provider can't list it")
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallDestroy, Kind: fake.LoseReply, Times: 1}))
	for range 3 {
		w.Later(time.Hour)
		w.sweep(w.Ctx)
	}
	w.WantMachine("m_orphan", false, "in the end")
}

func TestAStaleListDestroysNothing(t *testing.T) {
	w := newHarness(t)
	gone := w.Sandbox()
	w.sweep(w.Ctx) // so that there is a list to be stale
	w.Destroy(gone)
	sandbox := w.Sandbox()
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallList, Kind: fake.Stale}))
	for range 3 {
		w.Later(time.Hour)
		w.sweep(w.Ctx)
		w.observeSilent(w.Ctx)
	}
	w.WantState(sandbox, running, "although the list does not name it")
	w.WantMachine(sandbox.GetMachineId(), true, "although the list does not name it")
}

func TestAMachineThatComesBackAfterItsDestroyIsDestroyedAgain(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	w.Destroy(sandbox)
	w.WantMachine(sandbox.GetMachineId(), false, "after its destroy")
	w.Harness.Orphan(sandbox.GetMachineId(), w.Ledger.Instance()) // as a boot that was done late
	w.sweep(w.Ctx)
	w.Later(OrphanGrace)
	w.sweep(w.Ctx)
	w.WantMachine(sandbox.GetMachineId(), false, "after two sweeps")
}

func TestStartGoesOnWithWhatWasBegun(t *testing.T) {
	w := newHarness(t)
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallCreate, Kind: fake.HangAfter}))
	go func() { _, _ = w.Sandboxes.Create(w.Ctx, harness.Call("create", "c"), &berthv1.SandboxSpec{}) }()
	w.Wait("the boot", func() bool {
		machines, err := w.Fake.Harness().Machines()
		return err == nil && len(machines) == 1 && machines[0] != ""
	})
	w.Stop()
	harness.Must(t, w.Fake.Harness().Script())
	w.start()
	harness.Must(t, w.Service.Start())
	sandbox, err := w.Sandboxes.Create(w.Ctx, harness.Call("create", "c"), &berthv1.SandboxSpec{})
	harness.Must(t, err)
	w.WantState(sandbox, running, "after the restart")
	if boots, err := w.Fake.Harness().Boots(sandbox.GetMachineId()); err != nil || boots > 1 {
		t.Errorf("its machine was booted %d times (%v)", boots, err)
	}
}

func TestWhatWasKeptLongEnoughIsDropped(t *testing.T) {
	w := newHarness(t)
	sandbox, young := w.Sandbox(), w.Sandbox()
	job, err := w.Jobs.Start(w.Ctx, harness.Call("start", "r"), sandbox.GetId(), &berthv1.JobSpec{Shell: "echo some"})
	harness.Must(t, err)
	if _, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), harness.Soon); err != nil {
		t.Fatal(err)
	}
	_, err = w.Sandboxes.Destroy(w.Ctx, harness.Call("destroy", ""), sandbox.GetId())
	harness.Must(t, err)
	w.Later(retention - time.Hour)
	w.trim(w.Ctx)
	if _, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), 0); err != nil {
		t.Errorf("before its time: %v", err)
	}
	w.Later(2 * time.Hour)
	w.trim(w.Ctx)
	if _, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), 0); !fault.Is(err, fault.JobNotFound) {
		t.Errorf("the receipt after its time: %v", err)
	}
	if _, _, err := w.Sandboxes.Get(harness.Namespace, sandbox.GetId()); !fault.Is(err, fault.SandboxNotFound) {
		t.Errorf("the sandbox after its time: %v", err)
	}
	w.WantState(young, running, "always")
	harness.Must(t, w.Ledger.View(func(tx *store.Tx) error {
		request, err := tx.Request(harness.Namespace, "r")
		if request != nil {
			t.Errorf("the request id is still remembered: %v", request)
		}
		return err
	}))
}

func TestRunEndsWithItsContextAndHearsKicks(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	ctx, cancel := context.WithCancel(w.Ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Run(ctx)
	}()
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.Kick()
	w.Kick()
	w.Wait("the sandbox to be stopped", func() bool {
		now, _, err := w.Sandboxes.Get(harness.Namespace, sandbox.GetId())
		return err == nil && now.GetState() == stopped
	})
	cancel()
	<-done
}

func TestATrimThatTakesLongHoldsUpNoLook(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	written, held := make(chan error, 1), make(chan struct{})
	letGo := sync.OnceFunc(func() { close(held) })
	go func() {
		written <- w.Ledger.Update(w.Ctx, func(*store.Tx) error { // a trim waits behind it
			<-held
			return nil
		})
	}()
	w.trimInterval = 10 * time.Millisecond // before the first look
	ctx, cancel := context.WithCancel(w.Ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	defer letGo() // before the others: the harness's end waits for the ledger
	running.Go(func() { w.Run(ctx) })
	w.Wait("a look while a trim is at work", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.observed[sandbox.GetMachineId()].found == machines.Stopped
	})
	letGo()
	harness.Must(t, <-written)
}
