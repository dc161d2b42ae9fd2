package docker

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// networkPattern is what the engine lets a network be called.
var networkPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)

// CheckNetwork refuses what is no network to put a machine on: the host's own, another container's, or none,
// which is what egress is for.
func CheckNetwork(name string) error {
	if !networkPattern.MatchString(name) || name == network.NetworkHost || name == network.NetworkNone || name == network.NetworkDefault {
		return fmt.Errorf("%q: want the name of a network of the engine's, as bridge", name)
	}
	return nil
}

// optionICC is the bridge driver's: whether containers on the network reach one another.
const optionICC = "com.docker.network.bridge.enable_icc"

// networkTurn is the key under which the broker's network is made, counted on and removed.
const networkTurn = "network"

// joinNetwork returns the network that a machine is to be made on, the broker's own unless it was told another
// one. The network is not removed before leave is called, when the machine's container is there.
func (p *Provider) joinNetwork(ctx context.Context) (id string, leave func(), err error) {
	if p.network != "" {
		return p.network, func() {}, p.wantNetwork(ctx, p.network)
	}
	unlock, err := p.networks.lock(ctx, networkTurn)
	if err != nil {
		return "", nil, err
	}
	defer unlock()
	if id, err = p.ownNetwork(ctx); err != nil {
		return "", nil, err
	}
	p.joining.Add(1)
	return id, func() { p.joining.Add(-1) }, nil
}

// wantNetwork refuses a network that the engine does not have.
func (p *Provider) wantNetwork(ctx context.Context, name string) error {
	there, err := p.networkExists(ctx, name)
	if err == nil && !there {
		return fmt.Errorf("the engine at %s has no network %q, which this broker was told to use (--docker-network): %w",
			p.engine.DaemonHost(), name, providers.ErrRefused)
	}
	return err
}

// ownNetwork returns the id of the broker's network, on which machines cannot reach one another, and makes it
// if it is not there: there is none before the first machine, nor after the last, and people prune networks.
func (p *Provider) ownNetwork(ctx context.Context) (id string, err error) {
	found, err := p.ownNetworks(ctx)
	if err != nil || len(found) > 0 {
		return first(found), err
	}
	// gofail: var dockerBeforeNetwork struct{}
	// os.Exit(137)

	name := networkName(p.broker)
	err = p.change(ctx, changeTimeout, "making network "+name, func(ctx context.Context) error {
		_, err := p.engine.NetworkCreate(ctx, name, client.NetworkCreateOptions{
			Driver: "bridge", Options: map[string]string{optionICC: "false"}, Labels: map[string]string{labelBroker: p.broker},
		})
		return err
	})
	// gofail: var dockerAfterNetwork struct{}
	// os.Exit(137)

	if err != nil && !errdefs.IsConflict(err) {
		return "", fmt.Errorf("%w (machines are kept apart by a network of the broker's own; --docker-network names another one)", err)
	}
	made, listErr := p.ownNetworks(ctx)
	if listErr != nil {
		return "", listErr
	}
	if len(made) == 0 {
		return "", fmt.Errorf("making network %s: %w (is there another one of that name?)", name, cmp.Or(err, providers.ErrAmbiguous))
	}
	return first(made), nil
}

// first returns the network that everybody chooses: an older engine makes two of one name for two who ask at
// the same time.
func first(networks []network.Summary) string {
	if len(networks) == 0 {
		return ""
	}
	return networks[0].ID
}

// ownNetworks lists the broker's networks that keep machines apart, the oldest first.
func (p *Provider) ownNetworks(ctx context.Context) (found []network.Summary, err error) {
	err = p.read(ctx, "listing the networks", func(ctx context.Context) error {
		answer, err := p.engine.NetworkList(ctx, client.NetworkListOptions{Filters: client.Filters{}.Add("label", labelBroker+"="+p.broker)})
		found = answer.Items
		return err
	})
	found = slices.DeleteFunc(found, func(n network.Summary) bool {
		// An engine that does not know the filter must not put machines on a stranger's network.
		return n.Labels[labelBroker] != p.broker || n.Driver != "bridge" || n.Options[optionICC] != "false"
	})
	slices.SortFunc(found, func(a, b network.Summary) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID))
	})
	return found, err
}

func networkName(broker string) string { return "berth-" + broker }

func (p *Provider) networkExists(ctx context.Context, nameOrID string) (bool, error) {
	err := p.read(ctx, "looking at network "+nameOrID, func(ctx context.Context) error {
		_, err := p.engine.NetworkInspect(ctx, nameOrID, client.NetworkInspectOptions{})
		return err
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// reconnect puts a container that is to be started again onto the broker's network if the one that it was on is
// gone: whoever prunes networks takes that of stopped containers too. One that was cut off is on none.
func (p *Provider) reconnect(ctx context.Context, found container.InspectResponse) error {
	if found.NetworkSettings == nil || p.network != "" {
		return nil
	}
	for name, endpoint := range found.NetworkSettings.Networks {
		if name != networkName(p.broker) {
			continue
		}
		if endpoint != nil && endpoint.NetworkID != "" {
			if there, err := p.networkExists(ctx, endpoint.NetworkID); err != nil || there {
				return err
			}
		}
		id, leave, err := p.joinNetwork(ctx)
		if err != nil {
			return err
		}
		defer leave()
		if endpoint == nil || endpoint.NetworkID == "" {
			return nil // it never ran, and is connected to the network of that name when it is started
		}
		return p.change(ctx, changeTimeout, "connecting container "+found.Name+" to network "+name, func(ctx context.Context) error {
			// The engine replaces what it knows of the network of that name, in one step.
			_, err := p.engine.NetworkConnect(ctx, id, client.NetworkConnectOptions{Container: found.ID})
			return err
		})
	}
	return nil
}

// removeUnusedNetwork removes the broker's network with its last machine: an engine has addresses for about
// thirty. Failing to is no reason to fail what the last machine's end was asked for.
func (p *Provider) removeUnusedNetwork(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, networkTimeout)
	defer cancel()
	unlock, err := p.networks.lock(limited, networkTurn)
	if err != nil {
		return // the next machine that ends does it
	}
	defer unlock()
	if p.joining.Load() > 0 {
		return
	}
	if err := p.removeNetworks(limited); err != nil && ctx.Err() == nil {
		p.log.Warn("a network that no machine uses stays", "network", networkName(p.broker), "error", err)
	}
}

func (p *Provider) removeNetworks(ctx context.Context) error {
	left, err := p.list(ctx, labelMachine)
	if err != nil || len(left) > 0 {
		return err
	}
	unused, err := p.ownNetworks(ctx)
	if err != nil {
		return err
	}
	for _, n := range unused {
		err := p.change(ctx, changeTimeout, "removing network "+n.Name, func(ctx context.Context) error {
			_, err := p.engine.NetworkRemove(ctx, n.ID, client.NetworkRemoveOptions{})
			return err
		})
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}
