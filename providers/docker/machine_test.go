package docker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

func TestAMachineLives(t *testing.T) {
	for name, how := range map[string]func(*testing.T, *docker.Options){
		"its guest dials out":            func(*testing.T, *docker.Options) {},
		"through the bridge":             func(_ *testing.T, o *docker.Options) { o.Bridge = true },
		"on an engine behind a TCP port": func(t *testing.T, o *docker.Options) { o.Host = overTCP(t) },
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t, func(o *docker.Options) { how(t, o) }), newID()
			engine := onEngine(t)
			at.create(t, p, at.spec(id, imported(t, "ordinary", ordinary)))
			if state := state(t, p, id); state != providers.MachineRunning {
				t.Errorf("it is %s", state)
			}
			g := at.reach(t, p, id)
			if got := g.run("true"); got != (result{}) {
				t.Errorf("true: %+v", got)
			}
			if got := g.Shell("echo out; echo err >&2; pwd; exit 3"); got.Code != 3 || got.Out != "out\n/workspace\n" || got.Err != "err\n" {
				t.Errorf("a script: %+v", got)
			}
			found, err := engine.ContainerInspect(t.Context(), "berth-"+id, client.ContainerInspectOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(found.Raw), "dHR0dHR0") {
				t.Error("the engine knows the token")
			}
			_, dialsOut := mountAt(found.Container, "/.berth/host")
			if dialsOut != (name == "its guest dials out") {
				t.Errorf("it has a socket directory: %v", dialsOut)
			}
			if bin, found := mountAt(found.Container, "/.berth/bin"); !found || bin.RW {
				t.Errorf("the guest's volume: %+v", bin)
			}
			at.destroy(t, p, id)
			at.destroy(t, p, id)
		})
	}
}

// overTCP returns the address of a TCP port behind which the engine is.
func overTCP(t *testing.T) string {
	t.Helper()
	path, isUnix := strings.CutPrefix(onEngine(t).DaemonHost(), "unix://")
	if !isUnix {
		t.Skip("the engine is behind a TCP port anyhow")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var passing sync.WaitGroup
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_, _ = to.Close(), from.Close()
	}
	passing.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", path)
			if err != nil {
				_ = near.Close()
				continue
			}
			passing.Go(func() { pass(near, far) })
			passing.Go(func() { pass(far, near) })
		}
	})
	t.Cleanup(func() { _ = listener.Close(); passing.Wait() })
	return "tcp://" + listener.Addr().String()
}

func mountAt(c container.InspectResponse, path string) (container.MountPoint, bool) {
	for _, m := range c.Mounts {
		if m.Destination == path {
			return m, true
		}
	}
	return container.MountPoint{}, false
}

func TestAGuestThatCannotDialOutIsReachedThroughTheBridge(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	at.create(t, p, at.spec(id, imported(t, "ordinary", ordinary)))
	at.reach(t, p, id)
	// As an engine in a virtual machine has it: the directory is there, and no socket gets through.
	dir := filepath.Join(at.sockets, id)
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir + ".away") })
	if got := at.reach(t, p, id).run("true"); got != (result{}) {
		t.Errorf("true: %+v", got)
	}
}

func TestManyStreamsGoThroughTheBridge(t *testing.T) {
	at, p, id := newPlace(t), provider(t, overTheBridge), newID()
	at.create(t, p, at.spec(id, imported(t, "ordinary", ordinary)))
	one, two := at.reach(t, p, id), at.reach(t, p, id)
	for range 3 {
		for _, g := range []guest{one, two} {
			if got := g.Shell("head -c 60000 /dev/zero"); len(got.Out) != 60000 {
				t.Fatalf("%d bytes came", len(got.Out))
			}
		}
	}
}

