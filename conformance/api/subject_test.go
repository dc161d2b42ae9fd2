package api

import (
	"testing"

	"github.com/berth-sandbox/berth/conformance/broker"
)

const imageRepository = broker.ImageRepository

func provider() string { return broker.Provider() }

func onDocker() bool { return broker.OnDocker() }

// subject is the broker's flags for the provider that the suite runs against.
func subject(t *testing.T) []string {
	t.Helper()
	return broker.Subject(t)
}

// hostOnly skips a test that looks at, or meddles with, what is a machine on this host's file system.
func hostOnly(t *testing.T) {
	t.Helper()
	if onDocker() {
		t.Skip("it meddles with a machine's files and processes on this host, which " + provider() + " has elsewhere; the provider's own tests do the like")
	}
}
