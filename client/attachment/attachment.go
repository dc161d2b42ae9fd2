// Package attachment is one caller attached to one command, over as many connections as it takes: its
// input, output, signals and terminal, exact in both directions. It starts a command once and never again
// by itself.
package attachment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/client/connection"
	"github.com/berth-sandbox/berth/client/follow"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	// inputWindowBytes is how far an attached command's standard input is read ahead of what its machine
	// has taken: what has to be sent again after the connection broke.
	inputWindowBytes = 1 << 20
	// inputChunkBytes is sent in one message of input: large enough to be cheap, small enough that a
	// terminal's new size does not wait behind it.
	inputChunkBytes = 64 << 10
	// acknowledgeWait bounds how long the end of an attached command waits for the broker to see that it
	// was received. A broker sees the half-close without it, and answers at once; the bound is for one that
	// does not answer any more, which only keeps the job's end longer.
	acknowledgeWait = 250 * time.Millisecond
	// awayAfter is how long a broker may be away before the caller is told: a restart is faster, and a line
	// for each would only disturb.
	awayAfter = time.Second
	// maxSignal is the highest signal's number.
	maxSignal = 64
)

// IO is what the caller of an attached command gives it and wants of it. The zero value is a
// command without standard input whose output is dropped.
type IO struct {
	// Stdin is read up to its end, at most 1 MiB ahead of what the command's machine has taken; its end
	// closes the command's. Nil is no standard input. Exec does not wait for a Read that blocks: such a
	// Read may outlive it, and what it gets is dropped.
	Stdin io.Reader
	// Stdout and Stderr are written to by one goroutine, each byte once and in order. Nil drops.
	Stdout, Stderr io.Writer
	// Resize delivers the terminal's new sizes. It may be nil.
	Resize <-chan *berthv1.TerminalSize
	// Signals delivers numbers of signals for the command's process group. It may be nil.
	Signals <-chan int
	// RequestID makes the start repeatable, and the command one that continues without its caller: the same
	// id with the same spec joins it. Empty: the command is killed when nobody has been attached for its
	// disconnect_grace, and its start is never repeated.
	RequestID string
	// IfGeneration and Lease are conditions on the start, as in every mutating request.
	IfGeneration uint64
	Lease        *berthv1.LeaseRef
	// Started is called once, when the job is known. It may be nil.
	Started func(*berthv1.Job)
	// Gap is called where output was dropped, [from, to), in the order of the stream. It may be nil; then
	// the job's own stats say so.
	Gap func(stream berthv1.Stream, from, to uint64)
	// Away is called when the command's broker has not been reached for a second, and Back when it is again;
	// never both at once. What Stdin gives meanwhile is sent then. They may be nil.
	Away, Back func()
}

// UnknownStartError says that the connection broke before the broker said that a command began, and
// that the command bore no request_id: whether it began is not known, and it was not started again. If
// it did begin, it is killed after its disconnect_grace.
type UnknownStartError struct {
	SandboxID string
	Cause     error
}

// Error says so and names what to do.
func (e *UnknownStartError) Error() string {
	return fmt.Sprintf("it is not known whether the command began in sandbox %s: look at its jobs, or give such a command a request_id: %v",
		e.SandboxID, e.Cause)
}

// Unwrap returns why the connection broke.
func (e *UnknownStartError) Unwrap() error { return e.Cause }

// Exec runs an attached command in a sandbox and returns its job, DONE, after the last byte of its
// output was written. It comes back by itself to a command whose connection broke, for as long as
// WaitJob would go on: no byte of either direction is lost or repeated. Where the spec says nothing of
// stdin, io.Stdin opens it.
//
// Beside an error it returns the job as it was last reported, nil when none was. Errors: as RunCommand;
// what a writer or Stdin returned; *UnknownStartError; *UnreachableError; *UnknownOutcomeError; ctx's
// end, after which the broker kills the command as its on_disconnect and disconnect_grace say.
func Exec(ctx context.Context, c *connection.Conn, sandboxID string, spec *berthv1.JobSpec, streams IO) (*berthv1.Job, error) {
	if streams.Stdin != nil && spec.GetStdin() == nil {
		spec = proto.CloneOf(spec)
		if spec == nil {
			spec = &berthv1.JobSpec{}
		}
		spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	}
	a := newAttachment(c, streams)
	a.start = &berthv1.ExecStart{
		RequestId: streams.RequestID, IfGeneration: streams.IfGeneration, Lease: streams.Lease, SandboxId: sandboxID, Spec: spec,
	}
	return a.run(ctx)
}

