package byzantine

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

// row is what a guest lies about.
type row struct {
	name string
	lies []faultproxy.Lie
	// outcome says which outcomes may be given; nil: the true one, and one that says that it is not known.
	outcome func(*berthv1.Outcome) bool
	// anyOutput is set where the guest changes its own output, which nobody else can know.
	anyOutput bool
	// log is what the broker's log says of it; empty: nothing is asked.
	log string
}

// statuses are where a guest says how a job is, by call.
var statuses = map[string][]string{
	"Start": {"status"}, "Run": {"status"}, "Wait": {"status"}, "Stop": {"status"}, "Attach": {"opened", "done"}, "List": {"statuses.*"},
}

// everywhere tells the same lie wherever a guest says how a job is.
func everywhere(kind faultproxy.Kind, fields map[string]any) []faultproxy.Lie {
	var lies []faultproxy.Lie
	for call, places := range statuses {
		all := map[string]any{}
		for _, place := range places {
			for field, value := range fields {
				all[place+"."+field] = value
			}
		}
		lies = append(lies, faultproxy.Lie{Call: call, Kind: kind, Fields: all})
	}
	return lies
}

// eachCall tells a lie once in the reply to each call.
func eachCall(lie faultproxy.Lie) []faultproxy.Lie {
	var lies []faultproxy.Lie
	for _, call := range []string{"Start", "Run", "Wait", "Read", "Attach", "List", "Stop", "Input", "Signal", "Forget"} {
		lie.Call, lie.Times = call, 1
		lies = append(lies, lie)
	}
	return lies
}

func set(call string, fields map[string]any) []faultproxy.Lie {
	return []faultproxy.Lie{{Call: call, Kind: faultproxy.Set, Fields: fields}}
}

func fields(pairs ...any) map[string]any {
	all := map[string]any{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i].(string)] = pairs[i+1]
	}
	return all
}

func both(field string, value any) map[string]any {
	return map[string]any{"stdout." + field: value, "stderr." + field: value}
}

func withoutCode(outcome *berthv1.Outcome) bool { return outcome.Exit == nil }

const nobodysJob = "job_00000000000000000000000000"

