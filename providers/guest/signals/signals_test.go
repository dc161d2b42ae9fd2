package signals

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/conformance/testenv"
)

// roleVariable makes the test's own program the first process of a namespace, or one that sends it signals.
const roleVariable = "BERTH_TEST_ROLE"

func TestMain(m *testing.M) {
	role, known := map[string]func() error{"first": first, "defenceless": wait, "sender": send, "fault": fault}[os.Getenv(roleVariable)]
	if !known {
		goleak.VerifyTestMain(m)
		return
	}
	if err := role(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// first is sent every signal from inside, and then waits for one from outside.
func first() error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	if err := errors.Join(ObeyOutside(), ObeyOutside()); err != nil { // twice is as once
		return err
	}
	sender := exec.Command("/proc/self/exe")
	sender.Env = []string{roleVariable + "=sender"}
	if out, err := sender.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	if ctx.Err() != nil {
		return errors.New("it obeyed a process of its namespace")
	}
	fmt.Println("unharmed")
	<-ctx.Done()
	fmt.Println("asked to end")
	return nil
}

// wait does not call ObeyOutside.
func wait() error {
	sender := exec.Command("/proc/self/exe")
	sender.Env = []string{roleVariable + "=sender"}
	return sender.Run()
}

// send sends every signal to the first process in every way.
func send() error {
	for number := unix.Signal(1); number <= 64; number++ {
		if err := errors.Join(unix.Kill(1, number), unix.Tgkill(1, 1, number), queueAsOutside(number)); err != nil {
			return fmt.Errorf("send %v: %w", number, err)
		}
	}
	return nil
}

// queueAsOutside sends a signal with the pid of a sender outside of the namespace, which the kernel lets pass.
func queueAsOutside(number unix.Signal) error {
	const queued = -1 // SI_QUEUE
	var info [128]byte
	binary.NativeEndian.PutUint32(info[0:], uint32(number))
	binary.NativeEndian.PutUint32(info[8:], 1<<32+queued)
	_, _, errno := unix.RawSyscall(unix.SYS_RT_SIGQUEUEINFO, 1, uintptr(number), uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return errno
	}
	return nil
}

// fault makes a mistake that the kernel reports by SIGSEGV, and the runtime as a panic.
func fault() (err error) {
	if err := ObeyOutside(); err != nil {
		return err
	}
	defer func() {
		if what := recover(); what != nil {
			fmt.Println("panicked:", what)
			err = nil
		}
	}()
	var nowhere *int
	return fmt.Errorf("read %d from nowhere", *nowhere)
}

// program is the test's own, as the first process of a PID namespace.
func program(t *testing.T, role string) (c *exec.Cmd, output *bufio.Scanner) {
	t.Helper()
	testenv.Root(t)
	testenv.Namespaces(t)
	c = exec.Command("/proc/self/exe")
	c.Env = []string{roleVariable + "=" + role}
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	pipe, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c, bufio.NewScanner(pipe)
}

func wantLine(t *testing.T, output *bufio.Scanner, want string) {
	t.Helper()
	if !output.Scan() || !strings.HasPrefix(output.Text(), want) {
		t.Errorf("it says %q (%v), want %q", output.Text(), output.Err(), want)
	}
}

func TestTheFirstProcessObeysTheOutsideAlone(t *testing.T) {
	for name, test := range map[string]struct {
		signal syscall.Signal
		says   string // before it ends
		code   int
	}{
		"TERM, which it asked for":         {unix.SIGTERM, "asked to end", 0},
		"HUP, on which the runtime exits":  {unix.SIGHUP, "", 2},
		"QUIT, on which the runtime exits": {unix.SIGQUIT, "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			c, output := program(t, "first")
			wantLine(t, output, "unharmed")
			if err := c.Process.Signal(test.signal); err != nil {
				t.Error(err)
			}
			if output.Scan(); output.Text() != test.says {
				t.Errorf("then it says %q, want %q", output.Text(), test.says)
			}
			_ = c.Wait()
			if code := c.ProcessState.ExitCode(); code != test.code {
				t.Errorf("it ended with %v, want code %d", c.ProcessState, test.code)
			}
		})
	}
}

func TestWithoutThisAProcessInsideEndsTheFirst(t *testing.T) {
	c, _ := program(t, "defenceless")
	if err := c.Wait(); err == nil {
		t.Error("it survived, so the other tests show nothing")
	}
}

func TestAFaultOfTheProgramItselfIsStillAPanic(t *testing.T) {
	c, output := program(t, "fault")
	wantLine(t, output, "panicked: runtime error: invalid memory address")
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}
