package api

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/reconcile"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAFindingIsRepairableWhenNothingIsInTheWay(t *testing.T) {
	for _, test := range []struct {
		name    string
		finding reconcile.Finding
		want    bool
	}{
		{"one that would be mended", reconcile.Finding{Kind: "k", Age: time.Second}, true},
		{"one that was mended", reconcile.Finding{Kind: "k", Repaired: true}, false},
		{"one that can't be mended now", reconcile.Finding{Kind: "k", WhyNot: "later"}, false},
	} {
		shown := showFinding(test.finding)
		if shown.GetRepairable() != test.want || shown.GetRepaired() != test.finding.Repaired || shown.GetWhyNot() != test.finding.WhyNot {
			t.Errorf("%s: %v", test.name, shown)
		}
		if (shown.Age != nil) != (test.finding.Age != 0) {
			t.Errorf("%s: its age is %v", test.name, shown.GetAge())
		}
		counted := &berthv1.FsckResponse{}
		countFindings(counted, []reconcile.Finding{test.finding})
		if (counted.GetRepairable() == 1) != test.want || (counted.GetRepaired() == 1) != test.finding.Repaired || counted.GetRepaired()+counted.GetRemaining() != 1 {
			t.Errorf("%s: it is counted as %v", test.name, counted)
		}
	}
}

func TestAnAnswerHoldsWhatRemainsFirstAndIsNeverTooLarge(t *testing.T) {
	long := strings.Repeat("ü", 1<<20)
	var findings []reconcile.Finding
	for i := range 2 * mostFindings {
		finding := reconcile.Finding{Kind: "k", Subject: long, Message: long, Repaired: i%4 != 0}
		if !finding.Repaired {
			finding.WhyNot = long
		}
		findings = append(findings, finding)
	}
	listed, leftOut := mostUrgent(findings)
	if len(listed) != mostFindings || leftOut != mostFindings {
		t.Fatalf("%d are listed, %d are left out", len(listed), leftOut)
	}
	response := &berthv1.FsckResponse{}
	countFindings(response, findings)
	if response.GetRemaining() != mostFindings/2 || response.GetRepaired() != mostFindings*3/2 || response.GetRepairable() != 0 {
		t.Errorf("of all, %d remain, %d of them repairable, and %d were mended", response.GetRemaining(), response.GetRepairable(), response.GetRepaired())
	}
	remain := 0
	for _, finding := range listed {
		if !finding.Repaired {
			remain++
		}
		response.Findings = append(response.Findings, showFinding(finding))
	}
	if remain != mostFindings/2 || listed[0].Repaired {
		t.Errorf("%d of them remain, want %d", remain, mostFindings/2)
	}
	if size := proto.Size(response); size > 16<<20 { // what the client takes
		t.Errorf("the answer has %d bytes", size)
	}
	if few, leftOut := mostUrgent(findings[:3]); len(few) != 3 || leftOut != 0 {
		t.Errorf("of three, %d are listed", len(few))
	}
}
