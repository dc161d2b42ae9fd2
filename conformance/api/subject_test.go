package api

import (
	"os"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/need"
)

// The suite runs against one provider at a time: BERTH_PROVIDER is local (the default), local-plain,
// whose machines are plain processes, docker, or docker-bridge, which reaches machines through the engine also where they could dial out. For docker
// BERTH_DOCKER_IMAGE names an image with bash, git and procps, and with the repository of
// conformance/image.sh in /srv/repo.
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

// hostOnly skips a test that looks at, or meddles with, what is a machine on this host's file system.
func hostOnly(t *testing.T) {
	t.Helper()
	if onDocker() {
		t.Skip("it meddles with a machine's files and processes on this host, which " + provider() + " has elsewhere; the provider's own tests do the like")
	}
}
