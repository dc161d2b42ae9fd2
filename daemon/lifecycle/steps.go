package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Deadlines of a step's one attempt. A step that passes its own is probed and tried again.
const (
	providerTimeout = 2 * time.Minute  // one call of a provider; booting a VM is the slowest
	guestTimeout    = 60 * time.Second // from boot to the guest's first hello
	inspectEvery    = time.Second      // whether a machine whose guest does not answer still runs
	settleTimeout   = 15 * time.Second // for stopping a doomed machine's jobs and fetching their receipts
)

// step does one step of an operation: it probes what an earlier attempt did, acts, and records the
// result together with the next step. It may be begun again after a crash at any instruction.
type step func(*Service, context.Context, *recordv1.OperationRecord) error

// firstStep, steps and undoStep are the operations. The names are in ledgers: a step is never
// renamed, and one that goes away stays as long as a ledger can hold it.
var (
	firstStep = map[recordv1.OperationKind]string{
		recordv1.OperationKind_OPERATION_KIND_CREATE:  "boot",
		recordv1.OperationKind_OPERATION_KIND_RESUME:  "boot",
		recordv1.OperationKind_OPERATION_KIND_SUSPEND: "quiesce",
		recordv1.OperationKind_OPERATION_KIND_DESTROY: "jobs",
	}
	steps = map[recordv1.OperationKind]map[string]step{
		recordv1.OperationKind_OPERATION_KIND_CREATE: {
			"boot": (*Service).boot, "connect": (*Service).connect, "workspace": (*Service).workspace, "ready": (*Service).ready,
			"unmake": (*Service).unmake, "fail": (*Service).fail,
		},
		recordv1.OperationKind_OPERATION_KIND_RESUME: {
			"boot": (*Service).boot, "thaw": (*Service).thaw, "connect": (*Service).connect, "ready": (*Service).ready,
			"stop": (*Service).stop,
		},
		recordv1.OperationKind_OPERATION_KIND_SUSPEND: {
			"quiesce": (*Service).quiesce, "suspend": (*Service).suspend, "wake": (*Service).wake,
		},
		recordv1.OperationKind_OPERATION_KIND_DESTROY: {
			"jobs": (*Service).settleJobs, "machine": (*Service).destroyMachine, "finish": (*Service).finish,
		},
	}
	undoStep = map[recordv1.OperationKind]string{
		recordv1.OperationKind_OPERATION_KIND_CREATE:  "unmake",
		recordv1.OperationKind_OPERATION_KIND_RESUME:  "stop",
		recordv1.OperationKind_OPERATION_KIND_SUSPEND: "wake",
	}
)

// boot makes the provider run the machine. The provider probes by the machine's id, so that a second
// attempt finds what the first one made.
func (s *Service) boot(ctx context.Context, operation *recordv1.OperationRecord) error {
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	target, err := s.target(machine)
	if err != nil {
		return err
	}
	if err := s.stillThere(ctx, operation, machine); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	// gofail: var lifecycleBeforeBoot struct{}
	// fault.Die()
	handle, err := target.Provider.Create(ctx, s.machineSpec(machine, target.Token, operation.GetGeneration()+1))
	if err != nil {
		return fmt.Errorf("boot machine %s on provider %s: %w", machine.GetId(), machine.GetProvider(), err)
	}
	// gofail: var lifecycleAfterBoot struct{}
	// fault.Die()
	return s.advance(ctx, operation, "connect", func(tx *store.Tx) error {
		machine, err := liveMachine(tx, operation)
		if err != nil {
			return err
		}
		machine.State, machine.Generation = recordv1.MachineState_MACHINE_STATE_BOOTED, operation.GetGeneration()+1
		machine.HandleVersion, machine.Handle = handle.Version, handle.Bytes
		return tx.PutMachine(machine, "machine.booted", "")
	})
}

// stillThere refuses to boot a machine that was made before and is gone: its provider would make another
// one with an empty disk. That concerns a resume, and a create that was open in a backup, since its
// sandbox may have been destroyed after that. Such a create may have been killed while its machine was
// made, so a part of one is none of these; a part of what is to be resumed is all that is left of it.
func (s *Service) stillThere(ctx context.Context, operation *recordv1.OperationRecord, machine *recordv1.MachineRecord) error {
	if operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE && !operation.GetRestored() {
		return nil
	}
	found, err := s.inspect(ctx, machine)
	resume := operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_RESUME // of a machine that was whole once
	if errors.Is(err, providers.ErrNotFound) || resume && isGone(found, err) {
		return fault.New(fault.MachineGone, "machine %s is gone: destroy the sandbox and create another", machine.GetId())
	}
	if err != nil {
		return fmt.Errorf("look at machine %s before it is booted: %w", machine.GetId(), err)
	}
	return nil
}

