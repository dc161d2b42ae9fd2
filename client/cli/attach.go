package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// killWait bounds killing a command whose caller leaves: the broker does it anyway after the
	// command's disconnect grace.
	killWait = 10 * time.Second
	// heldSignals is how many signals wait for a broker that is away; more tell nothing new.
	heldSignals = 8
)

// stay is an attached command as this process lives with it: its signals, its terminal, its end.
type stay struct {
	program  *program
	client   *client.Client
	goesOn   string // what to say of a command that outlives its caller; empty: it is killed
	signals  chan int
	cancel   context.CancelCauseFunc
	received int // signals; belongs to the watcher of interrupts

	mu      sync.Mutex
	started bool
	notKept string // why the command's output is missing, if it was over already and kept none
}

// streams says what an attached command gets.
type streams struct{ interactive, terminal bool }

// attached runs a command with this process's streams until it is done, and exits as it did. run is
// Exec or Attach of the client.
func (p *program) attached(ctx context.Context, c *client.Client, with streams, goesOn string,
	run func(context.Context, client.ExecIO) (*berthv1.Job, error),
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &stay{program: p, client: c, goesOn: goesOn, signals: make(chan int, heldSignals), cancel: cancel}
	defer p.takeInterrupts(s.interrupt)()

	io := client.ExecIO{
		Stdout: p.Stdout, Stderr: p.Stderr, Signals: s.signals, RequestID: p.requestID,
		Started: s.noteStart, Gap: s.sayGap,
	}
	if with.interactive {
		io.Stdin = p.Stdin
	}
	if with.terminal {
		var stopResizes func()
		io.Resize, stopResizes = p.watchResizes()
		defer stopResizes()
	}
	if with.terminal && with.interactive {
		if err := p.makeRaw(); err != nil {
			return err
		}
		defer p.restoreTerminal()
	}
	job, err := run(ctx, io)
	p.restoreTerminal()
	if err != nil {
		return s.left(ctx, job, err)
	}
	p.sayOutcome(job)
	return p.exitAs(job)
}

func (s *stay) noteStart(job *berthv1.Job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started, s.notKept = true, notKept(job)
}

// interrupt takes a signal that this process got: the first is the command's, the second kills it, the
// third ends this process at once. A command that goes on without its caller is left at the first.
func (s *stay) interrupt(signal syscall.Signal) {
	s.mu.Lock()
	started := s.started
	s.mu.Unlock()
	s.received++
	leaves := s.goesOn != "" || !started
	switch {
	case s.received == 1 && !leaves:
		s.signals <- int(signal) // there is room for the first
	case s.received == 1, s.received == 2 && !leaves:
		s.cancel(&interruptError{signal: signal})
	default:
		s.program.exitNow(exitSignal + int(signal))
	}
}

// left ends the program after a stay that ended before the command: it kills the command unless that
// goes on without its caller, and says what became of it.
func (s *stay) left(ctx context.Context, job *berthv1.Job, err error) error {
	var unknown *client.UnknownOutcomeError
	var interrupt *interruptError
	interrupted := errors.As(context.Cause(ctx), &interrupt)
	local := interrupted || isDeadline(err) || !hasStatus(err) // no fault of the broker's
	p := s.program
	switch {
	case job == nil || errors.As(err, &unknown) || !local:
		p.afterwards = "if the command began, it is killed within its disconnect grace"
	case s.goesOn == "" && job.GetState() != berthv1.JobState_JOB_STATE_DONE:
		p.afterwards = s.kill(ctx, job, errors.Is(err, syscall.EPIPE))
	}
	if s.goesOn != "" {
		p.afterwards = s.goesOn
	}
	switch {
	case interrupted:
		return &exitError{code: exitSignal + int(interrupt.signal), err: errors.New(p.leaving("interrupted"))}
	case job != nil && !local && !isUnreachable(err):
		return fmt.Errorf("%s: %w", job.GetId(), err)
	}
	return err
}

