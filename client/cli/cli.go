// Package cli is the command line `berth`: it turns arguments into calls of the client library and
// answers into tables, JSON lines, bytes and exit codes. It holds no state, decides nothing that the
// broker decides, and touches neither the process's own arguments nor its environment: what it needs
// is in Process.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
)

// The exit codes that are not a command's own.
const (
	exitFailure = 1   // the call failed
	exitUsage   = 2   // the arguments are wrong
	exitRunning = 3   // poll: not done yet
	exitTimeout = 124 // the command's timeout passed
	exitBroker  = 125 // run, exec, attach, wait: the broker failed, so that the command's code is not known
	exitSignal  = 128 // plus the signal's number
)

// Process is the process around the command line.
type Process struct {
	// Args are the arguments without the program's name.
	Args []string
	// LookupEnv looks up the environment, as os.LookupEnv.
	LookupEnv func(string) (string, bool)
	// Stdin, Stdout and Stderr are the standard streams.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// StdinTerminal, StdoutTerminal and StderrTerminal say which of them are terminals.
	StdinTerminal, StdoutTerminal, StderrTerminal bool
	// Terminal is the terminal that a person sits at, for its size and its keys; nil is none.
	Terminal *os.File
	// Resized delivers a signal whenever Terminal's size changed. It may be nil.
	Resized <-chan os.Signal
	// Interrupts delivers the signals that ask to end: the first cancels the call, the second calls
	// Exit. An attached command gets the first, and is killed at the second. It may be nil.
	Interrupts <-chan os.Signal
	// Exit ends the process at once; needed with Interrupts.
	Exit func(code int)
	// Now is the clock that ages are counted on; nil is time.Now.
	Now func() time.Time
	// Version is the build's; empty is the one in the build information.
	Version string
	// ClientOptions are passed on to client.Dial.
	ClientOptions []client.Option
}

// Run runs one command line and returns the process's exit code.
func Run(ctx context.Context, process Process) int {
	if process.Now == nil {
		process.Now = time.Now
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &program{Process: process}
	defer p.watchInterrupts(cancel)()
	defer p.restoreTerminal()
	root := p.rootCommand()
	root.SetArgs(append([]string{}, process.Args...)) // not nil: nil would mean the process's own
	cmd, err := root.ExecuteContextC(ctx)
	return p.exitCode(ctx, cmd, err)
}

// program is one run of the command line.
type program struct {
	Process
	address   string
	output    string
	requestID string
	deadline  spanValue // zero or not given: none
	// afterwards says what becomes of the call in the broker when its caller leaves early.
	afterwards string

	raw      rawTerminal
	takeLock sync.Mutex
	take     func(syscall.Signal) // gets the signals that ask to end; nil: nobody took them
}

// The values of --output.
const (
	outputTable = "table"
	outputJSON  = "json"
	outputID    = "id"
)

func (p *program) rootCommand() *cobra.Command {
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
		Args:              p.knownCommand,
		RunE:              showHelp,
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return p.checkOutput() },
		Version:           p.ownVersion(),
	}
	// Before the commands that cobra makes: they remember where to write.
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	root.SetVersionTemplate("berth {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagWords(err) })
	flags := root.PersistentFlags()
	flags.StringVar(&p.address, "addr", "", "the broker: unix:///path or tcp://host:port (default $BERTH_ADDR, else the user's own socket)")
	flags.StringVarP(&p.output, "output", "o", outputTable, "table, json (one object a line) or id")
	flags.StringVar(&p.requestID, "request-id", "", "makes a mutating call repeatable: the same id with the same arguments gives the same answer for 24 h")
	flags.Var(&p.deadline, "deadline", "give up on the call after this long; work in the broker goes on")
	must(root.RegisterFlagCompletionFunc("output", fixed(outputTable, outputJSON, outputID)))

	root.AddCommand(
		p.createCommand(), p.lsCommand(), p.getCommand(), p.rmCommand(), p.suspendCommand(), p.resumeCommand(),
		p.runCommand(), p.execCommand(), p.startCommand(), p.attachCommand(), p.pollCommand(), p.waitCommand(),
		p.logsCommand(), p.inputCommand(), p.signalCommand(), p.stopCommand(), p.jobsCommand(), p.providersCommand(), p.infoCommand(),
		p.fsckCommand(), p.backupCommand(), p.versionCommand(),
	)
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			cmd.Args, cmd.RunE = knownShell, showHelp
			cmd.Example = "  berth completion bash > ~/.local/share/bash-completion/completions/berth"
		case "help":
			cmd.Args, cmd.Example = p.knownTopic, "  berth help create"
		}
	}
	return root
}

