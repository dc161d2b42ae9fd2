package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
	"github.com/berth-sandbox/berth/providers/local"
)

// machinery is what a provider is made with.
type machinery struct {
	state    string
	brokerID string
	guest    func(arch string) (string, error)
	log      *slog.Logger
	// isolation is what local machines get at most.
	isolation string
	docker    dockerConfig
}

// provider is how one kind is made.
type provider struct {
	name string
	make func(machinery) (providers.Provider, error)
}

// known lists the providers of this build.
var known = []provider{
	{"local", func(m machinery) (providers.Provider, error) {
		return local.New(local.Options{
			Dir: filepath.Join(m.state, "local"), BrokerID: m.brokerID, GuestPath: m.guest, Log: m.log,
			Isolation: local.IsolationMode(m.isolation),
		})
	}},
	{"docker", func(m machinery) (providers.Provider, error) {
		if err := os.MkdirAll(filepath.Join(m.state, dockerMark), 0o700); err != nil {
			return nil, err
		}
		return docker.New(docker.Options{
			BrokerID: m.brokerID, GuestPath: m.guest, Log: m.log,
			Host: m.docker.Host, Image: m.docker.Image, Bridge: m.docker.Bridge, Network: m.docker.Network,
			Defaults: providers.Resources{MemoryBytes: uint64(m.docker.Memory), PIDs: m.docker.PIDs},
		})
	}},
}

const (
	// fakeProvider is for tests, and only in programs that are built with the tag faults.
	fakeProvider = "fake"
	// dockerMark is the directory in the state that says that this broker has had docker machines.
	dockerMark = "docker"
	// engineTimeout is how long an engine may take to answer for docker to be a default.
	engineTimeout = time.Second
)

// defaultProviders are those that are started when none is named: local, and docker where an engine
// answers. A broker that has had docker once goes on having it, also while its engine is down: it may
// have machines there.
func defaultProviders(ctx context.Context, c config) []string {
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	_, err := os.Stat(filepath.Join(c.State, dockerMark))
	if err == nil || docker.Answers(ctx, c.Docker.Host) == nil {
		return []string{"local", "docker"}
	}
	return []string{"local"}
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
func startProviders(names []string, m machinery) []machines.Named {
	var started []machines.Named
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
			started = append(started, machines.Named{Name: name, Provider: made})
		}
	}
	return started
}

func closeProviders(started []machines.Named) error {
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
