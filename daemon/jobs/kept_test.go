package jobs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAJobWhoseReceiptMayHaveBeenDroppedIsNotRecovered(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t, func(w *harness) { w.retention = time.Hour })
	named := func(ended time.Duration, done bool) *guestv1.Status {
		status := finished(request.NewID("job"), exited(0))
		status.Done, status.EndTime = done, timestamppb.New(time.Now().Add(-ended))
		return status
	}
	young, old, running := named(time.Minute, true), named(2*time.Hour, true), named(2*time.Hour, false)
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{old, young, running}}
	w.recovered(sandbox, young, running)
}

func TestAReceiptThatWasDroppedForItsNumberIsNotRecovered(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	ended := func() *guestv1.Status {
		status := finished(w.started(sandbox, shell("true")).GetId(), exited(0))
		status.EndTime = timestamppb.Now()
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{status}}
		w.done(status.GetJobId())
		return status
	}
	old, young := ended(), ended()
	if removed, err := w.RemoveExcess(w.ctx, 1, 10); err != nil || removed != 1 {
		t.Fatalf("%d receipts were dropped (%v), want 1", removed, err)
	}
	// As a guest names them that was not told to forget them.
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{old, young}}
	w.recovered(sandbox, young)
}

// waitDone waits for the end of a job that may have no record yet.
func (w *harness) waitDone(id string) {
	w.t.Helper()
	w.wait("the end of job "+id, func() bool {
		job, err := w.Poll(w.ctx, namespace, id, 0)
		return err == nil && record.IsDone(job)
	})
}

// recovered waits until a list was taken, and fails unless the jobs of a sandbox are these.
func (w *harness) recovered(sandbox *recordv1.SandboxRecord, want ...*guestv1.Status) {
	w.t.Helper()
	last := finished(request.NewID("job"), exited(0))
	last.EndTime = timestamppb.Now()
	w.provider.(*scriptedProvider).guest(sandbox.GetMachineId()).list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{last}}
	w.waitDone(last.GetJobId())
	jobs, _, _, err := w.List(namespace, Filter{SandboxID: sandbox.GetId()}, store.Page{Size: 100})
	must(w.t, err)
	wanted := map[string]bool{last.GetJobId(): true}
	for _, status := range want {
		wanted[status.GetJobId()] = true
	}
	for _, job := range jobs {
		if !wanted[job.GetId()] {
			w.t.Errorf("job %s is there", job.GetId())
		}
		delete(wanted, job.GetId())
	}
	if len(wanted) > 0 {
		w.t.Errorf("jobs %v are not there", wanted)
	}
}

func TestOutputThatNoReceiptNamesGoesAndOthersStay(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	left := w.done(w.started(sandbox, shell("head -c 5000 /dev/zero")).GetId())
	// As a kill between the two leaves it.
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		job, err := tx.Job(left.GetId())
		if err != nil {
			return err
		}
		job.Stdout.Kept, job.Stdout.DroppedBytes = nil, job.GetStdout().GetTotalBytes()
		return tx.PutJob(job, "", "")
	}))
	young := w.done(w.started(sandbox, shell("echo young")).GetId())
	open := w.started(sandbox, shell("head -c 5000 /dev/zero; sleep 100")) // and what runs does not count
	w.wait("its output to be copied", func() bool { return w.OutputBytes() >= 10_000 })
	must(t, w.BoundOutput(w.ctx, 1000))
	if bytes := w.OutputBytes(); bytes != 5006 {
		t.Errorf("%d bytes are kept, want those of the young one and of the open one", bytes)
	}
	if data, missing := w.readAll(young.GetId(), stdout); string(data) != "young\n" || missing > 0 {
		t.Errorf("the young one has %q and %d gaps", data, missing)
	}
	if record.IsDone(w.record(open.GetId())) {
		t.Error("the open job is done")
	}
}

