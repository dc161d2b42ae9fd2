package store

import (
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// JobsAfter returns at most most jobs of all namespaces whose ids are above after, oldest first, so that
// a reader of all of them can let go of the ledger between pages. next is the after of the next page,
// empty when nothing follows. A record that can't be decoded is left out: Check names it.
func (tx *Tx) JobsAfter(after string, most int) (page []*recordv1.JobRecord, next string, err error) {
	bucket, err := tx.bucket(jobsBucket)
	if err != nil {
		return nil, "", err
	}
	cursor, seen := bucket.Cursor(), 0
	for key, value := cursor.Seek(append([]byte(after), separator)); key != nil; key, value = cursor.Next() {
		if seen == most {
			return page, next, nil
		}
		seen, next = seen+1, string(key)
		rec := &recordv1.JobRecord{}
		if unmarshal(jobsBucket, key, value, rec) == nil {
			page = append(page, rec)
		}
	}
	return page, "", nil
}

// RequestKey is a request id in its namespace.
type RequestKey struct{ Namespace, RequestID string }

// Request is a request record under its key.
type Request struct {
	RequestKey
	Record *recordv1.RequestRecord
}

// RequestsAfter is JobsAfter for the request records, in the order of their keys; the zero after is the
// first page, and more tells whether anything follows.
func (tx *Tx) RequestsAfter(after RequestKey, most int) (page []Request, next RequestKey, more bool, err error) {
	bucket, err := tx.bucket(requestsBucket)
	if err != nil {
		return nil, next, false, err
	}
	namespaces, seen := bucket.Cursor(), 0
	for namespace, value := namespaces.Seek([]byte(after.Namespace)); namespace != nil; namespace, value = namespaces.Next() {
		inner := bucket.Bucket(namespace)
		if value != nil || inner == nil {
			continue
		}
		var from []byte
		if string(namespace) == after.Namespace {
			from = append([]byte(after.RequestID), separator)
		}
		requests := inner.Cursor()
		for key, value := requests.Seek(from); key != nil; key, value = requests.Next() {
			if seen == most {
				return page, next, true, nil
			}
			seen, next = seen+1, RequestKey{string(namespace), string(key)}
			rec := &recordv1.RequestRecord{}
			if unmarshal(requestsBucket, key, value, rec) == nil {
				page = append(page, Request{next, rec})
			}
		}
	}
	return page, RequestKey{}, false, nil
}
