package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (p *program) pollCommand() *cobra.Command {
	wait := spanValue{most: longestPoll}
	cmd := &cobra.Command{
		Use:   "poll JOB",
		Short: "Show how a job is and the end of its output; exit 0 if done, 3 if not",
		Long: `Show how a job is and the end of its output, and exit with 0 if it is done, else with 3. With --wait it answers
when the job is done or the wait is over. A job that is UNKNOWN, because its machine is stopped, is answered at
once and with 3 in spite of --wait: resume its sandbox to learn how it ended.`,
		Example: `  berth poll 9XW4
  berth poll 9XW4 --wait 30s -o json`,
		Args:              exactlyOne("one job's id"),
		ValidArgsFunction: p.completeJobs(false),
	}
	cmd.Flags().Var(&wait, "wait", "answer when it is done or after this long, at most 10m (default at once); an UNKNOWN job is answered at once")
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.afterwards = "the job goes on"
		reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{
			JobId: id, Wait: wait.proto(), Tails: true, TextOutput: p.output == outputJSON,
		})
		if err != nil {
			return err
		}
		if err := p.show(reply, id, func() error { return p.pollBlock(reply) }); err != nil {
			return err
		}
		if reply.GetJob().GetState() != berthv1.JobState_JOB_STATE_DONE {
			return &exitError{code: exitRunning}
		}
		return nil
	})
	return cmd
}

func (p *program) pollBlock(reply *berthv1.PollJobResponse) error {
	job := reply.GetJob()
	b := p.newBlock()
	b.fact("Id", job.GetId())
	b.fact("State", jobState(job))
	b.fact("Outcome", outcomeWords(job))
	b.fact("Command", cut(commandWords(job.GetSpec())))
	b.fact("Sandbox", job.GetSandboxId())
	b.fact("Created", withHint(moment(job.GetCreateTime()), agoWords(p.age(job.GetCreateTime()))))
	b.fact("Took", lasted(job.GetStartTime(), job.GetEndTime()))
	b.fact("Left running", survivorWords(job.GetOutcome()))
	b.fact("Stdout", factsWords(job, job.GetStdout()))
	b.fact("Stderr", factsWords(job, job.GetStderr()))
	if err := b.flush(); err != nil {
		return err
	}
	for _, tail := range []struct {
		name   string
		output *berthv1.BoundedOutput
	}{{"stdout", reply.GetStdout()}, {"stderr", reply.GetStderr()}} {
		if err := p.writeTail(tail.name, tail.output); err != nil {
			return err
		}
	}
	return nil
}

// writeTail writes the end of a stream beneath a line that names it, and ends its last line.
func (p *program) writeTail(name string, output *berthv1.BoundedOutput) error {
	end := append(append([]byte{}, output.GetHead()...), output.GetTail()...)
	if len(end) == 0 {
		return nil
	}
	title := "==> " + name + " <=="
	if output.GetOmittedBytes() > 0 {
		title = fmt.Sprintf("==> %s, its last %s <==", name, bytesWords(uint64(len(end))))
	}
	if end[len(end)-1] != '\n' {
		end = append(end, '\n')
	}
	_, err := fmt.Fprintf(p.Stdout, "\n%s\n%s", title, end)
	return err
}

func (p *program) waitCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "wait JOB",
		Short: "Wait until a job is done and exit with its code",
		Long: `Wait until a job is done, over restarts of the broker, say how it ended, and exit with its code: 124 when it
timed out, 128+n when a signal ended it, 125 when it is lost or the broker failed.`,
		Example: `  berth wait 9XW4 && echo good
  berth wait --deadline 10m 9XW4`,
		Args:              exactlyOne("one job's id"),
		ValidArgsFunction: p.completeJobs(false),
	}
	cmd.RunE = p.call(exitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.afterwards = "the job goes on"
		job, err := c.WaitJob(ctx, id)
		if err != nil {
			return err
		}
		err = p.show(job, id, func() error {
			return p.printLine(plain(id + " " + endWords(job)))
		})
		if err != nil {
			return err
		}
		if p.output != outputTable { // the line above says it
			p.sayOutcome(job)
		}
		return p.exitAs(job)
	})
	return cmd
}

// sayOutcome says on stderr what the exit code alone does not tell.
func (p *program) sayOutcome(job *berthv1.Job) {
	switch job.GetOutcome().GetCause() {
	case berthv1.Cause_CAUSE_UNSPECIFIED, berthv1.Cause_CAUSE_EXITED, berthv1.Cause_CAUSE_SIGNALED:
	default:
		p.complain(job.GetId(), outcomeWords(job))
	}
}