// Attach is Exec for a job that was started before: it sends output from the given offsets on, and
// what Stdin holds goes behind what the job has taken so far. Without Stdin and Resize it only reads: who
// has the job's input and terminal keeps them. RequestID, IfGeneration and Lease are not used. Errors:
// JOB_NOT_FOUND, and as Exec.
func Attach(ctx context.Context, c *connection.Conn, jobID string, stdoutOffset, stderrOffset uint64, streams IO) (*berthv1.Job, error) {
	a := newAttachment(c, streams)
	a.jobID = jobID
	a.stdout.offset, a.stderr.offset = stdoutOffset, stderrOffset
	if streams.Stdin == nil && streams.Resize == nil {
		return a.read(ctx)
	}
	a.appends = true
	return a.run(ctx)
}

// attachment is one caller attached to one command, over as many connections as it takes.
type attachment struct {
	conn  *connection.Conn
	io    IO
	start *berthv1.ExecStart // nil: it was started before
	input *inputWindow       // nil: no standard input

	// The rest belongs to the goroutine of run.
	jobID          string // empty until it is known
	job            *berthv1.Job
	announced      bool        // Started was called
	known          chan string // the job's id, once it is known; holds one
	appends        bool        // input begins where the job's stands, which the first reply says
	stdout, stderr outputEnd
	outage         *outage
	moved          bool                  // the newest connection carried something
	size           *berthv1.TerminalSize // the newest, belongs to the connection's sender
}

// outputEnd is where one stream of output goes and how far it came.
type outputEnd struct {
	stream berthv1.Stream
	to     io.Writer
	offset uint64
}

func newAttachment(c *connection.Conn, streams IO) *attachment {
	a := &attachment{
		conn: c, io: streams, known: make(chan string, 1), outage: &outage{away: streams.Away, back: streams.Back},
		stdout: outputEnd{stream: berthv1.Stream_STREAM_STDOUT, to: streams.Stdout},
		stderr: outputEnd{stream: berthv1.Stream_STREAM_STDERR, to: streams.Stderr},
	}
	if streams.Stdin != nil {
		a.input = newInputWindow()
	}
	return a
}

// localError is a failure on the caller's own side, which no other connection repairs.
type localError struct{ cause error }

func (e *localError) Error() string { return e.cause.Error() }
func (e *localError) Unwrap() error { return e.cause }

// unsentError is a connection that failed before anything was sent on it.
type unsentError struct{ cause error }

func (e *unsentError) Error() string { return e.cause.Error() }
func (e *unsentError) Unwrap() error { return e.cause }

// errCutOff is a stream that ended in order, but before the job.
var errCutOff = errors.New("the broker ended the connection before the command's end")

func (a *attachment) run(ctx context.Context) (*berthv1.Job, error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	if a.input != nil {
		defer a.input.fill(a.io.Stdin, func(err error) {
			fail(&localError{cause: fmt.Errorf("reading the command's standard input: %w", err)})
		})()
	}
	defer a.forwardSignals(ctx)()
	defer a.outage.leave()

	var first time.Time // when the first try to start failed
	for idle := 0; ; idle++ {
		a.moved = false
		done, err := a.connection(ctx)
		if done != nil {
			return done, err
		}
		if first.IsZero() {
			first = time.Now()
		}
		if a.moved {
			idle = 0
		}
		wait := connection.BackoffFor(idle, err)
		if err := a.giveUp(ctx, err, time.Since(first)+wait); err != nil {
			return a.job, err
		}
		if a.jobID != "" {
			a.outage.begin()
		}
		if !connection.Pause(ctx, wait) {
			return a.job, a.ended(ctx)
		}
	}
}

// ended is why a cancelled attachment ended.
func (a *attachment) ended(ctx context.Context) error {
	var local *localError
	switch {
	case errors.As(context.Cause(ctx), &local):
		return local.cause
	case a.jobID == "":
		return connection.EndedWhile(ctx, "starting a command in sandbox "+a.start.GetSandboxId())
	}
	return connection.EndedWhile(ctx, "attached to "+a.jobID)
}

// giveUp says why a connection that ended before the job is not followed by another; nil when it is.
// wouldTake is how long starting will have taken when another is made.
func (a *attachment) giveUp(ctx context.Context, err error, wouldTake time.Duration) error {
	var local *localError
	switch {
	case errors.As(err, &local):
		return local.cause
	case ctx.Err() != nil:
		return a.ended(ctx)
	case a.jobID == "":
		return a.giveUpStarting(ctx, err, wouldTake)
	case errors.Is(err, errCutOff):
		return nil
	}
	if unsent := (*unsentError)(nil); errors.As(err, &unsent) {
		err = unsent.cause
	}
	if follow.MayBeStopped(err) {
		if unknown := follow.Unknown(ctx, a.conn, a.jobID); unknown != nil {
			return unknown
		}
	}
	if a.conn.KeepWaiting(ctx, err) {
		return nil
	}
	return a.conn.Unanswered(ctx, err)
}