func (s *Service) machineSpec(machine *recordv1.MachineRecord, token []byte, generation uint64) providers.MachineSpec {
	spec := machine.GetSpec()
	return providers.MachineSpec{
		MachineID: machine.GetId(), BrokerID: s.opts.Store.Instance(), Generation: generation, Token: token,
		Image: spec.GetImage(), Workspace: spec.GetWorkspace(), Options: spec.GetOptions(),
		Resources: providers.Resources{
			CPUs: spec.GetResources().GetCpus(), MemoryBytes: spec.GetResources().GetMemoryBytes(),
			DiskBytes: spec.GetResources().GetDiskBytes(), PIDs: spec.GetResources().GetPids(),
		},
		Egress:    providers.Egress{Mode: egressMode(spec.GetEgress().GetMode()), AllowHosts: spec.GetEgress().GetAllowHosts()},
		ListenDir: s.ListenDir(machine.GetId()),
	}
}

// connect waits for the guest and writes down who answered.
func (s *Service) connect(ctx context.Context, operation *recordv1.OperationRecord) error {
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	if err := s.OpenLink(machine); err != nil {
		return err
	}
	hello, err := s.firstHello(ctx, machine)
	if err != nil {
		return err
	}
	// gofail: var lifecycleBeforeConnected struct{}
	// fault.Die()
	return s.advance(ctx, operation, afterConnect(operation), func(tx *store.Tx) error {
		machine, err := liveMachine(tx, operation)
		if err != nil {
			return err
		}
		if machine.GetBootId() != "" && machine.GetBootId() != hello.GetBootId() {
			machine.Generation = operation.GetGeneration() + 1 // no process of before survived
		}
		machine.BootId, machine.GuestBuild, machine.GuestProtocol = hello.GetBootId(), hello.GetBuild(), hello.GetProtocol()
		machine.GuestCapabilities = hello.GetCapabilities()
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.PutMachine(machine, "", ""))
		}
		sandbox.WorkspacePath = hello.GetWorkspace()
		return errors.Join(tx.PutMachine(machine, "", ""), tx.PutSandbox(sandbox, "", ""))
	})
}

// firstHello waits for the guest of a machine that was just booted, as long as the provider still
// has it running.
func (s *Service) firstHello(ctx context.Context, machine *recordv1.MachineRecord) (*guestv1.HelloResponse, error) {
	limited, cancel := context.WithTimeout(ctx, s.opts.GuestTimeout)
	defer cancel()
	for {
		patience, stop := context.WithTimeout(limited, inspectEvery)
		hello, err := s.opts.Links.Wait(patience, machine.GetId())
		stop()
		if err == nil || ctx.Err() != nil {
			return hello, err
		}
		found, inspectErr := s.inspect(limited, machine)
		switch {
		case isGone(found, inspectErr):
			return nil, fault.New(fault.MachineGone, "machine %s vanished before its guest answered", machine.GetId())
		case inspectErr == nil && found.State == providers.MachineStopped:
			return nil, fmt.Errorf("machine %s stopped before its guest answered: %s: %w", machine.GetId(), found.Note, providers.ErrAmbiguous)
		case limited.Err() != nil:
			return nil, fmt.Errorf("the guest of machine %s did not answer within %s: %w", machine.GetId(), s.opts.GuestTimeout, err)
		}
	}
}

func afterConnect(operation *recordv1.OperationRecord) string {
	if operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE {
		return "workspace"
	}
	return "ready"
}

// workspace sets up what the sandbox works in.
func (s *Service) workspace(ctx context.Context, operation *recordv1.OperationRecord) error {
	sandbox, err := s.sandbox(operation.GetSandboxId())
	if err != nil {
		return err
	}
	// gofail: var lifecycleBeforeWorkspace struct{}
	// fault.Die()
	if err := s.opts.Hooks.PrepareWorkspace(ctx, sandbox); err != nil {
		return err
	}
	// gofail: var lifecycleAfterWorkspace struct{}
	// fault.Die()
	return s.advance(ctx, operation, "ready", nil)
}

