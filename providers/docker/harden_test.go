package docker_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// Bounding sets, as /proc/self/status has them.
const (
	// defaultBounding is the engine's default set without NET_RAW and MKNOD: what apt, dpkg, sudo, su and npm need
	// (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETUID, SETGID, SETFCAP, AUDIT_WRITE, KILL, SYS_CHROOT) is in it.
	defaultBounding = "CapBnd:\t00000000a00405fb\n"
	noCapabilities  = "0000000000000000\n"
	noNewPrivileges = "NoNewPrivs:\t1\n"
)

func TestAMachineIsLimitedAndHasNoCapabilityThatNoToolNeeds(t *testing.T) {
	image := imported(t, "ordinary", ordinary)
	byDefault := func(o *docker.Options) { o.Defaults = providers.Resources{MemoryBytes: 256 << 20, PIDs: 100} }
	for name, test := range map[string]struct {
		options      []func(*docker.Options)
		asked        providers.Resources
		memory, pids int64 // 0: no limit
	}{
		"a machine that asks for nothing has the broker's limits": {[]func(*docker.Options){byDefault}, providers.Resources{}, 256 << 20, 100},
		"what a machine asks for wins":                            {[]func(*docker.Options){byDefault}, providers.Resources{MemoryBytes: 512 << 20, PIDs: 300}, 512 << 20, 300},
		"each limit is by itself":                                 {[]func(*docker.Options){byDefault}, providers.Resources{PIDs: 300}, 256 << 20, 300},
		"a broker without limits sets none":                       {nil, providers.Resources{}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t, test.options...), newID()
			spec := at.spec(id, image)
			spec.Resources = test.asked
			at.create(t, p, spec)
			host, pids := inspect(t, onEngine(t), "berth-"+id).HostConfig, int64(0)
			if host.PidsLimit != nil {
				pids = *host.PidsLimit
			}
			if host.Memory != test.memory || host.MemorySwap != test.memory || pids != test.pids {
				t.Errorf("memory %d, with swap %d, pids %d", host.Memory, host.MemorySwap, pids)
			}
			if got := at.reach(t, p, id).run("grep", "CapBnd", "/proc/self/status"); got.Out != defaultBounding {
				t.Errorf("its capabilities are %+v", got)
			}
		})
	}
}

