// Package record reads a job's record: how far the job is, what it keeps, what its spec leaves to the
// defaults. It writes nothing to the ledger.
package record

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/output"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Defaults that the API documents.
const (
	DefaultKillGrace   = 5 * time.Second
	DefaultOutputLimit = 64 << 20
)

// IsDone reports whether a job has ended, and its outcome is known.
func IsDone(job *recordv1.JobRecord) bool { return job.GetState() == berthv1.JobState_JOB_STATE_DONE }

// HasBegun reports whether a job's guest is known to have begun it, or that it will not.
func HasBegun(job *recordv1.JobRecord) bool {
	return job.GetState() != berthv1.JobState_JOB_STATE_RESERVED
}

// IsComplete reports whether a job's receipt can't grow any more.
func IsComplete(job *recordv1.JobRecord) bool {
	return IsDone(job) && job.GetStdout().GetSealed() && job.GetStderr().GetSealed()
}

// IsUnrecorded reports whether a command was begun before it was written down: it had no request id.
func IsUnrecorded(job *recordv1.JobRecord) bool {
	return job.GetStartDeadline() == nil && !job.GetKeepOutput()
}

// Sealed reports whether no more output of a job will come.
func Sealed(status *guestv1.Status) bool {
	return status.GetStdout().GetSealed() && status.GetStderr().GetSealed()
}

// Stats is a copy of what a record says of a stream.
func Stats(job *recordv1.JobRecord, stream berthv1.Stream) *berthv1.OutputStats {
	stats := job.GetStdout()
	if stream == berthv1.Stream_STREAM_STDERR {
		stats = job.GetStderr()
	}
	if stats == nil {
		return &berthv1.OutputStats{}
	}
	return proto.CloneOf(stats)
}

// KeptBytes is how much output a receipt keeps.
func KeptBytes(job *recordv1.JobRecord) uint64 {
	return output.Length(job.GetStdout().GetKept()) + output.Length(job.GetStderr().GetKept())
}

// KillGrace is a job's own grace between TERM and KILL.
func KillGrace(job *recordv1.JobRecord) time.Duration {
	if job.GetSpec().GetKillGrace() != nil {
		return job.GetSpec().GetKillGrace().AsDuration()
	}
	return DefaultKillGrace
}

// OutputLimit is how much of each stream is kept.
func OutputLimit(job *recordv1.JobRecord) uint64 {
	if limit := job.GetSpec().GetOutputLimitBytes(); limit != 0 {
		return limit
	}
	return DefaultOutputLimit
}

// Conclude gives a job its outcome.
func Conclude(job *recordv1.JobRecord, outcome *berthv1.Outcome, now time.Time) {
	job.State, job.Outcome, job.SealedSecrets = berthv1.JobState_JOB_STATE_DONE, outcome, nil
	job.DoneTime = timestamppb.New(now)
}

// SetRunning gives a job what its guest says of its beginning.
func SetRunning(job *recordv1.JobRecord, status *guestv1.Status) {
	job.State, job.SealedSecrets = berthv1.JobState_JOB_STATE_RUNNING, nil
	SetTimes(job, status)
	job.EndTime, job.CpuNanos = nil, 0
}

// SetTimes gives a job the times that its guest says it began and ended, unless they are long before the
// job was made.
func SetTimes(job *recordv1.JobRecord, status *guestv1.Status) {
	earliest := job.GetCreateTime().AsTime().Add(-guestlink.MaxClockSkew)
	since := func(at *timestamppb.Timestamp) *timestamppb.Timestamp {
		if at == nil || at.AsTime().Before(earliest) {
			return nil
		}
		return at
	}
	job.StartTime, job.EndTime = since(status.GetStartTime()), since(status.GetEndTime())
	job.Shell, job.CpuNanos = status.GetShell(), int64(status.GetCpuTime().AsDuration())
}

// NotKept is a stream's stats in a receipt that keeps no output.
func NotKept(stats *berthv1.OutputStats) *berthv1.OutputStats {
	none := &berthv1.OutputStats{TotalBytes: stats.GetTotalBytes(), DroppedBytes: stats.GetTotalBytes(), Sealed: true}
	if stats != nil && stats.Exit != nil {
		none.Exit = &berthv1.OutputStats_EndAtExit{EndAtExit: stats.GetEndAtExit()}
	}
	return none
}

// Lost is the outcome of a job of which nobody knows how it ended.
func Lost(reason string) *berthv1.Outcome {
	return &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST, Reason: reason}
}

// FailedToStart is the outcome of a job that never began.
func FailedToStart(reason string) *berthv1.Outcome {
	return &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: reason}
}

// Describe says in words how a job ended.
func Describe(outcome *berthv1.Outcome) string {
	text := outcome.GetCause().String()[len("CAUSE_"):]
	if outcome.Exit != nil {
		text += fmt.Sprintf(" exit %d", outcome.GetExitCode())
	}
	if outcome.GetReason() != "" {
		text += " " + outcome.GetReason()
	}
	return text
}

// NotFound says that there is no such job, as to everybody in another namespace.
func NotFound(id string) error {
	return fault.New(fault.JobNotFound, "there is no %s: `berth jobs` shows the jobs there are", id).With("job_id", id)
}
