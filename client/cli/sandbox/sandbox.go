// Package sandbox holds the commands about sandboxes: create, ls, get, rm, suspend and resume. It runs
// nothing in them.
package sandbox

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// LsCommand is `berth ls`.
func LsCommand(p *command.Program) *cobra.Command {
	var (
		all            bool
		labels, states []string
		session        string
	)
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes, newest first",
		Long:    "List sandboxes, newest first. Destroyed and failed ones are shown with --all or by --state.",
		Example: `  berth ls
  berth ls --label run=42 --state running,stopped
  berth ls --all -o json | jq -r .id`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	flags := cmd.Flags()
	flags.BoolVarP(&all, "all", "a", false, "destroyed and failed ones too")
	flags.StringArrayVar(&labels, "label", nil, "only with this label: k=v, or k for any value")
	flags.StringSliceVar(&states, "state", nil, "only in these states, as running,stopped")
	flags.StringVar(&session, "session", "", "only the one with this session key")
	command.Must(cmd.RegisterFlagCompletionFunc("state", command.Fixed(usage.StateNames(berthv1.SandboxState_name, present.SandboxStatePrefix)...)))
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		request := &berthv1.ListSandboxesRequest{SessionKey: session}
		var err error
		if request.Labels, err = usage.LabelFilter("label", labels); err != nil {
			return err
		}
		numbers, err := usage.ParseStates(states, berthv1.SandboxState_value, present.SandboxStatePrefix)
		if err != nil {
			return err
		}
		for _, number := range numbers {
			request.States = append(request.States, berthv1.SandboxState(number))
		}
		if all && len(request.States) == 0 {
			request.States = command.AllSandboxStates()
		}
		found, err := command.ListSandboxes(ctx, c, request)
		if err != nil {
			return err
		}
		return printSandboxes(ctx, p, c, found)
	})
	return cmd
}

func printSandboxes(ctx context.Context, p *command.Program, c *client.Client, found []*berthv1.Sandbox) error {
	if p.Output != command.OutputTable {
		for _, sandbox := range found {
			if err := p.Show(sandbox, sandbox.GetId(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	open, err := command.CountOpenJobs(ctx, c, "")
	if err != nil {
		return err
	}
	t := p.NewTable(1, "ID", "STATE", "PROVIDER", "IMAGE", "JOBS", "AGE", "SESSION", "LABELS")
	for _, sandbox := range found {
		spec := sandbox.GetSpec()
		t.Row(sandbox.GetId(), present.SandboxState(sandbox), spec.GetProvider(), present.Cut(spec.GetImage()),
			fmt.Sprint(open[sandbox.GetId()]), p.Age(sandbox.GetCreateTime()), present.Cut(spec.GetSessionKey()), present.Cut(present.Pairs(spec.GetLabels())))
	}
	return t.Flush()
}

// GetCommand is `berth get`.
func GetCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get ID",
		Short: "Show one sandbox, also a destroyed one as long as its record is kept",
		Example: `  berth get 7QK2
  berth get sb_01KBA0Z6YR7Q5N3W8D4M1E7QK2 -o json | jq .state`,
		Args:              usage.ExactlyOne("one sandbox's id"),
		ValidArgsFunction: p.CompleteLiveSandboxes(false),
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.SandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		reply, err := c.Sandboxes().GetSandbox(ctx, &berthv1.GetSandboxRequest{SandboxId: id})
		if err != nil {
			return err
		}
		sandbox := reply.GetSandbox()
		return p.Show(sandbox, sandbox.GetId(), func() error {
			open, err := command.CountOpenJobs(ctx, c, id)
			if err != nil {
				return err
			}
			return sandboxBlock(p, sandbox, open[id])
		})
	})
	return cmd
}

func sandboxBlock(p *command.Program, sandbox *berthv1.Sandbox, open int) error {
	spec := sandbox.GetSpec()
	b := p.NewBlock()
	b.Field("Id", sandbox.GetId())
	b.Field("State", present.SandboxState(sandbox))
	if progress := sandbox.GetProgress(); progress != nil {
		b.Field("Doing", present.DoingWords(sandbox)+" ("+progress.GetOperationId()+")")
	}
	if problem := sandbox.GetLastError(); problem != nil {
		b.Field("Last error", present.WithHint(problem.GetReason()+": "+problem.GetMessage(), present.AgoWords(p.Age(problem.GetTime()))))
	}
	b.Field("Provider", spec.GetProvider())
	b.Field("Isolation", present.IsolationWords(sandbox.GetIsolation()))
	b.Field("Image", spec.GetImage())
	if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED { // it is gone with the rest
		b.Field("Workspace", sandbox.GetWorkspacePath())
	}
	if repo := spec.GetWorkspace().GetRepo(); repo != nil {
		b.Field("Repository", strings.TrimSuffix(repo.GetUrl()+" @ "+repo.GetRef(), " @ "))
	}
	b.Field("Resources", present.ResourcesWords(spec.GetResources()))
	b.Field("Egress", present.EgressWords(spec.GetEgress()))
	b.Field("Environment", present.Pairs(spec.GetEnv()))
	b.Field("Secrets", present.KeysOf(spec.GetSecretEnv()))
	b.Field("Session", spec.GetSessionKey())
	b.Field("Labels", present.Pairs(spec.GetLabels()))
	b.Field("Options", present.Pairs(spec.GetProviderOptions()))
	b.Field("From", spec.GetFromCheckpoint())
	b.Field("Machine", sandbox.GetMachineId())
	b.Field("Generation", fmt.Sprint(sandbox.GetGeneration()))
	b.Field("Open jobs", fmt.Sprint(open))
	b.Field("Created", present.WithHint(present.Moment(sandbox.GetCreateTime()), present.AgoWords(p.Age(sandbox.GetCreateTime()))))
	ready := "Last ready"
	if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		ready = "Ready since"
	}
	b.Field(ready, present.Moment(sandbox.GetReadyTime()))
	b.Field("Last used", present.AgoWords(p.Age(sandbox.GetLastActivityTime())))
	b.Field("Expires", present.WithHint(present.Moment(sandbox.GetExpireTime()), p.Ahead(sandbox.GetExpireTime())))
	b.Field("Destroyed", present.WithHint(present.Moment(sandbox.GetDestroyTime()), present.AgoWords(p.Age(sandbox.GetDestroyTime()))))
	b.Field("Retained until", present.Moment(sandbox.GetRetention().GetUntil()))
	for _, lease := range sandbox.GetLeases() {
		b.Field("Lease", fmt.Sprintf("%s by %s, epoch %d", lease.GetId(), lease.GetHolder(), lease.GetEpoch()))
	}
	b.Field("Capabilities", strings.Join(sandbox.GetCapabilities(), ", "))
	return b.Flush()
}

