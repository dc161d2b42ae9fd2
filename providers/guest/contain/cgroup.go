package contain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// readyCgroups are created in advance, so that a command does not wait for mkdir. A larger burst creates
	// its own.
	readyCgroups = 32
	// upkeepDelay is the batch delay between the end of a command and the creation and removal of cgroups that
	// it causes, so that they do not compete with the next command.
	upkeepDelay = 10 * time.Millisecond
	// busyRetryMax bounds the pauses between attempts to remove a cgroup that still has processes: the
	// daemons of a job may live as long as the machine.
	busyRetryMax = 5 * time.Second
	// removeTimeout bounds the wait for a killed cgroup to become removable.
	removeTimeout = 5 * time.Second
)

// cgroups is a Tracker that makes one cgroup2 directory per job below jobs. A directory is never used twice: a
// process that is cloned into a cgroup which ever received cgroup.kill dies at birth.
type cgroups struct {
	jobs string
	oom  oomCounter // for jobs without a memory controller
	log  *slog.Logger

	ready chan *cgroup
	wake  chan struct{} // has a token when there is something to make or to remove
	stop  chan struct{}
	work  sync.WaitGroup

	mu    sync.Mutex
	named uint64    // directories made so far; their names
	used  []*cgroup // to be removed
}

// newCgroups tries a cgroup, moves the guest into one of its own, removes what an earlier boot left, and
// starts creating directories in advance.
func newCgroups(dir string, oom oomCounter, log *slog.Logger) (*cgroups, error) {
	c := &cgroups{
		jobs:  filepath.Join(dir, "jobs"),
		oom:   oom,
		log:   log,
		ready: make(chan *cgroup, readyCgroups),
		wake:  make(chan struct{}, 1),
		stop:  make(chan struct{}),
	}
	// The guest leaves the parent's directory where it can: a cgroup with controllers for its children may
	// contain no process of its own.
	moveSelf(filepath.Join(dir, "guest"))
	if err := os.MkdirAll(c.jobs, 0o755); err != nil { //nolint:gosec // a cgroup's directory is as public as /proc
		return nil, fmt.Errorf("make the jobs' cgroup: %w", err)
	}
	enableMemory(dir)
	enableMemory(c.jobs)
	c.removeLeftovers()
	if err := c.try(); err != nil {
		return nil, fmt.Errorf("try a cgroup in %s: %w", c.jobs, err)
	}
	c.makeAhead()
	c.work.Go(c.upkeep)
	return c, nil
}

func (c *cgroups) Kind() guestv1.Containment { return guestv1.Containment_CONTAINMENT_CGROUP }

func (c *cgroups) Prepare(string) (ProcessGroup, error) {
	var g *cgroup
	select {
	case g = <-c.ready:
	default:
		var err error
		if g, err = c.make(); err != nil {
			return nil, err
		}
	}
	g.oomBefore, _ = c.oom.read()
	return g, nil
}

// Clear kills every cgroup below jobs.
func (c *cgroups) Clear(ctx context.Context) []int {
	var survivors []int
	for _, entry := range directories(c.jobs) {
		g := &cgroup{path: filepath.Join(c.jobs, entry)}
		if !g.Empty() {
			survivors = append(survivors, g.Kill(ctx)...)
		}
	}
	return survivors
}

func (c *cgroups) Occupied(trees []ProcessGroup) []ProcessGroup {
	return slices.DeleteFunc(slices.Clone(trees), ProcessGroup.Empty)
}

// Rename does nothing: processes in a cgroup need no mark.
func (c *cgroups) Rename(string) {}

// Close removes the directories that can be removed and closes their descriptors.
func (c *cgroups) Close() {
	close(c.stop)
	c.work.Wait()
	close(c.ready)
	for tree := range c.ready {
		tree.close()
	}
	c.removeLeftovers()
}

func (c *cgroups) make() (*cgroup, error) {
	for {
		c.mu.Lock()
		c.named++
		path := filepath.Join(c.jobs, "n"+strconv.FormatUint(c.named, 10))
		c.mu.Unlock()
		err := unix.Mkdir(path, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue // left by an earlier boot, with a process that cannot be killed
		}
		if err != nil {
			return nil, fmt.Errorf("make a cgroup: %w", err)
		}
		fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			_ = unix.Rmdir(path)
			return nil, fmt.Errorf("open a cgroup: %w", err)
		}
		return &cgroup{owner: c, path: path, fd: fd}, nil
	}
}

// upkeep creates directories in advance and removes released ones, retrying those that still have
// processes.
func (c *cgroups) upkeep() {
	var busy []*cgroup
	retry, retryAt := upkeepDelay, time.Now()
	pause, soon := time.NewTimer(upkeepDelay), false
	defer pause.Stop()
	for {
		select {
		case <-c.wake:
			if !soon {
				pause.Reset(upkeepDelay)
				soon = true
			}
			continue
		case <-c.stop:
			return
		case <-pause.C:
			soon = false
		}
		c.makeAhead()
		if now := time.Now(); !now.Before(retryAt) {
			busy = slices.DeleteFunc(busy, (*cgroup).remove)
			retry = min(2*retry, busyRetryMax)
			retryAt = now.Add(retry)
		}
		if still := slices.DeleteFunc(c.takeUsed(), (*cgroup).remove); len(still) > 0 {
			busy = append(busy, still...)
			retry = upkeepDelay
			retryAt = time.Now().Add(retry)
		}
		if len(busy) > 0 {
			pause.Reset(time.Until(retryAt))
		}
	}
}

