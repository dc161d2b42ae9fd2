package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// able refuses, before anything is created, what the provider cannot honour.
func (s *Service) able(ctx context.Context, name string, provider providers.Provider, spec *berthv1.SandboxSpec) error {
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	info, err := provider.Info(ctx)
	if err != nil {
		return fault.New(fault.ProviderUnavailable, "ask provider %s what it can do: %w", name, err).Retry(retryMost)
	}
	if !info.Healthy {
		return fault.New(fault.ProviderUnavailable, "provider %s cannot be used now: %s", name, info.Message).Retry(retryMost)
	}
	for _, wanted := range wants(spec) {
		if !has(info, wanted.capability) {
			return fault.New(fault.CapabilityMissing, "%s: provider %s cannot do that (capability %q): leave the field out, or choose a provider that has it (`berth providers`)",
				wanted.field, name, wanted.capability).With("provider", name).With("capability", string(wanted.capability))
		}
	}
	return knownOptions(name, info, spec)
}

type want struct {
	field      string
	capability providers.Capability
}

// wants lists the capabilities that a spec's fields ask for.
func wants(spec *berthv1.SandboxSpec) []want {
	var list []want
	add := func(asked bool, field string, capability providers.Capability) {
		if asked {
			list = append(list, want{field, capability})
		}
	}
	resources, egress := spec.GetResources(), spec.GetEgress().GetMode()
	add(spec.GetImage() != "", "spec.image", providers.CapImage)
	add(spec.GetWorkspace().GetPath() != "", "spec.workspace.path", providers.CapWorkspacePath)
	add(resources.GetCpus() != 0, "spec.resources.cpus", providers.CapCPUs)
	add(resources.GetMemoryBytes() != 0, "spec.resources.memory_bytes", providers.CapMemory)
	add(resources.GetDiskBytes() != 0, "spec.resources.disk_bytes", providers.CapDisk)
	add(resources.GetPids() != 0, "spec.resources.pids", providers.CapPIDs)
	add(egress == berthv1.Egress_MODE_NONE, "spec.egress", providers.CapEgressNone)
	add(egress == berthv1.Egress_MODE_ALLOW_LIST, "spec.egress", providers.CapEgressAllowList)
	// These the broker itself does not do yet, on any provider.
	add(spec.GetLifetime() != nil, "spec.lifetime", "lifetime")
	add(spec.GetFromCheckpoint() != "", "spec.from_checkpoint", "checkpoint")
	return list
}

func has(info providers.Info, wanted providers.Capability) bool {
	for _, capability := range info.Capabilities {
		if capability == wanted {
			return true
		}
	}
	return false
}

func knownOptions(name string, info providers.Info, spec *berthv1.SandboxSpec) error {
	known := map[string]bool{}
	names := make([]string, 0, len(info.Options))
	for _, option := range info.Options {
		known[option.Name] = true
		names = append(names, option.Name)
	}
	for option := range spec.GetProviderOptions() {
		if !known[option] {
			sort.Strings(names)
			takes := "it takes none"
			if len(names) > 0 {
				takes = "it takes " + strings.Join(names, ", ")
			}
			return fault.New(fault.CapabilityMissing, "spec.provider_options: provider %s has no option %q; %s", name, option, takes).
				With("provider", name).With("capability", "option."+option)
		}
	}
	return nil
}

// Verdict is what a look at a machine found.
type Verdict int

// The verdicts.
const (
	Unsure  Verdict = iota // the provider did not say; look again
	Present                // it runs, or an operation is at work on it
	Stopped                // its processes are gone, its disk is there
	Gone                   // the provider was asked and does not have it
)

// Look asks the provider how a machine is that no longer answers.
func (s *Service) Look(ctx context.Context, machineID string) Verdict {
	machine, err := s.machineRecord(machineID)
	if err != nil || machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED {
		return Present
	}
	found, err := s.inspect(ctx, machine)
	switch {
	case isGone(found, err):
		return Gone
	case err != nil:
		return Unsure
	case found.State == providers.MachineStopped:
		return Stopped
	default:
		return Present
	}
}

// isGone reports whether what was found of a machine that was booted once is no machine any more: it was
// whole then, so one of which a part is left is half destroyed.
func isGone(found providers.Machine, err error) bool {
	return errors.Is(err, providers.ErrNotFound) || err == nil && found.State == providers.MachinePartial
}

