package contain

import (
	"os"
	"path/filepath"
	"testing"
)

func TestTheMachinesMemoryCgroupIsFoundOnHostsAndInContainers(t *testing.T) {
	const mounts = "30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs rw\n" +
		"31 30 0:27 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n" +
		"32 30 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n" +
		"33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
	if root, point, found := cgroupMount(mounts, "cgroup", "memory"); !found || root != "/docker/abc" || point != "/sys/fs/cgroup/memory" {
		t.Errorf("version 1: %q at %q, %v", root, point, found)
	}
	if root, point, found := cgroupMount(mounts, "cgroup2", ""); !found || root != "/" || point != "/sys/fs/cgroup/unified" {
		t.Errorf("version 2: %q at %q, %v", root, point, found)
	}
	const own = "9:cpu,cpuacct:/a\n8:memory:/docker/abc/d\n0::/e:f\n"
	for controller, want := range map[string]string{"memory": "/docker/abc/d", "cpuacct": "/a", "": "/e:f"} {
		if dir, found := ownCgroup(own, controller); !found || dir != want {
			t.Errorf("%q: %q, %v", controller, dir, found)
		}
	}
	if dir, found := ownCgroup(own, "pids"); found {
		t.Errorf("a controller that is not there: %q", dir)
	}
}

func TestKillsForMemoryAreCountedInBothVersions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events")
	for content, want := range map[string]uint64{
		"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n":               7,
		"low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n": 2,
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, found := readOOMKills(file); !found || got != want {
			t.Errorf("%d, %v, want %d", got, found, want)
		}
		if got := (oomCounter{file}).since(1); got != want-1 {
			t.Errorf("since 1: %d", got)
		}
	}
	if got := (oomCounter{}).since(0); got != 0 {
		t.Errorf("without a counter: %d", got)
	}
}
