package hostfaults

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAReadOnlyStateIsRefusedInOneLine(t *testing.T) {
	t.Parallel()
	w, d := onDisk(t, diskBytes)
	sandbox := w.create(t)
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	w.destroy(t, sandbox)
	w.Kill(t)
	if err := syscall.Mount("", d.dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	wantOneLine(t, w.Broker, "read-only", "mount the file system for writing")
	if err := syscall.Mount("", d.dir, "", syscall.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	w.Start(t)
	w.wantExit(t, finished, 3)
	w.wantOutput(t, finished, "whole\n")
	w.quiet(t)
}

// frail is a file system on a file, which turns read-only at an error, as those of hosts do.
type frail struct{ image, dir string }

func newFrail(t *testing.T) *frail {
	t.Helper()
	for _, program := range []string{"mkfs.ext4", "e2fsck", "mount", "umount"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("a file system that fails is made with %s: %v", program, err)
		}
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skipf("a file system that fails lies on a loop device: %v", err)
	}
	dir, err := os.MkdirTemp("/tmp", "berth-f-")
	if err != nil {
		t.Fatal(err)
	}
	f := &frail{image: filepath.Join(dir, "image"), dir: filepath.Join(dir, "mounted")}
	t.Cleanup(func() {
		if f.device(t) != "" {
			f.unmount(t)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(f.image, nil, 0o600), os.Truncate(f.image, 64<<20)); err != nil {
		t.Fatal(err)
	}
	f.do(t, "mkfs.ext4", "-q", "-F", f.image)
	f.mount(t)
	return f
}

func (f *frail) do(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", program, args, err, out)
	}
}

func (f *frail) mount(t *testing.T) {
	t.Helper()
	f.do(t, "mount", "-o", "loop,errors=remount-ro", f.image, f.dir)
}

func (f *frail) unmount(t *testing.T) {
	t.Helper()
	f.do(t, "umount", f.dir)
}

// device is the loop device, empty while it is not mounted.
func (f *frail) device(t *testing.T) string {
	t.Helper()
	for _, mount := range mounts(t) {
		if mount[1] == f.dir {
			return filepath.Base(mount[0])
		}
	}
	return ""
}

// fail makes the file system find an error in itself.
func (f *frail) fail(t *testing.T) {
	t.Helper()
	trigger := filepath.Join("/sys/fs/ext4", f.device(t), "trigger_fs_error")
	if err := os.WriteFile(trigger, []byte("1"), 0o200); err != nil {
		t.Fatal(err)
	}
}

// readOnly says whether a file can be made on it no more.
func (f *frail) readOnly() error {
	if err := os.WriteFile(filepath.Join(f.dir, "probe"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("a write to it gave %w", errors.Join(err, errors.New("not EROFS")))
	}
	return nil
}

// repair does what a person does then, with a copy of the disk: whatever machines live on this host have
// the broken file system in their mount namespaces too, and hold it. The check reports by its code that it
// mended something.
func (f *frail) repair(t *testing.T) {
	t.Helper()
	f.unmount(t)
	f.do(t, "cp", f.image, f.image+".copy")
	f.image += ".copy"
	out, err := exec.Command("e2fsck", "-fy", f.image).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() > 1) {
		t.Fatalf("e2fsck: %v: %s", err, out)
	}
	f.mount(t)
}

func TestALedgerThatTurnsReadOnlyEndsTheBrokerAndLosesNothing(t *testing.T) {
	t.Parallel()
	programs := asked(t)
	f := newFrail(t)
	b := fixture.NewBroker(t, programs, "--provider", "local")
	// The machines lie elsewhere: they go on, and would hold the broken file system.
	machines := filepath.Join(b.Dir, "machines")
	if err := errors.Join(os.Symlink(f.dir, b.State()), os.Mkdir(machines, 0o700), os.Symlink(machines, filepath.Join(f.dir, "local"))); err != nil {
		t.Fatal(err)
	}
	w := newHarness(t, b)
	w.Start(t)
	sandbox := w.create(t)
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	running := w.begin(t, sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 6")

	f.fail(t)
	_, err := w.impatient.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
		RequestId: "read-only", SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "exit 7"},
	})
	if code := status.Code(err); code != codes.Internal && code != codes.Unavailable {
		t.Errorf("a write to a read-only ledger gave %v", err)
	}
	select {
	case <-w.Exited():
	case <-time.After(comesBack):
		t.Fatal("the broker goes on although nobody knows what its ledger holds")
	}
	// What was under way when the disk failed is told of an error of the disk (EIO), what came later that it is
	// read-only (EROFS).
	if code := w.ExitCode(); code != 1 || len(w.logged(t, "read-only file system"))+len(w.logged(t, "input/output error")) == 0 {
		t.Errorf("the broker exited with %d, and its log does not say why", code)
	}
	eventually(t, "the file system is read-only", f.readOnly)
	wantOneLine(t, w.Broker, "read-only", "mount the file system for writing")

	f.repair(t)
	w.Start(t)
	w.wantExit(t, finished, 3)
	w.wantOutput(t, finished, "whole\n")
	again, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
		RequestId: "read-only", SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "exit 7"},
	})
	if err != nil {
		t.Fatalf("the request that had failed, again: %v", err)
	}
	w.wantExit(t, again.GetJob().GetId(), 7)
	w.run(t, sandbox, "touch go")
	w.wantExit(t, running, 6)
	w.wantOutput(t, running, "begun\n")
	w.destroy(t, sandbox)
	w.quiet(t)
	w.Stop(t)
}
