package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// pipeBytes is how much input a command is given ahead of what it reads, as a pipe holds.
const pipeBytes = 64 << 10

// command is an attached command in a machine: it continues when the broker or a connection dies.
type command struct {
	id, requestID string
	spec          *berthv1.JobSpec

	mu      sync.Mutex
	changed chan struct{}
	taken   []byte // stdin
	read    int    // of taken, by the command
	closed  bool   // stdin is
	output  [3][]byte
	dropped [2]uint64 // [from, to) of stdout is gone
	sizes   []*berthv1.TerminalSize
	signals []uint32

	signalled []string          // request_ids of signals
	appended  map[string]uint64 // request_ids of appends, and where they went
	ends      int
	job       *berthv1.Job
}

func (c *command) change(how func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	how()
	close(c.changed)
	c.changed = make(chan struct{})
}

// write makes the command write.
func (c *command) write(stream berthv1.Stream, data []byte) {
	c.change(func() { c.output[stream] = append(c.output[stream], data...) })
}

// exit ends the command.
func (c *command) exit(code int32) {
	c.change(func() {
		stats := func(stream berthv1.Stream) *berthv1.OutputStats {
			total := uint64(len(c.output[stream]))
			return &berthv1.OutputStats{TotalBytes: total, Exit: &berthv1.OutputStats_EndAtExit{EndAtExit: total}, Sealed: true}
		}
		c.job = &berthv1.Job{
			Id: c.id, SandboxId: "sb_1", State: berthv1.JobState_JOB_STATE_DONE, Spec: c.spec,
			Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: code}},
			Stdout:  stats(berthv1.Stream_STREAM_STDOUT), Stderr: stats(berthv1.Stream_STREAM_STDERR),
		}
	})
}

// readInput makes the command read all it can, until its stdin is closed.
func (c *command) readInput() []byte {
	for {
		c.mu.Lock()
		taken, closed, changed, read := c.taken, c.closed, c.changed, c.read
		c.mu.Unlock()
		if read < len(taken) {
			c.change(func() { c.read = len(taken) })
			continue
		}
		if closed {
			return taken
		}
		<-changed
	}
}

// input takes what is new of a chunk and fits the pipe, and returns how far stdin was taken. It waits
// for space, as a guest does, until over is closed.
func (c *command) input(chunk *berthv1.ExecInput, over <-chan struct{}) (uint64, error) {
	end := chunk.GetOffset() + uint64(len(chunk.GetData()))
	for {
		var taken uint64
		var changed chan struct{}
		var err error
		c.change(func() {
			at := uint64(len(c.taken))
			switch {
			case chunk.GetOffset() > at:
				err = status.Errorf(codes.InvalidArgument, "stdin is at %d, got bytes from %d on", at, chunk.GetOffset())
			case at < end:
				rest := chunk.GetData()[at-chunk.GetOffset():]
				c.taken = append(c.taken, rest[:min(len(rest), pipeBytes-(len(c.taken)-c.read))]...)
			}
			taken = uint64(len(c.taken))
			c.closed = c.closed || chunk.GetEof() && taken == end
		})
		c.mu.Lock()
		changed = c.changed
		full := len(c.taken)-c.read >= pipeBytes
		c.mu.Unlock()
		if err != nil || taken >= end {
			return taken, err
		}
		if !full {
			continue
		}
		select {
		case <-changed:
		case <-over:
			return taken, nil
		}
	}
}

// appendInput takes all of the data, or while it has no room nothing.
func (c *command) appendInput(r *berthv1.WriteJobInputRequest) *berthv1.WriteJobInputResponse {
	reply := &berthv1.WriteJobInputResponse{}
	c.change(func() {
		at, again := c.appended[r.GetRequestId()]
		length := uint64(len(r.GetData()))
		switch {
		case again:
		case len(c.taken)-c.read+len(r.GetData()) > pipeBytes:
			reply.Offset, reply.NextOffset = uint64(len(c.taken)), uint64(len(c.taken))
			return
		default:
			at = uint64(len(c.taken))
			c.taken, c.closed = append(c.taken, r.GetData()...), c.closed || r.GetEof()
			c.appended[r.GetRequestId()] = at
		}
		reply.Offset, reply.NextOffset = at, at+length
	})
	return reply
}

// command finds a command, by id or by request_id.
func (b *broker) command(matches func(*command) bool) *command {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.commands {
		if matches(c) {
			return c
		}
	}
	return nil
}

