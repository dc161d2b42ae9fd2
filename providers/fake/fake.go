// Package fake is a provider for tests: its machines are real guest processes, each in a directory of
// its own, and every call of it can be made to fail in the ways that real providers fail. Faults come
// from a script in its directory that is read again at each call, so that a test also reaches the
// provider of a broker in another process; see Harness. What its guests say can be changed on the way; see
// Harness.SetRules. What it knows of its machines lies in files and locks, and survives a crash. It isolates
// nothing, never runs a command in a machine, and is no provider for work.
package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// tokenBytes is the length of a machine's token, as the guest's BootConfig says.
const tokenBytes = 32

// Tuning.
const (
	termTimeout  = 3 * time.Second       // for a guest to end what it started, before it is killed
	killTimeout  = 10 * time.Second      // for killed processes to be gone
	pollInterval = 5 * time.Millisecond  // at something that is about to happen
	reapInterval = 20 * time.Millisecond // to the exit of guests that this process started, and to the script of rules
)

// Options are what a Provider is made from. All but Log are required.
type Options struct {
	// Dir holds the machines and the script. It is made if missing.
	Dir string
	// BrokerID is the label of this broker's machines.
	BrokerID string
	// GuestPath returns the path of the berth-guest program for an architecture in Go's words.
	GuestPath func(arch string) (string, error)
	// Log takes a line for each fault. Default: slog.Default().
	Log *slog.Logger
}

// Provider boots guests as plain processes. It satisfies providers.Provider and Suspender.
type Provider struct {
	harness Harness
	broker  string
	guest   func(arch string) (string, error)
	log     *slog.Logger
	rules   *faultproxy.Script

	ctx    context.Context //nolint:containedctx // ends what is done again after a reply
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu       sync.Mutex
	turns    map[string]*sync.Mutex // by machine
	children map[int]bool           // guests that this process started and has not reaped
	plain    map[*honestConn]bool   // connections with nobody in their middle
}

var (
	_ providers.Provider  = (*Provider)(nil)
	_ providers.Suspender = (*Provider)(nil)
)

// name is a machine's or a broker's id as far as it becomes a file's name.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`)

