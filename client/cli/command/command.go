// Package command is what every command of the command line shares: the process that it runs in, the
// global flags, the connection, ids given by their suffix, output in the asked form, errors and exit
// codes. It knows no command by name and decides nothing that the broker decides.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/usage"
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
	// Continued delivers a signal whenever this process runs again after it was stopped. It may be nil.
	Continued <-chan os.Signal
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

// Program is one run of the command line.
type Program struct {
	Process
	// The global flags.
	Address   string
	Security  Security
	Output    string
	RequestID string
	Deadline  usage.Duration // zero or not given: none
	// Afterwards says what becomes of the call in the broker when its caller leaves early.
	Afterwards string

	outputs  [2]*output // stdout and stderr, which remember what failed
	failure  int        // the exit code of the command's own failures; zero: usage.ExitFailure
	raw      rawTerminal
	takeLock sync.Mutex
	take     func(syscall.Signal) // gets the signals that ask to end; nil: nobody took them
}

// The values of --output.
const (
	OutputTable = "table"
	OutputJSON  = "json"
	OutputID    = "id"
)

// NewProgram returns a program that has not run yet.
func NewProgram(process Process) *Program {
	p := &Program{Process: process, outputs: [2]*output{{to: process.Stdout}, {to: process.Stderr}}}
	p.Stdout, p.Stderr = p.outputs[0], p.outputs[1]
	return p
}

// Must stops a build of the command tree that contradicts itself; every test would.
func Must(err error) {
	if err != nil {
		panic(fmt.Sprintf("building the command tree: %v", err))
	}
}

// CheckOutput refuses an unknown --output.
func (p *Program) CheckOutput() error {
	if !slices.Contains([]string{OutputTable, OutputJSON, OutputID}, p.Output) {
		return usage.Errorf("-o %s: it must be table, json or id", p.Output)
	}
	return nil
}

// action is what a command does with a client.
type action func(ctx context.Context, c *client.Client, args []string) error

// Call makes a command's RunE of an action: it dials, bounds the call by --deadline, and gives a
// failure its exit code.
func (p *Program) Call(failure int, do action) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		p.failure = failure
		if p.Deadline.Value > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, p.Deadline.Value)
			defer cancel()
		}
		c, err := p.dial()
		if usage.Is(err) {
			return err
		}
		if err != nil {
			return &ExitError{Code: failure, Err: err}
		}
		err = doAndClose(ctx, c, args, do)
		var exit *ExitError
		if err == nil || errors.As(err, &exit) || usage.Is(err) {
			return err
		}
		return &ExitError{Code: failure, Err: err}
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

// OwnVersion is the version of this program.
func (p *Program) OwnVersion() string {
	if p.Version != "" {
		return p.Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
