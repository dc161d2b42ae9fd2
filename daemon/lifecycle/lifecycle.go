// Package lifecycle makes, finds, resumes and destroys sandboxes. Each change is a durable
// operation of idempotent steps (probe, act, record): it is written down before it is done, goes on
// after a crash from its last recorded step, and takes an ambiguous answer of a provider for
// neither success nor failure. It never runs a caller's command, and never looks into a job.
package lifecycle

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// tokenBytes is the length of a machine's token: as much as the HMAC-SHA256 of the handshake uses.
const tokenBytes = 32

// Hooks are what the rooms above do in the middle of an operation.
type Hooks struct {
	// PrepareWorkspace sets up a new machine's workspace. It may be run again after a crash.
	PrepareWorkspace func(ctx context.Context, sandbox *recordv1.SandboxRecord) error
	// SettleJobs stops the jobs of a machine that is about to be destroyed and brings their receipts
	// home, as far as the guest can be reached.
	SettleJobs func(ctx context.Context, machineID string)
	// LoseJobs ends, in the transaction, the jobs of a machine that is gone; it returns their ids.
	LoseJobs func(tx *store.Tx, machineID, reason string) ([]string, error)
	// JobsChanged is told, after the commit, which jobs LoseJobs ended, or whose machine was stopped.
	JobsChanged func(jobIDs []string)
}

// Options configure a Service. All but Now and the timeouts are required.
type Options struct {
	Store     *store.Store
	Vault     *vault.Vault
	Links     *guestlink.Links
	Providers []Named // the first is the default
	SocketDir string  // short; each machine's sockets lie in a directory of their own below it
	Log       *slog.Logger
	Now       func() time.Time
	Hooks     Hooks
	// ProviderTimeout bounds one call of a provider. Default: 2 minutes; booting a VM is the slowest.
	ProviderTimeout time.Duration
	// GuestTimeout bounds the time from a boot to the guest's first hello. Default: a minute.
	GuestTimeout time.Duration
}

// Named is a provider under its name.
type Named struct {
	Name     string
	Provider providers.Provider
}

// Service makes, finds, resumes and destroys sandboxes.
type Service struct {
	opts      Options
	providers map[string]providers.Provider

	ctx     context.Context //nolint:containedctx // ends the operations' goroutines, which outlive every call
	cancel  context.CancelFunc
	drain   context.CancelFunc
	drained <-chan struct{}
	wg      sync.WaitGroup

	mu      sync.Mutex
	running map[string]*run    // by operation id
	failing map[string]failure // operations whose step fails, by id
}

// New makes a service; nothing runs until Resume or a call.
func New(opts Options) *Service {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.ProviderTimeout == 0 {
		opts.ProviderTimeout = providerTimeout
	}
	if opts.GuestTimeout == 0 {
		opts.GuestTimeout = guestTimeout
	}
	ctx, cancel := context.WithCancel(context.Background())
	draining, drain := context.WithCancel(ctx)
	s := &Service{
		opts: opts, providers: map[string]providers.Provider{}, running: map[string]*run{}, failing: map[string]failure{},
		ctx: ctx, cancel: cancel, drain: drain, drained: draining.Done(),
	}
	for _, named := range opts.Providers {
		s.providers[named.Name] = named.Provider
	}
	return s
}

// SetHooks gives the service what the rooms above do; before the first call.
func (s *Service) SetHooks(hooks Hooks) { s.opts.Hooks = hooks }

// Drain ends the calls that only wait for an operation, so that the broker can stop soon.
func (s *Service) Drain() { s.drain() }

// Close interrupts the operations in progress, which go on at the next start, and waits for them.
func (s *Service) Close() {
	s.cancel()
	s.wg.Wait()
}

