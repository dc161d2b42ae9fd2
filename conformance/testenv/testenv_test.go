package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// recorder stands for a test and records how it was ended.
type recorder struct {
	testing.TB
	skipped, failed string
}

func (r *recorder) Helper()                           {}
func (r *recorder) Skipf(format string, args ...any)  { r.skipped = fmt.Sprintf(format, args...) }
func (r *recorder) Fatalf(format string, args ...any) { r.failed = fmt.Sprintf(format, args...) }

func TestAMissingFacilitySkipsUnlessItIsRequired(t *testing.T) {
	missing := errors.New("there is none")
	for _, test := range []struct {
		name        string
		require     string
		missing     error
		wantSkipped string
		wantFailed  string
	}{
		{"missing and not required, it skips with the reason", "", missing, "needs moon: there is none", ""},
		{"missing and required, it fails", "sun,moon", missing, "", "needs moon, which BERTH_REQUIRE demands: there is none"},
		{"missing while another is required, it skips", "moonlight", missing, "needs moon: there is none", ""},
		{"there, the test goes on", "moon", nil, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv(requireVariable, test.require)
			var r recorder
			need(&r, "moon", func() error { return test.missing })
			if r.skipped != test.wantSkipped || r.failed != test.wantFailed {
				t.Errorf("skipped %q, failed %q; want %q, %q", r.skipped, r.failed, test.wantSkipped, test.wantFailed)
			}
		})
	}
}

func TestALongSuiteRunsOnlyWhenAskedFor(t *testing.T) {
	t.Setenv(runVariable, "robust")
	var asked, other recorder
	Asked(&asked, "robust")
	Asked(&other, "crash")
	if asked.skipped != "" {
		t.Errorf("the suite that was asked for is skipped: %s", asked.skipped)
	}
	if want := "not asked for: `make crash` runs it"; other.skipped != want {
		t.Errorf("the other one is skipped with %q, want %q", other.skipped, want)
	}
}

func TestTheProbesOfThisHostLeaveNothingBehind(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	for _, probe := range []struct {
		name  string
		probe func() error
	}{
		{"cgroup2", probeCgroup2},
		{"namespaces", probeNamespaces},
		{"docker", probeDocker},
		{"grpctools", func() error { _, err := probeGRPCTools(); return err }},
	} {
		t.Run(probe.name, func(t *testing.T) {
			t.Logf("this host: %v", probe.probe())
			left, err := os.ReadDir(os.TempDir())
			if err != nil || len(left) > 0 {
				t.Errorf("left %v, %v", left, err)
			}
			mounts, err := os.ReadFile("/proc/self/mounts")
			if err != nil || strings.Contains(string(mounts), os.TempDir()) {
				t.Errorf("a mount is left, %v", err)
			}
		})
	}
}

func TestAnEngineThatIsNotInstalledIsSaidToBeMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if err := probeDocker(); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("without a docker command the probe said %v", err)
	}
}

func TestAPythonWithoutGRPCToolsIsPassedOver(t *testing.T) {
	without, with := t.TempDir(), t.TempDir()
	t.Setenv("PATH", without)
	if _, err := probeGRPCTools(); err == nil || !strings.Contains(err.Error(), "no python3 is installed") {
		t.Errorf("without a python3 the probe said %v", err)
	}
	script(t, without, "echo 'Traceback'; echo 'ModuleNotFoundError: grpc_tools'; exit 1")
	if _, err := probeGRPCTools(); err == nil || !strings.HasSuffix(err.Error(), "ModuleNotFoundError: grpc_tools") {
		t.Errorf("with a python3 that has no grpc_tools the probe said %v", err)
	}
	want := script(t, with, "exit 0")
	t.Setenv("PATH", without+string(os.PathListSeparator)+with)
	if python, err := probeGRPCTools(); err != nil || python != want {
		t.Errorf("the probe found %q, %v; want %q", python, err, want)
	}
}

// script makes a python3 in dir that does this, and returns its path.
func script(t *testing.T, dir, does string) string {
	t.Helper()
	path := filepath.Join(dir, "python3")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+does+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}