// MarkStopped writes down that a machine's processes are gone and its disk is there. Its jobs stay
// open: resuming the sandbox tells what became of them.
func (s *Service) MarkStopped(ctx context.Context, machineID string) error {
	var open []string
	err := s.mark(ctx, machineID, func(tx *store.Tx, _ *recordv1.MachineRecord, sandbox *recordv1.SandboxRecord) (string, string, error) {
		if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
			return "", "", nil // some providers suspend a machine by stopping it; resuming finds out
		}
		cause := fault.New(fault.WrongState, "the machine's guest and processes are gone (killed, or the host was rebooted): resume the sandbox to go on with its disk")
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_STOPPED, problem(cause, s.opts.Now())
		open = nil
		jobs, err := tx.OpenJobs(machineID)
		for _, job := range jobs {
			open = append(open, job.GetId())
		}
		return "sandbox.stopped", cause.Error(), err
	})
	if err == nil {
		s.opts.Hooks.JobsChanged(open)
	}
	return err
}

// MarkLost writes down that the provider no longer has a machine that the broker did not destroy.
func (s *Service) MarkLost(ctx context.Context, machineID string) error {
	var ended []string
	err := s.mark(ctx, machineID, func(tx *store.Tx, machine *recordv1.MachineRecord, sandbox *recordv1.SandboxRecord) (string, string, error) {
		cause := fault.New(fault.MachineGone, "provider %s no longer has machine %s: destroy the sandbox and create another", machine.GetProvider(), machineID)
		sandbox.State, sandbox.LastError = berthv1.SandboxState_SANDBOX_STATE_LOST, problem(cause, s.opts.Now())
		var err error
		ended, err = s.opts.Hooks.LoseJobs(tx, machineID, "machine_gone: the provider no longer has it")
		return "sandbox.lost", cause.Error(), err
	})
	if err == nil {
		s.opts.Hooks.JobsChanged(ended)
	}
	return err
}

// mark changes the state of a RUNNING (or STOPPED) sandbox that has no operation in progress, and
// ends the link to its machine.
func (s *Service) mark(ctx context.Context, machineID string, change func(*store.Tx, *recordv1.MachineRecord, *recordv1.SandboxRecord) (event, message string, err error)) error {
	changed := false
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = false
		machine, err := tx.Machine(machineID)
		if err != nil || machine == nil || machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED {
			return err
		}
		sandbox, err := tx.Sandbox(machine.GetSandboxId())
		if err != nil || sandbox == nil || sandbox.GetOperationId() != "" {
			return err
		}
		before := sandbox.GetState()
		event, message, err := change(tx, machine, sandbox)
		if err != nil || sandbox.GetState() == before {
			return err
		}
		changed = true
		return tx.PutSandbox(sandbox, event, message)
	})
	if err == nil && changed {
		s.opts.Links.Drop(machineID)
	}
	return err
}

func (s *Service) inspect(ctx context.Context, machine *recordv1.MachineRecord) (providers.Machine, error) {
	_, provider, err := s.provider(machine.GetProvider())
	if err != nil {
		return providers.Machine{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.ProviderTimeout)
	defer cancel()
	return provider.Inspect(ctx, machine.GetId())
}

func (s *Service) machineRecord(id string) (*recordv1.MachineRecord, error) {
	var machine *recordv1.MachineRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		machine, err = tx.Machine(id)
		return err
	})
	if err == nil && machine == nil {
		err = fmt.Errorf("the ledger has no machine %s: %w", id, errOvertaken)
	}
	return machine, err
}

func egressMode(mode berthv1.Egress_Mode) providers.EgressMode {
	switch mode {
	case berthv1.Egress_MODE_NONE:
		return providers.EgressNone
	case berthv1.Egress_MODE_ALLOW_LIST:
		return providers.EgressAllowList
	default:
		return providers.EgressOpen
	}
}

// Isolation is how the API says what lies between a machine and its host.
func Isolation(i providers.Isolation) berthv1.Isolation {
	return map[providers.Isolation]berthv1.Isolation{
		providers.IsolationNone:       berthv1.Isolation_ISOLATION_NONE,
		providers.IsolationNamespace:  berthv1.Isolation_ISOLATION_NAMESPACE,
		providers.IsolationContainer:  berthv1.Isolation_ISOLATION_CONTAINER,
		providers.IsolationUserKernel: berthv1.Isolation_ISOLATION_USER_KERNEL,
		providers.IsolationMicroVM:    berthv1.Isolation_ISOLATION_MICROVM,
	}[i]
}
