package byzantine

import (
	"cmp"
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
	name  string
	rules []faultproxy.Rule
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

// everywhere applies the same rule wherever a guest says how a job is.
func everywhere(kind faultproxy.Kind, fields map[string]any) []faultproxy.Rule {
	var rules []faultproxy.Rule
	for call, places := range statuses {
		all := map[string]any{}
		for _, place := range places {
			for field, value := range fields {
				all[place+"."+field] = value
			}
		}
		rules = append(rules, faultproxy.Rule{Call: call, Kind: kind, Fields: all})
	}
	return rules
}

// eachCall applies a rule once in the reply to each call.
func eachCall(rule faultproxy.Rule) []faultproxy.Rule {
	var rules []faultproxy.Rule
	for _, call := range []string{"Start", "Run", "Wait", "Read", "Attach", "List", "Stop", "Input", "AppendInput", "Signal", "Forget"} {
		rule.Call, rule.Times = call, 1
		rules = append(rules, rule)
	}
	return rules
}

func set(call string, fields map[string]any) []faultproxy.Rule {
	return []faultproxy.Rule{{Call: call, Kind: faultproxy.Set, Fields: fields}}
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

// about changes what a guest says about jobs.
var about = []row{
	{name: "the id of a job that nobody started", rules: everywhere(faultproxy.Set, fields("job_id", nobodysJob))},
	{name: "no job's id", rules: everywhere(faultproxy.Set, fields("job_id", ""))},
	{name: "an id that is a path", rules: everywhere(faultproxy.Set, fields("job_id", "../../../etc/passwd"))},
	{name: "an id of a megabyte", rules: everywhere(faultproxy.Set, fields("job_id", strings.Repeat("x", 1<<20)))},
	{name: "another boot's id", rules: everywhere(faultproxy.Set, fields("boot_id", "another"))},
	{name: "another generation", rules: everywhere(faultproxy.Set, fields("generation", uint64(math.MaxUint64)))},
	{name: "done, of what has no outcome", rules: everywhere(faultproxy.Set, fields("done", true, "outcome.cause", 0)), outcome: withoutCode},
	{name: "a cause that nobody knows", rules: everywhere(faultproxy.Set, fields("done", true, "outcome.cause", 99, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "a code below zero", rules: everywhere(faultproxy.Set, fields("outcome.exit_code", -1)), outcome: withoutCode},
	{name: "a code above all codes", rules: everywhere(faultproxy.Set, fields("outcome.exit_code", math.MaxInt32)), outcome: withoutCode},
	{name: "lost, with a code", rules: everywhere(faultproxy.Set, fields("outcome.cause", 7, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "killed by a signal, with success", rules: everywhere(faultproxy.Set, fields("outcome.cause", 2, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "never started, with success", rules: everywhere(faultproxy.Set, fields("outcome.cause", 6, "outcome.exit_code", 0)), outcome: withoutCode},
	{name: "a novel for a reason", rules: everywhere(faultproxy.Set, fields("outcome.reason", strings.Repeat("ü", 1<<18))), outcome: func(*berthv1.Outcome) bool { return true }},
	{name: "a hundred thousand survivors", rules: everywhere(faultproxy.Repeat, fields("outcome.survivors", 100_000)), outcome: func(*berthv1.Outcome) bool { return true }},
	{name: "times of the year 1", rules: everywhere(faultproxy.Set, fields("start_time.seconds", -62135596800, "end_time.seconds", -62135596800))},
	{name: "times of the year 9999", rules: everywhere(faultproxy.Set, fields("start_time.seconds", 253402300799, "end_time.seconds", 253402300799))},
	{name: "times that are none", rules: everywhere(faultproxy.Set, fields("start_time.nanos", -5, "end_time.seconds", math.MaxInt64))},
	{name: "an end before the start", rules: everywhere(faultproxy.Add, fields("end_time.seconds", -3600))},
	{name: "a negative CPU time", rules: everywhere(faultproxy.Set, fields("cpu_time.seconds", -1000))},
	{name: "stdin taken beyond its end", rules: everywhere(faultproxy.Set, fields("input_offset", uint64(math.MaxUint64)))},
}

// output changes what a guest says about output.
var output = []row{
	{name: "as much output as there can be", rules: everywhere(faultproxy.Set, both("total_bytes", uint64(math.MaxUint64)))},
	{name: "more output than there is", rules: everywhere(faultproxy.Add, both("total_bytes", 1<<40))},
	{name: "less output than there is", rules: everywhere(faultproxy.Set, both("total_bytes", 2))},
	{name: "output that was kept beyond its end", rules: everywhere(faultproxy.Set, both("kept.*.to", uint64(math.MaxUint64)))},
	{name: "a range that ends before it begins", rules: everywhere(faultproxy.Set, both("kept.*.from", 1<<40))},
	{name: "a hundred thousand ranges", rules: everywhere(faultproxy.Repeat, both("kept", 100_000))},
	{name: "a length at exit beyond all lengths", rules: everywhere(faultproxy.Set, both("end_at_exit", uint64(math.MaxUint64)))},
	{name: "output that is never sealed", rules: everywhere(faultproxy.Set, both("sealed", false))},
	{name: "more bytes than were asked for", rules: set("Read", fields("data", strings.Repeat("x", 2<<20))), anyOutput: true},
	{name: "bytes that never come", rules: set("Read", fields("data", ""))},
	{name: "bytes behind the end", rules: set("Read", fields("stats.total_bytes", 0))},
	{name: "a next byte that lies behind", rules: set("Read", fields("data", "", "next_kept", 0, "stats.total_bytes", 1<<30))},
	{name: "a next byte beyond all bytes", rules: set("Read", fields("data", "", "next_kept", uint64(math.MaxUint64)))},
	{name: "more output than a run asked for", rules: set("Run", fields("stdout.head", strings.Repeat("x", 1<<20), "stdout.tail", strings.Repeat("y", 1<<20))), anyOutput: true},
	{name: "a tail beyond all offsets", rules: set("Run", fields("stdout.tail", truth, "stdout.tail_offset", uint64(math.MaxUint64)))},
	{name: "chunks that leave bytes out", rules: []faultproxy.Rule{{Call: "Attach", Kind: faultproxy.Add, Fields: fields("chunk.offset", 1)}}},
	{name: "chunks that overlap", rules: []faultproxy.Rule{{Call: "Attach", Kind: faultproxy.Add, Fields: fields("chunk.offset", -1)}}},
	{name: "chunks of a stream that is none", rules: set("Attach", fields("chunk.stream", 7))},
	{name: "a chunk of two megabytes", rules: set("Attach", fields("chunk.data", strings.Repeat("x", 2<<20)))},
	{name: "every message twice", rules: []faultproxy.Rule{{Call: "Attach", Kind: faultproxy.Double}}},
	{name: "thanks for input that nobody sent", rules: set("Attach", fields("input_acknowledged", uint64(math.MaxUint64)))},
	{name: "more input appended than there was", rules: set("AppendInput", fields("next_offset", uint64(math.MaxUint64)))},
	{name: "input appended beyond all offsets", rules: set("AppendInput", fields("offset", uint64(math.MaxUint64)))},
	{name: "less input taken than there was", rules: set("Input", fields("next_offset", 0))},
	{name: "more input taken than there was", rules: set("Input", fields("next_offset", uint64(math.MaxUint64)))},
}

// lists lies in lists of jobs, and does so at full speed; or hides what has happened.
var lists = []row{
	{name: "that all goes on, and it is over", rules: everywhere(faultproxy.Set, fields("done", false))},
	{name: "jobs that nobody started", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.Invent, Count: 1000}}},
	{name: "the same jobs ten thousand times", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.Repeat, Fields: fields("statuses", 10_000)}}},
	{name: "an endless list", rules: set("List", fields("more", true))},
	{name: "a cursor that stands", rules: set("List", fields("next_cursor", 0))},
	{name: "a cursor beyond all changes", rules: set("List", fields("next_cursor", uint64(math.MaxUint64)))},
	{name: "a list of another boot", rules: set("List", fields("boot_id", "another")), log: "it answers as boot"},
	{name: "a list that comes at once", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.AtOnce}, {Call: "Wait", Kind: faultproxy.AtOnce}}},
	{name: "a list of 64 MiB", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.Pad, Count: 64 << 20, Times: 5}}, log: "cannot list"},
	{name: "no list at all", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.Silent}}},
	{name: "lists that are refused", rules: []faultproxy.Rule{{Call: "List", Kind: faultproxy.Refuse, Count: int(codes.DataLoss), Text: strings.Repeat("no ", 1<<16)}}, log: "cannot list"},
}

