// Package lifecycle makes, suspends, resumes and destroys sandboxes. Each change is a durable operation
// (daemon/operation) whose steps are here: what they do to a sandbox's machine and records, and what a
// failure and its undoing mean for the sandbox. It never runs a caller's command, and never looks into a job.
package lifecycle

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/operation"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// tokenBytes is the length of a machine's token: as much as the HMAC-SHA256 of the handshake uses.
const tokenBytes = 32

// Hooks are what the packages above do in the middle of an operation.
type Hooks struct {
	// PrepareWorkspace sets up a new machine's workspace. It may be run again after a crash.
	PrepareWorkspace func(ctx context.Context, sandbox *recordv1.SandboxRecord) error
	// TerminateJobs stops the jobs of a machine that is about to be destroyed and stores their receipts, as far
	// as the guest can be reached.
	TerminateJobs func(ctx context.Context, machineID string)
	// LoseJobs ends, in the transaction, the jobs of a machine that is gone.
	LoseJobs func(tx *store.Tx, machineID, reason string) error
}

// Options configure a Service. All but Now and the timeouts are required.
type Options struct {
	Store     *store.Store
	Events    *events.Hub // fed with the store's commits
	Vault     *vault.Vault
	Links     *guestlink.Links
	Providers []machines.Named // the first is the default
	SocketDir string           // short; each machine's sockets lie in a directory of their own below it
	Log       *slog.Logger
	Now       func() time.Time
	Hooks     Hooks
	// ProviderTimeout and GuestTimeout are those of machines.Options.
	ProviderTimeout, GuestTimeout time.Duration
}

// Service makes, suspends, resumes and destroys sandboxes.
type Service struct {
	*sandbox.Records
	opts       Options
	machines   *machines.Service
	operations *operation.Engine
}

// New makes a service; nothing runs until ResumeOperations or a call.
func New(opts Options) *Service {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := &Service{Records: sandbox.New(opts.Store, opts.Vault), opts: opts}
	s.machines = machines.New(machines.Options{
		Store: opts.Store, Vault: opts.Vault, Links: opts.Links, Providers: opts.Providers, SocketDir: opts.SocketDir,
		Log: opts.Log, Now: opts.Now, ProviderTimeout: opts.ProviderTimeout, GuestTimeout: opts.GuestTimeout,
	})
	s.operations = operation.New(operation.Options{
		Store: opts.Store, Events: opts.Events, Log: opts.Log, Now: opts.Now, Kinds: s.kinds(), Blocked: s.blocked,
	})
	return s
}

// SetHooks gives the service what the packages above do; before the first call.
func (s *Service) SetHooks(hooks Hooks) { s.opts.Hooks = hooks }

// Machines are the machines of the sandboxes.
func (s *Service) Machines() *machines.Service { return s.machines }

// ResumeOperations goes on with every operation that is open; once, at start.
func (s *Service) ResumeOperations() error { return s.operations.Resume() }

// KnowsStep reports whether this build can carry an operation on; one that it can't is blocked.
func (s *Service) KnowsStep(op *recordv1.OperationRecord) bool {
	return s.operations.KnowsStep(op)
}

// Drain ends the calls that only wait for an operation, so that the broker can stop soon.
func (s *Service) Drain() { s.operations.Drain() }

// Close interrupts the operations in progress, which go on at the next start, and waits for them.
func (s *Service) Close() { s.operations.Close() }

// Create makes a sandbox and waits until it runs. The operation goes on when the context ends; the
// same request joins it.
func (s *Service) Create(ctx context.Context, call request.Call, spec *berthv1.SandboxSpec) (*recordv1.SandboxRecord, error) {
	// A request that was made before has its answer, whatever the provider says now.
	var prior string
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		prior, err = call.Prior(tx)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case prior != "":
		return s.answerAgain(ctx, prior, s.created)
	}
	spec = proto.CloneOf(spec)
	if spec.Provider, err = s.machines.Admit(ctx, spec); err != nil {
		return nil, err
	}
	id, operationID, err := s.reserve(ctx, call, spec)
	if err != nil {
		return nil, err
	}
	if operationID != "" {
		s.operations.Launch(operationID, "")
	}
	return s.created(ctx, id)
}