// giveUpStarting is giveUp before the job is known. A start that may have arrived is repeated with a
// request_id only.
func (a *attachment) giveUpStarting(ctx context.Context, err error, wouldTake time.Duration) error {
	unsent := (*unsentError)(nil)
	switch {
	case errors.As(err, &unsent):
		err = unsent.cause
	case a.start.GetRequestId() != "", connection.Is(err, berthv1.Reason_REASON_RECOVERING):
	case mayHaveBegun(err):
		return &UnknownStartError{SandboxID: a.start.GetSandboxId(), Cause: err}
	default:
		return err
	}
	if errors.Is(err, errCutOff) || connection.WorthRepeating(ctx, err) {
		if wouldTake <= a.conn.RetryTimeout() {
			return nil
		}
	}
	return err
}

// mayHaveBegun reports whether an error leaves open if the command began: it is not a refusal.
func mayHaveBegun(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled, codes.DeadlineExceeded:
		return true
	case codes.Unknown, codes.Internal:
		return connection.Info(err) == nil
	}
	return false
}

// connection stays with the command for as long as one connection holds. It returns the job when that
// is DONE, else why the connection ended.
func (a *attachment) connection(ctx context.Context) (*berthv1.Job, error) {
	ctx, cancel := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()

	stream, err := a.conn.Jobs().Exec(ctx)
	if err == nil {
		err = stream.Send(a.first())
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, &unsentError{cause: err}
	}
	for {
		reply, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, errCutOff
		}
		if err != nil {
			return nil, err
		}
		switch message := reply.GetMessage().(type) {
		case *berthv1.ExecResponse_Started:
			from := a.started(message.Started)
			sending.Go(func() { a.send(ctx, stream, from) })
		case *berthv1.ExecResponse_Chunk:
			err = a.output(message.Chunk.GetStream()).data(a.io.Gap, message.Chunk.GetOffset(), message.Chunk.GetData())
		case *berthv1.ExecResponse_Gap:
			a.output(message.Gap.GetStream()).gap(a.io.Gap, message.Gap.GetRange().GetTo())
		case *berthv1.ExecResponse_InputAcknowledged:
			if a.input != nil {
				a.input.taken(message.InputAcknowledged)
			}
		case *berthv1.ExecResponse_Done:
			acknowledgeEnd(stream, cancel)
			return message.Done, a.complete(message.Done)
		}
		if err != nil {
			return nil, &localError{cause: err}
		}
		a.moved = a.moved || reply.GetStarted() == nil
	}
}

// first is a connection's first message.
func (a *attachment) first() *berthv1.ExecRequest {
	if a.jobID == "" {
		return &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: a.start}}
	}
	return &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Reattach{Reattach: &berthv1.ExecReattach{
		JobId: a.jobID, StdoutOffset: a.stdout.offset, StderrOffset: a.stderr.offset,
	}}}
}

// started notes the job, announces it once, and returns where input continues.
func (a *attachment) started(started *berthv1.ExecStarted) uint64 {
	a.job = started.GetJob()
	a.outage.end()
	if !a.announced {
		a.announced, a.jobID = true, a.job.GetId()
		if a.input != nil && a.appends {
			a.input.beginAt(started.GetInputOffset())
		}
		if a.io.Started != nil {
			a.io.Started(a.job)
		}
		a.known <- a.jobID
	}
	if a.input == nil {
		return 0
	}
	return a.input.taken(started.GetInputOffset())
}

// send gives a connection the input from an offset on, and the terminal's size, until ctx ends.
func (a *attachment) send(ctx context.Context, stream berthv1.JobService_ExecClient, sent uint64) {
	resizes := a.io.Resize
	if a.size != nil && stream.Send(resizeRequest(a.size)) != nil {
		return // the connection is gone; its reader says why
	}
	for inputOver := a.input == nil; ; {
		var changed <-chan struct{}
		if !inputOver {
			chunk := a.input.from(sent)
			if len(chunk.data) > 0 || chunk.eof {
				request := &berthv1.ExecInput{Position: &berthv1.ExecInput_Offset{Offset: chunk.offset}, Data: chunk.data, Eof: chunk.eof}
				if stream.Send(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: request}}) != nil {
					return
				}
				sent, inputOver = chunk.offset+uint64(len(chunk.data)), chunk.eof
				changed = immediately // after a look at the terminal's size
			} else {
				changed = chunk.changed
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case size, open := <-resizes:
			if !open {
				resizes = nil
				continue
			}
			a.size = size
			if stream.Send(resizeRequest(size)) != nil {
				return
			}
		}
	}
}

