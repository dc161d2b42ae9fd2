package store

import (
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Job returns the job with this id, nil when there is none.
func (tx *Tx) Job(id string) (*recordv1.JobRecord, error) {
	rec := &recordv1.JobRecord{}
	if found, err := tx.load(jobsBucket, id, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutJob stores rec under its id and sets its revision to the ledger's next. With an event it also
// appends that. A DONE job stays DONE with the outcome that it has.
func (tx *Tx) PutJob(rec *recordv1.JobRecord, event, message string) error {
	if err := checkJob(rec); err != nil {
		return err
	}
	old, err := tx.Job(rec.Id)
	if err != nil {
		return err
	}
	if jobDone(old) && !(jobDone(rec) && proto.Equal(old.Outcome, rec.Outcome)) {
		return fault.New(fault.Internal, "%s is done: its state and outcome can't change", rec.Id)
	}
	rec.Revision = tx.bump()
	if err := tx.save(jobsBucket, rec.Id, rec); err != nil {
		return err
	}
	tx.note(Change{Kind: KindJob, ID: rec.Id, Revision: rec.Revision})
	if err := tx.reindex(jobEntries(old), jobEntries(rec)); err != nil {
		return err
	}
	return tx.record(rec.Revision, &recordv1.EventRecord{
		Kind: event, Namespace: rec.Namespace, SandboxId: rec.SandboxId, MachineId: rec.MachineId, JobId: rec.Id, Message: message,
	})
}

// checkJob refuses a job that the indexes can't hold. A machine may be missing.
func checkJob(rec *recordv1.JobRecord) error {
	if err := checkKey("job id", rec.GetId()); err != nil {
		return err
	}
	if err := checkKey("namespace of job "+rec.Id, rec.Namespace); err != nil {
		return err
	}
	if err := checkKey("sandbox of job "+rec.Id, rec.SandboxId); err != nil {
		return err
	}
	if rec.MachineId == "" {
		return nil
	}
	return checkKey("machine of job "+rec.Id, rec.MachineId)
}

// DeleteJob forgets a job; absent is success. Its output is not in the ledger.
func (tx *Tx) DeleteJob(id string) error {
	old, err := tx.Job(id)
	if err != nil || old == nil {
		return err
	}
	if err := tx.reindex(jobEntries(old), nil); err != nil {
		return err
	}
	if err := tx.remove(jobsBucket, []byte(id)); err != nil {
		return err
	}
	tx.note(Change{Kind: KindJob, ID: id, Revision: tx.Revision(), Deleted: true})
	return nil
}

// CountOpenJobs returns how many jobs of a sandbox are not DONE, attached ones included.
func (tx *Tx) CountOpenJobs(sandboxID string) (int, error) {
	return tx.countOpen(sandboxID, func([]byte) bool { return true })
}

// CountOpenDetachedJobs returns how many detached jobs of a sandbox are not DONE.
func (tx *Tx) CountOpenDetachedJobs(sandboxID string) (int, error) {
	return tx.countOpen(sandboxID, func(value []byte) bool { return len(value) == 1 && value[0] == 1 })
}

func (tx *Tx) countOpen(sandboxID string, counts func(value []byte) bool) (int, error) {
	n := 0
	err := tx.scanPrefix(jobsOpenBySandbox, joinKey(sandboxID, ""), func(_, value []byte) bool {
		if counts(value) {
			n++
		}
		return true
	})
	return n, err
}

func jobReserved(rec *recordv1.JobRecord) bool {
	return rec.GetState() == berthv1.JobState_JOB_STATE_RESERVED
}

func jobDone(rec *recordv1.JobRecord) bool {
	return rec.GetState() == berthv1.JobState_JOB_STATE_DONE
}

// jobEntries are the index keys of a job; none of nil.
func jobEntries(rec *recordv1.JobRecord) []entry {
	if rec == nil {
		return nil
	}
	entries := []entry{
		{bucket: jobsByNamespace, key: joinKey(rec.Namespace, rec.Id)},
		{bucket: jobsBySandbox, key: joinKey(rec.SandboxId, rec.Id)},
	}
	if jobDone(rec) {
		done := firstTime(rec.DoneTime, rec.EndTime, rec.CreateTime)
		return append(entries, entry{bucket: jobsByEnd, key: timeKey(done, rec.Id)})
	}
	detached := []byte{0}
	if rec.Detached {
		detached[0] = 1
	}
	return append(entries,
		entry{bucket: jobsOpenByMachine, key: joinKey(rec.MachineId, rec.Id)},
		entry{bucket: jobsOpenBySandbox, key: joinKey(rec.SandboxId, rec.Id), value: detached},
	)
}
