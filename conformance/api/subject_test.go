package api

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-sandbox/berth/conformance/need"
)

// The suite runs against one provider at a time: BERTH_PROVIDER is local (the default), local-plain,
// whose machines are plain processes, docker, or docker-bridge, which reaches machines through the
// engine also where they could dial out. For docker BERTH_DOCKER_IMAGE names an image with bash, git
// and procps, and with the repository of conformance/image.sh in /srv/repo.
const (
	providerVariable = "BERTH_PROVIDER"
	imageVariable    = "BERTH_DOCKER_IMAGE"
	imageRepository  = "/srv/repo"
)

func provider() string {
	if said := os.Getenv(providerVariable); said != "" {
		return said
	}
	return "local"
}

func onDocker() bool { return strings.HasPrefix(provider(), "docker") }

// subject is the broker's flags for the provider that the suite runs against.
func subject(t *testing.T) []string {
	t.Helper()
	switch provider() {
	case "local":
		return []string{"--provider", "local"}
	case "local-plain":
		return []string{"--provider", "local", "--local-isolation", "none"}
	case "docker", "docker-bridge":
		need.Docker(t)
		image := os.Getenv(imageVariable)
		if image == "" {
			t.Fatalf("%s must name an image: `make conformance` makes one", imageVariable)
		}
		flags := []string{"--provider", "docker", "--docker-image", image}
		if provider() == "docker-bridge" {
			flags = append(flags, "--docker-bridge")
		}
		return flags
	default:
		t.Fatalf("%s is %q, want local, local-plain, docker or docker-bridge", providerVariable, provider())
		return nil
	}
}

// killMachines ends the machines as a host's failure does: their guests are killed, and with them all
// that ran there. The disks stay.
func (w *world) killMachines(t *testing.T) {
	t.Helper()
	if onDocker() {
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
func (w *world) removeMachines(t *testing.T) {
	t.Helper()
	if onDocker() {
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
func (w *world) docker(t *testing.T, args ...string) {
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
func (w *world) guests() []int {
	var pids []int
	for pid, command := range w.Processes() {
		if strings.Contains(command, "berth-guest serve") {
			pids = append(pids, pid)
		}
	}
	return pids
}