func TestANewBrokerFindsMachines(t *testing.T) {
	at, id := newPlace(t), newID()
	before, after := provider(t), provider(t)
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	at.create(t, before, spec)
	boot := at.reach(t, before, id).Hello.GetBootId()
	listed, err := after.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(listed) != 1 || listed[0].ID != id || listed[0].State != providers.MachineRunning || listed[0].Created.IsZero() ||
		listed[0].ListenDir != spec.ListenDir {
		t.Errorf("it lists %+v", listed)
	}
	if _, err := after.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if again := at.reach(t, after, id).Hello.GetBootId(); again != boot {
		t.Error("a machine that ran was booted again")
	}
	stranger := provider(t, func(o *docker.Options) { o.BrokerID = "another" })
	if _, err := stranger.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("another broker finds it: %v", err)
	}
	if listed, err := stranger.List(t.Context()); err != nil || len(listed) != 0 {
		t.Errorf("another broker lists %v, %v", listed, err)
	}
	if err := stranger.Destroy(t.Context(), providers.Machine{ID: id}); err != nil {
		t.Errorf("to another broker it is not there: %v", err)
	}
	if state(t, after, id) != providers.MachineRunning {
		t.Error("another broker destroyed it")
	}
}

// The states that a crash, a person or an engine can leave a machine in, and what then is found and can
// be done.
func TestWhateverStateAMachineIsInItIsFoundCompletedAndDestroyed(t *testing.T) {
	kill := func(t *testing.T, e *client.Client, name string) {
		_, err := e.ContainerKill(t.Context(), name, client.ContainerKillOptions{})
		must(t, err)
		eventually(t, func() bool { return !inspect(t, e, name).State.Running })
	}
	for name, test := range map[string]struct {
		half   bool // made and never started
		meddle func(t *testing.T, e *client.Client, name string)
		state  providers.MachineState
		note   string
		gone   bool
		boots  bool // Create boots it again
	}{
		"made and not started": {half: true, state: providers.MachinePartial, boots: true},
		"paused by hand": {state: providers.MachineSuspended, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerPause(t.Context(), name, client.ContainerPauseOptions{})
			must(t, err)
		}},
		"stopped by hand": {state: providers.MachineStopped, note: "exit code 0", boots: true, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerStop(t.Context(), name, client.ContainerStopOptions{})
			must(t, err)
		}},
		"killed": {state: providers.MachineStopped, note: "exit code 137", boots: true, meddle: kill},
		"killed while paused": {state: providers.MachineStopped, boots: true, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerPause(t.Context(), name, client.ContainerPauseOptions{})
			must(t, err)
			kill(t, e, name)
		}},
		"restarted by hand": {state: providers.MachineRunning, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerRestart(t.Context(), name, client.ContainerRestartOptions{})
			must(t, err)
		}},
		"renamed": {state: providers.MachineRunning, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerRename(t.Context(), name, client.ContainerRenameOptions{NewName: name + "-renamed"})
			must(t, err)
		}},
		"its socket directory is gone, and it was killed": {state: providers.MachineStopped, boots: true, meddle: func(t *testing.T, e *client.Client, name string) {
			dir, _ := mountAt(inspect(t, e, name), "/.berth/host")
			kill(t, e, name)
			must(t, os.RemoveAll(dir.Source))
		}},
		"removed by hand": {gone: true, meddle: func(t *testing.T, e *client.Client, name string) {
			_, err := e.ContainerRemove(t.Context(), name, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
			must(t, err)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t), newID()
			engine := onEngine(t)
			spec := at.spec(id, imported(t, "ordinary", ordinary))
			boot := ""
			if test.half {
				makeHalf(t, at, spec)
			} else {
				at.create(t, p, spec)
				g := at.reach(t, p, id)
				boot = g.Hello.GetBootId()
				g.Shell("echo kept >/workspace/file")
				test.meddle(t, engine, "berth-"+id)
			}
			found, err := p.Inspect(t.Context(), id)
			listed, listErr := p.List(t.Context())
			must(t, listErr)
			if test.gone {
				if !errors.Is(err, providers.ErrNotFound) || len(listed) != 0 {
					t.Errorf("it is found: %v, %v", err, listed)
				}
				at.destroy(t, p, id)
				return
			}
			must(t, err)
			if found.State != test.state || !strings.Contains(found.Note, test.note) {
				t.Errorf("it is %s: %q", found.State, found.Note)
			}
			if len(listed) != 1 || listed[0].State != test.state {
				t.Errorf("it is listed as %+v", listed)
			}
			spec.Generation = 2
			if _, err := p.Create(t.Context(), spec); err != nil {
				t.Fatal(err)
			}
			g := at.reach(t, p, id)
			if test.boots && (g.Hello.GetBootId() == boot || g.Hello.GetGeneration() != 2) {
				t.Errorf("it was not booted again: generation %d", g.Hello.GetGeneration())
			}
			if got := g.run("cat", "file"); boot != "" && got.Out != "kept\n" {
				t.Errorf("its disk was not kept: %+v", got)
			}
			if test.meddle != nil {
				// Once more, and destroyed as it is.
				test.meddle(t, engine, nameOf(t, engine, id))
			}
			at.destroy(t, p, id)
		})
	}
}

