package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/volume"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// Destroy removes a machine's container, whatever state it is in, its volumes, also those of a container
// that was removed by hand, and its socket directory. Another broker's or a stranger's container under its
// name is left alone.
func (p *Provider) Destroy(ctx context.Context, machine providers.Machine) error {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	found, err := p.seek(ctx, machine.ID)
	for ; err == nil; found, err = p.seek(ctx, machine.ID) {
		if err := p.remove(ctx, found.ID); err != nil {
			return fmt.Errorf("destroying machine %s: %w", machine.ID, err)
		}
		if err := removeListenDir(listenDirOf(found.Mounts), machine.ID); err != nil {
			return fmt.Errorf("destroying machine %s: %w", machine.ID, err)
		}
		p.removeOrphanedSnapshot(ctx, found)
	}
	if !errors.Is(err, providers.ErrNotFound) {
		return fmt.Errorf("destroying machine %s: %w", machine.ID, err)
	}
	if err := p.removeVolumes(ctx, machine.ID); err != nil {
		return fmt.Errorf("destroying machine %s: %w", machine.ID, err)
	}
	if err := removeListenDir(machine.ListenDir, machine.ID); err != nil {
		return fmt.Errorf("destroying machine %s: %w", machine.ID, err)
	}
	p.removeUnusedNetwork(ctx)
	return nil
}

// remove removes a container with its anonymous volumes and waits until it is gone. Absent is success.
func (p *Provider) remove(ctx context.Context, container string) error {
	// gofail: var dockerBeforeRemove struct{}
	// os.Exit(137)

	err := p.change(ctx, changeTimeout, "removing container "+container, func(ctx context.Context) error {
		_, err := p.engine.ContainerRemove(ctx, container, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		return err
	})
	// gofail: var dockerAfterRemove struct{}
	// os.Exit(137)

	switch {
	case errdefs.IsNotFound(err):
		return nil
	case errdefs.IsConflict(err): // somebody else's removal is in progress
	case err != nil:
		return err
	}
	return p.awaitGone(ctx, container)
}

func (p *Provider) awaitGone(ctx context.Context, container string) error {
	limited, cancel := context.WithTimeout(ctx, goneTimeout)
	defer cancel()
	for {
		_, err := p.inspect(limited, container)
		switch {
		case errdefs.IsNotFound(err):
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("waiting for container %s to go: %w", container, ctx.Err())
		case limited.Err() != nil:
			return fmt.Errorf("container %s was removed and is still there after %s: %w", container, goneTimeout, providers.ErrAmbiguous)
		case err != nil:
			return err
		}
		timer := time.NewTimer(gonePoll)
		select {
		case <-timer.C:
		case <-limited.Done():
			timer.Stop()
		}
	}
}

// removeVolumes removes the volumes that bear this broker's label and the machine's. The engine removes them
// with their container, but not when somebody else removed that and kept them. One that a container uses
// is somebody's by now, and stays. Absent is success.
func (p *Provider) removeVolumes(ctx context.Context, machineID string) error {
	own := client.Filters{}.Add("label", labelBroker+"="+p.broker, labelMachine+"="+machineID)
	var found []volume.Volume
	err := p.read(ctx, "listing the volumes", func(ctx context.Context) error {
		answer, err := p.engine.VolumeList(ctx, client.VolumeListOptions{Filters: own})
		found = answer.Items
		return err
	})
	if err != nil {
		return err
	}
	for _, v := range found {
		if v.Labels[labelBroker] != p.broker || v.Labels[labelMachine] != machineID {
			continue // an engine that does not know the filter must not cost a stranger's data
		}
		err := p.change(ctx, changeTimeout, "removing volume "+v.Name, func(ctx context.Context) error {
			_, err := p.engine.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{})
			return err
		})
		switch {
		case err == nil, errdefs.IsNotFound(err):
		case errdefs.IsConflict(err):
			p.log.Warn("a destroyed machine's volume is in use, and stays", "machine", machineID, "volume", v.Name, "error", err)
		default:
			return err
		}
	}
	return nil
}

// removeListenDir removes a machine's socket directory. Only one that bears its name is its own.
func removeListenDir(dir, machineID string) error {
	if dir == "" || filepath.Base(dir) != machineID {
		return nil
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing the socket directory: %w", err)
	}
	return nil
}

// removeOrphanedSnapshot removes the image that a destroyed machine was made from, when it is a snapshot
// that was removed while the machine needed it.
func (p *Provider) removeOrphanedSnapshot(ctx context.Context, destroyed container.InspectResponse) {
	image, err := p.engine.ImageInspect(ctx, destroyed.Image)
	if err != nil || image.Config == nil || len(image.RepoTags) > 0 ||
		image.Config.Labels[labelSnapshot] == "" || image.Config.Labels[labelBroker] != p.broker {
		return
	}
	_, err = p.engine.ImageRemove(ctx, destroyed.Image, client.ImageRemoveOptions{PruneChildren: true})
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) { // another machine may need it
		p.log.Warn("a removed snapshot's image stays", "image", destroyed.Image, "error", err)
	}
}
