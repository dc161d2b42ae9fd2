// Package api is the broker's gRPC face: it validates requests, maps proto to the rooms below and
// back, and turns their errors into statuses with details. It decides nothing: it holds no state,
// opens no transaction and calls no provider or guest.
package api

import (
	"context"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// DefaultNamespace is everybody's until credentials say otherwise.
const DefaultNamespace = "default"

// BodyHasher hashes a request's body, so that a repeated request can be told from another one.
type BodyHasher interface {
	BodyHash(method string, body proto.Message) []byte
}

// Options configure the services. All are required.
type Options struct {
	Sandboxes   *lifecycle.Service
	Jobs        *jobs.Service
	Reconcile   *reconcile.Service
	Hasher      BodyHasher
	HashVersion uint32
	Info        func() *berthv1.GetInfoResponse // what the wiring knows of this process
	Log         *slog.Logger
}

// Register adds the services that this build implements to a server. A call that it does not
// implement is answered with UNIMPLEMENTED.
func Register(server *grpc.Server, opts Options) {
	a := &api{opts}
	berthv1.RegisterSandboxServiceServer(server, &sandboxes{api: a})
	berthv1.RegisterJobServiceServer(server, &jobService{api: a})
	berthv1.RegisterProviderServiceServer(server, &providerService{api: a})
	berthv1.RegisterAdminServiceServer(server, &admin{api: a})
}

type api struct{ Options }

// mutation is what every mutating request begins with.
type mutation interface {
	proto.Message
	GetRequestId() string
	GetIfGeneration() uint64
	GetLease() *berthv1.LeaseRef
}

// call reads the common fields of a mutating request.
func (a *api) call(method string, request mutation) (lifecycle.Call, error) {
	call := lifecycle.Call{
		Namespace: DefaultNamespace, RequestID: request.GetRequestId(), Method: method,
		IfGeneration: request.GetIfGeneration(), Lease: request.GetLease(), HashVersion: a.HashVersion,
	}
	if err := validRequestID(call.RequestID); err != nil {
		return call, err
	}
	if call.RequestID != "" {
		call.BodyHash = a.Hasher.BodyHash(method, request)
	}
	return call, nil
}

// StreamInterceptor maps every streaming call's error and logs the call.
func StreamInterceptor(log *slog.Logger) grpc.StreamServerInterceptor {
	return func(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		begin := time.Now()
		err := handler(service, stream)
		if err == nil {
			log.Debug("stream", "method", info.FullMethod, "took", time.Since(begin))
			return nil
		}
		mapped := toStatus(err)
		logFailure(stream.Context(), log, info.FullMethod, mapped, err, time.Since(begin))
		return mapped.Err()
	}
}

// Interceptor maps every unary call's error and logs the call.
func Interceptor(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		begin := time.Now()
		response, err := handler(ctx, request)
		if err == nil {
			log.Debug("call", "method", info.FullMethod, "took", time.Since(begin))
			return response, nil
		}
		mapped := toStatus(err)
		logFailure(ctx, log, info.FullMethod, mapped, err, time.Since(begin))
		return nil, mapped.Err()
	}
}
