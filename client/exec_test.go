package client_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// randomBytes is n bytes that repeat nowhere.
func randomBytes(n int) []byte {
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rand.Uint32())
	}
	all := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(all) // it never fails
	return all
}

// exchange has a command read all of its stdin while it writes both streams, as c.
func exchange(c *command, stdout, stderr []byte) {
	var both sync.WaitGroup
	both.Go(func() { c.readInput() })
	for len(stdout) > 0 || len(stderr) > 0 {
		n, m := rand.IntN(len(stdout)+1), rand.IntN(len(stderr)+1)
		n, m = min(n, 16<<10), min(m, 4<<10)
		c.write(berthv1.Stream_STREAM_STDOUT, stdout[:n])
		c.write(berthv1.Stream_STREAM_STDERR, stderr[:m])
		stdout, stderr = stdout[n:], stderr[m:]
	}
	both.Wait()
	c.exit(0)
}

// TestBothWaysAreExactOverBrokenConnections breaks connections after random numbers of bytes and kills
// the broker at random moments, a hundred times, in the middle of 1 MiB each way.
func TestBothWaysAreExactOverBrokenConnections(t *testing.T) {
	rounds := 100
	if testing.Short() {
		rounds = 10
	}
	var cuts atomic.Int64
	for round := range rounds {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			b.kill()
			var left atomic.Int64
			left.Store(8)
			b.listen = func(listener net.Listener) net.Listener {
				return brittle{Listener: listener, limit: 600 << 10, left: &left}
			}
			b.start()
			stdin, stdout, stderr := randomBytes(1<<20), randomBytes(1<<20), randomBytes(64<<10)

			var story sync.WaitGroup
			over := make(chan struct{})
			story.Go(func() { exchange(b.awaitCommand(1), stdout, stderr) })
			story.Go(func() {
				for range 3 {
					select {
					case <-over:
						return
					case <-time.After(rand.N(80 * time.Millisecond)):
						b.kill()
						b.start()
					}
				}
			})
			var gotOut, gotErr bytes.Buffer
			job, err := b.dial().Exec(testContext(t), "sb_1", &berthv1.JobSpec{Argv: []string{"exchange"}}, client.ExecIO{
				RequestID: "mine", Stdin: bytes.NewReader(stdin), Stdout: &gotOut, Stderr: &gotErr,
				Gap: func(stream berthv1.Stream, from, to uint64) { t.Errorf("a gap of %v: %d to %d", stream, from, to) },
			})
			close(over)
			if err != nil {
				t.Fatal(err)
			}
			story.Wait()
			if job.GetOutcome().GetExitCode() != 0 || len(b.commands) != 1 {
				t.Errorf("%d commands ran, the job is %v", len(b.commands), job)
			}
			for name, pair := range map[string][2][]byte{
				"stdin": {b.commands[0].taken, stdin}, "stdout": {gotOut.Bytes(), stdout}, "stderr": {gotErr.Bytes(), stderr},
			} {
				if sha256.Sum256(pair[0]) != sha256.Sum256(pair[1]) {
					t.Errorf("%s differs: %d bytes, want %d", name, len(pair[0]), len(pair[1]))
				}
			}
			cuts.Add(int64(len(b.ids())) - 1)
		})
	}
	t.Cleanup(func() { t.Logf("%d connections broke in %d rounds", cuts.Load(), rounds) })
}

func TestACommandWithoutARequestIDIsExactToo(t *testing.T) {
	b := newBroker(t)
	stdin, stdout := randomBytes(3<<20), randomBytes(3<<20)
	var story sync.WaitGroup
	story.Go(func() { exchange(b.awaitCommand(1), stdout, nil) })
	started := make(chan struct{})
	story.Go(func() {
		<-started
		for range 5 {
			b.kill()
			b.start()
			time.Sleep(20 * time.Millisecond)
		}
	})
	var got bytes.Buffer
	_, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{
		Stdin: bytes.NewReader(stdin), Stdout: &got, Started: func(*berthv1.Job) { close(started) },
	})
	story.Wait()
	if err != nil || !bytes.Equal(got.Bytes(), stdout) || !bytes.Equal(b.commands[0].taken, stdin) {
		t.Errorf("err %v, stdout equal %v, stdin equal %v", err, bytes.Equal(got.Bytes(), stdout), bytes.Equal(b.commands[0].taken, stdin))
	}
	if !b.commands[0].spec.GetStdin().GetOpen() {
		t.Error("stdin was not opened")
	}
}