func TestAStrictMachine(t *testing.T) {
	strict := map[string]string{"hardening": "strict"}
	writes := func(t *testing.T, g guest) {
		t.Helper()
		if got := g.Shell("touch /workspace/a /tmp/b /var/tmp/c /dev/shm/d && cat /proc/self/status"); got.Code != 0 || !strings.Contains(got.Out, noNewPrivileges) {
			t.Errorf("writing: %+v", got)
		}
		if got := g.Shell("touch /c"); !strings.Contains(got.Err, "/c: Read-only") {
			t.Errorf("writing into the image: %+v", got)
		}
	}
	hasNone := func(t *testing.T, g guest, sets ...string) {
		t.Helper()
		got := g.run("grep", "Cap", "/proc/self/status")
		for _, set := range sets {
			if !strings.Contains(got.Out, set+":\t"+noCapabilities) {
				t.Errorf("%s of its jobs: %+v", set, got)
			}
		}
	}
	t.Run("of an image of root's", func(t *testing.T) {
		inImage(t, "ordinary", ordinary, strict, func(t *testing.T, g guest) {
			writes(t, g)
			hasNone(t, g, "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
			if got := g.Shell("touch /run/e"); got.Code != 0 {
				t.Errorf("writing to /run: %+v", got)
			}
			if got := g.Run(user("worker", "")); got.Code != 126 || !strings.Contains(got.Reason, "user_unknown: the guest may not run commands as user 1000") {
				t.Errorf("as another user: %+v", got)
			}
		})
	})
	t.Run("of an image with a user of its own", func(t *testing.T) {
		inImage(t, "stubborn", stubborn, strict, func(t *testing.T, g guest) {
			writes(t, g)
			hasNone(t, g, "CapInh", "CapPrm", "CapEff", "CapAmb")
			if got := g.run("id", "-un"); got.Out != "worker\n" {
				t.Errorf("its jobs are %+v", got)
			}
		})
	})
	t.Run("that works in a directory that is else in memory", func(t *testing.T) {
		at, p, id := newPlace(t), provider(t), newID()
		spec := at.spec(id, imported(t, "ordinary", ordinary))
		spec.Options, spec.Workspace = strict, "//tmp/."
		at.create(t, p, spec)
		at.reach(t, p, id).Shell("echo kept >/tmp/file")
		_, err := onEngine(t).ContainerKill(t.Context(), "berth-"+id, client.ContainerKillOptions{})
		must(t, err)
		eventually(t, func() bool { return state(t, p, id) == providers.MachineStopped })
		if _, err := p.Create(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
		if got := at.reach(t, p, id).run("cat", "file"); got.Out != "kept\n" {
			t.Errorf("after a stop it holds %+v", got)
		}
	})
}

func TestAnImagesVolumeIsNotTakenForTheSocketDirectory(t *testing.T) {
	from := ordinary
	from.changes = []string{"VOLUME /.berth/host"}
	at, p, id := newPlace(t), provider(t, overTheBridge), newID()
	spec := at.spec(id, imported(t, "volume", from))
	at.create(t, p, spec)
	found, err := p.Inspect(t.Context(), id)
	must(t, err)
	if found.ListenDir != "" {
		t.Errorf("its socket directory is %s", found.ListenDir)
	}
	if got := at.reach(t, p, id).run("ls", "/.berth/host"); got.Out != "" {
		t.Errorf("the volume holds %+v", got)
	}
}

// TestMachinesCannotReachOneAnother tries it on the engine's own network too, where they can.
func TestMachinesCannotReachOneAnother(t *testing.T) {
	image := imported(t, "ordinary", ordinary)
	for name, test := range map[string]struct {
		network string
		reached string
	}{
		"on the broker's own network":     {"", ""},
		"on a network that was asked for": {network.NetworkBridge, "secret\n"},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, serves, asks := newPlace(t), provider(t, func(o *docker.Options) { o.Network = test.network }), newID(), newID()
			for _, id := range []string{serves, asks} {
				at.create(t, p, at.spec(id, image))
			}
			server, client := at.reach(t, p, serves), at.reach(t, p, asks)
			address := strings.TrimSpace(server.run("hostname", "-i").Out)
			ask := "nc -w 2 " + address + " 8080 </dev/null"
			// The server answers its own machine first, so that it surely listens when the other one asks.
			served := server.Shell("while true; do echo secret | nc -l -p 8080 >/dev/null; done >/dev/null 2>&1 & " +
				"until " + ask + "; do :; done 2>/dev/null")
			if served.Out != "secret\n" {
				t.Fatalf("in its own machine: %+v", served)
			}
			if got := client.Shell("i=0; while test $i -lt 3; do " + ask + " && exit; i=$((i+1)); done"); got.Out != test.reached {
				t.Errorf("another machine got %+v", got)
			}
			info, err := p.Info(t.Context())
			must(t, err)
			if declared := slices.Contains(info.Capabilities, providers.CapNetworkIsolated); declared != (test.reached == "") {
				t.Errorf("that machines are apart is declared: %v", declared)
			}
		})
	}
}

func TestTheBrokersNetworkIsThereForAsLongAsAMachine(t *testing.T) {
	at, before := newPlace(t), provider(t)
	engine := onEngine(t)
	image := imported(t, "ordinary", ordinary)
	first, second := newID(), newID()
	wantNetworks(t, engine, 0)
	at.create(t, before, at.spec(first, image))
	made := wantNetworks(t, engine, 1)[0]
	if made.Name != "berth-"+brokerID || made.Options["com.docker.network.bridge.enable_icc"] != "false" {
		t.Errorf("it is %+v", made)
	}
	after := provider(t) // the next broker finds it
	at.create(t, after, at.spec(second, image))
	if now := wantNetworks(t, engine, 1)[0]; now.ID != made.ID {
		t.Error("another one was made")
	}
	_, err := engine.ContainerKill(t.Context(), "berth-"+second, client.ContainerKillOptions{})
	must(t, err)
	at.destroy(t, after, first)
	wantNetworks(t, engine, 1) // a stopped machine is going to need it
	at.destroy(t, after, second)
	wantNetworks(t, engine, 0)
}

