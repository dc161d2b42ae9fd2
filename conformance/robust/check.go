package robust

import (
	"fmt"
	"slices"
	"time"
)

// clockSlack is how far the broker's log, whose times are wall clock in milliseconds, and the history
// may disagree about when a fault struck.
const clockSlack = int64(3 * time.Second)

// startDeadline is the API's default: a job that was reserved longer ago may be given up as expired.
const startDeadline = int64(time.Minute)

// Report is what a check of a history found.
type Report struct {
	Problems []string       // what must not be; none in a good run
	Checks   map[string]int // how often each thing was checked
}

// Check checks a whole history: see README.md for what must hold.
func Check(events []Event) Report {
	c := &checker{
		plans: map[string]*Plan{}, starts: map[string]int{}, asked: map[string]int64{}, recorded: map[string]bool{}, jobs: map[string]*jobView{}, byToken: map[string]string{},
		destroyed: map[string]int64{}, disturbed: map[string][]Event{}, writes: map[string][]Event{}, alive: map[boot]int64{}, report: Report{Checks: map[string]int{}},
	}
	for i := range events {
		c.gather(&events[i])
	}
	c.gatherAlive()
	for i := range events {
		c.checkEvent(&events[i])
	}
	for _, id := range sorted(c.jobs) {
		c.checkJob(c.jobs[id])
	}
	for token, n := range c.starts {
		c.count("starts of a command")
		if n > 1 {
			c.wrong("the command %s began %d times", token, n)
		}
	}
	problems, checked := linear(events)
	c.report.Checks["orders of calls"] = checked
	c.report.Problems = append(c.report.Problems, problems...)
	return c.report
}

type checker struct {
	plans     map[string]*Plan // by token
	starts    map[string]int   // by token
	asked     map[string]int64 // when a command was first asked for, by token
	recorded  map[string]bool  // tokens whose command is written down before it begins: detached, or with a request id
	jobs      map[string]*jobView
	byToken   map[string]string // a job's id
	destroyed map[string]int64  // sandboxes that somebody asked to destroy, since when
	disturbed map[string][]Event
	writes    map[string][]Event // of input, by job
	alive     map[boot]int64     // when a boot's guest was certainly alive, for the last time
	report    Report
}

// boot is one life of a machine's guest.
type boot struct {
	machine    string
	generation uint64
}

// jobView is what a history tells of one job.
type jobView struct {
	first        Job // as it was first shown
	begin        int64
	acknowledged int64 // the end of the first reply that named it
	finalized    bool  // shown as DONE when everything was quiet
	seen         *Job  // with its outcome, as first told
	seenAt       int64
	unkept       bool // its receipt keeps no output
	stopped      bool // somebody asked to stop it
	signals      []uint32
	changed      string
	// lostLater is when an attached command without a request id was told as lost after it had been
	// told with an outcome: its record is written behind its answer, and when the broker dies before
	// that, only the guest has it.
	lostLater int64
}

func (c *checker) wrong(format string, args ...any) {
	c.report.Problems = append(c.report.Problems, fmt.Sprintf(format, args...))
}

func (c *checker) count(what string) { c.report.Checks[what]++ }

func (c *checker) gather(e *Event) {
	switch e.Kind {
	case KindProblem:
		c.wrong("%s: %s", e.Op, e.Error)
	case KindStarts:
		c.starts[e.Token] = e.Count
	case KindDisturb:
		c.disturbed[e.Machine] = append(c.disturbed[e.Machine], *e)
	case KindCall:
		c.gatherCall(e)
	}
}

func (c *checker) gatherCall(e *Event) {
	if e.Plan != nil {
		c.plans[e.Plan.Token] = e.Plan
		c.recorded[e.Plan.Token] = e.RequestID != "" || e.Op == "StartJob"
		if first, known := c.asked[e.Plan.Token]; !known || e.Begin < first {
			c.asked[e.Plan.Token] = e.Begin
		}
	}
	if e.Op == "DestroySandbox" {
		if first, known := c.destroyed[e.Sandbox]; !known || e.Begin < first {
			c.destroyed[e.Sandbox] = e.Begin
		}
	}
	for i := range e.Jobs {
		c.gatherJob(e, &e.Jobs[i])
	}
	if e.Op == "WriteJobInput" {
		c.writes[e.ID] = append(c.writes[e.ID], *e)
	}
	if e.Op == "StopJob" || e.Op == "SignalJob" {
		if view := c.jobs[e.ID]; view != nil {
			view.stopped = view.stopped || e.Op == "StopJob"
			if e.Op == "SignalJob" {
				view.signals = append(view.signals, uint32(e.Count))
			}
		}
	}
}

