// Command berthd is the broker: it wires the packages of the daemon and the providers together, opens
// the listeners and serves until it is told to stop. It holds no behaviour of its own beyond that,
// and it is the only package that knows a concrete provider.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	go func() {
		// A second signal ends at once, as the default action does: machines and jobs stay anyhow.
		<-ctx.Done()
		stop()
	}()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "berthd:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	flags := config{}
	cmd := &cobra.Command{
		Use:   "berthd",
		Short: "The sandbox broker: boots machines, runs commands and keeps jobs for agents",
		Long: `berthd owns every machine that agents work in. It keeps a ledger in its state directory, so that
it can be killed at any time and started again: machines and jobs go on meanwhile.

It prints one line when it is ready. SIGTERM drains and stops it; machines and jobs stay.`,
		Example: `  berthd
  berthd --state ./state --listen unix:///tmp/b.sock --provider local
  berthd --config /etc/berth/berthd.yaml`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("it takes flags only, and got %q (see berthd --help)", args[0])
			}
			return nil
		},
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       buildVersion(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			effective, err := resolve(cmd, flags)
			if err != nil {
				return err
			}
			return serve(cmd.Context(), effective, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.SetVersionTemplate("berthd {{.Version}}\n")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return fmt.Errorf("%w (see berthd --help)", err) })
	bind(cmd, &flags)
	return cmd
}
