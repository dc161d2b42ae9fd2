package docker_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/moby/client"
	"github.com/oklog/ulid/v2"

	"github.com/berth-sandbox/berth/conformance/fixture"
	contract "github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/conformance/testenv"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// brokerID is this run's own, so that runs beside it on the same engine are nobody's business.
var brokerID = "test" + ulid.Make().String()

// guestProgram is built once.
var guestProgram string

func TestMain(m *testing.M) { fixture.Main(m, yard.clear) }

// yard is the engine as the tests see it beside the provider, and what they put there.
var yard engineYard

type engineYard struct {
	engine  *client.Client
	images  []string
	volumes []string // the guests' volumes before
}

// onEngine says what a test needs and returns a client of its own for what happens behind the
// provider's back.
func onEngine(t testing.TB) *client.Client {
	t.Helper()
	testenv.Docker(t)
	guestProgram = fixture.Guest(t)
	if yard.engine == nil {
		engine, err := client.New(client.FromEnv)
		if err != nil {
			t.Fatal(err)
		}
		yard.engine, yard.volumes = engine, guestVolumes(t, engine)
	}
	return yard.engine
}

func guestVolumes(t testing.TB, engine *client.Client) (names []string) {
	t.Helper()
	found, err := engine.VolumeList(context.Background(), client.VolumeListOptions{Filters: client.Filters{}.Add("name", "berth-guest-")})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range found.Items {
		names = append(names, v.Name)
	}
	return names
}

// clear removes what the tests put on the engine, and names what machines left there.
func (y *engineYard) clear() error {
	if y.engine == nil {
		return nil
	}
	ctx := context.Background()
	var left []string
	containers, err := y.engine.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.berth.broker="+brokerID)})
	for _, c := range containers.Items {
		left = append(left, fmt.Sprintf("container %v %s", c.Names, c.State))
	}
	volumes, volumesErr := y.engine.VolumeList(ctx, client.VolumeListOptions{})
	for _, v := range volumes.Items {
		switch {
		case v.Labels["dev.berth.broker"] == brokerID:
			left = append(left, "volume "+v.Name)
		case v.Name == guestVolume() && !slices.Contains(y.volumes, v.Name):
			_, removeErr := y.engine.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{})
			err = errors.Join(err, removeErr)
		}
	}
	networks, networksErr := y.engine.NetworkList(ctx, client.NetworkListOptions{})
	for _, n := range networks.Items {
		if n.Labels["dev.berth.broker"] == brokerID {
			left = append(left, "network "+n.Name)
		}
	}
	images, imagesErr := y.engine.ImageList(ctx, client.ImageListOptions{Filters: client.Filters{}.Add("label", "dev.berth.broker="+brokerID)})
	for _, i := range images.Items {
		left = append(left, fmt.Sprintf("image %s %v", i.ID, i.RepoTags))
	}
	for _, reference := range y.images {
		_, removeErr := y.engine.ImageRemove(ctx, reference, client.ImageRemoveOptions{Force: true, PruneChildren: true})
		err = errors.Join(err, removeErr)
	}
	if len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left behind:\n%s", strings.Join(left, "\n")))
	}
	return errors.Join(err, volumesErr, networksErr, imagesErr, y.engine.Close())
}

func guestDigest() string {
	content, err := os.ReadFile(guestProgram)
	if err != nil {
		panic(err) // it was built
	}
	return fmt.Sprintf("%x", sha256.Sum256(content))
}

func guestVolume() string { return "berth-guest-" + guestDigest()[:12] }

func newID() string { return contract.NewID() }

var token = bytes.Repeat([]byte("t"), 32)

// place is where a test's socket directories lie.
type place struct{ sockets string }

func newPlace(t testing.TB) place {
	t.Helper()
	base, err := os.MkdirTemp("", "bd") // short, unlike t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	return place{sockets: base}
}

func provider(t testing.TB, change ...func(*docker.Options)) *docker.Provider {
	t.Helper()
	guestProgram = fixture.Guest(t)
	options := docker.Options{BrokerID: brokerID, GuestPath: func(string) (string, error) { return guestProgram, nil }}
	for _, c := range change {
		c(&options)
	}
	p, err := docker.New(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func overTheBridge(o *docker.Options) { o.Bridge = true }

func (l place) spec(id, image string) providers.MachineSpec {
	return providers.MachineSpec{
		MachineID: id, BrokerID: brokerID, Generation: 1, Token: token, Image: image, ListenDir: filepath.Join(l.sockets, id),
	}
}

func (l place) machine(id string) providers.Machine {
	return providers.Machine{ID: id, ListenDir: filepath.Join(l.sockets, id)}
}

func (l place) create(t testing.TB, p *docker.Provider, spec providers.MachineSpec) {
	t.Helper()
	t.Cleanup(func() {
		if err := p.Destroy(context.Background(), l.machine(spec.MachineID)); err != nil {
			t.Error(err)
		}
	})
	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
}

// destroy destroys and wants nothing left.
func (l place) destroy(t testing.TB, p *docker.Provider, id string) {
	t.Helper()
	if err := p.Destroy(t.Context(), l.machine(id)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("Inspect after Destroy: %v, want ErrNotFound", err)
	}
	if _, err := os.Stat(filepath.Join(l.sockets, id)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket directory is still there: %v", err)
	}
}

func state(t testing.TB, p *docker.Provider, id string) providers.MachineState {
	t.Helper()
	m, err := p.Inspect(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return m.State
}

// guest is a connection to a machine's guest.
type guest struct{ *contract.Guest }

// reach dials a machine's guest and says hello.
func (l place) reach(t testing.TB, p *docker.Provider, id string) guest {
	t.Helper()
	return guest{contract.Connect(t, p, l.spec(id, ""))}
}

// result is how a command ended, in brief.
type result = contract.Result

func (g guest) run(argv ...string) result { return g.Run(&guestv1.Command{Argv: argv}) }
