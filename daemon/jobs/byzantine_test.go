package jobs

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	between "github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

// told returns how often a rule was applied.
func (w *harness) told(id string) int {
	w.t.Helper()
	times, err := w.fake.Harness().Applied(id)
	must(w.t, err)
	return times
}

// withRules is a harness with a sandbox whose real guest is behind a fault proxy with these rules.
func withRules(t *testing.T, rules ...between.Rule) (*harness, *recordv1.SandboxRecord) {
	t.Helper()
	w := newHarness(t)
	must(t, w.fake.Harness().SetRules())
	sandbox := w.sandbox()
	must(t, w.fake.Harness().SetRules(rules...))
	return w, sandbox
}

func TestAGuestThatAnswersAtOnceIsAskedSeldom(t *testing.T) {
	t.Parallel()
	w, sandbox := withRules(t,
		between.Rule{ID: "list", Call: "List", Kind: between.AtOnce}, between.Rule{ID: "wait", Call: "Wait", Kind: between.AtOnce})
	job := w.started(sandbox, shell("sleep 60")) // ends the list that was asked for before
	w.unrecorded.Await(sandbox.GetMachineId(), job.GetId())
	w.wait("the lies to be applied", func() bool { return w.told("list") > 0 && w.told("wait") > 0 })
	lists, waits := w.told("list"), w.told("wait")
	background.Pause(w.ctx, 2*time.Second)
	if lists, waits = w.told("list")-lists, w.told("wait")-waits; lists > 30 || waits > 30 {
		t.Errorf("in two seconds it was asked %d and %d times", lists, waits)
	}
	_, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), durationpb.New(0))
	must(t, err)
}

func TestAGuestWhoseConnectionsBreakAtOnceIsDialledSeldom(t *testing.T) {
	t.Parallel()
	w, _ := withRules(t,
		between.Rule{ID: "hello", Call: "Hello", Kind: between.Set, Fields: map[string]any{"uid": 1}}, between.Rule{ID: "cut", Call: "List", Kind: between.CutMidway})
	w.restart()
	w.wait("the lies to be applied", func() bool { return w.told("hello") > 1 })
	before := w.told("hello")
	background.Pause(w.ctx, 2*time.Second)
	if dialled := w.told("hello") - before; dialled > 20 {
		t.Errorf("in two seconds it was dialled %d times", dialled)
	}
}

func TestAFollowerOutlivesOneListOfAnotherBoot(t *testing.T) {
	t.Parallel()
	w, sandbox := withRules(t, between.Rule{ID: "boot", Call: "List", Kind: between.Set, Fields: map[string]any{"boot_id": "another"}, Times: 1})
	job := w.started(sandbox, shell("exit 7"))
	w.wait("the job's outcome to come home by itself", func() bool { return record.IsDone(w.record(job.GetId())) })
	w.wantExit(w.record(job.GetId()), 7)
	if w.told("boot") != 1 {
		t.Error("the rule was not told")
	}
}

func TestAGuestThatIsConnectedAndSilentHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	w, sandbox := withRules(t)
	w.guestTimeout = 300 * time.Millisecond
	w.restart()
	job := w.started(sandbox, shell("sleep 60"))
	w.wait("it to be recorded as running", func() bool { return record.HasBegun(w.record(job.GetId())) })
	var rules []between.Rule
	for _, silent := range []string{"Wait", "Read", "Signal", "Input", "Stop"} {
		rules = append(rules, between.Rule{ID: silent, Call: silent, Kind: between.Silent})
	}
	must(t, w.fake.Harness().SetRules(rules...))
	for _, c := range []struct {
		name string
		ask  func() error
	}{
		{"Wait", func() error { _, err := w.Poll(w.ctx, namespace, job.GetId(), 0); return err }},
		{"Read", func() error {
			_, err := w.ReadOutput(w.ctx, namespace, job.GetId(), berthv1.Stream_STREAM_STDOUT, 0, 10, 0)
			return err
		}},
		{"Signal", func() error { _, err := w.Signal(w.ctx, call("signal", ""), job.GetId(), 18); return err }},
		// The last one: it is not answered, and done all the same.
		{"Stop", func() error { _, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), durationpb.New(0)); return err }},
	} {
		if err := c.ask(); !fault.Is(err, fault.GuestUnreachable) {
			t.Errorf("%s: the error is %v", c.name, err)
		}
	}
}

