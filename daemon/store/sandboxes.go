package store

import (
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Sandbox returns the sandbox with this id, nil when there is none.
func (tx *Tx) Sandbox(id string) (*recordv1.SandboxRecord, error) {
	rec := &recordv1.SandboxRecord{}
	if found, err := tx.load(sandboxesBucket, id, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutSandbox stores rec under its id and sets its revision to the ledger's next. With an event, such
// as "sandbox.running", it also appends that at the same revision, with message for people. A
// DESTROYED sandbox can't be given another state.
func (tx *Tx) PutSandbox(rec *recordv1.SandboxRecord, event, message string) error {
	if err := checkKey("sandbox id", rec.GetId()); err != nil {
		return err
	}
	if err := checkKey("namespace of sandbox "+rec.Id, rec.GetNamespace()); err != nil {
		return err
	}
	old, err := tx.Sandbox(rec.Id)
	if err != nil {
		return err
	}
	if old.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED && rec.State != old.State {
		return fault.New(fault.Internal, "sandbox %s is destroyed and can't become %s", rec.Id, rec.State)
	}
	rec.Revision = tx.bump()
	if err := tx.save(sandboxesBucket, rec.Id, rec); err != nil {
		return err
	}
	tx.note(Change{Kind: KindSandbox, ID: rec.Id, Revision: rec.Revision})
	if err := tx.reindex(sandboxEntries(old), sandboxEntries(rec)); err != nil {
		return err
	}
	return tx.record(rec.Revision, &recordv1.EventRecord{
		Kind: event, Namespace: rec.Namespace, SandboxId: rec.Id, MachineId: rec.MachineId, Message: message,
	})
}

// DeleteSandbox forgets a sandbox; absent is success. What refers to it (jobs, machines, sessions,
// requests) is the caller's to remove.
func (tx *Tx) DeleteSandbox(id string) error {
	old, err := tx.Sandbox(id)
	if err != nil || old == nil {
		return err
	}
	if err := tx.reindex(sandboxEntries(old), nil); err != nil {
		return err
	}
	if err := tx.remove(sandboxesBucket, []byte(id)); err != nil {
		return err
	}
	tx.note(Change{Kind: KindSandbox, ID: id, Revision: tx.Revision(), Deleted: true})
	return nil
}

// sandboxEnded reports whether nothing of the sandbox is left but its record.
func sandboxEnded(state berthv1.SandboxState) bool {
	return state == berthv1.SandboxState_SANDBOX_STATE_DESTROYED || state == berthv1.SandboxState_SANDBOX_STATE_FAILED
}

// sandboxEntries are the index keys of a sandbox; none of nil. A FAILED one without a destroy_time
// ended when its last error happened.
func sandboxEntries(rec *recordv1.SandboxRecord) []entry {
	if rec == nil {
		return nil
	}
	entries := []entry{{bucket: sandboxesByNamespace, key: joinKey(rec.Namespace, rec.Id)}}
	if sandboxEnded(rec.State) {
		ended := firstTime(rec.DestroyTime, rec.LastError.GetTime(), rec.CreateTime)
		return append(entries, entry{bucket: sandboxesByEnd, key: timeKey(ended, rec.Id)})
	}
	return append(entries, entry{bucket: sandboxesLive, key: []byte(rec.Id)})
}
