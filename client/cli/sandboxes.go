package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (p *program) lsCommand() *cobra.Command {
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
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	flags := cmd.Flags()
	flags.BoolVarP(&all, "all", "a", false, "destroyed and failed ones too")
	flags.StringArrayVar(&labels, "label", nil, "only with this label: k=v, or k for any value")
	flags.StringSliceVar(&states, "state", nil, "only in these states, as running,stopped")
	flags.StringVar(&session, "session", "", "only the one with this session key")
	must(cmd.RegisterFlagCompletionFunc("state", fixed(stateNames(berthv1.SandboxState_name, sandboxStatePrefix)...)))
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		request := &berthv1.ListSandboxesRequest{SessionKey: session}
		var err error
		if request.Labels, err = labelFilter("label", labels); err != nil {
			return err
		}
		numbers, err := parseStates(states, berthv1.SandboxState_value, sandboxStatePrefix)
		if err != nil {
			return err
		}
		for _, number := range numbers {
			request.States = append(request.States, berthv1.SandboxState(number))
		}
		if all && len(request.States) == 0 {
			request.States = allSandboxStates()
		}
		found, err := listSandboxes(ctx, c, request)
		if err != nil {
			return err
		}
		return p.showSandboxes(found)
	})
	return cmd
}

func (p *program) showSandboxes(found []*berthv1.Sandbox) error {
	if p.output != outputTable {
		for _, sandbox := range found {
			if err := p.show(sandbox, sandbox.GetId(), nil); err != nil {
				return err
			}
		}
		return nil
	}
	t := p.newTable(1, "ID", "STATE", "PROVIDER", "IMAGE", "JOBS", "AGE", "SESSION", "LABELS")
	for _, sandbox := range found {
		spec := sandbox.GetSpec()
		t.row(sandbox.GetId(), sandboxState(sandbox), spec.GetProvider(), cut(spec.GetImage()),
			fmt.Sprint(sandbox.GetOpenJobs()), p.age(sandbox.GetCreateTime()), cut(spec.GetSessionKey()), cut(pairs(spec.GetLabels())))
	}
	return t.flush()
}

func (p *program) getCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get ID",
		Short: "Show one sandbox, also a destroyed one as long as its record is kept",
		Example: `  berth get 7QK2
  berth get sb_01KBA0Z6YR7Q5N3W8D4M1E7QK2 -o json | jq .state`,
		Args:              exactlyOne("one sandbox's id"),
		ValidArgsFunction: p.completeLiveSandboxes(false),
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := sandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		reply, err := c.Sandboxes().GetSandbox(ctx, &berthv1.GetSandboxRequest{SandboxId: id})
		if err != nil {
			return err
		}
		sandbox := reply.GetSandbox()
		return p.show(sandbox, sandbox.GetId(), func() error { return p.sandboxBlock(sandbox) })
	})
	return cmd
}

