package guest

import (
	"cmp"
	"context"
	"errors"
	"os"
	"sync/atomic"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
	"github.com/berth-sandbox/berth/providers/guest/supervise"
)

// errorDomain is the domain of the reasons in this guest's errors.
const errorDomain = "berth.guest.v1"

const (
	// tokenLength is a machine's token's, in bytes.
	tokenLength = 32
	// maxEntropy bounds the entropy taken from a caller, in bytes: more than the kernel's pool has.
	maxEntropy = 4096
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

// Attach follows a job's output and feeds its input.
func (s *service) Attach(stream guestv1.GuestService_AttachServer) error {
	_, err := answer(&struct{}{}, s.supervisor.Attach(attachStream{stream}))
	return err
}

// Input writes to a job's stdin.
func (s *service) Input(ctx context.Context, r *guestv1.InputRequest) (*guestv1.InputResponse, error) {
	return answer(s.supervisor.Input(ctx, r))
}

// AppendInput writes behind what a job's stdin was given before.
func (s *service) AppendInput(ctx context.Context, r *guestv1.AppendInputRequest) (*guestv1.AppendInputResponse, error) {
	return answer(s.supervisor.AppendInput(ctx, r))
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

// List returns what changed.
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

// Resumed continues after a freeze, possibly as another machine.
func (s *service) Resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedResponse, error) {
	if n := len(r.GetToken()); n != 0 && n != tokenLength {
		return nil, status.Errorf(codes.InvalidArgument, "a token has %d bytes, not %d", tokenLength, n)
	}
	addEntropy(r.GetEntropy())
	response, err := answer(s.supervisor.Resumed(ctx, r))
	if err == nil {
		s.become(r)
	}
	return response, err
}

// become changes the guest's identity. Connections that were proved before stay proved.
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

// addEntropy mixes fresh randomness into the kernel's pool, if it can: copies of a machine would draw the
// same numbers.
func addEntropy(entropy []byte) {
	device, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return
	}
	_, _ = device.Write(entropy[:min(len(entropy), maxEntropy)])
	_ = device.Close()
}

// answer converts an error to its gRPC status.
func answer[R any](response *R, err error) (*R, error) {
	if err == nil {
		return response, nil
	}
	var refused *refusal.Error
	if !errors.As(err, &refused) {
		if _, known := status.FromError(err); known {
			return nil, err // the connection's own
		}
		return nil, status.FromContextError(err).Err()
	}
	// The detail is what tells a refusal from a status that a library on the way made.
	reason := cmp.Or(refused.Reason, "REFUSED")
	st := status.New(codeOf(refused.Kind), refused.Text)
	if detailed, err := st.WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: errorDomain}); err == nil {
		st = detailed
	}
	return nil, st.Err()
}

func codeOf(kind refusal.Kind) codes.Code {
	switch kind {
	case refusal.Invalid:
		return codes.InvalidArgument
	case refusal.Unknown:
		return codes.NotFound
	case refusal.Precondition:
		return codes.FailedPrecondition
	case refusal.Unsupported:
		return codes.Unimplemented
	case refusal.NoSpace:
		return codes.ResourceExhausted
	case refusal.Failed:
	}
	return codes.Internal
}
