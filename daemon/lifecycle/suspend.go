package lifecycle

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// entropyBytes is what a guest gets to stir into its random numbers when it goes on after a freeze.
const entropyBytes = 32

// Suspend freezes a RUNNING sandbox's machine and waits until it is SUSPENDED. One that is already is
// success.
func (s *Service) Suspend(ctx context.Context, call Call, id string) (*recordv1.SandboxRecord, error) {
	sandbox, _, err := s.Get(call.Namespace, id)
	if err != nil {
		return nil, err
	}
	prior, err := s.prior(call)
	if err != nil {
		return nil, err
	}
	if prior != "" {
		return s.answeredAgain(ctx, id, s.suspended)
	}
	if !slices.Contains(sandbox.GetCapabilities(), string(providers.CapSuspend)) {
		return nil, fault.New(fault.CapabilityMissing, "sandbox %s is on provider %s, which cannot suspend its machine here (`berth providers` says why)", id, sandbox.GetSpec().GetProvider()).
			With("provider", sandbox.GetSpec().GetProvider()).With("capability", string(providers.CapSuspend))
	}
	operationID, err := s.reserveSuspend(ctx, call, id)
	if err != nil {
		return nil, err
	}
	if operationID != "" {
		s.launch(operationID, "")
	}
	return s.suspended(ctx, id)
}

func (s *Service) reserveSuspend(ctx context.Context, call Call, id string) (operationID string, err error) {
	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		operationID = ""
		if prior, err := call.Prior(tx); err != nil || prior != "" {
			return err
		}
		sandbox, err := call.Sandbox(tx, id)
		if err != nil {
			return err
		}
		now := s.opts.Now()
		switch sandbox.GetState() {
		case berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDING:
			return call.Remember(tx, id, now)
		}
		if err := WantRunning(sandbox); err != nil {
			return err
		}
		operation := s.operation(recordv1.OperationKind_OPERATION_KIND_SUSPEND, sandbox)
		operationID = operation.GetId()
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_SUSPENDING, operationID
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.suspending", ""),
			tx.PutOperation(operation),
			call.Remember(tx, id, now),
		)
	})
	return operationID, err
}

// suspended waits until a sandbox is SUSPENDED, or says why it did not become so.
func (s *Service) suspended(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	for {
		sandbox, err := s.sandbox(id)
		if err != nil || sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_SUSPENDED {
			return sandbox, err
		}
		if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_SUSPENDING {
			if sandbox.GetLastError() != nil {
				return nil, refusal(sandbox.GetLastError())
			}
			return nil, fault.New(fault.WrongState, "sandbox %s became %s instead of SUSPENDED", id, StateName(sandbox.GetState())).
				With("state", StateName(sandbox.GetState())).With("wanted", "SUSPENDED")
		}
		if err := s.join(ctx, sandbox.GetOperationId()); err != nil {
			return nil, fmt.Errorf("sandbox %s is being suspended, which goes on without you: %w", id, err)
		}
	}
}

// quiesce tells the guest that it is about to be frozen, so that time stops counting for its jobs. A
// guest that does not answer is frozen all the same.
func (s *Service) quiesce(ctx context.Context, operation *recordv1.OperationRecord) error {
	limited, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	err := s.opts.Links.Call(limited, operation.GetMachineId(), func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Quiesce(ctx, &guestv1.QuiesceRequest{Reason: "suspend"})
		return err
	})
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("the guest was not told that it is being frozen; its jobs' time goes on", "machine", operation.GetMachineId(), "error", err)
	}
	// gofail: var lifecycleAfterQuiesce struct{}
	// fault.Die()
	return s.advance(ctx, operation, "suspend", nil)
}

// suspend freezes the machine. The link goes first: a frozen guest must not look like a dead one.
func (s *Service) suspend(ctx context.Context, operation *recordv1.OperationRecord) error {
	suspender, machine, err := s.suspender(operation)
	if err != nil {
		return err
	}
	s.opts.Links.Drop(operation.GetMachineId())
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	// gofail: var lifecycleBeforeSuspend struct{}
	// fault.Die()
	if err := suspender.Suspend(ctx, machine); errors.Is(err, providers.ErrNotFound) {
		return fault.New(fault.MachineGone, "machine %s is gone: destroy the sandbox and create another", machine.ID)
	} else if err != nil {
		return fmt.Errorf("suspend machine %s: %w", machine.ID, err)
	}
	// gofail: var lifecycleAfterSuspend struct{}
	// fault.Die()
	return s.close(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, nil
		return "sandbox.suspended", ""
	})
}

