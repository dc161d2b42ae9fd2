package jobs

import (
	"cmp"
	"context"
	"errors"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/unrecorded"
	"github.com/berth-sandbox/berth/daemon/request"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// RunResult is a command that was run: its record, and as much of its output as was asked for.
type RunResult struct {
	Job            *recordv1.JobRecord
	Stdout, Stderr *guestv1.Output
}

// Run runs a command and waits for it. With a request id it is recorded beforehand and goes on
// without its caller; without one its record is written behind, and it is stopped when the caller goes
// away.
func (s *Service) Run(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*RunResult, error) {
	if call.RequestID != "" {
		return s.runRecorded(ctx, call, sandboxID, spec, maxOutput)
	}
	return s.runUnrecorded(ctx, call, sandboxID, spec, maxOutput)
}

func (s *Service) runRecorded(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*RunResult, error) {
	job, _, err := s.starter.Start(ctx, call, sandboxID, spec, false)
	if err != nil {
		return nil, err
	}
	if job, err = s.jobs.Until(ctx, job, record.IsDone); err != nil {
		return nil, err
	}
	return s.fromReceipt(job, maxOutput)
}

// fromReceipt returns the head and the tail of what a receipt keeps.
func (s *Service) fromReceipt(job *recordv1.JobRecord, maxOutput uint64) (*RunResult, error) {
	stdout, err := s.output.HeadAndTail(job.GetId(), berthv1.Stream_STREAM_STDOUT, job.GetStdout(), maxOutput)
	if err != nil {
		return nil, err
	}
	stderr, err := s.output.HeadAndTail(job.GetId(), berthv1.Stream_STREAM_STDERR, job.GetStderr(), maxOutput)
	return &RunResult{Job: job, Stdout: stdout, Stderr: stderr}, err
}

func (s *Service) runUnrecorded(ctx context.Context, call request.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*RunResult, error) {
	job, command, err := s.unrecorded.Add(call, sandboxID, spec)
	if err != nil {
		return nil, err
	}
	s.unrecorded.Running(job, nil)
	grace := spec.GetDisconnectGrace().AsDuration()
	kill := spec.GetOnDisconnect() != berthv1.OnDisconnect_ON_DISCONNECT_KEEP
	response, err := s.runInGuest(ctx, job, &guestv1.RunRequest{
		Start: &guestv1.StartRequest{
			JobId: job.GetId(), BootId: job.GetBootId(), Command: command,
			KillOnDisconnect: kill, DisconnectGrace: durationpb.New(max(grace, unrecorded.LinkGrace)),
		},
		MaxOutputBytes: maxOutput, // and it is remembered until its record is in the ledger
	})
	switch {
	case err == nil:
		done := s.unrecorded.Done(job, response.GetStatus())
		s.unrecorded.Release(done)
		return &RunResult{Job: done, Stdout: response.GetStdout(), Stderr: response.GetStderr()}, nil
	// The guest counts the caller's deadline too, and may be the first to say that it is over.
	case ctx.Err() != nil, isContextEnd(err):
		if kill {
			s.unrecorded.AbandonAndStop(job, grace)
		} else {
			s.unrecorded.Abandon(job)
		}
		return nil, cmp.Or(ctx.Err(), err)
	case errors.Is(err, guestlink.ErrOtherBoot), errors.Is(err, guestlink.ErrOtherGeneration):
		return &RunResult{Job: s.unrecorded.Lost(job, "guest_restarted: the machine's guest was started again while the command ran or was about to")}, nil
	case errors.Is(err, guestlink.ErrProtocol):
		return &RunResult{Job: s.unrecorded.Lost(job, "guest_protocol_error: "+err.Error())}, nil
	case errors.Is(err, guestlink.ErrRefused):
		s.unrecorded.Refused(job, err)
	default:
		s.unrecorded.Abandon(job) // it may run all the same
	}
	return nil, err
}

// runInGuest runs a command in its guest. While the machine is suspended there is no connection to it, and
// the command is suspended with it: once it is resumed the same call joins the command.
func (s *Service) runInGuest(ctx context.Context, job *recordv1.JobRecord, request *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	for {
		response, err := s.links.RunJob(ctx, job.GetMachineId(), request)
		if !fault.Is(err, fault.GuestUnreachable) || !s.jobs.UntilResumed(ctx, job) {
			return response, err
		}
	}
}
