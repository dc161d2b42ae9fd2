package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// terminalPair is a real terminal: what a person types is written to master.
func terminalPair(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("there are no pseudo terminals here")
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(master.Close(), slave.Close()); err != nil { // in this order: a read of the slave's ends
			t.Error(err)
		}
	})
	return master, slave
}

func settings(t *testing.T, terminal *os.File) unix.Termios {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return *state
}

func resize(t *testing.T, terminal *os.File, cols, rows uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: cols, Row: rows}); err != nil {
		t.Fatal(err)
	}
}

// atTerminal is a shell with a person at it.
func (b *fakeBroker) atTerminal(slave *os.File) *shell {
	s := b.shell()
	s.terminal, s.pty, s.stdin, s.resized = true, slave, slave, make(chan os.Signal, 1)
	s.continued = make(chan os.Signal, 1)
	s.interrupts, s.exited = make(chan os.Signal, 3), make(chan int, 1)
	return s
}

func TestATerminalIsTheCommands(t *testing.T) {
	b := newBroker(t)
	master, slave := terminalPair(t)
	resize(t, slave, 100, 30)
	before := settings(t, slave)
	s := b.atTerminal(slave)
	var during unix.Termios
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		during = settings(t, slave)
		if _, err := master.WriteString("\x03\x1a\x04ls\r"); err != nil {
			t.Error(err)
		}
		b.until(t, "the keys arrived", func() bool { return strings.HasSuffix(string(b.live.taken), "ls\r") })
		b.until(t, "the size arrived", func() bool { return len(b.live.sizes) > 0 })
		resize(t, slave, 120, 40)
		s.resized <- syscall.SIGWINCH
		b.until(t, "the new size arrived", func() bool { return len(b.live.sizes) > 1 })
		b.kill()
		b.start()
		<-b.entered
		b.until(t, "the size arrived again", func() bool { return len(b.live.sizes) > 2 })
		if _, err := master.WriteString("exit\r"); err != nil {
			t.Error(err)
		}
	})
	code := s.run(t, "exec", "-it", sbLive, "--", "shell")
	story.Wait()
	if code != 7 || string(b.live.taken) != "\x03\x1a\x04ls\rexit\r" {
		t.Errorf("exit %d, input %q, stderr %q", code, b.live.taken, s.stderr.String())
	}
	if size := b.live.spec.GetTty(); size.GetCols() != 100 || size.GetRows() != 30 {
		t.Errorf("it began in a terminal of %v", size)
	}
	if size := b.live.sizes[1]; size.GetCols() != 120 || size.GetRows() != 40 || b.live.sizes[2].GetCols() != 120 {
		t.Errorf("sizes %v", b.live.sizes)
	}
	if during.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != 0 {
		t.Error("the terminal was not raw")
	}
	if settings(t, slave) != before {
		t.Error("the terminal is not as it was")
	}
}

func TestATerminalIsToldThatItsBrokerIsAwayAndBack(t *testing.T) {
	b := newBroker(t)
	master, slave := terminalPair(t)
	s := b.atTerminal(slave)
	const away = "\r\nberth: the broker is away, and is being reached again: the command continues, and gets then what is typed now\r\n"
	const back = "\r\nberth: the broker is back\r\n"
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		// Only keys that arrive show that the client has been told that its command began.
		if _, err := master.WriteString("before\r"); err != nil {
			t.Error(err)
		}
		b.until(t, "the keys arrived", func() bool { return string(b.live.taken) == "before\r" })
		b.kill()
		s.awaitError(t, away)
		if _, err := master.WriteString("typed\r"); err != nil {
			t.Error(err)
		}
		b.start()
		s.awaitError(t, back)
		b.until(t, "the keys arrived", func() bool { return string(b.live.taken) == "before\rtyped\r" })
		if _, err := master.WriteString("exit\r"); err != nil {
			t.Error(err)
		}
	})
	code := s.run(t, "exec", "-it", sbLive, "--", "shell")
	story.Wait()
	if code != 7 || s.stderr.String() != away+back {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
}

func TestAPipeIsNotToldThatItsBrokerIsAway(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.retryTimeout = 2 * time.Second
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		b.kill()
	})
	code := s.run(t, "exec", sbLive, "--", "hang")
	story.Wait()
	if code != usage.ExitBroker || strings.Contains(s.stderr.String(), "is away") {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
}

// awaitError waits until stderr ends in words.
func (s *shell) awaitError(t *testing.T, words string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.HasSuffix(s.stderr.String(), words); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("after 20 s stderr is %q", s.stderr.String())
			return
		}
	}
}

