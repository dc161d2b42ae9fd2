package local

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// host is what the kernel lets us do here; a reason stands where it does not.
type host struct {
	noNamespaces string // why machines get no namespaces; empty: they do
	noCgroup     string // why machines get no cgroup; empty: they do
	cgroupBase   string // the directory that this broker's cgroups lie in
}

// probe tries what a boot will do, with a program that does not exist: the kernel makes namespaces
// and enters the cgroup first and misses the program last. Whether an ordinary user's namespaces are
// of use, only the guest's own program can tell: many a host makes them and then forbids all in them.
func probe(dir, broker, guest string) host {
	var h host
	if os.Geteuid() != 0 {
		if err := tryGuest(guest); err != nil {
			h.noNamespaces = "the broker is not root, and user namespaces do not do here: " + err.Error()
		}
	} else if err := tryStart(dir, attributes(true, nil)); err != nil {
		h.noNamespaces = err.Error()
	}
	base, err := cgroupBase(broker)
	if err == nil {
		err = tryCgroup(dir, base)
	}
	if err != nil {
		h.noCgroup = err.Error()
		return h
	}
	h.cgroupBase = base
	return h
}

func (h host) isolation() string {
	if h.noNamespaces != "" {
		return isolationNone
	}
	return isolationNamespace
}

// attributes are what a guest is started with: a session of its own, no tie to the broker's life,
// and what the host lets us put around it. The mount namespace is entered with unshare, because
// Go then also keeps mounts made in it from spreading to the host. An ordinary user gets namespaces in
// a user namespace of their own, where they stay who they are and the guest may mount; it sees to it
// that its jobs may not.
func attributes(namespaces bool, cgroup *os.File) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setsid: true}
	if namespaces {
		a.Cloneflags = syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC
		a.Unshareflags = syscall.CLONE_NEWNS
	}
	if uid, gid := os.Geteuid(), os.Getegid(); namespaces && uid != 0 {
		a.Cloneflags |= syscall.CLONE_NEWUSER
		a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		a.GidMappingsEnableSetgroups = false // as the kernel wants it of an ordinary user
		a.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
	if cgroup != nil {
		a.UseCgroupFD, a.CgroupFD = true, int(cgroup.Fd())
	}
	return a
}

func tryStart(dir string, a *syscall.SysProcAttr) error {
	child, err := os.StartProcess(filepath.Join(dir, "no such program"), nil, &os.ProcAttr{Dir: "/", Sys: a})
	switch {
	case err == nil:
		_ = child.Kill() // there is no such program, so this does not happen
		_, _ = child.Wait()
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return nil
	default:
		var cause *os.PathError
		if errors.As(err, &cause) {
			return cause.Err
		}
		return err
	}
}

// tryGuest starts the guest's program as a machine's first process, which only tries what it must be
// able to do there.
func tryGuest(program string) error {
	child := exec.Command(program, "probe")
	child.Dir, child.Env, child.SysProcAttr = "/", []string{}, attributes(true, nil)
	var words bytes.Buffer
	child.Stderr = &words
	if err := child.Start(); err != nil {
		return err
	}
	late := time.AfterFunc(probeTimeout, func() { _ = child.Process.Kill() }) // gone is as good
	defer late.Stop()
	err := child.Wait()
	if first, _, _ := strings.Cut(words.String(), "\n"); err != nil && first != "" {
		return errors.New(first)
	}
	return err
}

func tryCgroup(dir, base string) error {
	trial := filepath.Join(base, "probe") // always the same, so that none is left by a crash for good
	cgroup, err := openCgroup(trial)
	if err != nil {
		return err
	}
	defer func() {
		_ = cgroup.Close() // nothing was written to it
		_ = os.Remove(trial)
		_ = os.Remove(base) // stays while machines use it
	}()
	return tryStart(dir, attributes(false, cgroup))
}