// ready lets commands in.
func (s *Service) ready(ctx context.Context, operation *recordv1.OperationRecord) error {
	if err := s.cutEgress(ctx, operation.GetMachineId()); err != nil {
		return err
	}
	info, err := s.providerInfo(ctx, operation.GetMachineId())
	if err != nil {
		return err
	}
	// gofail: var lifecycleBeforeReady struct{}
	// fault.Die()
	return s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		machine, err := liveMachine(tx, operation)
		if err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(operation.GetId()))
		}
		sandbox.State, sandbox.Generation = berthv1.SandboxState_SANDBOX_STATE_RUNNING, machine.GetGeneration()
		sandbox.OperationId, sandbox.LastError = "", nil
		sandbox.ReadyTime = timestamppb.New(s.opts.Now())
		sandbox.Isolation = Isolation(info.Isolation)
		sandbox.Capabilities = nil
		for _, capability := range info.Capabilities {
			sandbox.Capabilities = append(sandbox.Capabilities, string(capability))
		}
		return errors.Join(tx.PutSandbox(sandbox, "sandbox.running", ""), tx.DeleteOperation(operation.GetId()))
	})
}

// cutEgress cuts a machine off from the network where its sandbox asked for that: after its setup, which
// may need it, and before the first command. A provider that could not do it was refused at the start.
func (s *Service) cutEgress(ctx context.Context, machineID string) error {
	machine, err := s.machineRecord(machineID)
	if err != nil || machine.GetSpec().GetEgress().GetMode() != berthv1.Egress_MODE_NONE {
		return err
	}
	_, provider, err := s.provider(machine.GetProvider())
	if err != nil {
		return err
	}
	cutter, able := provider.(providers.EgressCutter)
	if !able {
		return fault.New(fault.CapabilityMissing, "spec.egress: provider %s cannot cut a machine off from the network", machine.GetProvider()).
			With("provider", machine.GetProvider()).With("capability", string(providers.CapEgressNone))
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	// gofail: var lifecycleBeforeCut struct{}
	// fault.Die()
	if err := cutter.CutEgress(ctx, s.machine(machine)); err != nil {
		return fmt.Errorf("cut machine %s off from the network: %w", machineID, err)
	}
	return nil
}

func (s *Service) providerInfo(ctx context.Context, machineID string) (providers.Info, error) {
	machine, err := s.machineRecord(machineID)
	if err != nil {
		return providers.Info{}, err
	}
	_, provider, err := s.provider(machine.GetProvider())
	if err != nil {
		return providers.Info{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	return provider.Info(ctx)
}

// unmake destroys what a create that is given up has made.
func (s *Service) unmake(ctx context.Context, operation *recordv1.OperationRecord) error {
	return s.removeMachine(ctx, operation, "fail")
}

// fail ends a create that was given up.
func (s *Service) fail(ctx context.Context, operation *recordv1.OperationRecord) error {
	return s.end(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State = berthv1.SandboxState_SANDBOX_STATE_FAILED
		sandbox.LastError = operation.GetUndoing()
		sandbox.DestroyTime = timestamppb.New(s.opts.Now())
		return "sandbox.failed", operation.GetUndoing().GetMessage()
	})
}

// stop ends a resume that was given up: the disk is still there. A machine that runs after all is not
// said to be stopped; it is looked at again.
func (s *Service) stop(ctx context.Context, operation *recordv1.OperationRecord) error {
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	found, err := s.inspect(ctx, machine)
	if err != nil && !errors.Is(err, providers.ErrNotFound) {
		return err
	}
	s.opts.Links.Drop(operation.GetMachineId())
	switch {
	case err == nil && found.State == providers.MachineRunning:
		return fmt.Errorf("machine %s runs, although resuming it failed (%s): %w", machine.GetId(), operation.GetUndoing().GetMessage(), providers.ErrAmbiguous)
	case err == nil && found.State == providers.MachineSuspended:
		return s.close(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
			sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, operation.GetUndoing()
			return "sandbox.suspended", "resuming it failed: " + operation.GetUndoing().GetMessage()
		})
	}
	return s.close(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_STOPPED, operation.GetUndoing()
		return "sandbox.stopped", "resuming it failed: " + operation.GetUndoing().GetMessage()
	})
}

// settleJobs stops what runs in a doomed machine and fetches the receipts, as far as that can be
// done in time: a machine that does not answer is destroyed all the same.
func (s *Service) settleJobs(ctx context.Context, operation *recordv1.OperationRecord) error {
	limited, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	if s.reachable(limited, operation.GetMachineId()) {
		s.opts.Hooks.SettleJobs(limited, operation.GetMachineId())
	}
	// gofail: var lifecycleAfterSettle struct{}
	// fault.Die()
	return s.advance(ctx, operation, "machine", nil)
}