// exitAs ends the program as the job ended.
func (p *program) exitAs(job *berthv1.Job) error {
	outcome := job.GetOutcome()
	if outcome == nil {
		return fmt.Errorf("%s: the broker did not say how it ended: see `berth poll %s`", job.GetId(), job.GetId())
	}
	if words := survivorWords(outcome); words != "" {
		p.complain(job.GetId(), "it left running: "+words+" (`berth stop "+job.GetId()+"` kills it)")
	}
	if code := codeOf(outcome); code != 0 {
		return &exitError{code: code}
	}
	return nil
}

// codeOf is the exit code that stands for an outcome, which is not nil.
func codeOf(outcome *berthv1.Outcome) int {
	switch {
	case outcome.GetCause() == berthv1.Cause_CAUSE_LOST:
		return exitBroker
	case outcome.ExitCode != nil:
		return int(outcome.GetExitCode())
	case outcome.GetCause() == berthv1.Cause_CAUSE_TIMED_OUT:
		return exitTimeout
	}
	switch status := outcome.GetWaitStatus().GetStatus().(type) {
	case *berthv1.WaitStatus_Code:
		return int(status.Code)
	case *berthv1.WaitStatus_Signal:
		return exitSignal + int(status.Signal)
	}
	return exitBroker // it did not end as a command ends, and nobody knows a code
}

func (p *program) stopCommand() *cobra.Command {
	grace := spanValue{most: longestGrace}
	cmd := &cobra.Command{
		Use:   "stop JOB…",
		Short: "Stop jobs: TERM, then after a grace KILL, to the whole tree",
		Long: `Stop jobs: TERM to the process group, then after a grace KILL to the whole tree; it answers when nothing of
it is left. On a finished job it kills what that left running. The ids of the stopped are printed.`,
		Example: `  berth stop 9XW4
  berth stop --grace 0s 9XW4`,
		Args:              atLeastOne("a job's id"),
		ValidArgsFunction: p.completeJobs(true),
	}
	cmd.Flags().Var(&grace, "grace", "between TERM and KILL; 0s kills at once (default the job's kill grace)")
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		p.afterwards = "the stop goes on in the broker"
		return p.each(ctx, "stop", args, func(given string) error {
			id, err := jobID(ctx, c, given)
			if err != nil {
				return err
			}
			reply, err := c.Jobs().StopJob(ctx, &berthv1.StopJobRequest{RequestId: p.requestID, JobId: id, Grace: grace.proto()})
			if err != nil {
				return err
			}
			return p.show(reply.GetJob(), id, func() error { return p.printLine(id) })
		})
	})
	return cmd
}

func (p *program) jobsCommand() *cobra.Command {
	var (
		open           bool
		labels, states []string
	)
	cmd := &cobra.Command{
		Use:   "jobs [ID]",
		Short: "List jobs, newest first, of one sandbox or of all",
		Example: `  berth jobs
  berth jobs 7QK2 --open
  berth jobs --state done -o json`,
		Args:              atMostOne("one sandbox's id"),
		ValidArgsFunction: p.completeLiveSandboxes(false),
	}
	flags := cmd.Flags()
	flags.BoolVar(&open, "open", false, "only those that are not done")
	flags.StringArrayVar(&labels, "label", nil, "only with this label: k=v, or k for any value")
	flags.StringSliceVar(&states, "state", nil, "only in these states, as running,done")
	must(cmd.RegisterFlagCompletionFunc("state", fixed(stateNames(berthv1.JobState_name, jobStatePrefix)...)))
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		request := &berthv1.ListJobsRequest{}
		var err error
		if request.Labels, err = labelFilter("label", labels); err != nil {
			return err
		}
		numbers, err := parseStates(states, berthv1.JobState_value, jobStatePrefix)
		if err != nil {
			return err
		}
		for _, number := range numbers {
			request.States = append(request.States, berthv1.JobState(number))
		}
		if open && len(states) > 0 {
			return usagef("--open and --state: give one of them")
		}
		if open {
			request.States = openJobStates
		}
		if len(args) == 1 {
			if request.SandboxId, err = sandboxID(ctx, c, args[0]); err != nil {
				return err
			}
		}
		found, err := listJobs(ctx, c, request)
		if err != nil {
			return err
		}
		return p.showJobs(found)
	})
	return cmd
}

// openJobStates are the states of a job that is not done.
var openJobStates = []berthv1.JobState{
	berthv1.JobState_JOB_STATE_RESERVED, berthv1.JobState_JOB_STATE_RUNNING, berthv1.JobState_JOB_STATE_UNKNOWN,
}

