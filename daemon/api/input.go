package api

import (
	"context"
	"math"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/daemon/fault"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (j *jobService) WriteJobInput(ctx context.Context, request *berthv1.WriteJobInputRequest) (*berthv1.WriteJobInputResponse, error) {
	call, err := j.call(ctx, "berth.v1.JobService/WriteJobInput", request)
	if err != nil {
		return nil, err
	}
	id, offset := request.GetJobId(), request.GetOffset()
	if err := required("job_id", id); err != nil {
		return nil, err
	}
	if err := validInput("", offset, request.GetData()); err != nil {
		return nil, err
	}
	if request.GetPosition() == nil && (len(request.GetData()) > 0 || request.GetEof()) {
		offset, next, err := j.Jobs.AppendInput(ctx, call, id, request.GetData(), request.GetEof())
		return &berthv1.WriteJobInputResponse{Offset: offset, NextOffset: next}, err
	}
	next, err := j.Jobs.WriteInput(ctx, call, id, offset, request.GetData(), request.GetEof())
	if request.GetPosition() == nil {
		offset = next
	}
	return &berthv1.WriteJobInputResponse{Offset: offset, NextOffset: next}, err
}

func (j *jobService) SignalJob(ctx context.Context, request *berthv1.SignalJobRequest) (*berthv1.SignalJobResponse, error) {
	call, err := j.call(ctx, "berth.v1.JobService/SignalJob", request)
	if err != nil {
		return nil, err
	}
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	signal, err := signalOf(request)
	if err != nil {
		return nil, err
	}
	job, err := j.Jobs.Signal(ctx, call, request.GetJobId(), signal)
	if err != nil {
		return nil, err
	}
	return &berthv1.SignalJobResponse{Job: jobToProto(job, basicSpec)}, nil
}

// validInput refuses a piece of stdin that is too large, or ends beyond the last offset. Its message lies in
// a field of the request, or is the request itself.
func validInput(message string, offset uint64, data []byte) error {
	var err error
	switch {
	case len(data) > maxStdinBytes:
		err = fault.Invalid("data", "must be at most 1 MiB: send the rest in another message")
	case offset > math.MaxInt64-maxStdinBytes:
		err = fault.Invalid("offset", "%d is beyond the end of any input", offset)
	}
	if err != nil && message != "" {
		return under(message, err)
	}
	return err
}

// signalOf reads which signal is meant, by number or by name.
func signalOf(request interface {
	GetSignal() uint32
	GetSignalName() string
}) (uint32, error) {
	number, name := request.GetSignal(), request.GetSignalName()
	switch {
	case name != "" && number != 0:
		return 0, fault.Invalid("signal_name", "goes without signal: give one of the two")
	case name != "":
		if known := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG")); known != 0 {
			return uint32(known), nil
		}
		return 0, fault.Invalid("signal_name", "%q is not a signal's name, as TERM or SIGTERM (kill -l shows them)", name)
	case number < 1 || number > maxSignal:
		return 0, fault.Invalid("signal", "must be a signal's number, 1 to %d, or give signal_name", maxSignal)
	}
	return number, nil
}

// signalName is a signal's name; empty where it has none.
func signalName(number uint32) string {
	if number > maxSignal {
		return ""
	}
	return unix.SignalName(unix.Signal(number))
}
