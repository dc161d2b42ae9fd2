package job

import (
	"context"
	"io"
	"math"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// streamNames are the values of --stream.
var streamNames = map[string]berthv1.Stream{
	"stdout": berthv1.Stream_STREAM_STDOUT,
	"stderr": berthv1.Stream_STREAM_STDERR,
}

// LogsCommand is `berth logs`.
func LogsCommand(p *command.Program) *cobra.Command {
	var (
		follow, untilSealed bool

		stream string
		offset = usage.Count{Max: math.MaxUint64, What: "an offset"}
	)
	cmd := &cobra.Command{
		Use:   "logs JOB",
		Short: "Print a job's output, byte for byte",
		Long: `Print a job's output, byte for byte: its stdout to stdout and its stderr to stderr, or one of them with
--stream, to stdout. Where bytes are missing, because they went over the job's output limit or over what
the broker keeps in all (--retention-output), or none were kept of an attached command, a line on stderr says which,
and it exits with 1.
With -o json every chunk is an object with its stream, offset and bytes in base64.`,
		Example: `  berth logs 9XW4
  berth logs -f 9XW4
  berth logs --stream stderr --offset 4096 9XW4`,
		Args:              usage.ExactlyOne("one job's id"),
		ValidArgsFunction: p.CompleteJobs(false),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "go on until the job is done")
	flags.BoolVar(&untilSealed, "until-sealed", false, "with -f: go on after that until no child of the job's can write any more")
	flags.StringVar(&stream, "stream", "", "only stdout or stderr (default both)")
	flags.Var(&offset, "offset", "begin at this byte; needs --stream")
	command.Must(cmd.RegisterFlagCompletionFunc("stream", command.Fixed("stdout", "stderr")))
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		streams, err := chosenStreams(stream, offset.N)
		if err != nil {
			return err
		}
		if untilSealed && !follow {
			return usage.Errorf("--until-sealed goes with -f")
		}
		if p.Output == command.OutputID {
			return usage.Errorf("-o id: output has no ids; use table for its bytes, or json")
		}
		id, err := command.JobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		extent := client.SoFar
		if follow {
			extent, p.Afterwards = client.UntilDone, "the job continues in the background"
		}
		if untilSealed {
			extent = client.UntilSealed
		}
		missing, err := logs(ctx, p, c, id, streams, offset.N, extent)
		if err == nil && follow {
			err = warnIfLost(ctx, p, c, id)
		}
		if err == nil && missing {
			return &command.ExitError{Code: usage.ExitFailure} // which bytes is said already
		}
		return err
	})
	return cmd
}

func chosenStreams(name string, offset uint64) ([]berthv1.Stream, error) {
	if name == "" {
		if offset > 0 {
			return nil, usage.Errorf("--offset needs --stream: the two streams have offsets of their own")
		}
		return []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}, nil
	}
	stream, known := streamNames[name]
	if !known {
		return nil, usage.Errorf("--stream %s: it must be stdout or stderr", name)
	}
	return []berthv1.Stream{stream}, nil
}

// warnIfLost says of a job whose output ended because it is lost that there may have been more.
func warnIfLost(ctx context.Context, p *command.Program, c *client.Client, id string) error {
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: id})
	if err == nil && reply.GetJob().GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST {
		p.PrintError(id, present.OutcomeWords(reply.GetJob()))
	}
	return err
}

// logs reads the streams: beside each other as they come, or one after the other as they are now. It
// says whether bytes are missing.
func logs(ctx context.Context, p *command.Program, c *client.Client, id string, streams []berthv1.Stream, offset uint64, extent client.Extent) (missing bool, err error) {
	var lock sync.Mutex // both streams may write to stderr, and in JSON to stdout
	group, ctx := errgroup.WithContext(ctx)
	if extent == client.SoFar {
		group.SetLimit(1)
	}
	noneKept := func() string {
		reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: id})
		if err != nil {
			return "" // the bytes are missing in any case
		}
		return present.NotKept(reply.GetJob())
	}
	for _, stream := range streams {
		out := p.Stdout
		if len(streams) > 1 && stream == berthv1.Stream_STREAM_STDERR {
			out = p.Stderr
		}
		sink := &logSink{program: p, lock: &lock, stream: stream, out: out, notKept: noneKept, missing: &missing}
		group.Go(func() error {
			_, err := c.FollowOutput(ctx, id, stream, offset, extent, sink)
			return err
		})
	}
	err = group.Wait()
	return missing, err
}

// logSink writes one stream's bytes, or its chunks as JSON.
type logSink struct {
	program *command.Program
	lock    *sync.Mutex
	stream  berthv1.Stream
	out     io.Writer
	missing *bool         // set when bytes are, under lock
	notKept func() string // asks why the job kept no output at all; empty: it kept what it may
}

// Data writes bytes as they are.
func (s *logSink) Data(offset uint64, data []byte) error {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.program.Output == command.OutputJSON {
		chunk := &berthv1.OutputChunk{Stream: s.stream, Offset: offset, Data: data}
		return present.WriteJSON(s.program.Stdout, &berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Chunk{Chunk: chunk}})
	}
	_, err := s.out.Write(data)
	return err
}

// Gap says which bytes were dropped.
func (s *logSink) Gap(from, to uint64) error {
	why := s.notKept() // before the lock: it asks the broker
	s.lock.Lock()
	defer s.lock.Unlock()
	*s.missing = true
	s.program.PrintError("logs", present.GapWords(s.stream, from, to, why))
	if s.program.Output != command.OutputJSON {
		return nil
	}
	gap := &berthv1.OutputGap{Stream: s.stream, Range: &berthv1.ByteRange{From: from, To: to}}
	return present.WriteJSON(s.program.Stdout, &berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Gap{Gap: gap}})
}
