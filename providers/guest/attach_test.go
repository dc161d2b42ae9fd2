package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// attached is a caller of Attach, and what it has received.
type attached struct {
	t      testing.TB
	stream guestv1.GuestService_AttachClient
	cancel context.CancelFunc
	sent   uint64 // bytes of input

	mu       sync.Mutex
	opened   *guestv1.Status
	done     *guestv1.Status
	output   [3][]byte
	gaps     []*berthv1.OutputGap
	acked    uint64
	err      error
	received chan struct{} // has a token when something came
	ended    chan struct{}
}

// attach opens an Attach and begins to receive.
func (m *machine) attach(open *guestv1.AttachOpen) *attached {
	m.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stream, err := m.calls.Attach(ctx)
	must(m.t, err)
	must(m.t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: open}}))
	a := &attached{t: m.t, stream: stream, cancel: cancel, received: make(chan struct{}, 1), ended: make(chan struct{})}
	go a.receive()
	m.t.Cleanup(func() {
		cancel()
		<-a.ended
	})
	return a
}

// attachStart begins a job in the same round trip.
func (m *machine) attachStart(r *guestv1.StartRequest, change ...func(*guestv1.AttachOpen)) *attached {
	m.t.Helper()
	open := &guestv1.AttachOpen{JobId: r.GetJobId(), Start: r, OwnInput: true}
	for _, c := range change {
		c(open)
	}
	return m.attach(open)
}

func (a *attached) receive() {
	defer close(a.ended)
	for {
		message, err := a.stream.Recv()
		a.mu.Lock()
		if err != nil {
			a.err = err
			a.mu.Unlock()
			return
		}
		a.take(message)
		a.mu.Unlock()
		select {
		case a.received <- struct{}{}:
		default:
		}
	}
}

func (a *attached) take(message *guestv1.AttachResponse) {
	if a.done != nil {
		a.t.Errorf("after done: %v", message)
	}
	switch m := message.GetMessage().(type) {
	case *guestv1.AttachResponse_Opened:
		if a.opened != nil {
			a.t.Error("opened twice")
		}
		a.opened = m.Opened
		return
	case *guestv1.AttachResponse_Chunk:
		c := m.Chunk
		if c.GetTime() == nil || len(c.GetData()) == 0 || len(c.GetData()) > 256<<10 {
			a.t.Errorf("a chunk of %d bytes at %v", len(c.GetData()), c.GetTime())
		}
		a.output[c.GetStream()] = append(a.output[c.GetStream()], c.GetData()...)
	case *guestv1.AttachResponse_Gap:
		a.gaps = append(a.gaps, m.Gap)
	case *guestv1.AttachResponse_InputAcknowledged:
		if m.InputAcknowledged < a.acked {
			a.t.Errorf("acknowledged %d after %d", m.InputAcknowledged, a.acked)
		}
		a.acked = m.InputAcknowledged
	case *guestv1.AttachResponse_Done:
		a.done = m.Done
	}
	if a.opened == nil {
		a.t.Errorf("before opened: %v", message)
	}
}

func (a *attached) stdout() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return string(a.output[berthv1.Stream_STREAM_STDOUT])
}

func (a *attached) acknowledged() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.acked
}

// until waits until a condition on what was received is true.
func (a *attached) until(what string, check func() bool) {
	a.t.Helper()
	over := time.After(10 * time.Second)
	for {
		a.mu.Lock()
		ok := check()
		a.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-a.received:
		case <-a.ended:
			a.mu.Lock()
			defer a.mu.Unlock()
			if !check() {
				a.t.Fatalf("ended with %v before %s; got %q", a.err, what, a.output)
			}
			return
		case <-over:
			a.t.Fatalf("never %s; got %.200q", what, a.output)
		}
	}
}

func (a *attached) says(text string) {
	a.t.Helper()
	a.until(fmt.Sprintf("it said %q", text), func() bool {
		return bytes.Contains(a.output[berthv1.Stream_STREAM_STDOUT], []byte(text))
	})
}

// wait returns the job's status when the stream has ended well.
func (a *attached) wait() *guestv1.Status {
	a.t.Helper()
	select {
	case <-a.ended:
	case <-time.After(20 * time.Second):
		a.t.Fatal("the Attach does not end")
	}
	if !errors.Is(a.err, io.EOF) || a.done == nil {
		a.t.Fatalf("ended with %v, done %v", a.err, a.done)
	}
	return a.done
}