// RmCommand is `berth rm`.
func RmCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rm ID…",
		Short: "Destroy sandboxes with all that runs in them",
		Long: `Destroy sandboxes with all that runs in them, and print the ids of those that are gone. It works from every
state, and a second time too. One that fails does not keep the others from being destroyed.`,
		Example: `  berth rm 7QK2
  berth rm $(berth ls --label run=42 -o id)`,
		Args:              usage.AtLeastOne("a sandbox's id"),
		ValidArgsFunction: p.CompleteLiveSandboxes(true),
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		p.Afterwards = "what was begun continues in the background"
		return p.Each(ctx, "rm", args, func(given string) error {
			id, err := command.SandboxID(ctx, c, given)
			if err != nil {
				return err
			}
			reply, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{RequestId: p.RequestID, SandboxId: id})
			if err != nil {
				return err
			}
			return p.Show(reply.GetSandbox(), id, func() error { return p.PrintLine(id) })
		})
	})
	return cmd
}

// SuspendCommand is `berth suspend`.
func SuspendCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "suspend ID",
		Short: "Freeze or stop a sandbox until it is resumed",
		Long: `Freeze or stop a sandbox until it is resumed, and print its id. Its disk is kept; its processes and memory are
where the provider can freeze a machine, see berth providers. resume makes it run again.`,
		Example:           `  berth suspend 7QK2 && berth resume 7QK2`,
		Args:              usage.ExactlyOne("one sandbox's id"),
		ValidArgsFunction: p.CompleteLiveSandboxes(false),
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.SandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.Afterwards = "the operation continues in the background"
		reply, err := c.Sandboxes().SuspendSandbox(ctx, &berthv1.SuspendSandboxRequest{RequestId: p.RequestID, SandboxId: id})
		if err != nil {
			return err
		}
		return p.Show(reply.GetSandbox(), id, func() error { return p.PrintLine(id) })
	})
	return cmd
}

// ResumeCommand is `berth resume`.
func ResumeCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume ID",
		Short: "Make a suspended or stopped sandbox run again",
		Long: `Make a suspended or stopped sandbox run again. A stopped one keeps its disk but not its processes: it
gets a new generation.`,
		Example:           `  berth resume 7QK2`,
		Args:              usage.ExactlyOne("one sandbox's id"),
		ValidArgsFunction: p.CompleteLiveSandboxes(false),
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.SandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.Afterwards = "the operation continues in the background"
		reply, err := c.Sandboxes().ResumeSandbox(ctx, &berthv1.ResumeSandboxRequest{RequestId: p.RequestID, SandboxId: id})
		if err != nil {
			return err
		}
		return p.Show(reply.GetSandbox(), id, func() error { return p.PrintLine(id) })
	})
	return cmd
}
