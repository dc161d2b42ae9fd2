package cli

import (
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// until waits for something of the broker's to be so.
func (b *fakeBroker) until(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		b.mu.Lock()
		so, changed := isSo(), b.changed
		b.mu.Unlock()
		if so {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Errorf("after 30 s: %s: not so", what)
			return
		}
	}
}

// awaitOutput waits until a command's output has come.
func (s *shell) awaitOutput(t *testing.T) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); s.stdout.String() == ""; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("after 10 s there is no output")
			return
		}
	}
}

func TestInterruptsOfAnAttachedCommand(t *testing.T) {
	for _, test := range []struct {
		name    string
		args    []string
		signals []os.Signal
		code    int
		stderr  string
		check   func(*liveCommand) bool
	}{
		{
			"the first is the command's", []string{"exec", sbLive, "--", "hang"}, []os.Signal{os.Interrupt}, 130, "",
			func(c *liveCommand) bool { return len(c.signals) == 1 && c.signals[0] == 2 && c.grace == nil },
		},
		{
			"and may be another", []string{"exec", sbLive, "--", "hang"}, []os.Signal{syscall.SIGTERM}, 143, "",
			func(c *liveCommand) bool { return len(c.signals) == 1 && c.signals[0] == 15 },
		},
		{
			"the second kills it", []string{"exec", sbLive, "--", "deaf"}, []os.Signal{os.Interrupt, os.Interrupt}, 130,
			"berth: exec: interrupted: the command is killed\n",
			func(c *liveCommand) bool { return len(c.signals) == 1 && c.grace != nil && c.grace.AsDuration() == 0 },
		},
		{
			"of a throwaway sandbox too, which is destroyed", []string{"run", "--", "deaf"}, []os.Signal{os.Interrupt, os.Interrupt}, 130,
			"berth: run: interrupted: the command is killed\n",
			func(c *liveCommand) bool { return c.grace != nil },
		},
		{
			"the first leaves a command with a request id", []string{"exec", "--request-id", "x", sbLive, "--", "hang"},
			[]os.Signal{syscall.SIGTERM}, 143, "berth: exec: interrupted: the command continues in the background; the same --request-id joins it\n",
			func(c *liveCommand) bool { return len(c.signals) == 0 && c.grace == nil },
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			s := b.shell()
			s.interrupts = make(chan os.Signal, 2)
			var story sync.WaitGroup
			story.Go(func() {
				s.awaitOutput(t)
				for i, signal := range test.signals {
					s.interrupts <- signal
					if i == 0 && len(test.signals) > 1 {
						b.until(t, "the first arrived", func() bool { return len(b.live.signals) > 0 })
					}
				}
			})
			code := s.run(t, test.args...)
			story.Wait()
			if code != test.code || s.stderr.String() != test.stderr || !test.check(b.live) {
				t.Errorf("exit %d, stderr %q, command %+v", code, s.stderr.String(), b.live)
			}
			if _, destroyed := b.last.(*berthv1.DestroySandboxRequest); destroyed != (test.args[0] == "run") {
				t.Errorf("the last request was %v", b.last)
			}
		})
	}
}

func TestAnInterruptedCreateOfAThrowawaySandboxIsDestroyed(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.interrupts = make(chan os.Signal, 1)
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		s.interrupts <- os.Interrupt
	})
	code := s.run(t, "run", "--provider", "slow", "--", "true")
	story.Wait()
	const id = "sb_01KBA9ZZZZ7Q5N3W8D4M1E7NEW"
	if code != 130 || s.stderr.String() != "berth: run: interrupted: sandbox "+id+" is destroyed\n" {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
	if request, ok := b.last.(*berthv1.DestroySandboxRequest); !ok || request.GetSandboxId() != id {
		t.Errorf("the last request was %v", b.last)
	}
}

func TestADeadlineKillsAnAttachedCommand(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	code := s.run(t, "exec", "--deadline", "1s", sbLive, "--", "deaf")
	if code != usage.ExitBroker || s.stderr.String() != "berth: exec: the --deadline of 1s passed: the command is killed\n" {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
	if b.live.grace == nil {
		t.Error("it was not stopped")
	}
}

// brokenPipe fails as a pipe whose reader is gone.
type brokenPipe struct{ left int }

func (w *brokenPipe) Write(data []byte) (int, error) {
	if w.left -= len(data); w.left < 0 {
		return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.EPIPE}
	}
	return len(data), nil
}

func TestABrokenPipeEndsTheCommandWithoutWords(t *testing.T) {
	for _, args := range [][]string{{"exec", sbLive, "--", "stream"}, {"run", "--", "stream"}, {"logs", jobBytes}} {
		b := newBroker(t)
		s := b.shell()
		s.stdoutTo = &brokenPipe{left: 20}
		if code := s.run(t, args...); code != 141 {
			t.Errorf("%v: exit %d", args, code)
		}
		if args[0] != "logs" && b.live.job.GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
			t.Errorf("%v: the command is %v", args, b.live.job)
		}
		if said := s.stderr.String(); strings.Contains(said, "berth") {
			t.Errorf("%v: stderr %q", args, said)
		}
	}
}

func TestExecLivesOverAKilledBroker(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	read, write := io.Pipe()
	s.stdin = read
	var story sync.WaitGroup
	story.Go(func() {
		for _, line := range []string{"one\n", "two\n", "three\n"} {
			<-b.entered
			if _, err := io.WriteString(write, line); err != nil {
				t.Error(err)
			}
			b.until(t, "a line was taken", func() bool { return strings.HasSuffix(string(b.live.taken), line) })
			b.kill()
			b.start()
		}
		if err := write.Close(); err != nil {
			t.Error(err)
		}
	})
	code := s.run(t, "exec", "-i", sbLive, "--", "cat")
	story.Wait()
	if code != 0 || s.stdout.String() != "one\ntwo\nthree\n" || string(b.live.taken) != s.stdout.String() {
		t.Errorf("exit %d, stdout %q, stderr %q", code, s.stdout.String(), s.stderr.String())
	}
}

func TestAttachAndInput(t *testing.T) {
	b := newBroker(t)
	b.change(func() {
		b.live = b.beginLive(&berthv1.ExecStart{SandboxId: sbLive, Spec: &berthv1.JobSpec{
			Argv: []string{"cat"}, Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}},
		}})
	})
	id := b.live.job.GetId()
	s := b.shell()
	s.stdin = strings.NewReader("one ")
	if code := s.run(t, "input", id); code != 0 {
		t.Fatalf("input: exit %d, stderr %q", code, s.stderr.String())
	}
	b.change(func() { b.live.job.Stdout = &berthv1.OutputStats{TotalBytes: 4} })
	s = b.shell()
	s.stdin = strings.NewReader("two")
	if code := s.run(t, "attach", "-i", id); code != 0 || s.stdout.String() != "two" || string(b.live.taken) != "one two" {
		t.Errorf("attach: exit %d, stdout %q, stderr %q, input %q", code, s.stdout.String(), s.stderr.String(), b.live.taken)
	}
	b.change(func() { b.output[id] = [2][]byte{[]byte("one two"), nil} })
	s = b.shell()
	if code := s.run(t, "attach", "--from-start", id); code != 0 || s.stdout.String() != "one two" {
		t.Errorf("attach from the start: exit %d, stdout %q, stderr %q", code, s.stdout.String(), s.stderr.String())
	}
}
