package machines

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Tuning.
const (
	defaultGuestTimeout = time.Minute      // from a boot to the guest's first hello
	inspectInterval     = time.Second      // whether a machine whose guest does not answer still runs
	callTimeout         = 15 * time.Second // one short call to a guest
	entropyBytes        = 32               // what a guest gets to stir into its random numbers after a freeze
)

// Connect opens the link to the guest of a machine that was booted or goes on after a freeze, and waits for
// the guest's hello for as long as the provider has the machine running.
func (m *Service) Connect(ctx context.Context, record *recordv1.MachineRecord) (*guestv1.HelloResponse, error) {
	if err := m.OpenLink(record); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, m.opts.GuestTimeout)
	defer cancel()
	for {
		brief, stop := context.WithTimeout(limited, inspectInterval)
		hello, err := m.opts.Links.Wait(brief, record.GetId())
		stop()
		if err == nil || ctx.Err() != nil {
			return hello, err
		}
		found, inspectErr := m.Find(limited, record)
		switch {
		case IsGone(found, inspectErr):
			return nil, fault.New(fault.MachineGone, "machine %s vanished before its guest answered", record.GetId())
		case inspectErr == nil && found.State == providers.MachineStopped:
			return nil, fmt.Errorf("machine %s stopped before its guest answered: %s: %w", record.GetId(), found.Note, providers.ErrAmbiguous)
		case limited.Err() != nil:
			return nil, fmt.Errorf("the guest of machine %s did not answer within %s: %w", record.GetId(), m.opts.GuestTimeout, err)
		}
	}
}

// What Sandbox.capabilities says of how far the kill of a job reaches. The guest finds it out, not the provider.
const (
	ContainmentStrong = "containment.strong"
	ContainmentWeak   = "containment.weak"
)

// WeakContainment says whether a process can escape the kill of its job in this guest's machine.
func WeakContainment(hello *guestv1.HelloResponse) bool {
	switch hello.GetContainment() {
	case guestv1.Containment_CONTAINMENT_CGROUP, guestv1.Containment_CONTAINMENT_PID_NAMESPACE, guestv1.Containment_CONTAINMENT_SHIM:
		return false
	}
	return true
}

// Reachable waits for a link to the guest of a machine that runs: right after a start of the broker
// there is none yet, and the guest may have outcomes that nobody else has.
func (m *Service) Reachable(ctx context.Context, record *recordv1.MachineRecord) bool {
	if m.opts.Links.Hello(record.GetId()) != nil {
		return true
	}
	if record.GetBootId() == "" {
		return false // nobody has ever spoken to its guest
	}
	if found, err := m.Inspect(ctx, record); err != nil || found.State != providers.MachineRunning {
		return false
	}
	if err := m.OpenLink(record); err != nil {
		return false
	}
	_, err := m.opts.Links.Wait(ctx, record.GetId())
	return err == nil
}

// Quiesce tells the guest that it is about to be frozen, so that time stops counting for its jobs.
func (m *Service) Quiesce(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return m.opts.Links.Call(ctx, id, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Quiesce(ctx, &guestv1.QuiesceRequest{Reason: "suspend"})
		return err
	})
}

// Unfreeze has the provider let a suspended machine go on, and tells the guest how much later it is. All of
// it may be done again. Errors: CAPABILITY_MISSING; MACHINE_GONE.
func (m *Service) Unfreeze(ctx context.Context, record *recordv1.MachineRecord) error {
	if err := m.withSuspender(ctx, record, "resume", providers.Suspender.Resume); err != nil {
		return err
	}
	hello, err := m.Connect(ctx, record)
	if err != nil {
		return err
	}
	entropy := make([]byte, entropyBytes)
	if _, err := rand.Read(entropy); err != nil {
		return fmt.Errorf("make entropy for machine %s: %w", record.GetId(), err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err = m.opts.Links.Call(ctx, record.GetId(), func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Resumed(ctx, &guestv1.ResumedRequest{
			// Its own: another one would tell it to drop what belongs to the old.
			Generation: hello.GetGeneration(), Time: timestamppb.New(m.opts.Now()), Entropy: entropy,
		})
		return err
	})
	if fault.Is(err, fault.CapabilityMissing) { // an older guest: it was frozen and goes on, and counts the time
		m.opts.Log.Warn("the guest cannot be told how long it was frozen", "machine", record.GetId(), "error", err)
		return nil
	}
	return err
}
