package reap

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/signal.loop"))
}

func spawn(t *testing.T, r *Reaper, script string) (pid int, exit chan Exit) {
	t.Helper()
	exit = make(chan Exit, 1)
	pid, err := r.Spawn(func() (int, error) {
		return syscall.ForkExec("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{Setsid: true}})
	}, func(e Exit) { exit <- e })
	if err != nil {
		t.Error(err)
		exit <- Exit{}
	}
	return pid, exit
}

func TestNoStatusIsLostBesideOrphans(t *testing.T) {
	n := 2000
	if testing.Short() {
		n = 200
	}
	r := Start()
	defer r.Close()
	var all sync.WaitGroup
	for caller := range 16 {
		all.Go(func() {
			for i := range n / 16 {
				code := (caller + i) % 256
				_, exit := spawn(t, r, fmt.Sprintf("(: &) ; exit %d", code))
				select {
				case e := <-exit:
					if e.Status.ExitStatus() != code {
						t.Errorf("exit %d came as %v", code, e.Status)
					}
				case <-time.After(time.Minute):
					t.Error("a status was lost")
				}
			}
		})
	}
	all.Wait()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		children, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
		if err == nil && len(children) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies: %s", children)
		}
	}
}

func TestASignalSaysWhetherTheChildStillRan(t *testing.T) {
	r := Start()
	defer r.Close()
	pid, exit := spawn(t, r, "exec sleep 60")
	if running, err := r.SignalGroup(pid, syscall.SIGKILL); !running || err != nil {
		t.Errorf("running %v, %v", running, err)
	}
	if e := <-exit; e.Status.Signal() != syscall.SIGKILL || e.Time.IsZero() {
		t.Errorf("exit %v", e)
	}
	if running, err := r.SignalGroup(pid, syscall.SIGKILL); running || err != nil {
		t.Errorf("once reaped: running %v, %v", running, err)
	}
}

func TestCPUTimeIsTheChildsAndItsChildrens(t *testing.T) {
	r := Start()
	defer r.Close()
	_, exit := spawn(t, r, "sh -c 'i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done'")
	if e := <-exit; e.CPUTime < time.Millisecond {
		t.Errorf("it took %v", e.CPUTime)
	}
}

func TestAForkThatFailsOwnsNothing(t *testing.T) {
	r := Start()
	defer r.Close()
	_, err := r.Spawn(func() (int, error) { return 0, syscall.ENOENT }, func(Exit) { t.Error("called") })
	if !errors.Is(err, syscall.ENOENT) {
		t.Error(err)
	}
}
