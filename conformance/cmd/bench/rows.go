package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Sizes.
const (
	callers     = 16
	manyCallers = 64
	streamBytes = 1 << 30
	warmUp      = 50
)

// bench is what the rows stand on.
type bench struct {
	*report
	n       int
	broker  *brokerProcess
	engine  *engine // nil: there is none
	client  *client.Client
	sandbox string
}

func measure(ctx context.Context, n int, out string) (err error) {
	engine, err := openEngine(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.close(context.WithoutCancel(ctx))) }()
	broker, err := startBroker(ctx, "bin", engine)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, broker.stop()) }()
	c, err := client.Dial(broker.address)
	if err != nil {
		return err
	}
	defer func() {
		// Also what a row that failed, or was broken off, has left.
		err = errors.Join(err, destroyAll(context.WithoutCancel(ctx), c), c.Close())
	}()
	b := &bench{report: &report{}, n: n, broker: broker, engine: engine, client: c}
	made, err := c.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
	if err != nil {
		return err
	}
	b.sandbox = made.GetSandbox().GetId()
	for _, row := range []func(context.Context) error{b.oneCaller, b.manyCallers, b.detached, b.poll, b.stream, b.commits, b.memory, b.docker} {
		if err := row(ctx); err != nil {
			return err
		}
	}
	return errors.Join(b.print(os.Stdout), b.write(out))
}

func destroyAll(ctx context.Context, c *client.Client) error {
	list, err := c.Sandboxes().ListSandboxes(ctx, &berthv1.ListSandboxesRequest{PageSize: 1000})
	for _, sandbox := range list.GetSandboxes() {
		_, destroyErr := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: sandbox.GetId()})
		err = errors.Join(err, destroyErr)
	}
	return err
}

// interleaved runs several things in turn, n times, so that all of them see the same noise.
func interleaved(n int, things ...func() error) ([]sample, error) {
	return inTurn(n, warmUp, things, func() error { return nil })
}

// inTurn is interleaved with as many rounds to warm up as are said, and with something after each round
// that does not count.
func inTurn(n, warmUp int, things []func() error, tidy func() error) ([]sample, error) {
	samples := make([]sample, len(things))
	for round := range n + warmUp {
		for i, thing := range things {
			cost, err := timed(thing)
			if err != nil {
				return nil, errors.Join(err, tidy())
			}
			if round >= warmUp {
				samples[i].add(cost)
			}
		}
		if err := tidy(); err != nil {
			return nil, err
		}
	}
	return samples, nil
}

