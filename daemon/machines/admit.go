package machines

import (
	"context"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// unhealthyRetry is how soon a caller should come back to a provider that cannot be used.
const unhealthyRetry = 15 * time.Second

// Admit refuses, before anything is created, what the provider of a spec cannot honour, and returns the
// provider's name.
func (m *Service) Admit(ctx context.Context, spec *berthv1.SandboxSpec) (string, error) {
	named, err := m.provider(spec.GetProvider())
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	info, err := named.Provider.Info(ctx)
	if err != nil {
		return "", fault.New(fault.ProviderUnavailable, "ask provider %s what it can do: %w", named.Name, err).Retry(unhealthyRetry)
	}
	if !info.Healthy {
		return "", fault.New(fault.ProviderUnavailable, "provider %s cannot be used now: %s", named.Name, info.Message).Retry(unhealthyRetry)
	}
	return named.Name, admit(named.Name, info, spec)
}

func admit(name string, info providers.Info, spec *berthv1.SandboxSpec) error {
	for _, wanted := range wants(spec) {
		if !slices.Contains(info.Capabilities, wanted.capability) {
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
