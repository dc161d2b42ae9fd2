package jobs

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAJobWhoseReceiptWasDroppedIsNotTakenUpAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	machine := w.sandbox().GetMachineId()
	w.opts.Retention = time.Hour
	for _, test := range []struct {
		ended time.Duration // ago
		done  bool
		taken bool
	}{{time.Minute, true, true}, {2 * time.Hour, true, false}, {2 * time.Hour, false, true}} {
		status := &guestv1.Status{
			JobId: lifecycle.NewID("job"), Done: test.done, Durable: true, EndTime: timestamppb.New(time.Now().Add(-test.ended)),
		}
		job, err := w.adopt(w.ctx, machine, status)
		if err != nil || (job != nil) != test.taken {
			t.Errorf("a job that ended %s ago (done: %t): taken up as %v (%v)", test.ended, test.done, job, err)
		}
	}
}

func TestNoMoreCommandsAreTakenThanCanBeRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sandbox := w.sandbox().GetId()
	w.mu.Lock()
	w.spending = true // nobody gets anywhere with what gathers, as on a full disk
	w.recorded = make([]string, unrecordedMost)
	w.mu.Unlock()
	_, err := w.Run(w.ctx, call("run", ""), sandbox, &berthv1.JobSpec{Argv: []string{"true"}}, 10)
	if !fault.Is(err, fault.StoreFull) {
		t.Errorf("one more command: %v", err)
	}
	w.mu.Lock()
	w.recorded, w.spending = nil, false
	w.mu.Unlock()
	if _, err := w.Run(w.ctx, call("run", ""), sandbox, &berthv1.JobSpec{Argv: []string{"true"}}, 10); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