// New makes a provider and its directory. Close ends it; the machines live on.
func New(options Options) (*Provider, error) {
	switch {
	case options.Dir == "":
		return nil, errors.New("fake provider: Dir is missing")
	case !name.MatchString(options.BrokerID):
		return nil, fmt.Errorf("fake provider: BrokerID %q: want letters, digits, _ and -", options.BrokerID)
	case options.GuestPath == nil:
		return nil, errors.New("fake provider: GuestPath is missing")
	}
	if options.Log == nil {
		options.Log = slog.Default()
	}
	dir, err := filepath.Abs(options.Dir)
	if err != nil {
		return nil, fmt.Errorf("fake provider: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("fake provider: making its directory: %w", err)
	}
	if err := removeStaged(dir); err != nil {
		return nil, fmt.Errorf("fake provider: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Provider{
		harness: At(dir), broker: options.BrokerID, guest: options.GuestPath, log: options.Log,
		ctx: ctx, cancel: cancel, turns: map[string]*sync.Mutex{}, children: map[int]bool{},
		rules: faultproxy.In(dir), plain: map[*honestConn]bool{},
	}
	p.work.Go(p.reap)
	return p, nil
}

// removeStaged removes the directories that a crash left half made: no machine has their names.
func removeStaged(dir string) error {
	staged, err := filepath.Glob(filepath.Join(dir, newPrefix+"*"))
	for _, path := range staged {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// Harness is what the provider's machines and faults are reached by.
func (p *Provider) Harness() Harness { return p.harness }

// Close ends what the provider does in the background and waits for it. The machines live on.
func (p *Provider) Close() error {
	p.cancel()
	p.work.Wait()
	return nil
}

// reap collects the exit of guests that this process started, so that they leave no zombies, and looks
// whether rules are wanted.
func (p *Provider) reap() {
	ticker := time.NewTicker(reapInterval)
	defer ticker.Stop()
	for {
		p.mu.Lock()
		for pid := range p.children {
			if reaped, err := syscall.Wait4(pid, nil, syscall.WNOHANG, nil); reaped == pid || errors.Is(err, syscall.ECHILD) {
				delete(p.children, pid)
			}
		}
		p.mu.Unlock()
		p.redial()
		select {
		case <-p.ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// turn makes the calls on one machine take turns.
func (p *Provider) turn(id string) (unlock func()) {
	p.mu.Lock()
	turn := p.turns[id]
	if turn == nil {
		turn = &sync.Mutex{}
		p.turns[id] = turn
	}
	p.mu.Unlock()
	turn.Lock()
	return turn.Unlock
}

// Info says what the provider is; not healthy without the guest's program.
func (p *Provider) Info(ctx context.Context) (providers.Info, error) {
	info := providers.Info{
		Name: "fake", Isolation: providers.IsolationNone, Healthy: true,
		Message: "for tests: plain host processes, and faults on purpose", Capabilities: []providers.Capability{providers.CapRestart, providers.CapSuspend},
	}
	err := p.inject(ctx, CallInfo, "", func(context.Context) error {
		if _, err := p.guest(runtime.GOARCH); err != nil {
			info.Healthy, info.Message = false, err.Error()
		}
		return nil
	})
	return info, err
}

// Create makes the machine run. Errors: ErrRefused for a spec that it cannot honour and for a machine
// that is to be destroyed, and those of the script.
func (p *Provider) Create(ctx context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	if err := p.check(spec); err != nil {
		return providers.Handle{}, err
	}
	handle := providers.Handle{Version: 1, Bytes: []byte(spec.MachineID)}
	err := p.inject(ctx, CallCreate, spec.MachineID, func(ctx context.Context) error {
		defer p.turn(spec.MachineID)()
		return p.boot(ctx, spec)
	})
	if err != nil {
		return providers.Handle{}, err
	}
	return handle, nil
}

func (p *Provider) check(spec providers.MachineSpec) error {
	switch {
	case !name.MatchString(spec.MachineID):
		return fmt.Errorf("machine %q: its id is no name: %w", spec.MachineID, providers.ErrRefused)
	case spec.BrokerID != p.broker:
		return fmt.Errorf("machine %s is for broker %q: %w", spec.MachineID, spec.BrokerID, providers.ErrRefused)
	case len(spec.Token) != tokenBytes:
		return fmt.Errorf("machine %s: its token has %d bytes, want %d: %w", spec.MachineID, len(spec.Token), tokenBytes, providers.ErrRefused)
	case !filepath.IsAbs(spec.ListenDir):
		return fmt.Errorf("machine %s: its socket directory %q must be an absolute path: %w", spec.MachineID, spec.ListenDir, providers.ErrRefused)
	case spec.Image != "" || spec.Workspace != "" || spec.Egress.Mode != providers.EgressOpen || len(spec.Options) > 0 ||
		spec.Resources != providers.Resources{} || spec.FromSnapshot != "":
		return fmt.Errorf("machine %s asks for what no capability promises: %w", spec.MachineID, providers.ErrRefused)
	}
	if _, err := reverse.SocketPath(spec.ListenDir); err != nil {
		return fmt.Errorf("machine %s: %w: %w", spec.MachineID, err, providers.ErrRefused)
	}
	return nil
}

// Inspect finds a machine.
func (p *Provider) Inspect(ctx context.Context, id string) (providers.Machine, error) {
	var found providers.Machine
	err := p.inject(ctx, CallInspect, id, func(context.Context) (err error) {
		defer p.turn(id)()
		found, err = p.find(id)
		return err
	})
	return found, err
}

func (p *Provider) find(id string) (providers.Machine, error) {
	if _, err := os.Stat(p.harness.gone(id)); err == nil {
		return providers.Machine{ID: id, State: providers.MachinePartial, Note: "it is half destroyed"}, nil
	}
	m, err := p.harness.machine(id)
	if err != nil {
		return providers.Machine{}, err
	}
	if m.Broker != p.broker {
		return providers.Machine{}, fmt.Errorf("machine %s is another broker's: %w", id, providers.ErrNotFound)
	}
	return m.describe()
}

// List returns this broker's machines; stale, what the last list that was not stale returned.
func (p *Provider) List(ctx context.Context) ([]providers.Machine, error) {
	var machines []providers.Machine
	err := p.inject(ctx, CallList, "", func(context.Context) (err error) {
		machines, err = p.list()
		return err
	})
	if errors.Is(err, errStale) {
		return p.harness.lastList()
	}
	if err != nil {
		return nil, err
	}
	return machines, p.harness.rememberList(machines)
}

func (p *Provider) list() ([]providers.Machine, error) {
	entries, err := os.ReadDir(p.harness.dir)
	if err != nil {
		return nil, fmt.Errorf("listing the machines: %w", err)
	}
	var machines []providers.Machine
	for _, entry := range entries {
		id := strings.TrimPrefix(entry.Name(), gonePrefix)
		if !entry.IsDir() || !name.MatchString(id) {
			continue
		}
		found, err := p.find(id)
		if errors.Is(err, providers.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		machines = append(machines, found)
	}
	return machines, nil
}

// Destroy kills everything in a machine and removes all of it.
func (p *Provider) Destroy(ctx context.Context, machine providers.Machine) error {
	return p.inject(ctx, CallDestroy, machine.ID, func(ctx context.Context) error {
		defer p.turn(machine.ID)()
		m, err := p.harness.machine(machine.ID)
		switch {
		case errors.Is(err, providers.ErrNotFound):
			if filepath.Base(machine.ListenDir) == machine.ID { // only such a directory is the machine's
				if err := os.RemoveAll(machine.ListenDir); err != nil {
					return fmt.Errorf("removing the sockets of machine %s: %w", machine.ID, err)
				}
			}
			return os.RemoveAll(p.harness.gone(machine.ID))
		case err != nil:
			return err
		case m.Broker != p.broker:
			return fmt.Errorf("machine %s is another broker's: %w", m.ID, providers.ErrRefused)
		}
		return m.destroy(ctx, syscall.SIGTERM)
	})
}

// Dialer listens where the machine's guest dials.
func (p *Provider) Dialer(ctx context.Context, machine providers.Machine) (providers.Dialer, error) {
	var dialer providers.Dialer
	err := p.inject(ctx, CallDialer, machine.ID, func(context.Context) error {
		defer p.turn(machine.ID)()
		m, err := p.harness.machine(machine.ID)
		if err != nil {
			return err
		}
		if m.Broker != p.broker {
			return fmt.Errorf("machine %s is another broker's: %w", m.ID, providers.ErrNotFound)
		}
		opened, err := reverse.Listen(m.ListenDir, nil)
		if err != nil {
			return fmt.Errorf("listening for machine %s: %w", m.ID, err)
		}
		dialer = proxied{opened, p, m.ID}
		return nil
	})
	if err != nil && dialer != nil {
		_ = dialer.Close() // nobody was given it
	}
	if err != nil {
		return nil, err
	}
	return dialer, nil
}

// boot makes the machine run, and does nothing where its guest lives.
func (p *Provider) boot(ctx context.Context, spec providers.MachineSpec) error {
	m, err := p.harness.machine(spec.MachineID)
	if errors.Is(err, providers.ErrNotFound) {
		m, err = p.harness.stage(spec)
	}
	if err != nil {
		return err
	}
	switch terminating, err := m.terminating(); {
	case err != nil:
		return err
	case terminating:
		return fmt.Errorf("machine %s is to be destroyed: %w", m.ID, providers.ErrRefused)
	case m.Broker != p.broker:
		return fmt.Errorf("machine %s is another broker's: %w", m.ID, providers.ErrRefused)
	}
	lock, err := m.takeLock()
	if err != nil {
		return err
	}
	if lock == nil { // its guest lives
		if m.frozen() {
			return m.thaw()
		}
		return nil
	}
	defer func() { _ = lock.Close() }() // the guest's own descriptor keeps it
	if err := m.killMembers(ctx); err != nil {
		return err
	}
	if err := os.Remove(m.path(frozenFile)); err != nil && !isAbsent(err) {
		return fmt.Errorf("booting machine %s: %w", m.ID, err)
	}
	m.ListenDir, m.Generation = spec.ListenDir, spec.Generation
	if err := m.write(); err != nil {
		return err
	}
	program, err := p.guest(runtime.GOARCH)
	if err != nil {
		return fmt.Errorf("finding berth-guest: %w: %w", err, providers.ErrRefused)
	}
	pid, err := m.start(program, spec.Token, lock)
	if err != nil {
		return fmt.Errorf("booting machine %s: %w", m.ID, err)
	}
	p.mu.Lock()
	p.children[pid] = true
	p.mu.Unlock()
	return nil
}

// await looks until done says so, at most as long as limit.
func await(ctx context.Context, limit time.Duration, what string, done func() (bool, error)) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-limited.Done():
			return fmt.Errorf("waiting for %s: %w", what, limited.Err())
		}
	}
}

func isAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) }
