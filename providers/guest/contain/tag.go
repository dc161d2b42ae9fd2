package contain

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// tag marks the processes of a job: the soft limit RLIMIT_LOCKS, which Linux has not used since 2.6
// and which passes on through fork, exec, setsid and a cleared environment. Its highest two bits are
// 01, the next 30 are the machine, the last 32 number the job.
type tag uint64

const (
	tagBits    = 2 // highest, which say that it is one
	jobBits    = 32
	tagPattern = tag(1) << (64 - tagBits)
)

func (t tag) valid() bool { return t>>(64-tagBits) == tagPattern>>(64-tagBits) }

// tags allocates them.
type tags struct {
	machine tag // all but the job's number

	mu    sync.Mutex
	next  uint32
	limit unix.Rlimit // the guest's own
}

// newTags returns the tags of a machine. The first number differs between boots, so that a process of an
// earlier boot is unlikely to be taken for a job of this one.
func newTags(machineID string) *tags {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(machineID))
	machine := tag(hash.Sum64()) >> (tagBits + jobBits) << jobBits
	return &tags{machine: tagPattern | machine, next: uint32(os.Getpid()) << 16}
}

func (t *tags) make() tag {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.next++
	return t.machine | tag(t.next)
}

// ours says whether a valid tag is this machine's.
func (t *tags) ours(other tag) bool { return other>>jobBits == t.machine>>jobBits }

// startTagged forks while the tag is the guest's own limit, the only way to set it for a child before its
// first instruction. Nothing else changes that limit.
func (t *tags) startTagged(mark tag, fork func() (int, error)) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := unix.Prlimit(0, unix.RLIMIT_LOCKS, &unix.Rlimit{Cur: uint64(mark), Max: t.limit.Max}, nil); err != nil {
		return 0, fmt.Errorf("tag a job: %w", err)
	}
	defer func() { _ = unix.Prlimit(0, unix.RLIMIT_LOCKS, &t.limit, nil) }()
	return fork()
}

// try tags a process and checks that the tag can be read. It runs before anything else reaps.
func (t *tags) try() error {
	if err := unix.Prlimit(0, unix.RLIMIT_LOCKS, nil, &t.limit); err != nil {
		return fmt.Errorf("read the guest's own limit: %w", err)
	}
	mark := t.make()
	pid, err := t.startTagged(mark, func() (int, error) { return startProbe(&syscall.SysProcAttr{}) })
	if err != nil {
		return err
	}
	defer endProbe(pid)
	if seen := tagOf(pid); seen != mark {
		return fmt.Errorf("a child has the tag %x, not %x", seen, mark)
	}
	// The fallback for processes of other users must agree.
	if seen := tagInProc(pid); seen != mark {
		return fmt.Errorf("/proc says of a child that it has the tag %x, not %x", seen, mark)
	}
	return nil
}

// tagOf returns a process's tag, 0 when it has none or is gone.
func tagOf(pid int) tag {
	var limit unix.Rlimit
	switch err := unix.Prlimit(pid, unix.RLIMIT_LOCKS, nil, &limit); {
	case err == nil:
		return tag(limit.Cur)
	case errors.Is(err, unix.ESRCH):
		return 0
	}
	return tagInProc(pid) // another user's
}

// tagInProc reads it from /proc, which is slower but allowed for processes of other users.
func tagInProc(pid int) tag {
	limits, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "limits"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(limits)) {
		if rest, found := strings.CutPrefix(line, "Max file locks"); found {
			if f := strings.Fields(rest); len(f) > 0 {
				soft, _ := strconv.ParseUint(f[0], 10, 64) // "unlimited" is none
				return tag(soft)
			}
		}
	}
	return 0
}

// startProbe starts the one program that every machine has, the guest itself; "version" exits at once.
func startProbe(attr *syscall.SysProcAttr) (int, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("find the guest's own program: %w", err)
	}
	pid, err := syscall.ForkExec(self, []string{self, "version"}, &syscall.ProcAttr{Env: []string{}, Sys: attr})
	if err != nil {
		return 0, fmt.Errorf("start a process to try: %w", err)
	}
	return pid, nil
}

// endProbe kills and reaps it.
func endProbe(pid int) {
	_ = syscall.Kill(pid, syscall.SIGKILL)
	for {
		if _, err := syscall.Wait4(pid, nil, 0, nil); !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}
