// Package machines has the broker's machines at their providers: it knows the providers, says what one can do
// for a sandbox's spec, boots, finds and destroys machines by their records, and opens the link to a machine's
// guest. It never writes to the ledger, and concludes nothing from a provider that does not answer.
package machines

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// The least that a machine may be limited to, on any provider.
const (
	MinMemoryBytes = providers.MinMemoryBytes
	MinPIDs        = providers.MinPIDs
)

// defaultProviderTimeout bounds one call of a provider.
const defaultProviderTimeout = 2 * time.Minute

// Options configure a Service. All but the timeouts are required.
type Options struct {
	Store     *store.Store
	Vault     *vault.Vault
	Links     *guestlink.Links
	Providers []Named // the first is the default
	SocketDir string  // short; each machine's sockets lie in a directory of their own below it
	Log       *slog.Logger
	Now       func() time.Time
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

// Service is the machines of a broker. Its methods may be called concurrently.
type Service struct {
	opts Options
}

// New makes a service.
func New(opts Options) *Service {
	if opts.ProviderTimeout == 0 {
		opts.ProviderTimeout = defaultProviderTimeout
	}
	if opts.GuestTimeout == 0 {
		opts.GuestTimeout = defaultGuestTimeout
	}
	return &Service{opts: opts}
}

// Providers returns the providers in their order.
func (m *Service) Providers() []Named { return slices.Clone(m.opts.Providers) }

// provider finds a provider by name; empty is the default.
func (m *Service) provider(name string) (Named, error) {
	known := make([]string, 0, len(m.opts.Providers))
	for _, named := range m.opts.Providers {
		if named.Name == name || name == "" {
			return named, nil
		}
		known = append(known, named.Name)
	}
	return Named{}, fault.New(fault.ProviderNotFound, "spec.provider: this broker has no provider %q, only %s", name, strings.Join(known, ", ")).
		With("provider", name).With("known", fmt.Sprint(known))
}

// of returns the provider of a machine.
func (m *Service) of(record *recordv1.MachineRecord) (providers.Provider, error) {
	name := record.GetProvider()
	for _, named := range m.opts.Providers {
		if named.Name == name {
			return named.Provider, nil
		}
	}
	return nil, fault.New(fault.ProviderNotFound, "machine %s belongs to provider %q, which this broker was not started with: start it with --provider %s",
		record.GetId(), name, name).With("provider", name)
}

// Record returns a machine's record; nil and no error where there is none.
func (m *Service) Record(id string) (*recordv1.MachineRecord, error) {
	var machine *recordv1.MachineRecord
	err := m.opts.Store.View(func(tx *store.Tx) (err error) {
		machine, err = tx.Machine(id)
		return err
	})
	return machine, err
}

// ListenDir is the directory of a machine's sockets.
func (m *Service) ListenDir(id string) string { return filepath.Join(m.opts.SocketDir, id) }

// Target is the machine as its provider knows it.
func (m *Service) Target(record *recordv1.MachineRecord) providers.Machine {
	return providers.Machine{
		ID: record.GetId(), Handle: providers.Handle{Version: record.GetHandleVersion(), Bytes: record.GetHandle()},
		ListenDir: m.ListenDir(record.GetId()),
	}
}

// OpenLink begins to keep a link to the guest of a machine that was booted.
func (m *Service) OpenLink(record *recordv1.MachineRecord) error {
	provider, err := m.of(record)
	if err != nil {
		return err
	}
	token, err := m.token(record)
	if err != nil {
		return err
	}
	m.opts.Links.Open(guestlink.Target{MachineID: record.GetId(), Token: token, Provider: provider, Machine: m.Target(record)})
	return nil
}

func (m *Service) token(record *recordv1.MachineRecord) ([]byte, error) {
	token, err := m.opts.Vault.Unseal(record.GetId(), record.GetSealedToken())
	if err != nil {
		return nil, fmt.Errorf("open the token of machine %s: %w", record.GetId(), err)
	}
	return token, nil
}

// Boot makes the provider run the machine. The provider probes by the machine's id, so that a second call
// finds what the first one made.
func (m *Service) Boot(ctx context.Context, record *recordv1.MachineRecord, generation uint64) (providers.Handle, error) {
	provider, err := m.of(record)
	if err != nil {
		return providers.Handle{}, err
	}
	token, err := m.token(record)
	if err != nil {
		return providers.Handle{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	handle, err := provider.Create(ctx, m.spec(record, token, generation))
	if err != nil {
		return providers.Handle{}, fmt.Errorf("boot machine %s on provider %s: %w", record.GetId(), record.GetProvider(), err)
	}
	return handle, nil
}

func (m *Service) spec(record *recordv1.MachineRecord, token []byte, generation uint64) providers.MachineSpec {
	spec := record.GetSpec()
	return providers.MachineSpec{
		MachineID: record.GetId(), BrokerID: m.opts.Store.Instance(), Generation: generation, Token: token,
		Image: spec.GetImage(), Workspace: spec.GetWorkspace(), Options: spec.GetOptions(),
		Resources: providers.Resources{
			CPUs: spec.GetResources().GetCpus(), MemoryBytes: spec.GetResources().GetMemoryBytes(),
			DiskBytes: spec.GetResources().GetDiskBytes(), PIDs: spec.GetResources().GetPids(),
		},
		Egress:    providers.Egress{Mode: egressMode(spec.GetEgress().GetMode()), AllowHosts: spec.GetEgress().GetAllowHosts()},
		ListenDir: m.ListenDir(record.GetId()),
	}
}

// Info says what the machine's provider is and promises.
func (m *Service) Info(ctx context.Context, record *recordv1.MachineRecord) (providers.Info, error) {
	provider, err := m.of(record)
	if err != nil {
		return providers.Info{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	return provider.Info(ctx)
}

// Destroy destroys the machine at its provider.
func (m *Service) Destroy(ctx context.Context, record *recordv1.MachineRecord) error {
	provider, err := m.of(record)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	if err := provider.Destroy(ctx, m.Target(record)); err != nil {
		return fmt.Errorf("destroy machine %s on provider %s: %w", record.GetId(), record.GetProvider(), err)
	}
	return nil
}

// Suspend freezes the machine. Errors: CAPABILITY_MISSING; MACHINE_GONE.
func (m *Service) Suspend(ctx context.Context, record *recordv1.MachineRecord) error {
	return m.withSuspender(ctx, record, "suspend", providers.Suspender.Suspend)
}

func (m *Service) withSuspender(ctx context.Context, record *recordv1.MachineRecord, verb string, act func(providers.Suspender, context.Context, providers.Machine) error) error {
	provider, err := m.of(record)
	if err != nil {
		return err
	}
	suspender, able := provider.(providers.Suspender)
	if !able {
		return fault.New(fault.CapabilityMissing, "provider %s cannot suspend machines", record.GetProvider()).
			With("provider", record.GetProvider()).With("capability", string(providers.CapSuspend))
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	if err := act(suspender, ctx, m.Target(record)); err != nil {
		if errors.Is(err, providers.ErrNotFound) {
			if found, err := m.Find(ctx, record); IsGone(found, err) {
				return Gone(record.GetId())
			}
		}
		return fmt.Errorf("%s machine %s: %w", verb, record.GetId(), err)
	}
	return nil
}

// CutEgress cuts a machine off from the network. A provider that cannot do it was refused at the start.
func (m *Service) CutEgress(ctx context.Context, record *recordv1.MachineRecord) error {
	provider, err := m.of(record)
	if err != nil {
		return err
	}
	cutter, able := provider.(providers.EgressCutter)
	if !able {
		return fault.New(fault.CapabilityMissing, "spec.egress: provider %s cannot cut a machine off from the network", record.GetProvider()).
			With("provider", record.GetProvider()).With("capability", string(providers.CapEgressNone))
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	if err := cutter.CutEgress(ctx, m.Target(record)); err != nil {
		return fmt.Errorf("cut machine %s off from the network: %w", record.GetId(), err)
	}
	return nil
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