func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// knownShell refuses a shell that there are no completions for.
func knownShell(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%q is no shell that completions are made for: those are bash, zsh, fish and powershell", args[0])
	}
	return nil
}

// knownTopic refuses help for what is no command.
func (p *program) knownTopic(cmd *cobra.Command, args []string) error {
	found, rest, err := cmd.Root().Find(args)
	if err != nil || found == cmd.Root() && len(rest) > 0 {
		return p.knownCommand(cmd.Root(), rest)
	}
	return nil
}

// knownCommand refuses what is no command, and names those that may have been meant.
func (p *program) knownCommand(root *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	meant := suggestions(root, args[0])
	if len(meant) == 0 {
		return usagef("%q is no command", args[0])
	}
	return usagef("%q is no command; did you mean %s?", args[0], strings.Join(meant, " or "))
}

// must stops a build of the command tree that contradicts itself; every test would.
func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("building the command tree: %v", err))
	}
}

func (p *program) checkOutput() error {
	if !slices.Contains([]string{outputTable, outputJSON, outputID}, p.output) {
		return usagef("-o %s: it must be table, json or id", p.output)
	}
	return nil
}

// action is what a command does with a client.
type action func(ctx context.Context, c *client.Client, args []string) error

// call makes a command's RunE of an action: it dials, bounds the call by --deadline, and gives a
// failure its exit code.
func (p *program) call(failure int, do action) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		if p.deadline.span > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, p.deadline.span)
			defer cancel()
		}
		c, err := p.dial()
		if isUsage(err) {
			return err
		}
		if err != nil {
			return &exitError{code: failure, err: err}
		}
		err = doAndClose(ctx, c, args, do)
		var exit *exitError
		if err == nil || errors.As(err, &exit) || isUsage(err) {
			return err
		}
		return &exitError{code: failure, err: err}
	}
}

// doAndClose closes the client on every way out, a panic too.
func doAndClose(ctx context.Context, c *client.Client, args []string, do action) (err error) {
	defer func() {
		if closeErr := c.Close(); err == nil {
			err = closeErr
		}
	}()
	return do(ctx, c, args)
}

func (p *program) dial(opts ...client.Option) (*client.Client, error) {
	address, source := p.address, "--addr"
	if address == "" {
		address, source = client.AddressFrom(p.LookupEnv), client.AddressVariable
	}
	c, err := client.Dial(address, slices.Concat(p.ClientOptions, opts)...)
	if malformed := (*client.AddressError)(nil); errors.As(err, &malformed) {
		return nil, usagef("%s %q: %s", source, malformed.Address, malformed.Problem)
	}
	return c, err
}

// exitError ends the program with a code; err is what to say, nil when it is said already.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// usageError is a command line that can't be meant.
type usageError struct{ message string }

func (e *usageError) Error() string { return e.message }

func isUsage(err error) bool {
	var usage *usageError
	return errors.As(err, &usage)
}

func usagef(format string, args ...any) error {
	return &usageError{message: fmt.Sprintf(format, args...)}
}

// exitCode says what went wrong, on stderr, and returns the exit code. An error that is not an
// exitError comes from parsing the arguments.
func (p *program) exitCode(ctx context.Context, cmd *cobra.Command, err error) int {
	what := strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "berth"), " ")
	var exit *exitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		p.complain(what, fmt.Sprintf("%v (see `%s --help`)", err, cmd.CommandPath()))
		return exitUsage
	}
	if isBrokenPipe(exit.err) {
		return exitSignal + int(syscall.SIGPIPE) // who closed it knows
	}
	var interrupt *interruptError
	if errors.As(context.Cause(ctx), &interrupt) {
		p.complain(what, p.leaving("interrupted"))
		return exitSignal + int(interrupt.signal)
	}
	if exit.err != nil {
		p.complainAbout(what, exit.err)
	}
	return exit.code
}

// leaving adds what becomes of the call to why its caller leaves.
func (p *program) leaving(why string) string {
	if p.afterwards == "" {
		return why
	}
	return why + ": " + p.afterwards
}
