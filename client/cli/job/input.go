package job

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
)

// InputCommand is `berth input`.
func InputCommand(p *command.Program) *cobra.Command {
	var thenClose bool
	cmd := &cobra.Command{
		Use:   "input [flags] JOB",
		Short: "Write standard input to that of a job begun with start -i",
		Long: `Write standard input, to its end, behind all that was written to the job's own before. Several may do so at
once: what one reads at a time, as a line from a pipe, stays together, and nothing is lost. It answers once the
job's machine has all of it, over restarts of the broker. With --eof the job's input is closed then.`,
		Example: `  echo yes | berth input 9XW4
  berth input --eof 9XW4 < answers.txt`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	cmd.Flags().BoolVar(&thenClose, "eof", false, "close the job's input at the end")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		if p.RequestID != "" {
			// It is many calls, of which a repetition would not know which were made.
			return usage.Errorf("--request-id: input can't be repeated: it goes behind what was written before; leave the flag out")
		}
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.Afterwards = "the job continues in the background"
		return c.AppendInput(ctx, id, p.Stdin, thenClose)
	})
	return cmd
}
