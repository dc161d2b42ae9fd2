package store

import (
	"bytes"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Request returns what is remembered of a request id, nil when nothing is. A record that is past its
// expire_time is returned until TrimRequests removes it.
func (tx *Tx) Request(namespace, requestID string) (*recordv1.RequestRecord, error) {
	rec := &recordv1.RequestRecord{}
	if found, err := tx.loadNested(requestsBucket, namespace, requestID, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutRequest remembers a request id until rec's expire_time, which must be set.
func (tx *Tx) PutRequest(namespace, requestID string, rec *recordv1.RequestRecord) error {
	if rec.GetExpireTime() == nil {
		return fault.New(fault.Internal, "request %s/%s has no expire_time: it would be remembered forever", namespace, requestID)
	}
	old, err := tx.Request(namespace, requestID)
	if err != nil {
		return err
	}
	if err := tx.saveNested(requestsBucket, namespace, requestID, rec); err != nil {
		return err
	}
	return tx.reindex(requestEntries(namespace, requestID, old), requestEntries(namespace, requestID, rec))
}

// TrimRequests forgets the requests whose expire_time is before now, the oldest first and at most
// max, and returns how many it forgot.
func (tx *Tx) TrimRequests(now time.Time, max int) (int, error) {
	expired, err := tx.keysBefore(requestsByExpiry, now, max)
	if err != nil {
		return 0, err
	}
	for _, key := range expired {
		namespace, requestID, found := bytes.Cut(key[timeKeyBytes:], []byte{separator})
		if !found {
			return 0, fault.New(fault.StoreFailed, "the ledger's index key %s/%s is malformed", requestsByExpiry, printable(key))
		}
		if err := tx.removeNested(requestsBucket, string(namespace), string(requestID)); err != nil {
			return 0, err
		}
		if err := tx.remove(requestsByExpiry, key); err != nil {
			return 0, err
		}
	}
	return len(expired), nil
}

// requestEntries are the index keys of a request; none of nil.
func requestEntries(namespace, requestID string, rec *recordv1.RequestRecord) []entry {
	if rec == nil {
		return nil
	}
	return []entry{{bucket: requestsByExpiry, key: timeKey(rec.ExpireTime.AsTime(), namespace, requestID)}}
}

// Session returns which sandbox holds a session key, nil when none does.
func (tx *Tx) Session(namespace, key string) (*recordv1.SessionRecord, error) {
	rec := &recordv1.SessionRecord{}
	if found, err := tx.loadNested(sessionsBucket, namespace, key, rec); err != nil || !found {
		return nil, err
	}
	return rec, nil
}

// PutSession gives a session key to a sandbox, whoever had it before.
func (tx *Tx) PutSession(namespace, key string, rec *recordv1.SessionRecord) error {
	return tx.saveNested(sessionsBucket, namespace, key, rec)
}

// DeleteSession frees a session key; absent is success.
func (tx *Tx) DeleteSession(namespace, key string) error {
	return tx.removeNested(sessionsBucket, namespace, key)
}

// nested opens the bucket of a namespace; nil when there is none.
func (tx *Tx) nested(name, namespace string) (*bolt.Bucket, error) {
	bucket, err := tx.bucket(name)
	if err != nil || namespace == "" {
		return nil, err
	}
	return bucket.Bucket([]byte(namespace)), nil
}

func (tx *Tx) loadNested(name, namespace, key string, record proto.Message) (bool, error) {
	bucket, err := tx.nested(name, namespace)
	if err != nil || bucket == nil {
		return false, err
	}
	return decode(bucket, name+"/"+namespace, []byte(key), record)
}

func (tx *Tx) saveNested(name, namespace, key string, record proto.Message) error {
	if err := checkKey("namespace of "+name, namespace); err != nil {
		return err
	}
	if err := checkKey("key of "+name+"/"+namespace, key); err != nil {
		return err
	}
	value, err := proto.Marshal(record)
	if err != nil {
		return fault.New(fault.Internal, "encode the ledger's value %s/%s/%s: %w", name, namespace, key, err)
	}
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	tx.writes++
	inner, err := bucket.CreateBucketIfNotExists([]byte(namespace))
	if err != nil {
		return fault.New(fault.StoreFailed, "make the ledger's bucket %s/%s: %w", name, namespace, err)
	}
	if err := inner.Put([]byte(key), value); err != nil {
		return fault.New(fault.StoreFailed, "write the ledger's value %s/%s/%s: %w", name, namespace, key, err)
	}
	return nil
}

func (tx *Tx) removeNested(name, namespace, key string) error {
	bucket, err := tx.nested(name, namespace)
	if err != nil || bucket == nil {
		return err
	}
	tx.writes++
	if err := bucket.Delete([]byte(key)); err != nil {
		return fault.New(fault.StoreFailed, "remove the ledger's value %s/%s/%s: %w", name, namespace, key, err)
	}
	return nil
}