func TestTheEndIsAcknowledged(t *testing.T) {
	b := newBroker(t)
	var story sync.WaitGroup
	story.Go(func() { b.awaitCommand(1).exit(3) })
	job, err := b.dial().Exec(testContext(t), "sb_1", &berthv1.JobSpec{Shell: "x"}, client.ExecIO{})
	story.Wait()
	if err != nil || job.GetOutcome().GetExitCode() != 3 || b.commands[0].ends != 1 {
		t.Errorf("job %v, err %v, %d acknowledgements", job, err, b.commands[0].ends)
	}
	if b.commands[0].spec.GetStdin() != nil {
		t.Error("stdin was opened")
	}
}

func TestStdinIsReadNoFurtherAheadThanTheWindow(t *testing.T) {
	b := newBroker(t)
	var read atomic.Int64
	endless := readerFunc(func(data []byte) (int, error) {
		read.Add(int64(len(data)))
		return len(data), nil
	})
	ctx, cancel := context.WithCancel(testContext(t))
	var story sync.WaitGroup
	story.Go(func() {
		b.awaitCommand(1) // it reads nothing
		time.Sleep(300 * time.Millisecond)
		cancel()
	})
	_, err := b.dial().Exec(ctx, "sb_1", nil, client.ExecIO{Stdin: endless})
	story.Wait()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("err %v", err)
	}
	if n := read.Load(); n < 1<<20 || n > 1<<20+pipeBytes {
		t.Errorf("%d bytes were read of a stdin that the command leaves alone", n)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(data []byte) (int, error) { return f(data) }

func TestAStartThatWasLost(t *testing.T) {
	vanishing := &berthv1.JobSpec{Shell: "vanish"}
	t.Run("is not repeated without a request id, and that is said", func(t *testing.T) {
		b := newBroker(t)
		job, err := b.dial().Exec(testContext(t), "sb_1", vanishing, client.ExecIO{})
		var unknown *client.UnknownStartError
		if !errors.As(err, &unknown) || job != nil || len(b.ids()) != 1 {
			t.Errorf("job %v, err %v after %d tries", job, err, len(b.ids()))
		}
		if client.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "it is not known whether the command began in sandbox sb_1") {
			t.Errorf("err %v", err)
		}
	})
	t.Run("is repeated with a request id, and gets the same job", func(t *testing.T) {
		b := newBroker(t)
		spec := &berthv1.JobSpec{Shell: "vanish"}
		var story sync.WaitGroup
		story.Go(func() {
			c := b.awaitCommand(1)
			for len(b.ids()) < 3 {
				time.Sleep(time.Millisecond)
			}
			c.change(func() { c.spec = &berthv1.JobSpec{Shell: "stay"} })
			c.exit(0)
		})
		job, err := b.dial().Exec(testContext(t), "sb_1", spec, client.ExecIO{RequestID: "mine"})
		story.Wait()
		if err != nil || job.GetId() != "job_1" || len(b.commands) != 1 {
			t.Errorf("job %v, err %v, %d commands", job, err, len(b.commands))
		}
	})
	t.Run("is repeated where nothing was done", func(t *testing.T) {
		b := newBroker(t)
		b.refuse = []error{recovering(time.Millisecond), recovering(time.Millisecond)}
		var story sync.WaitGroup
		story.Go(func() { b.awaitCommand(1).exit(0) })
		if _, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{}); err != nil || len(b.ids()) != 3 {
			t.Errorf("err %v after %d tries", err, len(b.ids()))
		}
		story.Wait()
	})
	t.Run("is what the broker says where that refuses it", func(t *testing.T) {
		b := newBroker(t)
		b.refuse = []error{failure(codes.NotFound, "SANDBOX_NOT_FOUND", nil)}
		_, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{})
		if !client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND) || len(b.ids()) != 1 {
			t.Errorf("err %v after %d tries", err, len(b.ids()))
		}
	})
	t.Run("never left where no broker is", func(t *testing.T) {
		b := newBroker(t)
		b.kill()
		_, err := b.dial(client.WithRetryTimeout(time.Minute, 200*time.Millisecond)).Exec(testContext(t), "sb_1", nil, client.ExecIO{})
		var gone *client.UnreachableError
		var unknown *client.UnknownStartError
		if !errors.As(err, &gone) || errors.As(err, &unknown) {
			t.Errorf("err %v", err)
		}
		b.start()
	})
}

