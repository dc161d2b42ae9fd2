package local_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"os/exec"

	"github.com/berth-sandbox/berth/conformance/failpoint"
	"github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

func TestTheContract(t *testing.T) {
	for _, mode := range modes {
		t.Run("isolation "+string(mode), func(t *testing.T) {
			provider.Suite(t, func(t *testing.T) *provider.Place { return newYard(t, mode).place() })
		})
	}
}

// place is the yard as the suite has it. Its guest's program can be another one for a while.
func (y yard) place() *provider.Place {
	guest := programs.guest
	return &provider.Place{
		Sockets: y.sockets,
		Open: func(t testing.TB, brokerID string) providers.Provider {
			t.Helper()
			opened, err := local.New(local.Options{
				Dir: y.dir, BrokerID: brokerID, Isolation: y.mode,
				GuestPath: func(string) (string, error) { return guest, nil },
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = opened.Close() }) // it never fails
			return opened
		},
		KillGuest: func(t testing.TB, id string) {
			t.Helper()
			for _, pid := range y.guests(t, id) {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
					t.Fatal(err)
				}
			}
		},
		Traces:     y.traces,
		Failpoints: programs.failpoints,
		Crash:      y.crash,
		Obstacles: []provider.Obstacle{
			{Name: "no guest program is there", Put: func(testing.TB, providers.MachineSpec) func() {
				guest = filepath.Join(y.dir, "no such program")
				return func() { guest = programs.guest }
			}},
			{Name: "the guest program is none that the kernel can execute", Put: func(t testing.TB, _ providers.MachineSpec) func() {
				guest = filepath.Join(t.TempDir(), "berth-guest")
				if err := os.WriteFile(guest, []byte("not a program"), 0o700); err != nil {
					t.Fatal(err)
				}
				return func() { guest = programs.guest }
			}},
			{Name: "the socket directory cannot be made", Put: func(t testing.TB, spec providers.MachineSpec) func() {
				return inTheWay(t, filepath.Dir(spec.ListenDir), false)
			}},
			y.inDirectory("the record cannot be written", "machine.json.next"),
			y.inDirectory("the boot configuration cannot be written", "boot.json.next"),
			y.inDirectory("the spool cannot be made", "spool"),
			y.inDirectory("the log cannot be opened", "guest.log"),
		},
	}
}

// inDirectory is an obstacle by something in a machine's directory, and nothing where that is not there yet.
func (y yard) inDirectory(name, file string) provider.Obstacle {
	return provider.Obstacle{Name: name, Put: func(t testing.TB, spec providers.MachineSpec) func() {
		if _, err := os.Stat(filepath.Join(y.dir, spec.MachineID)); errors.Is(err, os.ErrNotExist) {
			return func() {}
		}
		return inTheWay(t, filepath.Join(y.dir, spec.MachineID, file), file != "spool")
	}}
}

// inTheWay puts an empty directory or file at a path for as long as it is not removed.
func inTheWay(t testing.TB, path string, dir bool) (remove func()) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	check(os.Rename(path, path+".away"))
	if dir {
		check(os.Mkdir(path, 0o700))
	} else {
		check(os.WriteFile(path, nil, 0o600))
	}
	return func() {
		check(os.Remove(path))
		check(os.Rename(path+".away", path))
	}
}

// crash runs a broker that ends itself at a failpoint as kill -9 would, if it comes there.
func (y yard) crash(t testing.TB, call provider.Call, spec providers.MachineSpec, at string) bool {
	t.Helper()
	cmd := y.broker(t, programs.crasher, string(call), spec.MachineID, failpoint.ArmVariable+"="+at, "ONCE=1", "GENERATION="+strconv.FormatUint(spec.Generation, 10))
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == failpoint.ExitCode {
		return true
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", call, err, out)
	}
	return false
}