// reserve writes the sandbox, its machine and the operation down in one transaction. The operation
// id is empty when the request was made before: then there is nothing to launch, only to join.
func (s *Service) reserve(ctx context.Context, call request.Call, spec *berthv1.SandboxSpec) (sandboxID, operationID string, err error) {
	now := s.opts.Now()
	sandbox := &recordv1.SandboxRecord{
		Id: request.NewID("sb"), Namespace: call.Namespace, State: berthv1.SandboxState_SANDBOX_STATE_CREATING,
		MachineId: request.NewID("m"), CreateTime: timestamppb.New(now), LastActivityTime: timestamppb.New(now),
	}
	if sandbox.SealedEnv, err = s.SealEnv(sandbox.GetId(), spec); err != nil {
		return "", "", err
	}
	sandbox.Spec = spec
	machine := &recordv1.MachineRecord{
		Id: sandbox.GetMachineId(), Provider: spec.GetProvider(), SandboxId: sandbox.GetId(), Namespace: call.Namespace,
		State: recordv1.MachineState_MACHINE_STATE_INTENDED, CreateTime: timestamppb.New(now),
		Spec: &recordv1.MachineSpec{
			Image: spec.GetImage(), Workspace: spec.GetWorkspace().GetPath(), Resources: spec.GetResources(),
			Egress: spec.GetEgress(), Options: spec.GetProviderOptions(),
		},
	}
	token := make([]byte, tokenBytes)
	if _, err := rand.Read(token); err != nil {
		return "", "", fmt.Errorf("make the machine's token: %w", err)
	}
	if machine.SealedToken, err = s.opts.Vault.Seal(machine.GetId(), token); err != nil {
		return "", "", err
	}
	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		prior, err := call.Prior(tx)
		if err != nil {
			return err
		}
		if prior != "" {
			sandboxID, operationID = prior, ""
			return nil
		}
		if err := s.ClaimSession(tx, call.Namespace, spec.GetSessionKey(), sandbox.GetId()); err != nil {
			return err
		}
		op := newOperation(recordv1.OperationKind_OPERATION_KIND_CREATE, sandbox)
		if err := s.operations.Add(tx, op); err != nil {
			return err
		}
		sandbox.OperationId = op.GetId()
		sandboxID, operationID = sandbox.GetId(), op.GetId()
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.creating", "on provider "+spec.GetProvider()),
			tx.PutMachine(machine, "", ""),
			call.Remember(tx, sandbox.GetId(), now),
		)
	})
	return sandboxID, operationID, err
}

// created waits until a sandbox runs, or says why it did not come to that.
func (s *Service) created(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	sandbox, err := s.await(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_FAILED:
		return nil, operation.Error(sandbox.GetLastError())
	}
	if err := request.WantRunning(sandbox); err != nil {
		return nil, err
	}
	return sandbox, nil
}

// Resume makes a SUSPENDED sandbox go on, or a STOPPED one run again in a new generation, and waits
// until it runs. One that runs is success.
func (s *Service) Resume(ctx context.Context, call request.Call, id string) (*recordv1.SandboxRecord, error) {
	return s.change(ctx, call, id, s.resumed, change{
		kind: recordv1.OperationKind_OPERATION_KIND_RESUME, state: berthv1.SandboxState_SANDBOX_STATE_RESUMING, event: "sandbox.resuming",
		admit: func(_ *store.Tx, sandbox *recordv1.SandboxRecord, op *recordv1.OperationRecord) (bool, error) {
			switch sandbox.GetState() {
			case berthv1.SandboxState_SANDBOX_STATE_RUNNING, berthv1.SandboxState_SANDBOX_STATE_RESUMING:
				return false, nil
			case berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
				op.Step = "thaw"
				return true, nil
			//mutation:destroyed-is-for-good case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_DESTROYED:
			case berthv1.SandboxState_SANDBOX_STATE_STOPPED:
				return true, nil
			default:
				return false, fault.New(fault.WrongState, "sandbox %s is %s: only a STOPPED or a SUSPENDED one can be resumed", id, request.StateName(sandbox.GetState())).
					With("state", request.StateName(sandbox.GetState())).With("wanted", "STOPPED or SUSPENDED")
			}
		},
	})
}