func TestAStayEnds(t *testing.T) {
	stdinMayFail := make(chan struct{})
	for _, test := range []struct {
		name  string
		story func(*broker, *command)
		io    client.ExecIO
		check func(error) bool
	}{
		{"with its own error when the machine is stopped", func(b *broker, c *command) {
			b.change(func() {
				b.job = &berthv1.Job{Id: c.id, State: berthv1.JobState_JOB_STATE_UNKNOWN}
				b.refuse = []error{failure(codes.Unavailable, "GUEST_UNREACHABLE", nil)}
			})
			b.kill()
			b.start()
		}, client.ExecIO{}, func(err error) bool {
			var unknown *client.UnknownOutcomeError
			return errors.As(err, &unknown)
		}},
		{"with the broker's error when the job is gone", func(b *broker, _ *command) {
			b.change(func() { b.refuse = []error{failure(codes.NotFound, "JOB_NOT_FOUND", nil)} })
			b.kill()
			b.start()
		}, client.ExecIO{}, func(err error) bool { return client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND) }},
		{"with the writer's error", func(_ *broker, c *command) {
			c.write(berthv1.Stream_STREAM_STDERR, []byte("0123456789abcdef"))
		}, client.ExecIO{Stderr: &failingWriter{left: 12}}, func(err error) bool { return errors.Is(err, errFull) }},
		{"with the reader's error", func(*broker, *command) { close(stdinMayFail) },
			client.ExecIO{Stdin: readerFunc(func([]byte) (int, error) {
				<-stdinMayFail
				return 0, errFull
			})},
			func(err error) bool {
				return errors.Is(err, errFull) && strings.Contains(err.Error(), "standard input")
			}},
		{"with what is missing, when the broker sends less than there is", func(_ *broker, c *command) {
			c.exit(0)
			c.change(func() { c.job.Stdout.Exit = &berthv1.OutputStats_EndAtExit{EndAtExit: 5} })
		}, client.ExecIO{}, func(err error) bool {
			return err != nil && strings.Contains(err.Error(), "sent its stdout up to byte 0 only, of 5")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			started := make(chan struct{})
			var story sync.WaitGroup
			if strings.Contains(test.name, "less than") {
				story.Go(func() { test.story(b, b.awaitCommand(1)) })
			} else {
				test.io.Started = func(*berthv1.Job) { close(started) }
				story.Go(func() {
					<-started
					test.story(b, b.awaitCommand(1))
				})
			}
			job, err := b.dial().Exec(testContext(t), "sb_1", nil, test.io)
			story.Wait()
			if !test.check(err) || job.GetId() != "job_1" {
				t.Errorf("job %v, err %v", job, err)
			}
		})
	}
}

func TestGapsAreTold(t *testing.T) {
	b := newBroker(t)
	var story sync.WaitGroup
	story.Go(func() {
		c := b.awaitCommand(1)
		c.change(func() { c.dropped = [2]uint64{3, 12} })
		c.write(berthv1.Stream_STREAM_STDOUT, []byte("0123456789abcdef"))
		c.exit(0)
	})
	var got bytes.Buffer
	var gaps []string
	_, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{
		Stdout: &got, Gap: func(stream berthv1.Stream, from, to uint64) { gaps = append(gaps, fmt.Sprint(stream, from, to)) },
	})
	story.Wait()
	if err != nil || got.String() != "012cdef" || fmt.Sprint(gaps) != "[STREAM_STDOUT 3 12]" {
		t.Errorf("got %q, gaps %v, err %v", got.String(), gaps, err)
	}
}

