// Command berthd is the broker: it wires the packages of the daemon and the providers together, opens
// the listeners and serves until it is told to stop. It holds no behaviour of its own beyond that,
// and it is the only package that knows a concrete provider.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return fmt.Errorf("%w (see berthd --help)", flagError(err)) })
	bind(cmd, &flags)
	return cmd
}

// flagError says what a flag takes, where the parser would tell of its own functions.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	flag := invalid.GetFlag()
	takes, known := map[string]string{
		"bool": "true or false, or nothing", "int": "a whole number", "uint64": "a whole number from 0 on",
	}[flag.Value.Type()]
	if !known {
		return fmt.Errorf("--%s %q: %w", flag.Name, invalid.GetValue(), invalid.Unwrap())
	}
	return fmt.Errorf("--%s %q: it takes %s", flag.Name, invalid.GetValue(), takes)
}