func TestATerminalIsRawAgainAfterTheProcessWasStopped(t *testing.T) {
	b := newBroker(t)
	master, slave := terminalPair(t)
	before := settings(t, slave)
	s := b.atTerminal(slave)
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		b.until(t, "the size arrived", func() bool { return len(b.live.sizes) > 0 })
		if err := unix.IoctlSetTermios(int(slave.Fd()), unix.TCSETS, &before); err != nil { // as a shell does
			t.Error(err)
		}
		s.continued <- syscall.SIGCONT
		b.until(t, "the size arrived again", func() bool { return len(b.live.sizes) > 1 })
		if settings(t, slave).Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != 0 {
			t.Error("the terminal is not raw again")
		}
		if _, err := master.WriteString("exit\r"); err != nil {
			t.Error(err)
		}
	})
	if code := s.run(t, "exec", "-it", sbLive, "--", "shell"); code != 7 {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
	story.Wait()
	if settings(t, slave) != before {
		t.Error("the terminal is not as it was")
	}
}

func TestATerminalIsPutBackOnEveryWayOut(t *testing.T) {
	for _, test := range []struct {
		name string
		args []string
		way  func(*fakeBroker, *shell)
		out  io.Writer
		code int
	}{
		{"when the broker is gone", []string{"exec", "-it", sbLive, "--", "shell"}, func(b *fakeBroker, _ *shell) { b.kill() }, nil, usage.ExitBroker},
		{"when it is killed by signals", []string{"run", "-it", "--", "deaf"}, func(b *fakeBroker, s *shell) {
			s.awaitOutput(t)
			s.interrupts <- syscall.SIGTERM
			b.until(t, "the first arrived", func() bool { return len(b.live.signals) > 0 })
			s.interrupts <- syscall.SIGTERM
		}, nil, 143},
		{"when a hangup ends the command", []string{"exec", "-it", sbLive, "--", "hang"}, func(_ *fakeBroker, s *shell) {
			s.awaitOutput(t)
			s.interrupts <- syscall.SIGHUP
		}, nil, 129},
		{"when the deadline passes", []string{"exec", "-it", "--deadline", "1s", sbLive, "--", "deaf"}, func(*fakeBroker, *shell) {}, nil, usage.ExitBroker},
		{"when nobody reads the output", []string{"exec", "-it", sbLive, "--", "stream"}, func(*fakeBroker, *shell) {}, &brokenPipe{left: 20}, 141},
		{"when a job was attached to", []string{"attach", "-i", "--from-start", "0NEW"}, func(_ *fakeBroker, s *shell) {
			s.awaitOutput(t)
			s.interrupts <- syscall.SIGTERM
		}, nil, 143},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			b.change(func() {
				b.live = b.beginLive(&berthv1.ExecStart{SandboxId: sbLive, Spec: &berthv1.JobSpec{
					Argv: []string{"deaf"}, Tty: &berthv1.TerminalSize{Cols: 80, Rows: 24},
				}})
				if test.args[0] != "attach" {
					b.jobs = b.jobs[:len(b.jobs)-1]
				}
			})
			_, slave := terminalPair(t)
			before := settings(t, slave)
			s := b.atTerminal(slave)
			s.stdoutTo, s.retryTimeout = test.out, 300*time.Millisecond
			var story sync.WaitGroup
			story.Go(func() {
				<-b.entered
				if test.out == nil && settings(t, slave).Lflag&unix.ICANON != 0 {
					t.Error("the terminal was not raw")
				}
				test.way(b, s)
			})
			code := s.run(t, test.args...)
			story.Wait()
			if code != test.code || settings(t, slave) != before {
				t.Errorf("exit %d, stderr %q, as it was: %v", code, s.stderr.String(), settings(t, slave) == before)
			}
		})
	}
}

func TestATerminalIsPutBackByTheThirdInterrupt(t *testing.T) {
	b := newBroker(t)
	_, slave := terminalPair(t)
	before := settings(t, slave)
	s := b.atTerminal(slave)
	hold := make(chan struct{})
	s.stdoutTo = writerFunc(func(data []byte) (int, error) { <-hold; return len(data), nil }) // a pipe that nobody reads
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		for range 3 {
			s.interrupts <- syscall.SIGTERM
		}
		if code := <-s.exited; code != 143 || settings(t, slave) != before {
			t.Errorf("exit %d, as it was: %v", code, settings(t, slave) == before)
		}
		close(hold)
	})
	s.run(t, "exec", "-it", sbLive, "--", "stream")
	story.Wait()
}

func TestATerminalIsPutBackByAPanic(t *testing.T) {
	b := newBroker(t)
	_, slave := terminalPair(t)
	before := settings(t, slave)
	s := b.atTerminal(slave)
	s.stdoutTo = writerFunc(func([]byte) (int, error) { panic("a defect") })
	func() {
		defer func() {
			if recover() == nil {
				t.Error("there was no panic")
			}
		}()
		s.run(t, "exec", "-it", sbLive, "--", "stream")
	}()
	if settings(t, slave) != before {
		t.Error("the terminal is not as it was")
	}
}