// inBlocks is interleaved for things that leave work behind, which would be counted against the next
// one: each runs a block of times, after a rest.
func inBlocks(ctx context.Context, n, block int, rest time.Duration, things ...func() error) ([]sample, error) {
	samples := make([]sample, len(things))
	for range n / block {
		for i, thing := range things {
			select {
			case <-time.After(rest):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			for range block {
				cost, err := timed(thing)
				if err != nil {
					return nil, err
				}
				samples[i].add(cost)
			}
		}
	}
	return samples, nil
}

func timed(thing func() error) (time.Duration, error) {
	begin := time.Now()
	err := thing()
	return time.Since(begin), err
}

// at runs one thing by several callers.
func at(concurrency, n int, thing func() error) (sample, error) {
	var mu sync.Mutex
	var all sample
	var first error
	var group sync.WaitGroup
	begin := time.Now()
	for range concurrency {
		group.Go(func() {
			for range n / concurrency {
				start := time.Now()
				err := thing()
				cost := time.Since(start)
				mu.Lock()
				all.costs = append(all.costs, cost)
				if err != nil && first == nil {
					first = err
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	all.took = time.Since(begin)
	return all, first
}

func raw(program string, args ...string) func() error {
	return func() error {
		var out, errs bytes.Buffer
		cmd := exec.Command(program, args...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		return cmd.Run()
	}
}

func (b *bench) run(ctx context.Context, argv ...string) func() error {
	return func() error {
		ran, err := b.client.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: b.sandbox, Spec: &berthv1.JobSpec{Argv: argv}})
		if err == nil && ran.GetJob().GetOutcome().GetExitCode() != 0 {
			err = fmt.Errorf("%v ended as %v", argv, ran.GetJob().GetOutcome())
		}
		return err
	}
}

func (b *bench) ping(ctx context.Context) func() error {
	health := grpc_health_v1.NewHealthClient(b.client.Conn())
	return func() error {
		_, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		return err
	}
}

func (b *bench) oneCaller(ctx context.Context) error {
	guest, err := b.broker.directGuest(ctx)
	if err != nil {
		return err
	}
	defer guest.stop()
	samples, err := interleaved(b.n, raw("/bin/true"), b.run(ctx, "true"), guest.run(ctx, "true"), b.ping(ctx), raw("/bin/sh", "-c", "true"), b.run(ctx, "/bin/sh", "-c", "true"))
	if err != nil {
		return err
	}
	bare, ran, direct, ping := samples[0], samples[1], samples[2], samples[3]
	b.plain("fork+exec true, raw, output captured", bare)
	ratio := ran.percentile(0.5) / bare.percentile(0.5)
	b.judged("RunCommand true, local, p50 over raw", ran, ratio, "<= 1.50", ratio <= 1.5)
	ratio = ran.percentile(0.99) / bare.percentile(0.99)
	b.judged("RunCommand true, local, p99 over raw", ran, ratio, "<= 3.00", ratio <= 3)
	b.plain("Run true in the guest, called directly", direct)
	added := ran.percentile(0.5) - direct.percentile(0.5)
	b.judged("the broker's own addition, ms", ran, added/1e3, "<= 0.25", added <= 250)
	b.plain("sh -c true, raw", samples[4])
	b.plain("RunCommand sh -c true", samples[5])
	b.plain("bare gRPC ping of the broker", ping)
	return nil
}

func (b *bench) manyCallers(ctx context.Context) error {
	bare, err := at(callers, b.n*2, raw("/bin/true"))
	if err != nil {
		return err
	}
	ran, err := at(callers, b.n*2, b.run(ctx, "true"))
	if err != nil {
		return err
	}
	again, err := at(callers, b.n*2, raw("/bin/true"))
	if err != nil {
		return err
	}
	b.plain("fork+exec true, raw, 16 callers", bare)
	ratio := ran.perSecond() / ((bare.perSecond() + again.perSecond()) / 2)
	b.judged("RunCommand true, 16 callers, a second over raw", ran, ratio, ">= 0.85", ratio >= 0.85)
	return nil
}

func (b *bench) detached(ctx context.Context) error {
	ledger, err := store.Open(filepath.Join(b.broker.dir, "bench.db"), store.Options{})
	if err != nil {
		return err
	}
	commit := func() error { return commitOne(ctx, ledger) }
	bare := raw("/bin/true")
	samples, err := interleaved(b.n/2, func() error { return errors.Join(bare(), commit(), commit()) }, func() error {
		_, err := b.client.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: b.sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
		return err
	})
	if err := errors.Join(err, ledger.Close()); err != nil {
		return err
	}
	b.plain("fork+exec true, raw, and 2 commits", samples[0])
	ratio := samples[1].percentile(0.5) / samples[0].percentile(0.5)
	b.judged("StartJob to its durable acknowledgement", samples[1], ratio, "<= 1.50", ratio <= 1.5)
	return nil
}

func commitOne(ctx context.Context, ledger *store.Store) error {
	return ledger.Update(ctx, func(tx *store.Tx) error {
		return tx.PutSession("default", "bench", &recordv1.SessionRecord{SandboxId: "sb_" + strconv.FormatInt(time.Now().UnixNano(), 36)})
	})
}

func (b *bench) poll(ctx context.Context) error {
	started, err := b.client.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: b.sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
	if err != nil {
		return err
	}
	job := started.GetJob().GetId()
	if _, err := b.client.WaitJob(ctx, job); err != nil {
		return err
	}
	samples, err := interleaved(b.n, b.ping(ctx), func() error {
		_, err := b.client.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: job})
		return err
	})
	if err != nil {
		return err
	}
	ratio := samples[1].percentile(0.5) / samples[0].percentile(0.5)
	b.judged("PollJob of a finished job, over a ping", samples[1], ratio, "<= 2.00", ratio <= 2)
	return nil
}

// stream measures output at full speed, and what it does to short commands beside it.
func (b *bench) stream(ctx context.Context) error {
	quiet, err := at(1, b.n/2, b.run(ctx, "true"))
	if err != nil {
		return err
	}
	begin := time.Now()
	piped := exec.CommandContext(ctx, "head", "-c", strconv.Itoa(streamBytes), "/dev/zero")
	pipe, err := piped.StdoutPipe()
	if err != nil {
		return err
	}
	if err := piped.Start(); err != nil {
		return err
	}
	if _, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{pipe}, make([]byte, 256<<10)); err != nil {
		return err
	}
	if err := piped.Wait(); err != nil {
		return err
	}
	bare := float64(streamBytes) / time.Since(begin).Seconds()
	took, busy, err := b.streamBeside(ctx, streamBytes, b.run(ctx, "true"))
	if err != nil {
		return err
	}
	through := float64(streamBytes) / took.Seconds()
	b.fact("1 GiB through Exec, MB/s over a raw pipe's", through/bare, "", true, fmt.Sprintf("(%.0f of %.0f MB/s; the Docker rows have its target)", through/1e6, bare/1e6))
	ratio := busy.percentile(0.5) / quiet.percentile(0.5)
	b.judged("RunCommand true beside a stream at full speed", busy, ratio, "<= 2.50", ratio <= 2.5)
	return nil
}

// streamBeside streams size bytes at full speed, and runs a short thing again and again beside it, if there is one.
func (b *bench) streamBeside(ctx context.Context, size int, beside func() error) (time.Duration, sample, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := b.client.Jobs().Exec(ctx)
	if err != nil {
		return 0, sample{}, err
	}
	err = stream.Send(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{
		SandboxId: b.sandbox, Spec: &berthv1.JobSpec{Argv: []string{"head", "-c", strconv.Itoa(size), "/dev/zero"}},
	}}})
	if err != nil {
		return 0, sample{}, err
	}
	type result struct {
		took time.Duration
		err  error
	}
	begin, read := time.Now(), make(chan result, 1)
	go func() {
		total := 0
		for {
			message, err := stream.Recv()
			if err != nil {
				read <- result{0, fmt.Errorf("read the stream after %d bytes: %w", total, err)}
				return
			}
			total += len(message.GetChunk().GetData())
			if message.GetDone() != nil {
				read <- result{time.Since(begin), nil}
				return
			}
		}
	}()
	var busy sample
	if beside == nil {
		got := <-read
		return got.took, busy, got.err
	}
	for {
		select {
		case got := <-read:
			return got.took, busy, got.err
		default:
		}
		start := time.Now()
		if err := beside(); err != nil {
			return 0, busy, err
		}
		busy.costs = append(busy.costs, time.Since(start))
	}
}