// immediately is ready at once.
var immediately = func() <-chan struct{} {
	ready := make(chan struct{})
	close(ready)
	return ready
}()

func resizeRequest(size *berthv1.TerminalSize) *berthv1.ExecRequest {
	return &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Resize{Resize: size}}
}

// acknowledgeEnd half-closes, which says to the broker that the caller has everything, and waits a moment for
// the broker to have seen it: cancelling at once would say the opposite.
func acknowledgeEnd(stream berthv1.JobService_ExecClient, cancel context.CancelFunc) {
	if stream.CloseSend() != nil {
		return // the broker then keeps the job's end a little longer
	}
	timer := time.AfterFunc(acknowledgeWait, cancel)
	defer timer.Stop()
	for {
		if _, err := stream.Recv(); err != nil {
			return
		}
	}
}

// complete checks the end against what was written: a broker that loses bytes must not go unnoticed.
func (a *attachment) complete(job *berthv1.Job) error {
	if job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST {
		return nil
	}
	for _, end := range []struct {
		output *outputEnd
		stats  *berthv1.OutputStats
	}{{&a.stdout, job.GetStdout()}, {&a.stderr, job.GetStderr()}} {
		if end.output.offset < end.stats.GetEndAtExit() {
			return fmt.Errorf("%s: the broker sent its %s up to byte %d only, of %d",
				job.GetId(), end.output.name(), end.output.offset, end.stats.GetEndAtExit())
		}
	}
	return nil
}

func (a *attachment) output(stream berthv1.Stream) *outputEnd {
	if stream == berthv1.Stream_STREAM_STDERR {
		return &a.stderr
	}
	return &a.stdout
}

func (o *outputEnd) name() string {
	if o.stream == berthv1.Stream_STREAM_STDERR {
		return "stderr"
	}
	return "stdout"
}

// data writes what is new of a chunk.
func (o *outputEnd) data(report func(berthv1.Stream, uint64, uint64), offset uint64, data []byte) error {
	if offset < o.offset {
		data = data[min(o.offset-offset, uint64(len(data))):]
	} else {
		o.gap(report, offset)
	}
	if o.to == nil {
		o.offset += uint64(len(data))
		return nil
	}
	n, err := o.to.Write(data)
	o.offset += uint64(max(n, 0))
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("writing the command's %s: %w", o.name(), err)
	}
	return nil
}

// gap reports what is missing up to an offset.
func (o *outputEnd) gap(report func(berthv1.Stream, uint64, uint64), to uint64) {
	if to <= o.offset {
		return
	}
	if report != nil {
		report(o.stream, o.offset, to)
	}
	o.offset = to
}

// forwardSignals sends signals to the job once it is known, beside the stream: input that the command
// does not read must not hold them up. It returns how to end that.
func (a *attachment) forwardSignals(ctx context.Context) (stop func()) {
	if a.io.Signals == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var forwarding sync.WaitGroup
	forwarding.Go(func() {
		var jobID string
		select {
		case <-ctx.Done():
			return
		case jobID = <-a.known:
		}
		for {
			select {
			case <-ctx.Done():
				return
			case signal, open := <-a.io.Signals:
				if !open {
					return
				}
				// A job that is over needs no signal, and a broker that stays away ends the attachment.
				_, _ = Signal(ctx, a.conn, jobID, signal)
			}
		}
	})
	return func() {
		cancel()
		forwarding.Wait()
	}
}

// Signal sends a signal, by its number in the job's machine, to a job's process group, and returns
// the job as it was then. Its request_id is made here: to repeat a signal over a restart of the caller, give
// Jobs().SignalJob one. Errors: JOB_NOT_FOUND, WRONG_STATE for a job that is over, *UnreachableError.
func Signal(ctx context.Context, c *connection.Conn, jobID string, signal int) (*berthv1.Job, error) {
	if signal < 1 || signal > maxSignal {
		return nil, status.Errorf(codes.InvalidArgument, "signal %d: it must be 1 to %d", signal, maxSignal)
	}
	reply, err := c.Jobs().SignalJob(ctx, &berthv1.SignalJobRequest{JobId: jobID, Signal: uint32(signal)})
	return reply.GetJob(), err
}
