package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// blocks of each row; the ratio is the median of theirs, so that one disturbed block decides nothing.
	blocks = 7
	// creates in a block.
	creates = 4
	// pairedStreamBytes through Exec in a block.
	pairedStreamBytes = 256 << 20
)

// side is a broker of one build, with a sandbox on the provider that is measured.
type side struct {
	broker  *brokerProcess
	client  *client.Client
	make    *berthv1.SandboxSpec
	sandbox string
	job     string // a finished one
}

// pairedRow measures one thing: what it costs, in µs, smaller is better.
type pairedRow struct {
	name string
	cost func(ctx context.Context, s *side, n int) (float64, error)
}

// measurePaired runs each row on this tree's programs and on those of base in turn, in blocks, and prints the
// ratios. It judges nothing: a ratio within the spread of its own blocks is noise.
func measurePaired(ctx context.Context, n int, base, out string) (err error) {
	engine, err := openEngine(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.close(context.WithoutCancel(ctx))) }()
	var sides [2]*side
	for i, programs := range []string{"bin", base} {
		s := &side{}
		if s.broker, err = startBroker(ctx, programs, engine); err != nil {
			return fmt.Errorf("start the broker of %s: %w", programs, err)
		}
		defer func() { err = errors.Join(err, s.broker.stop()) }()
		if s.client, err = client.Dial(s.broker.address); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, destroyAll(context.WithoutCancel(ctx), s.client), s.client.Close()) }()
		sides[i] = s
	}
	specs := []*berthv1.SandboxSpec{{Provider: "local"}}
	if engine != nil {
		specs = append(specs, &berthv1.SandboxSpec{Provider: "docker", Image: engine.image})
	}
	r := &report{}
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "WHAT\tHERE µs\tBASE µs\tRATIO\tBLOCKS\t")
	for _, spec := range specs {
		for _, s := range sides {
			if err := s.open(ctx, spec); err != nil {
				return err
			}
		}
		for _, p := range pairedRows {
			if err := p.measure(ctx, n, sides, spec.GetProvider(), r, table); err != nil {
				return fmt.Errorf("%s on %s: %w", p.name, spec.GetProvider(), err)
			}
		}
	}
	for i, name := range []string{"here", "base"} {
		daemon, _ := memoryOf(sides[i].broker.pid())
		_, _ = fmt.Fprintf(table, "daemon, MB resident after all this, %s\t%.1f\t\t\t\n", name, daemon/1e6)
	}
	load, _ := os.ReadFile("/proc/loadavg")
	_, _ = fmt.Fprintf(table, "load at the end: %s\n", strings.TrimSpace(string(load)))
	return errors.Join(table.Flush(), r.write(out))
}

// open makes the sandbox that the rows run in, and a finished job.
func (s *side) open(ctx context.Context, spec *berthv1.SandboxSpec) error {
	s.make = spec
	made, err := s.client.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{Spec: spec})
	if err != nil {
		return err
	}
	s.sandbox = made.GetSandbox().GetId()
	started, err := s.client.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: s.sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
	if err != nil {
		return err
	}
	s.job = started.GetJob().GetId()
	_, err = s.client.WaitJob(ctx, s.job)
	return err
}

func (p pairedRow) measure(ctx context.Context, n int, sides [2]*side, provider string, r *report, table io.Writer) error {
	var costs [2][]float64
	var ratios []float64
	for block := range blocks + 1 {
		var cost [2]float64
		for i := range sides {
			which := (i + block) % 2 // whoever is first in one block is second in the next
			measured, err := p.cost(ctx, sides[which], max(n/blocks, 16))
			if err != nil {
				return err
			}
			cost[which] = measured
		}
		if block == 0 {
			continue // to warm up
		}
		costs[0], costs[1] = append(costs[0], cost[0]), append(costs[1], cost[1])
		ratios = append(ratios, cost[0]/cost[1])
	}
	name := provider + ": " + p.name
	ratio := middle(ratios)
	slices.Sort(ratios)
	spread := fmt.Sprintf("%.2f to %.2f", ratios[0], ratios[len(ratios)-1])
	r.rows = append(r.rows, row{Name: name, N: blocks, P50: middle(costs[0]), Ratio: ratio, Note: spread})
	_, err := fmt.Fprintf(table, "%s\t%.0f\t%.0f\t%.2f\t%s\t\n", name, middle(costs[0]), middle(costs[1]), ratio, spread)
	return err
}

func middle(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

var pairedRows = []pairedRow{
	{"RunCommand true, p50", percentileOf(0.5, (*side).run)},
	{"RunCommand true, p99", percentileOf(0.99, (*side).run)},
	{"RunCommand true, 16 callers, a command", func(ctx context.Context, s *side, n int) (float64, error) {
		all, err := at(callers, max(4*n, 2*callers), func() error { return s.run(ctx) })
		return 1e6 / all.perSecond(), err
	}},
	{"StartJob to its durable acknowledgement, p50", percentileOf(0.5, (*side).start)},
	{"PollJob of a finished job, p50", percentileOf(0.5, (*side).poll)},
	{"256 MiB through Exec", func(ctx context.Context, s *side, _ int) (float64, error) {
		took, _, err := s.bench().streamBeside(ctx, pairedStreamBytes, nil)
		return float64(took.Microseconds()), err
	}},
	{"RunCommand true beside a stream, p50", func(ctx context.Context, s *side, _ int) (float64, error) {
		_, busy, err := s.bench().streamBeside(ctx, pairedStreamBytes, func() error { return s.run(ctx) })
		return busy.percentile(0.5), err
	}},
	{"create and first command, p50", func(ctx context.Context, s *side, _ int) (float64, error) {
		var all sample
		for range creates {
			if err := s.create(ctx, &all); err != nil {
				return 0, err
			}
		}
		return all.percentile(0.5), nil
	}},
	{"idle guest, KB of its own share", func(_ context.Context, s *side, _ int) (float64, error) {
		var pss float64
		guests := s.broker.guests()
		for _, pid := range guests {
			_, p := memoryOf(pid)
			pss += p
		}
		return max(pss/float64(max(len(guests), 1))/1e3, 1), nil
	}},
}

func percentileOf(p float64, thing func(*side, context.Context) error) func(context.Context, *side, int) (float64, error) {
	return func(ctx context.Context, s *side, n int) (float64, error) {
		all, err := at(1, n, func() error { return thing(s, ctx) })
		return all.percentile(p), err
	}
}

func (s *side) bench() *bench { return &bench{client: s.client, sandbox: s.sandbox} }

func (s *side) run(ctx context.Context) error {
	return s.bench().run(ctx, "true")()
}

func (s *side) start(ctx context.Context) error {
	_, err := s.client.Jobs().StartJob(ctx, &berthv1.StartJobRequest{SandboxId: s.sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
	return err
}

func (s *side) poll(ctx context.Context) error {
	_, err := s.client.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: s.job})
	return err
}

// create makes a sandbox and runs a command in it; its end does not count.
func (s *side) create(ctx context.Context, all *sample) error {
	var id string
	cost, err := timed(func() error {
		made, err := s.client.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{Spec: s.make})
		if err != nil {
			return err
		}
		id = made.GetSandbox().GetId()
		return (&bench{client: s.client, sandbox: id}).run(ctx, "true")()
	})
	all.add(cost)
	if id != "" {
		_, destroyErr := s.client.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
		err = errors.Join(err, destroyErr)
	}
	return err
}