// nameOf returns the name that a machine's container bears now.
func nameOf(t *testing.T, e *client.Client, id string) string {
	t.Helper()
	found, err := e.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.berth.machine="+id)})
	must(t, err)
	if len(found.Items) != 1 {
		t.Fatalf("%d containers", len(found.Items))
	}
	return strings.TrimPrefix(found.Items[0].Names[0], "/")
}

// makeHalf leaves what a crash between making and starting a machine leaves.
func makeHalf(t *testing.T, at place, spec providers.MachineSpec) {
	t.Helper()
	p := provider(t)
	at.create(t, p, spec)
	engine := onEngine(t)
	made := inspect(t, engine, "berth-"+spec.MachineID)
	_, err := engine.ContainerRemove(t.Context(), made.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
	must(t, err)
	_, err = engine.ContainerCreate(t.Context(), client.ContainerCreateOptions{
		Name: "berth-" + spec.MachineID, Config: made.Config, HostConfig: made.HostConfig,
	})
	must(t, err)
}

// user is a script, or /bin/true, as another user.
func user(name, script string) *guestv1.Command {
	if script == "" {
		return &guestv1.Command{Argv: []string{"/bin/true"}, User: name}
	}
	return &guestv1.Command{Shell: script, User: name}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func inspect(t testing.TB, e *client.Client, name string) container.InspectResponse {
	t.Helper()
	found, err := e.ContainerInspect(t.Context(), name, client.ContainerInspectOptions{})
	must(t, err)
	return found.Container
}

func eventually(t testing.TB, so func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come about")
		}
	}
}