// Create makes a sandbox and waits until it runs. The operation goes on when the context ends; the
// same request joins it.
func (s *Service) Create(ctx context.Context, call Call, spec *berthv1.SandboxSpec) (*recordv1.SandboxRecord, error) {
	// A request that was made before has its answer, whatever the provider says now.
	prior, err := s.prior(call)
	if err != nil {
		return nil, err
	}
	if prior != "" {
		return s.answeredAgain(ctx, prior, s.settled)
	}
	spec = proto.CloneOf(spec)
	name, provider, err := s.provider(spec.GetProvider())
	if err != nil {
		return nil, err
	}
	spec.Provider = name
	if err := s.able(ctx, name, provider, spec); err != nil {
		return nil, err
	}
	id, operationID, err := s.reserve(ctx, call, spec)
	if err != nil {
		return nil, err
	}
	if operationID != "" {
		s.launch(operationID, "")
	}
	return s.settled(ctx, id)
}

// answeredAgain answers a call that was made before: by waiting for what it began, and where that is over
// and the sandbox has gone on since, with the sandbox as it is now. One that never ran has not gone on: its
// create came to nothing.
func (s *Service) answeredAgain(ctx context.Context, id string, wait func(context.Context, string) (*recordv1.SandboxRecord, error)) (*recordv1.SandboxRecord, error) {
	sandbox, err := wait(ctx, id)
	if !fault.Is(err, fault.WrongState) && !fault.Is(err, fault.MachineGone) {
		return sandbox, err
	}
	now, readErr := s.sandbox(id)
	if readErr != nil || now.GetLastError() != nil || now.GetReadyTime() == nil {
		return nil, err
	}
	return now, nil
}

// prior returns what a request made or acted on before, if it was made before.
func (s *Service) prior(call Call) (id string, err error) {
	err = s.opts.Store.View(func(tx *store.Tx) (err error) {
		id, err = call.Prior(tx)
		return err
	})
	return id, err
}

// reserve writes the sandbox, its machine and the operation down in one transaction. The operation
// id is empty when the request was made before: then there is nothing to launch, only to join.
func (s *Service) reserve(ctx context.Context, call Call, spec *berthv1.SandboxSpec) (sandboxID, operationID string, err error) {
	now := s.opts.Now()
	sandbox := &recordv1.SandboxRecord{
		Id: NewID("sb"), Namespace: call.Namespace, State: berthv1.SandboxState_SANDBOX_STATE_CREATING,
		MachineId: NewID("m"), CreateTime: timestamppb.New(now), LastActivityTime: timestamppb.New(now),
	}
	if sandbox.SealedEnv, err = s.sealEnv(sandbox.GetId(), spec); err != nil {
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
	operation := s.operation(recordv1.OperationKind_OPERATION_KIND_CREATE, sandbox)
	sandbox.OperationId = operation.GetId()

	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		prior, err := call.Prior(tx)
		if err != nil {
			return err
		}
		if prior != "" {
			sandboxID, operationID = prior, ""
			return nil
		}
		if err := claimSession(tx, call.Namespace, spec.GetSessionKey(), sandbox.GetId()); err != nil {
			return err
		}
		sandboxID, operationID = sandbox.GetId(), operation.GetId()
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.creating", "on provider "+spec.GetProvider()),
			tx.PutMachine(machine, "", ""),
			tx.PutOperation(operation),
			call.Remember(tx, sandbox.GetId(), now),
		)
	})
	return sandboxID, operationID, err
}

// sealEnv seals the spec's secrets and takes their values out of it.
func (s *Service) sealEnv(sandboxID string, spec *berthv1.SandboxSpec) ([]byte, error) {
	if len(spec.GetSecretEnv()) == 0 {
		return nil, nil
	}
	plain, err := proto.Marshal(&recordv1.SandboxSecrets{Env: spec.GetSecretEnv()})
	if err != nil {
		return nil, fmt.Errorf("encode the sandbox's secrets: %w", err)
	}
	spec.SecretEnv = Redacted(spec.GetSecretEnv())
	return s.opts.Vault.Seal(sandboxID, plain)
}

// Redacted returns the keys with empty values.
func Redacted(secrets map[string]string) map[string]string {
	redacted := make(map[string]string, len(secrets))
	for key := range secrets {
		redacted[key] = ""
	}
	return redacted
}

