package jobs

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/lookup"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

const (
	// maxStopGrace is the longest that a job's own grace can be; the API bounds it.
	maxStopGrace = time.Hour
	// stopInterval is how often a guest is asked to stop a command that it does not know yet: the call that
	// begins it may be on its way.
	stopInterval = 200 * time.Millisecond
	// relieveInterval is after how long a stop gets some of a full disk's reserve: more than a guest takes to kill a
	// job and to write that down.
	relieveInterval = time.Second
)

// Stop ends a job and everything that it started, and returns it with its outcome. A job that is
// done keeps its outcome; what it left running is killed. A grace of nil is the job's own.
func (s *Service) Stop(ctx context.Context, call request.Call, id string, grace *durationpb.Duration) (*recordv1.JobRecord, error) {
	job, err := s.mayTouch(ctx, call, id, s.store.UpdateUrgent)
	if err != nil {
		return nil, err
	}
	for {
		if err := s.jobs.Reachable(job); err != nil && !record.IsDone(job) {
			return nil, err
		}
		status, err := s.stopAtGuest(ctx, job, grace)
		switch {
		case err == nil:
			return s.imported(ctx, job, status)
		case record.IsDone(job) && !isContextEnd(err):
			return job, nil // the guest has forgotten it, or is gone: nothing of it is left to kill
		case !isNoJob(err):
			return nil, err
		}
		// The guest has not begun it yet, or its receipt was imported just now.
		if job, err = s.beyond(ctx, job); err != nil || record.IsDone(job) {
			return job, err
		}
	}
}

// stopAtGuest has a job's guest stop it, which is over when the guest has its end on disk. On a full disk that is
// the broker's too, it gets what is held in reserve for that, a part after the other: a job that has not ended yet
// might take the first.
func (s *Service) stopAtGuest(ctx context.Context, job *recordv1.JobRecord, grace *durationpb.Duration) (*guestv1.Status, error) {
	relieving, over := context.WithCancel(ctx)
	relieved := make(chan struct{})
	go func() {
		defer close(relieved)
		for background.Pause(relieving, relieveInterval) {
			s.store.GiveWay()
		}
	}()
	defer func() { over(); <-relieved }()
	return s.links.StopJob(ctx, job.GetMachineId(), stopGrace(job, grace), &guestv1.StopRequest{
		JobId: job.GetId(), Grace: grace, Reason: "stop_requested: by StopJob",
	})
}

// beyond waits, for a short time, until a job that its guest does not know has gone beyond what it was.
func (s *Service) beyond(ctx context.Context, was *recordv1.JobRecord) (*recordv1.JobRecord, error) {
	limited, cancel := context.WithTimeout(ctx, stopInterval)
	defer cancel()
	job, err := s.jobs.Until(limited, was, lookup.Beyond(was))
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return job, nil
	}
	return job, err
}

// stopGrace is how long a job may take to end when it is stopped. One that was found with its guest may have
// any grace.
func stopGrace(job *recordv1.JobRecord, asked *durationpb.Duration) time.Duration {
	if asked != nil {
		return asked.AsDuration()
	}
	if len(job.GetSpec().GetArgv()) == 0 && job.GetSpec().GetShell() == "" {
		return maxStopGrace
	}
	return record.KillGrace(job)
}
