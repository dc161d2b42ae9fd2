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

// maxQueuedInterrupts is how many signals wait to be looked at: the third already ends the process at once.
const maxQueuedInterrupts = 3

func main() {
	interrupts := make(chan os.Signal, maxQueuedInterrupts)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	// Asked for, so that writing to a closed pipe fails, and a terminal is put back and a command ended,
	// where it would kill this process.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	resized := make(chan os.Signal, 1) // the newest says as much as all
	notifyResized(resized)
	continued := make(chan os.Signal, 1)
	notifyContinued(continued)
	os.Exit(cli.Run(context.Background(), cli.Process{
		Args:           os.Args[1:],
		LookupEnv:      os.LookupEnv,
		Stdin:          stream(os.Stdin, syscall.Stdin),
		Stdout:         stream(os.Stdout, syscall.Stdout),
		Stderr:         stream(os.Stderr, syscall.Stderr),
		StdinTerminal:  isTerminal(os.Stdin),
		StdoutTerminal: isTerminal(os.Stdout),
		StderrTerminal: isTerminal(os.Stderr),
		Terminal:       terminal(os.Stdin, os.Stdout, os.Stderr),
		Resized:        resized,
		Continued:      continued,
		Interrupts:     interrupts,
		Exit:           os.Exit,
		Version:        version,
	}))
}

func isTerminal(file *os.File) bool { return term.IsTerminal(int(file.Fd())) }

// terminal is the first of the streams that is one.
func terminal(files ...*os.File) *os.File {
	for _, file := range files {
		if isTerminal(file) {
			return file
		}
	}
	return nil
}