// resumed is created for a resume: one that failed leaves the sandbox as it was before.
func (s *Service) resumed(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	sandbox, err := s.created(ctx, id)
	if fault.Is(err, fault.WrongState) {
		if now, readErr := s.Record(id); readErr == nil && now.GetLastError() != nil {
			switch now.GetState() {
			case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
				return nil, operation.Error(now.GetLastError())
			}
		}
	}
	return sandbox, err
}

// Suspend freezes a RUNNING sandbox's machine and waits until it is SUSPENDED. One that is already is
// success.
func (s *Service) Suspend(ctx context.Context, call request.Call, id string) (*recordv1.SandboxRecord, error) {
	return s.change(ctx, call, id, s.suspended, change{
		kind: recordv1.OperationKind_OPERATION_KIND_SUSPEND, state: berthv1.SandboxState_SANDBOX_STATE_SUSPENDING, event: "sandbox.suspending",
		admit: func(_ *store.Tx, sandbox *recordv1.SandboxRecord, _ *recordv1.OperationRecord) (bool, error) {
			provider := sandbox.GetSpec().GetProvider()
			if !slices.Contains(sandbox.GetCapabilities(), string(providers.CapSuspend)) {
				return false, fault.New(fault.CapabilityMissing, "sandbox %s is on provider %s, which cannot suspend its machine here (`berth providers` says why)", id, provider).
					With("provider", provider).With("capability", string(providers.CapSuspend))
			}
			switch sandbox.GetState() {
			case berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDING:
				return false, nil
			}
			return true, request.WantRunning(sandbox)
		},
	})
}

// suspended waits until a sandbox is SUSPENDED, or says why it did not become so.
func (s *Service) suspended(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	sandbox, err := s.await(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
		return sandbox, nil
	case sandbox.GetLastError() != nil:
		return nil, operation.Error(sandbox.GetLastError())
	}
	return nil, fault.New(fault.WrongState, "sandbox %s became %s instead of SUSPENDED", id, request.StateName(sandbox.GetState())).
		With("state", request.StateName(sandbox.GetState())).With("wanted", "SUSPENDED")
}

// Destroy destroys a sandbox from every state and waits until its machine is gone. It supersedes any
// other operation; one that is destroyed already is success.
func (s *Service) Destroy(ctx context.Context, call request.Call, id string) (*recordv1.SandboxRecord, error) {
	return s.change(ctx, call, id, s.destroyed, change{
		kind: recordv1.OperationKind_OPERATION_KIND_DESTROY, state: berthv1.SandboxState_SANDBOX_STATE_DESTROYING, event: "sandbox.destroying",
		admit: func(tx *store.Tx, sandbox *recordv1.SandboxRecord, _ *recordv1.OperationRecord) (bool, error) {
			if under, err := beingDestroyed(tx, sandbox); err != nil || under {
				return false, err
			}
			return true, terminate(tx, sandbox.GetMachineId())
		},
	})
}

// destroyed waits until a sandbox is DESTROYED.
func (s *Service) destroyed(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	return s.awaitWhile(ctx, id, func(sandbox *recordv1.SandboxRecord) bool {
		return sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED
	})
}

// beingDestroyed reports whether a sandbox is destroyed, or an operation is at it. One that says
// DESTROYING and has no operation is destroyed by a new one.
func beingDestroyed(tx *store.Tx, sandbox *recordv1.SandboxRecord) (bool, error) {
	if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING {
		return sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED, nil
	}
	op, err := tx.Operation(sandbox.GetOperationId())
	return op != nil, err
}

// terminate marks a machine as one that must go; nothing undoes that.
func terminate(tx *store.Tx, machineID string) error {
	record, err := tx.Machine(machineID)
	if err != nil || record == nil || record.GetState() == recordv1.MachineState_MACHINE_STATE_GONE {
		return err
	}
	record.State = recordv1.MachineState_MACHINE_STATE_TERMINATING
	return tx.PutMachine(record, "", "")
}

// change is what a call wants to have done to a sandbox.
type change struct {
	kind  recordv1.OperationKind
	state berthv1.SandboxState // while it is being done
	event string
	// admit reports, in the transaction, whether there is anything to do, or why it can't be done. It may
	// prepare the operation and change other records.
	admit func(*store.Tx, *recordv1.SandboxRecord, *recordv1.OperationRecord) (bool, error)
}

