// Package docker boots machines as containers of a Docker Engine, 20.10 or later, here or elsewhere.
// The guest is PID 1 of its container; once it runs, the engine is on the path of no command: where
// broker and engine share a file system the guest dials out to the broker's socket, otherwise a
// `berth-guest bridge` carries one stream. The package keeps nothing: a container's name and labels
// say whose it is, so that whatever a crash left is found by asking the engine. It never runs an
// agent's command and never speaks to a guest.
//
// What is in a machine that the image does not bring, all under /.berth:
//
//	bin    read-only volume berth-guest-<digest>, shared by all machines of an engine: the guest
//	state  anonymous volume of the machine: the spool; not in a snapshot
//	run    tmpfs: the guest's own socket, for the bridge
//	host   read-only bind mount of the machine's socket directory, where a file system is shared
//
// The guest's BootConfig, with the machine's token, is boot.json (mode 0600) in host, else in state:
// never in an environment, an argument, an image or anything else that the engine tells.
package docker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// DefaultImage is what machines are made from that name no image. It has git, which a clone needs.
const DefaultImage = "buildpack-deps:stable-scm"

// Labels of containers, volumes and images that are ours.
const (
	labelBroker   = "dev.berth.broker"   // the ledger's instance id
	labelMachine  = "dev.berth.machine"  // m_…; on containers that are machines, and on their own volumes
	labelSuspend  = "dev.berth.suspend"  // how the machine is suspended
	labelHelper   = "dev.berth.helper"   // on the container that fills the guest's volume; never started
	labelGuest    = "dev.berth.guest"    // on the guest's volume: the program's SHA-256
	labelSnapshot = "dev.berth.snapshot" // on images that are snapshots: the broker's id for it
)

// Tuning.
const (
	tokenBytes          = 32                     // a machine's token, as the guest's BootConfig says
	maxConcurrentStarts = 3                      // an engine does about 9 starts a second whatever it is asked; more at once only grow each one's time
	infoTimeout         = 2 * time.Second        // what a look at an engine's health may cost
	readTimeout         = 10 * time.Second       // a question to the engine; it answers in milliseconds
	changeTimeout       = 60 * time.Second       // an order to the engine; removing many files is the slowest
	copyTimeout         = 90 * time.Second       // files into or out of a container, at the pace of a slow line
	commitTimeout       = 10 * time.Minute       // a snapshot copies what the machine has written
	pullTimeout         = 30 * time.Minute       // an image; beyond this something hangs
	pullReport          = 10 * time.Second       // how often a pull's progress is logged
	pullRetry           = 5 * time.Second        // RetryAfter while an image is being pulled
	stopGrace           = 10                     // seconds that a guest gets to end its jobs before it is killed
	goneTimeout         = 30 * time.Second       // how long a container that is being removed may stay
	networkTimeout      = 20 * time.Second       // for removing a network that nobody waits for
	gonePoll            = 50 * time.Millisecond  // between two looks at that
	dialOutTime         = 5 * time.Second        // how long a guest may take to dial out before the bridge is tried; it takes 10 ms when it runs
	dialOutAgain        = 200 * time.Millisecond // the same once the bridge has proved to be the only way
	guestLogBytes       = "1m"                   // the guest's log in the engine; it writes a few lines
	noteBytes           = 2 << 10                // of that log, at most, in a Note
)

// Options are what a Provider is made from.
type Options struct {
	// BrokerID is the label of this broker's machines: the ledger's instance id.
	BrokerID string
	// GuestPath returns the path of the berth-guest program for an architecture in Go's words, and an
	// error for people when there is none.
	GuestPath func(arch string) (string, error)
	// Host is the engine's address, unix:///path or tcp://host:port. Default: what DOCKER_HOST,
	// DOCKER_TLS_VERIFY and DOCKER_CERT_PATH say, else the local engine's socket.
	Host string
	// Image is what machines are made from that name none. Default: DefaultImage.
	Image string
	// Network is the engine's network that machines are put on. Default: a bridge of this broker's own, on which
	// machines cannot reach one another.
	Network string
	// Defaults are the memory and the processes of a machine that asks for no limit. Zero is no limit.
	Defaults providers.Resources
	// Bridge makes all streams go through the engine, also where a file system is shared.
	Bridge bool
	// Log takes a line about what takes long or looks odd. Default: slog.Default().
	Log *slog.Logger
}

// Provider boots containers. It satisfies providers.Provider, Suspender, EgressCutter and Snapshotter.
type Provider struct {
	broker   string
	guest    func(arch string) (string, error)
	image    string
	network  string // empty: the broker's own
	defaults providers.Resources
	bridge   bool
	log      *slog.Logger
	engine   *client.Client
	machines keyedLock     // by machine id: what changes one machine takes turns
	networks keyedLock     // making, counting on and removing the broker's own network takes turns
	joining  atomic.Int32  // how many machines' containers are being made on it
	starting chan struct{} // holds a token for each start in progress
	warned   sync.Map      // the engine's warnings that were logged
	pulls    pulls
	supply   supply
}

var (
	_ providers.Provider     = (*Provider)(nil)
	_ providers.Suspender    = (*Provider)(nil)
	_ providers.EgressCutter = (*Provider)(nil)
	_ providers.Snapshotter  = (*Provider)(nil)
)

// name is an id as far as it becomes part of a container's or an image's name.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$`)

