package api

import (
	"context"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// sandboxes serves berth.v1.SandboxService.
type sandboxes struct {
	berthv1.UnimplementedSandboxServiceServer
	*api
}

func (s *sandboxes) CreateSandbox(ctx context.Context, request *berthv1.CreateSandboxRequest) (*berthv1.CreateSandboxResponse, error) {
	call, err := s.call(ctx, "berth.v1.SandboxService/CreateSandbox", request)
	if err != nil {
		return nil, err
	}
	spec := request.GetSpec()
	switch {
	case len(request.GetPool()) > maxName:
		return nil, fault.Invalid("pool", "has %d bytes, and no name has more than %d", len(request.GetPool()), maxName)
	case request.GetPool() != "":
		return nil, fault.New(fault.PoolNotFound, "no pool %q: this broker keeps no pools yet; give spec instead", request.GetPool()).With("pool", request.GetPool())
	case request.GetIfGeneration() != 0:
		return nil, fault.Invalid("if_generation", "must be zero: there is no generation before the sandbox is created")
	case request.GetLease() != nil:
		return nil, fault.Invalid("lease", "must be absent: nobody can hold a lease on a sandbox before it is created")
	case spec == nil:
		spec = &berthv1.SandboxSpec{}
	}
	if err := validSandboxSpec(spec); err != nil {
		return nil, err
	}
	sandbox, err := s.Sandboxes.Create(ctx, call, spec)
	if err == nil {
		err = stillThere(call.RequestID, sandbox)
	}
	if err != nil {
		return nil, err
	}
	shown, err := s.sandboxToProto(sandbox)
	return &berthv1.CreateSandboxResponse{Sandbox: shown}, err
}

func (s *sandboxes) GetSandbox(ctx context.Context, request *berthv1.GetSandboxRequest) (*berthv1.GetSandboxResponse, error) {
	if err := required("sandbox_id", request.GetSandboxId()); err != nil {
		return nil, err
	}
	sandbox, operation, err := s.Sandboxes.Get(namespace(ctx), request.GetSandboxId())
	if err != nil {
		return nil, err
	}
	shown, err := s.sandboxToProto(sandbox)
	if err != nil {
		return nil, err
	}
	if operation != nil {
		shown.Progress = &berthv1.Progress{
			OperationId: operation.GetId(), Step: operation.GetStep(),
			Attempts: operation.GetAttempts() + 1, LastError: cut(operation.GetLastError()),
		}
	}
	return &berthv1.GetSandboxResponse{Sandbox: shown}, nil
}

func (s *sandboxes) ListSandboxes(ctx context.Context, request *berthv1.ListSandboxesRequest) (*berthv1.ListSandboxesResponse, error) {
	if err := validFilter(request.GetLabels(), len(request.GetStates())); err != nil {
		return nil, err
	}
	if err := validSessionKey("session_key", request.GetSessionKey()); err != nil {
		return nil, err
	}
	cut := map[string]bool{}
	page, err := s.pageOf(ctx, request, cut)
	if err != nil {
		return nil, err
	}
	records, next, revision, err := s.Sandboxes.List(namespace(ctx), sandbox.Filter{
		States: request.GetStates(), Labels: request.GetLabels(), SessionKey: request.GetSessionKey(),
	}, page)
	if err != nil {
		return nil, err
	}
	response := &berthv1.ListSandboxesResponse{NextPageToken: s.tokenOf(ctx, request, next), Revision: revision}
	for _, record := range records {
		shown, err := s.sandboxToProto(record)
		if err != nil {
			return nil, err
		}
		shown.SpecCut = cut[record.GetId()]
		response.Sandboxes = append(response.Sandboxes, shown)
	}
	return response, nil
}

func (s *sandboxes) SuspendSandbox(ctx context.Context, request *berthv1.SuspendSandboxRequest) (*berthv1.SuspendSandboxResponse, error) {
	call, err := s.call(ctx, "berth.v1.SandboxService/SuspendSandbox", request)
	if err != nil {
		return nil, err
	}
	if err := required("sandbox_id", request.GetSandboxId()); err != nil {
		return nil, err
	}
	sandbox, err := s.Sandboxes.Suspend(ctx, call, request.GetSandboxId())
	if err != nil {
		return nil, err
	}
	shown, err := s.sandboxToProto(sandbox)
	return &berthv1.SuspendSandboxResponse{Sandbox: shown}, err
}

func (s *sandboxes) ResumeSandbox(ctx context.Context, request *berthv1.ResumeSandboxRequest) (*berthv1.ResumeSandboxResponse, error) {
	call, err := s.call(ctx, "berth.v1.SandboxService/ResumeSandbox", request)
	if err != nil {
		return nil, err
	}
	if err := required("sandbox_id", request.GetSandboxId()); err != nil {
		return nil, err
	}
	sandbox, err := s.Sandboxes.Resume(ctx, call, request.GetSandboxId())
	if err != nil {
		return nil, err
	}
	shown, err := s.sandboxToProto(sandbox)
	return &berthv1.ResumeSandboxResponse{Sandbox: shown}, err
}

func (s *sandboxes) DestroySandbox(ctx context.Context, request *berthv1.DestroySandboxRequest) (*berthv1.DestroySandboxResponse, error) {
	call, err := s.call(ctx, "berth.v1.SandboxService/DestroySandbox", request)
	if err != nil {
		return nil, err
	}
	if err := required("sandbox_id", request.GetSandboxId()); err != nil {
		return nil, err
	}
	sandbox, err := s.Sandboxes.Destroy(ctx, call, request.GetSandboxId())
	if err != nil {
		return nil, err
	}
	shown, err := s.sandboxToProto(sandbox)
	return &berthv1.DestroySandboxResponse{Sandbox: shown}, err
}

// sandboxToProto is a sandbox as the API shows it.
func (s *sandboxes) sandboxToProto(record *recordv1.SandboxRecord) (*berthv1.Sandbox, error) {
	open, err := s.Jobs.Open(record.GetId())
	if err != nil {
		return nil, err
	}
	return &berthv1.Sandbox{
		Id: record.GetId(), Namespace: record.GetNamespace(), State: record.GetState(),
		Generation: record.GetGeneration(), Revision: record.GetRevision(), Spec: proto.CloneOf(record.GetSpec()),
		MachineId: record.GetMachineId(), WorkspacePath: record.GetWorkspacePath(), Isolation: record.GetIsolation(),
		Retention: record.GetRetention(), LastError: problem(record.GetLastError()), CreateTime: record.GetCreateTime(),
		ReadyTime: record.GetReadyTime(), DestroyTime: record.GetDestroyTime(), LastActivityTime: record.GetLastActivityTime(),
		Capabilities: record.GetCapabilities(), OpenJobs: uint32(open), ExpireTime: record.GetExpireTime(),
	}, nil
}

// stillThere refuses to answer a repeated create with a sandbox that has ended since: whoever takes its id
// for a sandbox to work in would be wrong.
func stillThere(requestID string, sandbox *recordv1.SandboxRecord) error {
	switch sandbox.GetState() {
	case berthv1.SandboxState_SANDBOX_STATE_DESTROYING, berthv1.SandboxState_SANDBOX_STATE_DESTROYED,
		berthv1.SandboxState_SANDBOX_STATE_FAILED, berthv1.SandboxState_SANDBOX_STATE_LOST:
		state := request.StateName(sandbox.GetState())
		return fault.New(fault.WrongState, "request_id %q made sandbox %s, which is %s now: create another under another request id",
			requestID, sandbox.GetId(), state).With("sandbox_id", sandbox.GetId()).With("state", state).With("wanted", "RUNNING")
	}
	return nil
}

func problem(p *berthv1.Problem) *berthv1.Problem {
	if len(p.GetMessage()) <= maxMessage {
		return p
	}
	return &berthv1.Problem{Reason: p.GetReason(), Message: cut(p.GetMessage()), Time: p.GetTime()}
}