func (c *checker) gatherJob(e *Event, job *Job) {
	view := c.jobs[job.ID]
	if view == nil {
		view = &jobView{first: *job, begin: e.Begin, acknowledged: e.End}
		c.jobs[job.ID] = view
	}
	view.begin, view.acknowledged = min(view.begin, e.Begin), min(view.acknowledged, e.End)
	if token := firstOf(job.Token, e.Token); token != "" {
		view.first.Token = token
		if other, known := c.byToken[token]; known && other != job.ID {
			c.wrong("the command %s has two jobs, %s and %s", token, other, job.ID)
		}
		c.byToken[token] = job.ID
	}
	view.finalized = view.finalized || e.Client == 0 && job.State == "DONE"
	view.unkept = view.unkept || !job.Kept
	if job.Cause == "" {
		return
	}
	if view.seen == nil {
		view.seen, view.seenAt = job, e.End
		return
	}
	c.count("outcomes told again")
	view.seenAt = min(view.seenAt, e.End)
	if job.Cause == "LOST" && c.attached(view) && view.seen.Cause != "LOST" {
		view.lostLater = e.End
		return
	}
	if !sameOutcome(view.seen, job) && view.changed == "" {
		view.changed = fmt.Sprintf("job %s (%s) ended as %s, and later as %s", job.ID, view.first.Token, outcome(view.seen), outcome(job))
	}
}

func sameOutcome(a, b *Job) bool {
	return a.Cause == b.Cause && (a.Code == nil) == (b.Code == nil) && (a.Code == nil || *a.Code == *b.Code) && a.Signal == b.Signal
}

func outcome(j *Job) string {
	code := "no code"
	if j.Code != nil {
		code = fmt.Sprint("code ", *j.Code)
	}
	return fmt.Sprintf("%s (%s, %q)", j.Cause, code, j.Reason)
}

// checkEvent checks what one reply said by itself.
func (c *checker) checkEvent(e *Event) {
	if e.Kind != KindCall {
		return
	}
	if e.Result == "JOB_NOT_FOUND" {
		view := c.jobs[e.ID]
		c.count("answers about jobs that are not there")
		if view != nil && view.acknowledged < e.Begin && !c.mayBeForgotten(view, e.End) {
			c.wrong("job %s (%s) was told of and is forgotten: %s says JOB_NOT_FOUND", e.ID, view.first.Token, e.Op)
		}
	}
	if e.Result == "INTERNAL" {
		c.wrong("%s was answered with a defect of the broker: %s", e.Op, e.Error)
	}
	if e.Result == ResultOK && (e.State == "LOST" || e.State == "STOPPED") {
		c.count("sandboxes whose machine stopped or is gone")
		c.checkDisturbed(e)
	}
	if e.Result == ResultOK && e.Op == "WriteJobInput" {
		c.checkTaken(e)
	}
	c.checkChunks(e)
}

// checkTaken wants a job to have taken no more of its input than was sent to it.
func (c *checker) checkTaken(e *Event) {
	c.count("input that was taken")
	var sent uint64
	for _, write := range c.writes[e.ID] {
		if write.Begin <= e.End {
			sent = max(sent, write.Sent)
		}
	}
	if e.Taken > sent {
		c.wrong("job %s has taken %d bytes of input, and %d were sent", e.ID, e.Taken, sent)
	}
}

// checkDisturbed wants a reason for a sandbox whose machine does not run although nobody parked it.
func (c *checker) checkDisturbed(e *Event) {
	for _, d := range c.disturbed[e.Machine] {
		if d.Begin-clockSlack <= e.End && (e.State == "STOPPED" || d.Op == "vanish") {
			return
		}
	}
	c.wrong("sandbox %s is %s, and nothing was done to its machine %s that explains it", e.Sandbox, e.State, e.Machine)
}

// attached says whether only its guest knew a job at first: a command whose caller waits, without a
// request id. A job that no plan names is such a one, found again after a crash.
func (c *checker) attached(view *jobView) bool {
	recorded, planned := c.recorded[view.first.Token]
	return !planned || !recorded
}

// mayBeForgotten is true of an attached command that only its guest knew, when that guest is gone.
func (c *checker) mayBeForgotten(view *jobView, until int64) bool {
	return c.attached(view) && c.machineLost(view, until)
}