func (b *bench) commits(ctx context.Context) error {
	ledger, err := store.Open(filepath.Join(b.broker.dir, "bench.db"), store.Options{})
	if err != nil {
		return err
	}
	one, err := at(1, b.n, func() error { return commitOne(ctx, ledger) })
	if err != nil {
		return err
	}
	many, err := at(manyCallers, b.n*manyCallers/2, func() error { return commitOne(ctx, ledger) })
	if err != nil {
		return err
	}
	b.plain("ledger commits, 1 caller", one)
	ratio := many.perSecond() / one.perSecond()
	b.judged("ledger commits, 64 callers, a second over 1", many, ratio, ">= 10", ratio >= 10)
	return ledger.Close()
}

// memory measures idle guests and the daemon beside them.
func (b *bench) memory(ctx context.Context) error {
	const machines = 20
	var ids []string
	for range machines {
		made, err := b.client.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
		if err != nil {
			return err
		}
		ids = append(ids, made.GetSandbox().GetId())
	}
	var rss, pss float64
	guests := b.broker.guests()
	for _, pid := range guests {
		r, p := memoryOf(pid)
		rss, pss = rss+r, pss+p
	}
	rss, pss = rss/float64(len(guests))/1e6, pss/float64(len(guests))/1e6
	b.fact("idle guest, MB resident", rss, "<= 10", rss <= 10, "")
	b.fact("idle guest, MB of its own share", pss, "<= 1.5", pss <= 1.5, fmt.Sprintf("(%d beside one another)", len(guests)))
	daemon, _ := memoryOf(b.broker.pid())
	b.fact("daemon, MB resident", daemon/1e6, "<= 60", daemon/1e6 <= 60, fmt.Sprintf("(with %d machines, after this run)", machines+1))
	for _, id := range ids {
		if _, err := b.client.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id}); err != nil {
			return err
		}
	}
	return nil
}

// memoryOf reads a process's resident and proportional memory, in bytes.
func memoryOf(pid int) (rss, pss float64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, 0
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		kb, _ := strconv.ParseFloat(fields[1], 64)
		switch fields[0] {
		case "Rss:":
			rss = kb * 1024
		case "Pss:":
			pss = kb * 1024
		}
	}
	return rss, pss
}
