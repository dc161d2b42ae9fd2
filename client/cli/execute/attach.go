package execute

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// AttachCommand is `berth attach`.
func AttachCommand(p *command.Program) *cobra.Command {
	var interactive, fromStart bool
	cmd := &cobra.Command{
		Use:   "attach [flags] JOB",
		Short: "Join a running job's output, and with -i its input; exit with its code",
		Long: `Join a running job: its output from now on, and with -i its input, which is taken over from whoever had it;
a job in a terminal then gets this one. Without -i it only reads. The first interrupt leaves, and the job continues in the background; in a terminal with -i keys go
to the job, so that closing the terminal is what leaves.`,
		Example: `  berth attach 9XW4
  berth attach -i 9XW4`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVar(&fromStart, "from-start", false, "print the output from its beginning")
	cmd.RunE = p.Call(usage.ExitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		if p.Output != command.OutputTable {
			return usage.Errorf("-o %s: attach shows the job's own output; use logs -f -o json for chunks", p.Output)
		}
		id, err := command.JobID(ctx, c, args[0])
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
		with := streams{interactive: interactive, terminal: interactive && job.GetSpec().GetTty() != nil}
		return runAttached(ctx, p, c, with, "the job continues in the background", func(ctx context.Context, io client.ExecIO) (*berthv1.Job, error) {
			return c.Attach(ctx, id, stdout, stderr, io)
		})
	})
	return cmd
}