// Environment returns the sandbox's environment, its secrets included.
func (s *Service) Environment(sandbox *recordv1.SandboxRecord) (map[string]string, error) {
	env := maps.Clone(sandbox.GetSpec().GetEnv())
	if env == nil {
		env = map[string]string{}
	}
	if len(sandbox.GetSealedEnv()) == 0 {
		return env, nil
	}
	plain, err := s.opts.Vault.Unseal(sandbox.GetId(), sandbox.GetSealedEnv())
	if err != nil {
		return nil, fmt.Errorf("open the secrets of sandbox %s: %w", sandbox.GetId(), err)
	}
	secrets := &recordv1.SandboxSecrets{}
	if err := proto.Unmarshal(plain, secrets); err != nil {
		return nil, fmt.Errorf("decode the secrets of sandbox %s: %w", sandbox.GetId(), err)
	}
	maps.Copy(env, secrets.GetEnv())
	return env, nil
}

func claimSession(tx *store.Tx, namespace, key, sandboxID string) error {
	if key == "" {
		return nil
	}
	held, err := tx.Session(namespace, key)
	if err != nil {
		return err
	}
	if held != nil {
		return fault.New(fault.SessionKeyInUse, "session key %q is held by sandbox %s: use that one, or destroy it first", key, held.GetSandboxId()).
			With("session_key", key).With("sandbox_id", held.GetSandboxId())
	}
	return tx.PutSession(namespace, key, &recordv1.SessionRecord{SandboxId: sandboxID})
}

// settled waits for the sandbox's open operation, if any, and returns the sandbox as it is then, or
// why it did not become what the operation was to make of it.
func (s *Service) settled(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	for {
		sandbox, err := s.sandbox(id)
		if err != nil {
			return nil, err
		}
		switch sandbox.GetState() {
		case berthv1.SandboxState_SANDBOX_STATE_RUNNING:
			return sandbox, nil
		case berthv1.SandboxState_SANDBOX_STATE_FAILED:
			return nil, refusal(sandbox.GetLastError())
		}
		if sandbox.GetOperationId() == "" || isDestroying(sandbox) {
			return nil, WantRunning(sandbox)
		}
		if err := s.join(ctx, sandbox.GetOperationId()); err != nil {
			return nil, fmt.Errorf("sandbox %s is still %s, and goes on without you%s: %w", id, StateName(sandbox.GetState()), s.trouble(id), err)
		}
	}
}

// trouble says why an operation takes so long, for an error's text; empty where it is not known to be in
// trouble.
func (s *Service) trouble(sandboxID string) string {
	sandbox, err := s.sandbox(sandboxID)
	if err != nil || sandbox.GetLastError() == nil {
		return ""
	}
	return " (its last attempt: " + sandbox.GetLastError().GetMessage() + ")"
}

func isDestroying(sandbox *recordv1.SandboxRecord) bool {
	return sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYING ||
		sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED
}

// Get returns a sandbox and its open operation, if it has one.
func (s *Service) Get(namespace, id string) (*recordv1.SandboxRecord, *recordv1.OperationRecord, error) {
	var sandbox *recordv1.SandboxRecord
	var operation *recordv1.OperationRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		if sandbox, err = tx.Sandbox(id); err != nil {
			return err
		}
		if sandbox == nil || sandbox.GetNamespace() != namespace {
			return NoSandbox(id)
		}
		if sandbox.GetOperationId() != "" {
			operation, err = tx.Operation(sandbox.GetOperationId())
		}
		return err
	})
	return sandbox, operation, err
}

func (s *Service) sandbox(id string) (*recordv1.SandboxRecord, error) {
	var sandbox *recordv1.SandboxRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		if sandbox, err = tx.Sandbox(id); err == nil && sandbox == nil {
			err = NoSandbox(id)
		}
		return err
	})
	return sandbox, err
}

