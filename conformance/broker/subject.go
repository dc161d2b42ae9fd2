package broker

import (
	"os"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/need"
)

// A suite runs against one provider at a time: BERTH_PROVIDER is local (the default), local-plain,
// whose machines are plain processes, fake, whose machines are plain processes too and whose calls fail
// on purpose, docker, or docker-bridge, which reaches machines through the engine also where they could
// dial out. For docker BERTH_DOCKER_IMAGE names an image with bash, git and procps, and with the
// repository of conformance/image.sh in ImageRepository.
const (
	providerVariable = "BERTH_PROVIDER"
	imageVariable    = "BERTH_DOCKER_IMAGE"
	// ImageRepository is where docker machines have a git repository to clone.
	ImageRepository = "/srv/repo"
)

// Provider is the provider that was asked for.
func Provider() string {
	if said := os.Getenv(providerVariable); said != "" {
		return said
	}
	return "local"
}

// OnDocker says whether the machines' files and processes are elsewhere than on this host.
func OnDocker() bool { return strings.HasPrefix(Provider(), "docker") }

// Subject is berthd's flags for the provider that was asked for. The test is skipped where that lacks
// its engine, and fails on one that is not known.
func Subject(t testing.TB) []string {
	t.Helper()
	switch Provider() {
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
		if Provider() == "docker-bridge" {
			flags = append(flags, "--docker-bridge")
		}
		return flags
	default:
		t.Fatalf("%s is %q, want local, local-plain, fake, docker or docker-bridge", providerVariable, Provider())
		return nil
	}
}
