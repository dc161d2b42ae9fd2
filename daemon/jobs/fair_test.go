package jobs

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ended writes receipts of a sandbox, one a second from a time on, and returns their ids.
func (w *harness) ended(sandboxID string, from time.Time, n int) []string {
	w.t.Helper()
	ids := make([]string, n)
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		for i := range ids {
			ids[i] = request.NewID("job")
			job := &recordv1.JobRecord{
				Id: ids[i], Namespace: namespace, SandboxId: sandboxID, MachineId: "m_" + sandboxID, Spec: shell("true"),
				State: berthv1.JobState_JOB_STATE_DONE, Outcome: exited(0), Stdout: sealedStats(0), Stderr: sealedStats(0),
				CreateTime: timestamppb.New(from), DoneTime: timestamppb.New(from.Add(time.Duration(i) * time.Second)),
			}
			if err := tx.PutJob(job, "", ""); err != nil {
				return err
			}
		}
		return nil
	}))
	return ids
}

// wantReceipts fails unless those receipts are there, or gone.
func (w *harness) wantReceipts(whose string, ids []string, there bool) {
	w.t.Helper()
	for i, id := range ids {
		if _, err := w.Poll(w.ctx, namespace, id, 0); fault.Is(err, fault.JobNotFound) == there {
			w.t.Errorf("receipt %d of the %s sandbox: %v", i, whose, err)
		}
	}
}

func TestANoisySandboxPushesOutOnlyItsOwnReceipts(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	now := time.Now()
	quiet := w.ended("sb_quiet", now.Add(-2*time.Hour), 5)
	noisy := w.ended("sb_noisy", now.Add(-time.Hour), 200)
	other := w.ended("sb_other", now.Add(-30*time.Minute), 40)
	removed := 0
	for { // as the look each minute does it
		n, err := w.RemoveExcess(w.ctx, 100, 30)
		must(t, err)
		if removed += n; n == 0 {
			break
		}
	}
	if removed != 145 {
		t.Errorf("%d receipts were dropped, want 145", removed)
	}
	w.wantReceipts("quiet", quiet, true)
	w.wantReceipts("other", other, true)
	w.wantReceipts("noisy", noisy[:145], false)
	w.wantReceipts("noisy", noisy[145:], true)
}

func TestWhatANoisySandboxPushedOutDoesNotKeepAQuietOnesCommandsFromBeingFound(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	before := finished(request.NewID("job"), exited(0)) // it has no record, as after a kill of the broker
	before.EndTime = timestamppb.New(time.Now().Add(-time.Minute))
	w.ended("sb_noisy", time.Now().Add(-10*time.Second), 5)
	if removed, err := w.RemoveExcess(w.ctx, 1, 10); err != nil || removed != 4 {
		t.Fatalf("%d receipts were dropped (%v), want 4", removed, err)
	}
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{before}}
	w.recovered(sandbox, before)
}

func TestANoisySandboxPushesOutOnlyItsOwnOutput(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	quiet, noisy := w.sandbox(), w.sandbox()
	write := func(sandbox *recordv1.SandboxRecord, bytes int) string {
		return w.done(w.started(sandbox, shell(fmt.Sprintf("head -c %d /dev/zero", bytes))).GetId()).GetId()
	}
	first := write(quiet, 1000) // the oldest of all
	var of []string
	for range 5 {
		of = append(of, write(noisy, 1000))
	}
	must(t, w.BoundOutput(w.ctx, 4000))
	if data, missing := w.readAll(first, stdout); len(data) != 1000 || missing > 0 {
		t.Errorf("the quiet sandbox has %d bytes and %d gaps", len(data), missing)
	}
	for i, id := range of {
		if data, _ := w.readAll(id, stdout); (len(data) == 0) != (i < 3) {
			t.Errorf("of the noisy sandbox's output %d there are %d bytes", i, len(data))
		}
	}
}

func TestTheOutputOfAJobThatLeftSomethingRunningIsBoundToo(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.done(w.started(sandbox, shell("head -c 5000 /dev/zero; sleep 100 & exit 5")).GetId())
	if record.IsComplete(job) || record.KeptBytes(job) != 5000 {
		t.Fatalf("its receipt says %v", job.GetStdout())
	}
	must(t, w.BoundOutput(w.ctx, 1000))
	want := func(job *recordv1.JobRecord) {
		t.Helper()
		if stats := job.GetStdout(); len(stats.GetKept()) > 0 || stats.GetTotalBytes() != 5000 || stats.GetDroppedBytes() != 5000 || stats.GetEndAtExit() != 5000 {
			t.Errorf("its receipt says %v", stats)
		}
		if bytes := w.OutputBytes(); bytes != 0 {
			t.Errorf("%d bytes are stored", bytes)
		}
		w.wantExit(job, 5)
	}
	want(w.record(job.GetId()))
	_, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), nil)
	must(t, err)
	w.wait("its output to be sealed", func() bool { return record.IsComplete(w.record(job.GetId())) })
	want(w.record(job.GetId())) // it is not fetched again
	if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, 0, 10, 0); !fault.Is(err, fault.OutputExpired) {
		t.Errorf("read: %v", err)
	}
}
