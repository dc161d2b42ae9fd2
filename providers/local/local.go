// Package local boots machines on the broker's own host: each is a directory and a guest process in
// a session of its own, which dials out to its machine's socket and survives the broker. Where the
// kernel lets it, a machine gets its own PID, mount and IPC namespaces and a cgroup; otherwise it is
// plain host processes, for trusted work only. The package finds its machines again without any
// memory of its own, and destroys them without a trace. It never runs a command in a machine and
// never speaks to a guest.
//
// What makes it right after a crash at any instruction: a guest holds, for as long as it lives, a
// lock on its machine's lock file, through a descriptor that it inherited (see lock.go). So
// whether a machine runs is a question to the kernel and not to a record, no record has to be
// written in the right moment, and no two guests can be booted for one machine.
package local

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

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

const (
	// tokenBytes is how long a machine's token is, as the guest's BootConfig says.
	tokenBytes = 32
	// maxGuestLog is how large a guest's log may be, in bytes, when it is booted again; a larger one
	// is begun anew. A guest writes a few lines at most.
	maxGuestLog = 1 << 20
	// termTimeout is how long a guest of a plain machine gets to kill what it started before it is
	// killed itself: it knows its processes better than a look at /proc does.
	termTimeout = 5 * time.Second
	// killTimeout is how long killed processes may take to be gone; longer means that the kernel
	// holds them.
	killTimeout = 30 * time.Second
	// reattachTimeout is how long a guest that holds its lock may be invisible: one that is between
	// fork and exec does not bear its own name yet.
	reattachTimeout = 15 * time.Second
	// probeTimeout is how long the guest's program may take to try what it must be able to do; it takes
	// a few milliseconds.
	probeTimeout = 10 * time.Second
	// cgroupTimeout is how long an empty cgroup may refuse to be removed: the kernel finishes with
	// its dead processes a moment after they are gone.
	cgroupTimeout = 15 * time.Second
	// pollMin and pollMax bound the pauses between two looks at something that is about to happen.
	pollMin = 500 * time.Microsecond
	pollMax = 50 * time.Millisecond
	// cgroupTries is how often making a cgroup is tried when its parent vanishes meanwhile, removed
	// with somebody else's last machine.
	cgroupTries = 10
)

// IsolationMode is how machines are kept apart from the host.
type IsolationMode string

// The modes.
const (
	IsolationAuto IsolationMode = "auto" // namespaces and a cgroup where the kernel lets it
	IsolationNone IsolationMode = "none" // plain host processes
)

// Options are what a Provider is made from.
type Options struct {
	// Dir holds one directory for each machine, <state>/local. It is made if missing, on a local
	// file system.
	Dir string
	// BrokerID is the label of this broker's machines: the ledger's instance id. Machines in Dir that
	// bear another one are left alone.
	BrokerID string
	// GuestPath returns the path of the berth-guest program for an architecture in Go's words, and an
	// error for people when there is none.
	GuestPath func(arch string) (string, error)
	// Log takes a line when a guest ends or something odd is found. Default: slog.Default().
	Log *slog.Logger
	// Isolation is IsolationAuto by default.
	Isolation IsolationMode
}

// Provider boots machines on this host. It satisfies providers.Provider.
type Provider struct {
	dir      string
	broker   string
	guest    func(arch string) (string, error)
	log      *slog.Logger
	plain    bool       // it was told to keep nothing apart
	probing  sync.Mutex // guards known
	known    *host      // what the kernel lets us do, found once; nil before
	machines keyedLock  // by machine id: Create, Inspect, Destroy and Dialer of one machine take turns
	cgroups  sync.Mutex // making and removing the directory that machines' cgroups share
	reaper   reaper
}

var _ providers.Provider = (*Provider)(nil)

// name is a machine's or a broker's id as far as it becomes a file's name.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$`)