func (a *attached) send(message *guestv1.AttachRequest) {
	a.t.Helper()
	if err := a.stream.Send(message); err != nil && !errors.Is(err, io.EOF) {
		a.t.Fatal(err)
	}
}

func inputAt(offset uint64, data []byte, eof bool) *guestv1.AttachRequest {
	return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Input{Input: &guestv1.AttachInput{Offset: offset, Data: data, Eof: eof}}}
}

func (a *attached) write(data string, eof bool) {
	a.t.Helper()
	a.send(inputAt(a.sent, []byte(data), eof))
	a.sent += uint64(len(data))
}

func openStdin(r *guestv1.StartRequest) *guestv1.StartRequest {
	r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	return r
}

func inTerminal(r *guestv1.StartRequest, cols, rows uint32) *guestv1.StartRequest {
	r.Command.Tty = &berthv1.TerminalSize{Cols: cols, Rows: rows}
	return r
}

func TestAttachStartsSendsOutputAndEndsWithTheOutcome(t *testing.T) {
	m := boot(t)
	r := shell("echo out; echo err >&2; sleep 0.1; echo more; exit 3")
	a := m.attachStart(r)
	final := a.wait()
	if final.GetOutcome().GetExitCode() != 3 || a.opened.GetJobId() != r.GetJobId() || a.opened.GetDone() {
		t.Errorf("opened %v, done %v", a.opened, final)
	}
	if got := string(a.output[berthv1.Stream_STREAM_STDOUT]); got != "out\nmore\n" {
		t.Errorf("stdout %q", got)
	}
	if got := string(a.output[berthv1.Stream_STREAM_STDERR]); got != "err\n" {
		t.Errorf("stderr %q", got)
	}
	// Again, from other offsets, of one stream.
	b := m.attach(&guestv1.AttachOpen{JobId: r.GetJobId(), StdoutOffset: 4, Streams: []berthv1.Stream{berthv1.Stream_STREAM_STDOUT}})
	b.wait()
	if got := string(b.output[berthv1.Stream_STREAM_STDOUT]); got != "more\n" || len(b.output[berthv1.Stream_STREAM_STDERR]) != 0 {
		t.Errorf("again %q", b.output)
	}
	// Beyond the end there is nothing, and no error.
	c := m.attach(&guestv1.AttachOpen{JobId: r.GetJobId(), StdoutOffset: 400})
	if got := c.wait(); got.GetOutcome().GetExitCode() != 3 || len(c.output[berthv1.Stream_STREAM_STDOUT]) != 0 {
		t.Errorf("beyond %v", got)
	}
}

func TestAttachesThatMakeNoSenseAreRefused(t *testing.T) {
	m := boot(t)
	running := openStdin(argv("cat"))
	m.begin(running)
	open := func(o *guestv1.AttachOpen) *guestv1.AttachRequest {
		return &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: o}}
	}
	ours := open(&guestv1.AttachOpen{JobId: running.GetJobId()})
	for name, test := range map[string]struct {
		code     codes.Code
		messages []*guestv1.AttachRequest
	}{
		"no message":            {codes.InvalidArgument, nil},
		"input first":           {codes.InvalidArgument, []*guestv1.AttachRequest{inputAt(0, nil, false)}},
		"an empty message":      {codes.InvalidArgument, []*guestv1.AttachRequest{{}}},
		"an unknown job":        {codes.NotFound, []*guestv1.AttachRequest{open(&guestv1.AttachOpen{JobId: newID()})}},
		"two jobs":              {codes.InvalidArgument, []*guestv1.AttachRequest{open(&guestv1.AttachOpen{JobId: newID(), Start: argv("true")})}},
		"a third stream":        {codes.InvalidArgument, []*guestv1.AttachRequest{open(&guestv1.AttachOpen{JobId: running.GetJobId(), Streams: []berthv1.Stream{7}})}},
		"opened twice":          {codes.InvalidArgument, []*guestv1.AttachRequest{ours, ours}},
		"an empty message then": {codes.InvalidArgument, []*guestv1.AttachRequest{ours, {}}},
		"a gap in the input":    {codes.InvalidArgument, []*guestv1.AttachRequest{ours, inputAt(9, []byte("x"), false)}},
		"too much input":        {codes.InvalidArgument, []*guestv1.AttachRequest{ours, inputAt(0, make([]byte, 1<<20+1), false)}},
		"signal 65":             {codes.InvalidArgument, []*guestv1.AttachRequest{ours, {Message: &guestv1.AttachRequest_Signal{Signal: 65}}}},
		"a size of zero":        {codes.InvalidArgument, []*guestv1.AttachRequest{ours, {Message: &guestv1.AttachRequest_Resize{Resize: &berthv1.TerminalSize{Cols: 9}}}}},
		"a size of no terminal": {codes.FailedPrecondition, []*guestv1.AttachRequest{ours, {Message: &guestv1.AttachRequest_Resize{Resize: &berthv1.TerminalSize{Cols: 9, Rows: 9}}}}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			stream, err := m.calls.Attach(ctx)
			must(t, err)
			for _, message := range test.messages {
				_ = stream.Send(message)
			}
			if test.messages == nil {
				must(t, stream.CloseSend())
			}
			for err == nil {
				_, err = stream.Recv()
			}
			if status.Code(err) != test.code {
				t.Errorf("got %v, want %v", err, test.code)
			}
		})
	}
}

