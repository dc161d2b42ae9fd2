package guest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// BenchmarkRun compares Run of true through gRPC on a unix socket with raw fork+exec and captured
// output, interleaved in one run: ratio is the quotient of their medians. With 16 callers, rate is
// the quotient of their commands a second.
func BenchmarkRun(b *testing.B) {
	for _, cgroups := range []bool{true, false} {
		for _, callers := range []int{1, 16} {
			b.Run(fmt.Sprintf("cgroups=%v/callers=%d", cgroups, callers), func(b *testing.B) {
				var change []func(*guestv1.BootConfig)
				if cgroups {
					change = append(change, withCgroups(b))
				}
				m := boot(b, change...)
				benchmarkRun(b, m, callers)
			})
		}
	}
}

func benchmarkRun(b *testing.B, m *machine, callers int) {
	through := func() {
		r := argv("/bin/true")
		response, err := m.calls.Run(context.Background(), &guestv1.RunRequest{Start: r, MaxOutputBytes: 1 << 10, Forget: true})
		if err != nil || response.GetStatus().GetOutcome().GetExitCode() != 0 {
			b.Error(response, err)
		}
	}
	raw := func() {
		var stdout, stderr bytes.Buffer
		c := exec.Command("/bin/true")
		c.Stdout, c.Stderr = &stdout, &stderr
		if err := c.Run(); err != nil {
			b.Error(err)
		}
	}
	ping := func() {
		_, err := m.calls.Hello(context.Background(), m.helloRequest(m.calls))
		if err != nil {
			b.Error(err)
		}
	}
	for range 50 {
		through()
		raw()
	}
	b.ResetTimer()
	before := m.processorTime()
	defer func() {
		b.ReportMetric(float64((m.processorTime()-before).Microseconds())/float64(b.N), "guest-cpu-us")
	}()
	if callers == 1 {
		var a, z, p []time.Duration
		for range b.N {
			a = append(a, timed(through))
			z = append(z, timed(raw))
			p = append(p, timed(ping))
		}
		b.ReportMetric(float64(quantile(a, .5).Microseconds()), "p50-us")
		b.ReportMetric(float64(quantile(a, .99).Microseconds()), "p99-us")
		b.ReportMetric(float64(quantile(z, .5).Microseconds()), "raw-p50-us")
		b.ReportMetric(float64(quantile(z, .99).Microseconds()), "raw-p99-us")
		b.ReportMetric(float64(quantile(p, .5).Microseconds()), "ping-p50-us")
		b.ReportMetric(float64(quantile(a, .5))/float64(quantile(z, .5)), "ratio")
		return
	}
	a := timed(func() { spread(callers, b.N, through) })
	z := timed(func() { spread(callers, b.N, raw) })
	b.ReportMetric(float64(b.N)/a.Seconds(), "per-s")
	b.ReportMetric(float64(b.N)/z.Seconds(), "raw-per-s")
	b.ReportMetric(z.Seconds()/a.Seconds(), "rate")
}

// processorTime is what the guest itself has used so far, its jobs not counted.
func (m *machine) processorTime() (total time.Duration) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", m.process.Process.Pid))
	must(m.t, err)
	for _, task := range tasks {
		var nanoseconds int64
		data, err := os.ReadFile(task)
		if err == nil {
			_, err = fmt.Sscan(string(data), &nanoseconds)
		}
		must(m.t, err)
		total += time.Duration(nanoseconds)
	}
	return total
}

func spread(callers, n int, f func()) {
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			for range (n + callers - 1 - i) / callers {
				f()
			}
		})
	}
	all.Wait()
}

func timed(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

func quantile(all []time.Duration, q float64) time.Duration {
	slices.Sort(all)
	return all[int(q*float64(len(all)-1))]
}

// BenchmarkAttachStream reads a fast command's output as it comes; MB/s is what arrives, lost is the
// share of what was dropped because this reader was too slow.
func BenchmarkAttachStream(b *testing.B) {
	for _, limit := range []uint64{64 << 20, 4 << 30} {
		b.Run(fmt.Sprintf("kept=%dMiB", limit>>20), func(b *testing.B) {
			m := boot(b)
			const size = 1 << 30
			var got, lost uint64
			b.ResetTimer()
			for range b.N {
				r := argv("head", "-c", fmt.Sprint(size), "/dev/zero")
				r.Command.OutputLimitBytes = limit
				stream, err := m.calls.Attach(b.Context())
				must(b, err)
				must(b, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: r.GetJobId(), Start: r}}}))
				for done := false; !done; {
					message, err := stream.Recv()
					must(b, err)
					got += uint64(len(message.GetChunk().GetData()))
					if gap := message.GetGap(); gap != nil {
						lost += gap.GetRange().GetTo() - gap.GetRange().GetFrom()
					}
					done = message.GetDone() != nil
				}
				_, err = m.calls.Forget(b.Context(), &guestv1.ForgetRequest{JobIds: []string{r.GetJobId()}})
				must(b, err)
			}
			b.ReportMetric(float64(got)/1e6/b.Elapsed().Seconds(), "MB/s")
			b.ReportMetric(float64(lost)/float64(got+lost), "lost")
			b.ReportMetric(float64(m.memoryMiB()), "guest-MiB")
		})
	}
}
