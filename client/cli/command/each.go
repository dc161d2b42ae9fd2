package command

import (
	"context"

	"github.com/berth-sandbox/berth/client/cli/usage"
)

// Each does something for every argument, says what failed, and continues; it fails if one did.
func (p *Program) Each(ctx context.Context, what string, args []string, do func(string) error) error {
	if len(args) > 1 && p.RequestID != "" {
		return usage.Errorf("--request-id names one call: give one id with it")
	}
	failed := false
	for _, arg := range args {
		err := do(arg)
		switch {
		case err == nil:
		case usage.Is(err), ctx.Err() != nil, len(args) == 1:
			return err
		default:
			p.printCallError(what+" "+arg, err)
			failed = true
		}
	}
	if failed {
		return &ExitError{Code: usage.ExitFailure}
	}
	return nil
}
