package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// defaultPath is PATH in a machine, that of a login on most systems.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Create makes a machine's directory with a record of what is meant, starts the guest, and records
// its process. A crash between any two of these leaves what a later Create completes: a guest that
// was started holds its lock and is taken over, whether it was recorded or not.
//
// Errors: ErrRefused for a spec that asks for what local machines lack, for a missing guest program
// and for a machine that is to be destroyed; ErrCapacity when disk, memory or processes ran out;
// ErrAmbiguous when the lock is held and no guest can be found.
func (p *Provider) Create(ctx context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	if err := p.check(spec); err != nil {
		return providers.Handle{}, err
	}
	unlock, err := p.machines.lock(ctx, spec.MachineID)
	if err != nil {
		return providers.Handle{}, err
	}
	defer unlock()
	m, err := p.find(spec.MachineID)
	if errors.Is(err, providers.ErrNotFound) || err == nil && m.place == placeStaged {
		return p.createNew(ctx, spec)
	}
	if err != nil {
		return providers.Handle{}, err
	}
	if m.foreign(p.broker) {
		return providers.Handle{}, fmt.Errorf("machine %s belongs to broker %s: %w", m.id, m.record.BrokerID, providers.ErrRefused)
	}
	if m.terminating || m.place == placeGone {
		return providers.Handle{}, fmt.Errorf("machine %s is to be destroyed: %w", m.id, providers.ErrRefused)
	}
	return p.createAgain(ctx, m, spec)
}

// check refuses what local machines cannot be.
func (p *Provider) check(spec providers.MachineSpec) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("machine %s: %w: %w", spec.MachineID, fmt.Errorf(format, args...), providers.ErrRefused)
	}
	switch {
	case !name.MatchString(spec.MachineID) || !strings.HasPrefix(spec.MachineID, "m_"):
		return refuse("its id must be m_ and letters, digits, _ or -")
	case spec.BrokerID != p.broker:
		return refuse("it is for broker %q and this provider serves %q", spec.BrokerID, p.broker)
	case len(spec.Token) != tokenBytes:
		return refuse("its token has %d bytes, want %d", len(spec.Token), tokenBytes)
	case !filepath.IsAbs(spec.ListenDir):
		return refuse("its socket directory %q must be an absolute path", spec.ListenDir)
	case spec.Image != "":
		return refuse("local machines have no image")
	case spec.FromSnapshot != "":
		return refuse("local machines are made from no snapshot")
	case spec.Workspace != "":
		return refuse("the workspace of a local machine cannot be chosen")
	case spec.Resources != providers.Resources{}:
		return refuse("local machines have no limits")
	case spec.Egress.Mode != providers.EgressOpen:
		return refuse("the egress of a local machine cannot be limited")
	case len(spec.Options) > 0:
		return refuse("local machines have no options")
	}
	if _, err := reverse.SocketPath(spec.ListenDir); err != nil {
		return refuse("%w", err)
	}
	return nil
}

// createNew makes and boots a machine. When that fails before anything runs, nothing of it is left,
// so that the error is definite.
func (p *Provider) createNew(ctx context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	program, err := p.guestProgram()
	if err != nil {
		return providers.Handle{}, err
	}
	m := &machine{id: spec.MachineID, dir: filepath.Join(p.dir, spec.MachineID), place: placeMade, record: p.intent(spec)}
	m.record.Created = time.Now().UTC()
	if err := freshDir(spec.ListenDir); err != nil {
		return providers.Handle{}, fmt.Errorf("machine %s: %w", m.id, classify(err))
	}
	if err := p.makeDir(m); err != nil {
		return providers.Handle{}, p.undo(ctx, m, fmt.Errorf("making machine %s: %w", m.id, err))
	}
	lock, err := takeLock(m.dir)
	if err == nil && lock == nil {
		err = fmt.Errorf("the lock in the new directory %s is held: %w", m.dir, providers.ErrAmbiguous)
		return providers.Handle{}, err
	}
	if err == nil {
		defer func() { _ = lock.Close() }() // the guest's own descriptor keeps it
		err = p.boot(ctx, m, spec, program, lock)
	}
	if errors.Is(err, errNotStarted) {
		return providers.Handle{}, p.undo(ctx, m, err)
	}
	if err != nil {
		return providers.Handle{}, err
	}
	return m.handle(), nil
}