func TestARunThatIsAnsweredWithAnotherJobIsLost(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	for name, answer := range map[string]func(id string) *guestv1.Status{
		"another job":            func(string) *guestv1.Status { return finished("job_00000000000000000000000000", exited(0)) },
		"one that is not done":   func(id string) *guestv1.Status { return &guestv1.Status{JobId: id, Outcome: exited(0)} },
		"a signal and a success": func(id string) *guestv1.Status { return finished(id, &berthv1.Outcome{Exit: exited(0).Exit}) },
	} {
		l.says(func(l *scriptedGuest) {
			l.run = func(request *guestv1.RunRequest) *guestv1.RunResponse {
				return &guestv1.RunResponse{Status: answer(request.GetStart().GetJobId()), Stdout: &guestv1.Output{Head: []byte("other")}}
			}
		})
		ran, err := w.Run(w.ctx, call("run", ""), sandbox.GetId(), shell("true"), 100)
		must(t, err)
		if outcome := ran.Job.GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_LOST || outcome.Exit != nil {
			t.Errorf("%s: it ended as %v", name, outcome)
		}
	}
	job := w.started(sandbox, shell("true"))
	l.says(func(l *scriptedGuest) {
		l.stop = func(id string) (*guestv1.Status, error) { return &guestv1.Status{JobId: id, Outcome: exited(0)}, nil }
	})
	if stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), nil); !fault.Is(err, fault.Internal) {
		t.Errorf("a stop that is answered with a job that is not over: %v (%v)", stopped, err)
	}
	if record.IsDone(w.record(job.GetId())) {
		t.Errorf("it is %v", w.record(job.GetId()))
	}
}

func TestBytesOfAReceiptNeverChange(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	answers := func(letter byte) {
		l.says(func(l *scriptedGuest) {
			l.read = func(request *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
				data := make([]byte, request.GetMaxBytes())
				for i := range data {
					data[i] = letter
				}
				return &guestv1.ReadResponse{Data: data}, nil
			}
		})
	}
	tell := func(id string, stats *berthv1.OutputStats) {
		status := finished(id, exited(0))
		status.Stdout = stats
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{status}}
	}
	for name, later := range map[string]*berthv1.OutputStats{
		"more of it": sealedStats(8, byteRange(0, 8)), "as much of it": sealedStats(5, byteRange(0, 5)), "less of it": sealedStats(2, byteRange(0, 2)),
	} {
		job := w.started(sandbox, shell("true"))
		answers('a')
		tell(job.GetId(), &berthv1.OutputStats{TotalBytes: 5, Kept: []*berthv1.ByteRange{byteRange(0, 5)}})
		w.done(job.GetId())
		answers('b')
		tell(job.GetId(), later)
		w.wait("its output to be sealed", func() bool { return record.IsComplete(w.record(job.GetId())) })
		data, _ := w.readAll(job.GetId(), berthv1.Stream_STREAM_STDOUT)
		if string(data[:min(5, len(data))]) != "aaaaa" {
			t.Errorf("%s: its output was aaaaa and is %q", name, data)
		}
	}
}

func TestTimesAreOnlyWhatTimesCanBe(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	now := time.Now()
	at := func(after time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(after)) }
	for _, test := range []struct {
		name                  string
		start, end            *timestamppb.Timestamp
		cpu                   *durationpb.Duration
		hasStart, hasEnd, has bool
	}{
		{"what is true", at(0), at(time.Second), durationpb.New(time.Second), true, true, true},
		{"an end before the start", at(time.Second), at(0), durationpb.New(-time.Second), true, false, false},
		{"the year 1", &timestamppb.Timestamp{Seconds: -62135596800}, &timestamppb.Timestamp{Seconds: -62135596800}, nil, false, false, false},
		{"the year 9999", &timestamppb.Timestamp{Seconds: 253402300799}, at(time.Second), &durationpb.Duration{Seconds: 1 << 62}, false, true, false},
		{"half a year ago", at(-4000 * time.Hour), at(-4000 * time.Hour), nil, false, false, false},
	} {
		job := w.started(sandbox, shell("true"))
		status := finished(job.GetId(), exited(0))
		status.StartTime, status.EndTime, status.CpuTime = test.start, test.end, test.cpu
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{status}}
		done := w.done(job.GetId())
		if (done.GetStartTime() != nil) != test.hasStart || (done.GetEndTime() != nil) != test.hasEnd || (done.GetCpuNanos() > 0) != test.has || done.GetCpuNanos() < 0 {
			t.Errorf("%s: from %v to %v, CPU %d ns", test.name, done.GetStartTime(), done.GetEndTime(), done.GetCpuNanos())
		}
	}
}
