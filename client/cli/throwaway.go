package cli

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// destroyWait bounds destroying a throwaway sandbox at the end.
const destroyWait = 2 * time.Minute

func (p *program) runCommand() *cobra.Command {
	var (
		sandbox createFlags
		job     jobFlags
		with    streams
		keep    bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] {-- CMD… | -c SCRIPT}",
		Short: "Run a command in a sandbox of its own, which is destroyed afterwards",
		Long: `Create a sandbox, run a command in it as exec does, destroy it, and exit with the command's code. The sandbox
is destroyed also when the command fails or is interrupted; with --keep it stays, and its id is printed on stderr.`,
		Example: `  berth run -- uname -a
  berth run -it --provider docker --image golang:1.26 -- bash
  berth run --repo https://example.org/app.git -c 'make test' --timeout 10m`,
		Args:                  onlyACommand(&job.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     cobra.NoFileCompletions,
	}
	sandbox.bind(cmd.Flags())
	job.bindHow(cmd.Flags())
	with.bind(cmd.Flags())
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the sandbox")
	must(p.completeCreate(cmd))
	cmd.RunE = p.call(exitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		switch {
		case p.output != outputTable:
			return usagef("-o %s: run shows the command's own output; use create and exec -o %s", p.output, p.output)
		case p.requestID != "":
			return usagef("--request-id: run makes several calls; use create and exec, each with one of its own")
		}
		request, err := sandbox.request(p, cmd)
		if err != nil {
			return err
		}
		spec, err := job.spec(p, args)
		if err != nil {
			return err
		}
		return p.run(ctx, c, request, spec, with, keep)
	})
	return cmd
}

// run is a throwaway sandbox's whole life.
func (p *program) run(ctx context.Context, c *client.Client, request *berthv1.CreateSandboxRequest, spec *berthv1.JobSpec, with streams, keep bool) error {
	sandbox, seen, err := p.makeSandbox(ctx, c, request)
	if err != nil {
		if ctx.Err() == nil && !isDeadline(err) {
			return err
		}
		if seen == "" {
			seen = p.lookUpCreating(ctx, c, request)
		}
		p.afterwards = p.createGoesOn(request, seen)
		if seen != "" && p.destroy(ctx, c, seen) {
			p.afterwards = "sandbox " + seen + " is destroyed"
		}
		return err
	}
	id := sandbox.GetId()
	if keep {
		_, _ = fmt.Fprintln(p.Stderr, id)
	} else {
		defer p.destroy(ctx, c, id)
	}
	return p.execIn(ctx, c, id, spec, with)
}

// destroy destroys a throwaway sandbox, also for a caller that was interrupted, and says so when it
// could not.
func (p *program) destroy(ctx context.Context, c *client.Client, id string) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyWait)
	defer cancel()
	told := false
	defer p.takeInterrupts(func(signal syscall.Signal) {
		if told {
			p.exitNow(exitSignal + int(signal))
			return
		}
		told = true
		p.complain("run", "destroying sandbox "+id+"; once more leaves that to `berth rm "+id+"`")
	})()
	_, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	if err != nil && !client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND) {
		p.complain("run", fmt.Sprintf("sandbox %s was not destroyed: %s (`berth rm %s` does it)", id, p.explain(err), id))
		return false
	}
	return true
}

// isBrokenPipe reports whether nobody reads this process's output any more.
func isBrokenPipe(err error) bool {
	return errors.Is(err, syscall.EPIPE) && !hasStatus(err)
}
