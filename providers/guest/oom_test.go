package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// memoryCgroup returns the file by which a process enters a new cgroup with a memory limit.
func memoryCgroup(t *testing.T) string {
	t.Helper()
	for root, files := range map[string][2]string{
		"/sys/fs/cgroup/memory": {"memory.limit_in_bytes", "cgroup.procs"}, "/sys/fs/cgroup": {"memory.max", "cgroup.procs"},
	} {
		dir := filepath.Join(root, fmt.Sprintf("berth-test-oom-%d", os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			eventually(t, "remove the cgroup", func() bool { return os.Remove(dir) == nil || !exists(dir) })
		})
		if os.WriteFile(filepath.Join(dir, files[0]), []byte("67108864"), 0) == nil {
			return filepath.Join(dir, files[1])
		}
	}
	t.Skip("no cgroup with a memory limit can be made here")
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestAJobThatTakesAllMemoryIsKilledForItAndTheGuestIsNot(t *testing.T) {
	m := bootAs(t, manner{script: "echo $$ > " + memoryCgroup(t) + `; exec "$0"`})
	for name, script := range map[string]string{"the command": "exec tail /dev/zero", "its child": "tail /dev/zero; exit $?"} {
		o := m.run(shell(script)).GetStatus().GetOutcome()
		if o.GetCause() != berthv1.Cause_CAUSE_OOM_KILLED || o.GetExitCode() != 137 {
			t.Errorf("%s: %v", name, o)
		}
	}
	if o := m.run(shell("kill -9 $$")).GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_SIGNALED {
		t.Errorf("a job that kills itself: %v", o)
	}
	if o := m.run(argv("true")).GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_EXITED {
		t.Errorf("the next job: %v", o)
	}
}