func TestUntilSealedGoesOnForWhatADaemonWrites(t *testing.T) {
	m := boot(t)
	script := "(sleep 0.4; echo late) & echo early"
	a := m.attachStart(shell(script))
	if a.wait(); a.stdout() != "early\n" || !a.done.GetOutcome().GetOutputStillOpen() {
		t.Errorf("until done: %q, %v", a.stdout(), a.done)
	}
	b := m.attachStart(shell(script), func(o *guestv1.AttachOpen) { o.UntilSealed = true })
	if b.wait(); b.stdout() != "early\nlate\n" || !b.done.GetStdout().GetSealed() {
		t.Errorf("until sealed: %q, %v", b.stdout(), b.done)
	}
}

func TestInputIsTakenOnceAndInOrder(t *testing.T) {
	m := boot(t)
	a := m.attachStart(openStdin(argv("cat")))
	a.write("one", false)
	a.says("one")
	a.send(inputAt(0, []byte("one"), false)) // again
	a.send(inputAt(1, []byte("ne2"), false)) // overlapping
	a.send(inputAt(4, []byte("3"), true))    // the end
	a.send(inputAt(4, []byte("3"), true))    // the end again
	a.send(inputAt(0, nil, false))           // nothing
	final := a.wait()
	if a.stdout() != "one23" || final.GetInputOffset() != 5 || !final.GetInputClosed() || a.acked != 5 {
		t.Errorf("stdout %q, acknowledged %d, %v", a.stdout(), a.acked, final)
	}
	b := m.attachStart(openStdin(argv("sh", "-c", "cat; sleep 30")))
	b.write("x", true)
	b.says("x")
	b.send(inputAt(1, []byte("y"), false))
	<-b.ended
	wantRefusal(t, b.err, "INPUT_CLOSED")
}

func TestInputOfAHundredMebibytesComesBackUnchanged(t *testing.T) {
	m := boot(t)
	size := 100 << 20
	if testing.Short() {
		size = 8 << 20
	}
	data := make([]byte, size)
	random := rand.New(rand.NewPCG(1, 2))
	for i := 0; i+8 <= len(data); i += 8 {
		v := random.Uint64()
		for k := range 8 {
			data[i+k] = byte(v >> (8 * k))
		}
	}
	r := openStdin(argv("cat"))
	r.Command.OutputLimitBytes = 4 * uint64(size)
	a := m.attachStart(r)
	for offset := 0; offset < size; offset += 256 << 10 {
		end := min(size, offset+256<<10)
		a.send(inputAt(uint64(offset), data[offset:end], end == size))
	}
	a.wait()
	if got := a.output[berthv1.Stream_STREAM_STDOUT]; sha256.Sum256(got) != sha256.Sum256(data) || len(a.gaps) != 0 {
		t.Errorf("%d bytes came back as %d other ones, gaps %v", size, len(got), a.gaps)
	}
}