// undo removes a machine in which nothing ever ran and gives the error its kind. When it can't be
// removed it is left to be found half-made, and the error is not definite.
func (p *Provider) undo(ctx context.Context, m *machine, cause error) error {
	if err := p.remove(context.WithoutCancel(ctx), m); err != nil {
		return fmt.Errorf("%w (and undoing it: %w)", cause, err)
	}
	return classify(cause)
}

// createAgain completes, boots again, or finds running what an earlier Create made.
func (p *Provider) createAgain(ctx context.Context, m *machine, spec providers.MachineSpec) (providers.Handle, error) {
	lock, err := p.reattachOrLock(ctx, m)
	if err != nil {
		return providers.Handle{}, err
	}
	if lock == nil {
		if m.frozen() {
			err = m.freeze(ctx, false)
		}
		return m.handle(), err
	}
	defer func() { _ = lock.Close() }() // the guest's own descriptor keeps it
	program, err := p.guestProgram()
	if err != nil {
		return providers.Handle{}, err
	}
	// A guest that died may have left its jobs behind; a machine that boots has none.
	lockIsOurs := func() (bool, error) { return false, nil }
	if err := p.killLeftovers(ctx, m, lockIsOurs); err != nil {
		return providers.Handle{}, fmt.Errorf("booting machine %s again: %w", m.id, err)
	}
	if m.record.ListenDir != spec.ListenDir {
		if err := freshDir(spec.ListenDir); err != nil {
			return providers.Handle{}, fmt.Errorf("machine %s: %w", m.id, classify(err))
		}
		if err := removeTree(m.record.ListenDir); err != nil {
			return providers.Handle{}, fmt.Errorf("moving the sockets of machine %s: %w", m.id, err)
		}
	}
	// The process of the last boot stays on record until there is one of this boot: it says that the machine
	// has run, so that it is stopped, and not half-made, when this boot fails or the broker dies in it.
	created, last := m.record.Created, m.record.Guest
	m.record = p.intent(spec)
	m.record.Created, m.record.Guest = created, last
	if err := m.write(); err != nil {
		return providers.Handle{}, classify(err)
	}
	err = p.boot(ctx, m, spec, program, lock)
	if errors.Is(err, errNotStarted) {
		err = classify(err)
	}
	if err != nil {
		return providers.Handle{}, err
	}
	return m.handle(), nil
}

// reattachOrLock returns nil when the machine's guest lives, and is recorded now; else the lock.
func (p *Provider) reattachOrLock(ctx context.Context, m *machine) (*os.File, error) {
	for {
		err := p.reattach(ctx, m)
		if err == nil || !errors.Is(err, errNoGuest) {
			return nil, err
		}
		lock, err := takeLock(m.dir)
		if lock != nil || err != nil {
			return lock, err
		}
		// Taken since it was looked at, by a guest between fork and exec: look again.
	}
}

// reattach makes sure that a living guest is recorded. errNoGuest when there is none.
func (p *Provider) reattach(ctx context.Context, m *machine) error {
	if m.record.Guest.alive() {
		return nil
	}
	err := await(ctx, reattachTimeout, func() (bool, error) {
		held, err := lockHeld(m.dir)
		if err != nil {
			return false, err
		}
		if !held {
			return false, errNoGuest
		}
		guests, err := guestsOf(m.path(bootFile))
		if err != nil || len(guests) == 0 {
			return false, err
		}
		m.record.Guest = guests[0]
		return true, m.write()
	})
	if errors.Is(err, errTimeout) {
		return fmt.Errorf("machine %s: its lock %s is held and no guest of it can be found: %w",
			m.id, m.path(lockFile), providers.ErrAmbiguous)
	}
	return err
}

// intent is the record of a machine before it is booted as the spec says.
func (p *Provider) intent(spec providers.MachineSpec) record {
	here := p.host()
	r := record{
		Version:    recordVersion,
		BrokerID:   spec.BrokerID,
		MachineID:  spec.MachineID,
		ListenDir:  filepath.Clean(spec.ListenDir),
		Generation: spec.Generation,
		Isolation:  here.isolation(),
	}
	if here.noCgroup == "" {
		r.Cgroup = filepath.Join(here.cgroupBase, spec.MachineID)
	}
	return r
}

// freshDir refuses a socket directory with something in it: it will be removed with the machine.
func freshDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking at the socket directory: %w", err)
	}
	for _, entry := range entries {
		if entry.Name() != reverse.SocketName {
			return fmt.Errorf("the socket directory %s is in use, it holds %s: give each machine its own: %w",
				dir, entry.Name(), providers.ErrRefused)
		}
	}
	return nil
}

