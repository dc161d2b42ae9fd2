package execute

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

// StartCommand is `berth start`.
func StartCommand(p *command.Program) *cobra.Command {
	var (
		f    jobFlags
		with streams
	)
	cmd := &cobra.Command{
		Use:   "start [flags] ID {-- CMD… | -c SCRIPT}",
		Short: "Start a background job and print its id",
		Long: `Start a background job in a sandbox and print its id. It answers once the job is on disk and runs; the job
survives this command and restarts of the broker. Follow it with logs, attach, poll, wait and stop. With -i its
input is open, for berth input and berth attach -i.`,
		Example: `  berth start 7QK2 -- go test ./...
  job=$(berth start 7QK2 -c 'npm run build' --timeout 30m) && berth logs -f $job`,
		Args:                  usage.CommandAfterDash(&f.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     p.CompleteLiveSandboxes(false),
	}
	f.bind(cmd.Flags())
	cmd.Flags().BoolVarP(&with.interactive, "interactive", "i", false, "keep its standard input open")
	cmd.Flags().BoolVarP(&with.terminal, "tty", "t", false, "run it in a terminal, of this one's size")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		spec, err := f.spec(p, args[1:])
		if err != nil {
			return err
		}
		if with.interactive {
			spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
		}
		if with.terminal {
			spec.Tty = p.TerminalSize()
			p.DescribeTerminal(spec)
		}
		id, err := command.SandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		requestID := p.RequestID
		if requestID == "" {
			requestID = client.NewRequestID()
		}
		p.Afterwards = "the job may have been started all the same: see `berth jobs " + id + "`, or join it with the same command and --request-id " + requestID
		reply, err := c.Jobs().StartJob(ctx, &berthv1.StartJobRequest{RequestId: requestID, SandboxId: id, Spec: spec})
		if err != nil {
			return err
		}
		job := reply.GetJob()
		if err := p.Show(job, job.GetId(), func() error { return p.PrintLine(job.GetId()) }); err != nil {
			return err
		}
		if job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_FAILED_TO_START {
			return fmt.Errorf("%s %s", job.GetId(), present.OutcomeWords(job))
		}
		return nil
	})
	return cmd
}