// New makes a provider. The engine need not be there yet. Close ends it; the machines live on.
func New(options Options) (*Provider, error) {
	if !name.MatchString(options.BrokerID) {
		return nil, fmt.Errorf("docker provider: BrokerID %q: want the ledger's instance id, letters, digits, _ and -", options.BrokerID)
	}
	if options.GuestPath == nil {
		return nil, errors.New("docker provider: GuestPath is missing: it says where berth-guest is")
	}
	if options.Network != "" {
		if err := CheckNetwork(options.Network); err != nil {
			return nil, fmt.Errorf("docker provider: Network: %w", err)
		}
	}
	if options.Log == nil {
		options.Log = slog.Default()
	}
	if options.Image == "" {
		options.Image = DefaultImage
	}
	engine, err := connect(options.Host)
	if err != nil {
		return nil, fmt.Errorf("docker provider: %w", err)
	}
	return &Provider{
		broker: options.BrokerID, guest: options.GuestPath, image: options.Image, bridge: options.Bridge,
		network: options.Network, defaults: options.Defaults, log: options.Log, engine: engine, starting: make(chan struct{}, maxConcurrentStarts),
	}, nil
}

// Close ends pulls in progress and the connections to the engine.
func (p *Provider) Close() error {
	p.pulls.close()
	return p.engine.Close()
}

// Answers asks the engine at host (empty: as in Options.Host) for a sign of life.
func Answers(ctx context.Context, host string) error {
	engine, err := connect(host)
	if err != nil {
		return err
	}
	_, err = engine.Ping(ctx, client.PingOptions{})
	return errors.Join(err, engine.Close())
}

func connect(host string) (*client.Client, error) {
	if host == "" {
		return client.New(client.FromEnv)
	}
	return client.New(client.FromEnv, client.WithHost(host))
}

// Info says whether the engine answers and what it is. It is not healthy without an engine of 20.10 or
// later for Linux, or without the guest's program for its architecture.
func (p *Provider) Info(ctx context.Context) (providers.Info, error) {
	info := providers.Info{
		Name:      "docker",
		Isolation: providers.IsolationContainer,
		Capabilities: []providers.Capability{
			providers.CapImage, providers.CapWorkspacePath, providers.CapCPUs, providers.CapMemory, providers.CapPIDs,
			providers.CapEgressNone, providers.CapRestart, providers.CapSuspend, providers.CapSnapshot,
		},
		Options: []providers.Option{
			{Name: optionRuntime, Description: "the engine's runtime for the container, for example runsc; default: the engine's"},
			{Name: optionSuspend, Description: "pause (default): memory is kept and processes go on; stop: only the disk is kept"},
			{Name: optionHardening, Description: "strict: no capabilities, no new privileges, read_only, and /tmp, /var/tmp and /run in memory; default: the engine's capabilities without NET_RAW and MKNOD"},
			{Name: optionReadOnly, Description: "true: the image cannot be written to, only the workspace and /tmp"},
		},
	}
	if p.network == "" {
		info.Capabilities = append(info.Capabilities, providers.CapNetworkIsolated)
	}
	limited, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	version, err := p.engine.ServerVersion(limited, client.ServerVersionOptions{})
	switch {
	case ctx.Err() != nil:
		return providers.Info{}, fmt.Errorf("asking the Docker Engine: %w", ctx.Err())
	case err != nil:
		info.Message = fmt.Sprintf("no Docker Engine answers at %s: start it, or set DOCKER_HOST to where it is (%v)", p.engine.DaemonHost(), err)
		return info, nil
	case version.Os != "linux":
		info.Message = fmt.Sprintf("the engine at %s runs %s containers and machines are Linux's: switch it", p.engine.DaemonHost(), version.Os)
		return info, nil
	case !atLeast(version.APIVersion, oldestAPI):
		info.Message = fmt.Sprintf("Docker Engine %s is too old: 20.10 or later is needed", version.Version)
		return info, nil
	}
	if _, err := p.guest(version.Arch); err != nil {
		info.Message = err.Error()
		return info, nil
	}
	info.Healthy = true
	info.Message = fmt.Sprintf("Docker Engine %s at %s; machines with a network reach what its host serves", version.Version, p.engine.DaemonHost())
	return info, nil
}

// oldestAPI is Engine 20.10's.
const oldestAPI = "1.41"

// atLeast compares versions of the engine's API.
func atLeast(version, wanted string) bool {
	var major, minor, wantedMajor, wantedMinor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		return false
	}
	if _, err := fmt.Sscanf(wanted, "%d.%d", &wantedMajor, &wantedMinor); err != nil {
		return false
	}
	return major > wantedMajor || major == wantedMajor && minor >= wantedMinor
}

// keyedLock is a mutex for each key; waiting for one honours the context.
type keyedLock struct {
	mu   sync.Mutex
	keys map[string]*turn
}

// turn is one key's mutex: whoever has put something in taken has it.
type turn struct {
	taken chan struct{}
	users int
}

func (k *keyedLock) lock(ctx context.Context, key string) (unlock func(), err error) {
	k.mu.Lock()
	if k.keys == nil {
		k.keys = map[string]*turn{}
	}
	t := k.keys[key]
	if t == nil {
		t = &turn{taken: make(chan struct{}, 1)}
		k.keys[key] = t
	}
	t.users++
	k.mu.Unlock()
	leave := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(k.keys, key)
		}
	}
	select {
	case t.taken <- struct{}{}:
		return func() { <-t.taken; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("waiting for another call on machine %s: %w", key, ctx.Err())
	}
}
