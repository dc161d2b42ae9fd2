package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/berth-sandbox/berth/providers"
)

// Destroy kills everything in a machine and removes all of it: processes, cgroup, sockets, files,
// the directory last. From its first step on the machine can't be booted again. What it does can be
// interrupted anywhere and called again.
//
// Errors: ErrRefused for another broker's machine; otherwise words that name what does not die or
// can't be removed.
func (p *Provider) Destroy(ctx context.Context, machine providers.Machine) error {
	unlock, err := p.machines.lock(ctx, machine.ID)
	if err != nil {
		return err
	}
	defer unlock()
	m, err := p.find(machine.ID)
	if errors.Is(err, providers.ErrNotFound) {
		return p.removeRemnant(ctx, machine)
	}
	if err != nil {
		return err
	}
	if m.foreign(p.broker) {
		return fmt.Errorf("machine %s belongs to broker %s: %w", m.id, m.record.BrokerID, providers.ErrRefused)
	}
	if m.place == placeMade {
		p.markTerminating(m)
		if err := p.kill(ctx, m); err != nil {
			return fmt.Errorf("destroying machine %s: %w", m.id, err)
		}
	}
	if err := p.remove(ctx, m); err != nil {
		return fmt.Errorf("destroying machine %s: %w", m.id, err)
	}
	return nil
}

// hasRemnant reports whether something of a machine is left that has no directory any more: somebody
// removed that behind our back, while its processes ran.
func (p *Provider) hasRemnant(id string) bool {
	if !name.MatchString(id) {
		return false
	}
	if here := p.host(); here.noCgroup == "" {
		if _, err := os.Lstat(filepath.Join(here.cgroupBase, id)); err == nil {
			return true
		}
	}
	members, err := membersOf(id)
	return err != nil || len(members) > 0
}

// removeRemnant removes what is left of a machine that has no directory: its cgroup with all
// processes, and its sockets, where the broker says they are.
func (p *Provider) removeRemnant(ctx context.Context, found providers.Machine) error {
	if p.hasRemnant(found.ID) {
		m := &machine{id: found.ID, dir: filepath.Join(p.dir, gonePrefix+found.ID), place: placeGone}
		if here := p.host(); here.noCgroup == "" {
			m.record.Cgroup = filepath.Join(here.cgroupBase, found.ID)
		}
		m.record.Isolation = isolationNone
		if err := p.killLeftovers(ctx, m, func() (bool, error) { return false, nil }); err != nil {
			return err
		}
	}
	// Only a directory that bears the machine's name is the machine's.
	if filepath.Base(found.ListenDir) == found.ID {
		return removeTree(found.ListenDir)
	}
	return nil
}

