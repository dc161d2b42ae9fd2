package execute

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// maxStdin is the most that RunCommand takes as stdin, in bytes.
	maxStdin = 1 << 20
	// execOutput is asked for of each stream, in bytes: the most that a reply with text may hold.
	execOutput = 256 << 10
)

// ExecCommand is `berth exec`.
func ExecCommand(p *command.Program) *cobra.Command {
	var (
		f    jobFlags
		with streams
	)
	cmd := &cobra.Command{
		Use:   "exec [flags] ID {-- CMD… | -c SCRIPT}",
		Short: "Run a command, attached to this terminal or pipe, and exit with its code",
		Long: `Run a command in a sandbox with its output as it comes, and exit with its code: 124 after --timeout, 128+n when
a signal ended it, 125 when the broker failed. It comes back by itself when the connection breaks or the broker
is restarted, without a byte lost or twice. The first interrupt is the command's, the second kills it. With
--request-id the command continues without this one, and the same id joins it.

With -o json or id it answers at the end, with at most 256 KiB of each stream. Where json lacks bytes of a longer
one, a line on stderr says which; it then exits with 125, unless the command failed itself.`,
		Example: `  berth exec 7QK2 -- go test ./...
  berth exec -it 7QK2 -- bash
  berth exec 7QK2 -c 'make 2>&1 | tail -20' --timeout 10m
  berth exec -i 7QK2 -- tar x < tree.tar`,
		Args:                  usage.CommandAfterDash(&f.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     p.CompleteLiveSandboxes(false),
	}
	f.bind(cmd.Flags())
	with.bind(cmd.Flags())
	cmd.RunE = p.Call(usage.ExitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		spec, err := f.spec(p, args[1:])
		if err != nil {
			return err
		}
		if p.Output == command.OutputTable {
			id, err := command.SandboxID(ctx, c, args[0])
			if err != nil {
				return err
			}
			return execIn(ctx, p, c, id, spec, with)
		}
		if with.terminal {
			return usage.Errorf("-t and -o %s: a terminal's output is shown as it comes; leave one of them out", p.Output)
		}
		if with.interactive {
			if spec.Stdin, err = readStdin(p); err != nil {
				return err
			}
		}
		return execToEnd(ctx, p, c, args[0], spec)
	})
	return cmd
}

// execIn runs an attached command in a sandbox.
func execIn(ctx context.Context, p *command.Program, c *client.Client, id string, spec *berthv1.JobSpec, with streams) error {
	if with.terminal {
		spec.Tty = p.TerminalSize()
		p.DescribeTerminal(spec)
	}
	detached := ""
	if p.RequestID != "" {
		detached = "the command continues in the background; the same --request-id joins it"
	}
	return runAttached(ctx, p, c, with, detached, func(ctx context.Context, io client.ExecIO) (*berthv1.Job, error) {
		return c.Exec(ctx, id, spec, io)
	})
}

// readStdin takes standard input as a whole.
func readStdin(p *command.Program) (*berthv1.Stdin, error) {
	if p.StdinTerminal {
		return nil, usage.Errorf("-i with a terminal and -o %s: redirect a file or a pipe, or leave -o out", p.Output)
	}
	data, err := io.ReadAll(io.LimitReader(p.Stdin, maxStdin+1))
	if err != nil {
		return nil, fmt.Errorf("reading standard input: %w", err)
	}
	if len(data) > maxStdin {
		return nil, usage.Errorf("-i with -o %s: standard input is over 1 MiB, the most that a command can be given at once; leave -o out", p.Output)
	}
	return &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: data}}, nil
}

// execToEnd runs a command and shows what the broker says of it at its end.
func execToEnd(ctx context.Context, p *command.Program, c *client.Client, given string, spec *berthv1.JobSpec) error {
	id, err := command.SandboxID(ctx, c, given)
	if err != nil {
		return err
	}
	p.Afterwards = "the command is killed"
	if p.RequestID != "" {
		p.Afterwards = "the command continues in the background; the same --request-id joins it"
	}
	reply, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
		RequestId: p.RequestID, SandboxId: id, Spec: spec, MaxOutputBytes: execOutput, TextOutput: p.Output == command.OutputJSON,
	})
	if err != nil {
		return err
	}
	if err := p.Show(reply, reply.GetJob().GetId(), nil); err != nil {
		return err
	}
	p.PrintOutcome(reply.GetJob())
	missing := p.Output == command.OutputJSON && printOmitted(p, reply)
	if err := p.ExitAs(reply.GetJob()); err != nil || !missing {
		return err
	}
	return &command.ExitError{Code: usage.ExitBroker} // which bytes is said already
}

// printOmitted says which bytes of a command's output are not in its reply, and whether there are any.
func printOmitted(p *command.Program, reply *berthv1.RunCommandResponse) (missing bool) {
	for i, output := range []*berthv1.BoundedOutput{reply.GetStdout(), reply.GetStderr()} {
		if output.GetOmittedBytes() > 0 {
			stream := []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}[i]
			from := uint64(len(output.GetHead()))
			p.PrintError("", present.GapWords(stream, from, from+output.GetOmittedBytes(), "left out (-o json holds 256 KiB of each stream; without it all is shown)"))
			missing = true
		}
	}
	return missing
}
