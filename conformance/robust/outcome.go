package robust

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// checkJob checks what all replies together said of a job.
func (c *checker) checkJob(view *jobView) {
	c.count("jobs")
	if view.changed != "" {
		c.wrong("%s", view.changed)
	}
	if view.lostLater != 0 && !c.machineLost(view, view.lostLater) {
		c.wrong("job %s (%s) ended as %s and is lost later, and nothing was done to its machine", view.first.ID, view.first.Token, outcome(view.seen))
	}
	if !view.finalized && !c.mayBeForgotten(view, math.MaxInt64-clockSlack) {
		c.wrong("job %s (%s) was told of, and has no outcome when all is quiet", view.first.ID, view.first.Token)
	}
	if view.seen == nil {
		return
	}
	if why := c.untrue(view); why != "" {
		c.wrong("job %s (%s) ended as %s: %s", view.first.ID, view.first.Token, outcome(view.seen), why)
	}
}

// untrue says why an outcome can't be what the command did; empty when it can.
func (c *checker) untrue(view *jobView) string {
	c.count("outcomes")
	plan, end := c.plans[view.first.Token], view.seen
	starts, counted := c.starts[view.first.Token]
	switch end.Cause {
	case "EXITED":
		switch {
		case end.Code == nil || end.Reason != "":
			return "an exit has a code and no other reason"
		case plan == nil: // an attached command that was found again: nobody knows which
		case *end.Code != int32(plan.Code):
			return fmt.Sprintf("it exits with %d", plan.Code)
		case plan.Work == WorkEndless && len(view.signals) == 0:
			return "it does not end by itself"
		case counted && starts != 1:
			return fmt.Sprintf("its command began %d times", starts)
		}
	case "SIGNALED":
		if !slices.Contains(view.signals, end.Signal) {
			return fmt.Sprintf("nobody sent signal %d", end.Signal)
		}
	case "STOPPED":
		if _, destroyed := c.destroyed[view.first.Sandbox]; !view.stopped && !destroyed && !(c.attached(view) && strings.HasPrefix(end.Reason, "disconnected")) {
			return "nobody asked for that"
		}
	case "TIMED_OUT":
		if plan != nil && plan.TimeoutMS == 0 {
			return "it has no timeout"
		}
	case "LOST":
		switch {
		case end.Code != nil:
			return "what is lost has no code"
		case c.attached(view) && strings.HasPrefix(end.Reason, "disconnected"):
		case !c.machineLost(view, view.seenAt):
			return "nothing was done to its machine that explains it"
		}
	case "FAILED_TO_START":
		if !strings.HasPrefix(end.Reason, "expired") || view.seenAt-view.begin < startDeadline || starts > 0 {
			return "it can be started"
		}
	default:
		return "nothing here ends so"
	}
	return ""
}