// markTerminating marks the machine as one that is never booted again. A disk so full that it takes no empty
// file must not keep a machine alive, so a failure is only told.
func (p *Provider) markTerminating(m *machine) {
	file, err := os.OpenFile(m.path(terminatingFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err == nil {
		err = errors.Join(file.Close(), syncDir(m.dir))
	}
	if err != nil {
		p.log.Warn("a machine that is being destroyed could not be marked so", "machine", m.id, "error", err)
	}
}

// kill leaves no process of the machine.
func (p *Provider) kill(ctx context.Context, m *machine) error {
	// gofail: var localBeforeKill struct{}
	// os.Exit(137)
	if err := p.stopPlainGuest(ctx, m); err != nil {
		return err
	}
	if err := p.killLeftovers(ctx, m, func() (bool, error) { return lockHeld(m.dir) }); err != nil {
		return err
	}
	// gofail: var localAfterKill struct{}
	// os.Exit(137)
	return nil
}

// stopPlainGuest asks a guest to end that neither a cgroup nor a PID namespace holds together with
// what it started, because it alone knows what that is. Whether it does is looked at later.
func (p *Provider) stopPlainGuest(ctx context.Context, m *machine) error {
	if m.record.Isolation == isolationNamespace || m.record.Cgroup != "" {
		return nil
	}
	guests, err := m.guests()
	if err != nil {
		return err
	}
	for _, guest := range guests {
		if err := guest.signal(syscall.SIGTERM); err != nil {
			return err
		}
	}
	err = await(ctx, termTimeout, func() (bool, error) {
		for _, guest := range guests {
			if guest.alive() {
				return false, nil
			}
		}
		return true, nil
	})
	if errors.Is(err, errTimeout) {
		return nil
	}
	return err
}

// killLeftovers kills, again and again, whatever of the machine can be found, until the lock is not
// held and nothing is found. A guest between fork and exec shows in the lock alone.
func (p *Provider) killLeftovers(ctx context.Context, m *machine, held func() (bool, error)) error {
	waiting := "its processes"
	err := await(ctx, killTimeout, func() (bool, error) {
		locked, err := held() // first: what was found afterwards held no lock when it was free
		if err != nil {
			return false, err
		}
		left, err := p.killOnce(m)
		if left == "" && locked {
			left = "the holder of the lock"
		}
		waiting = left
		return left == "", err
	})
	if errors.Is(err, errTimeout) {
		return fmt.Errorf("%s of machine %s were killed and do not end: %w", waiting, m.id, err)
	}
	if err != nil {
		return fmt.Errorf("killing the processes of machine %s: %w", m.id, err)
	}
	if m.record.Cgroup == "" {
		return nil
	}
	// A cgroup in which was killed kills newcomers on some kernels: it is never used again.
	err = await(ctx, cgroupTimeout, func() (bool, error) {
		err := p.removeCgroup(m.record.Cgroup)
		if errors.Is(err, syscall.EBUSY) {
			return false, nil
		}
		return true, err
	})
	if err != nil {
		return fmt.Errorf("removing the cgroup %s: %w", m.record.Cgroup, err)
	}
	return nil
}

// killOnce kills what it finds and says in words what it found, nothing when all is gone.
func (p *Provider) killOnce(m *machine) (left string, err error) {
	if m.record.Cgroup != "" {
		empty, err := cgroupEmpty(m.record.Cgroup)
		if err != nil {
			return "", err
		}
		if !empty {
			left = "the processes in " + m.record.Cgroup
			if err := killCgroup(m.record.Cgroup); err != nil {
				return "", err
			}
		}
	}
	guests, err := m.guests()
	if err != nil {
		return "", err
	}
	// The first process of a PID namespace takes all the others with it, and ends after them.
	if m.record.Isolation != isolationNamespace {
		members, err := membersOf(m.id)
		if err != nil {
			return "", err
		}
		guests = append(guests, members...)
	}
	for _, guest := range guests {
		if err := guest.signal(syscall.SIGKILL); err != nil {
			return "", err
		}
		left = fmt.Sprintf("process %d", guest.PID)
	}
	if left == "" && m.record.Guest != nil && p.reaper.holds(m.record.Guest.PID) {
		left = fmt.Sprintf("process %d", m.record.Guest.PID)
	}
	return left, nil
}

// guests returns the machine's living guest: the recorded one, else what bears its command line,
// which a crash kept from being recorded. It is remembered, because a process that is ending has
// no command line any more.
func (m *machine) guests() ([]*process, error) {
	if m.record.Guest.alive() {
		return []*process{m.record.Guest}, nil
	}
	found, err := guestsOf(m.path(bootFile))
	if len(found) > 0 {
		m.record.Guest = found[0]
	}
	return found, err
}

// remove removes a machine in which nothing runs: first what lies elsewhere, then, once its name has
// made way for one that says so, its directory.
func (p *Provider) remove(ctx context.Context, m *machine) error {
	// gofail: var localBeforeRemove struct{}
	// os.Exit(137)
	if m.record.Cgroup != "" {
		if err := p.removeCgroup(m.record.Cgroup); err != nil {
			return fmt.Errorf("removing the cgroup %s: %w", m.record.Cgroup, err)
		}
	}
	if m.record.ListenDir != "" {
		if err := removeTree(m.record.ListenDir); err != nil {
			return err
		}
	}
	if err := refuseMounts(m.dir); err != nil {
		return err
	}
	gone := filepath.Join(p.dir, gonePrefix+m.id)
	if m.place != placeGone {
		if err := os.Rename(m.dir, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := syncDir(p.dir); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := removeTree(gone); err != nil {
		return err
	}
	if err := removeTree(filepath.Join(p.dir, stagedPrefix+m.id)); err != nil {
		return err
	}
	if err := syncDir(p.dir); err != nil {
		return err
	}
	// gofail: var localAfterRemove struct{}
	// os.Exit(137)
	return nil
}

// refuseMounts keeps a removal from reaching through a mount into what lies elsewhere. Mounts made
// in a machine with namespaces never show up here.
func refuseMounts(dir string) error {
	real, err := filepath.EvalSymlinks(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	points, err := mountsBelow(real)
	if err != nil {
		return err
	}
	if len(points) > 0 {
		return fmt.Errorf("something is mounted at %s: unmount it first", strings.Join(points, ", "))
	}
	return nil
}

// removeTree removes a directory with all that is in it, directories that their owner may not enter
// included. Absent is success.
func removeTree(dir string) error {
	if err := refuseMounts(dir); err != nil {
		return err
	}
	err := os.RemoveAll(dir)
	if !errors.Is(err, fs.ErrPermission) {
		return err
	}
	openErr := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if entry == nil || !entry.IsDir() {
			return nil
		}
		if err == nil { // before it is read
			return os.Chmod(path, 0o700) //nolint:gosec // a directory must be entered to be emptied
		}
		return nil
	})
	if err = os.RemoveAll(dir); errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: it may be immutable (chattr -i), or another user's", errors.Join(err, openErr))
	}
	return err
}
