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
		Long: `Write standard input, to its end, behind what the job's own has taken so far. It answers once the job's machine
has all of it, over restarts of the broker. With --eof the job's input is closed then.`,
		Example: `  echo yes | berth input 9XW4
  berth input --eof 9XW4 < answers.txt`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	cmd.Flags().BoolVar(&thenClose, "eof", false, "close the job's input at the end")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		if p.RequestID != "" {
			// A repetition would look anew where the input ends, and write behind what the first wrote.
			return usage.Errorf("--request-id: input can't be repeated: it goes behind what the job has taken so far; leave the flag out")
		}
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		offset, err := c.InputOffset(ctx, id)
		if err != nil {
			return err
		}
		p.Afterwards = "the job continues in the background"
		_, err = c.Feed(ctx, id, offset, p.Stdin, thenClose)
		return err
	})
	return cmd
}