func (c *cgroups) makeAhead() {
	for len(c.ready) < cap(c.ready) {
		tree, err := c.make()
		if err != nil {
			c.log.Warn("cannot create a cgroup in advance", "error", err)
			return
		}
		c.ready <- tree // this is the only sender
	}
}

func (c *cgroups) takeUsed() []*cgroup {
	c.mu.Lock()
	defer c.mu.Unlock()
	used := c.used
	c.used = nil
	return used
}

func (c *cgroups) needUpkeep() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// removeLeftovers kills and removes every directory below jobs.
func (c *cgroups) removeLeftovers() {
	for _, entry := range directories(c.jobs) {
		g := &cgroup{path: filepath.Join(c.jobs, entry)}
		if g.remove() {
			continue
		}
		survivors := g.Kill(context.Background())
		if !poll(context.Background(), removeTimeout, g.remove) {
			c.log.Warn("cannot remove a cgroup", "cgroup", g.path, "survivors", survivors)
		}
	}
}

// try starts a process in a cgroup and kills it there. It runs before anything else reaps.
func (c *cgroups) try() error {
	tree, err := c.make()
	if err != nil {
		return err
	}
	defer func() {
		tree.close()
		poll(context.Background(), removeTimeout, tree.remove)
	}()
	attr := &syscall.SysProcAttr{}
	pid, err := tree.StartIn(attr, func() (int, error) { return startProbe(attr) })
	if err != nil {
		return err
	}
	defer endProbe(pid)
	if err := os.WriteFile(filepath.Join(tree.path, "cgroup.kill"), []byte("1"), 0); err != nil {
		return fmt.Errorf("kill it: %w", err)
	}
	return nil
}

// cgroup is the process group of one job.
type cgroup struct {
	owner     *cgroups
	path      string
	fd        int
	oomBefore uint64      // oom's count before the start
	gone      atomic.Bool // the directory was removed, so it stays empty
}

func (g *cgroup) StartIn(attr *syscall.SysProcAttr, fork func() (int, error)) (int, error) {
	attr.UseCgroupFD = true
	attr.CgroupFD = g.fd
	return fork()
}

// Started closes the descriptor: nothing else is ever started here.
func (g *cgroup) Started(int) { g.close() }

func (g *cgroup) LeaderReaped() {}

func (g *cgroup) Empty() bool {
	if g.gone.Load() {
		return true
	}
	events, err := os.ReadFile(filepath.Join(g.path, "cgroup.events"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return bytes.Contains(events, []byte("populated 0"))
}

func (g *cgroup) Terminate() {
	for _, pid := range g.members() {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
}

func (g *cgroup) Kill(ctx context.Context) []int {
	if g.Empty() {
		return nil
	}
	err := os.WriteFile(filepath.Join(g.path, "cgroup.kill"), []byte("1"), 0)
	if err == nil && poll(ctx, killTimeout, g.Empty) {
		return nil
	}
	return g.members()
}

func (g *cgroup) OOMKills() uint64 {
	if kills, found := readOOMKills(filepath.Join(g.path, "memory.events")); found {
		return kills
	}
	return g.owner.oom.since(g.oomBefore)
}

func (g *cgroup) Release() {
	g.close()
	g.owner.mu.Lock()
	g.owner.used = append(g.owner.used, g)
	g.owner.mu.Unlock()
	g.owner.needUpkeep()
}

func (g *cgroup) close() {
	if g.fd > 0 {
		_ = unix.Close(g.fd)
		g.fd = -1
	}
}

// remove removes the directory, and those that a job made below it.
func (g *cgroup) remove() bool {
	err := unix.Rmdir(g.path)
	if errors.Is(err, unix.EBUSY) && g.Empty() {
		for _, below := range directories(g.path) {
			(&cgroup{path: filepath.Join(g.path, below)}).remove()
		}
		err = unix.Rmdir(g.path)
	}
	removed := err == nil || errors.Is(err, fs.ErrNotExist)
	if removed {
		g.gone.Store(true)
	}
	return removed
}

// members returns the pids in the cgroup and in those below it, zombies aside.
func (g *cgroup) members() []int {
	var pids []int
	procs, _ := os.ReadFile(filepath.Join(g.path, "cgroup.procs"))
	for field := range strings.FieldsSeq(string(procs)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	for _, below := range directories(g.path) {
		pids = append(pids, (&cgroup{path: filepath.Join(g.path, below)}).members()...)
	}
	return pids
}

func moveSelf(dir string) {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) { //nolint:gosec // as above
		return
	}
	_ = os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)
}

// enableMemory enables the memory controller for a cgroup's children, where it is available, for the count
// of out-of-memory kills.
func enableMemory(dir string) {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err == nil && strings.Contains(string(available), "memory") {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0)
	}
}

func directories(path string) []string {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names
}
