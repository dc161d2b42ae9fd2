package sandbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// CreateFlags are what a sandbox is made of.
type CreateFlags struct {
	provider, image, repo, ref, egress, session, pool, from, workspace string
	env, secrets, labels, options                                      []string
	depth, pids                                                        usage.Count
	cpus                                                               usage.CPUs
	memory, disk                                                       usage.Size
	maxLifetime, idle                                                  usage.Duration
}

// egressModes are the values of --egress.
var egressModes = map[string]berthv1.Egress_Mode{
	"none": berthv1.Egress_MODE_NONE,
	"open": berthv1.Egress_MODE_OPEN,
}

// CreateCommand is `berth create`.
func CreateCommand(p *command.Program) *cobra.Command {
	var f CreateFlags
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a sandbox and print its id once commands can run in it",
		Example: `  berth create
  berth create --repo .
  berth create --provider docker --image golang:1.26 --memory 2GiB --cpus 2 --egress none
  berth create --repo https://example.org/app.git --ref main --secret TOKEN --label run=42`,
		Args:              usage.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	f.Bind(cmd.Flags())
	command.Must(CompleteCreate(p, cmd))
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, _ []string) error {
		request, err := f.Request(p, cmd)
		if err != nil {
			return err
		}
		return create(ctx, p, c, request)
	})
	return cmd
}

// CompleteCreate completes the flags of createFlags.
func CompleteCreate(p *command.Program, cmd *cobra.Command) error {
	return errors.Join(
		cmd.RegisterFlagCompletionFunc("egress", command.Fixed("none", "open")),
		cmd.RegisterFlagCompletionFunc("provider", p.CompleteProviders),
	)
}

// Bind adds the flags to a command's.
func (f *CreateFlags) Bind(flags *pflag.FlagSet) {
	flags.StringVar(&f.provider, "provider", "", "what boots the machine, see berth providers (default the broker's)")
	flags.StringVar(&f.image, "image", "", "image or template, in the provider's words")
	flags.StringVar(&f.repo, "repo", "", "clone this repository into the workspace: a URL, or a directory, as . or as the machine sees it")
	flags.StringVar(&f.ref, "ref", "", "branch, tag or commit to clone (default the remote's HEAD)")
	f.depth.Max, f.depth.What = math.MaxUint32, "a depth"
	f.pids.Max, f.pids.What = math.MaxInt64, "a number of processes"
	flags.Var(&f.depth, "depth", "history depth of the clone; 0 is all of it")
	flags.StringVar(&f.workspace, "workspace", "", "absolute path of the workspace in the machine")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "K=V, or K to pass on this environment's value")
	flags.StringArrayVar(&f.secrets, "secret", nil, "like --env, but never shown again; K alone keeps the value out of this command line")
	flags.Var(&f.cpus, "cpus", "CPUs, fractions allowed")
	flags.Var(&f.memory, "memory", "memory, as 2GiB; at least 32MiB")
	flags.Var(&f.disk, "disk", "disk, as 20GiB")
	flags.Var(&f.pids, "pids", "number of processes and threads, at least 32")
	flags.StringVar(&f.egress, "egress", "", "what the machine may reach: none or open (default open)")
	flags.StringVar(&f.session, "session", "", "session key: your own name for a line of work")
	flags.StringArrayVar(&f.labels, "label", nil, "k=v, for finding it")
	flags.StringVar(&f.pool, "pool", "", "claim a warm machine of this pool; not with what describes a machine")
	flags.StringVar(&f.from, "from", "", "start from this checkpoint, cp_…")
	flags.StringArrayVar(&f.options, "opt", nil, "k=v option of the provider")
	flags.Var(&f.maxLifetime, "max-lifetime", "destroy it this long after its creation")
	flags.Var(&f.idle, "idle", "suspend it, or destroy it where that can't be done, after this long without use")
}

// Request makes the request of the flags; a pool's name stands for a whole spec.
func (f *CreateFlags) Request(p *command.Program, cmd *cobra.Command) (*berthv1.CreateSandboxRequest, error) {
	requestID := p.RequestID
	if requestID == "" {
		requestID = client.NewRequestID() // made here, so that an interrupted create can name it
	}
	if f.pool != "" {
		var other string
		describing := pflag.NewFlagSet("create", pflag.ContinueOnError)
		new(CreateFlags).Bind(describing)
		cmd.Flags().Visit(func(flag *pflag.Flag) {
			if flag.Name != "pool" && describing.Lookup(flag.Name) != nil {
				other = flag.Name
			}
		})
		if other != "" {
			return nil, usage.Errorf("--pool and --%s: a pool says already what its machines are; give one of them", other)
		}
		return &berthv1.CreateSandboxRequest{RequestId: requestID, Pool: f.pool}, nil
	}
	spec, err := f.spec(p)
	return &berthv1.CreateSandboxRequest{RequestId: requestID, Spec: spec}, err
}