// New makes a provider and the directory that it keeps its machines in. As guests must inherit
// nothing of the broker, it also marks every descriptor that this process itself inherited as one
// that its children do not get. Close ends it; the machines live on.
func New(options Options) (*Provider, error) {
	if !name.MatchString(options.BrokerID) {
		return nil, fmt.Errorf("local provider: BrokerID %q: want the ledger's instance id, letters, digits, _ and -", options.BrokerID)
	}
	if options.GuestPath == nil {
		return nil, errors.New("local provider: GuestPath is missing: it says where berth-guest is")
	}
	if options.Log == nil {
		options.Log = slog.Default()
	}
	forcePlain := false
	switch options.Isolation {
	case "", IsolationAuto:
	case IsolationNone:
		forcePlain = true
	default:
		return nil, fmt.Errorf("local provider: Isolation %q: want %q or %q", options.Isolation, IsolationAuto, IsolationNone)
	}
	dir, err := filepath.Abs(options.Dir)
	if err != nil || options.Dir == "" {
		return nil, fmt.Errorf("local provider: Dir %q: want a directory", options.Dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("local provider: making its directory: %w", err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, fmt.Errorf("local provider: finding its directory: %w", err)
	}
	keepDescriptors()
	return &Provider{
		dir:    dir,
		broker: options.BrokerID,
		guest:  options.GuestPath,
		log:    options.Log,
		plain:  forcePlain,
		reaper: newReaper(options.Log),
	}, nil
}

// host returns what the kernel lets us do. It is found once there is a guest's program to find it with.
func (p *Provider) host() host {
	if p.plain {
		return host{noNamespaces: "the broker was told so", noCgroup: "the broker was told so"}
	}
	p.probing.Lock()
	defer p.probing.Unlock()
	if p.known != nil {
		return *p.known
	}
	program, err := p.guestProgram()
	found := probe(p.dir, p.broker, program)
	if err == nil {
		p.known = &found
	}
	return found
}

// Close ends what the provider does in the background: collecting the exit of guests that it booted.
// The guests live on.
func (p *Provider) Close() error {
	p.reaper.close()
	return nil
}

// Info says what machines are on this host. It is not healthy when no machine could be booted: the
// guest's program is missing, or the provider's directory is.
func (p *Provider) Info(ctx context.Context) (providers.Info, error) {
	if err := ctx.Err(); err != nil {
		return providers.Info{}, fmt.Errorf("looking at the host: %w", err)
	}
	here := p.host()
	info := providers.Info{
		Name:         "local",
		Isolation:    providers.IsolationNamespace,
		Healthy:      true,
		Message:      here.remark(),
		Capabilities: []providers.Capability{providers.CapRestart},
	}
	if here.noNamespaces != "" {
		info.Isolation = providers.IsolationNone
	}
	if here.noCgroup == "" {
		info.Capabilities = append(info.Capabilities, providers.CapSuspend)
	}
	if _, err := p.guestProgram(); err != nil {
		info.Healthy, info.Message = false, err.Error()
	}
	if err := unix.Access(p.dir, unix.W_OK|unix.X_OK); err != nil {
		info.Healthy, info.Message = false, fmt.Sprintf("the directory for machines, %s, cannot be written to: %v", p.dir, err)
	}
	return info, nil
}

// guestProgram returns the path of the guest's program, absolute, after a look at it.
func (p *Provider) guestProgram() (string, error) {
	path, err := p.guest(runtime.GOARCH)
	if err != nil {
		return "", fmt.Errorf("finding berth-guest for %s: %w: %w", runtime.GOARCH, err, providers.ErrRefused)
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", fmt.Errorf("finding berth-guest: %w", err)
	}
	const remedy = "build it (make build) or say where it is"
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("the guest's program %s is missing: %s: %w: %w", path, remedy, err, providers.ErrRefused)
	}
	if !info.Mode().IsRegular() || unix.Access(path, unix.X_OK) != nil {
		return "", fmt.Errorf("the guest's program %s cannot be executed: %s: %w", path, remedy, providers.ErrRefused)
	}
	return path, nil
}

// Inspect finds a machine. A machine that is to be destroyed counts as half-made, even while its
// guest still runs.
func (p *Provider) Inspect(ctx context.Context, id string) (providers.Machine, error) {
	unlock, err := p.machines.lock(ctx, id)
	if err != nil {
		return providers.Machine{}, err
	}
	defer unlock()
	m, err := p.find(id)
	if errors.Is(err, providers.ErrNotFound) && p.hasRemnant(id) {
		return providers.Machine{ID: id, State: providers.MachinePartial, Note: "its directory was removed behind the broker's back"}, nil
	}
	if err != nil {
		return providers.Machine{}, err
	}
	if m.foreign(p.broker) {
		return providers.Machine{}, fmt.Errorf("machine %s belongs to another broker: %w", id, providers.ErrNotFound)
	}
	return m.describe()
}

// List returns this broker's machines. Directories that are no machines, or another broker's, are
// not looked into.
func (p *Provider) List(ctx context.Context) ([]providers.Machine, error) {
	entries, err := os.ReadDir(p.dir)
	if err != nil {
		return nil, fmt.Errorf("listing the machines: %w", err)
	}
	seen := map[string]bool{}
	var machines []providers.Machine
	for _, entry := range entries {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("listing the machines: %w", err)
		}
		id := machineID(entry)
		if id == "" || seen[id] {
			continue
		}
		seen[id] = true
		m, err := p.find(id)
		if errors.Is(err, providers.ErrNotFound) {
			continue // destroyed since the directory was read
		}
		if err != nil {
			p.log.Warn("a directory is left alone, it is no machine that can be read", "directory", entry.Name(), "error", err)
			continue
		}
		if m.foreign(p.broker) {
			continue
		}
		machine, err := m.describe()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		machines = append(machines, machine)
	}
	return machines, nil
}