// about lies about jobs.
var about = []row{
	{name: "the id of a job that nobody started", lies: everywhere(faultproxy.Set, fields("job_id", nobodysJob))},
	{name: "no job's id", lies: everywhere(faultproxy.Set, fields("job_id", ""))},
	{name: "an id that is a path", lies: everywhere(faultproxy.Set, fields("job_id", "../../../etc/passwd"))},
	{name: "an id of a megabyte", lies: everywhere(faultproxy.Set, fields("job_id", strings.Repeat("x", 1<<20)))},
	{name: "another boot's id", lies: everywhere(faultproxy.Set, fields("boot_id", "another"))},
	{name: "another generation", lies: everywhere(faultproxy.Set, fields("generation", uint64(math.MaxUint64)))},
	{name: "done, of what has no outcome", lies: everywhere(faultproxy.Set, fields("done", true, "outcome.cause", 0)), outcome: withoutCode},
	{name: "a cause that nobody knows", lies: everywhere(faultproxy.Set, fields("done", true, "outcome.cause", 99, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "a code below zero", lies: everywhere(faultproxy.Set, fields("outcome.exit_code", -1)), outcome: withoutCode},
	{name: "a code above all codes", lies: everywhere(faultproxy.Set, fields("outcome.exit_code", math.MaxInt32)), outcome: withoutCode},
	{name: "lost, with a code", lies: everywhere(faultproxy.Set, fields("outcome.cause", 7, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "killed by a signal, with success", lies: everywhere(faultproxy.Set, fields("outcome.cause", 2, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "never started, with success", lies: everywhere(faultproxy.Set, fields("outcome.cause", 6, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "a novel for a reason", lies: everywhere(faultproxy.Set, fields("outcome.reason", strings.Repeat("ü", 1<<18))), outcome: func(*berthv1.Outcome) bool { return true }},
	{name: "a hundred thousand survivors", lies: everywhere(faultproxy.Repeat, fields("outcome.survivors", 100_000)), outcome: func(*berthv1.Outcome) bool { return true }},
	{name: "times of the year 1", lies: everywhere(faultproxy.Set, fields("start_time.seconds", -62135596800, "end_time.seconds", -62135596800))},
	{name: "times of the year 9999", lies: everywhere(faultproxy.Set, fields("start_time.seconds", 253402300799, "end_time.seconds", 253402300799))},
	{name: "times that are none", lies: everywhere(faultproxy.Set, fields("start_time.nanos", -5, "end_time.seconds", math.MaxInt64))},
	{name: "an end before the start", lies: everywhere(faultproxy.Add, fields("end_time.seconds", -3600))},
	{name: "a negative CPU time", lies: everywhere(faultproxy.Set, fields("cpu_time.seconds", -1000))},
	{name: "stdin taken beyond its end", lies: everywhere(faultproxy.Set, fields("input_offset", uint64(math.MaxUint64)))},
}

// output lies about output.
var output = []row{
	{name: "as much output as there can be", lies: everywhere(faultproxy.Set, both("total_bytes", uint64(math.MaxUint64)))},
	{name: "more output than there is", lies: everywhere(faultproxy.Add, both("total_bytes", 1<<40))},
	{name: "less output than there is", lies: everywhere(faultproxy.Set, both("total_bytes", 2))},
	{name: "output that was kept beyond its end", lies: everywhere(faultproxy.Set, both("kept.*.to", uint64(math.MaxUint64)))},
	{name: "a range that ends before it begins", lies: everywhere(faultproxy.Set, both("kept.*.from", 1<<40))},
	{name: "a hundred thousand ranges", lies: everywhere(faultproxy.Repeat, both("kept", 100_000))},
	{name: "a length at exit beyond all lengths", lies: everywhere(faultproxy.Set, both("end_at_exit", uint64(math.MaxUint64)))},
	{name: "output that is never sealed", lies: everywhere(faultproxy.Set, both("sealed", false))},
	{name: "more bytes than were asked for", lies: set("Read", fields("data", strings.Repeat("x", 2<<20))), anyOutput: true},
	{name: "bytes that never come", lies: set("Read", fields("data", ""))},
	{name: "bytes behind the end", lies: set("Read", fields("stats.total_bytes", 0))},
	{name: "a next byte that lies behind", lies: set("Read", fields("data", "", "next_kept", 0, "stats.total_bytes", 1<<30))},
	{name: "a next byte beyond all bytes", lies: set("Read", fields("data", "", "next_kept", uint64(math.MaxUint64)))},
	{name: "more output than a run asked for", lies: set("Run", fields("stdout.head", strings.Repeat("x", 1<<20), "stdout.tail", strings.Repeat("y", 1<<20))), anyOutput: true},
	{name: "a tail beyond all offsets", lies: set("Run", fields("stdout.tail", truth, "stdout.tail_offset", uint64(math.MaxUint64)))},
	{name: "chunks that leave bytes out", lies: []faultproxy.Lie{{Call: "Attach", Kind: faultproxy.Add, Fields: fields("chunk.offset", 1)}}},
	{name: "chunks that overlap", lies: []faultproxy.Lie{{Call: "Attach", Kind: faultproxy.Add, Fields: fields("chunk.offset", -1)}}},
	{name: "chunks of a stream that is none", lies: set("Attach", fields("chunk.stream", 7))},
	{name: "a chunk of two megabytes", lies: set("Attach", fields("chunk.data", strings.Repeat("x", 2<<20)))},
	{name: "every message twice", lies: []faultproxy.Lie{{Call: "Attach", Kind: faultproxy.Double}}},
	{name: "thanks for input that nobody sent", lies: set("Attach", fields("input_acknowledged", uint64(math.MaxUint64)))},
	{name: "less input taken than there was", lies: set("Input", fields("next_offset", 0))},
	{name: "more input taken than there was", lies: set("Input", fields("next_offset", uint64(math.MaxUint64)))},
}

// lists lies in lists of jobs, and does so at full speed; or hides what has happened.
var lists = []row{
	{name: "that all goes on, and it is over", lies: everywhere(faultproxy.Set, fields("done", false))},
	{name: "jobs that nobody started", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.Invent, Count: 1000}}},
	{name: "the same jobs ten thousand times", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.Repeat, Fields: fields("statuses", 10_000)}}},
	{name: "an endless list", lies: set("List", fields("more", true))},
	{name: "a cursor that stands", lies: set("List", fields("next_cursor", 0))},
	{name: "a cursor beyond all changes", lies: set("List", fields("next_cursor", uint64(math.MaxUint64)))},
	{name: "a list of another boot", lies: set("List", fields("boot_id", "another")), log: "it answers as boot"},
	{name: "a list that comes at once", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.AtOnce}, {Call: "Wait", Kind: faultproxy.AtOnce}}},
	{name: "a list of 64 MiB", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.Pad, Count: 64 << 20, Times: 5}}, log: "cannot list"},
	{name: "no list at all", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.Silent}}},
	{name: "lists that are refused", lies: []faultproxy.Lie{{Call: "List", Kind: faultproxy.Refuse, Count: int(codes.DataLoss), Text: strings.Repeat("no ", 1<<16)}}, log: "cannot list"},
}

