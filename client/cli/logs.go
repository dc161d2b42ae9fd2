package cli

import (
	"context"
	"fmt"
	"io"
	"math"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// streamNames are the values of --stream.
var streamNames = map[string]berthv1.Stream{
	"stdout": berthv1.Stream_STREAM_STDOUT,
	"stderr": berthv1.Stream_STREAM_STDERR,
}

func (p *program) logsCommand() *cobra.Command {
	var (
		follow, untilSealed bool

		stream string
		offset = countValue{most: math.MaxUint64, what: "an offset"}
	)
	cmd := &cobra.Command{
		Use:   "logs JOB",
		Short: "Print a job's output, byte for byte",
		Long: `Print a job's output, byte for byte: its stdout to stdout and its stderr to stderr, or one of them with
--stream, to stdout. Where bytes are missing, because they went over the job's output limit or over what
the broker keeps in all (--retention-output), or none were kept of an attached command, a line on stderr says which.
With -o json every piece is an object with its stream, offset and bytes in base64.`,
		Example: `  berth logs 9XW4
  berth logs -f 9XW4
  berth logs --stream stderr --offset 4096 9XW4`,
		Args:              exactlyOne("one job's id"),
		ValidArgsFunction: p.completeJobs(false),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "go on until the job is done")
	flags.BoolVar(&untilSealed, "until-sealed", false, "with -f: go on after that until no child of the job's can write any more")
	flags.StringVar(&stream, "stream", "", "only stdout or stderr (default both)")
	flags.Var(&offset, "offset", "begin at this byte; needs --stream")
	must(cmd.RegisterFlagCompletionFunc("stream", fixed("stdout", "stderr")))
	cmd.RunE = p.call(exitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		streams, err := chosenStreams(stream, offset.n)
		if err != nil {
			return err
		}
		if untilSealed && !follow {
			return usagef("--until-sealed goes with -f")
		}
		if p.output == outputID {
			return usagef("-o id: output has no ids; use table for its bytes, or json")
		}
		id, err := jobID(ctx, c, args[0])
		if err != nil {
			return err
		}
		extent := client.SoFar
		if follow {
			extent, p.afterwards = client.UntilDone, "the job goes on"
		}
		if untilSealed {
			extent = client.UntilSealed
		}
		if err := p.logs(ctx, c, id, streams, offset.n, extent); err != nil || !follow {
			return err
		}
		return p.sayLost(ctx, c, id)
	})
	return cmd
}

func chosenStreams(name string, offset uint64) ([]berthv1.Stream, error) {
	if name == "" {
		if offset > 0 {
			return nil, usagef("--offset needs --stream: the two streams have offsets of their own")
		}
		return []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}, nil
	}
	stream, known := streamNames[name]
	if !known {
		return nil, usagef("--stream %s: it must be stdout or stderr", name)
	}
	return []berthv1.Stream{stream}, nil
}

// sayLost says of a job whose output ended because it is lost that there may have been more.
func (p *program) sayLost(ctx context.Context, c *client.Client, id string) error {
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: id})
	if err == nil && reply.GetJob().GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST {
		p.complain(id, outcomeWords(reply.GetJob()))
	}
	return err
}

// logs reads the streams: beside each other as they come, or one after the other as they are now.
func (p *program) logs(ctx context.Context, c *client.Client, id string, streams []berthv1.Stream, offset uint64, extent client.Extent) error {
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
		return notKept(reply.GetJob())
	}
	for _, stream := range streams {
		out := p.Stdout
		if len(streams) > 1 && stream == berthv1.Stream_STREAM_STDERR {
			out = p.Stderr
		}
		sink := &logSink{program: p, lock: &lock, stream: stream, out: out, notKept: noneKept}
		group.Go(func() error {
			_, err := c.FollowOutput(ctx, id, stream, offset, extent, sink)
			return err
		})
	}
	return group.Wait()
}

// logSink writes one stream's bytes, or its pieces as JSON.
type logSink struct {
	program *program
	lock    *sync.Mutex
	stream  berthv1.Stream
	out     io.Writer
	notKept func() string // asks why the job kept no output at all; empty: it kept what it may
}

// Data writes bytes as they are.
func (s *logSink) Data(offset uint64, data []byte) error {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.program.output == outputJSON {
		chunk := &berthv1.OutputChunk{Stream: s.stream, Offset: offset, Data: data}
		return writeJSON(s.program.Stdout, &berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Chunk{Chunk: chunk}})
	}
	_, err := s.out.Write(data)
	return err
}

// Gap says which bytes were dropped.
func (s *logSink) Gap(from, to uint64) error {
	why := ""
	if s.program.output != outputJSON {
		why = s.notKept() // before the lock: it asks the broker
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.program.output == outputJSON {
		gap := &berthv1.OutputGap{Stream: s.stream, Range: &berthv1.ByteRange{From: from, To: to}}
		return writeJSON(s.program.Stdout, &berthv1.FollowJobResponse{Message: &berthv1.FollowJobResponse_Gap{Gap: gap}})
	}
	_, err := fmt.Fprintf(s.program.Stderr, "berth: logs: %s\n", gapWords(s.stream, from, to, why))
	return err
}
