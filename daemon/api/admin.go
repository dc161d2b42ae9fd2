package api

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/machines"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// infoTimeout bounds how long one provider may take to describe itself, so that an unresponsive one hides no other.
const infoTimeout = 5 * time.Second

// providerService serves berth.v1.ProviderService.
type providerService struct {
	berthv1.UnimplementedProviderServiceServer
	*api
}

func (p *providerService) ListProviders(ctx context.Context, _ *berthv1.ListProvidersRequest) (*berthv1.ListProvidersResponse, error) {
	response := &berthv1.ListProvidersResponse{}
	for i, named := range p.Sandboxes.Machines().Providers() {
		shown := providerToProto(ctx, named)
		shown.IsDefault = i == 0
		response.Providers = append(response.Providers, shown)
	}
	return response, nil
}

func providerToProto(ctx context.Context, named machines.Named) *berthv1.Provider {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := named.Provider.Info(ctx)
	if err != nil {
		return &berthv1.Provider{Name: named.Name, Message: cut(err.Error())}
	}
	shown := &berthv1.Provider{
		Name: named.Name, Isolation: machines.Isolation(info.Isolation), Healthy: info.Healthy, Message: cut(info.Message),
	}
	for _, capability := range info.Capabilities {
		shown.Capabilities = append(shown.Capabilities, &berthv1.Capability{
			Name: string(capability), Description: capability.Describe(),
		})
	}
	return shown
}

// admin serves berth.v1.AdminService.
type admin struct {
	berthv1.UnimplementedAdminServiceServer
	*api
}

func (a *admin) GetInfo(context.Context, *berthv1.GetInfoRequest) (*berthv1.GetInfoResponse, error) {
	info := a.Info()
	counts, err := a.Sandboxes.Counts()
	if err != nil {
		return nil, err
	}
	info.Sandboxes, info.OpenOperations = counts.ByState, counts.OpenOperations
	open, err := a.Jobs.Open("")
	if err != nil {
		return nil, err
	}
	info.OpenJobs = uint32(open)
	info.OutputBytes = a.Jobs.OutputBytes()
	orphans, oldest := a.Reconcile.Orphans()
	info.OrphanMachines = uint32(orphans)
	if orphans > 0 {
		info.OldestOrphan = durationpb.New(oldest)
	}
	return info, nil
}