func TestACommandThatDoesNotReadHoldsUpNothing(t *testing.T) {
	m := boot(t)
	a := m.attachStart(openStdin(shell("trap 'echo usr1' USR1; i=0; while [ $i -lt 50 ]; do echo out; sleep 0.05; i=$((i+1)); done")))
	a.says("out")
	for range 32 {
		a.write(string(make([]byte, 64<<10)), false) // 2 MiB in all
	}
	a.until("a buffer full is acknowledged", func() bool { return a.acked >= 1<<20 })
	a.send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Signal{Signal: 10}})
	a.says("usr1")
	if got := a.acknowledged(); got > 1<<20+128<<10 {
		t.Errorf("%d bytes are acknowledged", got)
	}
	before := len(a.stdout())
	a.until("output goes on", func() bool { return len(a.output[berthv1.Stream_STREAM_STDOUT]) > before+8 })
	// A command that ends, or closes its stdin, drops the rest.
	b := m.attachStart(openStdin(shell("exec <&-; sleep 0.5; echo end")))
	for range 40 {
		b.write(string(make([]byte, 64<<10)), false)
	}
	if final := b.wait(); b.stdout() != "end\n" || !final.GetInputClosed() || b.acked != b.sent {
		t.Errorf("stdout %q, acknowledged %d of %d, %v", b.stdout(), b.acked, b.sent, final)
	}
}

func TestTheLastWhoTakesTheInputOverHasIt(t *testing.T) {
	m := boot(t)
	r := inTerminal(openStdin(argv("cat")), 80, 24)
	a := m.attachStart(r)
	a.write("a\n", false)
	a.says("a\r\n")
	b := m.attach(&guestv1.AttachOpen{JobId: r.GetJobId(), OwnInput: true})
	b.until("opened", func() bool { return b.opened != nil })
	if b.opened.GetInputOffset() != 2 {
		t.Errorf("opened %v", b.opened)
	}
	watcher := m.attach(&guestv1.AttachOpen{JobId: r.GetJobId()})
	watcher.says("a\r\n")
	for _, not := range []*attached{a, watcher} {
		not.send(inputAt(2, []byte("stale\n"), false))
		<-not.ended
		wantRefusal(t, not.err, "INPUT_TAKEN")
	}
	_, err := m.calls.Input(t.Context(), &guestv1.InputRequest{JobId: r.GetJobId(), Offset: 2, Data: []byte("stale\n")})
	wantRefusal(t, err, "INPUT_TAKEN")
	_, err = m.calls.Resize(t.Context(), &guestv1.ResizeRequest{JobId: r.GetJobId(), Size: &berthv1.TerminalSize{Cols: 9, Rows: 9}})
	wantRefusal(t, err, "INPUT_TAKEN")
	b.sent = 2
	b.write("b\n", false)
	b.until("the terminal's echo and cat's have come", func() bool {
		return bytes.Count(b.output[berthv1.Stream_STREAM_STDOUT], []byte("b\r\n")) == 2
	})
	b.cancel()
	<-b.ended
	// Nobody has it now.
	eventually(t, "input is free again", func() bool {
		_, err := m.calls.Input(t.Context(), &guestv1.InputRequest{JobId: r.GetJobId(), Offset: 4, Data: []byte("c\n")})
		return err == nil
	})
	_, err = m.calls.CloseInput(t.Context(), &guestv1.CloseInputRequest{JobId: r.GetJobId(), Offset: 6})
	must(t, err)
	if got := m.wait(r.GetJobId()); got.GetOutcome().GetExitCode() != 0 {
		t.Errorf("in the end %v", got)
	}
}

