package jobs

import (
	"context"
	"errors"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// WriteInput writes to a job's stdin at an offset, and closes it after that if asked to. It returns
// how far stdin was taken: what was taken before is not taken again. Without data and end it only
// tells.
func (s *Service) WriteInput(ctx context.Context, call lifecycle.Call, id string, offset uint64, data []byte, eof bool) (uint64, error) {
	job, err := s.mayTouch(ctx, call, id)
	if err != nil {
		return 0, err
	}
	if len(data) == 0 && !eof {
		return s.inputTaken(ctx, job)
	}
	next := offset
	err = s.inGuest(ctx, job, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		if len(data) > 0 {
			response, err := guest.Input(ctx, &guestv1.InputRequest{JobId: id, Offset: offset, Data: data})
			if err != nil {
				return err
			}
			if next = response.GetNextOffset(); next < offset {
				return fault.New(fault.Internal, "the guest of machine %s was given stdin from %d on and says that it has it up to %d",
					job.GetMachineId(), offset, next)
			}
		}
		if !eof || next < offset+uint64(len(data)) {
			return nil
		}
		_, err := guest.CloseInput(ctx, &guestv1.CloseInputRequest{JobId: id, Offset: next})
		return err
	})
	return next, err
}

func (s *Service) inputTaken(ctx context.Context, job *recordv1.JobRecord) (uint64, error) {
	if isDone(job) {
		return 0, over(job)
	}
	var taken uint64
	err := s.inGuest(ctx, job, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		response, err := guest.Wait(ctx, &guestv1.WaitRequest{JobId: job.GetId()})
		if err != nil {
			return err
		}
		status, err := about(response.GetStatus(), job.GetMachineId(), job.GetId())
		taken = status.GetInputOffset()
		return err
	})
	return taken, err
}

// Signal sends one signal to a job's process group and returns the job as it was then. A job that is
// done has no process group any more: that is WRONG_STATE. The request is remembered after the act: a
// crash in between makes a repeated request send the signal again, rather than never.
func (s *Service) Signal(ctx context.Context, call lifecycle.Call, id string, signal uint32) (*recordv1.JobRecord, error) {
	job, repeated, err := s.look(call, id)
	if err != nil || repeated {
		return job, err
	}
	if isDone(job) {
		return nil, over(job)
	}
	err = s.inGuest(ctx, job, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Signal(ctx, &guestv1.SignalRequest{JobId: id, Signal: signal})
		return err
	})
	if err != nil || call.RequestID == "" {
		return job, err
	}
	return job, s.opts.Store.Update(ctx, func(tx *store.Tx) error { return call.Remember(tx, id, s.opts.Now()) })
}

// inGuest runs fn with the guest of a job that is not done.
func (s *Service) inGuest(ctx context.Context, job *recordv1.JobRecord, fn func(context.Context, guestv1.GuestServiceClient) error) error {
	if err := s.machineStopped(job); err != nil {
		return err
	}
	if err := s.notFrozen(job); err != nil {
		return err
	}
	err := s.ask(ctx, job.GetMachineId(), 0, fn)
	unheard := fault.Is(err, fault.GuestUnreachable)
	if !unheard && !errors.Is(err, guestlink.ErrNoJob) {
		return err
	}
	// A machine that is gone for good is no reason to come back about a job that is over.
	if again, findErr := s.find(job.GetNamespace(), job.GetId()); findErr == nil && isDone(again) {
		return over(again)
	}
	if unheard {
		return err
	}
	return fault.New(fault.Recovering, "job %s is being started: try again", job.GetId()).Retry(tooManyRetry)
}

func over(job *recordv1.JobRecord) error {
	return fault.New(fault.WrongState, "job %s is over: %s", job.GetId(), describeOutcome(job.GetOutcome())).
		With("state", "DONE").With("wanted", berthv1.JobState_JOB_STATE_RUNNING.String()[len("JOB_STATE_"):])
}
