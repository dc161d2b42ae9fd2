// Command berth is the command line for people and scripts: it gives client/cli the process it runs in. It
// never does anything of its own.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"

	"github.com/berth-sandbox/berth/client/cli"
)

// version is set by the build with -ldflags "-X main.version=…".
var version string

func main() {
	// Two: the first cancels the call, the second exits.
	interrupts := make(chan os.Signal, 2)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	os.Exit(cli.Run(context.Background(), cli.Process{
		Args:           os.Args[1:],
		LookupEnv:      os.LookupEnv,
		Stdin:          os.Stdin,
		Stdout:         os.Stdout,
		Stderr:         os.Stderr,
		StdinTerminal:  isTerminal(os.Stdin),
		StdoutTerminal: isTerminal(os.Stdout),
		StderrTerminal: isTerminal(os.Stderr),
		Interrupts:     interrupts,
		Exit:           os.Exit,
		Version:        version,
	}))
}

func isTerminal(file *os.File) bool { return term.IsTerminal(int(file.Fd())) }
