package docker

import (
	"os"
	"path"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"

	"github.com/berth-sandbox/berth/providers"
)

// What a machine gets that asks for no limit. A build of a large program fits; a runaway one ends before the
// engine's host does.
const (
	DefaultMemoryBytes uint64 = 4 << 30
	DefaultPIDs        uint64 = 4096
)

// droppedCapabilities are those of the engine's default set that no package manager, sudo or su needs: with
// NET_RAW a machine could forge packets and ARP answers, with MKNOD make device files.
var droppedCapabilities = []string{"NET_RAW", "MKNOD"}

// guestCapabilities are what the guest of a hardened machine keeps where the image's user is not root: to run
// jobs as that user, to give it the workspace, and to end its processes. They leave a process with its change
// to another user, so that no job of that user has them.
var guestCapabilities = []string{"CHOWN", "KILL", "SETGID", "SETUID"}

// scratchDirs are kept in memory in a hardened machine, whose image cannot be written to.
var scratchDirs = []string{"/run", "/tmp", "/var/tmp"}

// confine takes from a container what its machine does not need.
func confine(host *container.HostConfig, spec providers.MachineSpec, image imageInfo) {
	host.CapDrop = droppedCapabilities
	if spec.Options[optionHardening] != hardeningStrict {
		return
	}
	host.CapDrop = []string{"ALL"}
	if image.user != "" {
		host.CapAdd = guestCapabilities
	}
	host.SecurityOpt = []string{"no-new-privileges"}
}

// readOnly reports whether a machine's image cannot be written to.
func readOnly(spec providers.MachineSpec) bool {
	return spec.Options[optionReadOnly] == "true" || spec.Options[optionHardening] == hardeningStrict
}

// scratch returns the directories in memory of a machine whose image cannot be written to. Where the workspace
// is one of them, it is a volume instead.
func scratch(spec providers.MachineSpec) (mounts []mount.Mount) {
	dirs := []string{"/tmp"}
	if spec.Options[optionHardening] == hardeningStrict {
		dirs = scratchDirs
	}
	for _, dir := range dirs {
		if dir == workspaceOf(spec) {
			continue
		}
		mode := os.FileMode(0o1777)
		if dir == "/run" {
			mode = 0o755
		}
		mounts = append(mounts, mount.Mount{Type: mount.TypeTmpfs, Target: dir, TmpfsOptions: &mount.TmpfsOptions{Mode: mode}})
	}
	return mounts
}

// limits are a machine's own, or where it asks for none, the broker's.
func (p *Provider) limits(spec providers.MachineSpec) container.Resources {
	memory, pids := spec.Resources.MemoryBytes, spec.Resources.PIDs
	if memory == 0 {
		memory = p.defaults.MemoryBytes
	}
	if pids == 0 {
		pids = p.defaults.PIDs
	}
	limits := container.Resources{
		NanoCPUs: int64(spec.Resources.CPUs * 1e9),
		// The two being the same means no swap: a limit is a limit.
		Memory: int64(memory), MemorySwap: int64(memory),
	}
	if pids > 0 {
		n := int64(pids)
		limits.PidsLimit = &n
	}
	return limits
}

// inGuestsDir reports whether a path in a machine is the guest's directory or lies below it.
func inGuestsDir(dir string) bool {
	for dir = path.Clean(dir); dir != "/" && dir != "."; dir = path.Dir(dir) {
		if dir == guestsDir {
			return true
		}
	}
	return false
}
