// Command testsum runs `go test` with the arguments it is given and says at the end what no single
// line of go test says: how many tests passed, failed and were skipped, and why each was skipped. It
// never changes a verdict: its exit code is go test's, except that a run without any test has failed.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
)

func main() {
	code, err := runTests(os.Args[1:], os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintf(os.Stderr, "testsum: %v\n", err)
	}
	os.Exit(code)
}

// runTests runs go test with args and returns the exit code for this program.
func runTests(args []string, stdout, stderr io.Writer) (int, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	command := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.Stderr = stderr
	events, err := command.StdoutPipe()
	if err != nil {
		return 1, fmt.Errorf("making a pipe for go test: %w", err)
	}
	if err := command.Start(); err != nil {
		return 1, fmt.Errorf("starting go test: %w", err)
	}
	summary := newSummary(stdout)
	readErr := summary.read(events)
	waitErr := command.Wait()
	summary.close()
	if readErr != nil {
		return 1, fmt.Errorf("reading what go test says: %w", readErr)
	}
	var exit *exec.ExitError
	if errors.As(waitErr, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	if waitErr != nil {
		return 1, fmt.Errorf("running go test: %w", waitErr)
	}
	if summary.failed > 0 {
		return 1, nil
	}
	if summary.passed == 0 {
		return 1, errors.New("no test ran")
	}
	return 0, nil
}
