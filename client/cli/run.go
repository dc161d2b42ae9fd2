package cli

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// maxStdin is the most that RunCommand takes as stdin, in bytes.
	maxStdin = 1 << 20
	// execOutput is asked for of each stream, in bytes: both together are what one reply may hold.
	execOutput = 512 << 10
)

// jobFlags say what to run and how.
type jobFlags struct {
	script, cwd, user    string
	env, secrets, labels []string
	timeout, killGrace   spanValue
	outputLimit          sizeValue
	mergeStderr          bool
}

func (f *jobFlags) bind(flags *pflag.FlagSet) {
	f.bindHow(flags)
	flags.StringArrayVarP(&f.env, "env", "e", nil, "K=V, or K to pass on this environment's value")
	flags.StringArrayVar(&f.secrets, "secret", nil, "like --env, but never shown again; K alone keeps the value out of this command line")
	flags.StringArrayVar(&f.labels, "label", nil, "k=v, for finding it")
}

// bindHow binds what says nothing of a sandbox's too.
func (f *jobFlags) bindHow(flags *pflag.FlagSet) {
	flags.StringVarP(&f.script, "shell", "c", "", "run this script with bash, or sh where there is no bash")
	flags.StringVarP(&f.cwd, "cwd", "w", "", "working directory (default the workspace)")
	flags.StringVarP(&f.user, "user", "u", "", "user name or uid, optionally with :group")
	f.killGrace.most = longestGrace
	flags.Var(&f.timeout, "timeout", "kill the command after this long; it then counts as exit code 124")
	flags.Var(&f.killGrace, "kill-grace", "between TERM and KILL (default 5s)")
	flags.Var(&f.outputLimit, "output-limit", "kept of each stream, as 1GiB (default 64MiB)")
	flags.BoolVar(&f.mergeStderr, "merge-stderr", false, "send stderr into stdout, in the order written")
}

// spec makes the job of the flags and the arguments after the sandbox's id.
func (f *jobFlags) spec(p *program, argv []string) (*berthv1.JobSpec, error) {
	env, err := p.environment("env", f.env)
	if err != nil {
		return nil, err
	}
	secrets, err := p.environment("secret", f.secrets)
	if err != nil {
		return nil, err
	}
	labels, err := keyValues("label", f.labels)
	if err != nil {
		return nil, err
	}
	return &berthv1.JobSpec{
		Argv:             argv,
		Shell:            f.script,
		Cwd:              f.cwd,
		Env:              env,
		SecretEnv:        secrets,
		User:             f.user,
		MergeStderr:      f.mergeStderr,
		Timeout:          f.timeout.proto(),
		KillGrace:        f.killGrace.proto(),
		OutputLimitBytes: uint64(f.outputLimit),
		Labels:           labels,
	}, nil
}

// bind binds what an attached command gets of this process. Its output is its caller's, whatever the limit.
func (w *streams) bind(flags *pflag.FlagSet) {
	flags.Lookup("output-limit").Usage = "held of each stream for a caller that is slow or away, as 1GiB (default 64MiB); start keeps output, exec with --request-id too"
	flags.BoolVarP(&w.interactive, "interactive", "i", false, "pass standard input on")
	flags.BoolVarP(&w.terminal, "tty", "t", false, "run it in a terminal, of this one's size")
}

