package command

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ExitError ends the program with a code; err is what to say, nil when it is said already.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// ExitCode says what went wrong, on stderr, and returns the exit code. An error that is not an
// exitError comes from parsing the arguments.
func (p *Program) ExitCode(ctx context.Context, cmd *cobra.Command, err error) int {
	what := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "berth"), " ")
	var exit *ExitError
	if err == nil {
		err = p.closeOutputs()
	} else if failed := p.unwritten(); failed != nil && !errors.As(err, &exit) {
		err = failed // a help text, say, which is no wrong use
	}
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		p.PrintError(what, fmt.Sprintf("%v (see `%s --help`)", err, cmd.CommandPath()))
		return usage.ExitUsage
	}
	if isBrokenPipe(exit.Err) {
		return usage.ExitSignal + int(syscall.SIGPIPE) // who closed it knows
	}
	var interrupt *InterruptError
	if errors.As(context.Cause(ctx), &interrupt) {
		p.PrintError(what, p.Leaving("interrupted"))
		return usage.ExitSignal + int(interrupt.Signal)
	}
	if exit.Err != nil {
		p.printCallError(what, exit.Err)
	}
	return exit.Code
}

// Leaving adds what becomes of the call to why its caller leaves.
func (p *Program) Leaving(why string) string {
	if p.Afterwards == "" {
		return why
	}
	return why + ": " + p.Afterwards
}

// PrintOutcome says on stderr what the exit code alone does not say.
func (p *Program) PrintOutcome(job *berthv1.Job) {
	switch job.GetOutcome().GetCause() {
	case berthv1.Cause_CAUSE_UNSPECIFIED, berthv1.Cause_CAUSE_EXITED, berthv1.Cause_CAUSE_SIGNALED:
	default:
		p.PrintError(job.GetId(), present.OutcomeWords(job))
	}
}

// ExitAs ends the program as the job ended.
func (p *Program) ExitAs(job *berthv1.Job) error {
	outcome := job.GetOutcome()
	if outcome == nil {
		return fmt.Errorf("%s: the broker did not say how it ended: see `berth poll %s`", job.GetId(), job.GetId())
	}
	if words := present.SurvivorWords(outcome); words != "" {
		remedy := "`berth stop " + job.GetId() + "` kills it"
		if len(outcome.GetSurvivors()) > 0 {
			remedy = "its kill did not take them: they may be another job's, or cannot be killed; they end with the sandbox"
		}
		p.PrintError(job.GetId(), "it left running: "+words+" ("+remedy+")")
	}
	if code := present.ExitCode(outcome); code != 0 {
		return &ExitError{Code: code}
	}
	return nil
}