// Dialer listens where the machine's guest dials, which is where its last boot was told to. Errors:
// ErrNotFound; ErrRefused for a machine that is to be destroyed, and as reverse.Listen has it.
func (p *Provider) Dialer(ctx context.Context, machine providers.Machine) (providers.Dialer, error) {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	m, err := p.find(machine.ID)
	if err != nil {
		return nil, err
	}
	if m.foreign(p.broker) {
		return nil, fmt.Errorf("machine %s belongs to another broker: %w", machine.ID, providers.ErrNotFound)
	}
	if m.place != placeMade || m.terminating {
		return nil, fmt.Errorf("machine %s is half made or half destroyed: %w", machine.ID, providers.ErrRefused)
	}
	// Whoever speaks to a guest starts jobs in it, so from here on the machine has been booted, also
	// when a crash kept Create from saying so.
	if err := p.reattach(ctx, m); err != nil && !errors.Is(err, errNoGuest) {
		return nil, err
	}
	dialer, err := reverse.Listen(m.record.ListenDir, func() (int, error) { return p.guestProcess(machine.ID) })
	if err != nil {
		return nil, fmt.Errorf("listening for machine %s: %w", machine.ID, err)
	}
	return dialer, nil
}

// guestProcess returns the process of a machine's guest. There is always one that may speak for it, if only a
// dead one: nobody else may.
func (p *Provider) guestProcess(id string) (int, error) {
	m, err := p.find(id)
	if err != nil {
		return 0, err
	}
	if !m.record.Guest.alive() {
		return 0, fmt.Errorf("machine %s: %w", id, errNoGuest)
	}
	return m.record.Guest.PID, nil
}

// remedies are what helps where the host ran out of something, by its error.
var remedies = map[syscall.Errno]string{
	syscall.ENOSPC: "free disk space in berthd's state directory",
	syscall.EDQUOT: "free disk space in berthd's state directory, or raise the quota",
	syscall.ENOMEM: "free memory",
	syscall.EAGAIN: "raise the limit on processes (ulimit -u, TasksMax=)",
	syscall.EMFILE: "raise the limit on open files of berthd (ulimit -n, LimitNOFILE=)",
	syscall.ENFILE: "raise the host's limit on open files (fs.file-max)",
}

// classify gives an error that the kernel gave us the kind that the broker tells apart.
func classify(err error) error {
	for full := range remedies {
		if errors.Is(err, full) {
			return fmt.Errorf("%w: %w: %s", err, providers.ErrCapacity, remedies[full])
		}
	}
	for _, definite := range []error{fs.ErrPermission, syscall.EROFS, syscall.ENOEXEC, syscall.ENOLCK, syscall.ENAMETOOLONG} {
		if errors.Is(err, definite) {
			return fmt.Errorf("%w: %w", err, providers.ErrRefused)
		}
	}
	return err
}

// errNoGuest says that a machine has no guest that lives.
var errNoGuest = errors.New("no guest runs")

// errTimeout says that something took longer than it may.
var errTimeout = errors.New("still not so")

// await looks again and again, with growing pauses, until done says so; errTimeout after limit.
func await(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	end := time.Now().Add(limit)
	for pause := pollMin; ; pause = min(2*pause, pollMax) {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("after %v: %w", limit, errTimeout)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
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
	if err := ctx.Err(); err != nil {
		leave()
		return nil, fmt.Errorf("waiting for machine %s: %w", key, err)
	}
	select {
	case t.taken <- struct{}{}:
		return func() { <-t.taken; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("waiting for another call on machine %s: %w", key, ctx.Err())
	}
}

// keepDescriptors keeps the descriptors that this process inherited from becoming a guest's. Those
// that Go opens never do.
func keepDescriptors() {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	for _, entry := range entries {
		if fd, ok := number(entry.Name()); ok && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// remark says what a machine lacks on this host, for people.
func (h host) remark() string {
	var parts []string
	if h.noNamespaces != "" {
		parts = append(parts, "plain host processes: for trusted work only (no namespaces: "+h.noNamespaces+")")
	} else {
		kinds := "PID, mount and IPC"
		if os.Geteuid() != 0 {
			kinds = "user, " + kinds
		}
		parts = append(parts, "own "+kinds+" namespaces on the host's kernel and files")
	}
	if h.noCgroup != "" {
		lack := "no cgroup: " + h.noCgroup
		if h.noNamespaces != "" {
			lack += "; a process that left its parents and cleared its environment outlives its machine"
		}
		parts = append(parts, lack)
	}
	return strings.Join(parts, "; ")
}
