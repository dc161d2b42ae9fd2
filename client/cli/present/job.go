package present

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// GapWords says which bytes are missing, and why: notKept, where that is not empty.
func GapWords(stream berthv1.Stream, from, to uint64, notKept string) string {
	name := strings.ToLower(strings.TrimPrefix(stream.String(), "STREAM_"))
	if notKept != "" {
		return fmt.Sprintf("bytes %d to %d of %s were %s", from, to, name, notKept)
	}
	// Which of the two it was, a gap does not say.
	return fmt.Sprintf("bytes %d to %d of %s were dropped (%d bytes over the job's output limit, where a higher --output-limit keeps more, or over the broker's --retention-output)",
		from, to, name, to-from)
}

// ExitCode is the exit code that stands for an outcome, which is not nil.
func ExitCode(outcome *berthv1.Outcome) int {
	switch {
	case outcome.GetCause() == berthv1.Cause_CAUSE_LOST:
		return usage.ExitBroker
	case outcome.Exit != nil:
		return int(outcome.GetExitCode())
	case outcome.GetCause() == berthv1.Cause_CAUSE_TIMED_OUT:
		return usage.ExitTimeout
	}
	switch status := outcome.GetWaitStatus().GetStatus().(type) {
	case *berthv1.WaitStatus_Code:
		return int(status.Code)
	case *berthv1.WaitStatus_Signal:
		return usage.ExitSignal + int(status.Signal)
	}
	return usage.ExitBroker // it did not end as a command ends, and nobody knows a code
}

// JobState is a job's state as people write it.
func JobState(job *berthv1.Job) string {
	return strings.TrimPrefix(job.GetState().String(), JobStatePrefix)
}

// DescribeJob is a job in a few words.
func DescribeJob(job *berthv1.Job) string {
	return Plain(JobState(job) + " " + Cut(CommandWords(job.GetSpec())))
}

// CommandWords is the command as one could type it.
func CommandWords(spec *berthv1.JobSpec) string {
	if spec.GetShell() != "" {
		return spec.GetShell()
	}
	words := make([]string, 0, len(spec.GetArgv()))
	for _, word := range spec.GetArgv() {
		if word == "" || strings.ContainsAny(word, " \t\n'\"\\$`*?[]{}()<>|&;!#~") {
			word = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// OutcomeWords is how a job ended; empty while it has not.
func OutcomeWords(job *berthv1.Job) string { return withReason(howAndWhy(job)) }

// EndWords is outcomeWords with how long the job ran, unless its timeout says that.
func EndWords(job *berthv1.Job) string {
	how, why := howAndWhy(job)
	ran := lastedWords(Lasted(job.GetStartTime(), job.GetEndTime()))
	if ran != "" && job.GetOutcome().GetCause() != berthv1.Cause_CAUSE_TIMED_OUT {
		how += " " + ran
	}
	return withReason(how, why)
}

func withReason(how, why string) string {
	if why == "" {
		return how
	}
	return how + ": " + why
}

// howAndWhy is how a job ended and the reason, where that says more.
func howAndWhy(job *berthv1.Job) (how, why string) {
	outcome := job.GetOutcome()
	switch outcome.GetCause() {
	case berthv1.Cause_CAUSE_EXITED:
		return "exited " + strconv.Itoa(ExitCode(outcome)), ""
	case berthv1.Cause_CAUSE_SIGNALED:
		return "ended by signal " + signalWords(outcome.GetWaitStatus().GetSignal()), ""
	case berthv1.Cause_CAUSE_TIMED_OUT:
		how = "timed out"
		if timeout := job.GetSpec().GetTimeout(); timeout != nil {
			how += " after " + timeout.AsDuration().String()
		}
		return how, ""
	case berthv1.Cause_CAUSE_OOM_KILLED:
		return "killed for want of memory", outcome.GetReason()
	case berthv1.Cause_CAUSE_STOPPED:
		return stopWords(outcome.GetReason())
	case berthv1.Cause_CAUSE_FAILED_TO_START:
		return "did not start", outcome.GetReason()
	case berthv1.Cause_CAUSE_LOST:
		return "lost: what it did can't be known", outcome.GetReason()
	}
	return "", ""
}

// stopWords is how a job was stopped. The reason's first word before its colon is for programs.
func stopWords(reason string) (how, why string) {
	word, rest, found := strings.Cut(reason, ": ")
	switch {
	case word == "stop_requested":
		return "stopped on request", ""
	case found:
		return "stopped", rest
	}
	return "stopped", reason
}

func signalWords(number uint32) string {
	return fmt.Sprintf("%d (%v)", number, syscall.Signal(number))
}

// NotKept says why there is no output of a job that is done, and what to do, if that is because none was
// kept at all; else it is empty.
func NotKept(job *berthv1.Job) string {
	spec := job.GetSpec()
	switch {
	case job.GetState() != berthv1.JobState_JOB_STATE_DONE, spec == nil, spec.Keep == nil, spec.GetKeepOutput():
		return ""
	case job.GetDetached():
		return "not kept (it was started with keep_output off)"
	}
	return "not kept (an attached command's output goes to its caller; start it detached to keep it)"
}

// SurvivorWords says what outlived the job.
func SurvivorWords(outcome *berthv1.Outcome) string {
	var words []string
	if pids := outcome.GetSurvivors(); len(pids) > 0 {
		words = append(words, "pids "+strings.Trim(fmt.Sprint(pids), "[]"))
	}
	if outcome.GetOutputStillOpen() {
		words = append(words, "a child that holds its output open")
	}
	return strings.Join(words, ", ")
}

// StatsWords says how much there is of a stream.
func StatsWords(job *berthv1.Job, stats *berthv1.OutputStats) string {
	if stats == nil {
		return ""
	}
	words := BytesWords(stats.GetTotalBytes())
	switch why := NotKept(job); {
	case stats.GetDroppedBytes() == 0:
	case why != "":
		words += ", " + why
	default:
		words += ", of which " + BytesWords(stats.GetDroppedBytes()) + " were dropped"
	}
	if !stats.GetSealed() {
		words += ", more may come"
	}
	return words
}
