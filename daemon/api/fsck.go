package api

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/backup"
	"github.com/berth-sandbox/berth/daemon/fsck"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// maxFindings bounds an answer, together with maxPageBytes.
const maxFindings = 2000

func (a *admin) Fsck(ctx context.Context, request *berthv1.FsckRequest) (*berthv1.FsckResponse, error) {
	report, err := a.Checker.Check(ctx, request.GetRepair())
	if err != nil {
		return nil, err
	}
	response := &berthv1.FsckResponse{
		Sandboxes: uint32(report.Sandboxes), Machines: uint32(report.Machines), Jobs: uint32(report.Jobs), Requests: uint32(report.Requests),
	}
	response.Findings = mostUrgent(report.Findings)
	response.LeftOut = uint32(len(report.Findings) - len(response.GetFindings()))
	countFindings(response, report.Findings)
	return response, nil
}

// countFindings counts all findings, also those that an answer leaves out.
func countFindings(response *berthv1.FsckResponse, findings []fsck.Finding) {
	for _, finding := range findings {
		switch {
		case finding.Repaired:
			response.Repaired++
			continue
		case isRepairable(finding):
			response.Repairable++
		}
		response.Remaining++
	}
}

func isRepairable(finding fsck.Finding) bool { return finding.WhyNot == "" && !finding.Repaired }

// mostUrgent returns as many findings as an answer holds, those that remain first where there are more.
func mostUrgent(findings []fsck.Finding) []*berthv1.FsckFinding {
	shown, bytes := make([]*berthv1.FsckFinding, 0, len(findings)), 0
	for _, finding := range findings {
		shown = append(shown, findingToProto(finding))
		bytes += proto.Size(shown[len(shown)-1])
	}
	if len(shown) <= maxFindings && bytes <= maxPageBytes {
		return shown
	}
	slices.SortStableFunc(shown, func(a, b *berthv1.FsckFinding) int {
		switch {
		case a.GetRepaired() == b.GetRepaired():
			return 0
		case b.GetRepaired():
			return -1
		}
		return 1
	})
	shown, bytes = shown[:min(len(shown), maxFindings)], 0
	for i, finding := range shown {
		if bytes += proto.Size(finding); bytes > maxPageBytes {
			return shown[:i]
		}
	}
	return shown
}

func findingToProto(finding fsck.Finding) *berthv1.FsckFinding {
	shown := &berthv1.FsckFinding{
		Kind: finding.Kind, Subject: cut(finding.Subject), Provider: finding.Provider, Message: cut(finding.Message), Action: finding.Action,
		Repaired: finding.Repaired, Repairable: isRepairable(finding), WhyNot: cut(finding.WhyNot),
	}
	if finding.Age > 0 {
		shown.Age = durationpb.New(finding.Age)
	}
	return shown
}

func (a *admin) Backup(request *berthv1.BackupRequest, stream grpc.ServerStreamingServer[berthv1.BackupResponse]) error {
	return a.Backups.Backup(stream.Context(), request.GetCompact(), func(chunk backup.Chunk) error {
		return stream.Send(&berthv1.BackupResponse{Data: chunk.Data, Sha256: chunk.SHA256, TotalBytes: chunk.Total})
	})
}