// replies lies in the form of replies, once in each call.
var replies = []row{
	{name: "nonsense", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Nonsense, Count: 3000})},
	{name: "what is no frame", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Frames, Count: 3000})},
	{name: "five megabytes more", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Pad, Count: 5 << 20})},
	{name: "the first reply once more", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Stale})},
	{name: "the reply to another call", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Other, Text: "Hello"})},
	{name: "two replies", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Double})},
	{name: "no reply", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Silent})},
	{name: "half a reply, and no more", rules: eachCall(faultproxy.Rule{Kind: faultproxy.StallMidway})},
	{name: "half a reply, and the end", rules: eachCall(faultproxy.Rule{Kind: faultproxy.CutMidway})},
	{name: "a defect", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Refuse, Count: int(codes.Internal), Text: "oops"})},
	{name: "no such job", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Refuse, Count: int(codes.NotFound), Text: "no"})},
	{name: "not there", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Refuse, Count: int(codes.Unavailable), Text: "gone"})},
	{name: "a code that is none", rules: eachCall(faultproxy.Rule{Kind: faultproxy.Refuse, Count: 4711, Text: "?"})},
}

// anew has a connection broken once, so that the guest says Hello again.
func anew(rule faultproxy.Rule) []faultproxy.Rule {
	rule.Call, rule.Times = cmp.Or(rule.Call, "Hello"), 2
	return []faultproxy.Rule{rule, {Call: "List", Kind: faultproxy.CutMidway, Times: 1}, {Call: "Run", Kind: faultproxy.CutMidway, Times: 1}, {Call: "Wait", Kind: faultproxy.CutMidway, Times: 1}}
}

