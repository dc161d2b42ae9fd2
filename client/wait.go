package client

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// UnknownOutcomeError says that a job's machine is stopped, so that whether and how the job ended is
// not known now: resuming its sandbox tells, destroying it makes the job LOST.
type UnknownOutcomeError struct {
	Job *berthv1.Job
}

// Error says so and names what to do.
func (e *UnknownOutcomeError) Error() string {
	return fmt.Sprintf("job %s: its machine is stopped, so how it ended is not known: resume sandbox %s to find out, or destroy it",
		e.Job.GetId(), e.Job.GetSandboxId())
}

// WaitJob waits until a job is DONE and returns it with its outcome; LOST is an outcome, not an
// error. It outlasts restarts of the broker, and goes on for as long as ctx allows while the broker
// answers. Errors: JOB_NOT_FOUND; *UnreachableError when the broker stays away for longer than the
// patience; *UnknownOutcomeError; ctx's end.
func (c *Client) WaitJob(ctx context.Context, jobID string) (*berthv1.Job, error) {
	for idle := 0; ; idle++ {
		begun := time.Now()
		job, err := c.pollJob(ctx, jobID)
		switch {
		case err != nil && !c.keepWaiting(ctx, err):
			return nil, c.silent(ctx, err)
		case err != nil:
		case job.GetState() == berthv1.JobState_JOB_STATE_DONE:
			return job, nil
		case job.GetState() == berthv1.JobState_JOB_STATE_UNKNOWN:
			return job, &UnknownOutcomeError{Job: job}
		case time.Since(begun) >= time.Second:
			idle = -1 // it waited as asked: ask again at once
			continue
		}
		if !pause(ctx, backoffFor(idle, nil)) {
			return nil, endedWhile(ctx, "waiting for job "+jobID)
		}
	}
}

// pollJob is one long poll.
func (c *Client) pollJob(ctx context.Context, jobID string) (*berthv1.Job, error) {
	ctx, cancel := context.WithTimeout(ctx, pollWait+answerSlack)
	defer cancel()
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: jobID, Wait: durationpb.New(pollWait)})
	return reply.GetJob(), err
}

// mayBeStopped reports whether an error about a job may mean that its machine is stopped: the broker
// says something else than to come back soon.
func mayBeStopped(err error) bool {
	return Info(err) != nil && !Is(err, berthv1.Reason_REASON_RECOVERING) && !Is(err, berthv1.Reason_REASON_STOPPING)
}

// unknownOutcome asks whether a job's machine is stopped; nil when it is not, or nobody knows.
func (c *Client) unknownOutcome(ctx context.Context, jobID string) error {
	reply, err := c.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: jobID})
	if err != nil || reply.GetJob().GetState() != berthv1.JobState_JOB_STATE_UNKNOWN {
		return nil
	}
	return &UnknownOutcomeError{Job: reply.GetJob()}
}
