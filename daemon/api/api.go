// Package api is the broker's gRPC face: it validates requests, maps proto to the packages below and
// back, and turns their errors into statuses with details. It decides nothing: it keeps no record,
// opens no transaction and calls no provider or guest.
package api

import (
	"context"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/daemon/backup"
	"github.com/berth-sandbox/berth/daemon/fsck"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	"github.com/berth-sandbox/berth/daemon/request"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// BodyHasher hashes a request's body, so that a repeated request can be told from another one.
type BodyHasher interface {
	BodyHash(method string, body proto.Message) []byte
}

// Options configure the services. All are required.
type Options struct {
	Sandboxes   *lifecycle.Service
	Jobs        *jobs.Service
	Reconcile   *reconcile.Service
	Checker     *fsck.Service
	Backups     *backup.Service
	Hasher      BodyHasher
	HashVersion uint32
	Info        func() *berthv1.GetInfoResponse // what the wiring knows of this process
}

// Register adds all services of berth.v1 to a server. A call that this build does not implement is
// answered with UNIMPLEMENTED.
func Register(server grpc.ServiceRegistrar, opts Options) {
	a := &api{opts}
	berthv1.RegisterSandboxServiceServer(server, &sandboxes{api: a})
	berthv1.RegisterJobServiceServer(server, &jobService{api: a})
	berthv1.RegisterProviderServiceServer(server, &providerService{api: a})
	berthv1.RegisterAdminServiceServer(server, &admin{api: a})
	berthv1.RegisterFileServiceServer(server, berthv1.UnimplementedFileServiceServer{})
	berthv1.RegisterCheckpointServiceServer(server, berthv1.UnimplementedCheckpointServiceServer{})
	berthv1.RegisterLeaseServiceServer(server, berthv1.UnimplementedLeaseServiceServer{})
	berthv1.RegisterPoolServiceServer(server, berthv1.UnimplementedPoolServiceServer{})
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
func (a *api) call(ctx context.Context, method string, message mutation) (request.Call, error) {
	call := request.Call{
		Namespace: namespace(ctx), RequestID: message.GetRequestId(), Method: method,
		IfGeneration: message.GetIfGeneration(), Lease: message.GetLease(), HashVersion: a.HashVersion,
	}
	if err := validRequestID(call.RequestID); err != nil {
		return call, err
	}
	if err := validID("lease.id", call.Lease.GetId()); err != nil {
		return call, err
	}
	if call.RequestID != "" {
		call.BodyHash = a.Hasher.BodyHash(method, message)
	}
	return call, nil
}

// namespace is the caller's.
func namespace(ctx context.Context) string { return auth.FromContext(ctx).Namespace }

func itoa(n int) string { return strconv.Itoa(n) }
