// Package cli is the command line `berth`: it turns arguments into calls of the client library and
// answers into tables, JSON lines, bytes and exit codes. It holds no state, decides nothing that the
// broker decides, and touches neither the process's own arguments nor its environment: what it needs
// is in Process.
package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client/cli/broker"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/execute"
	"github.com/berth-sandbox/berth/client/cli/job"
	"github.com/berth-sandbox/berth/client/cli/sandbox"
	"github.com/berth-sandbox/berth/client/cli/usage"
)

// Process is the process around the command line.
type Process = command.Process

// Run runs one command line and returns the process's exit code.
func Run(ctx context.Context, process Process) int {
	if process.Now == nil {
		process.Now = time.Now
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := command.NewProgram(process)
	defer p.WatchInterrupts(cancel)()
	defer p.RestoreTerminal()
	root := rootCommand(p)
	root.SetArgs(append([]string{}, process.Args...)) // not nil: nil would mean the process's own
	cmd, err := root.ExecuteContextC(ctx)
	return p.ExitCode(ctx, cmd, err)
}

func rootCommand(p *command.Program) *cobra.Command {
	root := &cobra.Command{
		Use:   "berth",
		Short: "Sandboxes for agents: create them, run commands and jobs in them, destroy them",
		Long: `berth talks to a running berthd: it creates sandboxes, runs commands and background jobs in them,
and destroys them.

An id may be shortened to any unique suffix of it. run, exec and wait exit with the command's own code;
124 is a timeout, 125 a failure of the broker, 128+n a signal.`,
		Example: `  id=$(berth create --provider local)
  berth exec $id -- go test ./...
  job=$(berth start $id -c 'make 2>&1 | tee log')
  berth logs -f $job
  berth rm $id`,
		Args:          knownCommand,
		RunE:          showHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Name() != "backup" { // whose file is of this host
				if err := usage.CheckUTF8(p.Args); err != nil {
					return err
				}
			}
			return p.CheckOutput()
		},
		Version: p.OwnVersion(),
	}
	// Before the commands that cobra makes: they remember where to write.
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	root.SetVersionTemplate("berth {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage.FlagError(err) })
	flags := root.PersistentFlags()
	flags.StringVar(&p.Address, "addr", "", "the broker: unix:///path or tcp://host:port (default $BERTH_ADDR, else the user's own socket)")
	p.Security.Bind(flags)
	flags.StringVarP(&p.Output, "output", "o", command.OutputTable, "table, json (one object a line) or id")
	flags.StringVar(&p.RequestID, "request-id", "", "makes a mutating call repeatable: the same id with the same arguments gives the same answer for 24 h")
	flags.Var(&p.Deadline, "deadline", "give up on the call after this long; work in the broker continues")
	command.Must(root.RegisterFlagCompletionFunc("output", command.Fixed(command.OutputTable, command.OutputJSON, command.OutputID)))

	root.AddCommand(
		sandbox.CreateCommand(p), sandbox.LsCommand(p), sandbox.GetCommand(p), sandbox.RmCommand(p), sandbox.SuspendCommand(p), sandbox.ResumeCommand(p),
		execute.RunCommand(p), execute.ExecCommand(p), execute.StartCommand(p), execute.AttachCommand(p), job.PollCommand(p), job.WaitCommand(p),
		job.LogsCommand(p), job.InputCommand(p), job.SignalCommand(p), job.StopCommand(p), job.JobsCommand(p), broker.ProvidersCommand(p), broker.InfoCommand(p),
		broker.FsckCommand(p), broker.BackupCommand(p), broker.VersionCommand(p),
	)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			cmd.Args, cmd.RunE = knownShell, showHelp
			cmd.Example = "  berth completion bash > ~/.local/share/bash-completion/completions/berth"
		case "help":
			cmd.Args, cmd.Example = knownTopic, "  berth help create"
		}
	}
	return root
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// knownShell refuses a shell that there are no completions for.
func knownShell(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage.Errorf("%q is no shell that completions are made for: those are bash, zsh, fish and powershell", args[0])
	}
	return nil
}

// knownTopic refuses help for what is no command.
func knownTopic(cmd *cobra.Command, args []string) error {
	found, rest, err := cmd.Root().Find(args)
	if err != nil || found == cmd.Root() && len(rest) > 0 {
		return knownCommand(cmd.Root(), rest)
	}
	return nil
}

// knownCommand refuses what is no command, and names those that may have been meant.
func knownCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	meant := suggestions(root, args[0])
	if len(meant) == 0 {
		return usage.Errorf("%q is no command", args[0])
	}
	return usage.Errorf("%q is no command; did you mean %s?", args[0], strings.Join(meant, " or "))
}