func TestSizesAndSignalsArrive(t *testing.T) {
	b := newBroker(t)
	resize, signals := make(chan *berthv1.TerminalSize), make(chan int)
	var story sync.WaitGroup
	story.Go(func() {
		c := b.awaitCommand(1)
		resize <- &berthv1.TerminalSize{Cols: 100, Rows: 30}
		signals <- 2
		for {
			c.mu.Lock()
			sizes, got, changed := len(c.sizes), len(c.signals), c.changed
			c.mu.Unlock()
			if sizes > 0 && got > 0 {
				break
			}
			<-changed
		}
		b.kill() // the size is sent again, the signal is not
		b.start()
		for {
			c.mu.Lock()
			sizes, changed := len(c.sizes), c.changed
			c.mu.Unlock()
			if sizes > 1 {
				break
			}
			<-changed
		}
		c.exit(0)
	})
	_, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{Resize: resize, Signals: signals})
	story.Wait()
	c := b.commands[0]
	if err != nil || len(c.sizes) != 2 || c.sizes[1].GetCols() != 100 || len(c.signals) != 1 || c.signals[0] != 2 {
		t.Errorf("err %v, sizes %v, signals %v", err, c.sizes, c.signals)
	}
}

func TestAttachGoesOnBehindWhatIsThere(t *testing.T) {
	b := newBroker(t)
	c := b.beginCommand(&berthv1.ExecStart{SandboxId: "sb_1"})
	c.write(berthv1.Stream_STREAM_STDOUT, []byte("before, after"))
	if next, err := b.dial().Feed(testContext(t), c.id, 0, strings.NewReader("one "), false); err != nil || next != 4 {
		t.Fatalf("fed up to %d, err %v", next, err)
	}
	if at, err := b.dial().InputOffset(testContext(t), c.id); err != nil || at != 4 {
		t.Errorf("input is at %d, err %v", at, err)
	}
	var story sync.WaitGroup
	story.Go(func() {
		c.readInput()
		c.exit(0)
	})
	var got bytes.Buffer
	_, err := b.dial().Attach(testContext(t), c.id, 8, 0, client.ExecIO{Stdin: strings.NewReader("two"), Stdout: &got})
	story.Wait()
	if err != nil || got.String() != "after" || string(c.taken) != "one two" {
		t.Errorf("got %q, input %q, err %v", got.String(), c.taken, err)
	}
	if _, err := b.dial().Attach(testContext(t), "job_none", 0, 0, client.ExecIO{Stdin: strings.NewReader("")}); !client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND) {
		t.Errorf("a job that is none: %v", err)
	}
}

func TestAttachWithoutInputTakesNothingFromWhoHasIt(t *testing.T) {
	b := newBroker(t)
	c := b.beginCommand(&berthv1.ExecStart{SandboxId: "sb_1"})
	c.write(berthv1.Stream_STREAM_STDOUT, []byte("before, during, "))
	c.write(berthv1.Stream_STREAM_STDERR, []byte("warning"))
	var got, errs bytes.Buffer
	started := make(chan struct{})
	var story sync.WaitGroup
	story.Go(func() {
		<-started
		b.kill()
		c.write(berthv1.Stream_STREAM_STDOUT, []byte("after"))
		b.start()
		c.exit(3)
	})
	job, err := b.dial().Attach(testContext(t), c.id, 8, 0, client.ExecIO{Stdout: &got, Stderr: &errs, Started: func(*berthv1.Job) { close(started) }})
	story.Wait()
	if err != nil || job.GetOutcome().GetExitCode() != 3 || got.String() != "during, after" || errs.String() != "warning" {
		t.Errorf("got %q and %q, job %v, err %v", got.String(), errs.String(), job, err)
	}
	if attaches := b.attaches.Load(); attaches != 0 {
		t.Errorf("it attached %d times, which takes the input", attaches)
	}
}

func TestFeedIsExactOverRestarts(t *testing.T) {
	b := newBroker(t)
	c := b.beginCommand(&berthv1.ExecStart{SandboxId: "sb_1"})
	input := randomBytes(5<<20 + 17)
	var story sync.WaitGroup
	story.Go(func() {
		for range 4 {
			<-b.entered
			b.kill()
			time.Sleep(10 * time.Millisecond)
			b.start()
		}
	})
	story.Go(func() { c.readInput() })
	next, err := b.dial().Feed(testContext(t), c.id, 0, bytes.NewReader(input), true)
	story.Wait()
	if err != nil || next != uint64(len(input)) || !bytes.Equal(c.taken, input) || !c.closed {
		t.Errorf("fed up to %d, err %v, equal %v, closed %v", next, err, bytes.Equal(c.taken, input), c.closed)
	}
}

