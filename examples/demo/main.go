// Command demo tells Berth's main story on this machine, with the programs of bin/: it makes a small
// repository with a real and slow test suite, creates a sandbox from it, starts the tests as a
// detached job, kills the broker with kill -9 while they run, starts it again, and proves that the
// job's exit code and every byte of its output are the true ones, and that nothing is left behind.
// It exits with 1 if any of that is not so, and never touches a broker that runs already.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := tell(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "\ndemo:", err)
		os.Exit(1)
	}
}
