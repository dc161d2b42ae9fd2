package lifecycle

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/operation"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// maxReboots of a machine that stops while it is set up: a crash may be bad luck, three are not.
const maxReboots = 2

// firstStep is what a create and the resume of a stopped machine begin with.
const firstStep = "boot"

// kinds are the operations. The steps' names are in ledgers.
func (s *Service) kinds() map[recordv1.OperationKind]operation.Kind {
	return map[recordv1.OperationKind]operation.Kind{
		recordv1.OperationKind_OPERATION_KIND_CREATE: {
			First: firstStep, Undo: "roll_back", Examine: s.examine, Failed: s.failed,
			Steps: map[string]operation.Step{
				firstStep: s.boot, "connect": s.connect, "workspace": s.workspace, "ready": s.ready,
				"roll_back": s.rollBack, "fail": s.fail,
			},
		},
		recordv1.OperationKind_OPERATION_KIND_RESUME: {
			First: firstStep, Undo: "stop", Examine: s.examine, Failed: s.failed,
			Steps: map[string]operation.Step{
				firstStep: s.boot, "thaw": s.thaw, "connect": s.connect, "ready": s.ready,
				"stop": s.stop,
			},
		},
		recordv1.OperationKind_OPERATION_KIND_SUSPEND: {
			First: "quiesce", Undo: "wake", Failed: s.failed,
			Steps: map[string]operation.Step{"quiesce": s.quiesce, "suspend": s.suspend, "wake": s.wake},
		},
		recordv1.OperationKind_OPERATION_KIND_DESTROY: { // it is never given up
			First: "jobs", Failed: s.failed,
			Steps: map[string]operation.Step{"jobs": s.terminateJobs, "machine": s.destroyMachine, "finish": s.finish},
		},
	}
}

// examine finds out whether the machine that is being set up has stopped, so that it has to be booted again,
// or is gone.
func (s *Service) examine(ctx context.Context, op *recordv1.OperationRecord, cause error) operation.Verdict {
	stopped, gone, note := s.stoppedMeanwhile(ctx, op)
	verdict := operation.Verdict{Cause: cause, Restart: stopped && op.GetReboots() < maxReboots}
	switch {
	case gone:
		verdict.Cause = fault.New(fault.MachineGone, "machine %s vanished while it was set up: %w", op.GetMachineId(), cause)
	case stopped && !verdict.Restart:
		verdict.Cause = fault.New(fault.ProviderRefused, "machine %s does not stay up: it stopped %d times while it was set up: %s", op.GetMachineId(), maxReboots+1, note)
	}
	verdict.Keep = keepsMachine(op) && (stopped || !fault.Is(verdict.Cause, fault.MachineGone))
	return verdict
}

// stoppedMeanwhile reports whether the machine of an operation that has booted it has stopped or is gone,
// and what its provider knows of it.
func (s *Service) stoppedMeanwhile(ctx context.Context, op *recordv1.OperationRecord) (stopped, gone bool, note string) {
	if op.GetStep() == firstStep {
		return false, false, ""
	}
	record, err := s.machine(op)
	if err != nil {
		return false, false, ""
	}
	found, err := s.machines.Find(ctx, record)
	return err == nil && found.State == providers.MachineStopped, machines.IsGone(found, err), found.Note
}

// keepsMachine reports whether an operation's undoing would destroy a machine that may be in use: a
// create that was open in a backup may have come to its end after that. It stands until a person says
// what is to become of it; `berth rm` destroys it.
func keepsMachine(op *recordv1.OperationRecord) bool {
	return op.GetRestored() && op.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE
}

// failed notes in the sandbox that a step of its operation failed. The machine of a create that is given up
// is never used again.
func (s *Service) failed(tx *store.Tx, op *recordv1.OperationRecord, problem *berthv1.Problem) error {
	sandbox, err := tx.Sandbox(op.GetSandboxId())
	if err != nil || sandbox == nil {
		return err
	}
	sandbox.LastError = problem
	if op.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE && op.GetUndoing() != nil {
		err = terminate(tx, op.GetMachineId())
	}
	return errors.Join(err, tx.PutSandbox(sandbox, "", ""))
}

// blocked notes in the sandbox that this build cannot carry its operation on.
func (s *Service) blocked(tx *store.Tx, op *recordv1.OperationRecord, problem *berthv1.Problem) error {
	sandbox, err := tx.Sandbox(op.GetSandboxId())
	if err != nil || sandbox == nil {
		return err
	}
	sandbox.LastError = problem
	return tx.PutSandbox(sandbox, "sandbox.blocked", problem.GetMessage())
}