func (p *program) sandboxBlock(sandbox *berthv1.Sandbox) error {
	spec := sandbox.GetSpec()
	b := p.newBlock()
	b.fact("Id", sandbox.GetId())
	b.fact("State", sandboxState(sandbox))
	if progress := sandbox.GetProgress(); progress != nil {
		b.fact("Doing", doingWords(sandbox)+" ("+progress.GetOperationId()+")")
	}
	if problem := sandbox.GetLastError(); problem != nil {
		b.fact("Last error", withHint(problem.GetReason()+": "+problem.GetMessage(), agoWords(p.age(problem.GetTime()))))
	}
	b.fact("Provider", spec.GetProvider())
	b.fact("Isolation", isolationWords(sandbox.GetIsolation()))
	b.fact("Image", spec.GetImage())
	if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED { // it is gone with the rest
		b.fact("Workspace", sandbox.GetWorkspacePath())
	}
	if repo := spec.GetWorkspace().GetRepo(); repo != nil {
		b.fact("Repository", strings.TrimSuffix(repo.GetUrl()+" @ "+repo.GetRef(), " @ "))
	}
	b.fact("Resources", resourcesWords(spec.GetResources()))
	b.fact("Egress", egressWords(spec.GetEgress()))
	b.fact("Environment", pairs(spec.GetEnv()))
	b.fact("Secrets", keysOf(spec.GetSecretEnv()))
	b.fact("Session", spec.GetSessionKey())
	b.fact("Labels", pairs(spec.GetLabels()))
	b.fact("Options", pairs(spec.GetProviderOptions()))
	b.fact("From", spec.GetFromCheckpoint())
	b.fact("Machine", sandbox.GetMachineId())
	b.fact("Generation", fmt.Sprint(sandbox.GetGeneration()))
	b.fact("Open jobs", fmt.Sprint(sandbox.GetOpenJobs()))
	b.fact("Created", withHint(moment(sandbox.GetCreateTime()), agoWords(p.age(sandbox.GetCreateTime()))))
	ready := "Last ready"
	if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		ready = "Ready since"
	}
	b.fact(ready, moment(sandbox.GetReadyTime()))
	b.fact("Last used", agoWords(p.age(sandbox.GetLastActivityTime())))
	b.fact("Expires", withHint(moment(sandbox.GetExpireTime()), p.ahead(sandbox.GetExpireTime())))
	b.fact("Destroyed", withHint(moment(sandbox.GetDestroyTime()), agoWords(p.age(sandbox.GetDestroyTime()))))
	b.fact("Retained until", moment(sandbox.GetRetention().GetUntil()))
	for _, lease := range sandbox.GetLeases() {
		b.fact("Lease", fmt.Sprintf("%s by %s, epoch %d", lease.GetId(), lease.GetHolder(), lease.GetEpoch()))
	}
	b.fact("Capabilities", strings.Join(sandbox.GetCapabilities(), ", "))
	return b.flush()
}

func (p *program) rmCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rm ID…",
		Short: "Destroy sandboxes with all that runs in them",
		Long: `Destroy sandboxes with all that runs in them, and print the ids of those that are gone. It works from every
state, and a second time too. One that fails does not keep the others from being destroyed.`,
		Example: `  berth rm 7QK2
  berth rm $(berth ls --label run=42 -o id)`,
		Args:              atLeastOne("a sandbox's id"),
		ValidArgsFunction: p.completeLiveSandboxes(true),
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		p.afterwards = "what was begun goes on in the broker"
		return p.each(ctx, "rm", args, func(given string) error {
			id, err := sandboxID(ctx, c, given)
			if err != nil {
				return err
			}
			reply, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{RequestId: p.requestID, SandboxId: id})
			if err != nil {
				return err
			}
			return p.show(reply.GetSandbox(), id, func() error { return p.printLine(id) })
		})
	})
	return cmd
}

// each does something for every argument, says what failed, and goes on; it fails if one did.
func (p *program) each(ctx context.Context, what string, args []string, do func(string) error) error {
	if len(args) > 1 && p.requestID != "" {
		return usagef("--request-id names one call: give one id with it")
	}
	failed := false
	for _, arg := range args {
		err := do(arg)
		switch {
		case err == nil:
		case isUsage(err), ctx.Err() != nil, len(args) == 1:
			return err
		default:
			p.complainAbout(what+" "+arg, err)
			failed = true
		}
	}
	if failed {
		return &exitError{code: exitFailure}
	}
	return nil
}

func (p *program) suspendCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "suspend ID",
		Short: "Freeze or stop a sandbox until it is resumed",
		Long: `Freeze or stop a sandbox until it is resumed, and print its id. Its disk is kept; its processes and memory are
where the provider can freeze a machine, see berth providers. resume makes it run again.`,
		Example:           `  berth suspend 7QK2 && berth resume 7QK2`,
		Args:              exactlyOne("one sandbox's id"),
		ValidArgsFunction: p.completeLiveSandboxes(false),
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := sandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.afterwards = "the operation goes on in the broker"
		reply, err := c.Sandboxes().SuspendSandbox(ctx, &berthv1.SuspendSandboxRequest{RequestId: p.requestID, SandboxId: id})
		if err != nil {
			return err
		}
		return p.show(reply.GetSandbox(), id, func() error { return p.printLine(id) })
	})
	return cmd
}

