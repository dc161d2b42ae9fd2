// Package testenv is how a test says what it cannot do without: root, cgroup2, namespaces, a Docker
// engine, gRPC's tools for Python, or that it was asked for. What is missing is measured, never assumed, and said in the words
// that `make test` lists at its end. Where the environment variable BERTH_REQUIRE names a facility, as
// CI's does, its absence fails the test. It never sets anything up for a test, and only test files
// and conformance/fixture may import it.
package testenv

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// requireVariable lists, separated by commas, the facilities whose absence is a failure: root,
	// cgroup2, namespaces, docker, grpctools.
	requireVariable = "BERTH_REQUIRE"
	// runVariable lists, separated by commas, the suites that are too long for `make test` and were
	// asked for by their own target; night is the full size of all tests.
	runVariable = "BERTH_RUN"
	// probeTimeout bounds a probe that asks another process. An engine that takes longer to say its
	// version is no engine to test on.
	probeTimeout = time.Minute
)

// Root is for tests that need user id 0 in this user namespace.
func Root(t testing.TB) {
	t.Helper()
	need(t, "root", func() error {
		if id := os.Geteuid(); id != 0 {
			return fmt.Errorf("this is user %d, not root", id)
		}
		return nil
	})
}

// Cgroup2 is for tests that make cgroups: a cgroup2 hierarchy, mounted or mountable, in which this
// process may make a group. Its controllers may be elsewhere, as on hosts with both hierarchies.
func Cgroup2(t testing.TB) {
	t.Helper()
	need(t, "cgroup2", cgroup2)
}

// Namespaces is for tests that need PID, mount and IPC namespaces: as root, or through a user
// namespace.
func Namespaces(t testing.TB) {
	t.Helper()
	need(t, "namespaces", namespaces)
}

// What this host has is found out once in a process: it does not change, and a busy one may be slow to say.
var (
	cgroup2    = sync.OnceValue(probeCgroup2)
	namespaces = sync.OnceValue(probeNamespaces)
	docker     = sync.OnceValue(probeDocker)
	grpcTools  = sync.OnceValues(probeGRPCTools)
)

// Docker is for tests that need a Docker engine that answers.
func Docker(t testing.TB) {
	t.Helper()
	need(t, "docker", docker)
}

// GRPCTools is for tests that need gRPC's compiler for Python, Debian's python3-grpc-tools. It returns the path
// of the python3 that has it.
func GRPCTools(t testing.TB) (python string) {
	t.Helper()
	python, err := grpcTools()
	need(t, "grpctools", func() error { return err })
	return python
}

// Asked is for suites that run only when their own make target, which bears the suite's name, was
// called.
func Asked(t testing.TB, suite string) {
	t.Helper()
	if !listed(runVariable, suite) {
		t.Skipf("not asked for: `make %s` runs it", suite)
	}
}

// Night reports whether what is slow and rarely fails was asked for, as `make night` does: tests are of
// their full size then, and of one that CI has time for otherwise.
func Night() bool { return listed(runVariable, "night") }

// Size is how large a test is.
func Size(night, otherwise int) int {
	if Night() {
		return night
	}
	return otherwise
}

// need skips the test, or fails it where the facility is required, when probe says what is missing.
func need(t testing.TB, facility string, probe func() error) {
	t.Helper()
	switch err := probe(); {
	case err == nil:
	case listed(requireVariable, facility):
		t.Fatalf("needs %s, which %s demands: %v", facility, requireVariable, err)
	default:
		t.Skipf("needs %s: %v", facility, err)
	}
}

func listed(variable, name string) bool {
	return slices.Contains(strings.Split(os.Getenv(variable), ","), name)
}

func probeCgroup2() error {
	root, err := mountedCgroup2()
	if err != nil {
		return err
	}
	if root == "" {
		unmount, mounted, err := mountCgroup2()
		if err != nil {
			return err
		}
		defer unmount()
		root = mounted
	}
	group, err := os.MkdirTemp(root, "berth-need-")
	if err != nil {
		return fmt.Errorf("making a cgroup: %w", err)
	}
	return os.Remove(group)
}

// mountedCgroup2 returns this process's own group in the first cgroup2 mount, empty without one.
func mountedCgroup2() (string, error) {
	mounts, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", fmt.Errorf("reading the mounts: %w", err)
	}
	defer func() { _ = mounts.Close() }()
	own, err := ownGroup()
	if err != nil {
		return "", err
	}
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > 2 && fields[2] == "cgroup2" {
			return filepath.Join(fields[1], own), nil
		}
	}
	return "", lines.Err()
}

// ownGroup returns this process's path in the cgroup2 hierarchy.
func ownGroup() (string, error) {
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("reading the own cgroup: %w", err)
	}
	for line := range strings.Lines(string(groups)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path), nil
		}
	}
	return "", fmt.Errorf("this kernel offers no cgroup2 hierarchy")
}

// mountCgroup2 mounts the hierarchy on a directory of its own.
func mountCgroup2() (unmount func(), mounted string, err error) {
	dir, err := os.MkdirTemp("", "berth-need-")
	if err != nil {
		return nil, "", fmt.Errorf("making a mount point: %w", err)
	}
	if err := syscall.Mount("none", dir, "cgroup2", 0, ""); err != nil {
		_ = os.Remove(dir)
		return nil, "", fmt.Errorf("no cgroup2 is mounted, and mounting one: %w", err)
	}
	return func() {
		_ = syscall.Unmount(dir, syscall.MNT_DETACH)
		_ = os.Remove(dir)
	}, dir, nil
}

func probeNamespaces() error {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	command := exec.CommandContext(ctx, "true")
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC,
	}
	if uid := os.Geteuid(); uid != 0 {
		command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	if err := command.Run(); err != nil {
		return fmt.Errorf("starting a process in PID, mount and IPC namespaces of its own: %w", err)
	}
	return nil
}

func probeDocker() error {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	output, err := exec.CommandContext(ctx, "docker", "version", "--format", "{{.Server.Version}}").CombinedOutput()
	if err != nil {
		return fmt.Errorf("no engine answers: %w: %s", err, firstLine(output))
	}
	return nil
}

// probeGRPCTools asks every python3 in the PATH: a distribution's package is of no use to one that was built by
// hand, which often comes first.
func probeGRPCTools() (python string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	missing := errors.New("no python3 is installed")
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		python, err := exec.LookPath(filepath.Join(dir, "python3"))
		if err != nil {
			continue
		}
		output, err := exec.CommandContext(ctx, python, "-c", "import grpc_tools.protoc").CombinedOutput()
		if err == nil {
			return python, nil
		}
		missing = fmt.Errorf("no python3 has grpc_tools (install python3-grpc-tools): %w: %s", err, lastLine(output))
	}
	return "", missing
}

func lastLine(text []byte) string {
	trimmed := strings.TrimSpace(string(text))
	return trimmed[strings.LastIndexByte(trimmed, '\n')+1:]
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	return line
}