func TestInputThatTwoAppendIsWholeAndThereOnceOverBrokenConnections(t *testing.T) {
	b := newBroker(t)
	b.kill()
	var left atomic.Int64
	left.Store(20)
	b.listen = func(listener net.Listener) net.Listener {
		return brittle{Listener: listener, limit: 40 << 10, left: &left}
	}
	b.start()
	c := b.beginCommand(&berthv1.ExecStart{SandboxId: "sb_1"})
	const lines = 300
	ctx := testContext(t)
	var reading, writing sync.WaitGroup
	reading.Go(func() { c.readInput() })
	for _, who := range []string{"a", "b"} {
		read, write := io.Pipe() // each write is a read of its own
		writing.Go(func() {
			for i := range lines {
				if _, err := fmt.Fprintf(write, "%s %d %s\n", who, i, strings.Repeat(who, 1000)); err != nil {
					t.Error(err)
				}
			}
			_ = write.Close()
		})
		writing.Go(func() {
			if err := b.dial().AppendInput(ctx, c.id, read, false); err != nil {
				t.Error(err)
				_ = read.CloseWithError(err)
			}
		})
	}
	writing.Wait()
	if err := b.dial().AppendInput(ctx, c.id, strings.NewReader(""), true); err != nil {
		t.Error(err)
	}
	reading.Wait()
	seen := map[string]int{}
	for line := range strings.Lines(string(c.taken)) {
		var who, rest string
		var number int
		if _, err := fmt.Sscan(line, &who, &number, &rest); err != nil || number != seen[who] || rest != strings.Repeat(who, 1000) {
			t.Fatalf("after %v: %.40q (%v)", seen, line, err)
		}
		seen[who]++
	}
	if seen["a"] != lines || seen["b"] != lines || !c.closed {
		t.Errorf("%v, closed %v", seen, c.closed)
	}
}

func TestFollowedOutputIsExactOverBrokenConnections(t *testing.T) {
	for round := range 20 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			b.kill()
			var left atomic.Int64
			left.Store(6)
			b.listen = func(listener net.Listener) net.Listener {
				return brittle{Listener: listener, limit: 400 << 10, left: &left}
			}
			b.start()
			c := b.beginCommand(&berthv1.ExecStart{SandboxId: "sb_1"})
			c.dropped = [2]uint64{700_000, 700_123}
			want := randomBytes(1 << 20)
			var story sync.WaitGroup
			story.Go(func() {
				for rest := want; len(rest) > 0; {
					n := min(len(rest), 1+rand.IntN(32<<10))
					c.write(berthv1.Stream_STREAM_STDOUT, rest[:n])
					rest = rest[n:]
				}
				c.exit(0)
			})
			var got bytes.Buffer
			next, gaps, err := b.dial().CopyOutput(testContext(t), c.id, berthv1.Stream_STREAM_STDOUT, 0, &got)
			story.Wait()
			if err != nil || next != uint64(len(want)) || len(gaps) != 1 {
				t.Fatalf("next %d, gaps %v, err %v", next, gaps, err)
			}
			from, to := gaps[0].GetFrom(), gaps[0].GetTo()
			if to != 700_123 || !bytes.Equal(got.Bytes(), append(append([]byte{}, want[:from]...), want[to:]...)) {
				t.Errorf("gap %v, %d bytes", gaps[0], got.Len())
			}
		})
	}
}

// A Read that blocks must not keep the caller.
func TestExecDoesNotWaitForABlockedStdin(t *testing.T) {
	b := newBroker(t)
	read, write := io.Pipe()
	var story sync.WaitGroup
	story.Go(func() { b.awaitCommand(1).exit(0) })
	if _, err := b.dial().Exec(testContext(t), "sb_1", nil, client.ExecIO{Stdin: read}); err != nil {
		t.Error(err)
	}
	story.Wait()
	if err := write.Close(); err != nil {
		t.Error(err)
	}
}
