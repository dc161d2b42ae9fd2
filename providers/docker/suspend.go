package docker

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// Suspend pauses a machine, or stops it where its option suspend says so. Suspended or stopped already
// is success. The guest's connection does not notice a pause by itself: drop it before.
func (p *Provider) Suspend(ctx context.Context, machine providers.Machine) error {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	found, err := p.seek(ctx, machine.ID)
	if err != nil {
		return err
	}
	stopping := found.Config.Labels[labelSuspend] == suspendStop
	switch {
	case found.State.Paused, stopping && found.State.Status == container.StateExited:
		return nil
	case !found.State.Running:
		return fmt.Errorf("machine %s is %s and cannot be suspended: %w", machine.ID, found.State.Status, providers.ErrRefused)
	case stopping:
		return p.stop(ctx, found)
	}
	err = p.change(ctx, changeTimeout, "pausing container "+found.Name, func(ctx context.Context) error {
		_, err := p.engine.ContainerPause(ctx, found.ID, client.ContainerPauseOptions{})
		return err
	})
	return p.unlessSo(ctx, found, err, func(s *container.State) bool { return s.Paused })
}

func (p *Provider) stop(ctx context.Context, found container.InspectResponse) error {
	grace := stopGrace
	return p.change(ctx, changeTimeout, "stopping container "+found.Name, func(ctx context.Context) error {
		_, err := p.engine.ContainerStop(ctx, found.ID, client.ContainerStopOptions{Timeout: &grace})
		return err
	})
}

// Resume makes a suspended machine go on. One that was stopped is not resumed but booted again, with a
// new generation: that is Create's to do, and Resume refuses it.
func (p *Provider) Resume(ctx context.Context, machine providers.Machine) error {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	found, err := p.seek(ctx, machine.ID)
	switch {
	case err != nil:
		return err
	case found.State.Paused:
		return p.unpause(ctx, found)
	case found.State.Running:
		return nil
	}
	return fmt.Errorf("machine %s is %s: nothing of it is left to resume, create boots it again: %w", machine.ID, found.State.Status, providers.ErrRefused)
}

func (p *Provider) unpause(ctx context.Context, found container.InspectResponse) error {
	err := p.change(ctx, changeTimeout, "unpausing container "+found.Name, func(ctx context.Context) error {
		_, err := p.engine.ContainerUnpause(ctx, found.ID, client.ContainerUnpauseOptions{})
		return err
	})
	return p.unlessSo(ctx, found, err, func(s *container.State) bool { return s.Running && !s.Paused })
}

// unlessSo forgives a refusal when somebody else brought about what was wanted.
func (p *Provider) unlessSo(ctx context.Context, found container.InspectResponse, refusal error, so func(*container.State) bool) error {
	if refusal == nil || !errdefs.IsConflict(refusal) && !errdefs.IsInternal(refusal) {
		return refusal
	}
	if now, err := p.inspect(ctx, found.ID); err == nil && so(now.State) {
		return nil
	}
	return refusal
}

// CutEgress disconnects a machine from every network; what is left is its loopback.
func (p *Provider) CutEgress(ctx context.Context, machine providers.Machine) error {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	found, err := p.seek(ctx, machine.ID)
	if err != nil {
		return err
	}
	for network := range networksOf(found) {
		err := p.change(ctx, changeTimeout, fmt.Sprintf("disconnecting container %s from network %s", found.Name, network), func(ctx context.Context) error {
			_, err := p.engine.NetworkDisconnect(ctx, network, client.NetworkDisconnectOptions{Container: found.ID, Force: true})
			return err
		})
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	found, err = p.inspect(ctx, found.ID)
	if err != nil {
		return err
	}
	if left := networksOf(found); len(left) > 0 {
		return fmt.Errorf("machine %s is still on %d networks: %w", machine.ID, len(left), providers.ErrAmbiguous)
	}
	return nil
}

func networksOf(c container.InspectResponse) map[string]bool {
	names := map[string]bool{}
	if c.NetworkSettings != nil {
		for name := range c.NetworkSettings.Networks {
			names[name] = true
		}
	}
	return names
}