// replies lies in the form of replies, once in each call.
var replies = []row{
	{name: "nonsense", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Nonsense, Count: 3000})},
	{name: "what is no frame", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Frames, Count: 3000})},
	{name: "five megabytes more", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Pad, Count: 5 << 20})},
	{name: "the first reply once more", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Stale})},
	{name: "the reply to another call", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Other, Text: "Hello"})},
	{name: "two replies", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Double})},
	{name: "no reply", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Silent})},
	{name: "half a reply, and no more", lies: eachCall(faultproxy.Lie{Kind: faultproxy.StallMidway})},
	{name: "half a reply, and the end", lies: eachCall(faultproxy.Lie{Kind: faultproxy.CutMidway})},
	{name: "a defect", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Refuse, Count: int(codes.Internal), Text: "oops"})},
	{name: "no such job", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Refuse, Count: int(codes.NotFound), Text: "no"})},
	{name: "not there", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Refuse, Count: int(codes.Unavailable), Text: "gone"})},
	{name: "a code that is none", lies: eachCall(faultproxy.Lie{Kind: faultproxy.Refuse, Count: 4711, Text: "?"})},
}

// anew has a connection broken once, so that the guest says Hello again.
func anew(lie faultproxy.Lie) []faultproxy.Lie {
	lie.Call, lie.Times = "Hello", 2
	return []faultproxy.Lie{lie, {Call: "List", Kind: faultproxy.CutMidway, Times: 1}, {Call: "Run", Kind: faultproxy.CutMidway, Times: 1}, {Call: "Wait", Kind: faultproxy.CutMidway, Times: 1}}
}

func hello(pairs ...any) []faultproxy.Lie {
	return anew(faultproxy.Lie{Kind: faultproxy.Set, Fields: fields(pairs...)})
}

// hellos lies about who the guest is.
var hellos = []row{
	{name: "another machine", lies: hello("machine_id", "m_another"), log: "it is in machine"},
	{name: "another protocol", lies: hello("protocol", 4711), log: "protocol 4711"},
	{name: "a proof that is none", lies: hello("proof", "trust me"), log: "does not know the machine's token"},
	{name: "no boot", lies: hello("boot_id", ""), log: "boot id"},
	{name: "an endless boot", lies: hello("boot_id", strings.Repeat("x", 1<<20)), log: "more of itself"},
	{name: "another boot", lies: hello("boot_id", "another")},
	{name: "another generation from the start", lies: hello("generation", uint64(math.MaxUint64))},
	{name: "capabilities without end", lies: anew(faultproxy.Lie{Kind: faultproxy.Repeat, Fields: fields("capabilities", 1_000_000)}), log: "cannot reach guest"},
	{name: "a hello that never comes", lies: anew(faultproxy.Lie{Kind: faultproxy.Silent})},
	{name: "a hello that is nonsense", lies: anew(faultproxy.Lie{Kind: faultproxy.Nonsense, Count: 100_000})},
}

// slow are the groups in which much is waited for in vain.
var slow = map[string]bool{"lists": true, "replies": true, "hellos": true}

func TestWhateverAGuestSaysTheBrokerGoesOnAndMakesNothingUp(t *testing.T) {
	w := start(t)
	for group, rows := range map[string][]row{"about": about, "output": output, "lists": lists, "replies": replies, "hellos": hellos} {
		t.Run(group, func(t *testing.T) {
			if slow[group] {
				testenv.Asked(t, "byzantine")
			}
			for _, r := range rows {
				t.Run(r.name, func(t *testing.T) {
					t.Parallel()
					w.hear(t, r)
				})
			}
		})
	}
	w.wantOthersServed(t)
	select {
	case <-w.Exited():
		t.Fatalf("the broker exited with %d", w.ExitCode())
	default:
	}
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil || info.GetResidentBytes() > memoryMost {
		t.Errorf("the broker has %d MiB (%v)", info.GetResidentBytes()>>20, err)
	}
	t.Logf("the broker has %d MiB", info.GetResidentBytes()>>20)
	w.destroy(t, w.honest)
	w.WantNothingLeft(t)
}