// change writes down, in one transaction, that a change of a sandbox is begun, launches its operation and
// waits for it. What is being done already, or was asked for by the same request, is joined.
func (s *Service) change(ctx context.Context, call request.Call, id string, wait waiting, c change) (*recordv1.SandboxRecord, error) {
	var prior, operationID, superseded string
	update := s.opts.Store.Update
	if c.kind == recordv1.OperationKind_OPERATION_KIND_DESTROY {
		update = s.opts.Store.UpdateUrgent
	}
	err := update(ctx, func(tx *store.Tx) (err error) {
		operationID, superseded = "", ""
		if prior, err = call.Prior(tx); err != nil || prior != "" {
			return err
		}
		sandbox, err := call.Sandbox(tx, id)
		if err != nil {
			return err
		}
		op := newOperation(c.kind, sandbox)
		wanted, err := c.admit(tx, sandbox, op)
		if err != nil {
			return err
		}
		if err := call.Remember(tx, id, s.opts.Now()); err != nil || !wanted {
			return err
		}
		if superseded = sandbox.GetOperationId(); superseded != "" {
			if err := tx.DeleteOperation(superseded); err != nil {
				return err
			}
		}
		if err := s.operations.Add(tx, op); err != nil {
			return err
		}
		operationID = op.GetId()
		sandbox.State, sandbox.OperationId = c.state, operationID
		return tx.PutSandbox(sandbox, c.event, "")
	})
	switch {
	case err != nil:
		return nil, err
	case prior != "":
		return s.answerAgain(ctx, prior, wait)
	case operationID != "":
		s.operations.Launch(operationID, superseded)
	}
	return wait(ctx, id)
}

func newOperation(kind recordv1.OperationKind, sandbox *recordv1.SandboxRecord) *recordv1.OperationRecord {
	return &recordv1.OperationRecord{
		Namespace: sandbox.GetNamespace(), Kind: kind, SandboxId: sandbox.GetId(), MachineId: sandbox.GetMachineId(),
		Generation: sandbox.GetGeneration(),
	}
}

// waiting waits until a sandbox has become what a call wants, or says why it did not.
type waiting func(ctx context.Context, id string) (*recordv1.SandboxRecord, error)

// answerAgain answers a call that was made before: by waiting for what it began, and where that is over
// and the sandbox has gone on since, with the sandbox as it is now. One that never ran has not gone on: its
// create came to nothing.
func (s *Service) answerAgain(ctx context.Context, id string, wait waiting) (*recordv1.SandboxRecord, error) {
	sandbox, err := wait(ctx, id)
	if !fault.Is(err, fault.WrongState) && !fault.Is(err, fault.MachineGone) {
		return sandbox, err
	}
	now, readErr := s.Record(id)
	if readErr != nil || now.GetLastError() != nil || now.GetReadyTime() == nil {
		return nil, err
	}
	return now, nil
}

// await waits for the sandbox's open operation, if any, and returns the sandbox as it is then. One that is
// being destroyed is not waited for.
func (s *Service) await(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	return s.awaitWhile(ctx, id, func(sandbox *recordv1.SandboxRecord) bool {
		return sandbox.GetOperationId() != "" && sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING
	})
}

// awaitWhile waits for the sandbox's operations for as long as that is wanted.
func (s *Service) awaitWhile(ctx context.Context, id string, wanted func(*recordv1.SandboxRecord) bool) (*recordv1.SandboxRecord, error) {
	for over := ""; ; {
		sandbox, err := s.Record(id)
		if err != nil || !wanted(sandbox) {
			return sandbox, err
		}
		state := request.StateName(sandbox.GetState())
		if sandbox.GetOperationId() == over {
			return nil, fault.New(fault.Internal, "sandbox %s is %s, and no operation is at work on it: `berth rm %s` destroys it", id, state, id)
		}
		over = sandbox.GetOperationId()
		if err := s.operations.Wait(ctx, over); err != nil {
			return nil, fmt.Errorf("sandbox %s is still %s, which continues in the background%s: %w", id, state, s.trouble(id), err)
		}
	}
}

// trouble says why an operation takes so long, for an error's text; empty where it is not known to be in
// trouble.
func (s *Service) trouble(sandboxID string) string {
	sandbox, err := s.Record(sandboxID)
	if err != nil || sandbox.GetLastError() == nil {
		return ""
	}
	return " (its last attempt: " + sandbox.GetLastError().GetMessage() + ")"
}