func TestVolumesOfAContainerThatWasRemovedByHandGoWithTheMachine(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	engine := onEngine(t)
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	spec.Options = map[string]string{"read_only": "true"} // its workspace is a volume too
	at.create(t, p, spec)
	// A removal by hand that keeps volumes, and a new container, which has others.
	byHand := func() {
		_, err := engine.ContainerRemove(t.Context(), "berth-"+id, client.ContainerRemoveOptions{Force: true})
		must(t, err)
	}
	byHand()
	at.create(t, p, spec)
	byHand()
	kept := volumesOf(t, engine, brokerID, id)
	if len(kept) != 4 {
		t.Fatalf("the containers left the volumes %v, want 4 with both labels", kept)
	}

	// One is somebody's by now, and two are of others: of a broker, and of a machine.
	user, err := engine.ContainerCreate(t.Context(), client.ContainerCreateOptions{
		Config:     &container.Config{Image: imported(t, "ordinary", ordinary), Cmd: []string{"/bin/true"}},
		HostConfig: &container.HostConfig{Binds: []string{kept[0] + ":/kept"}},
	})
	must(t, err)
	leave := func() {
		_, err := engine.ContainerRemove(context.Background(), user.ID, client.ContainerRemoveOptions{Force: true})
		if err != nil && !errdefs.IsNotFound(err) {
			t.Error(err)
		}
	}
	t.Cleanup(leave)
	other := newID()
	for broker, machine := range map[string]string{brokerID + "-other": id, brokerID: other} {
		made, err := engine.VolumeCreate(t.Context(), client.VolumeCreateOptions{
			Labels: map[string]string{"dev.berth.broker": broker, "dev.berth.machine": machine},
		})
		must(t, err)
		t.Cleanup(func() {
			_, err := engine.VolumeRemove(context.Background(), made.Volume.Name, client.VolumeRemoveOptions{})
			must(t, err)
		})
	}

	at.destroy(t, p, id)
	if left := volumesOf(t, engine, brokerID, id); !slices.Equal(left, kept[:1]) {
		t.Errorf("left: %v, want %v, which a container uses", left, kept[:1])
	}
	if len(volumesOf(t, engine, brokerID+"-other", id)) != 1 || len(volumesOf(t, engine, brokerID, other)) != 1 {
		t.Error("a volume of another broker or machine went too")
	}
	leave()
	at.destroy(t, p, id)
	if left := volumesOf(t, engine, brokerID, id); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// volumesOf returns the names of a machine's own volumes, sorted.
func volumesOf(t testing.TB, e *client.Client, broker, id string) (names []string) {
	t.Helper()
	found, err := e.VolumeList(t.Context(), client.VolumeListOptions{})
	must(t, err)
	for _, v := range found.Items {
		if v.Labels["dev.berth.broker"] == broker && v.Labels["dev.berth.machine"] == id {
			names = append(names, v.Name)
		}
	}
	slices.Sort(names)
	return names
}

func TestAStrangersContainerUnderAMachinesNameIsLeftAlone(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	engine := onEngine(t)
	made, err := engine.ContainerCreate(t.Context(), client.ContainerCreateOptions{
		Name: "berth-" + id, Config: &container.Config{Image: imported(t, "ordinary", ordinary), Cmd: []string{"/bin/true"}},
	})
	must(t, err)
	t.Cleanup(func() {
		_, err := engine.ContainerRemove(context.Background(), made.ID, client.ContainerRemoveOptions{Force: true})
		must(t, err)
	})
	_, err = p.Create(t.Context(), at.spec(id, imported(t, "ordinary", ordinary)))
	if !errors.Is(err, providers.ErrRefused) || !strings.Contains(err.Error(), "rename or remove it") {
		t.Errorf("creating it: %v", err)
	}
	if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("looking at it: %v", err)
	}
	must(t, p.Destroy(t.Context(), at.machine(id)))
	inspect(t, engine, made.ID)
}

func TestSuspendAndResume(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	at.create(t, p, at.spec(id, imported(t, "ordinary", ordinary)))
	boot := at.reach(t, p, id).Hello.GetBootId()
	for range 2 {
		must(t, p.Suspend(t.Context(), at.machine(id)))
		if s := state(t, p, id); s != providers.MachineSuspended {
			t.Errorf("it is %s", s)
		}
	}
	for range 2 {
		must(t, p.Resume(t.Context(), at.machine(id)))
		if s := state(t, p, id); s != providers.MachineRunning {
			t.Errorf("it is %s", s)
		}
	}
	if g := at.reach(t, p, id); g.Hello.GetBootId() != boot {
		t.Error("its processes did not survive")
	}
}

func TestAMachineMaySuspendByStopping(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	spec.Options = map[string]string{"suspend": "stop"}
	at.create(t, p, spec)
	at.reach(t, p, id)
	for range 2 {
		must(t, p.Suspend(t.Context(), at.machine(id)))
		if s := state(t, p, id); s != providers.MachineStopped {
			t.Errorf("it is %s", s)
		}
	}
	if err := p.Resume(t.Context(), at.machine(id)); !errors.Is(err, providers.ErrRefused) {
		t.Errorf("nothing is left to resume: %v", err)
	}
	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	at.reach(t, p, id)
}