func (f *CreateFlags) spec(p *command.Program) (*berthv1.SandboxSpec, error) {
	env, err := p.Environment("env", f.env)
	if err != nil {
		return nil, err
	}
	secrets, err := p.Environment("secret", f.secrets)
	if err != nil {
		return nil, err
	}
	labels, err := usage.KeyValues("label", f.labels)
	if err != nil {
		return nil, err
	}
	options, err := usage.KeyValues("opt", f.options)
	if err != nil {
		return nil, err
	}
	spec := &berthv1.SandboxSpec{
		Provider:        f.provider,
		Image:           f.image,
		Env:             env,
		SecretEnv:       secrets,
		SessionKey:      f.session,
		Labels:          labels,
		FromCheckpoint:  f.from,
		ProviderOptions: options,
	}
	if f.repo == "" && (f.ref != "" || f.depth.N != 0) {
		return nil, usage.Errorf("--ref and --depth go with --repo")
	}
	if f.repo != "" || f.workspace != "" {
		spec.Workspace = &berthv1.Workspace{Path: f.workspace}
	}
	if f.repo != "" {
		url, err := repoURL(f.repo)
		if err != nil {
			return nil, err
		}
		spec.Workspace.Repo = &berthv1.Repo{Url: url, Ref: f.ref, Depth: uint32(f.depth.N)}
	}
	if f.cpus != 0 || f.memory != 0 || f.disk != 0 || f.pids.N != 0 {
		spec.Resources = &berthv1.Resources{
			Cpus: float64(f.cpus), MemoryBytes: uint64(f.memory), DiskBytes: uint64(f.disk), Pids: f.pids.N,
		}
	}
	if f.egress != "" {
		mode, known := egressModes[f.egress]
		if !known {
			return nil, usage.Errorf("--egress %s: it must be none or open", f.egress)
		}
		spec.Egress = &berthv1.Egress{Mode: mode}
	}
	if f.maxLifetime.Given || f.idle.Given {
		spec.Lifetime = &berthv1.Lifetime{Max: f.maxLifetime.Proto(), Idle: f.idle.Proto()}
	}
	return spec, nil
}

// repoURL makes a directory of this host's absolute, for a broker does not know where it was named from.
// Everything else stays as it is.
func repoURL(given string) (string, error) {
	if strings.Contains(given, "://") || filepath.IsAbs(given) {
		return given, nil
	}
	info, err := os.Stat(given)
	if err == nil && info.IsDir() {
		path, err := filepath.Abs(given)
		if err != nil {
			return "", fmt.Errorf("finding the directory of --repo %s: %w", given, err)
		}
		return path, nil
	}
	if strings.HasPrefix(given, "./") || strings.HasPrefix(given, "../") {
		return "", usage.Errorf("--repo %s: there is no such directory here", given)
	}
	return given, nil
}

// create makes the sandbox and prints it.
func create(ctx context.Context, p *command.Program, c *client.Client, request *berthv1.CreateSandboxRequest) error {
	sandbox, seen, err := Create(ctx, p, c, request)
	if err != nil {
		if ctx.Err() != nil || command.IsDeadline(err) {
			if seen == "" {
				seen = FindCreating(ctx, c, request)
			}
			p.Afterwards = CreateContinues(request, seen)
		}
		return err
	}
	return p.Show(sandbox, sandbox.GetId(), func() error { return p.PrintLine(sandbox.GetId()) })
}

// Create makes the call and shows on a terminal how it fares. Beside an error it returns the
// sandbox's id if it was seen.
func Create(ctx context.Context, p *command.Program, c *client.Client, request *berthv1.CreateSandboxRequest) (*berthv1.Sandbox, string, error) {
	watch := watchCreate(ctx, p, c, request)
	reply, err := c.Sandboxes().CreateSandbox(ctx, request)
	return reply.GetSandbox(), watch.stop(), err
}

// FindCreating looks once more for the id of a sandbox whose caller leaves: without it the caller
// could not destroy what it began. Empty when it is not found.
func FindCreating(ctx context.Context, c *client.Client, request *berthv1.CreateSandboxRequest) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	return findCreating(ctx, c, request).GetId()
}

// CreateContinues says what becomes of a create whose caller leaves.
func CreateContinues(request *berthv1.CreateSandboxRequest, id string) string {
	return fmt.Sprintf("the operation continues in the background: join it with the same command and --request-id %s, find it with `berth ls`, or destroy it with `berth rm %s`",
		request.GetRequestId(), command.OrID(id))
}
