package docker_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"github.com/oklog/ulid/v2"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/berth-sandbox/berth/conformance/need"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// brokerID is this run's own, so that runs beside it on the same engine are nobody's business.
var brokerID = "test" + ulid.Make().String()

// guestProgram is built once.
var guestProgram string

func TestMain(m *testing.M) { goleak.VerifyTestMain(suite{m}) }

// suite is the tests with what they stand on and leave.
type suite struct{ tests *testing.M }

// Run builds the guest, runs the tests and clears the engine.
func (s suite) Run() int {
	bin, err := os.MkdirTemp("", "berth-docker-test")
	check(err)
	guestProgram = filepath.Join(bin, "berth-guest")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", guestProgram, "../guest/cmd/berth-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		check(fmt.Errorf("go build: %w: %s", err, out))
	}
	code := s.tests.Run()
	if yard.engine != nil {
		if err := yard.clear(); err != nil {
			fmt.Println(err)
			code = 1
		}
	}
	check(os.RemoveAll(bin))
	return code
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

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
	need.Docker(t)
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
	ctx := context.Background()
	var left []string
	containers, err := y.engine.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.berth.broker="+brokerID)})
	for _, c := range containers.Items {
		left = append(left, fmt.Sprintf("container %v %s", c.Names, c.State))
	}
	volumes, volumesErr := y.engine.VolumeList(ctx, client.VolumeListOptions{})
	for _, v := range volumes.Items {
		switch {
		case machines[v.Labels["dev.berth.machine"]]:
			left = append(left, "volume "+v.Name)
		case v.Name == guestVolume() && !slices.Contains(y.volumes, v.Name):
			_, removeErr := y.engine.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{})
			err = errors.Join(err, removeErr)
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
	return errors.Join(err, volumesErr, imagesErr, y.engine.Close())
}

func guestDigest() string {
	content, err := os.ReadFile(guestProgram)
	check(err)
	return fmt.Sprintf("%x", sha256.Sum256(content))
}

func guestVolume() string { return "berth-guest-" + guestDigest()[:12] }

// machines are the ids that this run has given out.
var machines = map[string]bool{}

func newID() string {
	id := "m_" + ulid.Make().String()
	machines[id] = true
	return id
}

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

// guest is a connection to a guest that Hello has opened.
type guest struct {
	guestv1.GuestServiceClient
	hello *guestv1.HelloResponse
}

// reach dials a machine's guest and says hello.
func (l place) reach(t testing.TB, p *docker.Provider, id string) guest {
	t.Helper()
	dialer, err := p.Dialer(t.Context(), l.machine(id))
	if err != nil {
		t.Fatal(err)
	}
	// The streams live on; a guest keeps its spare connection at whoever listens.
	defer func() { must(t, dialer.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var failures []error
	for ctx.Err() == nil {
		stream, err := dialer.Dial(ctx)
		if err == nil {
			return converse(t, stream, id)
		}
		failures = append(failures, err)
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatalf("the guest was not reached: %v", failures[len(failures)-1])
	return guest{}
}

func converse(t testing.TB, stream net.Conn, id string) guest {
	t.Helper()
	used := false
	conn, err := grpc.NewClient("passthrough:///"+id, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if used {
				return nil, errors.New("the stream has ended")
			}
			used = true
			return stream, nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	g := guest{GuestServiceClient: guestv1.NewGuestServiceClient(conn)}
	nonce := bytes.Repeat([]byte("n"), 32)
	g.hello, err = g.Hello(t.Context(), &guestv1.HelloRequest{Protocol: 1, MachineId: id, Nonce: nonce, Proof: proof("berth broker", nonce)})
	if err != nil {
		t.Fatal(err)
	}
	if !hmac.Equal(g.hello.GetProof(), proof("berth guest", nonce)) {
		t.Fatal("who answered does not know the token")
	}
	return g
}

func proof(who string, nonce []byte) []byte {
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte(who))
	mac.Write(nonce)
	return mac.Sum(nil)
}

// result is how a command ended, in brief.
type result struct {
	code     int32
	reason   string
	out, err string
}

func (g guest) run(t testing.TB, argv ...string) result {
	t.Helper()
	return g.command(t, &guestv1.Command{Argv: argv})
}

func (g guest) shell(t testing.TB, script string) result {
	t.Helper()
	return g.command(t, &guestv1.Command{Shell: script})
}

func (g guest) command(t testing.TB, command *guestv1.Command) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	command.OutputLimitBytes = 1 << 20
	answer, err := g.Run(ctx, &guestv1.RunRequest{
		Start:          &guestv1.StartRequest{JobId: "job_" + ulid.Make().String(), Command: command},
		MaxOutputBytes: 64 << 10, Forget: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	outcome := answer.GetStatus().GetOutcome()
	return result{
		code: outcome.GetExitCode(), reason: outcome.GetReason(),
		out: string(answer.GetStdout().GetHead()), err: string(answer.GetStderr().GetHead()),
	}
}
