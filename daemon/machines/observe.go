package machines

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Observation is what a provider was found to have of a machine.
type Observation int

// The observations.
const (
	Unsure  Observation = iota // the provider did not say; ask again
	Present                    // it runs, or is suspended, or was not booted yet
	Stopped                    // its processes are gone, its disk is there
	Missing                    // the provider was asked and does not have it
)

// Observe asks the provider how a machine is that was booted and no longer answers.
func (m *Service) Observe(ctx context.Context, id string) Observation {
	record, err := m.Record(id)
	if err != nil || record.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED {
		return Present
	}
	found, err := m.Inspect(ctx, record)
	switch {
	case IsGone(found, err):
		return Missing
	case err != nil:
		return Unsure
	case found.State == providers.MachineStopped:
		return Stopped
	default:
		return Present
	}
}

// ErrUnwell is a provider that says that it can't be used now: nothing is concluded from what it lists.
var ErrUnwell = errors.New("it is not well")

// List returns the machines of this broker that a provider has, if the provider is well.
func List(ctx context.Context, named Named) ([]providers.Machine, error) {
	info, err := named.Provider.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnwell, err)
	}
	if !info.Healthy {
		return nil, fmt.Errorf("%w: %s", ErrUnwell, info.Message)
	}
	return named.Provider.List(ctx)
}

// IsRecorded reports whether the ledger has a machine that is not known to be gone.
func (m *Service) IsRecorded(id string) (bool, error) {
	record, err := m.Record(id)
	return record != nil && record.GetState() != recordv1.MachineState_MACHINE_STATE_GONE, err
}

// Inspect asks the provider for a machine.
func (m *Service) Inspect(ctx context.Context, record *recordv1.MachineRecord) (providers.Machine, error) {
	provider, err := m.of(record)
	if err != nil {
		return providers.Machine{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.ProviderTimeout)
	defer cancel()
	return provider.Inspect(ctx, record.GetId())
}

// secondLook is how long after a provider has said that it has no such machine it is asked again.
const secondLook = 500 * time.Millisecond

// Find is Inspect for what must not be concluded from one answer: a machine that is gone is asked for twice.
func (m *Service) Find(ctx context.Context, record *recordv1.MachineRecord) (providers.Machine, error) {
	found, err := m.Inspect(ctx, record)
	if !IsGone(found, err) {
		return found, err
	}
	timer := time.NewTimer(secondLook)
	defer timer.Stop()
	select {
	case <-timer.C:
		return m.Inspect(ctx, record)
	case <-ctx.Done():
		return providers.Machine{}, ctx.Err()
	}
}

// IsGone reports whether what was found of a machine that was booted once is no machine any more: it was
// whole then, so one of which a part is left is half destroyed.
func IsGone(found providers.Machine, err error) bool {
	//mutation:partial-is-gone return errors.Is(err, providers.ErrNotFound)
	return errors.Is(err, providers.ErrNotFound) || err == nil && found.State == providers.MachinePartial
}

// Gone is the error of a call for a machine that its provider no longer has.
func Gone(id string) error {
	return fault.New(fault.MachineGone, "machine %s is gone: destroy the sandbox and create another", id)
}
