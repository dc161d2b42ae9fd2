package main

import (
	"bufio"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// unit reads the settings of docs/berthd.service.
func unit(t *testing.T) map[string]string {
	t.Helper()
	file, err := os.Open("../../../docs/berthd.service")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	settings := map[string]string{}
	for lines := bufio.NewScanner(file); lines.Scan(); {
		name, value, found := strings.Cut(strings.TrimSpace(lines.Text()), "=")
		if !found || strings.HasPrefix(name, "#") {
			continue
		}
		if before, twice := settings[name]; twice {
			t.Errorf("%s is set twice, to %s and to %s", name, before, value)
		}
		settings[name] = value
	}
	return settings
}

func TestTheUnitKeepsMachinesOverARestart(t *testing.T) {
	settings := unit(t)
	for name, want := range map[string]string{
		"Type": "notify", "Restart": "always", "StartLimitIntervalSec": "0",
		"KillMode": "process", "OOMPolicy": "continue", "Delegate": "yes", "TasksMax": "infinity",
		"StateDirectory": "berth", "StateDirectoryMode": "0700",
		"RuntimeDirectory": "berth", "RuntimeDirectoryMode": "0700", "RuntimeDirectoryPreserve": "yes",
	} {
		if settings[name] != want {
			t.Errorf("%s is %q, want %q", name, settings[name], want)
		}
	}
	stop, err := time.ParseDuration(settings["TimeoutStopSec"] + "s")
	if err != nil || stop < 2*drainTimeout {
		t.Errorf("TimeoutStopSec is %q (%v), berthd drains for up to %s", settings["TimeoutStopSec"], err, drainTimeout)
	}
	// As root, which the unit is, berthd's own defaults are the directories that the unit makes.
	if command := settings["ExecStart"]; filepath.Base(command) != "berthd" || !filepath.IsAbs(command) {
		t.Errorf("ExecStart is %q, want berthd without flags", command)
	}
	if os.Geteuid() == 0 && (defaultState() != "/var/lib/"+settings["StateDirectory"] || defaultRun() != "/run/"+settings["RuntimeDirectory"]) {
		t.Errorf("berthd would use %s and %s", defaultState(), defaultRun())
	}
}

func TestTheServiceManagerIsToldWhenItServesAndWhenItStops(t *testing.T) {
	dir, err := os.MkdirTemp("", "bn-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for name, address := range map[string]string{"a path": filepath.Join(dir, "n.sock"), "an abstract name": "@" + filepath.Join(dir, "n")} {
		t.Run(name, func(t *testing.T) {
			manager, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: address, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = manager.Close() }()
			t.Setenv("NOTIFY_SOCKET", address)
			guest := filepath.Join(dir, "berth-guest")
			if err := os.WriteFile(guest, nil, 0o700); err != nil {
				t.Fatal(err)
			}
			c, err := resolved(t, "--state", filepath.Join(dir, "state"), "--run", filepath.Join(dir, "run"), "--provider", "local", "--local-isolation", "none", "--guest", guest)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- serve(ctx, c, make(told, 1), &strings.Builder{}) }()
			hears(t, manager, "READY=1")
			cancel()
			hears(t, manager, "STOPPING=1")
			if err := <-done; err != nil {
				t.Errorf("it ended with %v", err)
			}
		})
	}
}

func hears(t *testing.T, manager *net.UnixConn, want string) {
	t.Helper()
	if err := manager.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 256)
	n, err := manager.Read(buffer)
	if err != nil || string(buffer[:n]) != want {
		t.Fatalf("the service manager heard %q (%v), want %q", buffer[:n], err, want)
	}
}
