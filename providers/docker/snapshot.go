package docker

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// snapshotReference is the name of a snapshot's image. It is never pulled or pushed.
func snapshotReference(id string) string { return "berth-snapshot:" + id }

// Snapshot commits a machine's file system as an image; a running machine is paused meanwhile. What the
// image declared as volumes, and everything of a read-only machine, is not in it: the latter is refused.
func (p *Provider) Snapshot(ctx context.Context, machine providers.Machine, snapshotID string) error {
	if !name.MatchString(snapshotID) {
		return fmt.Errorf("%q cannot be a snapshot: want letters, digits, _ and -: %w", snapshotID, providers.ErrRefused)
	}
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	if made, err := p.snapshots(ctx, snapshotID); err != nil || tagged(made, snapshotID) {
		return err
	}
	found, err := p.seek(ctx, machine.ID)
	if err != nil {
		return err
	}
	if found.HostConfig.ReadonlyRootfs {
		return fmt.Errorf("machine %s is read-only, so that a snapshot would hold nothing of it: %w", machine.ID, providers.ErrRefused)
	}
	of, err := p.imageOf(ctx, found)
	if err != nil {
		return fmt.Errorf("machine %s: %w", machine.ID, err)
	}
	changes, err := p.asItWas(of, snapshotID)
	if err != nil {
		return err
	}
	return definite(p.change(ctx, commitTimeout, "committing container "+found.Name, func(ctx context.Context) error {
		_, err := p.engine.ContainerCommit(ctx, found.ID, client.ContainerCommitOptions{
			Reference: snapshotReference(snapshotID), Changes: changes,
		})
		return err
	}))
}

// asItWas gives the new image what the machine's own image says, in the place of what makes it a
// machine, and the labels of a snapshot.
func (p *Provider) asItWas(of imageInfo, snapshotID string) ([]string, error) {
	user := of.user
	if user == "" {
		user = "0"
	}
	changes := []string{
		"USER " + strings.ReplaceAll(user, "$", `\$`),
		fmt.Sprintf("LABEL %s=%s %s=%s %s=\"\" %s=\"\"", labelBroker, p.broker, labelSnapshot, snapshotID, labelMachine, labelSuspend),
	}
	for instruction, words := range map[string][]string{"ENTRYPOINT": of.entrypoint, "CMD": of.command} {
		if words == nil {
			words = []string{}
		}
		text, err := json.Marshal(words)
		if err != nil {
			return nil, fmt.Errorf("writing the image's %s: %w", instruction, err)
		}
		changes = append(changes, instruction+" "+string(text))
	}
	return changes, nil
}

// RemoveSnapshot removes a snapshot's image, or, while a machine needs it, its name: Destroy of the last
// such machine removes the rest.
func (p *Provider) RemoveSnapshot(ctx context.Context, snapshotID string) error {
	if !name.MatchString(snapshotID) {
		return nil // there can be none
	}
	made, err := p.snapshots(ctx, snapshotID)
	if err != nil {
		return err
	}
	for _, i := range made {
		err := p.change(ctx, changeTimeout, "removing the image of snapshot "+snapshotID, func(ctx context.Context) error {
			_, err := p.engine.ImageRemove(ctx, i.ID, client.ImageRemoveOptions{PruneChildren: true})
			return err
		})
		if errdefs.IsConflict(err) && tagged([]image.Summary{i}, snapshotID) {
			err = p.change(ctx, changeTimeout, "removing the name of snapshot "+snapshotID, func(ctx context.Context) error {
				_, err := p.engine.ImageRemove(ctx, snapshotReference(snapshotID), client.ImageRemoveOptions{Force: true})
				return err
			})
		}
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsConflict(err) {
			return err
		}
	}
	return nil
}

// snapshots returns the images of a snapshot: one that bears its name, and those that a crash in a
// commit kept from bearing it.
func (p *Provider) snapshots(ctx context.Context, id string) (made []image.Summary, err error) {
	filters := client.Filters{}.Add("label", labelBroker+"="+p.broker, labelSnapshot+"="+id)
	err = p.read(ctx, "looking for snapshot "+id, func(ctx context.Context) error {
		answer, err := p.engine.ImageList(ctx, client.ImageListOptions{Filters: filters})
		made = answer.Items
		return err
	})
	return made, err
}

func tagged(images []image.Summary, id string) bool {
	for _, i := range images {
		for _, tag := range i.RepoTags {
			if tag == snapshotReference(id) {
				return true
			}
		}
	}
	return false
}
