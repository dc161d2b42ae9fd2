package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

// machinery is what a provider is made with.
type machinery struct {
	state    string
	brokerID string
	guest    func(arch string) (string, error)
	log      *slog.Logger
}

// provider is how one kind is made.
type provider struct {
	name string
	make func(machinery) (providers.Provider, error)
}

// known lists the providers of this build; the only place that names them.
var known = []provider{
	{"local", func(m machinery) (providers.Provider, error) {
		return local.New(local.Options{
			Dir: filepath.Join(m.state, "local"), BrokerID: m.brokerID, GuestPath: m.guest, Log: m.log,
		})
	}},
}

func providerNames() []string {
	names := make([]string, 0, len(known))
	for _, p := range known {
		names = append(names, p.name)
	}
	return names
}

// startProviders makes the named providers. One that can't be made is reported and unhealthy; it does
// not stop the daemon.
func startProviders(names []string, m machinery) []lifecycle.Named {
	var started []lifecycle.Named
	for _, name := range names {
		for _, p := range known {
			if p.name != name {
				continue
			}
			made, err := p.make(m)
			if err != nil {
				m.log.Error("provider cannot be started", "provider", name, "error", err)
				made = unhealthy{name: name, cause: err}
			}
			started = append(started, lifecycle.Named{Name: name, Provider: made})
		}
	}
	return started
}

func closeProviders(started []lifecycle.Named) error {
	var errs []error
	for _, named := range started {
		if closer, ok := named.Provider.(io.Closer); ok {
			errs = append(errs, closer.Close())
		}
	}
	return errors.Join(errs...)
}

// unhealthy stands for a provider that could not be started.
type unhealthy struct {
	name  string
	cause error
}

func (u unhealthy) unavailable() error { return &providers.UnavailableError{Cause: u.cause} }

func (u unhealthy) Info(context.Context) (providers.Info, error) {
	return providers.Info{Name: u.name, Message: u.cause.Error()}, nil
}

func (u unhealthy) Create(context.Context, providers.MachineSpec) (providers.Handle, error) {
	return providers.Handle{}, u.unavailable()
}

func (u unhealthy) Inspect(context.Context, string) (providers.Machine, error) {
	return providers.Machine{}, u.unavailable()
}

func (u unhealthy) List(context.Context) ([]providers.Machine, error) { return nil, u.unavailable() }

func (u unhealthy) Destroy(context.Context, providers.Machine) error { return u.unavailable() }

func (u unhealthy) Dialer(context.Context, providers.Machine) (providers.Dialer, error) {
	return nil, u.unavailable()
}

// findGuest looks for the guest program: where it was said to be, or next to this one. One built for
// another architecture than the host's bears it as a suffix, as in berth-guest-arm64.
func findGuest(said, hostArch string) (func(arch string) (string, error), error) {
	base := said
	if base == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("find berthd's own place: %w", err)
		}
		base = filepath.Join(filepath.Dir(self), "berth-guest")
	}
	find := func(arch string) (string, error) {
		for _, path := range []string{base + "-" + arch, base} {
			if path == base && arch != hostArch {
				break
			}
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return filepath.Abs(path)
			}
		}
		return "", fmt.Errorf("no guest program for %s at %s: build it with `make build`, put it next to berthd, or name it with --guest", arch, base)
	}
	_, err := find(hostArch)
	return find, err
}
