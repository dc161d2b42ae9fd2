package local_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

// nobody is a user who owns nothing.
const nobody = 65534

// nobodysYard is a yard in which nobody is the broker, and their calls on one machine in it.
func nobodysYard(t *testing.T, mode local.IsolationMode) (y yard, id string, asNobody func(verb string) *exec.Cmd) {
	t.Helper()
	testenv.Root(t)
	y = newYard(t, mode)
	if err := os.Chown(filepath.Dir(y.dir), nobody, nobody); err != nil {
		t.Fatal(err)
	}
	id = newID()
	return y, id, func(verb string) *exec.Cmd {
		cmd := y.broker(t, programs.creator, verb, id)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		return cmd
	}
}

func TestAnOrdinaryUsersMachineHasNamespacesAndItsJobsNoPower(t *testing.T) {
	y, id, asNobody := nobodysYard(t, local.IsolationAuto)
	out, err := asNobody("info").CombinedOutput()
	if err != nil {
		t.Fatalf("info says %q, %v", out, err)
	}
	t.Logf("%s", out)
	if strings.Contains(string(out), "user namespaces do not do here: ") {
		t.Skip("this host forbids user namespaces")
	}
	if want := strconv.Itoa(int(providers.IsolationNamespace)) + " own user, PID, mount and IPC namespaces"; !strings.HasPrefix(string(out), want) {
		t.Fatalf("info says %q", out)
	}
	before := mountCount(t)
	creating := untilDone(t, asNobody("create")) // or two brokers would write one record
	defer kill(t, creating)
	p := y.provider(t)
	t.Cleanup(func() {
		if err := p.Destroy(context.Background(), y.machine(id)); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the machine runs", func() bool {
		m, err := p.Inspect(t.Context(), id)
		return err == nil && m.State == providers.MachineRunning && len(y.guests(t, id)) == 1
	})
	y.owner = nobody // root listens in nobody's place
	g := y.dial(t, p, id)
	defer g.Close()
	own, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	if got := g.run("readlink /proc/self/ns/pid"); got == own+"\n" || !strings.HasPrefix(got, "pid:[") {
		t.Errorf("its PID namespace is %q, the host's %q", got, own)
	}
	if got := g.run("id -u; id -g; tr '\\0' ' ' </proc/1/cmdline"); !strings.HasPrefix(got, "65534\n65534\nberth-guest init ") {
		t.Errorf("a job says %q", got)
	}
	for range 20 { // from whichever thread of the guest
		got := g.run("grep -E '^Cap(Prm|Eff|Amb)' /proc/self/status | tr -d '\\t\\n'")
		if want := "CapPrm:0000000000000000CapEff:0000000000000000CapAmb:0000000000000000"; got != want {
			t.Fatalf("a job has %q", got)
		}
	}
	if got := g.run("mkdir m; mount -t tmpfs none m 2>/dev/null || echo no; touch f && stat -c %u f; cat /proc/1/environ >/dev/null 2>&1 || echo unseen"); got != "no\n65534\nunseen\n" {
		t.Errorf("a job says %q", got)
	}
	if info, err := os.Stat(filepath.Join(y.dir, id, "workspace", "f")); err != nil || info.Sys().(*syscall.Stat_t).Uid != nobody {
		t.Errorf("its file is not nobody's: %v", err)
	}
	if after := mountCount(t); after != before {
		t.Errorf("the host has %d mounts, had %d", after, before)
	}
	mark := strconv.FormatInt(time.Now().UnixNano(), 10)
	g.run("(env -i setsid sh -c 'sleep " + mark + " & sleep " + mark + "' >/dev/null 2>&1 &)")
	eventually(t, "the escapees run", func() bool { return len(processesNamed(t, "sleep\x00"+mark)) == 2 })
	kill(t, creating)
	if out, err := asNobody("destroy").CombinedOutput(); err != nil {
		t.Fatalf("destroy: %v: %s", err, out)
	}
	if left := append(y.traces(t, id), strings.Fields(strings.Trim(fmt.Sprint(processesNamed(t, mark)), "[]"))...); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestABrokerThatIsNotRootBootsPlainProcessesWhenToldSo(t *testing.T) {
	y, id, asNobody := nobodysYard(t, local.IsolationNone)
	out, err := asNobody("info").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "1 plain host processes: for trusted work only") {
		t.Fatalf("info says %q, %v", out, err)
	}
	t.Logf("%s", out)
	creating := untilDone(t, asNobody("create")) // or two brokers would write one record
	defer kill(t, creating)
	p := y.provider(t)
	t.Cleanup(func() {
		if err := p.Destroy(context.Background(), y.machine(id)); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the machine runs", func() bool {
		m, err := p.Inspect(t.Context(), id)
		return err == nil && m.State == providers.MachineRunning && len(y.guests(t, id)) == 1
	})
	if info, err := os.Stat("/proc/" + strconv.Itoa(y.guests(t, id)[0])); err != nil || info.Sys().(*syscall.Stat_t).Uid != nobody {
		t.Errorf("the guest is not nobody's: %v", err)
	}
	y.owner = nobody // root listens in nobody's place
	g := y.dial(t, p, id)
	defer g.Close()
	mark := strconv.FormatInt(time.Now().UnixNano(), 10)
	g.run("mkdir -p a/b; touch a/b/c; chmod 0 a/b; chmod 0 a; setsid sleep " + mark + " >/dev/null 2>&1 &")
	eventually(t, "the job runs", func() bool { return len(processesNamed(t, "sleep\x00"+mark)) == 1 })
	kill(t, creating)
	if out, err := asNobody("destroy").CombinedOutput(); err != nil {
		t.Fatalf("destroy: %v: %s", err, out)
	}
	if left := y.traces(t, id); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if left := processesNamed(t, mark); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

func TestADiskThatIsFullIsNoRoomAndKeepsNoMachineAlive(t *testing.T) {
	testenv.Root(t)
	y := newYard(t, local.IsolationAuto)
	if err := os.MkdirAll(y.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", y.dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no tmpfs can be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(y.dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	p, id := y.provider(t), newID()
	y.create(t, p, id)
	fill := filepath.Join(y.dir, "fill")
	content := make([]byte, 1<<20)
	if err := os.WriteFile(fill, content, 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	another := newID()
	if _, err := p.Create(t.Context(), y.spec(another)); !errors.Is(err, providers.ErrCapacity) {
		t.Errorf("Create on a full disk: %v, want ErrCapacity", err)
	}
	if left := y.traces(t, another); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	y.destroy(t, p, id)
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	y.create(t, p, another)
	y.destroy(t, p, another)
}

func TestDestroyReachesThroughNoMount(t *testing.T) {
	testenv.Root(t)
	y := newYard(t, local.IsolationNone)
	p, id := y.provider(t), newID()
	y.create(t, p, id)
	precious := t.TempDir()
	if err := os.WriteFile(filepath.Join(precious, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	point := filepath.Join(y.dir, id, "workspace", "a place")
	if err := os.Mkdir(point, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(precious, point, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("nothing can be mounted: %v", err)
	}
	err := p.Destroy(t.Context(), y.machine(id))
	if err == nil || !strings.Contains(err.Error(), point) {
		t.Errorf("got %v, want an error that names %s", err, point)
	}
	if _, err := os.Stat(filepath.Join(precious, "file")); err != nil {
		t.Errorf("it was reached: %v", err)
	}
	if err := unix.Unmount(point, 0); err != nil {
		t.Fatal(err)
	}
	y.destroy(t, p, id)
}

func TestAFileThatCannotBeRemovedIsNamed(t *testing.T) {
	testenv.Root(t)
	y := newYard(t, local.IsolationAuto)
	p, id := y.provider(t), newID()
	y.create(t, p, id)
	path := filepath.Join(y.dir, id, "workspace", "stays")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := exec.Command("chattr", "+i", path).Run(); err != nil {
		t.Skipf("no file can be made immutable: %v", err)
	}
	err := p.Destroy(t.Context(), y.machine(id))
	if err == nil || !strings.Contains(err.Error(), "stays") || !strings.Contains(err.Error(), "chattr -i") {
		t.Errorf("got %v, want an error that names the file and the remedy", err)
	}
	if got := state(t, p, id); got != providers.MachinePartial {
		t.Errorf("it is %v", got)
	}
	if err := exec.Command("chattr", "-i", filepath.Join(y.dir, ".gone-"+id, "workspace", "stays")).Run(); err != nil {
		t.Fatal(err)
	}
	y.destroy(t, p, id)
}

func TestMountsOfAMachineStayInIt(t *testing.T) {
	testenv.Root(t)
	y := newYard(t, local.IsolationAuto)
	p, id := y.provider(t), newID()
	info, err := p.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if info.Isolation != providers.IsolationNamespace {
		t.Skip(info.Message)
	}
	before := mountCount(t)
	y.create(t, p, id)
	g := y.dial(t, p, id)
	defer g.Close()
	if got := g.run("mkdir m && mount -t tmpfs none m && touch m/x && ls m; cat /proc/1/cmdline | tr '\\0' ' '"); !strings.HasPrefix(got, "x\nberth-guest init") {
		t.Errorf("the job says %q", got)
	}
	if after := mountCount(t); after != before {
		t.Errorf("the host has %d mounts, had %d", after, before)
	}
	y.destroy(t, p, id)
}

// mountCount counts the host's mounts, but for those of an engine, whose containers come and go meanwhile.
func mountCount(t *testing.T) int {
	t.Helper()
	content, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	count := 0
	for line := range strings.Lines(string(content)) {
		if !engineMount.MatchString(strings.Fields(line)[4]) {
			count++
		}
	}
	return count
}

var engineMount = regexp.MustCompile(`/(overlay2|containers|netns|tmp/docker|buildkit)[/-]`)

func TestFiftyMachinesAtOnce(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p := y.provider(t)
		var ids []string
		for range 50 {
			ids = append(ids, newID())
		}
		each := func(what string, do func(id string) error) {
			start := time.Now()
			var all sync.WaitGroup
			for _, id := range ids {
				all.Go(func() {
					if err := do(id); err != nil {
						t.Errorf("%s: %v", what, err)
					}
				})
			}
			all.Wait()
			t.Logf("%s: %v", what, time.Since(start))
		}
		each("create and connect", func(id string) error {
			if _, err := p.Create(t.Context(), y.spec(id)); err != nil {
				return err
			}
			dialer, err := p.Dialer(t.Context(), y.machine(id))
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			conn, err := dialer.Dial(ctx)
			if err != nil {
				return errors.Join(err, dialer.Close())
			}
			return errors.Join(conn.Close(), dialer.Close())
		})
		machines, err := p.List(t.Context())
		if err != nil {
			t.Error(err)
		}
		var found []string
		for _, m := range machines {
			if m.State == providers.MachineRunning {
				found = append(found, m.ID)
			}
		}
		slices.Sort(found)
		slices.Sort(ids)
		if !slices.Equal(found, ids) {
			t.Errorf("%d machines run", len(found))
		}
		each("destroy", func(id string) error { return p.Destroy(t.Context(), y.machine(id)) })
		for _, id := range ids {
			if left := y.traces(t, id); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		}
	})
}
