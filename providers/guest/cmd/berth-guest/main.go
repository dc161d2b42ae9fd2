// Command berth-guest is the one program inside every machine. See package guest for what it does.
//
//	berth-guest init --config FILE
//	berth-guest bridge --socket PATH --nonce N [--guest PID] [--idle 60s]
//	berth-guest probe
//	berth-guest version
//
// A guest is called init, and no word that a job may look for with `pkill -f`, as it would for "serve".
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/protobuf/encoding/protojson"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest"
	"github.com/berth-sandbox/berth/providers/guest/regular"
)

// maxConfig bounds a boot config, in bytes.
const maxConfig = 4 << 20

const usage = `usage: berth-guest init --config FILE
       berth-guest bridge --socket PATH --nonce N [--guest PID] [--idle 60s]
       berth-guest probe
       berth-guest version`

// version is set by the linker; see the Makefile.
var version string

func main() {
	if len(os.Args) < 2 {
		exitUsage(errors.New(usage))
	}
	arguments := os.Args[2:]
	switch os.Args[1] {
	case "init":
		exit(serve(arguments))
	case "bridge":
		exit(bridge(arguments))
	case "probe":
		// A provider starts it like a guest to find out whether one would run.
		exit(guest.Probe())
	case "version":
		fmt.Println("berth-guest", cmp.Or(version, "unknown"))
	default:
		exitUsage(fmt.Errorf("unknown command %q\n%s", os.Args[1], usage))
	}
}

func serve(arguments []string) error {
	if err := guest.UnblockSignals(); err != nil {
		return err
	}
	if err := guest.DenyInspection(); err != nil {
		return err
	}
	flags := newFlags("init")
	file := flags.String("config", "", "")
	// A provider may pass a descriptor with a lock that lives exactly as long as this guest has it open. No job
	// may inherit it.
	lock := flags.Int("lock-fd", -1, "")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	if *file == "" {
		return usageError{errors.New("init needs --config FILE")}
	}
	if *lock >= 0 {
		syscall.CloseOnExec(*lock)
	}
	config, err := readConfig(*file)
	if err != nil {
		return err
	}
	// PID 1 of a namespace gets no signal that it has no handler for.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	return guest.Serve(ctx, config, guest.Options{Build: version, Log: log})
}

func readConfig(path string) (*guestv1.BootConfig, error) {
	data, err := regular.Read(path, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("read the boot config: %w", err)
	}
	config := &guestv1.BootConfig{}
	if err := protojson.Unmarshal(data, config); err != nil {
		// The parser's error may quote the file, and the file has the token.
		return nil, fmt.Errorf("the boot config %s is no BootConfig in protojson", path)
	}
	return config, nil
}

// usageError is a mistake in how the program was called.
type usageError struct{ error }

func newFlags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	return flags
}

func parse(flags *flag.FlagSet, arguments []string) error {
	if err := flags.Parse(arguments); err != nil {
		return usageError{err}
	}
	if flags.NArg() > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", flags.Arg(0))}
	}
	return nil
}

func exit(err error) {
	var wrong usageError
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &wrong):
		exitUsage(err)
	default:
		fmt.Fprintln(os.Stderr, "berth-guest:", err)
		os.Exit(1)
	}
}

func exitUsage(err error) {
	fmt.Fprintln(os.Stderr, "berth-guest:", err)
	os.Exit(2)
}
