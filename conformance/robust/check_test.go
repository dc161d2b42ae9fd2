package robust

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// good is a history in which a job does what it is to do.
func good() []Event {
	plan := &Plan{Token: "t1", Work: WorkLines, Code: 7, Lines: 2}
	running := Job{ID: "job_1", Sandbox: "sb_1", Machine: "m_1", Generation: 1, Token: "t1", State: "RUNNING", Kept: true}
	done := running
	done.State, done.Cause, done.Code = "DONE", "EXITED", code(7)
	return []Event{
		{Kind: KindCall, Client: 1, Begin: 10, End: 20, Op: "CreateSandbox", RequestID: "r1", Body: "a", Result: ResultOK, ID: "sb_1", Sandbox: "sb_1", Machine: "m_1", State: "RUNNING"},
		{Kind: KindCall, Client: 1, Begin: 30, End: 40, Op: "StartJob", RequestID: "r2", Body: "t1", Token: "t1", Plan: plan, Result: ResultOK, ID: "job_1", Jobs: []Job{running}},
		{Kind: KindCall, Client: 2, Begin: 35, End: 45, Op: "StartJob", RequestID: "r2", Body: "t2", Token: "t2", Plan: &Plan{Token: "t2", Work: WorkLines}, Result: "REQUEST_ID_REUSED"},
		{Kind: KindKill, Begin: 50, End: 60},
		{Kind: KindCall, Client: 2, Begin: 70, End: 80, Op: "FollowJob", Result: ResultOK, ID: "job_1", Jobs: []Job{done}, Chunks: []Chunk{chunk(plan, 0, 5), chunk(plan, 5, 10)}},
		{Kind: KindCall, Begin: 90, End: 95, Op: "PollJob", Result: ResultOK, ID: "job_1", Jobs: []Job{done}},
		{Kind: KindCall, Begin: 96, End: 97, Op: "ReadAllOutput", Result: ResultOK, ID: "job_1", Whole: true, Chunks: []Chunk{
			chunk(plan, 0, 10), {Stderr: true, Bytes: 8, Sum: Sum([]byte("e 0\ne 1\n"))},
		}},
		{Kind: KindCall, Begin: 100, End: 110, Op: "DestroySandbox", Result: ResultOK, ID: "sb_1", Sandbox: "sb_1", Machine: "m_1", State: "DESTROYED"},
		{Kind: KindCall, Begin: 120, End: 130, Op: "GetSandbox", Result: ResultOK, Sandbox: "sb_1", Machine: "m_1", State: "DESTROYED"},
		{Kind: KindStarts, Token: "t1", Count: 1},
		{Kind: KindStarts, Token: "t2", Count: 0},
	}
}

// Places in it.
const (
	created = iota
	started
	reused
	killed
	followed
	polled
	whole
	destroyed
	got
	counted
	countedOther
)

func code(n int32) *int32 { return &n }

func chunk(plan *Plan, from, to uint64) Chunk {
	return Chunk{Offset: from, Bytes: to - from, Sum: Sum(plan.Stdout()[from:to])}
}

func TestAGoodHistoryHasNoProblem(t *testing.T) {
	report := Check(good())
	if len(report.Problems) > 0 {
		t.Errorf("problems in a good history: %v", report.Problems)
	}
	for _, what := range []string{"jobs", "outcomes", "outcomes told again", "chunks of output", "whole outputs", "starts of a command", "orders of calls"} {
		if report.Checks[what] == 0 {
			t.Errorf("it was not checked for %s", what)
		}
	}
}