// machine returns the record of the operation's machine.
func (s *Service) machine(op *recordv1.OperationRecord) (*recordv1.MachineRecord, error) {
	record, err := s.machines.Record(op.GetMachineId())
	if err == nil && record == nil {
		err = fmt.Errorf("the ledger has no machine %s: %w", op.GetMachineId(), operation.ErrSuperseded)
	}
	return record, err
}

// liveMachine returns the operation's machine, unless that is to be destroyed meanwhile.
func liveMachine(tx *store.Tx, op *recordv1.OperationRecord) (*recordv1.MachineRecord, error) {
	record, err := tx.Machine(op.GetMachineId())
	if err == nil && (record == nil || record.GetState() >= recordv1.MachineState_MACHINE_STATE_TERMINATING) {
		err = operation.ErrSuperseded
	}
	return record, err
}

// boot makes the provider run the machine, or finds that an earlier attempt did.
func (s *Service) boot(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	if err := s.stillThere(ctx, op, record); err != nil {
		return err
	}
	// gofail: var lifecycleBeforeBoot struct{}
	// fault.Die()
	handle, err := s.machines.Boot(ctx, record, op.GetGeneration()+1)
	if err != nil {
		return err
	}
	// gofail: var lifecycleAfterBoot struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, "connect", func(tx *store.Tx) error {
		record, err := liveMachine(tx, op)
		if err != nil {
			return err
		}
		record.State, record.Generation = recordv1.MachineState_MACHINE_STATE_BOOTED, op.GetGeneration()+1
		record.HandleVersion, record.Handle, record.StoppedBySuspend = handle.Version, handle.Bytes, false
		return tx.PutMachine(record, "machine.booted", "")
	})
}

// stillThere refuses to boot a machine that was made before and is gone: its provider would make another
// one with an empty disk. That concerns a resume, and a create that was open in a backup, since its
// sandbox may have been destroyed after that. Such a create may have been killed while its machine was
// made, so a part of one is none of these; a part of what is to be resumed is all that is left of it.
func (s *Service) stillThere(ctx context.Context, op *recordv1.OperationRecord, record *recordv1.MachineRecord) error {
	if op.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE && !op.GetRestored() {
		return nil
	}
	found, err := s.machines.Find(ctx, record)
	resume := op.GetKind() == recordv1.OperationKind_OPERATION_KIND_RESUME // of a machine that was whole once
	if errors.Is(err, providers.ErrNotFound) || resume && machines.IsGone(found, err) {
		return machines.Gone(record.GetId())
	}
	if err != nil {
		return fmt.Errorf("look at machine %s before it is booted: %w", record.GetId(), err)
	}
	return nil
}

// connect waits for the guest and writes down who answered.
func (s *Service) connect(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	hello, err := s.machines.Connect(ctx, record)
	if err != nil {
		return err
	}
	next := "ready"
	if op.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE {
		next = "workspace"
		// Later it is what the sandbox's own commands have made of it, which is for them to repair.
		if why := hello.GetWorkspaceError(); why != "" {
			return fault.Invalid("spec.workspace.path", "no command can run in %s: %s (name a directory, or a path where nothing is yet)", hello.GetWorkspace(), why)
		}
	}
	// gofail: var lifecycleBeforeConnected struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, next, func(tx *store.Tx) error {
		record, err := liveMachine(tx, op)
		if err != nil {
			return err
		}
		if record.GetBootId() != "" && record.GetBootId() != hello.GetBootId() {
			record.Generation = op.GetGeneration() + 1 // no process of before survived
		}
		record.BootId, record.GuestBuild, record.GuestProtocol = hello.GetBootId(), hello.GetBuild(), hello.GetProtocol()
		record.GuestCapabilities = hello.GetCapabilities()
		record.WeakContainment = machines.WeakContainment(hello)
		sandbox, err := tx.Sandbox(op.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.PutMachine(record, "", ""))
		}
		sandbox.WorkspacePath = hello.GetWorkspace()
		return errors.Join(tx.PutMachine(record, "", ""), tx.PutSandbox(sandbox, "", ""))
	})
}

