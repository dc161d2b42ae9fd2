package execute

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// killWait bounds killing a command whose caller leaves: the broker does it anyway after the
	// command's disconnect grace.
	killWait = 10 * time.Second
	// maxQueuedSignals is how many signals wait for a broker that is away; more say nothing new.
	maxQueuedSignals = 8
)

// attachedCommand is an attached command as this process lives with it: its signals, its terminal, its end.
type attachedCommand struct {
	program  *command.Program
	client   *client.Client
	detached string // what to say of a command that outlives its caller; empty: it is killed
	signals  chan int
	cancel   context.CancelCauseFunc
	received int // signals; belongs to the watcher of interrupts

	mu      sync.Mutex
	started bool
	missing bool   // some of its output
	notKept string // why the command's output is missing, if it was over already and kept none
}

// streams says what an attached command gets.
type streams struct{ interactive, terminal bool }

// runAttached runs a command with this process's streams until it is done, and exits as it did. run is
// Exec or Attach of the client.
func runAttached(ctx context.Context, p *command.Program, c *client.Client, with streams, detached string,
	run func(context.Context, client.ExecIO) (*berthv1.Job, error),
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &attachedCommand{program: p, client: c, detached: detached, signals: make(chan int, maxQueuedSignals), cancel: cancel}
	defer p.TakeInterrupts(s.interrupt)()

	io := client.ExecIO{
		Stdout: p.Stdout, Stderr: p.Stderr, Signals: s.signals, RequestID: p.RequestID,
		Started: s.noteStart, Gap: s.printGap,
	}
	if with.interactive {
		io.Stdin = p.Stdin
	}
	if with.terminal || p.StderrTerminal { // else it would be in what a program takes for the command's own words
		io.Away = func() { p.Notice("", "the broker is away, and is being reached again: "+with.meanwhile()) }
		io.Back = func() { p.Notice("", "the broker is back") }
	}
	if with.terminal {
		var stopResizes func()
		io.Resize, stopResizes = p.WatchResizes()
		defer stopResizes()
	}
	if with.terminal && with.interactive {
		if err := p.MakeRaw(); err != nil {
			return err
		}
		defer p.RestoreTerminal()
	}
	job, err := run(ctx, io)
	p.RestoreTerminal()
	if err != nil {
		return s.left(ctx, job, err)
	}
	p.PrintOutcome(job)
	if err := p.ExitAs(job); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.missing {
		return &command.ExitError{Code: usage.ExitBroker} // which bytes is said already
	}
	return nil
}

// meanwhile is what becomes of a command whose broker is away.
func (w *streams) meanwhile() string {
	if w.interactive {
		return "the command continues, and gets then what is typed now"
	}
	return "the command continues"
}

func (s *attachedCommand) noteStart(job *berthv1.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started, s.notKept = true, present.NotKept(job)
}

// interrupt takes a signal that this process got: the first is the command's, the second kills it, the
// third ends this process at once. A command that continues without its caller is left at the first.
func (s *attachedCommand) interrupt(signal syscall.Signal) {
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	s.received++
	leaves := s.detached != "" || !started
	switch {
	case s.received == 1 && !leaves:
		s.signals <- int(signal) // the first always fits
	case s.received == 1, s.received == 2 && !leaves:
		s.cancel(&command.InterruptError{Signal: signal})
	default:
		s.program.ExitNow(usage.ExitSignal + int(signal))
	}
}

// left ends the program after an attachment that ended before the command: it kills the command unless that
// continues without its caller, and says what became of it.
func (s *attachedCommand) left(ctx context.Context, job *berthv1.Job, err error) error {
	var unknown *client.UnknownOutcomeError
	var interrupt *command.InterruptError
	interrupted := errors.As(context.Cause(ctx), &interrupt)
	local := interrupted || command.IsDeadline(err) || !command.HasStatus(err) // no fault of the broker's
	p := s.program
	switch {
	case job == nil || errors.As(err, &unknown) || !local:
		p.Afterwards = "if the command began, it is killed within its disconnect grace"
	case s.detached == "" && job.GetState() != berthv1.JobState_JOB_STATE_DONE:
		p.Afterwards = s.kill(ctx, job, errors.Is(err, syscall.EPIPE))
	}
	if s.detached != "" {
		p.Afterwards = s.detached
	}
	switch {
	case interrupted:
		return &command.ExitError{Code: usage.ExitSignal + int(interrupt.Signal), Err: errors.New(p.Leaving("interrupted"))}
	case job != nil && !local && !command.IsUnreachable(err) && !strings.Contains(err.Error(), job.GetId()):
		return fmt.Errorf("%s: %w", job.GetId(), err)
	}
	return err
}

// kill ends a command whose caller leaves, and says what became of it. One whose output nobody reads
// any more is asked to end first.
func (s *attachedCommand) kill(ctx context.Context, job *berthv1.Job, gently bool) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWait)
	defer cancel()
	request := &berthv1.StopJobRequest{JobId: job.GetId()}
	if !gently {
		request.Grace = durationpb.New(0)
	}
	if _, err := s.client.Jobs().StopJob(ctx, request); err != nil {
		return fmt.Sprintf("%s could not be killed now, it is killed within its disconnect grace: %s", job.GetId(), s.program.Explain(err))
	}
	return "the command is killed"
}

// printGap says which bytes of an attached command's output are missing.
func (s *attachedCommand) printGap(stream berthv1.Stream, from, to uint64) {
	s.mu.Lock()
	why := s.notKept
	s.missing = true
	s.mu.Unlock()
	s.program.PrintError("", present.GapWords(stream, from, to, why))
}

// bind binds what an attached command gets of this process. Its output is its caller's, whatever the limit.
func (w *streams) bind(flags *pflag.FlagSet) {
	flags.Lookup("output-limit").Usage = "buffered of each stream for a caller that is slow or away, as 1GiB (default 64MiB); start keeps output, exec with --request-id too"
	flags.BoolVarP(&w.interactive, "interactive", "i", false, "pass standard input on")
	flags.BoolVarP(&w.terminal, "tty", "t", false, "run it in a terminal, of this one's size")
}