func (p *program) resumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resume ID",
		Short: "Make a suspended or stopped sandbox run again",
		Long: `Make a suspended or stopped sandbox run again. A stopped one keeps its disk but not its processes: it
gets a new generation.`,
		Example:           `  berth resume 7QK2`,
		Args:              exactlyOne("one sandbox's id"),
		ValidArgsFunction: p.completeLiveSandboxes(false),
	}
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := sandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		p.afterwards = "the operation goes on in the broker"
		reply, err := c.Sandboxes().ResumeSandbox(ctx, &berthv1.ResumeSandboxRequest{RequestId: p.requestID, SandboxId: id})
		if err != nil {
			return err
		}
		return p.show(reply.GetSandbox(), id, func() error { return p.printLine(id) })
	})
	return cmd
}

const (
	sandboxStatePrefix = "SANDBOX_STATE_"
	jobStatePrefix     = "JOB_STATE_"
)

func sandboxState(sandbox *berthv1.Sandbox) string {
	return strings.TrimPrefix(sandbox.GetState().String(), sandboxStatePrefix)
}

func allSandboxStates() []berthv1.SandboxState {
	var all []berthv1.SandboxState
	for number := range berthv1.SandboxState_name {
		if number != int32(berthv1.SandboxState_SANDBOX_STATE_UNSPECIFIED) {
			all = append(all, berthv1.SandboxState(number))
		}
	}
	slices.Sort(all)
	return all
}

// parseStates turns names as people write them into an enum's numbers.
func parseStates(given []string, values map[string]int32, prefix string) ([]int32, error) {
	var numbers []int32
	for _, name := range given {
		number := values[prefix+strings.ToUpper(name)]
		if number == 0 {
			known := make(map[int32]string, len(values))
			for value, n := range values {
				known[n] = value
			}
			return nil, usagef("--state %s: it must be one of %s", name, strings.Join(stateNames(known, prefix), ", "))
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}

// stateNames are an enum's names as people write them, in the enum's order.
func stateNames(names map[int32]string, prefix string) []string {
	var all []string
	for number := int32(1); names[number] != ""; number++ {
		all = append(all, strings.ToLower(strings.TrimPrefix(names[number], prefix)))
	}
	return all
}

func describeSandbox(sandbox *berthv1.Sandbox) string {
	words := []string{sandboxState(sandbox), sandbox.GetSpec().GetProvider(), sandbox.GetSpec().GetImage(), sandbox.GetSpec().GetSessionKey()}
	return plain(strings.Join(slices.DeleteFunc(words, func(word string) bool { return word == "" }), " "))
}

func isolationWords(isolation berthv1.Isolation) string {
	words := strings.TrimPrefix(isolation.String(), "ISOLATION_")
	if isolation == berthv1.Isolation_ISOLATION_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(words)
}

func resourcesWords(resources *berthv1.Resources) string {
	var words []string
	if resources.GetCpus() > 0 {
		words = append(words, fmt.Sprintf("%g CPUs", resources.GetCpus()))
	}
	if resources.GetMemoryBytes() > 0 {
		words = append(words, bytesWords(resources.GetMemoryBytes())+" memory")
	}
	if resources.GetDiskBytes() > 0 {
		words = append(words, bytesWords(resources.GetDiskBytes())+" disk")
	}
	if resources.GetPids() > 0 {
		words = append(words, fmt.Sprintf("%d pids", resources.GetPids()))
	}
	return strings.Join(words, ", ")
}

func egressWords(egress *berthv1.Egress) string {
	switch egress.GetMode() {
	case berthv1.Egress_MODE_NONE:
		return "none"
	case berthv1.Egress_MODE_ALLOW_LIST:
		return "only " + strings.Join(egress.GetAllowHosts(), ", ")
	}
	return "open"
}

func keysOf(secrets map[string]string) string {
	keys := make([]string, 0, len(secrets))
	for key := range secrets {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return strings.Join(keys, ",")
}

func agoWords(age string) string {
	if age == "" {
		return ""
	}
	return age + " ago"
}

func lastedWords(lasted string) string {
	if lasted == "" {
		return ""
	}
	return "after " + lasted
}
