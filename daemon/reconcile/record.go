package reconcile

import (
	"context"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/operation"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Observe asks the provider how a machine is, and reports whether the observation before, at least most of an
// interval ago, had found the same.
func (s *Service) Observe(ctx context.Context, machineID string) (found machines.Observation, confirmed bool) {
	found = s.machines.Observe(ctx, machineID)
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.observed[machineID]
	if !known || before.found != found {
		s.observed[machineID] = observation{found, s.opts.Now()}
		//mutation:observed-twice return found, true
		return found, false
	}
	return found, s.opts.Now().Sub(before.since) >= ObserveInterval/2
}

// last returns how a machine was found last, and since when; Unsure when it was not observed.
func (s *Service) last(machineID string) (machines.Observation, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.observed[machineID]
	return last.found, last.since
}

// FoundFor is how long a machine has been found as it is; zero when it was not observed.
func (s *Service) FoundFor(machineID string) time.Duration {
	_, since := s.last(machineID)
	if since.IsZero() {
		return 0
	}
	return max(s.opts.Now().Sub(since), 0)
}

func (s *Service) forget(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.observed, machineID)
}

// Contradicts reports whether a machine can't be as it was found while its sandbox is in its state.
func (m Machine) Contradicts(found machines.Observation) bool {
	switch state := m.Sandbox.GetState(); found {
	case machines.Missing:
		return state != berthv1.SandboxState_SANDBOX_STATE_LOST
	case machines.Stopped:
		return state == berthv1.SandboxState_SANDBOX_STATE_RUNNING ||
			state == berthv1.SandboxState_SANDBOX_STATE_SUSPENDED && !m.Machine.GetStoppedBySuspend()
	}
	return false
}

// Record writes down what was observed twice of a machine, unless an operation is at work on it, and ends the
// link to it. The jobs of a stopped one stay open: resuming the sandbox tells what became of them. Those of
// one that is missing are lost.
func (s *Service) Record(ctx context.Context, machineID string, found machines.Observation) error {
	recorded := false
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		recorded = false
		machine, err := tx.Machine(machineID)
		if err != nil || machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED {
			return err
		}
		sandbox, err := tx.Sandbox(machine.GetSandboxId())
		if err != nil || sandbox == nil || sandbox.GetOperationId() != "" || !(Machine{machine, sandbox}).Contradicts(found) {
			return err
		}
		recorded = true
		if found == machines.Stopped {
			cause := fault.New(fault.WrongState, "the machine's guest and processes are gone (killed, or the host was rebooted): resume the sandbox to go on with its disk")
			sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_STOPPED, operation.Problem(cause, s.opts.Now())
			return tx.PutSandbox(sandbox, "sandbox.stopped", cause.Error())
		}
		cause := fault.New(fault.MachineGone, "provider %s no longer has machine %s: destroy the sandbox and create another", machine.GetProvider(), machineID)
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_LOST, operation.Problem(cause, s.opts.Now())
		if err := s.opts.Jobs.LoseJobs(tx, machineID, "machine_gone: the provider no longer has it"); err != nil {
			return err
		}
		return tx.PutSandbox(sandbox, "sandbox.lost", cause.Error())
	})
	if err == nil && recorded {
		s.opts.Links.Drop(machineID)
	}
	return err
}