func TestAMachineCutOffStaysSo(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	engine := onEngine(t)
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	spec.Egress.Mode = providers.EgressNone
	at.create(t, p, spec)
	links := func() string { return strings.TrimSpace(at.reach(t, p, id).run("ls", "/sys/class/net").Out) }
	if got := links(); !strings.Contains(got, "eth0") {
		t.Fatalf("its setup has no network: %s", got)
	}
	for range 2 {
		must(t, p.CutEgress(t.Context(), at.machine(id)))
	}
	if got := links(); strings.Contains(got, "eth0") {
		t.Errorf("it has %s", got)
	}
	_, err := engine.ContainerKill(t.Context(), "berth-"+id, client.ContainerKillOptions{})
	must(t, err)
	eventually(t, func() bool { return state(t, p, id) == providers.MachineStopped })
	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if got := links(); strings.Contains(got, "eth0") {
		t.Errorf("booted again it has %s", got)
	}
}

func TestASnapshotBecomesAMachine(t *testing.T) {
	at, p, first, second := newPlace(t), provider(t), newID(), newID()
	engine := onEngine(t)
	at.create(t, p, at.spec(first, imported(t, "stubborn", stubborn)))
	g := at.reach(t, p, first)
	if got := g.Run(user("0", "echo kept >/file; mkdir /workspace/sub")); got.Code != 0 {
		t.Fatalf("writing: %+v", got)
	}
	id := "snap_" + first
	for range 2 {
		must(t, p.Snapshot(t.Context(), at.machine(first), id))
	}
	at.destroy(t, p, first)
	spec := at.spec(second, "")
	spec.FromSnapshot = id
	at.create(t, p, spec)
	g = at.reach(t, p, second)
	if got := g.Shell("cat /file; ls /workspace; echo $FROM_IMAGE; test -e /.berth/state/spool/" + first + " && echo spool"); got.Out != "kept\nsub\nyes\n" {
		t.Errorf("it holds %+v", got)
	}
	found := inspect(t, engine, "berth-"+second)
	image, err := engine.ImageInspect(t.Context(), found.Image)
	must(t, err)
	if image.Config.User != "worker" || image.Config.Labels["dev.berth.machine"] != "" || strings.Join(image.Config.Entrypoint, " ") != "/bin/sh -c exit 7" {
		t.Errorf("the snapshot's image is %+v", image.Config)
	}
	for range 2 {
		must(t, p.RemoveSnapshot(t.Context(), id))
	}
	if got := g.run("cat", "/file"); got.Out != "kept\n" {
		t.Errorf("the machine lost what its removed snapshot held: %+v", got)
	}
	at.destroy(t, p, second)
	if _, err := engine.ImageInspect(t.Context(), found.Image); err == nil {
		t.Error("the image of a removed snapshot outlives its last machine")
	}
	_, err = p.Create(t.Context(), spec)
	if !errors.Is(err, providers.ErrNoImage) {
		t.Errorf("a snapshot that is not there: %v", err)
	}
}

func TestLimitsHold(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	spec.Resources = providers.Resources{CPUs: 0.5, MemoryBytes: 64 << 20, PIDs: 40}
	at.create(t, p, spec)
	g := at.reach(t, p, id)
	// tail keeps a line that never ends in memory.
	if got := g.Shell("head -c 200000000 /dev/zero | tail | head -c 1; exit ${PIPESTATUS:-0}"); got.Out != "" {
		t.Errorf("200 MB fit into 64: %+v", got)
	}
	if got := g.Shell("i=0; while test $i -lt 60; do sleep 5 & i=$((i+1)); done; echo all"); got.Out == "all\n" {
		t.Errorf("60 processes fit into 40: %+v", got)
	}
	if got := inspect(t, onEngine(t), "berth-"+id).HostConfig; got.NanoCPUs != 5e8 {
		t.Errorf("CPUs: %d", got.NanoCPUs)
	}
	if s := state(t, p, id); s != providers.MachineRunning {
		t.Errorf("the guest went before its jobs: %s", s)
	}
}