// cgroupBase returns where this broker's cgroups lie: below the broker's own cgroup2 group, the only
// place where one that is not root may have leave to make them.
func cgroupBase(broker string) (string, error) {
	own, err := ownCgroup()
	if err != nil {
		return "", err
	}
	mounts, err := readMounts()
	if err != nil {
		return "", err
	}
	for _, m := range mounts {
		if m.kind != "cgroup2" {
			continue
		}
		below, ok := strings.CutPrefix(own, strings.TrimSuffix(m.root, "/"))
		if !ok || strings.HasPrefix(own, "/..") {
			continue
		}
		return filepath.Join(m.point, below, "berth-"+broker), nil
	}
	return "", errors.New("no cgroup2 file system is mounted that shows the broker's own group")
}

func ownCgroup() (string, error) {
	content, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(content)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n"), nil
		}
	}
	return "", errors.New("the kernel has no cgroup2")
}

// mount is a line of /proc/self/mountinfo.
type mount struct {
	root  string // of the file system, as far as it is mounted
	point string // where
	kind  string // of file system
}

func readMounts() ([]mount, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // only read
	var mounts []mount
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20) // a line of an overlay names all its layers
	for lines.Scan() {
		place, system, ok := strings.Cut(lines.Text(), " - ")
		fields, kinds := strings.Fields(place), strings.Fields(system)
		if !ok || len(fields) < 5 || len(kinds) < 1 {
			continue
		}
		mounts = append(mounts, mount{root: unescape(fields[3]), point: unescape(fields[4]), kind: kinds[0]})
	}
	return mounts, lines.Err()
}

// unescape undoes the kernel's octal escapes of blanks and backslashes.
func unescape(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}

// mountsBelow returns the mount points in a directory, itself included.
func mountsBelow(dir string) ([]string, error) {
	mounts, err := readMounts()
	if err != nil {
		return nil, fmt.Errorf("looking for mounts: %w", err)
	}
	var points []string
	for _, m := range mounts {
		if m.point == dir || strings.HasPrefix(m.point, dir+"/") {
			points = append(points, m.point)
		}
	}
	return points, nil
}

// makeCgroup makes a machine's cgroup, with one for the guest in it, because a group that has groups
// for jobs may hold no processes itself. It returns the guest's, open.
func (p *Provider) makeCgroup(path string) (*os.File, error) {
	p.cgroups.Lock()
	defer p.cgroups.Unlock()
	return openCgroup(filepath.Join(path, "guest"))
}

// openCgroup makes a cgroup with its parents and opens it.
func openCgroup(path string) (cgroup *os.File, err error) {
	for range cgroupTries {
		if err = os.MkdirAll(path, 0o755); err == nil { //nolint:gosec // as other cgroups are
			cgroup, err = os.Open(path)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return cgroup, err
}

// killCgroup kills every process in a cgroup and below.
func killCgroup(path string) error {
	order, err := os.OpenFile(filepath.Join(path, "cgroup.kill"), os.O_WRONLY, 0)
	if err == nil {
		_, err = order.WriteString("1")
		return errors.Join(err, order.Close())
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Kernels before 5.14 lack it: kill one by one; the caller looks again until none is left.
	return walkCgroup(path, func(dir string) error {
		content, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			return err
		}
		for field := range strings.FieldsSeq(string(content)) {
			if pid, ok := number(field); ok && pid > 1 {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
					return err
				}
			}
		}
		return nil
	})
}

// cgroupEmpty reports whether no process lives in a cgroup or below, or there is none.
func cgroupEmpty(path string) (bool, error) {
	content, err := os.ReadFile(filepath.Join(path, "cgroup.events"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return strings.Contains(string(content), "populated 0"), nil
}

// removeCgroup removes an empty cgroup with those below, and the broker's own when it was the last.
func (p *Provider) removeCgroup(path string) error {
	err := walkCgroup(path, os.Remove)
	if err != nil {
		return err
	}
	p.cgroups.Lock()
	defer p.cgroups.Unlock()
	if base := filepath.Dir(path); filepath.Base(base) == "berth-"+p.broker {
		_ = os.Remove(base) // stays while other machines use it
	}
	return nil
}

// walkCgroup visits a cgroup and those below, the deepest first. That one is gone is no error.
func walkCgroup(path string, visit func(dir string) error) error {
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		if err := walkCgroup(filepath.Join(path, entry.Name()), visit); err != nil {
			return err
		}
	}
	if err := visit(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