// memoryMost bounds the broker's memory, with the liars in it that make messages of 64 MiB: an eighth of
// what would have to be kept of all lies together.
const memoryMost = 1 << 30

// hear has one machine lie while it is used, then be honest again, and lie while it is destroyed.
func (w *world) hear(t *testing.T, r row) {
	sandbox := w.create(t)
	h := &heard{world: w, t: t, row: r, sandbox: sandbox.GetId(), outcomes: map[string]*berthv1.Outcome{}}
	w.lie(t, sandbox.GetMachineId(), r.lies...)
	job := h.work()
	h.wantOthersServed(t)
	h.wantTold(t, sandbox.GetMachineId(), r.lies)
	if r.log != "" {
		eventually(t, fmt.Sprintf("the log does not say %q", r.log), func() bool { return saysOf(w.wholeLog(t), sandbox.GetMachineId(), r.log) })
	}
	w.lie(t, sandbox.GetMachineId())
	if job != "" {
		ctx, cancel := context.WithTimeout(w.ctx, settleMost)
		defer cancel()
		done, err := w.WaitJob(ctx, job)
		if err != nil {
			t.Errorf("its job is not settled although its guest is honest again: %v", err)
		}
		h.job(done)
	}
	w.lie(t, sandbox.GetMachineId(), r.lies...) // what ends for good does so whatever its guest says
	w.destroy(t, sandbox.GetId())
	w.lie(t, sandbox.GetMachineId())
}

// settleMost is how long a broker may take to hear of a job's end from a guest that has been silent.
const settleMost = 4 * time.Minute

func (w *world) destroy(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, settleMost)
	defer cancel()
	reply, err := w.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	if err != nil || reply.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		t.Errorf("destroy sandbox %s: %v (%v)", id, reply, err)
	}
}

func saysOf(log, machine, words string) bool {
	for line := range strings.Lines(log) {
		if strings.Contains(line, machine) && strings.Contains(line, words) {
			return true
		}
	}
	return false
}

func TestMachinesWhoseGuestsSayNoHelloHoldUpNoOthersAtBoot(t *testing.T) {
	testenv.Asked(t, "byzantine")
	w := start(t)
	const machines = 100
	sandboxes := make([]*berthv1.Sandbox, machines)
	var group errgroup.Group
	group.SetLimit(8)
	for i := range sandboxes {
		group.Go(func() error {
			made, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{})
			sandboxes[i] = made.GetSandbox()
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for i, lie := range []faultproxy.Lie{
		{Call: "Hello", Kind: faultproxy.Silent}, {Call: "Hello", Kind: faultproxy.Nonsense, Count: 1 << 20},
		{Call: "Hello", Kind: faultproxy.CutMidway}, {Call: "List", Kind: faultproxy.Silent},
	} {
		w.lie(t, sandboxes[i].GetMachineId(), lie)
	}
	if err := w.fake.Mute(sandboxes[4].GetMachineId()); err != nil {
		t.Fatal(err)
	}
	w.Kill(t)
	w.Start(t)
	began := time.Now()
	var others errgroup.Group
	for _, sandbox := range sandboxes[5:] {
		others.Go(func() error {
			ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox.GetId(), Spec: &berthv1.JobSpec{Shell: script}})
			if err == nil && ran.GetJob().GetOutcome().GetExitCode() != trueCode {
				err = fmt.Errorf("it ended as %v", ran.GetJob().GetOutcome())
			}
			return err
		})
	}
	if err := others.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("%d other machines were served %s after the start", machines-5, time.Since(began))
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil || info.GetRecoveringMachines() == 0 {
		t.Errorf("no machine is recovering (%v), so nobody was served meanwhile", err)
	}
	for i := range 5 {
		w.lie(t, sandboxes[i].GetMachineId())
	}
	if err := w.fake.Wake(sandboxes[4].GetMachineId()); err != nil {
		t.Fatal(err)
	}
	for _, sandbox := range sandboxes {
		w.destroy(t, sandbox.GetId())
	}
}
