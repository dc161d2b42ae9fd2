package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/berth-sandbox/berth/providers"
)

// frozenFile marks a machine that is suspended; it goes with a boot.
const frozenFile = "frozen"

// Suspend stops every process of a machine by a signal, its guest included; their memory stays. One that
// is suspended already is success. Errors: ErrNotFound; ErrRefused where its guest has ended; and those
// of the script. With the fault Kill a machine is suspended by stopping it.
func (p *Provider) Suspend(ctx context.Context, asked providers.Machine) error {
	return p.inject(ctx, CallSuspend, asked.ID, func(ctx context.Context) error {
		return p.ofRunning(asked.ID, func(m *machine) error { return m.freeze(ctx) })
	})
}

// Resume lets a suspended machine go on; one that runs is success. Errors as of Suspend.
func (p *Provider) Resume(ctx context.Context, asked providers.Machine) error {
	return p.inject(ctx, CallResume, asked.ID, func(context.Context) error {
		return p.ofRunning(asked.ID, (*machine).thaw)
	})
}

// ofRunning runs fn with a machine of this broker whose guest lives, suspended or not.
func (p *Provider) ofRunning(id string, fn func(*machine) error) error {
	defer p.turn(id)()
	m, err := p.harness.machine(id)
	if err != nil {
		return err
	}
	if m.Broker != p.broker {
		return fmt.Errorf("machine %s is another broker's: %w", id, providers.ErrNotFound)
	}
	running, err := m.running()
	if err != nil {
		return err
	}
	if !running {
		return fmt.Errorf("machine %s: its guest has ended: %w", id, providers.ErrRefused)
	}
	return fn(m)
}

// freeze stops the guest first, so that it begins nothing more, and then what it has begun. The mark
// comes last: after a crash in between the machine is said to run, and is frozen again.
func (m *machine) freeze(ctx context.Context) error {
	if err := m.signalGuest(syscall.SIGSTOP); err != nil {
		return err
	}
	err := await(ctx, killTimeout, "the processes of machine "+m.ID+" to stand still", func() (bool, error) {
		members, err := m.members()
		moving := slices.DeleteFunc(members, standsStill)
		for _, pid := range moving {
			_ = syscall.Kill(pid, syscall.SIGSTOP) // gone already is as good
		}
		return len(moving) == 0, err
	})
	if err != nil {
		return err
	}
	return writeWhole(m.path(frozenFile), nil)
}

// thaw lets what the guest has begun go on, and the guest last.
func (m *machine) thaw() error {
	if err := os.Remove(m.path(frozenFile)); err != nil && !isAbsent(err) {
		return err
	}
	members, err := m.members()
	for _, pid := range members {
		if killErr := syscall.Kill(pid, syscall.SIGCONT); killErr != nil && !errors.Is(killErr, syscall.ESRCH) {
			err = errors.Join(err, fmt.Errorf("letting process %d of machine %s go on: %w", pid, m.ID, killErr))
		}
	}
	return errors.Join(err, m.signalGuest(syscall.SIGCONT))
}

// frozen reports whether a machine was suspended and not resumed since.
func (m *machine) frozen() bool {
	_, err := os.Stat(m.path(frozenFile))
	return err == nil
}

// standsStill reports whether a process is stopped by a signal, or has ended and waits to be reaped.
func standsStill(pid int) bool {
	content, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return true
	}
	state := strings.TrimSpace(string(content[strings.LastIndexByte(string(content), ')')+1:]))
	return strings.HasPrefix(state, "T") || strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")
}
