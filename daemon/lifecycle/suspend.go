package lifecycle

import (
	"context"
	"errors"
	"fmt"

	"github.com/berth-sandbox/berth/daemon/machines"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// quiesce tells the guest that it is about to be frozen, so that time stops counting for its jobs. A
// guest that does not answer is frozen all the same.
func (s *Service) quiesce(ctx context.Context, op *recordv1.OperationRecord) error {
	if err := s.machines.Quiesce(ctx, op.GetMachineId()); err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("the guest was not told that it is being frozen; its jobs' time goes on", "machine", op.GetMachineId(), "error", err)
	}
	// gofail: var lifecycleAfterQuiesce struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, "suspend", nil)
}

// suspend freezes the machine. The link goes first: a frozen guest must not look like a dead one.
func (s *Service) suspend(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	s.opts.Links.Drop(op.GetMachineId())
	// gofail: var lifecycleBeforeSuspend struct{}
	// fault.Die()
	if err := s.machines.Suspend(ctx, record); err != nil {
		return err
	}
	// gofail: var lifecycleAfterSuspend struct{}
	// fault.Die()
	found, err := s.machines.Inspect(ctx, record)
	if err != nil {
		return fmt.Errorf("look at machine %s, which was suspended: %w", record.GetId(), err)
	}
	return s.rest(ctx, op, rest{
		state: berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, event: "sandbox.suspended", stopped: found.State == providers.MachineStopped,
	})
}

// wake undoes a suspend that was refused: the machine goes on, unless it has stopped meanwhile.
func (s *Service) wake(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	if err := s.machines.Unfreeze(ctx, record); err != nil {
		found, inspectErr := s.machines.Inspect(ctx, record)
		gone := errors.Is(inspectErr, providers.ErrNotFound) // then reconcile finds that out too, and says LOST
		if !gone && (inspectErr != nil || found.State != providers.MachineStopped) {
			return err
		}
		return s.rest(ctx, op, rest{
			state: berthv1.SandboxState_SANDBOX_STATE_STOPPED, problem: op.GetUndoing(),
			event: "sandbox.stopped", message: "its machine stopped while it was being suspended",
		})
	}
	return s.rest(ctx, op, rest{
		state: berthv1.SandboxState_SANDBOX_STATE_RUNNING, problem: op.GetUndoing(),
		event: "sandbox.running", message: "suspending it failed: " + op.GetUndoing().GetMessage(),
	})
}

// thaw lets a suspended machine go on. One that is stopped, because that is how its provider suspends
// or because somebody killed it, is booted again instead, in a new generation.
func (s *Service) thaw(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	found, err := s.machines.Find(ctx, record)
	switch {
	case machines.IsGone(found, err):
		return machines.Gone(record.GetId())
	case err != nil:
		return fmt.Errorf("look at machine %s: %w", record.GetId(), err)
	case found.State == providers.MachineStopped:
		return s.operations.Advance(ctx, op, firstStep, nil)
	}
	// gofail: var lifecycleBeforeThaw struct{}
	// fault.Die()
	if err := s.machines.Unfreeze(ctx, record); err != nil {
		return err
	}
	// gofail: var lifecycleAfterThaw struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, "connect", nil)
}
