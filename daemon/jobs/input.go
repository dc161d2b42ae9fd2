package jobs

import (
	"context"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// startingRetry is when to come back about a job that is being started.
const startingRetry = 5 * time.Second

// WriteInput writes to a job's stdin at an offset, and closes it after that if asked to. It returns
// how far stdin was taken: what was taken before is not taken again. Without data and end it only
// tells.
func (s *Service) WriteInput(ctx context.Context, call request.Call, id string, offset uint64, data []byte, eof bool) (next uint64, err error) {
	job, err := s.mayTouch(ctx, call, id, s.store.Update)
	if err != nil {
		return 0, err
	}
	if len(data) == 0 && !eof {
		return s.inputTaken(ctx, job)
	}
	next = offset
	err = s.inGuest(job, func() (err error) {
		if len(data) > 0 {
			if next, err = s.links.WriteInput(ctx, job.GetMachineId(), &guestv1.InputRequest{JobId: id, Offset: offset, Data: data}); err != nil {
				return err
			}
		}
		if !eof || next < offset+uint64(len(data)) {
			return nil
		}
		return s.links.CloseInput(ctx, job.GetMachineId(), &guestv1.CloseInputRequest{JobId: id, Offset: next})
	})
	return next, err
}

// AppendInput writes behind what a job's stdin was given before, whoever gave it, and closes it after that if
// asked to. It returns where data begins and how far it was taken: all of it, or for want of room nothing.
// The machine knows a repeated request id: no answer that was lost makes it write twice.
func (s *Service) AppendInput(ctx context.Context, call request.Call, id string, data []byte, eof bool) (offset, next uint64, err error) {
	job, err := s.mayTouch(ctx, call, id, s.store.Update)
	if err != nil {
		return 0, 0, err
	}
	err = s.inGuest(job, func() (err error) {
		offset, next, err = s.links.AppendInput(ctx, job.GetMachineId(), &guestv1.AppendInputRequest{
			JobId: id, RequestId: call.RequestID, Data: data, Eof: eof,
		})
		return err
	})
	return offset, next, err
}

func (s *Service) inputTaken(ctx context.Context, job *recordv1.JobRecord) (taken uint64, err error) {
	if record.IsDone(job) {
		return 0, over(job)
	}
	err = s.inGuest(job, func() error {
		status, err := s.links.WaitJob(ctx, job.GetMachineId(), job.GetId(), 0)
		taken = status.GetInputOffset()
		return err
	})
	return taken, err
}

// Signal sends one signal to a job's process group and returns the job as it was then. A job that is
// done has no process group any more: that is WRONG_STATE. The request is remembered after the act: a
// crash in between makes a repeated request send the signal again, rather than never.
func (s *Service) Signal(ctx context.Context, call request.Call, id string, signal uint32) (*recordv1.JobRecord, error) {
	job, repeated, err := s.check(call, id)
	if err != nil || repeated {
		return job, err
	}
	if record.IsDone(job) {
		return nil, over(job)
	}
	err = s.inGuest(job, func() error {
		return s.links.SignalJob(ctx, job.GetMachineId(), &guestv1.SignalRequest{JobId: id, Signal: signal})
	})
	if err != nil || call.RequestID == "" {
		return job, err
	}
	return job, s.store.Update(ctx, func(tx *store.Tx) error { return call.Remember(tx, id, s.now()) })
}

// inGuest runs fn, which asks the guest of a job that is not done.
func (s *Service) inGuest(job *recordv1.JobRecord, fn func() error) error {
	if err := s.jobs.Reachable(job); err != nil {
		return err
	}
	err := fn()
	unreachable := fault.Is(err, fault.GuestUnreachable)
	if !unreachable && !isNoJob(err) {
		return err
	}
	// A machine that is gone for good is no reason to come back about a job that is over.
	if again, findErr := s.jobs.Find(job.GetNamespace(), job.GetId()); findErr == nil && record.IsDone(again) {
		return over(again)
	}
	if unreachable {
		return err
	}
	return fault.New(fault.Recovering, "%s is being started: try again", job.GetId()).Retry(startingRetry)
}

func over(job *recordv1.JobRecord) error {
	return fault.New(fault.WrongState, "%s is over: %s", job.GetId(), record.Describe(job.GetOutcome())).
		With("state", "DONE").With("wanted", "RUNNING")
}
