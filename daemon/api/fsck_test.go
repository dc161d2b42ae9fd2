package api

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fsck"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAFindingIsRepairableWhenNothingIsInTheWay(t *testing.T) {
	for _, test := range []struct {
		name    string
		finding fsck.Finding
		want    bool
	}{
		{"one that would be repaired", fsck.Finding{Kind: "k", Age: time.Second}, true},
		{"one that was repaired", fsck.Finding{Kind: "k", Repaired: true}, false},
		{"one that can't be repaired now", fsck.Finding{Kind: "k", WhyNot: "later"}, false},
	} {
		shown := findingToProto(test.finding)
		if shown.GetRepairable() != test.want || shown.GetRepaired() != test.finding.Repaired || shown.GetWhyNot() != test.finding.WhyNot {
			t.Errorf("%s: %v", test.name, shown)
		}
		if (shown.Age != nil) != (test.finding.Age != 0) {
			t.Errorf("%s: its age is %v", test.name, shown.GetAge())
		}
		counted := &berthv1.FsckResponse{}
		countFindings(counted, []fsck.Finding{test.finding})
		if (counted.GetRepairable() == 1) != test.want || (counted.GetRepaired() == 1) != test.finding.Repaired || counted.GetRepaired()+counted.GetRemaining() != 1 {
			t.Errorf("%s: it is counted as %v", test.name, counted)
		}
	}
}

func TestAnAnswerHoldsWhatRemainsFirstAndIsNeverTooLarge(t *testing.T) {
	long := strings.Repeat("ü", 1<<20)
	var findings []fsck.Finding
	for i := range 2 * maxFindings {
		finding := fsck.Finding{Kind: "k", Subject: long, Message: long, Repaired: i%4 != 0}
		if !finding.Repaired {
			finding.WhyNot = long
		}
		findings = append(findings, finding)
	}
	response := &berthv1.FsckResponse{Findings: mostUrgent(findings)}
	countFindings(response, findings)
	if response.GetRemaining() != maxFindings/2 || response.GetRepaired() != maxFindings*3/2 || response.GetRepairable() != 0 {
		t.Errorf("of all, %d remain, %d of them repairable, and %d were repaired", response.GetRemaining(), response.GetRepairable(), response.GetRepaired())
	}
	if size := proto.Size(response); size > maxPageBytes+1024 || size < maxPageBytes/2 {
		t.Errorf("the answer has %d bytes", size)
	}
	for i, finding := range response.GetFindings() {
		if finding.GetRepaired() {
			t.Errorf("finding %d is repaired, and some that remain are left out", i)
		}
	}
	var short []fsck.Finding
	for i := range 2 * maxFindings {
		short = append(short, fsck.Finding{Kind: "k", Repaired: i%4 != 0})
	}
	listed := mostUrgent(short)
	if len(listed) != maxFindings || listed[maxFindings/2-1].GetRepaired() || !listed[maxFindings/2].GetRepaired() {
		t.Errorf("of short ones %d are listed", len(listed))
	}
	if few := mostUrgent(short[:3]); len(few) != 3 || few[0].GetRepaired() || !few[1].GetRepaired() {
		t.Errorf("of three, %d are listed", len(few))
	}
}