func (p *program) execCommand() *cobra.Command {
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
--request-id the command goes on without this one, and the same id joins it.

With -o json or id it answers at the end, with at most 512 KiB of each stream.`,
		Example: `  berth exec 7QK2 -- go test ./...
  berth exec -it 7QK2 -- bash
  berth exec 7QK2 -c 'make 2>&1 | tail -20' --timeout 10m
  berth exec -i 7QK2 -- tar x < tree.tar`,
		Args:                  commandAfterDash(&f.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     p.completeLiveSandboxes(false),
	}
	f.bind(cmd.Flags())
	with.bind(cmd.Flags())
	cmd.RunE = p.call(exitBroker, func(ctx context.Context, c *client.Client, args []string) error {
		spec, err := f.spec(p, args[1:])
		if err != nil {
			return err
		}
		if p.output == outputTable {
			id, err := sandboxID(ctx, c, args[0])
			if err != nil {
				return err
			}
			return p.execIn(ctx, c, id, spec, with)
		}
		if with.terminal {
			return usagef("-t and -o %s: a terminal's output is shown as it comes; leave one of them out", p.output)
		}
		if with.interactive {
			if spec.Stdin, err = p.readStdin(); err != nil {
				return err
			}
		}
		return p.execAtOnce(ctx, c, args[0], spec)
	})
	return cmd
}

// execIn runs an attached command in a sandbox.
func (p *program) execIn(ctx context.Context, c *client.Client, id string, spec *berthv1.JobSpec, with streams) error {
	if with.terminal {
		spec.Tty = p.terminalSize()
		p.describeTerminal(spec)
	}
	goesOn := ""
	if p.requestID != "" {
		goesOn = "the command goes on, and the same --request-id joins it"
	}
	return p.attached(ctx, c, with, goesOn, func(ctx context.Context, io client.ExecIO) (*berthv1.Job, error) {
		return c.Exec(ctx, id, spec, io)
	})
}

// readStdin takes standard input as a whole.
func (p *program) readStdin() (*berthv1.Stdin, error) {
	if p.StdinTerminal {
		return nil, usagef("-i with a terminal and -o %s: redirect a file or a pipe, or leave -o out", p.output)
	}
	data, err := io.ReadAll(io.LimitReader(p.Stdin, maxStdin+1))
	if err != nil {
		return nil, fmt.Errorf("reading standard input: %w", err)
	}
	if len(data) > maxStdin {
		return nil, usagef("-i with -o %s: standard input is over 1 MiB, the most that a command can be given at once; leave -o out", p.output)
	}
	return &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: data}}, nil
}

// execAtOnce runs a command and shows what the broker says of it at its end.
func (p *program) execAtOnce(ctx context.Context, c *client.Client, given string, spec *berthv1.JobSpec) error {
	id, err := sandboxID(ctx, c, given)
	if err != nil {
		return err
	}
	p.afterwards = "the command is killed"
	if p.requestID != "" {
		p.afterwards = "the command goes on, and the same --request-id joins it"
	}
	reply, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
		RequestId: p.requestID, SandboxId: id, Spec: spec, MaxOutputBytes: execOutput, TextOutput: p.output == outputJSON,
	})
	if err != nil {
		return err
	}
	if err := p.show(reply, reply.GetJob().GetId(), nil); err != nil {
		return err
	}
	p.sayOutcome(reply.GetJob())
	return p.exitAs(reply.GetJob())
}

func (p *program) startCommand() *cobra.Command {
	var (
		f    jobFlags
		with streams
	)
	cmd := &cobra.Command{
		Use:   "start [flags] ID {-- CMD… | -c SCRIPT}",
		Short: "Start a background job and print its id",
		Long: `Start a background job in a sandbox and print its id. It answers once the job is on disk and runs; the job
survives this command and restarts of the broker. Follow it with logs, attach, poll, wait and stop. With -i its
input is open, for berth input and berth attach -i.`,
		Example: `  berth start 7QK2 -- go test ./...
  job=$(berth start 7QK2 -c 'npm run build' --timeout 30m) && berth logs -f $job`,
		Args:                  commandAfterDash(&f.script),
		DisableFlagsInUseLine: true,
		ValidArgsFunction:     p.completeLiveSandboxes(false),
	}
	f.bind(cmd.Flags())
	cmd.Flags().BoolVarP(&with.interactive, "interactive", "i", false, "keep its standard input open")
	cmd.Flags().BoolVarP(&with.terminal, "tty", "t", false, "run it in a terminal, of this one's size")
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		spec, err := f.spec(p, args[1:])
		if err != nil {
			return err
		}
		if with.interactive {
			spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
		}
		if with.terminal {
			spec.Tty = p.terminalSize()
			p.describeTerminal(spec)
		}
		id, err := sandboxID(ctx, c, args[0])
		if err != nil {
			return err
		}
		requestID := p.requestID
		if requestID == "" {
			requestID = client.NewRequestID()
		}
		p.afterwards = "the job may have been started all the same: see `berth jobs " + id + "`, or join it with the same command and --request-id " + requestID
		reply, err := c.Jobs().StartJob(ctx, &berthv1.StartJobRequest{RequestId: requestID, SandboxId: id, Spec: spec})
		if err != nil {
			return err
		}
		job := reply.GetJob()
		if err := p.show(job, job.GetId(), func() error { return p.printLine(job.GetId()) }); err != nil {
			return err
		}
		if job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_FAILED_TO_START {
			return fmt.Errorf("%s %s", job.GetId(), outcomeWords(job))
		}
		return nil
	})
	return cmd
}
