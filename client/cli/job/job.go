// Package job holds the commands about jobs that were begun: poll, wait, logs, input, signal, stop and
// jobs. It begins none.
package job

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// PollCommand is `berth poll`.
func PollCommand(p *command.Program) *cobra.Command {
	wait := usage.Duration{Max: usage.MaxPoll}
	cmd := &cobra.Command{
		Use:   "poll JOB",
		Short: "Show how a job is and the end of its output; exit 0 if done, 3 if not",
		Long: `Show how a job is and the end of its output, and exit with 0 if it is done, else with 3. With --wait it answers
when the job is done or the wait is over. A job that is UNKNOWN, because its machine is stopped, is answered at
once and with 3 in spite of --wait: resume its sandbox to learn how it ended.`,
		Example: `  berth poll 9XW4
  berth poll 9XW4 --wait 30s -o json`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	cmd.Flags().Var(&wait, "wait", "answer when it is done or after this long, at most 10m (default at once); an UNKNOWN job is answered at once")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.Afterwards = "the job continues in the background"
		reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{
			JobId: id, Wait: wait.Proto(), Tails: true, TextOutput: p.Output == command.OutputJSON,
		})
		if err != nil {
			return err
		}
		if err := p.Show(reply, id, func() error { return pollBlock(p, reply) }); err != nil {
			return err
		}
		if reply.GetJob().GetState() != berthv1.JobState_JOB_STATE_DONE {
			return &command.ExitError{Code: usage.ExitRunning}
		}
		return nil
	})
	return cmd
}

func pollBlock(p *command.Program, reply *berthv1.PollJobResponse) error {
	job := reply.GetJob()
	b := p.NewBlock()
	b.Field("Id", job.GetId())
	b.Field("State", present.JobState(job))
	b.Field("Outcome", present.OutcomeWords(job))
	b.Field("Command", present.Cut(present.CommandWords(job.GetSpec())))
	b.Field("Sandbox", job.GetSandboxId())
	b.Field("Created", present.WithHint(present.Moment(job.GetCreateTime()), present.AgoWords(p.Age(job.GetCreateTime()))))
	b.Field("Took", present.Lasted(job.GetStartTime(), job.GetEndTime()))
	b.Field("Left running", present.SurvivorWords(job.GetOutcome()))
	b.Field("Stdout", present.StatsWords(job, job.GetStdout()))
	b.Field("Stderr", present.StatsWords(job, job.GetStderr()))
	if err := b.Flush(); err != nil {
		return err
	}
	for _, tail := range []struct {
		name   string
		output *berthv1.BoundedOutput
	}{{"stdout", reply.GetStdout()}, {"stderr", reply.GetStderr()}} {
		if err := writeTail(p, tail.name, tail.output); err != nil {
			return err
		}
	}
	return nil
}

// writeTail writes the end of a stream beneath a line that names it, and ends its last line.
func writeTail(p *command.Program, name string, output *berthv1.BoundedOutput) error {
	end := append(append([]byte{}, output.GetHead()...), output.GetTail()...)
	if len(end) == 0 {
		return nil
	}
	title := "==> " + name + " <=="
	if output.GetOmittedBytes() > 0 {
		title = fmt.Sprintf("==> %s, its last %s <==", name, present.BytesWords(uint64(len(end))))
	}
	if end[len(end)-1] != '\n' {
		end = append(end, '\n')
	}
	_, err := fmt.Fprintf(p.Stdout, "\n%s\n%s", title, end)
	return err
}

// WaitCommand is `berth wait`.
func WaitCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "wait JOB",
		Short: "Wait until a job is done and exit with its code",
		Long: `Wait until a job is done, say how it ended, and exit with its code: 124 when it timed out, 128+n when a signal
ended it, 125 when it is lost or the broker failed. A broker that was reached once may be away for however long:
it waits as long as it is left to, or until --deadline.`,
		Example: `  berth wait 9XW4 && echo good
  berth wait --deadline 10m 9XW4`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	cmd.RunE = p.Call(usage.ExitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.Afterwards = "the job continues in the background"
		job, err := waitThroughOutages(ctx, p, c, id)
		if err != nil {
			return err
		}
		err = p.Show(job, id, func() error {
			return p.PrintLine(present.Plain(id + " " + present.EndWords(job)))
		})
		if err != nil {
			return err
		}
		if p.Output != command.OutputTable { // the line above says it
			p.PrintOutcome(job)
		}
		return p.ExitAs(job)
	})
	return cmd
}