func TestInputThatManyAppendIsWholeAndThereOnce(t *testing.T) {
	m := boot(t)
	r := openStdin(argv("cat"))
	m.begin(r)
	appendInput := func(id, data string, eof bool) (*guestv1.AppendInputResponse, error) {
		return m.calls.AppendInput(t.Context(), &guestv1.AppendInputRequest{JobId: r.GetJobId(), RequestId: id, Data: []byte(data), Eof: eof})
	}
	const writers, lines = 4, 50
	var writing sync.WaitGroup
	for who := range writers {
		writing.Go(func() {
			for i := range lines {
				line := fmt.Sprintf("%d %d %s\n", who, i, strings.Repeat("x", 3000))
				first, err := appendInput(fmt.Sprint(who, "/", i), line, false)
				if err != nil || first.GetNextOffset() != first.GetOffset()+uint64(len(line)) {
					t.Errorf("%d %d: %v (%v)", who, i, first, err)
				}
				if again, err := appendInput(fmt.Sprint(who, "/", i), line, false); err != nil || again.GetOffset() != first.GetOffset() {
					t.Errorf("%d %d again: %v (%v)", who, i, again, err)
				}
			}
		})
	}
	writing.Wait()
	for range 2 { // without an id it is written again
		if _, err := appendInput("", "the end\n", false); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if _, err := appendInput("", "", true); err != nil {
			t.Error(err)
		}
	}
	_, err := appendInput("late", "x", false)
	wantRefusal(t, err, "INPUT_CLOSED")
	if _, err := appendInput("0/49", "x", false); err != nil {
		t.Errorf("what was done before the end, again: %v", err)
	}
	if got := m.wait(r.GetJobId()); got.GetOutcome().GetExitCode() != 0 {
		t.Errorf("in the end %v", got)
	}
	seen, ends := map[string]int{}, 0
	read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId(), Stream: berthv1.Stream_STREAM_STDOUT, MaxBytes: 1 << 20})
	must(t, err)
	for line := range strings.Lines(string(read.GetData())) {
		words := strings.Fields(line)
		if line == "the end\n" {
			ends++
		} else if len(words) != 3 || words[1] != fmt.Sprint(seen[words[0]]) || len(words[2]) != 3000 {
			t.Fatalf("after %v: %.40q", seen, line)
		} else {
			seen[words[0]]++
		}
	}
	if len(seen) != writers || seen["0"] != lines || ends != 2 {
		t.Errorf("%v, and %d ends", seen, ends)
	}
}

func TestInputThatHasNoRoomIsNotAppendedInPart(t *testing.T) {
	m := boot(t)
	r := openStdin(argv("sleep", "1000"))
	m.begin(r)
	appendInput := func(data []byte) (*guestv1.AppendInputResponse, error) {
		return m.calls.AppendInput(t.Context(), &guestv1.AppendInputRequest{JobId: r.GetJobId(), Data: data})
	}
	full := bytes.Repeat([]byte("x"), 1<<20)
	for range 2 { // a command that does not read: the pipe and the buffer take one, and no part of another
		got, err := appendInput(full)
		must(t, err)
		if got.GetOffset() != 0 && (got.GetOffset() != 1<<20 || got.GetNextOffset() != 1<<20) {
			t.Errorf("it was taken from %d to %d", got.GetOffset(), got.GetNextOffset())
		}
	}
	if _, err := appendInput(append(full, 'x')); status.Code(err) != codes.InvalidArgument {
		t.Errorf("too much at once: %v", err)
	}
	owner := m.attach(&guestv1.AttachOpen{JobId: r.GetJobId(), OwnInput: true})
	owner.until("opened", func() bool { return owner.opened != nil })
	if owner.opened.GetInputOffset() != 1<<20 {
		t.Errorf("opened %v", owner.opened)
	}
	_, err := appendInput([]byte("x"))
	wantRefusal(t, err, "INPUT_TAKEN")
	_, err = m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId()})
	must(t, err)
}

