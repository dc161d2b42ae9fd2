package execute

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/sandbox"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// destroyWait bounds destroying a throwaway sandbox at the end.
const destroyWait = 2 * time.Minute

// RunCommand is `berth run`.
func RunCommand(p *command.Program) *cobra.Command {
	var (
		create sandbox.CreateFlags
		job    jobFlags
		with   streams
		keep   bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] {-- CMD… | -c SCRIPT}",
		Short: "Run a command in a sandbox of its own, which is destroyed afterwards",
		Long: `Create a sandbox, run a command in it as exec does, destroy it, and exit with the command's code. The sandbox
is destroyed also when the command fails or is interrupted; with --keep it stays, and its id is printed on stderr.`,
		Example: `  berth run -- uname -a
  berth run -it --provider docker --image golang:1.26 -- bash
  berth run --repo https://example.org/app.git -c 'make test' --timeout 10m`,
		Args:                  usage.OnlyACommand(&job.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     cobra.NoFileCompletions,
	}
	create.Bind(cmd.Flags())
	job.bindHow(cmd.Flags())
	with.bind(cmd.Flags())
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the sandbox")
	command.Must(sandbox.CompleteCreate(p, cmd))
	cmd.RunE = p.Call(usage.ExitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		switch {
		case p.Output != command.OutputTable:
			return usage.Errorf("-o %s: run shows the command's own output; use create and exec -o %s", p.Output, p.Output)
		case p.RequestID != "":
			return usage.Errorf("--request-id: run makes several calls; use create and exec, each with one of its own")
		}
		request, err := create.Request(p, cmd)
		if err != nil {
			return err
		}
		spec, err := job.spec(p, args)
		if err != nil {
			return err
		}
		return runThrowaway(ctx, p, c, request, spec, with, keep)
	})
	return cmd
}

// runThrowaway is a throwaway sandbox's whole life.
func runThrowaway(ctx context.Context, p *command.Program, c *client.Client, request *berthv1.CreateSandboxRequest, spec *berthv1.JobSpec, with streams, keep bool) error {
	created, seen, err := sandbox.Create(ctx, p, c, request)
	if err != nil {
		if ctx.Err() == nil && !command.IsDeadline(err) {
			return err
		}
		if seen == "" {
			seen = sandbox.FindCreating(ctx, c, request)
		}
		p.Afterwards = sandbox.CreateContinues(request, seen)
		if seen != "" && destroy(ctx, p, c, seen) {
			p.Afterwards = "sandbox " + seen + " is destroyed"
		}
		return err
	}
	id := created.GetId()
	if keep {
		_, _ = fmt.Fprintln(p.Stderr, id)
	} else {
		defer destroy(ctx, p, c, id)
	}
	return execIn(ctx, p, c, id, spec, with)
}

// destroy destroys a throwaway sandbox, also for a caller that was interrupted, and says so when it
// could not.
func destroy(ctx context.Context, p *command.Program, c *client.Client, id string) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyWait)
	defer cancel()
	announced := false
	defer p.TakeInterrupts(func(signal syscall.Signal) {
		if announced {
			p.ExitNow(usage.ExitSignal + int(signal))
			return
		}
		announced = true
		p.PrintError("run", "destroying sandbox "+id+"; once more leaves that to `berth rm "+id+"`")
	})()
	_, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	if err != nil && !client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND) {
		p.PrintError("run", fmt.Sprintf("sandbox %s was not destroyed: %s (`berth rm %s` does it)", id, p.Explain(err), id))
		return false
	}
	return true
}