// Resume makes a SUSPENDED sandbox go on, or a STOPPED one run again in a new generation, and waits
// until it runs. One that runs is success.
func (s *Service) Resume(ctx context.Context, call Call, id string) (*recordv1.SandboxRecord, error) {
	prior, err := s.prior(call)
	if err != nil {
		return nil, err
	}
	if prior != "" {
		return s.answeredAgain(ctx, prior, s.resumed)
	}
	operationID, err := s.reserveResume(ctx, call, id)
	if err != nil {
		return nil, err
	}
	if operationID != "" {
		s.launch(operationID, "")
	}
	return s.resumed(ctx, id)
}

// resumed waits until a sandbox runs, or says why it did not come to that.
func (s *Service) resumed(ctx context.Context, id string) (*recordv1.SandboxRecord, error) {
	sandbox, err := s.settled(ctx, id)
	if fault.Is(err, fault.WrongState) {
		if record, readErr := s.sandbox(id); readErr == nil && record.GetLastError() != nil {
			switch record.GetState() {
			case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
				return nil, refusal(record.GetLastError())
			}
		}
	}
	return sandbox, err
}

func (s *Service) reserveResume(ctx context.Context, call Call, id string) (operationID string, err error) {
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
		case berthv1.SandboxState_SANDBOX_STATE_RUNNING, berthv1.SandboxState_SANDBOX_STATE_RESUMING:
			return call.Remember(tx, id, now)
		case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
		default:
			return fault.New(fault.WrongState, "sandbox %s is %s: only a STOPPED or a SUSPENDED one can be resumed", id, StateName(sandbox.GetState())).
				With("state", StateName(sandbox.GetState())).With("wanted", "STOPPED or SUSPENDED")
		}
		operation := s.operation(recordv1.OperationKind_OPERATION_KIND_RESUME, sandbox)
		if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_SUSPENDED {
			operation.Step = "thaw"
		}
		operationID = operation.GetId()
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_RESUMING, operationID
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.resuming", ""),
			tx.PutOperation(operation),
			call.Remember(tx, id, now),
		)
	})
	return operationID, err
}

// Destroy destroys a sandbox from every state and waits until its machine is gone. It overtakes any
// other operation; one that is destroyed already is success.
func (s *Service) Destroy(ctx context.Context, call Call, id string) (*recordv1.SandboxRecord, error) {
	operationID, overtaken, err := s.reserveDestroy(ctx, call, id)
	if err != nil {
		return nil, err
	}
	if operationID != "" {
		s.launch(operationID, overtaken)
	}
	for {
		sandbox, err := s.sandbox(id)
		if err != nil || sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
			return sandbox, err
		}
		if err := s.join(ctx, sandbox.GetOperationId()); err != nil {
			return nil, fmt.Errorf("sandbox %s is being destroyed, which goes on without you%s: %w", id, s.trouble(id), err)
		}
	}
}

func (s *Service) reserveDestroy(ctx context.Context, call Call, id string) (operationID, overtaken string, err error) {
	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		operationID, overtaken = "", ""
		if prior, err := call.Prior(tx); err != nil || prior != "" {
			return err
		}
		sandbox, err := call.Sandbox(tx, id)
		if err != nil {
			return err
		}
		if err := call.Remember(tx, id, s.opts.Now()); err != nil {
			return err
		}
		if under, err := beingDestroyed(tx, sandbox); err != nil || under {
			return err
		}
		if sandbox.GetOperationId() != "" {
			overtaken = sandbox.GetOperationId()
			if err := tx.DeleteOperation(overtaken); err != nil {
				return err
			}
		}
		operation := s.operation(recordv1.OperationKind_OPERATION_KIND_DESTROY, sandbox)
		operationID = operation.GetId()
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, operationID
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.destroying", ""),
			tx.PutOperation(operation),
			doom(tx, sandbox.GetMachineId()),
		)
	})
	return operationID, overtaken, err
}

// beingDestroyed reports whether a sandbox is destroyed, or an operation is at it. One that says
// DESTROYING and has no operation is destroyed by a new one.
func beingDestroyed(tx *store.Tx, sandbox *recordv1.SandboxRecord) (bool, error) {
	if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING {
		return sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED, nil
	}
	operation, err := tx.Operation(sandbox.GetOperationId())
	return operation != nil, err
}

