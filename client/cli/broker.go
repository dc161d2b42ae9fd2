package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (p *program) providersCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "providers",
		Short: "List what boots machines here, and what each can do",
		Example: `  berth providers
  berth providers -o json | jq -r 'select(.healthy).name'`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		reply, err := c.Providers().ListProviders(ctx, &berthv1.ListProvidersRequest{})
		if err != nil {
			return err
		}
		return p.showProviders(reply.GetProviders())
	})
	return cmd
}

func (p *program) showProviders(found []*berthv1.Provider) error {
	if p.output != outputTable {
		for _, provider := range found {
			if err := p.show(provider, provider.GetName(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	t := p.newTable(1, "NAME", "HEALTHY", "DEFAULT", "ISOLATION", "CAPABILITIES", "MESSAGE")
	for _, provider := range found {
		var capabilities []string
		for _, capability := range provider.GetCapabilities() {
			capabilities = append(capabilities, capability.GetName())
		}
		t.row(provider.GetName(), yesNo(provider.GetHealthy()), yesNo(provider.GetIsDefault()),
			isolationWords(provider.GetIsolation()), strings.Join(capabilities, ","), provider.GetMessage())
	}
	return t.flush()
}

func yesNo(yes bool) string {
	if yes {
		return "yes"
	}
	return "no"
}

func (p *program) infoCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "info",
		Short:             "Show who the broker is and how it fares",
		Example:           `  berth info`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		info, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		if err != nil {
			return err
		}
		return p.show(info, info.GetInstanceId(), func() error { return p.infoBlock(c.Address(), info) })
	})
	return cmd
}

func (p *program) infoBlock(address string, info *berthv1.GetInfoResponse) error {
	b := p.newBlock()
	b.fact("Address", address)
	b.fact("Version", strings.TrimSpace(info.GetVersion()+" "+info.GetPlatform()))
	b.fact("Instance", info.GetInstanceId())
	b.fact("Started", withHint(moment(info.GetStartTime()), agoWords(p.age(info.GetStartTime()))))
	b.fact("State", info.GetStateDir())
	b.fact("Ledger", fmt.Sprintf("%s, schema %d, revision %d", bytesWords(info.GetLedgerBytes()), info.GetSchemaVersion(), info.GetRevision()))
	b.fact("Output kept", bytesWords(info.GetOutputBytes()))
	b.fact("Resident", bytesWords(info.GetResidentBytes()))
	b.fact("Sandboxes", countsWords(info.GetSandboxes()))
	b.fact("Open jobs", fmt.Sprint(info.GetOpenJobs()))
	b.fact("Open operations", fmt.Sprint(info.GetOpenOperations()))
	if machines := info.GetRecoveringMachines(); machines > 0 {
		b.fact("Recovering", fmt.Sprintf("%d machines have not answered since the start", machines))
	}
	if machines := info.GetOrphanMachines(); machines > 0 {
		b.fact("Orphans", fmt.Sprintf("%d that no record names, the oldest known for %s", machines, roughly(info.GetOldestOrphan().AsDuration())))
	}
	return b.flush()
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

func (p *program) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "version",
		Short:             "Show the versions of this program and of the broker",
		Example:           `  berth version`,
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := p.showVersion(cmd.Context()); isUsage(err) {
			return err
		} else if err != nil {
			return &exitError{code: exitFailure, err: err}
		}
		return nil
	}
	return cmd
}

// showVersion asks the broker once and does not insist: this program's version is known without it.
func (p *program) showVersion(ctx context.Context) error {
	own := p.ownVersion()
	if p.output == outputID {
		return p.printLine(own)
	}
	broker, address, err := p.brokerVersion(ctx)
	if isUsage(err) {
		return err
	}
	if p.output == outputJSON {
		line, err := json.Marshal(struct {
			Client string `json:"client"`
			Broker string `json:"broker,omitempty"`
		}{own, broker})
		if err != nil {
			return fmt.Errorf("writing the versions as JSON: %w", err)
		}
		return p.printLine(string(line))
	}
	if err := p.printLine(fmt.Sprintf("berth %s %s/%s", own, runtime.GOOS, runtime.GOARCH)); err != nil {
		return err
	}
	if err != nil {
		return p.printLine("berthd: " + plain(p.explain(err)))
	}
	return p.printLine(fmt.Sprintf("berthd %s at %s", broker, address))
}

func (p *program) brokerVersion(ctx context.Context) (version, address string, err error) {
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	c, err := p.dialOnce()
	if err != nil {
		return "", "", err
	}
	info, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
	if closeErr := c.Close(); err == nil {
		err = closeErr
	}
	return info.GetVersion(), c.Address(), err
}

func (p *program) ownVersion() string {
	if p.Version != "" {
		return p.Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
