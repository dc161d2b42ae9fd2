package api

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// The table's rows of output, input, terminals and signals.

// attachedOutput runs a command attached and wants its output to be the first size bytes of want, each
// at its place, and nothing dropped. Comparing each byte says more than a checksum, and where.
func attachedOutput(spec *berthv1.JobSpec, want *numbers, size int64) func(*testing.T, *ground) {
	return func(t *testing.T, g *ground) {
		want := comparison{want: numbers{separator: want.separator}}
		job, err := g.Exec(g.ctx, g.sandbox, spec, client.ExecIO{Stdout: &want, Gap: func(_ berthv1.Stream, from, to uint64) {
			t.Errorf("bytes %d to %d were dropped", from, to)
		}})
		if err != nil {
			t.Fatal(err)
		}
		wantExit(t, job, 0)
		stats := job.GetStdout()
		if want.seen != size || stats.GetTotalBytes() != uint64(size) || stats.GetEndAtExit() != uint64(size) || len(stats.GetKept()) != 0 {
			t.Errorf("%d bytes came, and the stats are %v, want %d, none of them kept", want.seen, stats, size)
		}
	}
}

// numbers is what seq writes, 1 and on, with another separator if need be, without an end: no two
// places of it look the same.
type numbers struct {
	separator byte
	last      []byte // the last number, with its separator
	rest      []byte // of it, not yet read
}

// Read fills p.
func (n *numbers) Read(p []byte) (int, error) {
	for at := 0; at < len(p); {
		if len(n.rest) == 0 {
			n.rest = n.following()
		}
		copied := copy(p[at:], n.rest)
		at, n.rest = at+copied, n.rest[copied:]
	}
	return len(p), nil
}

// following counts on, on the digits: a gibibyte of them must cost less than to send it.
func (n *numbers) following() []byte {
	if n.last == nil {
		n.last = []byte{'1', n.separator}
		return n.last
	}
	at := len(n.last) - 2
	for ; at >= 0 && n.last[at] == '9'; at-- {
		n.last[at] = '0'
	}
	if at < 0 {
		n.last = append([]byte{'1'}, n.last...)
	} else {
		n.last[at]++
	}
	return n.last
}

// comparison takes what must be numbers, and refuses the first piece that is not.
type comparison struct {
	want   numbers
	seen   int64
	expect []byte
}

// Write compares a piece.
func (c *comparison) Write(p []byte) (int, error) {
	if cap(c.expect) < len(p) {
		c.expect = make([]byte, len(p))
	}
	expect := c.expect[:len(p)]
	_, _ = c.want.Read(expect)
	if !bytes.Equal(p, expect) {
		at := 0
		for p[at] == expect[at] {
			at++
		}
		return at, fmt.Errorf("byte %d differs: there is %s, want %s", c.seen+int64(at), brief(string(p[at:])), brief(string(expect[at:])))
	}
	c.seen += int64(len(p))
	return len(p), nil
}

// bounded is output of which little is kept: a head and a tail, and the rest counted.
func bounded(t *testing.T, g *ground) {
	const size = 200_000_003
	reply, err := g.Jobs().StartJob(g.ctx, &berthv1.StartJobRequest{
		SandboxId: g.sandbox, Spec: spooling(1<<20, shell("head -c 200000000 /dev/zero; printf end")),
	})
	if err != nil {
		t.Fatal(err)
	}
	job := g.wait(t, reply.GetJob().GetId())
	wantExit(t, job, 0)
	stats := job.GetStdout()
	if stats.GetTotalBytes() != size || len(stats.GetKept()) != 2 || stats.GetKept()[0].GetFrom() != 0 || stats.GetKept()[1].GetTo() != size {
		t.Fatalf("the stats are %v", stats)
	}
	kept := uint64(0)
	for _, r := range stats.GetKept() {
		kept += r.GetTo() - r.GetFrom()
	}
	if kept > 1<<20 || kept < 1<<18 || stats.GetDroppedBytes() != size-kept {
		t.Errorf("of 1 MiB %d bytes are kept, and %d dropped", kept, stats.GetDroppedBytes())
	}
	data, gaps, err := g.ReadAllOutput(g.ctx, job.GetId(), berthv1.Stream_STREAM_STDOUT)
	if err != nil || len(gaps) != 1 || uint64(len(data)) != kept || !bytes.HasSuffix(data, []byte("\x00end")) {
		t.Errorf("%d bytes and gaps %v can be read (%v)", len(data), gaps, err)
	}
	_, err = g.Jobs().ReadJobOutput(g.ctx, &berthv1.ReadJobOutputRequest{JobId: job.GetId(), Offset: stats.GetKept()[0].GetTo()})
	wantReason(t, err, berthv1.Reason_REASON_OUTPUT_EXPIRED)
	if got := client.Metadata(err)["first_kept"]; got != fmt.Sprint(stats.GetKept()[1].GetFrom()) {
		t.Errorf("the error says that %s is kept next", got)
	}
}