// gatherAlive learns from jobs that came to their own end that the guest lived when they were asked for:
// what was done to it before did not end it.
func (c *checker) gatherAlive() {
	for _, view := range c.jobs {
		asked, known := c.asked[view.first.Token]
		if known {
			view.begin = min(view.begin, asked)
		}
		if known && view.seen != nil && view.seen.Cause == "EXITED" {
			of := boot{view.first.Machine, view.first.Generation}
			c.alive[of] = max(c.alive[of], asked)
		}
	}
}

// machineLost says whether something was done to a job's machine that can have ended its boot, or its
// sandbox was to be destroyed. A broker that is killed again and again takes a while to notice that a
// guest is gone, so what was done may be older than the job.
func (c *checker) machineLost(view *jobView, until int64) bool {
	if since, asked := c.destroyed[view.first.Sandbox]; asked && since <= until {
		return true
	}
	return slices.ContainsFunc(c.disturbed[view.first.Machine], func(d Event) bool {
		return d.Begin-clockSlack <= until && d.End+clockSlack >= min(view.begin, c.alive[boot{view.first.Machine, view.first.Generation}])
	})
}

// checkChunks compares every byte with what the plan says, and every reply's chunks with one another:
// each byte comes once, in order.
func (c *checker) checkChunks(e *Event) {
	next := map[string]uint64{}
	for _, chunk := range e.Chunks {
		id := firstOf(chunk.Job, e.ID)
		stream := id + map[bool]string{false: "/stdout", true: "/stderr"}[chunk.Stderr]
		view := c.jobs[id]
		if view == nil || c.plans[view.first.Token] == nil {
			continue
		}
		if at, known := next[stream]; known && at != chunk.Offset {
			c.wrong("%s of %s went on at offset %d after %d", e.Op, stream, chunk.Offset, at)
		}
		next[stream] = chunk.Offset + chunk.Bytes
		c.count("chunks of output")
		c.checkChunk(e, view, stream, chunk)
	}
	if e.Whole {
		c.checkWhole(e, next)
	}
}

func (c *checker) checkChunk(e *Event, view *jobView, stream string, chunk Chunk) {
	expected := expectedOutput(c.plans[view.first.Token], chunk.Stderr)
	end := chunk.Offset + chunk.Bytes
	switch {
	case end < chunk.Offset:
		c.wrong("%s of %s (%s) has %d bytes from offset %d on, beyond all numbers", e.Op, stream, view.first.Token, chunk.Bytes, chunk.Offset)
	case end > uint64(len(expected)):
		c.wrong("%s of %s (%s) has %d bytes, and the command writes %d", e.Op, stream, view.first.Token, end, len(expected))
	case chunk.Gap && (view.unkept || e.Op == "Exec" && c.machineLost(view, e.End)):
		c.count("gaps that are explained") // nobody has these bytes any more
	case chunk.Gap:
		c.wrong("%s of %s (%s): bytes %d to %d are said to be dropped, and nothing limits its output", e.Op, stream, view.first.Token, chunk.Offset, end)
	case Sum(expected[chunk.Offset:end]) != chunk.Sum:
		c.wrong("%s of %s (%s): bytes %d to %d are not those that the command writes", e.Op, stream, view.first.Token, chunk.Offset, end)
	}
}

// checkWhole wants all that a command wrote that exited by itself.
func (c *checker) checkWhole(e *Event, next map[string]uint64) {
	view := c.jobs[e.ID]
	if view == nil || view.seen == nil || view.seen.Cause != "EXITED" || view.unkept && e.Client == 0 {
		return // what a receipt does not keep was whole in the reply itself
	}
	plan := c.plans[view.first.Token]
	if plan == nil {
		return
	}
	c.count("whole outputs")
	for _, stderr := range []bool{false, true} {
		want := uint64(len(expectedOutput(plan, stderr)))
		least := want
		if plan.Work == WorkChild && !stderr && (view.stopped || c.machineLost(view, e.End)) {
			least = uint64(len(plan.Token) + 1) // the child may have been killed
		}
		got := next[e.ID+map[bool]string{false: "/stdout", true: "/stderr"}[stderr]]
		if got < least || got > want {
			c.wrong("job %s (%s) exited by itself and has %d bytes of %s, want %d", e.ID, plan.Token, got,
				map[bool]string{false: "stdout", true: "stderr"}[stderr], want)
		}
	}
}

func expectedOutput(plan *Plan, stderr bool) []byte {
	if stderr {
		return plan.Stderr()
	}
	return plan.Stdout()
}

func firstOf(texts ...string) string {
	for _, text := range texts {
		if text != "" {
			return text
		}
	}
	return ""
}

func sorted(jobs map[string]*jobView) []string {
	ids := make([]string, 0, len(jobs))
	for id := range jobs {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}
