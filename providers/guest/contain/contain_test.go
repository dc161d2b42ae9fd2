package contain

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "version" {
		os.Exit(0) // the probe
	}
	goleak.VerifyTestMain(m)
}

func TestALineOfProcIsReadWhateverTheProgramIsCalled(t *testing.T) {
	rest := " S 1 42 43 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0"
	for name, line := range map[string]string{
		"a plain name": "5 (cat)" + rest, "brackets": "5 (a) S 9 9 (b)" + rest, "spaces and lines": "5 (a b\nc)" + rest,
	} {
		p, ok := parseStat(5, line)
		if !ok || p.process != (process{5, 777}) || p.parent != 1 || p.group != 42 || p.session != 43 || p.zombie {
			t.Errorf("%s: %+v, %v", name, p, ok)
		}
	}
	for _, line := range []string{"", "5 (cat", "5 (cat) S 1 2 3", "5 (cat)" + strings.Replace(rest, "42", "x", 1)} {
		if p, ok := parseStat(5, line); ok {
			t.Errorf("%q is %+v", line, p)
		}
	}
	if p, ok := parseStat(5, "5 (cat) Z"+rest[2:]); !ok || !p.zombie {
		t.Errorf("a zombie: %+v, %v", p, ok)
	}
}

func TestTagsAreAMachinesAndAJobs(t *testing.T) {
	a, b := newTags("m_a"), newTags("m_b")
	one, two := a.make(), a.make()
	if one == two || !one.valid() || !a.ours(two) || b.ours(one) || !b.make().valid() {
		t.Errorf("%x, %x, %x", one, two, b.make())
	}
	for _, other := range []tag{0, 1000, 1 << 61, 1 << 63, ^tag(0)} {
		if other.valid() {
			t.Errorf("%x passes for a tag", uint64(other))
		}
	}
	a.next = 1<<32 - 1
	if last := a.make(); !a.ours(last) {
		t.Errorf("after the last number: %x", last)
	}
}

// startIn starts a script in a tree.
func startIn(t *testing.T, tree ProcessGroup, script string) *os.Process {
	t.Helper()
	attr := &syscall.SysProcAttr{Setsid: true}
	pid, err := tree.StartIn(attr, func() (int, error) {
		c := exec.Command("sh", "-c", script)
		c.SysProcAttr = attr
		if err := c.Start(); err != nil {
			return 0, err
		}
		return c.Process.Pid, c.Process.Release()
	})
	if err != nil {
		t.Fatal(err)
	}
	tree.Started(pid)
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestATreeIsKilledWholeAndItsNeighbourIsNot(t *testing.T) {
	tracker := Probe("", "m_test"+strconv.Itoa(os.Getpid()), slog.New(slog.DiscardHandler))
	defer tracker.Close()
	if tracker.Kind() != guestv1.Containment_CONTAINMENT_TAG {
		t.Skip("limits cannot be set here")
	}
	trees, leaders := make([]ProcessGroup, 2), make([]*os.Process, 2)
	for i := range trees {
		tree, err := tracker.Prepare("job_" + strconv.Itoa(i))
		if err != nil {
			t.Fatal(err)
		}
		trees[i] = tree
		if !tree.Empty() {
			t.Error("a tree that has not begun has processes")
		}
		leaders[i] = startIn(t, tree, "(setsid env -i sh -c 'sleep 60 & sleep 60' &) ; exec sleep 60")
	}
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline) && (size(trees[0]) < 4 || size(trees[1]) < 4); {
		time.Sleep(5 * time.Millisecond)
	}
	if got := len(tracker.Occupied(trees)); got != 2 {
		t.Errorf("%d of 2 are occupied", got)
	}
	go func() { _, _ = leaders[0].Wait() }()
	if left := trees[0].Kill(context.Background()); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if !trees[0].Empty() || size(trees[1]) != 4 {
		t.Errorf("%d and %d processes live", size(trees[0]), size(trees[1]))
	}
	if occupied := tracker.Occupied(trees); len(occupied) != 1 || occupied[0] != trees[1] {
		t.Errorf("occupied: %v", occupied)
	}
	go func() { _, _ = leaders[1].Wait() }()
	if left := tracker.Clear(context.Background()); len(left) != 0 || !trees[1].Empty() {
		t.Errorf("left by all: %v", left)
	}
}

func size(tree ProcessGroup) int { return len(tree.(*group).among(snapshot(), nil)) }
