package jobs

import (
	"fmt"
	"maps"
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Bounds on what a guest may say: a machine's root can forge anything its guest says.
const (
	maxGuestText = 4 << 10
	maxSurvivors = 1000
	maxClockOff  = 24 * time.Hour // a machine's clock may be off, but not without bounds
	maxChunk     = 1 << 20        // of output in one message; a guest sends a quarter of it
)

// command is what the guest is to run: the sandbox's environment, then the job's, secrets included,
// and every default filled in.
func (s *Service) command(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec, secrets *recordv1.JobSecrets) (*guestv1.Command, error) {
	env, err := s.opts.Sandboxes.Environment(sandbox)
	if err != nil {
		return nil, err
	}
	maps.Copy(env, spec.GetEnv())
	maps.Copy(env, secrets.GetEnv())
	command := &guestv1.Command{
		Argv: spec.GetArgv(), Shell: spec.GetShell(), Cwd: spec.GetCwd(), Env: env, User: spec.GetUser(),
		Tty: spec.GetTty(), MergeStderr: spec.GetMergeStderr(), Timeout: spec.GetTimeout(),
		KillGrace: spec.GetKillGrace(), OutputLimitBytes: spec.GetOutputLimitBytes(),
	}
	if command.GetKillGrace() == nil {
		command.KillGrace = durationpb.New(DefaultKillGrace)
	}
	if command.GetOutputLimitBytes() == 0 {
		command.OutputLimitBytes = DefaultOutputLimit
	}
	switch {
	case spec.GetStdin().GetOpen():
		command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	case len(secrets.GetStdin()) > 0:
		command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: secrets.GetStdin()}}
	}
	return command, nil
}

// secrets opens what was sealed with a job.
func (s *Service) secrets(job *recordv1.JobRecord) (*recordv1.JobSecrets, error) {
	secrets := &recordv1.JobSecrets{}
	if len(job.GetSealedSecrets()) == 0 {
		return secrets, nil
	}
	plain, err := s.opts.Vault.Unseal(job.GetId(), job.GetSealedSecrets())
	if err != nil {
		return nil, fmt.Errorf("open the secrets of job %s: %w", job.GetId(), err)
	}
	return secrets, proto.Unmarshal(plain, secrets)
}

// boundedOutcome is a guest's outcome within the bounds of what an outcome can be.
func boundedOutcome(from *berthv1.Outcome) *berthv1.Outcome {
	if berthv1.Cause_name[int32(from.GetCause())] == "" || from.GetCause() == berthv1.Cause_CAUSE_UNSPECIFIED {
		return lost("guest_confused: the guest gave an outcome without a cause that this broker knows")
	}
	outcome := proto.CloneOf(from)
	outcome.Reason = boundedText(outcome.GetReason())
	if len(outcome.GetSurvivors()) > maxSurvivors {
		outcome.Survivors = outcome.GetSurvivors()[:maxSurvivors]
	}
	if code := outcome.GetExitCode(); code < 0 || code > 255 || outcome.GetCause() == berthv1.Cause_CAUSE_LOST {
		outcome.ExitCode = nil
	}
	switch outcome.GetCause() {
	case berthv1.Cause_CAUSE_EXITED, berthv1.Cause_CAUSE_STOPPED:
	default:
		if outcome.GetExitCode() == 0 {
			outcome.ExitCode = nil // what did not exit by itself is no success
		}
	}
	return outcome
}

// about is a guest's answer on a job, unless it is on another one: then nothing in it can be believed.
func about(status *guestv1.Status, machineID, jobID string) (*guestv1.Status, error) {
	if status.GetJobId() != jobID {
		return nil, fault.New(fault.Internal, "the guest of machine %s was asked about job %s and answered about %q",
			machineID, jobID, boundedText(status.GetJobId()))
	}
	return status, nil
}

// ended is a guest's answer on a job that has ended, unless it is on another one, or on one that has not:
// then nobody knows how it ended.
func ended(status *guestv1.Status, machineID, jobID string) (*guestv1.Status, error) {
	status, err := about(status, machineID, jobID)
	if err != nil {
		return nil, err
	}
	if !status.GetDone() {
		return nil, fault.New(fault.Internal, "the guest of machine %s said that job %s is over, and in the same breath that it is not", machineID, jobID)
	}
	return status, nil
}

// boundedOutput is the head and the tail that a guest gave of a stream, no more than was asked for and
// than there is of a stream that is sealed.
func boundedOutput(from *guestv1.Output, facts *berthv1.OutputFacts, limit uint64) *guestv1.Output {
	head, tail, offset := from.GetHead(), from.GetTail(), from.GetTailOffset()
	total := facts.GetTotalBytes()
	if facts.GetSealed() {
		head = head[:min(uint64(len(head)), total)]
	}
	if offset < uint64(len(head)) || offset > math.MaxUint64-uint64(len(tail)) || facts.GetSealed() && offset+uint64(len(tail)) > total {
		tail, offset = nil, 0 // it contradicts itself: where these bytes belong is not known
	}
	head = head[:min(uint64(len(head)), limit)]
	if over := uint64(len(tail)) - min(uint64(len(tail)), limit-uint64(len(head))); over > 0 {
		tail, offset = tail[over:], offset+over
	}
	return &guestv1.Output{Head: head, Tail: tail, TailOffset: offset}
}

// boundedFacts is a guest's word on a stream, up to where it contradicts itself.
func boundedFacts(from *berthv1.OutputFacts) *berthv1.OutputFacts {
	facts := &berthv1.OutputFacts{TotalBytes: from.GetTotalBytes(), Sealed: from.GetSealed(), EndAtExit: endAtExit(from)}
	for _, kept := range inOrder(firstTwo(from.GetKept())) {
		if kept.GetTo() < kept.GetFrom() || kept.GetTo() > from.GetTotalBytes() {
			break
		}
		facts.Kept = append(facts.Kept, kept)
	}
	facts.DroppedBytes = facts.GetTotalBytes() - length(facts.GetKept())
	return facts
}

// boundedTime is a guest's time, unless it is beyond what a clock that is off can be.
func boundedTime(from *timestamppb.Timestamp, now time.Time) *timestamppb.Timestamp {
	if from == nil || !from.IsValid() || from.AsTime().After(now.Add(maxClockOff)) {
		return nil
	}
	return from
}

// setTimes gives a job the times that its guest says it began and ended, as far as they can be: no end
// before the start, and neither long before the job was made.
func (s *Service) setTimes(job *recordv1.JobRecord, status *guestv1.Status) {
	earliest := job.GetCreateTime().AsTime().Add(-maxClockOff)
	job.StartTime, job.EndTime = boundedTime(status.GetStartTime(), s.opts.Now()), boundedTime(status.GetEndTime(), s.opts.Now())
	if job.GetStartTime() != nil && job.GetStartTime().AsTime().Before(earliest) {
		job.StartTime = nil
	}
	if end := job.GetEndTime(); end != nil && (end.AsTime().Before(earliest) || job.GetStartTime() != nil && end.AsTime().Before(job.GetStartTime().AsTime())) {
		job.EndTime = nil
	}
	job.Shell, job.CpuNanos = boundedText(status.GetShell()), 0
	if cpu := status.GetCpuTime(); cpu.IsValid() && cpu.AsDuration() > 0 {
		job.CpuNanos = int64(cpu.AsDuration())
	}
}

func boundedText(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if len(text) > maxGuestText {
		return strings.ToValidUTF8(text[:maxGuestText], "") + "…"
	}
	return text
}