// wake undoes a suspend that was refused: the machine goes on, unless it has stopped meanwhile.
func (s *Service) wake(ctx context.Context, operation *recordv1.OperationRecord) error {
	if err := s.unfreeze(ctx, operation); err != nil {
		record, recordErr := s.machineRecord(operation.GetMachineId())
		if recordErr != nil {
			return err
		}
		found, inspectErr := s.inspect(ctx, record)
		gone := errors.Is(inspectErr, providers.ErrNotFound) // then reconcile finds that out too, and says LOST
		if !gone && (inspectErr != nil || found.State != providers.MachineStopped) {
			return err
		}
		return s.close(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
			sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_STOPPED, operation.GetUndoing()
			return "sandbox.stopped", "its machine stopped while it was being suspended"
		})
	}
	return s.close(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_RUNNING, operation.GetUndoing()
		return "sandbox.running", "suspending it failed: " + operation.GetUndoing().GetMessage()
	})
}

// thaw lets a suspended machine go on. One that is stopped, because that is how its provider suspends
// or because somebody killed it, is booted again instead, in a new generation.
func (s *Service) thaw(ctx context.Context, operation *recordv1.OperationRecord) error {
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	found, err := s.inspect(ctx, machine)
	switch {
	case isGone(found, err):
		return fault.New(fault.MachineGone, "machine %s is gone: destroy the sandbox and create another", machine.GetId())
	case err != nil:
		return fmt.Errorf("look at machine %s: %w", machine.GetId(), err)
	case found.State == providers.MachineStopped:
		return s.advance(ctx, operation, "boot", nil)
	}
	// gofail: var lifecycleBeforeThaw struct{}
	// fault.Die()
	if err := s.unfreeze(ctx, operation); err != nil {
		return err
	}
	// gofail: var lifecycleAfterThaw struct{}
	// fault.Die()
	return s.advance(ctx, operation, "connect", nil)
}

// unfreeze has the provider let a machine go on, and tells the guest how much later it is. All of it
// may be done again.
func (s *Service) unfreeze(ctx context.Context, operation *recordv1.OperationRecord) error {
	suspender, machine, err := s.suspender(operation)
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	if err := suspender.Resume(limited, machine); errors.Is(err, providers.ErrNotFound) {
		return fault.New(fault.MachineGone, "machine %s is gone: destroy the sandbox and create another", machine.ID)
	} else if err != nil {
		return fmt.Errorf("resume machine %s: %w", machine.ID, err)
	}
	record, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	if err := s.OpenLink(record); err != nil {
		return err
	}
	hello, err := s.firstHello(ctx, record)
	if err != nil {
		return err
	}
	entropy := make([]byte, entropyBytes)
	if _, err := rand.Read(entropy); err != nil {
		return fmt.Errorf("make entropy for machine %s: %w", machine.ID, err)
	}
	err = s.opts.Links.Call(limited, machine.ID, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Resumed(ctx, &guestv1.ResumedRequest{
			// Its own: another one would tell it to drop what belongs to the old.
			Generation: hello.GetGeneration(), Time: timestamppb.New(s.opts.Now()), Entropy: entropy,
		})
		return err
	})
	if fault.Is(err, fault.CapabilityMissing) { // an older guest: it was frozen and goes on, and counts the time
		s.opts.Log.Warn("the guest cannot be told how long it was frozen", "machine", machine.ID, "error", err)
		return nil
	}
	return err
}

// suspender is the provider of an operation's machine, as one that suspends.
func (s *Service) suspender(operation *recordv1.OperationRecord) (providers.Suspender, providers.Machine, error) {
	record, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return nil, providers.Machine{}, err
	}
	_, provider, err := s.provider(record.GetProvider())
	if err != nil {
		return nil, providers.Machine{}, err
	}
	suspender, able := provider.(providers.Suspender)
	if !able {
		return nil, providers.Machine{}, fault.New(fault.CapabilityMissing, "provider %s cannot suspend machines", record.GetProvider()).
			With("provider", record.GetProvider()).With("capability", string(providers.CapSuspend))
	}
	return suspender, s.machine(record), nil
}

// close ends an operation with its sandbox in a resting state.
func (s *Service) close(ctx context.Context, operation *recordv1.OperationRecord, change func(*recordv1.SandboxRecord) (event, message string)) error {
	var waitedFor []string
	err := s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(operation.GetId()))
		}
		waitedFor = nil
		open, err := tx.OpenJobs(operation.GetMachineId())
		for _, job := range open {
			waitedFor = append(waitedFor, job.GetId())
		}
		event, message := change(sandbox)
		sandbox.OperationId = ""
		return errors.Join(err, tx.PutSandbox(sandbox, event, message), tx.DeleteOperation(operation.GetId()))
	})
	if err == nil {
		s.opts.Hooks.JobsChanged(waitedFor)
	}
	return err
}
