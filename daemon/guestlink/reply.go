package guestlink

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Bounds on what a guest may say: a machine's root can forge anything that its guest says.
const (
	maxText      = 4 << 10        // of a reason, a shell, a boot id
	maxSurvivors = 1000           // process ids
	maxChunk     = 1 << 20        // bytes of output in one message; a guest sends a quarter of it
	MaxClockSkew = 24 * time.Hour // a machine's clock may be off, but not without bounds
)

// ValidJobID reports whether a text is a job's id as the broker writes it: it is safe as a file's name, and short.
func ValidJobID(id string) bool {
	text, found := strings.CutPrefix(id, "job_")
	parsed, err := ulid.ParseStrict(text)
	return found && err == nil && parsed.String() == text
}

// protocolError says what a guest replied that cannot be. It wraps ErrProtocol.
func protocolError(machineID, format string, args ...any) error {
	return fault.New(fault.Internal, "the guest of machine %s %s (%w)", machineID, fmt.Sprintf(format, args...), ErrProtocol)
}

// status is a guest's reply on a job, unless it is on another one: then nothing in it can be believed.
func (l *Links) status(machineID, jobID string, from *guestv1.Status) (*guestv1.Status, error) {
	if from.GetJobId() != jobID {
		return nil, protocolError(machineID, "was asked about %s and answered about %q", jobID, boundText(from.GetJobId()))
	}
	return l.bound(from), nil
}

// finalStatus is a guest's reply on a job that has ended, unless it is on one that has not: then nobody knows
// how it ended.
func (l *Links) finalStatus(machineID, jobID string, from *guestv1.Status) (*guestv1.Status, error) {
	status, err := l.status(machineID, jobID, from)
	if err == nil && !status.GetDone() {
		err = protocolError(machineID, "reported %s as not done where a final status was required", jobID)
	}
	return status, err
}

// bound returns a guest's status within the bounds of what a status can be.
func (l *Links) bound(from *guestv1.Status) *guestv1.Status {
	now := l.opts.Now()
	status := &guestv1.Status{
		JobId: from.GetJobId(), Generation: from.GetGeneration(), BootId: boundText(from.GetBootId()),
		Done: from.GetDone(), Stdout: boundStats(from.GetStdout()), Stderr: boundStats(from.GetStderr()),
		StartTime: boundTime(from.GetStartTime(), now), EndTime: boundTime(from.GetEndTime(), now),
		Shell: boundText(from.GetShell()), Durable: from.GetDurable(), Cursor: from.GetCursor(), Pid: from.GetPid(),
		InputOffset: from.GetInputOffset(), InputClosed: from.GetInputClosed(),
	}
	if from.GetDone() {
		status.Outcome = boundOutcome(from.GetOutcome())
	}
	if start, end := status.GetStartTime(), status.GetEndTime(); start != nil && end != nil && end.AsTime().Before(start.AsTime()) {
		status.EndTime = nil
	}
	if cpu := from.GetCpuTime(); cpu.IsValid() && cpu.AsDuration() > 0 {
		status.CpuTime = cpu
	}
	return status
}

// boundOutcome is a guest's outcome within the bounds of what an outcome can be.
func boundOutcome(from *berthv1.Outcome) *berthv1.Outcome {
	if berthv1.Cause_name[int32(from.GetCause())] == "" || from.GetCause() == berthv1.Cause_CAUSE_UNSPECIFIED {
		return &berthv1.Outcome{
			Cause: berthv1.Cause_CAUSE_LOST, Reason: "guest_protocol_error: the guest gave an outcome without a cause that this broker knows",
		}
	}
	outcome := proto.CloneOf(from)
	outcome.Reason = boundText(outcome.GetReason())
	if len(outcome.GetSurvivors()) > maxSurvivors {
		outcome.Survivors = outcome.GetSurvivors()[:maxSurvivors]
	}
	if code := outcome.GetExitCode(); code < 0 || code > 255 || outcome.GetCause() == berthv1.Cause_CAUSE_LOST {
		outcome.Exit = nil
	}
	switch outcome.GetCause() {
	case berthv1.Cause_CAUSE_EXITED, berthv1.Cause_CAUSE_STOPPED:
	default:
		if outcome.GetExitCode() == 0 {
			outcome.Exit = nil // what did not exit by itself is no success
		}
	}
	return outcome
}

// boundStats is a guest's word on a stream, up to where it contradicts itself.
func boundStats(from *berthv1.OutputStats) *berthv1.OutputStats {
	stats := &berthv1.OutputStats{TotalBytes: from.GetTotalBytes(), DroppedBytes: from.GetTotalBytes(), Sealed: from.GetSealed()}
	if from != nil && from.Exit != nil {
		stats.Exit = &berthv1.OutputStats_EndAtExit{EndAtExit: min(from.GetEndAtExit(), from.GetTotalBytes())}
	}
	ranges := slices.Clone(from.GetKept()[:min(len(from.GetKept()), 2)])
	slices.SortFunc(ranges, func(a, b *berthv1.ByteRange) int { return cmp.Compare(a.GetFrom(), b.GetFrom()) })
	end := uint64(0)
	for _, r := range ranges {
		if r.GetTo() < r.GetFrom() || r.GetTo() > from.GetTotalBytes() {
			break
		}
		if r.GetFrom() < end {
			continue // it overlaps the one before it
		}
		stats.Kept = append(stats.Kept, proto.CloneOf(r))
		stats.DroppedBytes -= r.GetTo() - r.GetFrom()
		end = r.GetTo()
	}
	return stats
}

// boundOutput is the head and the tail that a guest gave of a stream, no more than was asked for and
// than there is of a stream that is sealed.
func boundOutput(from *guestv1.Output, stats *berthv1.OutputStats, limit uint64) *guestv1.Output {
	head, tail, offset := from.GetHead(), from.GetTail(), from.GetTailOffset()
	total := stats.GetTotalBytes()
	if stats.GetSealed() {
		head = head[:min(uint64(len(head)), total)]
	}
	if offset < uint64(len(head)) || offset > math.MaxUint64-uint64(len(tail)) || stats.GetSealed() && offset+uint64(len(tail)) > total {
		tail, offset = nil, 0 // it contradicts itself: where these bytes belong is not known
	}
	head = head[:min(uint64(len(head)), limit)]
	if over := uint64(len(tail)) - min(uint64(len(tail)), limit-uint64(len(head))); over > 0 {
		tail, offset = tail[over:], offset+over
	}
	return &guestv1.Output{Head: head, Tail: tail, TailOffset: offset}
}

// boundTime is a guest's time, unless it is beyond what a clock that is off can be.
func boundTime(from *timestamppb.Timestamp, now time.Time) *timestamppb.Timestamp {
	if from == nil || !from.IsValid() || from.AsTime().After(now.Add(MaxClockSkew)) {
		return nil
	}
	return from
}

func boundText(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > maxText {
		return strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return text
}
