package guestlink

import (
	"context"
	"errors"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
)

// guestTimeout is how long a connected guest may take beyond what a call itself waits for: far above what
// one under load takes.
const guestTimeout = 30 * time.Second

// StartJob has a guest begin a job and returns its status. It waits as long as the context holds: until the
// guest answers it is open whether the command runs.
func (l *Links) StartJob(ctx context.Context, machineID string, request *guestv1.StartRequest) (*guestv1.Status, error) {
	response, err := call(ctx, l, machineID, request, guestv1.GuestServiceClient.Start)
	if err != nil {
		return nil, err
	}
	return l.status(machineID, request.GetJobId(), response.GetStatus())
}

// RunJob has a guest run a command, and returns its final status and at most as much output as was asked
// for. It waits as long as the context holds.
func (l *Links) RunJob(ctx context.Context, machineID string, request *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	response, err := call(ctx, l, machineID, request, guestv1.GuestServiceClient.Run)
	if err != nil {
		return nil, err
	}
	status, err := l.finalStatus(machineID, request.GetStart().GetJobId(), response.GetStatus())
	if err != nil {
		return nil, err
	}
	limit := request.GetMaxOutputBytes()
	return &guestv1.RunResponse{
		Status: status,
		Stdout: boundOutput(response.GetStdout(), status.GetStdout(), limit),
		Stderr: boundOutput(response.GetStderr(), status.GetStderr(), limit),
	}, nil
}

// WaitJob returns a job's status when it is done, or when the wait is over.
func (l *Links) WaitJob(ctx context.Context, machineID, jobID string, wait time.Duration) (*guestv1.Status, error) {
	request := &guestv1.WaitRequest{JobId: jobID, Wait: durationpb.New(wait)}
	response, err := callWithin(ctx, l, machineID, wait, request, guestv1.GuestServiceClient.Wait)
	if err != nil {
		return nil, err
	}
	return l.status(machineID, jobID, response.GetStatus())
}

// StopJob has a job stopped that may take a grace for it, and returns its final status.
func (l *Links) StopJob(ctx context.Context, machineID string, grace time.Duration, request *guestv1.StopRequest) (*guestv1.Status, error) {
	response, err := callWithin(ctx, l, machineID, grace, request, guestv1.GuestServiceClient.Stop)
	if err != nil {
		return nil, err
	}
	return l.finalStatus(machineID, request.GetJobId(), response.GetStatus())
}

// ReadJob returns bytes of a job's stream, no more than were asked for. Its stats are consistent in
// themselves; whether the bytes fit them is the caller's to see.
func (l *Links) ReadJob(ctx context.Context, machineID string, request *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
	response, err := callWithin(ctx, l, machineID, request.GetWait().AsDuration(), request, guestv1.GuestServiceClient.Read)
	if err != nil {
		return nil, err
	}
	return &guestv1.ReadResponse{
		Data:  response.GetData()[:min(uint64(len(response.GetData())), request.GetMaxBytes())],
		Stats: boundStats(response.GetStats()), NextKept: response.GetNextKept(),
	}, nil
}

// ListJobs returns what changed of a guest's jobs. Statuses whose ids name no job are left out.
func (l *Links) ListJobs(ctx context.Context, machineID string, request *guestv1.ListRequest) (*guestv1.ListResponse, error) {
	response, err := callWithin(ctx, l, machineID, request.GetWait().AsDuration(), request, guestv1.GuestServiceClient.List)
	if err != nil {
		return nil, err
	}
	list := &guestv1.ListResponse{NextCursor: response.GetNextCursor(), More: response.GetMore(), BootId: boundText(response.GetBootId())}
	for _, status := range response.GetStatuses() {
		if ValidJobID(status.GetJobId()) {
			list.Statuses = append(list.Statuses, l.bound(status))
		}
	}
	return list, nil
}