func TestInputByUnaryCalls(t *testing.T) {
	m := boot(t)
	r := openStdin(argv("cat"))
	m.begin(r)
	input := func(offset uint64, data string) (uint64, error) {
		response, err := m.calls.Input(t.Context(), &guestv1.InputRequest{JobId: r.GetJobId(), Offset: offset, Data: []byte(data)})
		return response.GetNextOffset(), err
	}
	closeAt := func(offset uint64) error {
		_, err := m.calls.CloseInput(t.Context(), &guestv1.CloseInputRequest{JobId: r.GetJobId(), Offset: offset})
		return err
	}
	for range 2 { // repeated, it changes nothing
		if next, err := input(0, "abc"); err != nil || next != 3 {
			t.Errorf("input: %d, %v", next, err)
		}
	}
	if _, err := input(4, "x"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a gap: %v", err)
	}
	wantRefusal(t, closeAt(4), "INPUT_MISSING")
	if err := closeAt(2); status.Code(err) != codes.InvalidArgument {
		t.Errorf("too soon an end: %v", err)
	}
	for range 2 {
		must(t, closeAt(3))
	}
	m.wait(r.GetJobId())
	read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId()})
	must(t, err)
	if string(read.GetData()) != "abc" {
		t.Errorf("read %v", read)
	}
	must(t, closeAt(3))
	r = openStdin(argv("sleep", "30"))
	m.begin(r)
	taken := uint64(0)
	for i := range 20 {
		next, err := input(taken, string(make([]byte, 256<<10)))
		must(t, err)
		if next == taken {
			if i < 4 || next < 1<<20 || next > 1<<20+128<<10 {
				t.Errorf("full after %d calls at %d", i, next)
			}
			return
		}
		taken = next
	}
	t.Error("a command that does not read took 5 MiB")
}

func TestATerminalHasItsSizeAndSeesItChange(t *testing.T) {
	m := boot(t)
	r := inTerminal(shell("trap 'stty size' WINCH; stty size; tty; echo $TERM; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; echo from the tty >/dev/tty; echo ready; while :; do sleep 0.02; done"), 120, 40)
	a := m.attachStart(r)
	a.says("ready")
	for _, want := range []string{"40 120\r\n/dev/pts/", "xterm-256color\r\nall\r\n", "from the tty"} {
		a.says(want)
	}
	a.send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Resize{Resize: &berthv1.TerminalSize{Cols: 99, Rows: 33}}})
	a.says("33 99")
	for ended := false; !ended; { // a shell whose child ends by itself at that moment ignores it
		a.write("\x03", false) // ^C
		select {
		case <-a.ended:
			ended = true
		case <-time.After(100 * time.Millisecond):
		}
	}
	final := a.wait()
	if final.GetOutcome().GetWaitStatus().GetSignal() != 2 || final.GetStderr().GetTotalBytes() != 0 {
		t.Errorf("after ^C %v", final)
	}
	detached := inTerminal(shell("stty size; read x; stty size; exit 4"), 10, 20)
	m.begin(detached)
	_, err := m.calls.Resize(t.Context(), &guestv1.ResizeRequest{JobId: detached.GetJobId(), Size: &berthv1.TerminalSize{Cols: 30, Rows: 40}})
	must(t, err)
	_, err = m.calls.Input(t.Context(), &guestv1.InputRequest{JobId: detached.GetJobId(), Data: []byte("x\n")})
	must(t, err)
	if got := m.wait(detached.GetJobId()); got.GetOutcome().GetExitCode() != 4 {
		t.Errorf("detached %v", got)
	}
	read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: detached.GetJobId()})
	must(t, err)
	if !strings.HasSuffix(string(read.GetData()), "40 30\r\n") {
		t.Errorf("after the change %q", read.GetData())
	}
	if os.Getuid() == 0 {
		must(t, os.Chmod(m.dir, 0o755))
		other := inTerminal(shell("echo by name >$(tty)"), 80, 24)
		other.Command.User = "nobody"
		b := m.attachStart(other)
		if got := b.wait(); got.GetOutcome().GetExitCode() != 0 || b.stdout() != "by name\r\n" {
			t.Errorf("another user's terminal: %q, %v", b.stdout(), got)
		}
	}
}

func TestTheEndOfATerminalsInput(t *testing.T) {
	m := boot(t)
	for name, test := range map[string]struct{ input, want string }{
		"after a line":      {"line\n", "line\r\nline\r\n"},
		"within a line":     {"part", "partpart"},
		"without any input": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := m.attachStart(inTerminal(argv("cat"), 80, 24))
			a.write(test.input, true)
			if final := a.wait(); final.GetOutcome().GetExitCode() != 0 || a.stdout() != test.want {
				t.Errorf("stdout %q, %v", a.stdout(), final)
			}
		})
	}
	reopens := m.attachStart(inTerminal(shell("echo a; exec <&- >&- 2>&-; sleep 0.3; echo b >/dev/tty; sleep 0.2; exit 3"), 80, 24))
	if final := reopens.wait(); final.GetOutcome().GetExitCode() != 3 || reopens.stdout() != "a\r\nb\r\n" {
		t.Errorf("a terminal that is closed and opened again: %q, %v", reopens.stdout(), final)
	}
	r := inTerminal(argv("sh", "-c", "cat; exit 5"), 80, 24)
	r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte("given\n")}}
	a := m.attachStart(r)
	if final := a.wait(); final.GetOutcome().GetExitCode() != 5 || a.stdout() != "given\r\ngiven\r\n" {
		t.Errorf("given bytes: %q, %v", a.stdout(), final)
	}
	if got := m.run(shell("echo x >/dev/tty")).GetStatus().GetOutcome(); got.GetExitCode() == 0 {
		t.Errorf("/dev/tty without a terminal: %v", got)
	}
}

