package guest

import (
	"context"
	"errors"
	"os"
	"sync/atomic"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/supervise"
)

// errorDomain is the domain of the reasons in this guest's errors.
const errorDomain = "berth.guest.v1"

const (
	// tokenLength is a machine's token's, in bytes.
	tokenLength = 32
	// entropyMost is what is taken of a caller's entropy, in bytes: more than the kernel's pool holds.
	entropyMost = 4096
)

// service answers the broker's calls.
type service struct {
	guestv1.UnimplementedGuestServiceServer
	supervisor *supervise.Supervisor
	identity   atomic.Pointer[identity]
}

// Start begins a job.
func (s *service) Start(_ context.Context, r *guestv1.StartRequest) (*guestv1.StartResponse, error) {
	return answer(s.supervisor.Start(r))
}

// Run begins a job and waits for it.
func (s *service) Run(ctx context.Context, r *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	return answer(s.supervisor.Run(ctx, r))
}

// Attach stays with a job.
func (s *service) Attach(stream guestv1.GuestService_AttachServer) error {
	_, err := answer(&struct{}{}, s.supervisor.Attach(attachStream{stream}))
	return err
}

// Input writes to a job's stdin.
func (s *service) Input(ctx context.Context, r *guestv1.InputRequest) (*guestv1.InputResponse, error) {
	return answer(s.supervisor.Input(ctx, r))
}

// CloseInput closes a job's stdin.
func (s *service) CloseInput(_ context.Context, r *guestv1.CloseInputRequest) (*guestv1.CloseInputResponse, error) {
	return answer(s.supervisor.CloseInput(r))
}

// Resize sets a terminal's size.
func (s *service) Resize(_ context.Context, r *guestv1.ResizeRequest) (*guestv1.ResizeResponse, error) {
	return answer(s.supervisor.Resize(r))
}

// Read returns output.
func (s *service) Read(ctx context.Context, r *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
	return answer(s.supervisor.Read(ctx, r))
}

// Wait waits for a job.
func (s *service) Wait(ctx context.Context, r *guestv1.WaitRequest) (*guestv1.WaitResponse, error) {
	return answer(s.supervisor.Wait(ctx, r))
}

// Signal signals a job.
func (s *service) Signal(_ context.Context, r *guestv1.SignalRequest) (*guestv1.SignalResponse, error) {
	return answer(s.supervisor.Signal(r))
}

// Stop ends a job.
func (s *service) Stop(ctx context.Context, r *guestv1.StopRequest) (*guestv1.StopResponse, error) {
	return answer(s.supervisor.StopJob(ctx, r))
}

// List tells what changed.
func (s *service) List(ctx context.Context, r *guestv1.ListRequest) (*guestv1.ListResponse, error) {
	return answer(s.supervisor.List(ctx, r))
}

// Forget removes finished jobs.
func (s *service) Forget(_ context.Context, r *guestv1.ForgetRequest) (*guestv1.ForgetResponse, error) {
	return answer(s.supervisor.Forget(r))
}

// Quiesce prepares for a freeze.
func (s *service) Quiesce(_ context.Context, r *guestv1.QuiesceRequest) (*guestv1.QuiesceResponse, error) {
	return answer(s.supervisor.Quiesce(r), nil)
}

// Resumed goes on after a freeze, perhaps as another machine.
func (s *service) Resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedResponse, error) {
	if n := len(r.GetToken()); n != 0 && n != tokenLength {
		return nil, status.Errorf(codes.InvalidArgument, "a token has %d bytes, not %d", tokenLength, n)
	}
	stirEntropy(r.GetEntropy())
	response, err := answer(s.supervisor.Resumed(ctx, r))
	if err == nil {
		s.become(r)
	}
	return response, err
}

// become is who the guest is from now on. Connections that were proved before stay so.
func (s *service) become(r *guestv1.ResumedRequest) {
	for {
		before := s.identity.Load()
		now := *before
		if r.GetMachineId() != "" {
			now.machineID = r.GetMachineId()
		}
		if len(r.GetToken()) > 0 {
			now.token = r.GetToken()
		}
		if r.GetGeneration() != 0 {
			now.generation = r.GetGeneration()
		}
		if s.identity.CompareAndSwap(before, &now) {
			return
		}
	}
}

// stirEntropy gives the kernel fresh randomness, as far as it takes any: copies of a machine would draw
// the same numbers.
func stirEntropy(entropy []byte) {
	device, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return
	}
	_, _ = device.Write(entropy[:min(len(entropy), entropyMost)])
	_ = device.Close()
}

// answer gives an error its gRPC code.
func answer[R any](response *R, err error) (*R, error) {
	if err == nil {
		return response, nil
	}
	var refusal *supervise.Refusal
	if !errors.As(err, &refusal) {
		if _, known := status.FromError(err); known {
			return nil, err // the connection's own
		}
		return nil, status.FromContextError(err).Err()
	}
	st := status.New(codeOf(refusal.Kind), refusal.Text)
	if refusal.Reason != "" {
		detailed, err := st.WithDetails(&errdetails.ErrorInfo{Reason: refusal.Reason, Domain: errorDomain})
		if err == nil {
			st = detailed
		}
	}
	return nil, st.Err()
}

func codeOf(kind supervise.Kind) codes.Code {
	switch kind {
	case supervise.Invalid:
		return codes.InvalidArgument
	case supervise.Unknown:
		return codes.NotFound
	case supervise.Precondition:
		return codes.FailedPrecondition
	case supervise.Unsupported:
		return codes.Unimplemented
	case supervise.NoRoom:
		return codes.ResourceExhausted
	case supervise.Failed:
	}
	return codes.Internal
}
