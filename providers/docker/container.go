package docker

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// containerName is the name of a machine's container. Names are unique on an engine, so no two can be
// made for one machine.
func containerName(machineID string) string { return "berth-" + machineID }

// handle is what the ledger remembers of a machine. It is for people: a machine's id is enough to find
// it.
type handle struct {
	Container string `json:"container"`
	Image     string `json:"image"`
}

const handleVersion = 1

func handleOf(c container.InspectResponse) providers.Handle {
	content, err := json.Marshal(handle{Container: c.ID, Image: c.Image})
	if err != nil {
		content = nil // two strings always marshal
	}
	return providers.Handle{Version: handleVersion, Bytes: content}
}

// find returns a machine's container: under its name, or, when somebody renamed it, by its labels.
// Errors: ErrNotFound; ErrRefused when a stranger's container bears the machine's name and no other
// bears its labels.
func (p *Provider) find(ctx context.Context, id string) (container.InspectResponse, error) {
	if !name.MatchString(id) {
		return container.InspectResponse{}, fmt.Errorf("%q cannot be a machine: %w", id, providers.ErrNotFound)
	}
	found, err := p.inspect(ctx, containerName(id))
	if err == nil && p.owns(found, id) {
		return found, nil
	}
	stranger := err == nil
	if err != nil && !errdefs.IsNotFound(err) {
		return found, err
	}
	renamed, err := p.list(ctx, labelMachine+"="+id)
	if err != nil {
		return found, err
	}
	if len(renamed) > 0 {
		found, err := p.inspect(ctx, renamed[0].ID)
		if !errdefs.IsNotFound(err) {
			return found, err
		}
	}
	if stranger {
		return found, fmt.Errorf("a container named %s is there and bears other labels, so it is not this broker's machine: rename or remove it: %w",
			containerName(id), providers.ErrRefused)
	}
	return found, fmt.Errorf("machine %s: %w", id, providers.ErrNotFound)
}

// seek is find for calls to which a stranger's container is no machine.
func (p *Provider) seek(ctx context.Context, id string) (container.InspectResponse, error) {
	found, err := p.find(ctx, id)
	if errors.Is(err, providers.ErrRefused) {
		return found, fmt.Errorf("machine %s: %w", id, providers.ErrNotFound)
	}
	return found, err
}

func (p *Provider) inspect(ctx context.Context, container string) (found container.InspectResponse, err error) {
	err = p.read(ctx, "looking at container "+container, func(ctx context.Context) error {
		answer, err := p.engine.ContainerInspect(ctx, container, client.ContainerInspectOptions{})
		found = answer.Container
		return err
	})
	if err == nil && (found.Config == nil || found.State == nil || found.HostConfig == nil) {
		err = fmt.Errorf("looking at container %s: the engine's answer has gaps", container)
	}
	return found, err
}

func (p *Provider) owns(c container.InspectResponse, id string) bool {
	return c.Config.Labels[labelBroker] == p.broker && c.Config.Labels[labelMachine] == id
}

// list returns this broker's containers that bear all the labels, each "name" or "name=value".
func (p *Provider) list(ctx context.Context, labels ...string) (found []container.Summary, err error) {
	filters := client.Filters{}.Add("label", append(labels, labelBroker+"="+p.broker)...)
	err = p.read(ctx, "listing the containers", func(ctx context.Context) error {
		answer, err := p.engine.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: filters})
		found = answer.Items
		return err
	})
	return found, err
}

// Inspect finds a machine. A stranger's container under its name is no machine: ErrNotFound.
func (p *Provider) Inspect(ctx context.Context, id string) (providers.Machine, error) {
	found, err := p.seek(ctx, id)
	if err != nil {
		return providers.Machine{}, err
	}
	machine := providers.Machine{
		ID: id, State: stateOf(found.State.Status, neverStarted(found)), Handle: handleOf(found), ListenDir: listenDirOf(found.Mounts),
	}
	if made, err := time.Parse(time.RFC3339Nano, found.Created); err == nil {
		machine.Created = made
	}
	if machine.State == providers.MachineStopped {
		machine.Note = p.lastWords(ctx, found)
	}
	return machine, nil
}

// List returns this broker's machines.
func (p *Provider) List(ctx context.Context) ([]providers.Machine, error) {
	p.removeStaleHelper(ctx)
	found, err := p.list(ctx, labelMachine)
	if err != nil {
		return nil, err
	}
	var machines []providers.Machine
	for _, c := range found {
		id := c.Labels[labelMachine]
		if id == "" {
			continue // made by hand from a snapshot, which bears the label emptied
		}
		content, err := json.Marshal(handle{Container: c.ID, Image: c.ImageID})
		if err != nil {
			content = nil // two strings always marshal
		}
		machines = append(machines, providers.Machine{
			ID: id, State: stateOf(c.State, c.State == container.StateCreated), Created: time.Unix(c.Created, 0),
			Handle: providers.Handle{Version: handleVersion, Bytes: content}, ListenDir: listenDirOf(c.Mounts),
		})
	}
	return machines, nil
}

func stateOf(state container.ContainerState, never bool) providers.MachineState {
	switch state {
	case container.StateRunning, container.StateRestarting:
		return providers.MachineRunning
	case container.StatePaused:
		return providers.MachineSuspended
	case container.StateExited:
		if never {
			return providers.MachinePartial
		}
		return providers.MachineStopped
	default: // created, removing, dead
		return providers.MachinePartial
	}
}

// neverStarted reports whether no process of the container ever ran.
func neverStarted(c container.InspectResponse) bool {
	started, err := time.Parse(time.RFC3339Nano, c.State.StartedAt)
	return err != nil || started.IsZero()
}

// goingAway reports whether the container is being removed, or was so half.
func goingAway(c container.InspectResponse) bool {
	return c.State.Status == container.StateRemoving || c.State.Status == container.StateDead
}

// listenDirOf returns the host's directory that the guest dials out through; empty where there is none.
func listenDirOf(mounts []container.MountPoint) string {
	for _, m := range mounts {
		// An image may declare a volume there, which is no directory of the host's.
		if m.Type == mount.TypeBind && path.Clean(m.Destination) == hostDir {
			return filepath.Clean(m.Source)
		}
	}
	return ""
}

// lastWords says why a machine stopped, as far as its engine knows.
func (p *Provider) lastWords(ctx context.Context, c container.InspectResponse) string {
	note := fmt.Sprintf("its guest ended with exit code %d", c.State.ExitCode)
	if c.State.OOMKilled {
		note += ", and it had run out of memory"
	}
	if c.State.Error != "" {
		note += ": " + oneLine(c.State.Error)
	}
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	logs, err := p.engine.ContainerLogs(limited, c.ID, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true, Tail: "1"})
	if err != nil {
		return note // the log is an extra
	}
	defer func() { _ = logs.Close() }() // it was only read
	said := &output{from: bufio.NewReader(io.LimitReader(logs, noteBytes))}
	if _, err := io.Copy(io.Discard, said); err != nil && said.said() == "" {
		return note
	}
	if line := oneLine(said.said()); line != "" {
		note += ": " + line
	}
	return note
}

func oneLine(text string) string {
	return strings.Join(strings.Fields(strings.ToValidUTF8(text, "?")), " ")
}
