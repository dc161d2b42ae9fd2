// Package subject says which provider a suite runs against: BERTH_PROVIDER is local (the default),
// local-plain, whose machines are plain processes, fake, whose machines are plain processes too and
// whose calls fail on purpose, docker, or docker-bridge, which reaches machines through the engine also
// where they could dial out. For docker BERTH_DOCKER_IMAGE names an image with bash, git and procps, and
// with the repository of conformance/image.sh.
package subject

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/need"
)

// Repository is where an image of conformance/image.sh has its git repository: a README that says
// hello on its branch trunk, a tag v1 and a branch side.
const Repository = "/srv/repo"

const (
	providerVariable = "BERTH_PROVIDER"
	imageVariable    = "BERTH_DOCKER_IMAGE"
)

// Name is the provider as BERTH_PROVIDER says it.
func Name() string {
	if said := os.Getenv(providerVariable); said != "" {
		return said
	}
	return "local"
}

// OnDocker reports whether machines are containers, whose files and processes are not this host's.
func OnDocker() bool { return strings.HasPrefix(Name(), "docker") }

// Flags are berthd's for the provider. It fails the test where BERTH_PROVIDER or the image makes no
// sense, and skips it where there is no engine.
func Flags(t testing.TB) []string {
	t.Helper()
	switch Name() {
	case "local":
		return []string{"--provider", "local"}
	case "local-plain":
		return []string{"--provider", "local", "--local-isolation", "none"}
	case "fake":
		return []string{"--provider", "fake"}
	case "docker", "docker-bridge":
		need.Docker(t)
		image := os.Getenv(imageVariable)
		if image == "" {
			t.Fatalf("%s must name an image: `make conformance` makes one", imageVariable)
		}
		flags := []string{"--provider", "docker", "--docker-image", image}
		if Name() == "docker-bridge" {
			flags = append(flags, "--docker-bridge")
		}
		return flags
	default:
		t.Fatalf("%s is %q, want local, local-plain, fake, docker or docker-bridge", providerVariable, Name())
		return nil
	}
}

// MakeRepository makes a git repository on this host, for as long as the test runs: a README that says
// hello, committed on its branch trunk.
func MakeRepository(t testing.TB) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "repo")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "README"), []byte("hello\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"init", "-q", "-b", "trunk"}, {"add", "."},
		{"-c", "user.name=Test", "-c", "user.email=test@example.invalid", "commit", "-q", "-m", "first"},
	} {
		if out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	return dir
}