func TestEveryBrokenPromiseIsFound(t *testing.T) {
	lost := func(h []Event) {
		for _, at := range []int{followed, polled} {
			h[at].Jobs[0].Cause, h[at].Jobs[0].Code, h[at].Jobs[0].Reason = "LOST", nil, "guest_restarted: so"
		}
		h[whole].Whole = false
	}
	ended := func(cause, reason string) func([]Event) {
		return func(h []Event) {
			for _, at := range []int{followed, polled} {
				h[at].Jobs[0].Cause, h[at].Jobs[0].Reason = cause, reason
			}
		}
	}
	for _, test := range []struct {
		name string
		harm func([]Event)
		more []Event
		want string // in a problem
	}{
		{"a command that begins twice", func(h []Event) { h[counted].Count = 2 }, nil, "began 2 times"},
		{"an exit of a command that never began", func(h []Event) { h[counted].Count = 0 }, nil, "began 0 times"},
		{"two jobs for one request", nil, []Event{{
			Kind: KindCall, Begin: 46, End: 47, Op: "StartJob", RequestID: "r2", Body: "t1", Token: "t1", Result: ResultOK, ID: "job_2",
			Jobs: []Job{{ID: "job_2", Token: "t1", State: "RUNNING"}},
		}}, "has two jobs"},
		{"two sandboxes for one request", nil, []Event{{
			Kind: KindCall, Begin: 46, End: 47, Op: "CreateSandbox", RequestID: "r1", Body: "a", Result: ResultOK, ID: "sb_2", Sandbox: "sb_2", State: "RUNNING",
		}}, "no order of its calls"},
		{"another body that is taken", func(h []Event) { h[reused].Result, h[reused].ID = ResultOK, "job_1" }, nil, "no order of its calls"},
		{"the same body that is refused", nil, []Event{{
			Kind: KindCall, Begin: 46, End: 47, Op: "CreateSandbox", RequestID: "r1", Body: "a", Result: "REQUEST_ID_REUSED",
		}}, "no order of its calls"},
		{"a job that is forgotten", nil, []Event{{
			Kind: KindCall, Begin: 85, End: 86, Op: "PollJob", Result: "JOB_NOT_FOUND", ID: "job_1",
		}}, "is forgotten"},
		{"a job without an end", func(h []Event) { h[polled].Jobs = nil }, nil, "no outcome when all is quiet"},
		{"an outcome that changes", func(h []Event) { h[polled].Jobs[0].Code = code(8) }, nil, "and later as"},
		{"a code that is made up", func(h []Event) { h[followed].Jobs[0].Code, h[polled].Jobs[0].Code = code(0), code(0) }, nil, "it exits with 7"},
		{"a job that is lost for no reason", lost, nil, "nothing was done to its machine"},
		{"a job that is lost by what its guest outlived", lost, []Event{
			{Kind: KindDisturb, Op: "freeze", Machine: "m_1", Begin: -9e9, End: -8e9},
		}, "nothing was done to its machine"},
		{"a lost job with a code", func(h []Event) { lost(h); h[followed].Jobs[0].Code, h[polled].Jobs[0].Code = code(0), code(0) }, []Event{
			{Kind: KindDisturb, Op: "kill", Machine: "m_1", Begin: 50, End: 51},
		}, "has no code"},
		{"a stop that nobody asked for", func(h []Event) {
			ended("STOPPED", "stop_requested")(h)
			h[destroyed].Op, h[got].State = "GetSandbox", "DESTROYED"
		}, nil, "nobody asked for that"},
		{"an end of what runs for ever until it is signalled", func(h []Event) { h[started].Plan.Work = WorkEndless }, []Event{
			{Kind: KindCall, Begin: 46, End: 47, Op: "StopJob", Result: ResultOK, ID: "job_1"},
		}, "does not end by itself"},
		{"a signal that nobody sent", ended("SIGNALED", ""), nil, "nobody sent signal"},
		{"a timeout that nobody set", ended("TIMED_OUT", ""), nil, "no timeout"},
		{"a start that fails for no reason", ended("FAILED_TO_START", "not_found"), nil, "can be started"},
		{"a byte that changes", func(h []Event) { h[followed].Chunks[1].Sum++ }, nil, "are not those that the command writes"},
		{"a byte that comes twice", func(h []Event) { h[followed].Chunks = append(h[followed].Chunks, h[followed].Chunks[1]) }, nil, "went on at offset 5 after 10"},
		{"a byte that is left out", func(h []Event) { h[followed].Chunks[0].Bytes, h[followed].Chunks[0].Sum = 4, Sum([]byte("t1 0")) }, nil, "went on at offset 5 after 4"},
		{"bytes that nobody wrote", func(h []Event) { h[followed].Chunks[1].Bytes = 11 }, nil, "and the command writes 10"},
		{"an output that is cut short", func(h []Event) { h[whole].Chunks = h[whole].Chunks[:1] }, nil, "has 0 bytes of stderr, want 8"},
		{"bytes that are dropped", func(h []Event) { h[followed].Chunks[1].Gap = true }, nil, "said to be dropped"},
		{"bytes that are dropped although their machine is there", func(h []Event) { h[followed].Op, h[followed].Chunks[1].Gap = "Exec", true }, nil, "said to be dropped"},
		{"an attached output without its gaps", func(h []Event) {
			h[followed].Op, h[followed].Whole, h[followed].Chunks = "Exec", true, []Chunk{chunk(h[started].Plan, 0, 5)}
		}, []Event{
			{Kind: KindCall, Begin: 65, End: 66, Op: "DestroySandbox", Result: ResultUnknown, Sandbox: "sb_1"},
		}, "has 5 bytes of stdout, want 10"},
		{"bytes at an offset beyond all numbers", func(h []Event) { h[followed].Chunks[1].Offset = math.MaxUint64 - 2 }, nil, "beyond all numbers"},
		{"input that nobody sent and that is taken", nil, []Event{
			{Kind: KindCall, Begin: 46, End: 47, Op: "WriteJobInput", Result: ResultOK, ID: "job_1", Sent: 5, Taken: 6},
		}, "has taken 6 bytes of input, and 5 were sent"},
		{"a destroyed sandbox that comes back", func(h []Event) { h[got].State = "RUNNING" }, nil, "the end of sandbox"},
		{"a sandbox that is destroyed by nobody", func(h []Event) { h[destroyed].Op, h[destroyed].State = "GetSandbox", "RUNNING" }, nil, "the end of sandbox"},
		{"a sandbox that is lost for no reason", nil, []Event{
			{Kind: KindCall, Begin: 85, End: 86, Op: "GetSandbox", Result: ResultOK, Sandbox: "sb_1", Machine: "m_1", State: "LOST"},
		}, "that explains it"},
		{"a defect that the broker names", nil, []Event{{Kind: KindCall, Op: "GetInfo", Result: "INTERNAL", Error: "so"}}, "defect of the broker"},
		{"what was seen at once", nil, []Event{{Kind: KindProblem, Op: "rest", Error: "left behind"}}, "left behind"},
	} {
		t.Run(test.name, func(t *testing.T) {
			history := good()
			if test.harm != nil {
				test.harm(history)
			}
			report := Check(append(history, test.more...))
			if !strings.Contains(strings.Join(report.Problems, "\n"), test.want) {
				t.Errorf("found %q, want something with %q", report.Problems, test.want)
			}
		})
	}
}