// kill ends a command whose caller leaves, and says what became of it. One whose output nobody reads
// any more is asked to end first.
func (s *stay) kill(ctx context.Context, job *berthv1.Job, gently bool) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWait)
	defer cancel()
	request := &berthv1.StopJobRequest{JobId: job.GetId()}
	if !gently {
		request.Grace = (&spanValue{set: true}).proto()
	}
	if _, err := s.client.Jobs().StopJob(ctx, request); err != nil {
		return fmt.Sprintf("%s could not be killed now, it is killed within its disconnect grace: %s", job.GetId(), s.program.explain(err))
	}
	return "the command is killed"
}

// hasStatus reports whether a call failed, and not something here.
func hasStatus(err error) bool {
	_, ok := statusOf(err)
	return ok
}

// sayGap says which bytes of an attached command's output are missing.
func (s *stay) sayGap(stream berthv1.Stream, from, to uint64) {
	s.mu.Lock()
	why := s.notKept
	s.mu.Unlock()
	s.program.complain("", gapWords(stream, from, to, why))
}

// gapWords says which bytes are missing, and why: notKept, where that is not empty.
func gapWords(stream berthv1.Stream, from, to uint64, notKept string) string {
	name := strings.ToLower(strings.TrimPrefix(stream.String(), "STREAM_"))
	if notKept != "" {
		return fmt.Sprintf("bytes %d to %d of %s were %s", from, to, name, notKept)
	}
	// Which of the two it was, a gap does not tell.
	return fmt.Sprintf("bytes %d to %d of %s were dropped (%d bytes over the job's output limit, where a higher --output-limit keeps more, or over the broker's --retention-output)",
		from, to, name, to-from)
}

func (p *program) attachCommand() *cobra.Command {
	var interactive, fromStart bool
	cmd := &cobra.Command{
		Use:   "attach [flags] JOB",
		Short: "Join a running job's output, and with -i its input; exit with its code",
		Long: `Join a running job: its output from now on, and with -i its input, which is taken over from whoever had it.
A job in a terminal gets this one. The first interrupt leaves, and the job goes on; in a terminal with -i keys go
to the job, so that closing the terminal is what leaves.`,
		Example: `  berth attach 9XW4
  berth attach -i 9XW4`,
		Args:              exactlyOne("one job's id"),
		ValidArgsFunction: p.completeJobs(false),
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVar(&fromStart, "from-start", false, "print the output from its beginning")
	cmd.RunE = p.call(exitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		if p.output != outputTable {
			return usagef("-o %s: attach shows the job's own output; use logs -f -o json for pieces", p.output)
		}
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: id})
		if err != nil {
			return err
		}
		job := reply.GetJob()
		stdout, stderr := job.GetStdout().GetTotalBytes(), job.GetStderr().GetTotalBytes()
		if fromStart {
			stdout, stderr = 0, 0
		}
		with := streams{interactive: interactive, terminal: job.GetSpec().GetTty() != nil}
		return p.attached(ctx, c, with, "the job goes on", func(ctx context.Context, io client.ExecIO) (*berthv1.Job, error) {
			return c.Attach(ctx, id, stdout, stderr, io)
		})
	})
	return cmd
}

func (p *program) inputCommand() *cobra.Command {
	var thenClose bool
	cmd := &cobra.Command{
		Use:   "input [flags] JOB",
		Short: "Write standard input to that of a job begun with start -i",
		Long: `Write standard input, to its end, behind what the job's own has taken so far. It answers once the job's machine
has all of it, over restarts of the broker. With --eof the job's input is closed then.`,
		Example: `  echo yes | berth input 9XW4
  berth input --eof 9XW4 < answers.txt`,
		Args:              exactlyOne("one job's id"),
		ValidArgsFunction: p.completeJobs(false),
	}
	cmd.Flags().BoolVar(&thenClose, "eof", false, "close the job's input at the end")
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		if p.requestID != "" {
			// A repetition would look anew where the input ends, and write behind what the first wrote.
			return usagef("--request-id: input can't be repeated: it goes behind what the job has taken so far; leave the flag out")
		}
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		offset, err := c.InputOffset(ctx, id)
		if err != nil {
			return err
		}
		p.afterwards = "the job goes on"
		_, err = c.Feed(ctx, id, offset, p.Stdin, thenClose)
		return err
	})
	return cmd
}
