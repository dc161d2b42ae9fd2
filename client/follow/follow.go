// Package follow follows a job to its end, over restarts of the broker: it waits for the outcome and
// reads the output to the last byte. It never makes up an outcome or a byte.
package follow

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client/connection"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// UnknownOutcomeError says that a job's machine is stopped, so that whether and how the job ended is
// not known now: resuming its sandbox says, destroying it makes the job LOST.
type UnknownOutcomeError struct {
	Job *berthv1.Job
}

// Error says so and names what to do.
func (e *UnknownOutcomeError) Error() string {
	return fmt.Sprintf("%s: its machine is stopped, so how it ended is not known: resume sandbox %s to find out, or destroy it",
		e.Job.GetId(), e.Job.GetSandboxId())
}

// Wait waits until a job is DONE and returns it with its outcome; LOST is an outcome, not an
// error. It outlasts restarts of the broker, and continues for as long as ctx allows while the broker
// answers. Errors: JOB_NOT_FOUND; *UnreachableError when the broker stays away for longer than the
// retry timeout; *UnknownOutcomeError; ctx's end.
func Wait(ctx context.Context, c *connection.Conn, jobID string) (*berthv1.Job, error) {
	for idle := 0; ; idle++ {
		begun := time.Now()
		job, err := poll(ctx, c, jobID)
		switch {
		case err != nil && !c.KeepWaiting(ctx, err):
			return nil, c.Unanswered(ctx, err)
		case err != nil:
		case job.GetState() == berthv1.JobState_JOB_STATE_DONE:
			return job, nil
		case job.GetState() == berthv1.JobState_JOB_STATE_UNKNOWN:
			return job, &UnknownOutcomeError{Job: job}
		case time.Since(begun) >= time.Second:
			idle = -1 // it waited as asked: ask again at once
			continue
		}
		if !connection.Pause(ctx, connection.BackoffFor(idle, nil)) {
			return nil, connection.EndedWhile(ctx, "waiting for "+jobID)
		}
	}
}

// poll is one long poll.
func poll(ctx context.Context, c *connection.Conn, jobID string) (*berthv1.Job, error) {
	ctx, cancel := context.WithTimeout(ctx, connection.PollWait+connection.AnswerSlack)
	defer cancel()
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: jobID, Wait: durationpb.New(connection.PollWait)})
	return reply.GetJob(), err
}

// MayBeStopped reports whether an error about a job may mean that its machine is stopped: the broker
// says something else than to come back soon.
func MayBeStopped(err error) bool {
	return connection.Info(err) != nil && !connection.Is(err, berthv1.Reason_REASON_RECOVERING) && !connection.Is(err, berthv1.Reason_REASON_STOPPING)
}

// Unknown asks whether a job's machine is stopped; nil when it is not, or nobody knows.
func Unknown(ctx context.Context, c *connection.Conn, jobID string) error {
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: jobID})
	if err != nil || reply.GetJob().GetState() != berthv1.JobState_JOB_STATE_UNKNOWN {
		return nil
	}
	return &UnknownOutcomeError{Job: reply.GetJob()}
}
