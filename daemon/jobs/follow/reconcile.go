package follow

import (
	"context"
	"errors"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// take brings the ledger up to what a guest says of one job.
func (f *Follower) take(ctx context.Context, machineID string, status *guestv1.Status) error {
	if !status.GetDone() && f.Unrecorded.Find(status.GetJobId()) != nil {
		return nil // its caller is attached here, and gives it its record
	}
	job, err := f.recover(ctx, machineID, status)
	if err != nil || job == nil {
		return err
	}
	switch {
	case status.GetDone():
		_, err = f.Receipts.Import(ctx, machineID, status)
		return err
	case record.IsDone(job):
		// The ledger's word is final: what runs against it, a start that arrived too late, is ended.
		f.Log.Warn("a command runs although its job has ended; it is stopped", "machine", machineID, "job", job.GetId())
		_, err = f.Links.StopJob(ctx, machineID, 0, &guestv1.StopRequest{
			JobId: job.GetId(), Grace: durationpb.New(0), Reason: "too_late: its job had ended in the ledger",
		})
		return err
	case !record.HasBegun(job):
		f.Starter.Running(ctx, status)
	}
	if !status.GetDurable() {
		f.Unrecorded.Await(machineID, job.GetId())
		return nil
	}
	return f.Receipts.CopyHeads(ctx, machineID, job, status)
}

// recover returns the ledger's record of a job that a guest names. A command that was attached, and
// so was not written down before it began, gets its record now; so does one that was started after the
// backup that this ledger is: that one was durable, and its output is kept. Nil: it is none of this
// machine's.
func (f *Follower) recover(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	var job *recordv1.JobRecord
	gone := false
	err := f.Store.View(func(tx *store.Tx) (err error) {
		gone = f.outlived(tx, status)
		job, err = tx.Job(status.GetJobId())
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case job.GetMachineId() == machineID:
		return job, nil
	case job != nil:
		f.Log.Warn("a guest names a job of another machine; ignored", "machine", machineID, "job", job.GetId())
		return nil, nil
	case gone:
		f.Receipts.Forget(ctx, machineID, status.GetJobId())
		return nil, nil
	case !f.mayRecover(machineID):
		return nil, nil
	}
	err = f.Store.Update(ctx, func(tx *store.Tx) error {
		job, err = tx.Job(status.GetJobId())
		if err != nil || job != nil {
			return err
		}
		machine, err := tx.Machine(machineID)
		if err != nil || machine == nil || request.IsSetupJob(machine.GetSandboxId(), status.GetJobId()) {
			return err
		}
		job = &recordv1.JobRecord{
			Id: status.GetJobId(), Namespace: machine.GetNamespace(), SandboxId: machine.GetSandboxId(), MachineId: machineID,
			Generation: machine.GetGeneration(), BootId: status.GetBootId(),
			State: berthv1.JobState_JOB_STATE_RUNNING, Spec: &berthv1.JobSpec{Keep: &berthv1.JobSpec_KeepOutput{KeepOutput: status.GetDurable()}},
			CreateTime: timestamppb.New(f.Now()), StartTime: status.GetStartTime(),
			Detached: status.GetDurable(), KeepOutput: status.GetDurable(),
		}
		return tx.PutJob(job, "job.found", "a command of before the broker's start that no record had")
	})
	if err != nil || job.GetMachineId() != machineID {
		return nil, err
	}
	return job, nil
}

// outlived reports whether a job ended so long ago that its receipt, although its guest was never told that
// it is stored, may have been dropped again.
func (f *Follower) outlived(tx *store.Tx, status *guestv1.Status) bool {
	if !status.GetDone() || status.GetEndTime() == nil {
		return false
	}
	ended := status.GetEndTime().AsTime()
	return f.Now().Sub(ended) > f.Retention || !ended.After(tx.DroppedThrough())
}

// mayRecover counts a job that is to be recovered, and reports whether there are not too many of its
// machine.
func (f *Follower) mayRecover(machineID string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.machines[machineID]
	if m == nil {
		return false // no link is kept to it any more
	}
	m.recovered++
	if m.recovered == maxRecovered+1 {
		f.Log.Error("a guest names more jobs than there can be; no more are taken from it", "machine", machineID)
	}
	return m.recovered <= maxRecovered
}

// reconcileOpen reconciles the jobs that the ledger has open and that the guest did not name: those it
// never began are started if that is still right, and end as expired or lost if not.
func (f *Follower) reconcileOpen(ctx context.Context, machineID string, hello *guestv1.HelloResponse, known map[string]bool) {
	var open []*recordv1.JobRecord
	err := f.Store.View(func(tx *store.Tx) (err error) {
		open, err = tx.OpenJobs(machineID)
		return err
	})
	if err != nil {
		f.Log.Error("cannot read a machine's open jobs", "machine", machineID, "error", err)
		return
	}
	for _, job := range open {
		if ctx.Err() != nil {
			return
		}
		if known[job.GetId()] || f.Starter.Underway(job.GetId()) || f.Unrecorded.Find(job.GetId()) != nil {
			continue
		}
		if err := f.reconcile(ctx, machineID, hello, job); err != nil && ctx.Err() == nil {
			f.Log.Warn("cannot reconcile an open job; it is tried again at the next connection", "job", job.GetId(), "error", err)
		}
	}
}

// reconcileReserved reconciles jobs whose start came to nothing although the connection holds.
func (f *Follower) reconcileReserved(ctx context.Context, machineID string, hello *guestv1.HelloResponse) {
	begun := map[string]bool{}
	err := f.Store.View(func(tx *store.Tx) error {
		open, err := tx.OpenJobs(machineID)
		for _, job := range open {
			begun[job.GetId()] = record.HasBegun(job)
		}
		return err
	})
	if err == nil {
		f.reconcileOpen(ctx, machineID, hello, begun)
	}
}

func (f *Follower) reconcile(ctx context.Context, machineID string, hello *guestv1.HelloResponse, job *recordv1.JobRecord) error {
	status, err := f.Links.WaitJob(ctx, machineID, job.GetId(), 0)
	if err == nil {
		return f.take(ctx, machineID, status)
	}
	if !errors.Is(err, guestlink.ErrNoJob) {
		return err
	}
	sameBoot := job.GetBootId() == hello.GetBootId()
	outcome := record.FailedToStart("expired: the broker was away until after the job's start_deadline, so it was not started")
	switch {
	case record.HasBegun(job) || !sameBoot:
		reason := "guest_restarted: the machine's guest was started again and has no record of it"
		switch {
		case sameBoot && job.GetStartDeadline() == nil:
			// Its guest may never have heard of it, or kept its end for the caller as long as it does.
			reason = "disconnected: its caller went away, and the machine's guest has no record of it"
		case job.GetBootId() == "":
			reason = "restored: it was reserved in the backup that this ledger is, and may have run since"
		case sameBoot:
			reason = "no_record: the machine's guest no longer has a record of it"
		}
		outcome = record.Lost(reason)
	//mutation:start-deadline case false:
	case f.Now().After(job.GetStartDeadline().AsTime()):
	default:
		return f.Starter.Again(job)
	}
	_, err = f.Receipts.Close(ctx, job.GetId(), outcome)
	return err
}