// wantNetworks returns the networks that bear the broker's label.
func wantNetworks(t *testing.T, engine *client.Client, n int) []network.Summary {
	t.Helper()
	found, err := engine.NetworkList(t.Context(), client.NetworkListOptions{Filters: client.Filters{}.Add("label", "dev.berth.broker="+brokerID)})
	must(t, err)
	if len(found.Items) != n {
		t.Fatalf("%d networks, want %d", len(found.Items), n)
	}
	return found.Items
}

func TestMachinesOutliveTheirNetwork(t *testing.T) {
	image := imported(t, "ordinary", ordinary)
	for name, test := range map[string]struct {
		egress providers.EgressMode
		half   bool
		links  string
	}{
		"one that was stopped":               {providers.EgressOpen, false, "eth0\nlo\n"},
		"one that was made and not started":  {providers.EgressOpen, true, "eth0\nlo\n"},
		"one that was cut off stays cut off": {providers.EgressNone, false, "lo\n"},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t), newID()
			engine := onEngine(t)
			spec := at.spec(id, image)
			spec.Egress.Mode = test.egress
			if test.half {
				makeHalf(t, at, spec)
			} else {
				at.create(t, p, spec)
				if test.egress == providers.EgressNone {
					must(t, p.CutEgress(t.Context(), at.machine(id)))
				}
				_, err := engine.ContainerKill(t.Context(), "berth-"+id, client.ContainerKillOptions{})
				must(t, err)
				eventually(t, func() bool { return state(t, p, id) == providers.MachineStopped })
			}
			// As `docker network prune` does, which keeps only what a running container uses.
			gone := wantNetworks(t, engine, 1)[0]
			_, err := engine.NetworkRemove(t.Context(), gone.ID, client.NetworkRemoveOptions{})
			must(t, err)
			if _, err := p.Create(t.Context(), spec); err != nil {
				t.Fatal(err)
			}
			if got := at.reach(t, p, id).run("ls", "/sys/class/net"); got.Out != test.links {
				t.Errorf("it has %+v", got)
			}
		})
	}
}

func TestNetworksThatAreNotOursAreLeftAlone(t *testing.T) {
	engine := onEngine(t)
	image := imported(t, "ordinary", ordinary)
	for name, test := range map[string]struct {
		label string
		icc   string
	}{
		"another broker's":                   {brokerID + "-other", "false"},
		"ours by name, which lets all speak": {brokerID, "true"},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t), newID()
			made, err := engine.NetworkCreate(t.Context(), "berth-test-"+strings.ToLower(brokerID), client.NetworkCreateOptions{
				Driver: "bridge", Labels: map[string]string{"dev.berth.broker": test.label},
				Options: map[string]string{"com.docker.network.bridge.enable_icc": test.icc},
			})
			must(t, err)
			t.Cleanup(func() {
				_, err := engine.NetworkRemove(context.Background(), made.ID, client.NetworkRemoveOptions{})
				must(t, err)
			})
			at.create(t, p, at.spec(id, image))
			for _, endpoint := range inspect(t, engine, "berth-"+id).NetworkSettings.Networks {
				if endpoint.NetworkID == made.ID {
					t.Error("a machine was put on it")
				}
			}
			at.destroy(t, p, id)
			_, err = engine.NetworkInspect(t.Context(), made.ID, client.NetworkInspectOptions{})
			must(t, err)
		})
	}
}

func TestANetworkThatIsNotThereIsNamed(t *testing.T) {
	image := imported(t, "ordinary", ordinary)
	at, p, id := newPlace(t), provider(t, func(o *docker.Options) { o.Network = "no-such-network" }), newID()
	_, err := p.Create(t.Context(), at.spec(id, image))
	if !errors.Is(err, providers.ErrRefused) || errors.Is(err, providers.ErrNoImage) || !strings.Contains(err.Error(), `no network "no-such-network"`) {
		t.Errorf("got %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(at.sockets, "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	for _, none := range []string{"host", "none", "default", "container:x", "-x"} {
		_, err := docker.New(docker.Options{BrokerID: brokerID, GuestPath: func(string) (string, error) { return "", nil }, Network: none})
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", none)) {
			t.Errorf("%s: %v", none, err)
		}
	}
}
