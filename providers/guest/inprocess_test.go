package guest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// In the test's own process, goleak sees what a guest that ended left behind.
func TestAGuestThatEndsLeavesNoGoroutine(t *testing.T) {
	dir := t.TempDir()
	m := &machine{t: t, dir: dir, config: &guestv1.BootConfig{
		MachineId: "m_01INPROCESS", Token: []byte("token"), DialSocket: filepath.Join(dir, "s"),
		SpoolDir: filepath.Join(dir, "spool"), Workspace: filepath.Join(dir, "work"), ListenSocket: filepath.Join(dir, "own"),
		CgroupDir: cgroupDir(t),
	}}
	if m.config.GetCgroupDir() != "" {
		// The guest moves itself, which is this process here.
		t.Cleanup(func() {
			root := filepath.Join(filepath.Dir(m.config.GetCgroupDir()), "cgroup.procs")
			must(t, os.WriteFile(root, []byte("0"), 0))
		})
	}
	m.listen()
	defer func() { _ = m.listener.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, m.config, Options{}) }()
	m.connect()
	m.run(argv("true"))
	detained := shell("sleep 60 & echo hi")
	detained.KillOnDisconnect = true
	m.run(detained)
	m.begin(argv("sleep", "60"))
	cancel()
	must(t, <-ended)
}