// doom marks a machine as one that must go; nothing undoes that.
func doom(tx *store.Tx, machineID string) error {
	machine, err := tx.Machine(machineID)
	if err != nil || machine == nil || machine.GetState() == recordv1.MachineState_MACHINE_STATE_GONE {
		return err
	}
	machine.State = recordv1.MachineState_MACHINE_STATE_DOOMED
	return tx.PutMachine(machine, "", "")
}

func (s *Service) operation(kind recordv1.OperationKind, sandbox *recordv1.SandboxRecord) *recordv1.OperationRecord {
	return &recordv1.OperationRecord{
		Id: NewID("op"), Namespace: sandbox.GetNamespace(), Kind: kind, Step: firstStep[kind],
		SandboxId: sandbox.GetId(), MachineId: sandbox.GetMachineId(),
		Generation: sandbox.GetGeneration(), CreateTime: timestamppb.New(s.opts.Now()),
	}
}

// provider finds a provider by name; empty is the default.
func (s *Service) provider(name string) (string, providers.Provider, error) {
	if name == "" && len(s.opts.Providers) > 0 {
		name = s.opts.Providers[0].Name
	}
	if provider, ok := s.providers[name]; ok {
		return name, provider, nil
	}
	known := make([]string, 0, len(s.opts.Providers))
	for _, named := range s.opts.Providers {
		known = append(known, named.Name)
	}
	return "", nil, fault.New(fault.ProviderNotFound, "spec.provider: this broker has no provider %q, only %s", name, strings.Join(known, ", ")).
		With("provider", name).With("known", fmt.Sprint(known))
}

// Providers returns the providers in their order.
func (s *Service) Providers() []Named { return slices.Clone(s.opts.Providers) }

// target is what a link to the machine needs.
func (s *Service) target(machine *recordv1.MachineRecord) (guestlink.Target, error) {
	provider, ok := s.providers[machine.GetProvider()]
	if !ok {
		return guestlink.Target{}, fault.New(fault.ProviderNotFound,
			"machine %s belongs to provider %q, which this broker was not started with: start it with --provider %s",
			machine.GetId(), machine.GetProvider(), machine.GetProvider()).With("provider", machine.GetProvider())
	}
	token, err := s.opts.Vault.Unseal(machine.GetId(), machine.GetSealedToken())
	if err != nil {
		return guestlink.Target{}, fmt.Errorf("open the token of machine %s: %w", machine.GetId(), err)
	}
	return guestlink.Target{
		MachineID: machine.GetId(), Token: token, Provider: provider, Machine: s.machine(machine),
	}, nil
}

// machine is the machine as the provider knows it.
func (s *Service) machine(record *recordv1.MachineRecord) providers.Machine {
	return providers.Machine{
		ID: record.GetId(), Handle: providers.Handle{Version: record.GetHandleVersion(), Bytes: record.GetHandle()},
		ListenDir: s.ListenDir(record.GetId()),
	}
}

// ListenDir is the directory of a machine's sockets.
func (s *Service) ListenDir(machineID string) string {
	return filepath.Join(s.opts.SocketDir, machineID)
}

// OpenLink begins to keep a link to the guest of a machine that was booted.
func (s *Service) OpenLink(machine *recordv1.MachineRecord) error {
	target, err := s.target(machine)
	if err != nil {
		return err
	}
	s.opts.Links.Open(target)
	return nil
}