func hello(pairs ...any) []faultproxy.Rule {
	return anew(faultproxy.Rule{Kind: faultproxy.Set, Fields: fields(pairs...)})
}

// hellos changes what a guest says about who the guest is.
var hellos = []row{
	{name: "another machine", rules: hello("machine_id", "m_another"), log: "it is in machine"},
	{name: "another protocol", rules: hello("protocol", 4711), log: "protocol 4711"},
	{name: "a proof that is none", rules: hello("proof", "trust me"), log: "does not know the machine's token"},
	{name: "no boot", rules: hello("boot_id", ""), log: "boot id"},
	{name: "an endless boot", rules: hello("boot_id", strings.Repeat("x", 1<<20)), log: "more of itself"},
	{name: "another boot", rules: hello("boot_id", "another")},
	{name: "another generation from the start", rules: hello("generation", uint64(math.MaxUint64))},
	{name: "capabilities without end", rules: anew(faultproxy.Rule{Kind: faultproxy.Repeat, Fields: fields("capabilities", 1_000_000)}), log: "cannot reach guest"},
	{name: "a challenge that is none", rules: anew(faultproxy.Rule{Call: "Challenge", Kind: faultproxy.Set, Fields: fields("nonce", "")}), log: "challenge has 0 bytes"},
	{name: "a challenge that never comes", rules: anew(faultproxy.Rule{Call: "Challenge", Kind: faultproxy.Silent})},
	{name: "a hello that never comes", rules: anew(faultproxy.Rule{Kind: faultproxy.Silent})},
	{name: "a hello that is nonsense", rules: anew(faultproxy.Rule{Kind: faultproxy.Nonsense, Count: 100_000})},
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
					w.observe(t, r)
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
	if err != nil || info.GetResidentBytes() > maxBrokerBytes {
		t.Errorf("the broker has %d MiB (%v)", info.GetResidentBytes()>>20, err)
	}
	t.Logf("the broker has %d MiB", info.GetResidentBytes()>>20)
	w.destroy(t, w.honest)
	w.WantNothingLeft(t)
}

// maxBrokerBytes bounds the broker's memory, with the liars in it that make messages of 64 MiB: an eighth of
// what would have to be kept of all lies together.
const maxBrokerBytes = 1 << 30

// observe has one guest lie while its machine is used, then be honest again, and lie while it is destroyed.
func (w *harness) observe(t *testing.T, r row) {
	sandbox := w.create(t)
	h := &observed{harness: w, t: t, row: r, sandbox: sandbox.GetId(), outcomes: map[string]*berthv1.Outcome{}}
	w.setRules(t, sandbox.GetMachineId(), r.rules...)
	job := h.work()
	h.wantOthersServed(t)
	h.wantApplied(t, sandbox.GetMachineId(), r.rules)
	if r.log != "" {
		eventually(t, fmt.Sprintf("the log does not say %q", r.log), func() bool { return saysOf(w.wholeLog(t), sandbox.GetMachineId(), r.log) })
	}
	w.setRules(t, sandbox.GetMachineId())
	if job != "" {
		ctx, cancel := context.WithTimeout(w.ctx, recoverTimeout)
		defer cancel()
		done, err := w.WaitJob(ctx, job)
		if err != nil {
			t.Errorf("its job has no end although its guest is honest again: %v", err)
		}
		h.job(done)
	}
	w.setRules(t, sandbox.GetMachineId(), r.rules...) // what ends for good does so whatever its guest says
	w.destroy(t, sandbox.GetId())
	w.setRules(t, sandbox.GetMachineId())
}

// recoverTimeout is how long a broker may take to hear of a job's end from a guest that has been silent.
const recoverTimeout = 4 * time.Minute

func (w *harness) destroy(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, recoverTimeout)
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
	for i, rule := range []faultproxy.Rule{
		{Call: "Hello", Kind: faultproxy.Silent}, {Call: "Hello", Kind: faultproxy.Nonsense, Count: 1 << 20},
		{Call: "Challenge", Kind: faultproxy.Silent}, {Call: "List", Kind: faultproxy.Silent},
	} {
		w.setRules(t, sandboxes[i].GetMachineId(), rule)
	}
	if err := w.fake.Freeze(sandboxes[4].GetMachineId()); err != nil {
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
		w.setRules(t, sandboxes[i].GetMachineId())
	}
	if err := w.fake.Thaw(sandboxes[4].GetMachineId()); err != nil {
		t.Fatal(err)
	}
	for _, sandbox := range sandboxes {
		w.destroy(t, sandbox.GetId())
	}
}