func TestAReaderThatLeavesAndComesBack(t *testing.T) {
	m := boot(t)
	start := func(grace time.Duration) *guestv1.StartRequest {
		r := openStdin(argv("sh", "-c", "echo begun; exec sleep 600"))
		r.KillOnDisconnect, r.DisconnectGrace = true, durationpb.New(grace)
		return r
	}
	const grace = 2 * time.Second
	kept := start(grace)
	a := m.attachStart(kept)
	a.says("begun")
	a.cancel()
	<-a.ended
	b := m.attach(&guestv1.AttachOpen{JobId: kept.GetJobId()})
	b.says("begun")
	time.Sleep(grace + 100*time.Millisecond) // it has that long to end by mistake
	// A half-close says nothing.
	must(t, b.stream.CloseSend())
	time.Sleep(100 * time.Millisecond)
	select {
	case <-b.ended:
		t.Fatalf("ended beside a reader: %v, %v", b.err, b.done)
	default:
	}
	begun := time.Now()
	b.cancel()
	<-b.ended
	final := m.listed(kept.GetJobId())
	if took := time.Since(begun); final.GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED || took < grace {
		t.Errorf("after the reader left: %v after %v", final, took)
	}
}

// listed returns a job when it is done, without being a reader of it.
func (m *machine) listed(id string) (found *guestv1.Status) {
	m.t.Helper()
	eventually(m.t, "done", func() bool {
		list, err := m.calls.List(m.t.Context(), &guestv1.ListRequest{})
		must(m.t, err)
		for _, s := range list.GetStatuses() {
			if s.GetJobId() == id && s.GetDone() {
				found = s
			}
		}
		return found != nil
	})
	return found
}

func TestASlowReaderSlowsNoCommand(t *testing.T) {
	m := boot(t)
	r := argv("head", "-c", "300000000", "/dev/zero")
	r.Command.OutputLimitBytes = 8 << 20
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := m.calls.Attach(ctx)
	must(t, err)
	must(t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: r.GetJobId(), Start: r}}}))
	opened, err := stream.Recv()
	must(t, err)
	if opened.GetOpened() == nil {
		t.Errorf("first %v", opened)
	}
	final := m.wait(r.GetJobId()) // while this reader stands still
	if final.GetStdout().GetTotalBytes() != 300000000 {
		t.Errorf("done %v", final)
	}
	at, gaps := uint64(0), 0
	for {
		message, err := stream.Recv()
		must(t, err)
		if message.GetDone() != nil {
			break
		}
		if chunk := message.GetChunk(); chunk != nil {
			if chunk.GetOffset() != at {
				t.Fatalf("a chunk at %d, not %d", chunk.GetOffset(), at)
			}
			at += uint64(len(chunk.GetData()))
		} else if gap := message.GetGap(); gap != nil {
			if gap.GetRange().GetFrom() != at {
				t.Fatalf("a gap at %d, not %d", gap.GetRange().GetFrom(), at)
			}
			at = gap.GetRange().GetTo()
			gaps++
		}
	}
	if at != 300000000 || gaps == 0 {
		t.Errorf("ended at %d with %d gaps", at, gaps)
	}
	if mib := m.memoryMiB(); mib > maxGuestMiB {
		t.Errorf("the guest takes %d MiB", mib)
	}
}

func wantRefusal(t testing.TB, err error, reason string) {
	t.Helper()
	if status.Code(err) != codes.FailedPrecondition || reasonOf(err) != reason {
		t.Errorf("got %v, want %s", err, reason)
	}
}