func TestWhatIsExplainedIsNoProblem(t *testing.T) {
	for _, test := range []struct {
		name string
		harm func([]Event)
		more []Event
	}{
		{"a job that is lost with its guest", func(h []Event) {
			for _, at := range []int{followed, polled} {
				h[at].Jobs[0].Cause, h[at].Jobs[0].Code = "LOST", nil
			}
		}, []Event{{Kind: KindDisturb, Op: "kill", Machine: "m_1", Begin: 25, End: 26}}},
		{"a call that was not answered and was taken", func(h []Event) { h[started].Result = ResultUnknown }, []Event{{
			Kind: KindCall, Begin: 46, End: 47, Op: "StartJob", RequestID: "r2", Body: "t1", Token: "t1", Result: ResultOK, ID: "job_1",
		}}},
		{"a destroy that was not answered", func(h []Event) { h[destroyed].Result, h[destroyed].State = ResultUnknown, "" }, nil},
		{"a destroy that is under way", func(h []Event) { h[got].Begin, h[got].End, h[got].State = 105, 106, "DESTROYING" }, nil},
		{"an attached output whose last bytes went with the sandbox", func(h []Event) {
			h[followed].Op, h[followed].Whole = "Exec", true
			h[followed].Chunks[1] = Chunk{Offset: 5, Bytes: 5, Gap: true}
			h[followed].Chunks = append(h[followed].Chunks, Chunk{Stderr: true, Bytes: 8, Gap: true})
		}, []Event{{Kind: KindCall, Begin: 65, End: 66, Op: "DestroySandbox", Result: ResultUnknown, Sandbox: "sb_1"}}},
		{"input that is sent again", func([]Event) {}, []Event{
			{Kind: KindCall, Begin: 46, End: 47, Op: "WriteJobInput", Result: ResultOK, ID: "job_1", Sent: 6, Taken: 6},
			{Kind: KindCall, Begin: 47, End: 48, Op: "WriteJobInput", Result: ResultOK, ID: "job_1", Sent: 3, Taken: 6},
		}},
		{"an attached command that its dead guest alone knew", func(h []Event) {
			h[started].Op, h[started].RequestID, h[reused].RequestID = "RunCommand", "", ""
			h[polled].Jobs = nil
		}, []Event{
			{Kind: KindDisturb, Op: "kill", Machine: "m_1", Begin: 82, End: 83},
			{Kind: KindCall, Begin: 85, End: 86, Op: "PollJob", Result: "JOB_NOT_FOUND", ID: "job_1"},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			history := good()
			test.harm(history)
			if report := Check(append(history, test.more...)); len(report.Problems) > 0 {
				t.Errorf("problems: %q", report.Problems)
			}
		})
	}
}

func TestAHistoryIsReadAsItWasWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl")
	history, err := NewHistory(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range good() {
		history.Add(e)
	}
	if err := history.Close(); err != nil {
		t.Fatal(err)
	}
	read, err := ReadHistory(path)
	if err != nil || !reflect.DeepEqual(read, history.Events()) {
		t.Errorf("read %v (%v), want %v", read, err, history.Events())
	}
}

func TestOneSeedMakesOnePlan(t *testing.T) {
	works := []Work{WorkLines, WorkBulk, WorkEndless, WorkCat, WorkGiven, WorkChild}
	for seed := range uint64(50) {
		draw := func(seed uint64) Plan { return NewPlan(rand.New(rand.NewPCG(seed, 1)), "t", works...) }
		if a, b := draw(seed), draw(seed); a != b || a.Script("c") != b.Script("c") {
			t.Errorf("seed %d makes %v and %v", seed, a, b)
		}
	}
}

func FuzzACheckSurvivesAnyAnswer(f *testing.F) {
	f.Add("DONE", "EXITED", int32(7), uint32(0), uint64(5), uint64(5), uint64(0), false, ResultOK)
	f.Add("", "", int32(-1), uint32(math.MaxUint32), uint64(math.MaxUint64), uint64(math.MaxUint64), uint64(math.MaxUint64), true, "INTERNAL")
	f.Fuzz(func(t *testing.T, state, cause string, code int32, signal uint32, offset, bytes, taken uint64, gap bool, result string) {
		history := good()
		for _, at := range []int{followed, polled} {
			job := &history[at].Jobs[0]
			job.State, job.Cause, job.Code, job.Signal = state, cause, &code, signal
		}
		history[followed].Chunks[1] = Chunk{Offset: offset, Bytes: bytes, Gap: gap}
		history[whole].Chunks[0].Bytes = bytes
		history[got].Result, history[got].State = result, state
		history = append(history, Event{Kind: KindCall, Begin: 46, End: 47, Op: "WriteJobInput", Result: result, ID: "job_1", Sent: offset, Taken: taken})
		Check(history)
	})
}
