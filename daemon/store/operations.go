package store

import (
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Operation returns the open operation with this id, nil when there is none.
func (tx *Tx) Operation(id string) (*recordv1.OperationRecord, error) {
	rec := &recordv1.OperationRecord{}
	if found, err := tx.load(operationsBucket, id, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutOperation stores rec under its id. It does not move the revision.
func (tx *Tx) PutOperation(rec *recordv1.OperationRecord) error {
	if err := checkKey("operation id", rec.GetId()); err != nil {
		return err
	}
	if err := tx.save(operationsBucket, rec.Id, rec); err != nil {
		return err
	}
	tx.note(Change{Kind: KindOperation, ID: rec.Id, Revision: tx.Revision()})
	return nil
}

// DeleteOperation closes an operation; absent is success.
func (tx *Tx) DeleteOperation(id string) error {
	if err := checkKey("operation id", id); err != nil {
		return err
	}
	if err := tx.remove(operationsBucket, []byte(id)); err != nil {
		return err
	}
	tx.note(Change{Kind: KindOperation, ID: id, Revision: tx.Revision(), Deleted: true})
	return nil
}

// OpenOperations returns every open operation, oldest first.
func (tx *Tx) OpenOperations() ([]*recordv1.OperationRecord, error) {
	bucket, err := tx.bucket(operationsBucket)
	if err != nil {
		return nil, err
	}
	var open []*recordv1.OperationRecord
	cursor := bucket.Cursor()
	for key, value := cursor.First(); key != nil; key, value = cursor.Next() {
		rec := &recordv1.OperationRecord{}
		if err := unmarshal(operationsBucket, key, value, rec); err != nil {
			return nil, err
		}
		open = append(open, rec)
	}
	return open, nil
}