func TestAJobThatLeftSomethingRunningKeepsItsReceipt(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	job := w.done(w.started(w.sandbox(), shell("echo first; sleep 100 & exit 5")).GetId())
	if removed, err := w.RemoveExcess(w.ctx, 0, 10); err != nil || removed != 0 {
		t.Errorf("%d receipts were dropped (%v), want none", removed, err)
	}
	stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), nil)
	must(t, err)
	w.wantExit(stopped, 5)
	w.wait("its output to be sealed", func() bool { return record.IsComplete(w.record(job.GetId())) })
	if removed, err := w.RemoveExcess(w.ctx, 0, 10); err != nil || removed != 1 {
		t.Errorf("%d receipts were dropped (%v), want 1", removed, err)
	}
}

func TestKeptOutputThatIsNotThereIsTold(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(path string) error{
		"removed":   os.Remove,
		"truncated": func(path string) error { return os.Truncate(path, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			job := w.done(w.started(w.sandbox(), shell("echo it")).GetId())
			must(t, harm(filepath.Join(w.outputDir, job.GetId(), "stdout.0")))
			if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, 0, 10, 0); !fault.Is(err, fault.OutputExpired) {
				t.Errorf("read: %v", err)
			}
			if ran, err := w.fromReceipt(job, 100); err != nil || len(ran.Stdout.GetHead()) > 0 || len(ran.Stdout.GetTail()) > 0 {
				t.Errorf("head and tail: %v (%v)", ran, err)
			}
			var seen gaps
			must(t, w.output.Replay(job.GetId(), stdout, job.GetStdout(), 0, &seen))
			if len(seen.of) != 1 || seen.of[0].GetRange().GetTo() != 3 || seen.bytes != 0 {
				t.Errorf("replayed: gaps %v, %d bytes", seen.of, seen.bytes)
			}
		})
	}
}

// gaps is a peer that counts.
type gaps struct {
	Peer
	of    []*berthv1.OutputGap
	bytes int
}

func (g *gaps) Gap(gap *berthv1.OutputGap) error { g.of = append(g.of, gap); return nil }

func (g *gaps) Chunk(chunk *berthv1.OutputChunk) error { g.bytes += len(chunk.GetData()); return nil }

// A job that was started after the backup of which this ledger is keeps its output, whoever brings it home.
func TestAJobThatWasFoundKeepsItsOutputWhoeverBringsItHome(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	job := w.started(w.sandbox(), shell("echo it; sleep 0.5"))
	w.Unfollow(job.GetMachineId()) // whoever is attached to it comes first
	w.wait("it to be recorded as running", func() bool { return record.HasBegun(w.record(job.GetId())) })
	found := w.record(job.GetId())
	found.StartDeadline, found.Spec = nil, &berthv1.JobSpec{}
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error { return tx.PutJob(proto.CloneOf(found), "", "") }))
	must(t, w.Reattach(w.ctx, namespace, job.GetId(), 0, 0, &listener{started: make(chan string, 1)}))
	w.wait("its end to be recorded", func() bool { return record.IsDone(w.record(job.GetId())) })
	if data, missing := w.readAll(job.GetId(), stdout); string(data) != "it\n" || missing > 0 {
		t.Errorf("it has %q and %d gaps", data, missing)
	}
}

// A broker that was killed between the record of an abandoned command and its end leaves one that its guest
// may never have heard of.
func TestACommandWhoseCallerWentAwayAndThatNobodyKnowsIsLostByThat(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	begun := w.started(w.sandbox(), shell("sleep 100"))
	abandoned := proto.CloneOf(begun)
	abandoned.Id, abandoned.State, abandoned.StartDeadline = request.NewID("job"), berthv1.JobState_JOB_STATE_RUNNING, nil
	abandoned.Detached, abandoned.KeepOutput = false, false
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error { return tx.PutJob(abandoned, "job.abandoned", "") }))
	w.restart()
	w.wantCause(w.done(abandoned.GetId()), berthv1.Cause_CAUSE_LOST, "disconnected:")
	if record.IsDone(w.record(begun.GetId())) {
		t.Error("the job beside it is done as well")
	}
}