// beginCommand starts a command, or joins the one that its request_id names.
func (b *broker) beginCommand(start *berthv1.ExecStart) *command {
	if id := start.GetRequestId(); id != "" {
		if known := b.command(func(c *command) bool { return c.requestID == id }); known != nil {
			return known
		}
	}
	c := &command{requestID: start.GetRequestId(), spec: start.GetSpec(), changed: make(chan struct{}), appended: map[string]uint64{}}
	b.change(func() {
		c.id = fmt.Sprintf("job_%d", len(b.commands)+1)
		c.job = &berthv1.Job{Id: c.id, SandboxId: start.GetSandboxId(), State: berthv1.JobState_JOB_STATE_RUNNING, Spec: c.spec}
		b.commands = append(b.commands, c)
	})
	return c
}

// awaitCommand waits for the nth command.
func (b *broker) awaitCommand(n int) *command {
	for {
		b.mu.Lock()
		commands, changed := b.commands, b.changed
		b.mu.Unlock()
		if len(commands) >= n {
			return commands[n-1]
		}
		<-changed
	}
}

func (b *broker) Exec(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]) error {
	b.attaches.Add(1)
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := b.begin(first.GetStart().GetRequestId()); err != nil {
		return err
	}
	var c *command
	offsets := [3]uint64{}
	if start := first.GetStart(); start != nil {
		c = b.beginCommand(start)
	} else {
		reattach := first.GetReattach()
		offsets = [3]uint64{0, reattach.GetStdoutOffset(), reattach.GetStderrOffset()}
		if c = b.command(func(c *command) bool { return c.id == reattach.GetJobId() }); c == nil {
			return failure(codes.NotFound, "JOB_NOT_FOUND", nil)
		}
	}
	c.mu.Lock()
	vanishes := c.spec.GetShell() == "vanish"
	c.mu.Unlock()
	if vanishes {
		return status.Error(codes.Unavailable, "the process was killed")
	}
	s := &execStream{command: c, stream: stream, offsets: offsets, acknowledged: make(chan uint64), over: make(chan struct{})}
	return s.run()
}

// execStream is one connection to a command.
type execStream struct {
	command      *command
	stream       grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]
	offsets      [3]uint64
	acknowledged chan uint64
	over         chan struct{}
	ended        atomic.Bool
}

func (s *execStream) run() error {
	c := s.command
	c.mu.Lock()
	started := &berthv1.ExecStarted{Job: c.job, InputOffset: uint64(len(c.taken))}
	c.mu.Unlock()
	if err := s.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Started{Started: started}}); err != nil {
		return err
	}
	failed := make(chan error, 1)
	acknowledgedEnd := make(chan struct{})
	go func() { // ends with the stream, as gRPC's receivers do
		defer close(acknowledgedEnd)
		if err := s.receive(); err != nil {
			failed <- err
		}
	}()
	defer close(s.over)
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		if err := s.sendOutput(); err != nil {
			return err
		}
		c.mu.Lock()
		job, isNew := c.job, c.changed != changed
		c.mu.Unlock()
		if isNew {
			continue
		}
		if job.GetState() == berthv1.JobState_JOB_STATE_DONE {
			s.ended.Store(true)
			if err := s.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Done{Done: job}}); err != nil {
				return err
			}
			for {
				select {
				case <-s.acknowledged: // too late to be sent
				case <-acknowledgedEnd:
					return nil
				}
			}
		}
		select {
		case <-changed:
		case offset := <-s.acknowledged:
			if err := s.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_InputAcknowledged{InputAcknowledged: offset}}); err != nil {
				return err
			}
		case err := <-failed:
			return err
		case <-s.stream.Context().Done():
			return s.stream.Context().Err()
		}
	}
}

// receive takes input, sizes and signals; the half-close after the end acknowledges it.
func (s *execStream) receive() error {
	for {
		request, err := s.stream.Recv()
		if errors.Is(err, io.EOF) && s.ended.Load() {
			s.command.change(func() { s.command.ends++ })
			return nil
		}
		if err != nil {
			return err
		}
		switch message := request.GetMessage().(type) {
		case *berthv1.ExecRequest_Input:
			taken, err := s.command.input(message.Input, s.over)
			if err != nil {
				return err
			}
			select {
			case s.acknowledged <- taken:
			case <-s.over:
			}
		case *berthv1.ExecRequest_Resize:
			s.command.change(func() { s.command.sizes = append(s.command.sizes, message.Resize) })
		}
	}
}

// sendOutput sends all there is, in chunks of any size, and reports what was dropped.
func (s *execStream) sendOutput() error {
	return sendOutput(s.command, &s.offsets, []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR},
		func(chunk *berthv1.OutputChunk, gap *berthv1.OutputGap) error {
			if gap != nil {
				return s.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Gap{Gap: gap}})
			}
			return s.stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Chunk{Chunk: chunk}})
		})
}

