package contain

import (
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// JobOOMScore makes the kernel kill a job rather than the guest when memory runs out.
const JobOOMScore = 500

// oomOffer starts processes with JobOOMScore, which what they start inherits from its first instruction on. The
// zero value changes nothing.
type oomOffer struct {
	own int // the guest's score

	mu   sync.Mutex
	file *os.File // nil where the guest's own score cannot be raised and lowered again
}

func newOOMOffer() *oomOffer {
	o := &oomOffer{}
	file, err := os.OpenFile("/proc/self/oom_score_adj", os.O_RDWR, 0)
	if err != nil {
		return o
	}
	text := make([]byte, len("-1000\n"))
	n, _ := file.ReadAt(text, 0)
	o.own, err = strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err == nil && o.own < JobOOMScore && write(file, JobOOMScore) == nil && write(file, o.own) == nil {
		o.file = file
		return o
	}
	_ = file.Close() // nothing was written, or the file takes no more
	return o
}

// during calls fork with the guest's own score raised, the only way to set a child's before its first instruction.
func (o *oomOffer) during(fork func() (int, error)) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file != nil && write(o.file, JobOOMScore) == nil {
		defer func() { _ = write(o.file, o.own) }() // as it could before
	}
	return fork()
}

func (o *oomOffer) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file != nil {
		_ = o.file.Close() // every write was seen to
		o.file = nil
	}
}

func write(file *os.File, score int) error {
	_, err := file.WriteAt([]byte(strconv.Itoa(score)), 0)
	return err
}

// oomScore is how readily the kernel kills a process for memory, -1000 to 1000; 0 where that is not known.
func oomScore(pid int) int {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "oom_score_adj"))
	if err != nil {
		return 0
	}
	score, _ := strconv.Atoi(strings.TrimSpace(string(text))) // a number is one
	return score
}

// oomCounter counts the processes of the guest's own memory cgroup, which is the machine's, that the kernel
// killed for memory. It serves where a job has no memory cgroup of its own. The zero value counts nothing.
type oomCounter struct{ file string }

// newOOMCounter finds the counter. It runs before the guest leaves the cgroup in which it was started.
func newOOMCounter() oomCounter {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return oomCounter{}
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return oomCounter{}
	}
	for _, version := range []struct{ controller, filesystem, option, file string }{
		{"memory", "cgroup", "memory", "memory.oom_control"},
		{"", "cgroup2", "", "memory.events"},
	} {
		dir, found := ownCgroup(string(own), version.controller)
		if !found {
			continue
		}
		root, point, found := cgroupMount(string(mounts), version.filesystem, version.option)
		if !found {
			continue
		}
		// In a container the mount's root is the container's cgroup.
		below, err := filepath.Rel(root, dir)
		if err != nil || strings.HasPrefix(below, "..") {
			below = ""
		}
		c := oomCounter{file: path.Join(point, below, version.file)}
		if _, found := c.read(); found {
			return c
		}
	}
	return oomCounter{}
}

// ownCgroup returns the guest's cgroup in the hierarchy of a controller, "" for cgroup2's.
func ownCgroup(cgroups, controller string) (dir string, found bool) {
	for line := range strings.Lines(cgroups) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && (controller == "" && f[1] == "" || controller != "" && slices.Contains(strings.Split(f[1], ","), controller)) {
			return f[2], true
		}
	}
	return "", false
}

// cgroupMount returns the root and the mount point of a hierarchy.
func cgroupMount(mounts, filesystem, option string) (root, point string, found bool) {
	for line := range strings.Lines(mounts) {
		mount, super, _ := strings.Cut(strings.TrimSpace(line), " - ")
		f, s := strings.Fields(mount), strings.Fields(super)
		if len(f) > 4 && len(s) > 2 && s[0] == filesystem && (option == "" || slices.Contains(strings.Split(s[2], ","), option)) {
			return f[3], f[4], true
		}
	}
	return "", "", false
}

// read returns the count.
func (c oomCounter) read() (kills uint64, found bool) {
	if c.file == "" {
		return 0, false
	}
	return readOOMKills(c.file)
}

// since returns how many were killed since a count.
func (c oomCounter) since(before uint64) uint64 {
	now, _ := c.read()
	return now - min(now, before)
}

func readOOMKills(file string) (kills uint64, found bool) {
	events, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(events)) {
		if count, found := strings.CutPrefix(line, "oom_kill "); found {
			n, err := strconv.ParseUint(strings.TrimSpace(count), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
