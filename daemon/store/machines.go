package store

import (
	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Machine returns the machine with this id, nil when there is none.
func (tx *Tx) Machine(id string) (*recordv1.MachineRecord, error) {
	rec := &recordv1.MachineRecord{}
	if found, err := tx.load(machinesBucket, id, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutMachine stores rec under its id and moves the ledger's revision. With an event it also appends
// that. A DOOMED machine can only become GONE, and a GONE one stays so.
func (tx *Tx) PutMachine(rec *recordv1.MachineRecord, event, message string) error {
	if err := checkKey("machine id", rec.GetId()); err != nil {
		return err
	}
	old, err := tx.Machine(rec.Id)
	if err != nil {
		return err
	}
	if old.GetState() >= recordv1.MachineState_MACHINE_STATE_TERMINATING && rec.State < old.State {
		return fault.New(fault.Internal, "machine %s is %s and can't become %s", rec.Id, old.State, rec.State)
	}
	revision := tx.bump()
	if err := tx.save(machinesBucket, rec.Id, rec); err != nil {
		return err
	}
	tx.note(Change{Kind: KindMachine, ID: rec.Id, Revision: revision})
	if err := tx.reindex(machineEntries(old), machineEntries(rec)); err != nil {
		return err
	}
	return tx.record(revision, &recordv1.EventRecord{
		Kind: event, Namespace: rec.Namespace, SandboxId: rec.SandboxId, MachineId: rec.Id, Message: message,
	})
}

// DeleteMachine forgets a machine; absent is success.
func (tx *Tx) DeleteMachine(id string) error {
	old, err := tx.Machine(id)
	if err != nil || old == nil {
		return err
	}
	if err := tx.reindex(machineEntries(old), nil); err != nil {
		return err
	}
	if err := tx.remove(machinesBucket, []byte(id)); err != nil {
		return err
	}
	tx.note(Change{Kind: KindMachine, ID: id, Revision: tx.Revision(), Deleted: true})
	return nil
}

// machineEntries are the index keys of a machine; none of nil.
func machineEntries(rec *recordv1.MachineRecord) []entry {
	if rec == nil || rec.State == recordv1.MachineState_MACHINE_STATE_GONE {
		return nil
	}
	return []entry{{bucket: machinesLive, key: []byte(rec.Id)}}
}