// ForgetJobs lets a guest drop jobs that are done; at most 1000.
func (l *Links) ForgetJobs(ctx context.Context, machineID string, ids []string) error {
	_, err := callWithin(ctx, l, machineID, 0, &guestv1.ForgetRequest{JobIds: ids}, guestv1.GuestServiceClient.Forget)
	return err
}

// WriteInput writes to a job's stdin and returns how far it was taken.
func (l *Links) WriteInput(ctx context.Context, machineID string, request *guestv1.InputRequest) (uint64, error) {
	response, err := callWithin(ctx, l, machineID, 0, request, guestv1.GuestServiceClient.Input)
	if err != nil {
		return 0, about("offset", err)
	}
	if response.GetNextOffset() < request.GetOffset() {
		return 0, protocolError(machineID, "was given stdin from %d on and reports that it has it up to %d", request.GetOffset(), response.GetNextOffset())
	}
	return response.GetNextOffset(), nil
}

// AppendInput writes behind what a job's stdin was given before, and returns where the data begins and how far
// it was taken: all of it, or nothing.
func (l *Links) AppendInput(ctx context.Context, machineID string, request *guestv1.AppendInputRequest) (offset, next uint64, err error) {
	response, err := callWithin(ctx, l, machineID, 0, request, guestv1.GuestServiceClient.AppendInput)
	if err != nil {
		return 0, 0, about("data", err)
	}
	offset, next = response.GetOffset(), response.GetNextOffset()
	if length := uint64(len(request.GetData())); next < offset || next != offset && next-offset != length {
		return 0, 0, protocolError(machineID, "was given %d bytes of stdin and reports that it has them from %d to %d", length, offset, next)
	}
	return offset, next, nil
}

// CloseInput closes a job's stdin.
func (l *Links) CloseInput(ctx context.Context, machineID string, request *guestv1.CloseInputRequest) error {
	_, err := callWithin(ctx, l, machineID, 0, request, guestv1.GuestServiceClient.CloseInput)
	return about("offset", err)
}

// SignalJob sends a signal to a job's process group.
func (l *Links) SignalJob(ctx context.Context, machineID string, request *guestv1.SignalRequest) error {
	_, err := callWithin(ctx, l, machineID, 0, request, guestv1.GuestServiceClient.Signal)
	return err
}

// method is a unary call of the guest's.
type method[Request, Response any] func(guestv1.GuestServiceClient, context.Context, *Request, ...grpc.CallOption) (*Response, error)

func call[Request, Response any](ctx context.Context, l *Links, machineID string, request *Request, of method[Request, Response]) (*Response, error) {
	var response *Response
	err := l.Call(ctx, machineID, func(ctx context.Context, guest guestv1.GuestServiceClient) (err error) {
		response, err = of(guest, ctx, request)
		return err
	})
	return response, err
}

// callWithin is a call whose answer is due within wait. It waits no longer than guestTimeout beyond that: a
// guest that keeps its connection and does not answer holds nobody up, and is GUEST_UNREACHABLE.
func callWithin[Request, Response any](ctx context.Context, l *Links, machineID string, wait time.Duration, request *Request, of method[Request, Response]) (*Response, error) {
	limited, cancel := context.WithTimeout(ctx, wait+l.opts.GuestTimeout)
	defer cancel()
	response, err := call(limited, l, machineID, request, of)
	// The guest counts the deadline too, and may be the first to say that it is over.
	late := limited.Err() != nil || errors.Is(err, context.DeadlineExceeded)
	theirs, _ := ctx.Deadline()
	if ours, _ := limited.Deadline(); err != nil && late && ctx.Err() == nil && !ours.Equal(theirs) {
		return nil, fault.New(fault.GuestUnreachable, "the guest of machine %s is connected and has not answered for %s: try again, or destroy the sandbox",
			machineID, wait+l.opts.GuestTimeout).Retry(retryHint)
	}
	return response, err
}