// workspace sets up what the sandbox works in.
func (s *Service) workspace(ctx context.Context, op *recordv1.OperationRecord) error {
	sandbox, err := s.Record(op.GetSandboxId())
	if err != nil {
		return err
	}
	if sandbox.GetSpec().GetWorkspace().GetRepo() != nil {
		if sandbox.Isolation, err = s.isolation(ctx, op); err != nil {
			return err
		}
	}
	// gofail: var lifecycleBeforeWorkspace struct{}
	// fault.Die()
	if err := s.opts.Hooks.PrepareWorkspace(ctx, sandbox); err != nil {
		return err
	}
	// gofail: var lifecycleAfterWorkspace struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, "ready", nil)
}

// isolation is that of an operation's machine, which the sandbox's record gets when it is ready.
func (s *Service) isolation(ctx context.Context, op *recordv1.OperationRecord) (berthv1.Isolation, error) {
	record, err := s.machine(op)
	if err != nil {
		return 0, err
	}
	info, err := s.machines.Info(ctx, record)
	return machines.Isolation(info.Isolation), err
}

// ready lets commands in. Where the sandbox asked for that, its machine is cut off from the network before
// the first command and after its setup, which may need it.
func (s *Service) ready(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	if record.GetSpec().GetEgress().GetMode() == berthv1.Egress_MODE_NONE {
		// gofail: var lifecycleBeforeCut struct{}
		// fault.Die()
		if err := s.machines.CutEgress(ctx, record); err != nil {
			return err
		}
	}
	info, err := s.machines.Info(ctx, record)
	if err != nil {
		return err
	}
	// gofail: var lifecycleBeforeReady struct{}
	// fault.Die()
	return s.operations.Record(ctx, op, func(tx *store.Tx, op *recordv1.OperationRecord) error {
		record, err := liveMachine(tx, op)
		if err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(op.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(op.GetId()))
		}
		sandbox.State, sandbox.Generation = berthv1.SandboxState_SANDBOX_STATE_RUNNING, record.GetGeneration()
		sandbox.OperationId, sandbox.LastError = "", nil
		sandbox.ReadyTime = timestamppb.New(s.opts.Now())
		sandbox.Isolation = machines.Isolation(info.Isolation)
		sandbox.Capabilities = nil
		for _, capability := range info.Capabilities {
			sandbox.Capabilities = append(sandbox.Capabilities, string(capability))
		}
		containment := machines.ContainmentStrong
		if record.GetWeakContainment() {
			containment = machines.ContainmentWeak
		}
		sandbox.Capabilities = append(sandbox.Capabilities, containment)
		return errors.Join(tx.PutSandbox(sandbox, "sandbox.running", ""), tx.DeleteOperation(op.GetId()))
	})
}

// stop ends a resume that was given up: the disk is still there. A machine that runs after all is not
// said to be stopped; it is looked at again.
func (s *Service) stop(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	found, err := s.machines.Inspect(ctx, record)
	if err != nil && !errors.Is(err, providers.ErrNotFound) {
		return err
	}
	s.opts.Links.Drop(op.GetMachineId())
	r := rest{
		state: berthv1.SandboxState_SANDBOX_STATE_STOPPED, event: "sandbox.stopped",
		problem: op.GetUndoing(), message: "resuming it failed: " + op.GetUndoing().GetMessage(),
	}
	switch {
	case err == nil && found.State == providers.MachineRunning:
		return fmt.Errorf("machine %s runs, although resuming it failed (%s): %w", record.GetId(), op.GetUndoing().GetMessage(), providers.ErrAmbiguous)
	case err == nil && found.State == providers.MachineSuspended:
		r.state, r.event = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, "sandbox.suspended"
	}
	return s.rest(ctx, op, r)
}

// rest is a state of a sandbox in which nothing is done to it, and how it came to that.
type rest struct {
	state          berthv1.SandboxState
	problem        *berthv1.Problem
	event, message string
	stopped        bool // suspending its machine stopped it
}

// rest ends an operation with its sandbox at rest.
func (s *Service) rest(ctx context.Context, op *recordv1.OperationRecord, r rest) error {
	return s.operations.Record(ctx, op, func(tx *store.Tx, op *recordv1.OperationRecord) error {
		sandbox, err := tx.Sandbox(op.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(op.GetId()))
		}
		record, err := tx.Machine(op.GetMachineId())
		if err == nil && record.GetStoppedBySuspend() != r.stopped {
			record.StoppedBySuspend = r.stopped
			err = tx.PutMachine(record, "", "")
		}
		sandbox.State, sandbox.LastError, sandbox.OperationId = r.state, r.problem, ""
		return errors.Join(err, tx.PutSandbox(sandbox, r.event, r.message), tx.DeleteOperation(op.GetId()))
	})
}
