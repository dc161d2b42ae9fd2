package command

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/present"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// CompletionTimeout bounds a completion: a shell waits for it between two key strokes.
const CompletionTimeout = time.Second

// Fixed completes a flag from a list.
func Fixed(values ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
}

// completeFrom completes arguments with what find returns, from their beginning or, as ids are given, from
// their end; at most one of them unless many.
func (p *Program) completeFrom(many bool, find func(context.Context, *client.Client) ([]candidate, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 && !many {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), CompletionTimeout)
		defer cancel()
		c, err := p.DialOnce()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		found, err := find(ctx, c)
		if closeErr := c.Close(); err != nil || closeErr != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var completions []cobra.Completion
		for _, one := range found {
			if strings.HasPrefix(one.id, typed) || typed != "" && strings.HasSuffix(one.id, strings.ToUpper(typed)) {
				completions = append(completions, cobra.CompletionWithDesc(one.id, one.description))
			}
		}
		return completions, cobra.ShellCompDirectiveNoFileComp
	}
}

// DialOnce is dial without retries, for completions.
func (p *Program) DialOnce() (*client.Client, error) {
	return p.dial(client.WithRetryTimeout(0, 0))
}

// CompleteLiveSandboxes completes ids of sandboxes that are not gone.
func (p *Program) CompleteLiveSandboxes(many bool) cobra.CompletionFunc {
	return p.completeFrom(many, func(ctx context.Context, c *client.Client) ([]candidate, error) {
		page, err := c.Sandboxes().ListSandboxes(ctx, &berthv1.ListSandboxesRequest{})
		var found []candidate
		for _, sandbox := range page.GetSandboxes() {
			found = append(found, candidate{id: sandbox.GetId(), description: present.DescribeSandbox(sandbox)})
		}
		return found, err
	})
}

// CompleteJobs completes ids of the newest jobs.
func (p *Program) CompleteJobs(many bool) cobra.CompletionFunc {
	return p.completeFrom(many, func(ctx context.Context, c *client.Client) ([]candidate, error) {
		page, err := c.Jobs().ListJobs(ctx, &berthv1.ListJobsRequest{})
		var found []candidate
		for _, job := range page.GetJobs() {
			found = append(found, candidate{id: job.GetId(), description: present.DescribeJob(job)})
		}
		return found, err
	})
}

// CompleteProviders completes names of providers, for a flag.
func (p *Program) CompleteProviders(cmd *cobra.Command, _ []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
	complete := p.completeFrom(true, func(ctx context.Context, c *client.Client) ([]candidate, error) {
		reply, err := c.Providers().ListProviders(ctx, &berthv1.ListProvidersRequest{})
		var found []candidate
		for _, provider := range reply.GetProviders() {
			found = append(found, candidate{id: provider.GetName(), description: present.IsolationWords(provider.GetIsolation())})
		}
		return found, err
	})
	return complete(cmd, nil, typed)
}
