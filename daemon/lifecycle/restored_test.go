package lifecycle

import (
	"context"
	"testing"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

func TestAResumeOfAMachineThatIsGoneMakesNoOther(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.stopped()
	must(t, w.fake.Harness().Vanish(w.ctx, sandbox.GetMachineId()))
	if _, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId()); !fault.Is(err, fault.MachineGone) {
		t.Errorf("the error is %v, want %s", err, fault.MachineGone)
	}
	w.wantState(stopped) // reconcile finds out
	if machines, err := w.fake.Harness().Machines(); err != nil || len(machines) > 0 {
		t.Errorf("machines %v (%v)", machines, err)
	}
}

func TestAResumeOfAMachineThatIsHalfDestroyedMakesNoOther(t *testing.T) {
	t.Parallel()
	for name, state := range map[string]berthv1.SandboxState{
		"it was stopped": stopped, "it was suspended": berthv1.SandboxState_SANDBOX_STATE_SUSPENDED,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.created()
			if state == stopped {
				must(t, w.fake.Harness().Kill(w.ctx, sandbox.GetMachineId()))
				w.markStopped()
			} else if _, err := w.Suspend(w.ctx, call("suspend", ""), sandbox.GetId()); err != nil {
				t.Fatal(err)
			}
			must(t, w.halfDestroy(w.ctx))
			if _, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId()); !fault.Is(err, fault.MachineGone) {
				t.Errorf("the error is %v, want %s", err, fault.MachineGone)
			}
			w.wantState(stopped) // reconcile finds out
			w.wantBoots(1)
			_, err := w.Destroy(w.ctx, call("destroy", ""), sandbox.GetId())
			must(t, err)
			w.wantNothing()
		})
	}
}

// restored begins the service again as on a backup.
func (w *harness) restored() {
	w.t.Helper()
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		open, err := tx.OpenOperations()
		if err != nil {
			return err
		}
		for _, operation := range open {
			operation.Restored = true
			if err := tx.PutOperation(operation); err != nil {
				return err
			}
		}
		return nil
	}))
	w.restart(nil)
}

func TestACreateThatWasOpenInABackupMakesNoMachineAnew(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.Hang})
	go func() { _, _ = w.create("c") }()
	w.wait("the boot", func() bool { return w.calls(fake.CallCreate) > 0 })
	w.stop()
	w.restored()
	if _, err := w.create("c"); !fault.Is(err, fault.MachineGone) {
		t.Errorf("the caller is told %v, want %s", err, fault.MachineGone)
	}
	w.wantState(berthv1.SandboxState_SANDBOX_STATE_FAILED)
	w.wantBoots(0)
	w.wantNothing()
}

func TestACreateThatWasOpenInABackupKeepsTheMachineThatIsThere(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.setHooks(hangUntilEnd, nil)
	go func() { _, _ = w.create("c") }()
	w.wait("the workspace", func() bool { return w.prepared.Load() == 1 })
	w.stop()
	// Somebody has worked in it since: it can't be set up a second time.
	w.setHooks(func(context.Context) error { return fault.New(fault.WorkspaceFailed, "the workspace is not empty") }, nil)
	w.restored()
	w.wait("two attempts", func() bool { return w.operation().GetAttempts() >= 2 })
	if operation := w.operation(); operation.GetUndoing() != nil || operation.GetStep() != "workspace" {
		t.Errorf("the operation is %v", operation)
	}
	if machines, err := w.fake.Harness().Machines(); err != nil || len(machines) != 1 {
		t.Errorf("machines %v (%v), want the one", machines, err)
	}
	if _, err := w.Destroy(w.ctx, call("destroy", ""), w.only().GetId()); err != nil {
		t.Fatal(err)
	}
	w.wantNothing()
}

func TestACreateThatWasOpenInABackupGoesOnWithItsMachine(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.script(fake.Fault{Call: fake.CallCreate, Kind: fake.HangAfter})
	go func() { _, _ = w.create("c") }()
	w.wait("the boot", func() bool { return w.step() == "boot" && w.boots() > 0 })
	w.stop()
	w.restored()
	w.created()
	w.wantState(running)
	w.wantBoots(1)
}
