package broker

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// VersionCommand is `berth version`.
func VersionCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:               "version",
		Short:             "Show the versions of this program and of the broker",
		Example:           `  berth version`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := printVersion(cmd.Context(), p); usage.Is(err) {
			return err
		} else if err != nil {
			return &command.ExitError{Code: usage.ExitFailure, Err: err}
		}
		return nil
	}
	return cmd
}

// printVersion asks the broker once and does not insist: this program's version is known without it.
func printVersion(ctx context.Context, p *command.Program) error {
	own := p.OwnVersion()
	if p.Output == command.OutputID {
		return p.PrintLine(own)
	}
	broker, address, err := brokerVersion(ctx, p)
	if usage.Is(err) {
		return err
	}
	if p.Output == command.OutputJSON {
		line, err := json.Marshal(struct {
			Client string `json:"client"`
			Broker string `json:"broker,omitempty"`
		}{own, broker})
		if err != nil {
			return fmt.Errorf("writing the versions as JSON: %w", err)
		}
		return p.PrintLine(string(line))
	}
	if err := p.PrintLine(fmt.Sprintf("berth %s %s/%s", own, runtime.GOOS, runtime.GOARCH)); err != nil {
		return err
	}
	if err != nil {
		return p.PrintLine("berthd: " + present.Plain(p.Explain(err)))
	}
	return p.PrintLine(fmt.Sprintf("berthd %s at %s", broker, address))
}

func brokerVersion(ctx context.Context, p *command.Program) (version, address string, err error) {
	ctx, cancel := context.WithTimeout(ctx, command.CompletionTimeout)
	defer cancel()
	c, err := p.DialOnce()
	if err != nil {
		return "", "", err
	}
	info, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
	if closeErr := c.Close(); err == nil {
		err = closeErr
	}
	return info.GetVersion(), c.Address(), err
}
