package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"
)

// row is one line of the table and of bench.json.
type row struct {
	Name   string  `json:"name"`
	N      int     `json:"n"`
	P50    float64 `json:"p50_us"`
	P99    float64 `json:"p99_us"`
	Rate   float64 `json:"per_second,omitempty"`
	Ratio  float64 `json:"ratio,omitempty"`
	Target string  `json:"target,omitempty"`
	Met    *bool   `json:"met,omitempty"`
	Note   string  `json:"note,omitempty"`
}

// sample is what one thing cost, again and again.
type sample struct {
	costs []time.Duration
	took  time.Duration // all of them, at whatever concurrency
}

// add counts one more, which was waited for.
func (s *sample) add(cost time.Duration) {
	s.costs = append(s.costs, cost)
	s.took += cost
}

func (s sample) percentile(p float64) float64 {
	if len(s.costs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s.costs))
	return float64(sorted[min(int(p*float64(len(sorted))), len(sorted)-1)].Nanoseconds()) / 1e3
}

func (s sample) perSecond() float64 {
	if s.took == 0 {
		return 0
	}
	return float64(len(s.costs)) / s.took.Seconds()
}

// report collects rows.
type report struct{ rows []row }

func (r *report) plain(name string, s sample) {
	r.rows = append(r.rows, row{Name: name, N: len(s.costs), P50: s.percentile(0.5), P99: s.percentile(0.99), Rate: s.perSecond()})
}

// judged adds a row whose ratio is held against a target.
func (r *report) judged(name string, s sample, ratio float64, target string, met bool) {
	r.plain(name, s)
	last := &r.rows[len(r.rows)-1]
	last.Ratio, last.Target, last.Met = ratio, target, &met
}

// fact adds a figure that is no duration.
func (r *report) fact(name string, ratio float64, target string, met bool, note string) {
	r.rows = append(r.rows, row{Name: name, Ratio: ratio, Target: target, Met: &met, Note: note})
}

func (r *report) print(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "WHAT\tN\tP50 µs\tP99 µs\tA SECOND\tRATIO\tTARGET\t")
	for _, line := range r.rows {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", line.Name, count(line.N), number(line.P50, "%.0f"), number(line.P99, "%.0f"),
			number(line.Rate, "%.0f"), number(line.Ratio, "%.2f"), line.Target, verdict(line))
	}
	return table.Flush()
}

func count(n int) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func number(x float64, format string) string {
	if x == 0 {
		return "-"
	}
	return fmt.Sprintf(format, x)
}

func verdict(line row) string {
	switch {
	case line.Met == nil:
		return line.Note
	case *line.Met:
		return "met " + line.Note
	default:
		return "MISSED " + line.Note
	}
}

func (r *report) write(path string) error {
	data, err := json.MarshalIndent(r.rows, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o600)
}
