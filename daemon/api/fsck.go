package api

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/reconcile"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// mostFindings bounds an answer; together with cut it stays below what clients take.
const mostFindings = 2000

func (a *admin) Fsck(ctx context.Context, request *berthv1.FsckRequest) (*berthv1.FsckResponse, error) {
	report, err := a.Reconcile.Fsck(ctx, request.GetRepair())
	if err != nil {
		return nil, err
	}
	listed, leftOut := mostUrgent(report.Findings)
	response := &berthv1.FsckResponse{
		LeftOut:   uint32(leftOut),
		Sandboxes: uint32(report.Sandboxes), Machines: uint32(report.Machines), Jobs: uint32(report.Jobs), Requests: uint32(report.Requests),
	}
	for _, finding := range listed {
		response.Findings = append(response.Findings, showFinding(finding))
	}
	countFindings(response, report.Findings)
	return response, nil
}

// countFindings counts all findings, also those that an answer leaves out.
func countFindings(response *berthv1.FsckResponse, findings []reconcile.Finding) {
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

func isRepairable(finding reconcile.Finding) bool { return finding.WhyNot == "" && !finding.Repaired }

// mostUrgent returns as many findings as an answer holds, those that remain first where there are more,
// and how many it left out.
func mostUrgent(findings []reconcile.Finding) (listed []reconcile.Finding, leftOut int) {
	if len(findings) <= mostFindings {
		return findings, 0
	}
	listed = slices.Clone(findings)
	slices.SortStableFunc(listed, func(a, b reconcile.Finding) int {
		switch {
		case a.Repaired == b.Repaired:
			return 0
		case b.Repaired:
			return -1
		}
		return 1
	})
	return listed[:mostFindings], len(findings) - mostFindings
}

func showFinding(finding reconcile.Finding) *berthv1.FsckFinding {
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
	return a.Reconcile.Backup(stream.Context(), request.GetCompact(), func(piece reconcile.Piece) error {
		return stream.Send(&berthv1.BackupResponse{Data: piece.Data, Sha256: piece.SHA256, TotalBytes: piece.Total})
	})
}