func TestTheWorkspaceCanBeChosen(t *testing.T) {
	at, p, id := newPlace(t), provider(t), newID()
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	spec.Workspace = "/home/deep/down"
	at.create(t, p, spec)
	if got := at.reach(t, p, id).Shell("pwd"); got.Out != "/home/deep/down\n" {
		t.Errorf("it works in %+v", got)
	}
}

func TestManyMachinesStartAtOnce(t *testing.T) {
	at, p := newPlace(t), provider(t)
	image := imported(t, "ordinary", ordinary)
	failed := make(chan error)
	var ids []string
	for range 6 {
		id := newID()
		ids = append(ids, id)
		t.Cleanup(func() { must(t, p.Destroy(context.Background(), at.machine(id))) })
		go func() { _, err := p.Create(t.Context(), at.spec(id, image)); failed <- err }()
	}
	for range ids {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	listed, err := p.List(t.Context())
	must(t, err)
	if len(listed) != len(ids) {
		t.Errorf("%d are there", len(listed))
	}
}

func TestTheSameMachineIsMadeOnceHoweverOftenItIsAsked(t *testing.T) {
	at, id := newPlace(t), newID()
	spec := at.spec(id, imported(t, "ordinary", ordinary))
	one, two := provider(t), provider(t) // two brokers that take themselves for the same one
	for _, p := range []*docker.Provider{one, two} {
		warm := newID()
		at.create(t, p, at.spec(warm, spec.Image))
	}
	t.Cleanup(func() { must(t, one.Destroy(context.Background(), at.machine(id))) })
	failed := make(chan error)
	for _, p := range []*docker.Provider{one, two, one, two} {
		go func() { _, err := p.Create(t.Context(), spec); failed <- err }()
	}
	for range 4 {
		if err := <-failed; err != nil && !errors.Is(err, providers.ErrAmbiguous) {
			t.Error(err)
		}
	}
	if _, err := two.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	at.reach(t, two, id)
}

func TestAGuestsVolumeThatWasPrunedOrSpoiltIsFilledAgain(t *testing.T) {
	at, p := newPlace(t), provider(t)
	engine := onEngine(t)
	image := imported(t, "ordinary", ordinary)
	volume := guestVolume()
	boots := func(p *docker.Provider) {
		t.Helper()
		id := newID()
		at.create(t, p, at.spec(id, image))
		at.reach(t, p, id)
		at.destroy(t, p, id)
	}
	boots(p)
	_, err := engine.VolumeRemove(t.Context(), volume, client.VolumeRemoveOptions{})
	must(t, err)
	boots(p)
	_, err = engine.VolumeRemove(t.Context(), volume, client.VolumeRemoveOptions{})
	must(t, err)
	_, err = engine.VolumeCreate(t.Context(), client.VolumeCreateOptions{Name: volume})
	must(t, err)
	boots(provider(t)) // a crash between making and filling it left it empty
	// Somebody else made an empty one meanwhile: that is only seen when the start fails.
	_, err = engine.VolumeRemove(t.Context(), volume, client.VolumeRemoveOptions{})
	must(t, err)
	_, err = engine.VolumeCreate(t.Context(), client.VolumeCreateOptions{Name: volume, Labels: map[string]string{"dev.berth.guest": guestDigest()}})
	must(t, err)
	id := newID()
	_, err = p.Create(t.Context(), at.spec(id, image))
	if err == nil {
		t.Fatal("it started without a guest")
	}
	if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("what did not start is still there: %v", err)
	}
	boots(p)
}

