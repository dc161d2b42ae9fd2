package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// terminateTimeout is for stopping the jobs of a machine that is to be destroyed and fetching their receipts.
const terminateTimeout = 15 * time.Second

// terminateJobs stops what runs in a machine that is to be destroyed and fetches the receipts, as far as that
// can be done in time: a machine that does not answer is destroyed all the same.
func (s *Service) terminateJobs(ctx context.Context, op *recordv1.OperationRecord) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, terminateTimeout)
	defer cancel()
	if s.machines.Reachable(limited, record) {
		s.opts.Hooks.TerminateJobs(limited, op.GetMachineId())
	}
	// gofail: var lifecycleAfterSettle struct{}
	// fault.Die()
	return s.operations.Advance(ctx, op, "machine", nil)
}

// destroyMachine destroys the machine at its provider.
func (s *Service) destroyMachine(ctx context.Context, op *recordv1.OperationRecord) error {
	return s.removeMachine(ctx, op, "finish")
}

// rollBack destroys what a create that is given up has made.
func (s *Service) rollBack(ctx context.Context, op *recordv1.OperationRecord) error {
	return s.removeMachine(ctx, op, "fail")
}

// removeMachine destroys the machine and makes sure of it by asking.
func (s *Service) removeMachine(ctx context.Context, op *recordv1.OperationRecord, next string) error {
	record, err := s.machine(op)
	if err != nil {
		return err
	}
	s.opts.Links.Drop(record.GetId())
	// gofail: var lifecycleBeforeDestroy struct{}
	// fault.Die()
	if err := s.machines.Destroy(ctx, record); err != nil {
		return err
	}
	// gofail: var lifecycleAfterDestroy struct{}
	// fault.Die()
	if found, err := s.machines.Inspect(ctx, record); !errors.Is(err, providers.ErrNotFound) {
		if err != nil {
			return fmt.Errorf("make sure that machine %s is gone: %w", record.GetId(), err)
		}
		return fmt.Errorf("machine %s is still there after its destroy, %s: %w", record.GetId(), found.State, providers.ErrAmbiguous)
	}
	return s.operations.Advance(ctx, op, next, nil)
}

// finish ends a destroy.
func (s *Service) finish(ctx context.Context, op *recordv1.OperationRecord) error {
	return s.end(ctx, op, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State = berthv1.SandboxState_SANDBOX_STATE_DESTROYED
		return "sandbox.destroyed", ""
	})
}

// fail ends a create that was given up.
func (s *Service) fail(ctx context.Context, op *recordv1.OperationRecord) error {
	return s.end(ctx, op, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_FAILED, op.GetUndoing()
		return "sandbox.failed", op.GetUndoing().GetMessage()
	})
}

// end closes a destroy, or a create that was undone: the machine is gone, its jobs with it, the
// secrets are destroyed and the session key is free.
func (s *Service) end(ctx context.Context, op *recordv1.OperationRecord, close func(*recordv1.SandboxRecord) (event, message string)) error {
	// gofail: var lifecycleBeforeEnd struct{}
	// fault.Die()
	err := s.operations.Record(ctx, op, func(tx *store.Tx, op *recordv1.OperationRecord) error {
		record, err := tx.Machine(op.GetMachineId())
		if err != nil {
			return err
		}
		if record != nil {
			record.State, record.SealedToken = recordv1.MachineState_MACHINE_STATE_GONE, nil
			if err := tx.PutMachine(record, "machine.destroyed", ""); err != nil {
				return err
			}
		}
		if err = s.opts.Hooks.LoseJobs(tx, op.GetMachineId(), "machine_gone: its sandbox was destroyed"); err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(op.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(op.GetId()))
		}
		event, message := close(sandbox)
		sandbox.OperationId, sandbox.SealedEnv, sandbox.DestroyTime = "", nil, timestamppb.New(s.opts.Now())
		return errors.Join(
			s.ReleaseSession(tx, sandbox),
			tx.PutSandbox(sandbox, event, message),
			tx.DeleteOperation(op.GetId()),
		)
	})
	// gofail: var lifecycleAfterEnd struct{}
	// fault.Die()
	return err
}