func isLive(t *testing.T, g *ground) {
	// It goes on only when its first line was seen.
	spec := shell("echo one; while [ ! -e seen ]; do sleep 0.05; done; echo two >&2; exit 7")
	spec.Timeout = durationpb.New(2 * time.Minute)
	var seeing sync.WaitGroup
	job, err := g.Exec(g.ctx, g.sandbox, spec, client.ExecIO{
		Stdout: writerFunc(func(p []byte) (int, error) {
			seeing.Go(func() {
				if _, err := g.Jobs().RunCommand(g.ctx, &berthv1.RunCommandRequest{SandboxId: g.sandbox, Spec: shell("touch seen")}); err != nil {
					t.Errorf("tell the command that its line was seen: %v", err)
				}
			})
			return len(p), nil
		}),
		Stderr: writerFunc(func(p []byte) (int, error) {
			if string(p) != "two\n" {
				t.Errorf("stderr is %q", p)
			}
			return len(p), nil
		}),
	})
	seeing.Wait()
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, job, 7)
}

// quiet is longer than the longest ping and its timeout between a client and a broker, 30 s and 10 s,
// and several times those between broker and guest. They cannot be set from outside.
const quiet = 43 * time.Second

// beSilent holds one stream, which nobody mends when it breaks, beside all other rows: it takes longer
// than they do.
func (g *ground) beSilent(t *testing.T) {
	t.Helper()
	g.silence = make(chan error, 1)
	var listening sync.WaitGroup
	t.Cleanup(listening.Wait)
	listening.Go(func() { g.silence <- g.listenToSilence() })
}

func (g *ground) listenToSilence() error {
	stream, err := g.Jobs().Exec(g.ctx)
	if err != nil {
		return err
	}
	begin := time.Now()
	spec := shell(fmt.Sprintf("sleep %d; echo still here; exit 2", quiet/time.Second))
	if err := stream.Send(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: g.sandbox, Spec: spec}}}); err != nil {
		return err
	}
	var out []byte
	for {
		reply, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("after %s the stream broke: %w", time.Since(begin), err)
		}
		out = append(out, reply.GetChunk().GetData()...)
		if done := reply.GetDone(); done != nil {
			if took := time.Since(begin); string(out) != "still here\n" || took < quiet || done.GetOutcome().GetExitCode() != 2 {
				return fmt.Errorf("after %s it had written %q, and ended as %v", took, out, done.GetOutcome())
			}
			break
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("after the job's end the stream ended with %w", err)
	}
	return nil
}

func silence(t *testing.T, g *ground) {
	if err := <-g.silence; err != nil {
		t.Error(err)
	}
}

func neverRead(t *testing.T, g *ground) {
	job, _, _ := g.attached(t, g.sandbox, shell("sleep 0.3; exit 6"), io.LimitReader(zeros{}, 8<<20))
	wantExit(t, job, 6)
}

func halfClosed(t *testing.T, g *ground) {
	// It goes on writing after its input's end.
	job, out, _ := g.attached(t, g.sandbox, shell("cat; sleep 0.2; echo after; exit 4"), strings.NewReader("hello\n"))
	wantExit(t, job, 4)
	if out != "hello\nafter\n" {
		t.Errorf("it gave back %q", out)
	}
}

func hundredMebibytesThroughCat(t *testing.T, g *ground) {
	const size = 100 << 20
	sent, came := sha256.New(), sha256.New()
	job, err := g.Exec(g.ctx, g.sandbox, spooling(size, argv("cat")), client.ExecIO{
		Stdin: io.TeeReader(io.LimitReader(rand.Reader, size), sent), Stdout: came,
	})
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, job, 0)
	if !bytes.Equal(sent.Sum(nil), came.Sum(nil)) || job.GetStdout().GetTotalBytes() != size {
		t.Errorf("%d bytes came back, with checksum %x, want %d with %x", job.GetStdout().GetTotalBytes(), came.Sum(nil), size, sent.Sum(nil))
	}
}

func terminal(t *testing.T, g *ground) {
	sizes := make(chan *berthv1.TerminalSize, 1)
	var out lockedBuffer
	seen := writerFunc(func(p []byte) (int, error) {
		n, err := out.Write(p)
		if strings.Contains(out.String(), "ready") && !strings.Contains(out.String(), "50 200") {
			select {
			case sizes <- &berthv1.TerminalSize{Cols: 200, Rows: 50}:
			default:
			}
		}
		return n, err
	})
	job, err := g.Exec(g.ctx, g.sandbox, &berthv1.JobSpec{
		Shell: `test -t 0 && test -t 1 && test -t 2 && stty size </dev/tty
echo to stderr >&2; trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.1; done`,
		Tty: &berthv1.TerminalSize{Cols: 120, Rows: 40}, Timeout: durationpb.New(2 * time.Minute),
	}, client.ExecIO{Stdout: seen, Resize: sizes})
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, job, 4)
	if got := out.String(); !strings.HasPrefix(got, "40 120\r\nto stderr\r\nready\r\n") || !strings.Contains(got, "50 200") {
		t.Errorf("the terminal said %q", got)
	}
}

func signalled(t *testing.T, g *ground) {
	signals := make(chan int, 1)
	job, err := g.Exec(g.ctx, g.sandbox, &berthv1.JobSpec{
		Shell: "trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done", Timeout: durationpb.New(2 * time.Minute),
	}, client.ExecIO{
		Stdout:  writerFunc(func(p []byte) (int, error) { signals <- 10; return len(p), nil }),
		Signals: signals,
	})
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, job, 5)
}