func sendOutput(c *command, offsets *[3]uint64, streams []berthv1.Stream, send func(*berthv1.OutputChunk, *berthv1.OutputGap) error) error {
	for _, stream := range streams {
		for {
			c.mu.Lock()
			at, all, dropped := offsets[stream], c.output[stream], [2]uint64{}
			if stream == berthv1.Stream_STREAM_STDOUT {
				dropped = c.dropped
			}
			c.mu.Unlock()
			if at >= uint64(len(all)) {
				break
			}
			if at >= dropped[0] && at < dropped[1] {
				offsets[stream] = dropped[1]
				gap := &berthv1.OutputGap{Stream: stream, Range: &berthv1.ByteRange{From: at, To: dropped[1]}}
				if err := send(nil, gap); err != nil {
					return err
				}
				continue
			}
			end := min(uint64(len(all)), at+1+rand.Uint64N(48<<10))
			if at < dropped[0] {
				end = min(end, dropped[0])
			}
			offsets[stream] = end
			if err := send(&berthv1.OutputChunk{Stream: stream, Offset: at, Data: all[at:end]}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *broker) FollowJob(r *berthv1.FollowJobRequest, stream grpc.ServerStreamingServer[berthv1.FollowJobResponse]) error {
	if err := b.begin(""); err != nil {
		return err
	}
	c := b.command(func(c *command) bool { return c.id == r.GetJobId() })
	if c == nil {
		return status.Error(codes.Unimplemented, "an older broker")
	}
	offsets := [3]uint64{0, r.GetStdoutOffset(), r.GetStderrOffset()}
	for {
		c.mu.Lock()
		changed := c.changed
		c.mu.Unlock()
		err := sendOutput(c, &offsets, r.GetStreams(), func(chunk *berthv1.OutputChunk, gap *berthv1.OutputGap) error {
			if gap != nil {
				return stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Gap{Gap: gap}})
			}
			return stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Chunk{Chunk: chunk}})
		})
		if err != nil {
			return err
		}
		c.mu.Lock()
		job, isNew := c.job, c.changed != changed
		c.mu.Unlock()
		switch {
		case isNew:
			continue
		case job.GetState() == berthv1.JobState_JOB_STATE_DONE:
			return stream.Send(&berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Done{Done: job}})
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (b *broker) SignalJob(_ context.Context, r *berthv1.SignalJobRequest) (*berthv1.SignalJobResponse, error) {
	c := b.command(func(c *command) bool { return c.id == r.GetJobId() })
	if c == nil {
		return nil, failure(codes.NotFound, "JOB_NOT_FOUND", nil)
	}
	c.change(func() {
		if !slices.Contains(c.signalled, r.GetRequestId()) {
			c.signals, c.signalled = append(c.signals, r.GetSignal()), append(c.signalled, r.GetRequestId())
		}
	})
	return &berthv1.SignalJobResponse{Job: c.job}, nil
}

func (b *broker) WriteJobInput(ctx context.Context, r *berthv1.WriteJobInputRequest) (*berthv1.WriteJobInputResponse, error) {
	if err := b.begin(""); err != nil {
		return nil, err
	}
	c := b.command(func(c *command) bool { return c.id == r.GetJobId() })
	if c == nil {
		return nil, failure(codes.NotFound, "JOB_NOT_FOUND", nil)
	}
	if r.GetPosition() == nil && (len(r.GetData()) > 0 || r.GetEof()) {
		return c.appendInput(r), nil
	}
	next, err := c.input(&berthv1.ExecInput{Position: &berthv1.ExecInput_Offset{Offset: r.GetOffset()}, Data: r.GetData(), Eof: r.GetEof()}, ctx.Done())
	return &berthv1.WriteJobInputResponse{NextOffset: next}, err
}

// brittle makes connections that break after a random number of bytes, in either direction, as often as
// is left.
type brittle struct {
	net.Listener
	limit int64         // bytes; a connection bears fewer
	left  *atomic.Int64 // connections
}

func (l brittle) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil || l.left.Add(-1) < 0 {
		return conn, err
	}
	c := &brittleConn{Conn: conn}
	c.in.Store(rand.Int64N(l.limit))
	c.out.Store(rand.Int64N(l.limit))
	return c, nil
}

type brittleConn struct {
	net.Conn
	in, out atomic.Int64
}

func (c *brittleConn) Read(data []byte) (int, error) {
	return c.bounded(&c.in, data, c.Conn.Read)
}

func (c *brittleConn) Write(data []byte) (int, error) {
	return c.bounded(&c.out, data, c.Conn.Write)
}

// bounded does as much as is left, and then breaks the connection in both directions.
func (c *brittleConn) bounded(left *atomic.Int64, data []byte, do func([]byte) (int, error)) (int, error) {
	bearable := left.Load()
	if bearable <= 0 {
		return 0, errors.Join(net.ErrClosed, c.Close())
	}
	n, err := do(data[:min(int64(len(data)), bearable)])
	left.Add(int64(-n))
	if err == nil && n < len(data) && left.Load() <= 0 {
		return n, errors.Join(net.ErrClosed, c.Close())
	}
	return n, err
}
