// Package broker holds the commands about the broker itself: providers, info, version, fsck and backup.
// It shows what the broker says and repairs nothing by itself.
package broker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ProvidersCommand is `berth providers`.
func ProvidersCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "providers",
		Short: "List what boots machines here, and what each can do",
		Example: `  berth providers
  berth providers -o json | jq -r 'select(.healthy).name'`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		reply, err := c.Providers().ListProviders(ctx, &berthv1.ListProvidersRequest{})
		if err != nil {
			return err
		}
		return printProviders(p, reply.GetProviders())
	})
	return cmd
}

func printProviders(p *command.Program, found []*berthv1.Provider) error {
	if p.Output != command.OutputTable {
		for _, provider := range found {
			if err := p.Show(provider, provider.GetName(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	t := p.NewTable(1, "NAME", "HEALTHY", "DEFAULT", "ISOLATION", "CAPABILITIES", "MESSAGE")
	for _, provider := range found {
		var capabilities []string
		for _, capability := range provider.GetCapabilities() {
			capabilities = append(capabilities, capability.GetName())
		}
		t.Row(provider.GetName(), yesNo(provider.GetHealthy()), yesNo(provider.GetIsDefault()),
			present.IsolationWords(provider.GetIsolation()), strings.Join(capabilities, ","), provider.GetMessage())
	}
	return t.Flush()
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

// InfoCommand is `berth info`.
func InfoCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:               "info",
		Short:             "Show who the broker is and how it fares",
		Example:           `  berth info`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		info, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		if err != nil {
			return err
		}
		return p.Show(info, info.GetInstanceId(), func() error { return infoBlock(p, c.Address(), info) })
	})
	return cmd
}

func infoBlock(p *command.Program, address string, info *berthv1.GetInfoResponse) error {
	b := p.NewBlock()
	b.Field("Address", address)
	b.Field("Version", strings.TrimSpace(info.GetVersion()+" "+info.GetPlatform()))
	b.Field("Instance", info.GetInstanceId())
	b.Field("Started", present.WithHint(present.Moment(info.GetStartTime()), present.AgoWords(p.Age(info.GetStartTime()))))
	b.Field("State", info.GetStateDir())
	b.Field("Ledger", fmt.Sprintf("%s, schema %d, revision %d", present.BytesWords(info.GetLedgerBytes()), info.GetSchemaVersion(), info.GetRevision()))
	b.Field("Output kept", present.BytesWords(info.GetOutputBytes()))
	b.Field("Resident", present.BytesWords(info.GetResidentBytes()))
	b.Field("Sandboxes", countsWords(info.GetSandboxes()))
	b.Field("Open jobs", fmt.Sprint(info.GetOpenJobs()))
	b.Field("Open operations", fmt.Sprint(info.GetOpenOperations()))
	if machines := info.GetRecoveringMachines(); machines > 0 {
		b.Field("Recovering", fmt.Sprintf("%d machines have not answered since the start", machines))
	}
	if machines := info.GetOrphanMachines(); machines > 0 {
		b.Field("Orphans", fmt.Sprintf("%d that no record names, the oldest known for %s", machines, present.Roughly(info.GetOldestOrphan().AsDuration())))
	}
	return b.Flush()
}

func countsWords(counts map[string]uint32) string {
	if len(counts) == 0 {
		return "none"
	}
	words := make([]string, 0, len(counts))
	for _, state := range slices.Sorted(maps.Keys(counts)) {
		words = append(words, fmt.Sprintf("%d %s", counts[state], strings.ToLower(state)))
	}
	return strings.Join(words, ", ")
}
