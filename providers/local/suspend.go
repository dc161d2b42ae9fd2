package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers"
)

// freezeTimeout is how long the processes of a machine may take to stand still. The kernel freezes
// each where it returns to user space, which a process in a long system call does late.
const freezeTimeout = 10 * time.Second

// Suspend freezes every process of a machine, its guest included; their memory stays. One that is
// frozen already is success. Errors: ErrNotFound; ErrRefused on a host without cgroup2.
func (p *Provider) Suspend(ctx context.Context, machine providers.Machine) error {
	return p.freeze(ctx, machine.ID, true)
}

// Resume lets a frozen machine go on; one that runs is success. Errors as of Suspend.
func (p *Provider) Resume(ctx context.Context, machine providers.Machine) error {
	return p.freeze(ctx, machine.ID, false)
}

func (p *Provider) freeze(ctx context.Context, id string, frozen bool) error {
	unlock, err := p.machines.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	m, err := p.find(id)
	if err != nil {
		return err
	}
	if m.foreign(p.broker) {
		return fmt.Errorf("machine %s belongs to another broker: %w", id, providers.ErrNotFound)
	}
	switch state, err := m.state(); {
	case err != nil:
		return err
	case state != providers.MachineRunning && state != providers.MachineSuspended:
		return fmt.Errorf("machine %s is %s, nothing in it runs or is suspended: %w", id, state, providers.ErrRefused)
	case m.record.Cgroup == "":
		return fmt.Errorf("machine %s has no cgroup to freeze it by: %w", id, providers.ErrRefused)
	}
	return m.freeze(ctx, frozen)
}

// freeze freezes or thaws the machine's cgroup and waits until it is so.
func (m *machine) freeze(ctx context.Context, frozen bool) error {
	word := map[bool]string{true: "1", false: "0"}[frozen]
	if err := os.WriteFile(filepath.Join(m.record.Cgroup, "cgroup.freeze"), []byte(word), 0); err != nil {
		return fmt.Errorf("freezing or thawing machine %s: %w", m.id, err)
	}
	err := await(ctx, freezeTimeout, func() (bool, error) {
		now, err := cgroupFrozen(m.record.Cgroup)
		return now == frozen, err
	})
	if err != nil {
		return fmt.Errorf("waiting for machine %s to freeze or thaw: %w", m.id, err)
	}
	return nil
}

// cgroupFrozen reports whether every process of a cgroup stands still; not when there is none.
func cgroupFrozen(path string) (bool, error) {
	content, err := os.ReadFile(filepath.Join(path, "cgroup.events"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return false, nil
	}
	return strings.Contains(string(content), "frozen 1"), err
}
