package jobs

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
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

func TestAReceiptThatWasDroppedForItsNumberIsNotTakenUpAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sandbox := w.sandbox()
	old := w.done(w.started(sandbox, shell("true")).GetId())
	young := w.done(w.started(sandbox, shell("true")).GetId())
	if removed, err := w.RemoveExcess(w.ctx, 1, 10); err != nil || removed != 1 {
		t.Fatalf("%d receipts were dropped (%v), want 1", removed, err)
	}
	for _, job := range []*recordv1.JobRecord{old, young} {
		// As a guest names it that was not told to forget it.
		status := &guestv1.Status{JobId: job.GetId(), Done: true, Durable: true, EndTime: job.GetEndTime()}
		taken, err := w.adopt(w.ctx, sandbox.GetMachineId(), status)
		if err != nil || (taken != nil) != (job == young) {
			t.Errorf("job %s is taken up as %v (%v)", job.GetId(), taken, err)
		}
	}
}

func TestOutputThatNoReceiptNamesGoesAndOthersStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sandbox := w.sandbox()
	left := w.done(w.started(sandbox, shell("head -c 5000 /dev/zero")).GetId())
	// As a kill between the two leaves it.
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		_, err := nameNoOutput(tx, left.GetId(), "")
		return err
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
	if isDone(w.record(open.GetId())) {
		t.Error("the open job is done")
	}
}

func TestAJobThatLeftSomethingRunningKeepsItsReceipt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	job := w.done(w.started(w.sandbox(), shell("echo first; sleep 100 & exit 5")).GetId())
	if removed, err := w.RemoveExcess(w.ctx, 0, 10); err != nil || removed != 0 {
		t.Errorf("%d receipts were dropped (%v), want none", removed, err)
	}
	stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), nil)
	must(t, err)
	w.wantExit(stopped, 5)
	w.wait("its output to be sealed", func() bool { return isComplete(w.record(job.GetId())) })
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
			w := newWorld(t)
			job := w.done(w.started(w.sandbox(), shell("echo it")).GetId())
			must(t, harm(filepath.Join(w.outputDir, job.GetId(), "stdout.0")))
			if _, err := w.ReadOutput(w.ctx, namespace, job.GetId(), stdout, 0, 10, 0); !fault.Is(err, fault.OutputExpired) {
				t.Errorf("read: %v", err)
			}
			if ran, err := w.fromReceipt(job, 100); err != nil || len(ran.Stdout.GetHead()) > 0 || len(ran.Stdout.GetTail()) > 0 {
				t.Errorf("head and tail: %v (%v)", ran, err)
			}
			var seen gaps
			must(t, w.replayStream(job, stdout, 0, &seen))
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
	w := newWorld(t)
	job := w.started(w.sandbox(), shell("echo it; sleep 0.5"))
	w.Unfollow(job.GetMachineId()) // whoever is attached to it comes first
	w.wait("it to be recorded as running", func() bool { return hasBegun(w.record(job.GetId())) })
	found := w.record(job.GetId())
	found.StartDeadline, found.Spec = nil, &berthv1.JobSpec{}
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error { return tx.PutJob(proto.CloneOf(found), "", "") }))
	status, err := w.waitInGuest(w.ctx, job.GetMachineId(), job.GetId(), soon)
	must(t, err)
	_, err = w.receipt(w.ctx, found, status)
	must(t, err)
	w.wait("its end to be recorded", func() bool { return isDone(w.record(job.GetId())) })
	if data, missing := w.readAll(job.GetId(), stdout); string(data) != "it\n" || missing > 0 {
		t.Errorf("it has %q and %d gaps", data, missing)
	}
}

// A broker that was killed between the record of an abandoned command and its end leaves one that its guest
// may never have heard of.
func TestACommandWhoseCallerWentAwayAndThatNobodyKnowsIsLostByThat(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	begun := w.started(w.sandbox(), shell("sleep 100"))
	abandoned := proto.CloneOf(begun)
	abandoned.Id, abandoned.State, abandoned.StartDeadline = lifecycle.NewID("job"), berthv1.JobState_JOB_STATE_RUNNING, nil
	abandoned.Detached, abandoned.KeepOutput = false, false
	must(t, w.ledger.Update(w.ctx, func(tx *store.Tx) error { return tx.PutJob(abandoned, "job.abandoned", "") }))
	w.restart()
	w.wantCause(w.done(abandoned.GetId()), berthv1.Cause_CAUSE_LOST, "disconnected:")
	if isDone(w.record(begun.GetId())) {
		t.Error("the job beside it is done as well")
	}
}

func TestNoMoreCommandsAreTakenThanCanBeRecorded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sandbox := w.sandbox().GetId()
	w.mu.Lock()
	w.spending = true // nobody gets anywhere with what gathers, as on a full disk
	for i := range unrecordedMost {
		w.recorded[strconv.Itoa(i)] = true
	}
	w.mu.Unlock()
	_, err := w.Run(w.ctx, call("run", ""), sandbox, &berthv1.JobSpec{Argv: []string{"true"}}, 10)
	if !fault.Is(err, fault.StoreFull) {
		t.Errorf("one more command: %v", err)
	}
	w.mu.Lock()
	clear(w.recorded)
	w.spending = false
	w.mu.Unlock()
	if _, err := w.Run(w.ctx, call("run", ""), sandbox, &berthv1.JobSpec{Argv: []string{"true"}}, 10); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
