package record

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// unsyncedVariable makes a run of these tests one in a process of its own, where fsync fails.
const unsyncedVariable = "BERTH_TEST_FSYNC_FAILS"

// What is not on disk must not be reported. A kernel that keeps running hides a missing sync, so here every
// fsync is made to fail: code that does not sync does not notice.
func TestNothingIsDoneWhenItCannotBePutOnDisk(t *testing.T) {
	if os.Getenv(unsyncedVariable) == "" {
		child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		child.Env = append(os.Environ(), unsyncedVariable+"=1")
		out, err := child.CombinedOutput()
		if err != nil {
			t.Fatalf("where fsync fails: %v\n%s", err, out)
		}
		if strings.Contains(string(out), "--- SKIP") {
			t.Skipf("fsync cannot be made to fail here:\n%s", out)
		}
		return
	}
	d := open(t, t.TempDir(), "m_1", "boot")
	if err := d.Create(&guestv1.JobRecord{JobId: first, Durable: true}); err != nil {
		t.Fatal(err)
	}
	failFsync(t)
	if err := d.Create(&guestv1.JobRecord{JobId: second, Durable: true}); !errors.Is(err, unix.EIO) {
		t.Errorf("a job's record that cannot be synced: %v, want the kernel's EIO", err)
	}
	if _, err := os.Stat(filepath.Join(d.jobs, second)); !os.IsNotExist(err) {
		t.Errorf("the job's entry is there: %v", err)
	}
	outcome := &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}
	if err := d.WriteStatus(&guestv1.Status{JobId: first, Done: true, Outcome: outcome}); !errors.Is(err, unix.EIO) {
		t.Errorf("an outcome that cannot be synced: %v, want the kernel's EIO", err)
	}
	if _, err := os.Stat(filepath.Join(d.jobs, first, "status")); !os.IsNotExist(err) {
		t.Errorf("the outcome was put in place before it was on disk: %v", err)
	}
}

// failFsync makes every fsync and fdatasync of this process fail with EIO, from now on and for good.
func failFsync(t *testing.T) {
	t.Helper()
	refuse := uint32(unix.SECCOMP_RET_ERRNO | uint32(unix.EIO))
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the system call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FSYNC, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FDATASYNC, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: refuse},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	stuck, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&filter)))
	runtime.KeepAlive(program)
	switch {
	case errno == unix.ENOSYS, errno == unix.EINVAL, errno == unix.EACCES:
		t.Skipf("seccomp: %v", errno)
	case errno != 0 || stuck != 0:
		t.Fatalf("seccomp: %v, thread %d", errno, stuck)
	}
}
