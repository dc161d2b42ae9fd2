package guest

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// stray is a script that leaves a process without any mark of its job: by way of su the tag goes too.
func stray(seconds string) string {
	return fmt.Sprintf("env -i bash -c 'ulimit -S -x 77; (setsid setsid sleep %s >/dev/null 2>&1 &)'; ", seconds)
}

// orphan waits until a stray is the guest's child, and a tick of the kernel's has passed since it began, so that
// it is older than what begins now. It returns its pid.
func (m *machine) orphan(seconds string) (pid uint32) {
	m.t.Helper()
	eventually(m.t, "the stray is an orphan", func() bool {
		for _, found := range processesWith("sleep " + seconds) {
			line, _ := os.ReadFile("/proc/" + found + "/cmdline")
			stat, _ := os.ReadFile("/proc/" + found + "/stat")
			if string(line) == "sleep\x00"+seconds+"\x00" && strings.Contains(string(stat), fmt.Sprintf("(sleep) S %d ", m.process.Process.Pid)) && isOlder(string(stat)) {
				number, _ := strconv.ParseUint(found, 10, 32)
				pid = uint32(number)
				return true
			}
		}
		return false
	})
	return pid
}

// isOlder says of a line of proc(5)'s stat whether the process began in an earlier tick.
func isOlder(stat string) bool {
	const startTime, ticksPerSecond = 22, 100
	started, err := strconv.ParseInt(strings.Fields(stat)[startTime-1], 10, 64)
	var now unix.Timespec
	return err == nil && unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) == nil && now.Nano()/(1e9/ticksPerSecond) > started
}

func (m *machine) stop(r *guestv1.StartRequest) *berthv1.Outcome {
	m.t.Helper()
	stopped, err := m.calls.Stop(m.t.Context(), &guestv1.StopRequest{JobId: r.GetJobId(), Grace: durationpb.New(0)})
	must(m.t, err)
	return stopped.GetStatus().GetOutcome()
}

func TestAnOrphanWithoutAMarkGoesWithTheOnlyJobThatItCanBeOf(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds := unique()
			alone := shell(stray(seconds) + "sleep 60")
			alone.Command.Timeout, alone.Command.KillGrace = durationpb.New(time.Second), durationpb.New(0)
			if o := m.run(alone).GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || len(o.GetSurvivors()) != 0 {
				t.Errorf("alone: outcome %v", o)
			}
			if left := processesWith("sleep " + seconds); len(left) != 0 {
				t.Errorf("alone: left %v", left)
			}

			// The machine is empty again. A job that began after the stray did can't be its.
			first, later := shell(stray(seconds)+"sleep 60"), shell("sleep 60")
			m.begin(first)
			m.orphan(seconds)
			m.begin(later)
			if o := m.stop(later); len(o.GetSurvivors()) != 0 {
				t.Errorf("the later job claims what began before it: %v", o)
			}
			m.orphan(seconds)
			if o := m.stop(first); len(o.GetSurvivors()) != 0 {
				t.Errorf("the first job: outcome %v", o)
			}
			if left := processesWith("sleep " + seconds); len(left) != 0 {
				t.Errorf("the first job: left %v", left)
			}
		})
	}
}

func TestAnOrphanThatMayBeAnotherJobsIsSparedAndReported(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds, neighbours := unique(), unique()
			neighbour, r := shell("exec sleep "+neighbours), shell(stray(seconds)+"sleep 60")
			m.begin(neighbour)
			eventually(t, "the neighbour runs", func() bool { return len(processesWith("sleep "+neighbours)) == 1 })
			m.begin(r)
			orphan := m.orphan(seconds)
			o := m.stop(r)
			left := processesWith("sleep " + seconds)
			switch {
			case way.kind == guestv1.Containment_CONTAINMENT_CGROUP && (len(left) != 0 || len(o.GetSurvivors()) != 0):
				t.Errorf("nothing leaves a cgroup: outcome %v, left %v", o, left)
			case way.kind != guestv1.Containment_CONTAINMENT_CGROUP && (!slices.Equal(o.GetSurvivors(), []uint32{orphan}) || len(left) != 1):
				t.Errorf("outcome %v, left %v, want %d in both", o, left, orphan)
			}
			if len(processesWith("sleep "+neighbours)) != 1 {
				t.Error("the neighbour is gone")
			}
			m.end()
			if left := processesWith("sleep " + seconds); len(left) != 0 {
				t.Errorf("it outlives the guest: %v", left)
			}
		})
	}
}
