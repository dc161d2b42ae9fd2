package api

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"
)

// killMachines ends the machines as a host's failure does: their guests are killed, and with them all
// that ran there. The disks stay.
func (w *harness) killMachines(t *testing.T) {
	t.Helper()
	if fixture.OnDocker() {
		w.docker(t, "kill", "--signal=KILL")
		return
	}
	for _, pid := range w.guests() {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the guests are gone", func() bool { return len(w.guests()) == 0 })
}

// removeMachines takes the machines away behind the broker's back, with their disks.
func (w *harness) removeMachines(t *testing.T) {
	t.Helper()
	if fixture.OnDocker() {
		w.docker(t, "rm", "--force", "--volumes")
		return
	}
	w.killMachines(t)
	machines, err := os.ReadDir(filepath.Join(w.State(), "local"))
	if err != nil || len(machines) == 0 {
		t.Fatalf("there are machines %v (%v)", machines, err)
	}
	for _, machine := range machines {
		if err := os.RemoveAll(filepath.Join(w.State(), "local", machine.Name())); err != nil {
			t.Fatal(err)
		}
	}
}

// docker does something to all containers of the broker, of which there is one at least.
func (w *harness) docker(t *testing.T, args ...string) {
	t.Helper()
	containers, err := w.Containers()
	if err != nil || len(containers) == 0 {
		t.Fatalf("there are containers %v (%v)", containers, err)
	}
	if out, err := exec.Command("docker", append(args, containers...)...).CombinedOutput(); err != nil {
		t.Fatalf("docker %v: %v: %s", args, err, out)
	}
}

// guests lists the pids of the guests on this host.
func (w *harness) guests() []int {
	var pids []int
	for pid, command := range w.Processes() {
		if strings.Contains(command, "berth-guest init") {
			pids = append(pids, pid)
		}
	}
	return pids
}