func TestWhatIsRefusedLeavesNothing(t *testing.T) {
	onEngine(t)
	image := imported(t, "ordinary", ordinary)
	for name, test := range map[string]struct {
		change func(*providers.MachineSpec)
		want   error
		says   string
	}{
		"an image that nobody has":                  {func(s *providers.MachineSpec) { s.Image = "localhost:1/no/such:image" }, providers.ErrNoImage, "localhost:1/no/such:image"},
		"what is no image's name":                   {func(s *providers.MachineSpec) { s.Image = "NO SUCH" }, providers.ErrNoImage, "NO SUCH"},
		"another broker's":                          {func(s *providers.MachineSpec) { s.BrokerID = "other" }, providers.ErrRefused, "other"},
		"no token":                                  {func(s *providers.MachineSpec) { s.Token = nil }, providers.ErrRefused, "token"},
		"a disk limit":                              {func(s *providers.MachineSpec) { s.Resources.DiskBytes = 1 }, providers.ErrRefused, "disk"},
		"too little memory":                         {func(s *providers.MachineSpec) { s.Resources.MemoryBytes = 1 << 10 }, providers.ErrRefused, "memory"},
		"more CPUs than there are":                  {func(s *providers.MachineSpec) { s.Resources.CPUs = 100000 }, providers.ErrRefused, "CPUs"},
		"a list of hosts":                           {func(s *providers.MachineSpec) { s.Egress.Mode = providers.EgressAllowList }, providers.ErrRefused, "hosts"},
		"a runtime that is not there":               {func(s *providers.MachineSpec) { s.Options = map[string]string{"runtime": "moonshine"} }, providers.ErrRefused, "moonshine"},
		"an option that is none":                    {func(s *providers.MachineSpec) { s.Options = map[string]string{"colour": "red"} }, providers.ErrRefused, "colour"},
		"a suspend that is none":                    {func(s *providers.MachineSpec) { s.Options = map[string]string{"suspend": "hibernate"} }, providers.ErrRefused, "hibernate"},
		"a workspace that is /":                     {func(s *providers.MachineSpec) { s.Workspace = "/" }, providers.ErrRefused, "workspace"},
		"a workspace that comes out as the guest's": {func(s *providers.MachineSpec) { s.Workspace = "/x/..//.berth/./" }, providers.ErrRefused, "guest's own directory"},
		"a workspace that goes up to it":            {func(s *providers.MachineSpec) { s.Workspace = "/.berth/bin/.." }, providers.ErrRefused, "guest's own directory"},
		"a hardening that is none":                  {func(s *providers.MachineSpec) { s.Options = map[string]string{"hardening": "some"} }, providers.ErrRefused, "strict"},
		"strict and yet writable": {func(s *providers.MachineSpec) {
			s.Options = map[string]string{"hardening": "strict", "read_only": "false"}
		}, providers.ErrRefused, "read_only"},
		"a workspace in the guest's": {func(s *providers.MachineSpec) { s.Workspace = "/.berth/x" }, providers.ErrRefused, "workspace"},
		"a snapshot and an image":    {func(s *providers.MachineSpec) { s.FromSnapshot = "s" }, providers.ErrRefused, "both"},
		"a socket path too long":     {func(s *providers.MachineSpec) { s.ListenDir = "/" + strings.Repeat("x", 120) }, providers.ErrRefused, "shorter"},
	} {
		t.Run(name, func(t *testing.T) {
			at, p, id := newPlace(t), provider(t), newID()
			spec := at.spec(id, image)
			test.change(&spec)
			_, err := p.Create(t.Context(), spec)
			if !errors.Is(err, test.want) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v", err)
			}
			if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
				t.Errorf("something is left: %v", err)
			}
			if left, _ := os.ReadDir(at.sockets); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestAnEngineThatIsNotThere(t *testing.T) {
	at := newPlace(t)
	p := provider(t, func(o *docker.Options) { o.Host = "unix://" + filepath.Join(at.sockets, "none") })
	wantUnavailable(t, at, p)
	if err := docker.Answers(t.Context(), "unix://"+filepath.Join(at.sockets, "none")); err == nil {
		t.Error("it answers")
	}
}

// wantUnavailable asks everything of a provider whose engine does not answer.
func wantUnavailable(t *testing.T, at place, p *docker.Provider) {
	t.Helper()
	begun := time.Now()
	info, err := p.Info(t.Context())
	must(t, err)
	if info.Healthy || !strings.Contains(info.Message, "DOCKER_HOST") || time.Since(begun) > 3*time.Second {
		t.Errorf("after %v: %+v", time.Since(begun), info)
	}
	for name, call := range map[string]func() error{
		"Create":  func() error { _, err := p.Create(t.Context(), at.spec(newID(), "")); return err },
		"Inspect": func() error { _, err := p.Inspect(t.Context(), newID()); return err },
		"List":    func() error { _, err := p.List(t.Context()); return err },
		"Destroy": func() error { return p.Destroy(t.Context(), at.machine(newID())) },
		"Dialer":  func() error { _, err := p.Dialer(t.Context(), at.machine(newID())); return err },
		"Suspend": func() error { return p.Suspend(t.Context(), at.machine(newID())) },
	} {
		var unavailable *providers.UnavailableError
		if err := call(); !errors.As(err, &unavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAnEngineThatNeverAnswers(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for deadlines")
	}
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		var held []net.Conn
		for {
			conn, err := listener.Accept()
			if err != nil {
				for _, c := range held {
					_ = c.Close()
				}
				return
			}
			held = append(held, conn)
		}
	}()
	t.Cleanup(func() { _ = listener.Close(); <-accepted })
	at := newPlace(t)
	p := provider(t, func(o *docker.Options) { o.Host = "tcp://" + listener.Addr().String() })
	info, err := p.Info(t.Context())
	if err != nil || info.Healthy {
		t.Errorf("%+v, %v", info, err)
	}
	var unavailable *providers.UnavailableError
	if _, err := p.Inspect(t.Context(), newID()); !errors.As(err, &unavailable) {
		t.Errorf("Inspect: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := p.Create(short, at.spec(newID(), "")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Create with a deadline of its caller's: %v", err)
	}
}

func TestInfoSaysWhatThereIs(t *testing.T) {
	onEngine(t)
	info, err := provider(t).Info(t.Context())
	must(t, err)
	if !info.Healthy || info.Isolation != providers.IsolationContainer || !strings.Contains(info.Message, "Engine") {
		t.Errorf("%+v", info)
	}
	info, err = provider(t, func(o *docker.Options) {
		o.GuestPath = func(arch string) (string, error) { return "", fmt.Errorf("no guest for %s", arch) }
	}).Info(t.Context())
	must(t, err)
	if info.Healthy || !strings.Contains(info.Message, "no guest for ") {
		t.Errorf("%+v", info)
	}
}

func TestWhatIsDeclaredIsThere(t *testing.T) {
	var p any = provider(t)
	info, err := p.(providers.Provider).Info(t.Context())
	must(t, err)
	_, suspends := p.(providers.Suspender)
	_, snapshots := p.(providers.Snapshotter)
	_, cuts := p.(providers.EgressCutter)
	for capability, there := range map[providers.Capability]bool{
		providers.CapSuspend: suspends, providers.CapSnapshot: snapshots, providers.CapEgressNone: cuts,
	} {
		declared := false
		for _, c := range info.Capabilities {
			declared = declared || c == capability
		}
		if declared != there {
			t.Errorf("%s is declared: %v, and there: %v", capability, declared, there)
		}
	}
}

// BenchmarkCreateToFirstCommand is what `docker run -d` is to be compared with.
func BenchmarkCreateToFirstCommand(b *testing.B) {
	at, p := newPlace(b), provider(b)
	image := imported(b, "ordinary", ordinary)
	for i := 0; b.Loop(); i++ {
		id := newID()
		at.create(b, p, at.spec(id, image))
		if got := at.reach(b, p, id).run("true"); got != (result{}) {
			b.Fatal(strconv.Itoa(i), got)
		}
		b.StopTimer()
		must(b, p.Destroy(context.Background(), at.machine(id)))
		b.StartTimer()
	}
}
