// Command bench measures what Berth costs, side by side with what it stands on, in one run: raw fork
// and exec, a bare gRPC ping, raw commits. It prints a table and writes bench.json. A missed target is
// printed as missed and fails nothing: machines are noisy, and only ratios of one run mean anything.
// It starts a broker of its own and never touches another.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	runs := flag.Int("n", 1000, "runs of each short row")
	out := flag.String("o", "bench.json", "where the figures go")
	base := flag.String("base", "", "compare with the programs of this directory, row by row, instead of with raw ones")
	flag.Parse()
	// Whoever reads the table may stop reading; the broker must be taken down all the same.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	compare := func() error { return measure(ctx, *runs, *out) }
	if *base != "" {
		compare = func() error { return measurePaired(ctx, *runs, *base, *out) }
	}
	err := compare()
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
