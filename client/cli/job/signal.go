package job

import (
	"context"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// signalNumbers are the signals of a machine, which is always Linux, whatever this host is.
var signalNumbers = map[string]int{
	"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10,
	"SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "CHLD": 17, "CONT": 18, "STOP": 19,
	"TSTP": 20, "TTIN": 21, "TTOU": 22, "URG": 23, "XCPU": 24, "XFSZ": 25, "VTALRM": 26, "PROF": 27, "WINCH": 28,
	"IO": 29, "POLL": 29, "PWR": 30, "SYS": 31,
}

// highestSignal is the highest number of a signal, a real-time one.
const highestSignal = 64

func parseSignal(given string) (int, error) {
	number, known := signalNumbers[strings.TrimPrefix(strings.ToUpper(given), "SIG")]
	if !known {
		var err error
		number, err = strconv.Atoi(given)
		known = err == nil && number >= 1 && number <= highestSignal
	}
	if !known {
		return 0, usage.Errorf("%s: a signal is a name such as TERM or SIGTERM, or a number from 1 to %d", given, highestSignal)
	}
	return number, nil
}

// SignalCommand is `berth signal`.
func SignalCommand(p *command.Program) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "signal JOB SIGNAL",
		Short: "Send one signal to a job's process group",
		Example: `  berth signal 9XW4 HUP
  berth signal 9XW4 15`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 {
				return usage.Errorf("it takes one job's id and a signal, got %d arguments", len(args))
			}
			_, err := parseSignal(args[1])
			return err
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return []cobra.Completion{"HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP"}, cobra.ShellCompDirectiveNoFileComp
			}
			return p.CompleteJobs(false)(cmd, args, typed)
		},
	}
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		number, err := parseSignal(args[1])
		if err != nil {
			return err
		}
		reply, err := c.Jobs().SignalJob(ctx, &berthv1.SignalJobRequest{RequestId: p.RequestID, JobId: id, Signal: uint32(number)})
		if err != nil {
			return err
		}
		return p.Show(reply.GetJob(), id, func() error { return p.PrintLine(id) })
	})
	return cmd
}