// BootChanged writes down that the guest of a running machine was started again behind our back: no
// process of the old boot survived, so the sandbox is in a new generation. It reports whether it
// was so.
func (s *Service) BootChanged(ctx context.Context, machineID string, hello *guestv1.HelloResponse) (bool, error) {
	changed := false
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = false
		machine, err := tx.Machine(machineID)
		if err != nil || machine == nil || machine.GetBootId() == "" || machine.GetBootId() == hello.GetBootId() {
			return err
		}
		sandbox, err := tx.Sandbox(machine.GetSandboxId())
		if err != nil || sandbox == nil || sandbox.GetOperationId() != "" {
			return err // an operation in progress records the boot itself
		}
		changed = true
		sandbox.Generation++
		sandbox.State = berthv1.SandboxState_SANDBOX_STATE_RUNNING
		machine.Generation, machine.BootId = sandbox.GetGeneration(), hello.GetBootId()
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.rebooted", "the guest was started again"),
			tx.PutMachine(machine, "", ""),
		)
	})
	return changed, err
}

// SetupAttempts is how often a sandbox's setup is begun when something interrupts it.
const SetupAttempts = 5

// SetupJobID names the guest's job that sets a sandbox up, for each attempt from 1 on. The name is
// the same after a crash, so that a setup which still runs is joined. It is no job of the ledger.
func SetupJobID(sandboxID string, attempt int) string {
	id := ulid.ULID{}
	if made, err := ulid.Parse(strings.TrimPrefix(sandboxID, "sb_")); err == nil {
		_ = id.SetTime(made.Time()) // a ULID's own time is in range
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "setup %s %d", sandboxID, attempt))
	_ = id.SetEntropy(sum[:10]) // ten bytes are what it takes
	return "job_" + id.String()
}

// IsSetupJob reports whether a job's id is one of a sandbox's setup.
func IsSetupJob(sandboxID, jobID string) bool {
	for attempt := range SetupAttempts {
		if SetupJobID(sandboxID, attempt+1) == jobID {
			return true
		}
	}
	return false
}

// Page is a piece of a list: at most Size, after the resource named After.
type Page = store.Page

// Filter says which sandboxes a list shows.
type Filter struct {
	States     []berthv1.SandboxState // none: all but DESTROYED and FAILED
	Labels     map[string]string      // an empty value matches any
	SessionKey string
}

// List returns a page of sandboxes, newest first, and the ledger's revision that it shows.
func (s *Service) List(namespace string, filter Filter, page store.Page) (sandboxes []*recordv1.SandboxRecord, next string, revision uint64, err error) {
	err = s.opts.Store.View(func(tx *store.Tx) (err error) {
		revision = tx.Revision()
		sandboxes, next, err = tx.ListSandboxes(namespace, page, func(sandbox *recordv1.SandboxRecord) bool {
			return matchesState(sandbox.GetState(), filter.States) &&
				MatchesLabels(sandbox.GetSpec().GetLabels(), filter.Labels) &&
				(filter.SessionKey == "" || sandbox.GetSpec().GetSessionKey() == filter.SessionKey)
		})
		return err
	})
	return sandboxes, next, revision, err
}

func matchesState(state berthv1.SandboxState, wanted []berthv1.SandboxState) bool {
	if len(wanted) == 0 {
		return state != berthv1.SandboxState_SANDBOX_STATE_DESTROYED && state != berthv1.SandboxState_SANDBOX_STATE_FAILED
	}
	return slices.Contains(wanted, state)
}

// MatchesLabels reports whether a resource bears all the wanted labels; an empty value matches any.
func MatchesLabels(labels, wanted map[string]string) bool {
	for key, value := range wanted {
		if have, found := labels[key]; !found || value != "" && have != value {
			return false
		}
	}
	return true
}

// Counts is how much there is.
type Counts struct {
	ByState        map[string]uint32 // sandboxes that are not destroyed or failed, by their state's name
	OpenOperations uint32
}

// Counts counts sandboxes and operations.
func (s *Service) Counts() (Counts, error) {
	counts := Counts{ByState: map[string]uint32{}}
	err := s.opts.Store.View(func(tx *store.Tx) error {
		live, err := tx.LiveSandboxes()
		if err != nil {
			return err
		}
		for _, sandbox := range live {
			counts.ByState[StateName(sandbox.GetState())]++
		}
		open, err := tx.OpenOperations()
		counts.OpenOperations = uint32(len(open))
		return err
	})
	return counts, err
}
