package supervise

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "version" {
		os.Exit(0) // the containment probe
	}
	goleak.VerifyTestMain(m)
}

// supervisor returns one with means of its own.
func supervisor(t testing.TB) *Supervisor {
	t.Helper()
	dir := t.TempDir()
	records, err := record.Open(filepath.Join(dir, "spool"), "m_1", 1, "boot")
	if err != nil {
		t.Fatal(err)
	}
	tracker := contain.Probe("", "m_1", slog.New(slog.DiscardHandler))
	reaper := reap.Start()
	s, err := New(Config{MachineID: "m_1", Generation: 1, BootID: "boot", Workspace: dir, Records: records, Tracker: tracker, Reaper: reaper, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Stop(context.Background())
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		tracker.Close()
		reaper.Close()
		if err := records.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// caller is the other end of an Attach, without a connection.
type caller struct {
	ctx      context.Context
	requests chan *guestv1.AttachRequest

	mu       sync.Mutex
	output   []byte
	acked    uint64
	received chan struct{}
}

func (c *caller) Context() context.Context { return c.ctx }

func (c *caller) Recv() (*guestv1.AttachRequest, error) {
	select {
	case r, open := <-c.requests:
		if !open {
			return nil, io.EOF
		}
		return r, nil
	case <-c.ctx.Done():
		return nil, c.ctx.Err()
	}
}

func (c *caller) Send(r *guestv1.AttachResponse) error {
	c.mu.Lock()
	c.acked = max(c.acked, r.GetInputAcknowledged())
	c.mu.Unlock()
	select {
	case c.received <- struct{}{}:
	default:
	}
	return c.ctx.Err()
}

func (c *caller) SendChunk(chunk *berthv1.OutputChunk, done func()) error {
	c.mu.Lock()
	c.output = append(c.output, chunk.GetData()...)
	c.mu.Unlock()
	done()
	return c.Send(&guestv1.AttachResponse{})
}

// inputByte is what stands at an offset of every input here.
func inputByte(offset uint64) byte { return byte(offset>>8 ^ offset*7) }

// FuzzAttach sends any messages to a cat: what comes back is the input, each byte once and in its
// place, whatever was sent twice, overlapping or out of place.
func FuzzAttach(f *testing.F) {
	f.Add([]byte{0, 3, 0, 3, 1, 2, 2, 0}, false)
	f.Add([]byte{0, 255, 0, 255, 4, 9, 5, 1, 0, 4, 3, 0}, true)
	f.Add([]byte{7, 7, 0, 1, 6, 6, 3, 3}, false)
	s := supervisor(f)
	number := 0
	f.Fuzz(func(t *testing.T, steps []byte, tty bool) {
		number++
		id := []byte("job_01ARZ3NDEKTSV4RRFFQ6000000")
		for i, n := len(id)-1, number; n > 0; i, n = i-1, n/10 {
			id[i] = '0' + byte(n%10)
		}
		command := &guestv1.Command{Argv: []string{"cat"}, Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}}
		if tty {
			command.Tty = &berthv1.TerminalSize{Cols: 80, Rows: 24}
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		c := &caller{ctx: ctx, requests: make(chan *guestv1.AttachRequest, 1), received: make(chan struct{}, 1)}
		c.requests <- &guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{
			JobId: string(id), OwnInput: true, Start: &guestv1.StartRequest{JobId: string(id), Command: command},
		}}}
		ended := make(chan struct{})
		var err error
		go func() {
			defer close(ended)
			err = s.Attach(c)
		}()
		sent := c.play(steps, ended)
		select {
		case <-ended:
		case <-time.After(20 * time.Millisecond): // cat may be waiting for more
			cancel()
			<-ended
		}
		var refusal *refusal.Error
		if err != nil && !errors.As(err, &refusal) && !errors.Is(err, context.Canceled) {
			t.Errorf("ended with %v", err)
		}
		if _, err := s.StopJob(t.Context(), &guestv1.StopRequest{JobId: string(id), Grace: durationpb.New(0)}); err != nil {
			t.Error(err)
		}
		if _, err := s.Forget(&guestv1.ForgetRequest{JobIds: []string{string(id)}}); err != nil {
			t.Error(err)
		}
		if tty {
			return // a terminal changes what passes through it
		}
		want := make([]byte, sent)
		for i := range want {
			want[i] = inputByte(uint64(i))
		}
		if !bytes.HasPrefix(want, c.output) || c.acked > sent {
			t.Errorf("%d bytes came back of %d, acknowledged %d", len(c.output), sent, c.acked)
		}
	})
}

// play sends messages that steps describe, two bytes each, and returns how far input was sent.
func (c *caller) play(steps []byte, ended <-chan struct{}) (sent uint64) {
	for ; len(steps) >= 2; steps = steps[2:] {
		message := &guestv1.AttachRequest{}
		size := uint64(steps[1]) * uint64(steps[1]) // up to 64 KiB
		at := sent
		switch steps[0] % 8 {
		case 1:
			at -= min(at, size/2) // again
		case 2:
			at += uint64(steps[1] % 2) // perhaps a gap
		case 3:
			size = 0
		case 4:
			message.Message = &guestv1.AttachRequest_Resize{Resize: &berthv1.TerminalSize{Cols: uint32(steps[1]), Rows: 1}}
		case 5:
			message.Message = &guestv1.AttachRequest_Signal{Signal: uint32(steps[1])%3*20 + 8} // 8, 28, 48
		case 6:
			message.Message = &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{}}
		case 7:
			message = &guestv1.AttachRequest{}
		}
		if steps[0]%8 < 4 {
			data := make([]byte, size)
			for i := range data {
				data[i] = inputByte(at + uint64(i))
			}
			message.Message = &guestv1.AttachRequest_Input{Input: &guestv1.AttachInput{Offset: at, Data: data, Eof: steps[0]%8 == 3}}
			if at <= sent {
				sent = max(sent, at+size)
			}
		}
		select {
		case c.requests <- message:
		case <-ended:
			return sent
		}
	}
	close(c.requests)
	return sent
}