// waitThroughOutages waits for as long as it is left to: a broker that answered once may be away for long.
func waitThroughOutages(ctx context.Context, p *command.Program, c *client.Client, id string) (*berthv1.Job, error) {
	if _, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: id}); err != nil {
		return nil, err
	}
	for said := false; ; said = true {
		job, err := c.WaitJob(ctx, id)
		if err == nil || ctx.Err() != nil || !command.IsUnreachable(err) {
			return job, err
		}
		if !said {
			p.PrintError("wait", "the broker is away, and is being reached again")
		}
	}
}

// StopCommand is `berth stop`.
func StopCommand(p *command.Program) *cobra.Command {
	grace := usage.Duration{Max: usage.MaxGrace}
	cmd := &cobra.Command{
		Use:   "stop JOB…",
		Short: "Stop jobs: TERM, then after a grace KILL, to the whole tree",
		Long: `Stop jobs: TERM to the process group, then after a grace KILL to the whole tree; it answers when nothing of
it is left. On a finished job it kills what that left running. The ids of the stopped are printed.`,
		Example: `  berth stop 9XW4
  berth stop --grace 0s 9XW4`,
		Args:              usage.AtLeastOne("a job's id"),
		ValidArgsFunction: p.CompleteJobs(true),
	}
	cmd.Flags().Var(&grace, "grace", "between TERM and KILL; 0s kills at once (default the job's kill grace)")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		p.Afterwards = "the stop continues in the background"
		return p.Each(ctx, "stop", args, func(given string) error {
			id, err := command.JobID(ctx, c, given)
			if err != nil {
				return err
			}
			reply, err := c.Jobs().StopJob(ctx, &berthv1.StopJobRequest{RequestId: p.RequestID, JobId: id, Grace: grace.Proto()})
			if err != nil {
				return err
			}
			return p.Show(reply.GetJob(), id, func() error { return p.PrintLine(id) })
		})
	})
	return cmd
}

// JobsCommand is `berth jobs`.
func JobsCommand(p *command.Program) *cobra.Command {
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
		Args:              usage.AtMostOne("one sandbox's id"),
		ValidArgsFunction: p.CompleteLiveSandboxes(false),
	}
	flags := cmd.Flags()
	flags.BoolVar(&open, "open", false, "only those that are not done")
	flags.StringArrayVar(&labels, "label", nil, "only with this label: k=v, or k for any value")
	flags.StringSliceVar(&states, "state", nil, "only in these states, as running,done")
	command.Must(cmd.RegisterFlagCompletionFunc("state", command.Fixed(usage.StateNames(berthv1.JobState_name, present.JobStatePrefix)...)))
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		request := &berthv1.ListJobsRequest{}
		var err error
		if request.Labels, err = usage.LabelFilter("label", labels); err != nil {
			return err
		}
		numbers, err := usage.ParseStates(states, berthv1.JobState_value, present.JobStatePrefix)
		if err != nil {
			return err
		}
		for _, number := range numbers {
			request.States = append(request.States, berthv1.JobState(number))
		}
		if open && len(states) > 0 {
			return usage.Errorf("--open and --state: give one of them")
		}
		if open {
			request.States = command.OpenJobStates()
		}
		if len(args) == 1 {
			if request.SandboxId, err = command.SandboxID(ctx, c, args[0]); err != nil {
				return err
			}
		}
		found, err := command.ListJobs(ctx, c, request)
		if err != nil {
			return err
		}
		return printJobs(p, found)
	})
	return cmd
}

func printJobs(p *command.Program, found []*berthv1.Job) error {
	if p.Output != command.OutputTable {
		for _, job := range found {
			if err := p.Show(job, job.GetId(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	t := p.NewTable(1, "ID", "STATE", "OUTCOME", "SANDBOX", "AGE", "TOOK", "COMMAND")
	for _, job := range found {
		t.Row(job.GetId(), present.JobState(job), present.Cut(present.OutcomeWords(job)), job.GetSandboxId(), p.Age(job.GetCreateTime()),
			present.Lasted(job.GetStartTime(), job.GetEndTime()), present.Cut(present.CommandWords(job.GetSpec())))
	}
	return t.Flush()
}