// reachable waits for a link to the guest of a machine that runs: right after a start of the broker
// there is none yet, and the guest may have outcomes that nobody else has.
func (s *Service) reachable(ctx context.Context, machineID string) bool {
	if s.opts.Links.Hello(machineID) != nil {
		return true
	}
	machine, err := s.machineRecord(machineID)
	if err != nil || machine.GetBootId() == "" {
		return false // nobody has ever spoken to its guest
	}
	if found, err := s.inspect(ctx, machine); err != nil || found.State != providers.MachineRunning {
		return false
	}
	if err := s.OpenLink(machine); err != nil {
		return false
	}
	_, err = s.opts.Links.Wait(ctx, machineID)
	return err == nil
}

// destroyMachine destroys the machine at its provider.
func (s *Service) destroyMachine(ctx context.Context, operation *recordv1.OperationRecord) error {
	return s.removeMachine(ctx, operation, "finish")
}

// finish ends a destroy.
func (s *Service) finish(ctx context.Context, operation *recordv1.OperationRecord) error {
	return s.end(ctx, operation, func(sandbox *recordv1.SandboxRecord) (event, message string) {
		sandbox.State = berthv1.SandboxState_SANDBOX_STATE_DESTROYED
		sandbox.DestroyTime = timestamppb.New(s.opts.Now())
		return "sandbox.destroyed", ""
	})
}

// removeMachine destroys the machine and makes sure of it by asking.
func (s *Service) removeMachine(ctx context.Context, operation *recordv1.OperationRecord, next string) error {
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return err
	}
	_, provider, err := s.provider(machine.GetProvider())
	if err != nil {
		return err
	}
	s.opts.Links.Drop(machine.GetId())
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	// gofail: var lifecycleBeforeDestroy struct{}
	// fault.Die()
	if err := provider.Destroy(ctx, s.machine(machine)); err != nil {
		return fmt.Errorf("destroy machine %s on provider %s: %w", machine.GetId(), machine.GetProvider(), err)
	}
	// gofail: var lifecycleAfterDestroy struct{}
	// fault.Die()
	if found, err := s.inspect(ctx, machine); !errors.Is(err, providers.ErrNotFound) {
		if err != nil {
			return fmt.Errorf("make sure that machine %s is gone: %w", machine.GetId(), err)
		}
		return fmt.Errorf("machine %s is still there after its destroy, %s: %w", machine.GetId(), found.State, providers.ErrAmbiguous)
	}
	return s.advance(ctx, operation, next, nil)
}

// end closes a destroy, or a create that was undone: the machine is gone, its jobs with it, the
// secrets are destroyed and the session key is free.
func (s *Service) end(ctx context.Context, operation *recordv1.OperationRecord, close func(*recordv1.SandboxRecord) (event, message string)) error {
	// gofail: var lifecycleBeforeEnd struct{}
	// fault.Die()
	var ended []string
	err := s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		machine, err := tx.Machine(operation.GetMachineId())
		if err != nil {
			return err
		}
		if machine != nil {
			machine.State, machine.SealedToken = recordv1.MachineState_MACHINE_STATE_GONE, nil
			if err := tx.PutMachine(machine, "machine.destroyed", ""); err != nil {
				return err
			}
		}
		if ended, err = s.opts.Hooks.LoseJobs(tx, operation.GetMachineId(), "machine_gone: its sandbox was destroyed"); err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.DeleteOperation(operation.GetId()))
		}
		event, message := close(sandbox)
		sandbox.OperationId, sandbox.SealedEnv = "", nil
		return errors.Join(
			releaseSession(tx, sandbox),
			tx.PutSandbox(sandbox, event, message),
			tx.DeleteOperation(operation.GetId()),
		)
	})
	if err == nil {
		s.opts.Hooks.JobsChanged(ended)
	}
	// gofail: var lifecycleAfterEnd struct{}
	// fault.Die()
	return err
}

func releaseSession(tx *store.Tx, sandbox *recordv1.SandboxRecord) error {
	key := sandbox.GetSpec().GetSessionKey()
	if key == "" {
		return nil
	}
	held, err := tx.Session(sandbox.GetNamespace(), key)
	if err != nil || held.GetSandboxId() != sandbox.GetId() {
		return err
	}
	return tx.DeleteSession(sandbox.GetNamespace(), key)
}

// liveMachine returns the operation's machine, unless it is doomed meanwhile.
func liveMachine(tx *store.Tx, operation *recordv1.OperationRecord) (*recordv1.MachineRecord, error) {
	machine, err := tx.Machine(operation.GetMachineId())
	if err != nil {
		return nil, err
	}
	if machine == nil || machine.GetState() == recordv1.MachineState_MACHINE_STATE_DOOMED ||
		machine.GetState() == recordv1.MachineState_MACHINE_STATE_GONE {
		return nil, errOvertaken
	}
	return machine, nil
}