// makeDir makes the machine's directory with its record in it, at once.
func (p *Provider) makeDir(m *machine) error {
	// gofail: var localBeforeDir struct{}
	// os.Exit(137)
	staged := &machine{id: m.id, dir: filepath.Join(p.dir, stagedPrefix+m.id), record: m.record}
	if err := os.RemoveAll(staged.dir); err != nil {
		return err
	}
	if err := os.Mkdir(staged.dir, 0o700); err != nil {
		return err
	}
	if err := staged.write(); err != nil {
		return err
	}
	if err := os.Rename(staged.dir, m.dir); err != nil {
		return err
	}
	if err := syncDir(p.dir); err != nil {
		return err
	}
	// gofail: var localAfterDir struct{}
	// os.Exit(137)
	return nil
}

// errNotStarted says that a boot failed before there was a process.
var errNotStarted = errors.New("the guest was not started")

// boot starts the guest of a machine whose record says what is meant, and records its process.
func (p *Provider) boot(ctx context.Context, m *machine, spec providers.MachineSpec, program string, lock *os.File) error {
	child, err := p.start(ctx, m, spec, program, lock)
	if err != nil {
		return fmt.Errorf("booting machine %s: %w: %w", m.id, err, errNotStarted)
	}
	// gofail: var localAfterSpawn struct{}
	// os.Exit(137)
	guest, err := identify(child.Pid) // its pid is its own until the reaper has it
	p.reaper.watch(m.id, child)
	if err != nil {
		return fmt.Errorf("booting machine %s: %w", m.id, err)
	}
	m.record.Guest = guest
	if err := m.write(); err != nil {
		return err
	}
	// gofail: var localAfterRecord struct{}
	// os.Exit(137)
	return nil
}

// start puts everything in place that the guest needs and starts it.
func (p *Provider) start(ctx context.Context, m *machine, spec providers.MachineSpec, program string, lock *os.File) (*os.Process, error) {
	for _, dir := range []string{m.path(spoolDir), m.record.ListenDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	// What a job has put in the workspace's place is the commands' business and keeps no machine from booting.
	if err := os.Mkdir(m.path(workspaceDir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	var cgroup *os.File
	if m.record.Cgroup != "" {
		var err error
		if cgroup, err = p.makeCgroup(m.record.Cgroup); err != nil {
			return nil, fmt.Errorf("making its cgroup: %w", err)
		}
		defer func() { _ = cgroup.Close() }() // nothing was written to it
	}
	config := m.bootConfig(spec)
	content, err := protojson.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("writing its BootConfig: %w", err)
	}
	if err := writeFile(m.path(bootFile), content); err != nil {
		return nil, fmt.Errorf("writing its BootConfig: %w", err)
	}
	output, err := openLog(m.path(logFile))
	if err != nil {
		return nil, err
	}
	defer func() { _ = output.Close() }() // the guest writes to it
	input, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer func() { _ = input.Close() }() // nothing is read from it
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	// gofail: var localBeforeSpawn struct{}
	// os.Exit(137)
	arguments := []string{"berth-guest", "init", "--config", m.path(bootFile), "--lock-fd", strconv.Itoa(lockFD)}
	return os.StartProcess(program, arguments, &os.ProcAttr{
		Dir:   m.dir,
		Env:   environment(config.GetEnv()),
		Files: []*os.File{input, output, output, lock},
		Sys:   attributes(m.record.Isolation == isolationNamespace, cgroup),
	})
}

func (m *machine) bootConfig(spec providers.MachineSpec) *guestv1.BootConfig {
	return &guestv1.BootConfig{
		MachineId:  m.id,
		Token:      spec.Token,
		DialSocket: filepath.Join(m.record.ListenDir, reverse.SocketName),
		SpoolDir:   m.path(spoolDir),
		Workspace:  m.path(workspaceDir),
		CgroupDir:  m.record.Cgroup,
		MountProc:  m.record.Isolation == isolationNamespace,
		Generation: spec.Generation,
		Env: map[string]string{
			"PATH":          defaultPath,
			"LANG":          "C.UTF-8",
			machineVariable: m.id,
		},
	}
}

// environment is the guest's own: the machine's and nothing of the broker's.
func environment(variables map[string]string) []string {
	var lines []string
	for key, value := range variables {
		lines = append(lines, key+"="+value)
	}
	return lines
}

func openLog(path string) (*os.File, error) {
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if info, err := os.Stat(path); err == nil && info.Size() > maxGuestLog {
		flags |= os.O_TRUNC
	}
	return os.OpenFile(path, flags, 0o600)
}