func (p *program) showJobs(found []*berthv1.Job) error {
	if p.output != outputTable {
		for _, job := range found {
			if err := p.show(job, job.GetId(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	t := p.newTable(1, "ID", "STATE", "OUTCOME", "SANDBOX", "AGE", "TOOK", "COMMAND")
	for _, job := range found {
		t.row(job.GetId(), jobState(job), cut(outcomeWords(job)), job.GetSandboxId(), p.age(job.GetCreateTime()),
			lasted(job.GetStartTime(), job.GetEndTime()), cut(commandWords(job.GetSpec())))
	}
	return t.flush()
}

func jobState(job *berthv1.Job) string {
	return strings.TrimPrefix(job.GetState().String(), jobStatePrefix)
}

func describeJob(job *berthv1.Job) string {
	return plain(jobState(job) + " " + cut(commandWords(job.GetSpec())))
}

// commandWords is the command as one could type it.
func commandWords(spec *berthv1.JobSpec) string {
	if spec.GetShell() != "" {
		return spec.GetShell()
	}
	words := make([]string, 0, len(spec.GetArgv()))
	for _, word := range spec.GetArgv() {
		if word == "" || strings.ContainsAny(word, " \t\n'\"\\$`*?[]{}()<>|&;!#~") {
			word = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// outcomeWords is how a job ended; empty while it has not.
func outcomeWords(job *berthv1.Job) string { return withReason(howAndWhy(job)) }

// endWords is outcomeWords with how long the job ran, unless its timeout says that.
func endWords(job *berthv1.Job) string {
	how, why := howAndWhy(job)
	ran := lastedWords(lasted(job.GetStartTime(), job.GetEndTime()))
	if ran != "" && job.GetOutcome().GetCause() != berthv1.Cause_CAUSE_TIMED_OUT {
		how += " " + ran
	}
	return withReason(how, why)
}

func withReason(how, why string) string {
	if why == "" {
		return how
	}
	return how + ": " + why
}

// howAndWhy is how a job ended and the reason, where that tells more.
func howAndWhy(job *berthv1.Job) (how, why string) {
	outcome := job.GetOutcome()
	switch outcome.GetCause() {
	case berthv1.Cause_CAUSE_EXITED:
		return "exited " + strconv.Itoa(codeOf(outcome)), ""
	case berthv1.Cause_CAUSE_SIGNALED:
		return "ended by signal " + signalWords(outcome.GetWaitStatus().GetSignal()), ""
	case berthv1.Cause_CAUSE_TIMED_OUT:
		how = "timed out"
		if timeout := job.GetSpec().GetTimeout(); timeout != nil {
			how += " after " + timeout.AsDuration().String()
		}
		return how, ""
	case berthv1.Cause_CAUSE_OOM_KILLED:
		return "killed for want of memory", outcome.GetReason()
	case berthv1.Cause_CAUSE_STOPPED:
		return stopWords(outcome.GetReason())
	case berthv1.Cause_CAUSE_FAILED_TO_START:
		return "did not start", outcome.GetReason()
	case berthv1.Cause_CAUSE_LOST:
		return "lost: what it did can't be known", outcome.GetReason()
	}
	return "", ""
}

// stopWords is how a job was stopped. The reason's first word before its colon is for programs.
func stopWords(reason string) (how, why string) {
	word, rest, found := strings.Cut(reason, ": ")
	switch {
	case word == "stop_requested":
		return "stopped on request", ""
	case found:
		return "stopped", rest
	}
	return "stopped", reason
}

func signalWords(number uint32) string {
	return fmt.Sprintf("%d (%v)", number, syscall.Signal(number))
}

// notKept says why there is no output of a job that is done, and what to do, if that is because none was
// kept at all; else it is empty.
func notKept(job *berthv1.Job) string {
	spec := job.GetSpec()
	switch {
	case job.GetState() != berthv1.JobState_JOB_STATE_DONE, spec == nil, spec.KeepOutput == nil, spec.GetKeepOutput():
		return ""
	case job.GetDetached():
		return "not kept (it was started with keep_output off)"
	}
	return "not kept (an attached command's output goes to its caller; start it detached to keep it)"
}

// survivorWords says what outlived the job.
func survivorWords(outcome *berthv1.Outcome) string {
	var words []string
	if pids := outcome.GetSurvivors(); len(pids) > 0 {
		words = append(words, "pids "+strings.Trim(fmt.Sprint(pids), "[]"))
	}
	if outcome.GetOutputStillOpen() {
		words = append(words, "a child that holds its output open")
	}
	return strings.Join(words, ", ")
}

// factsWords says how much there is of a stream.
func factsWords(job *berthv1.Job, facts *berthv1.OutputFacts) string {
	if facts == nil {
		return ""
	}
	words := bytesWords(facts.GetTotalBytes())
	switch why := notKept(job); {
	case facts.GetDroppedBytes() == 0:
	case why != "":
		words += ", " + why
	default:
		words += ", of which " + bytesWords(facts.GetDroppedBytes()) + " were dropped"
	}
	if !facts.GetSealed() {
		words += ", more may come"
	}
	return words
}
