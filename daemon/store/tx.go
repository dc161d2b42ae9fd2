package store

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Tx is a transaction on the ledger. It is good only within the function that it was given to, and
// only for that function's goroutine. Records that it returns are copies that the caller may
// change; a getter returns nil and no error for what is not there. Its errors are STORE_FAILED for a
// file that can't be read or written and a value that can't be decoded, and INTERNAL for a caller's
// mistake (an empty key, a change of what is final); no retry helps with either.
type Tx struct {
	bolt    *bolt.Tx
	now     func() time.Time
	root    *bolt.Bucket
	index   *bolt.Bucket
	buckets map[string]*bolt.Bucket // opened before; names are unique in the whole tree
	counts  counts
	changed bool // counts differ from what is in meta/
	writes  int  // puts and deletes so far
	changes []Change
}

// counts are the numbers of meta/ that move with nearly every transaction: kept here and written
// once, before the commit.
type counts struct {
	revision, events, trimmed uint64
}

func newTx(raw *bolt.Tx, now func() time.Time) (*Tx, error) {
	tx := &Tx{bolt: raw, now: now, buckets: make(map[string]*bolt.Bucket, 8)}
	tx.root = raw.Bucket([]byte(rootBucket))
	if tx.root == nil {
		_ = raw.Rollback()
		return nil, fault.New(fault.StoreFailed, "the ledger has no bucket %q: it is damaged", rootBucket)
	}
	tx.index = tx.root.Bucket([]byte(indexBucket))
	tx.counts = counts{tx.number64(revisionKey), tx.number64(eventsKey), tx.number64(trimmedKey)}
	return tx, nil
}

// Revision returns the ledger's revision as this transaction sees it, its own changes included.
func (tx *Tx) Revision() uint64 { return tx.counts.revision }

// bump returns the next revision.
func (tx *Tx) bump() uint64 {
	tx.counts.revision++
	tx.changed = true
	return tx.counts.revision
}

// flushMeta writes the counts back to meta/.
func (tx *Tx) flushMeta() error {
	if !tx.changed {
		return nil
	}
	tx.changed = false
	for key, n := range map[string]uint64{
		revisionKey: tx.counts.revision,
		eventsKey:   tx.counts.events,
		trimmedKey:  tx.counts.trimmed,
	} {
		if err := tx.setMeta(key, numberBytes(n)); err != nil {
			return err
		}
	}
	return nil
}

// meta returns a value of meta/, good within the transaction only; nil when it is absent.
func (tx *Tx) meta(key string) []byte {
	bucket, err := tx.bucket(metaBucket)
	if err != nil {
		return nil
	}
	return bucket.Get([]byte(key))
}

func (tx *Tx) setMeta(key string, value []byte) error {
	return tx.put(metaBucket, []byte(key), value)
}

// number64 and number32 read a number of meta/; absent or malformed is 0.
func (tx *Tx) number64(key string) uint64 {
	if value := tx.meta(key); len(value) == 8 {
		return binary.BigEndian.Uint64(value)
	}
	return 0
}

func (tx *Tx) number32(key string) uint32 {
	if value := tx.meta(key); len(value) == 4 {
		return binary.BigEndian.Uint32(value)
	}
	return 0
}

// bucket opens a bucket under the root or under index/.
func (tx *Tx) bucket(name string) (*bolt.Bucket, error) {
	if bucket := tx.buckets[name]; bucket != nil {
		return bucket, nil
	}
	bucket := tx.root.Bucket([]byte(name))
	if bucket == nil && tx.index != nil {
		bucket = tx.index.Bucket([]byte(name))
	}
	if bucket == nil {
		return nil, fault.New(fault.StoreFailed, "the ledger has no bucket %q: it is damaged", name)
	}
	tx.buckets[name] = bucket
	return bucket, nil
}

// load decodes the value at key into record; false when there is none.
func (tx *Tx) load(name, key string, record proto.Message) (bool, error) {
	bucket, err := tx.bucket(name)
	if err != nil {
		return false, err
	}
	return decode(bucket, name, []byte(key), record)
}

// decode decodes the value at key of bucket, which errors call name.
func decode(bucket *bolt.Bucket, name string, key []byte, record proto.Message) (bool, error) {
	if len(key) == 0 {
		return false, nil
	}
	value := bucket.Get(key)
	if value == nil {
		return false, nil
	}
	if err := unmarshal(name, key, value, record); err != nil {
		return false, err
	}
	return true, nil
}

func unmarshal(name string, key, value []byte, record proto.Message) error {
	if err := proto.Unmarshal(value, record); err != nil {
		return fault.New(fault.StoreFailed, "the ledger's value %s/%s can't be decoded: %w: restore a copy of it", name, printable(key), err)
	}
	return nil
}

// printable is a key as a person can read it: text as it is, anything else in hexadecimal.
func printable(key []byte) string {
	for _, c := range key {
		if c < ' ' || c > '~' {
			return fmt.Sprintf("0x%x", key)
		}
	}
	return string(key)
}

// save encodes record at key.
func (tx *Tx) save(name, key string, record proto.Message) error {
	value, err := proto.Marshal(record)
	if err != nil {
		return fault.New(fault.Internal, "encode the ledger's value %s/%s: %w", name, key, err)
	}
	return tx.put(name, []byte(key), value)
}

// put and remove count as writes even when they fail, so that what they may have done is rolled
// back.
func (tx *Tx) put(name string, key, value []byte) error {
	tx.writes++
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	if err := bucket.Put(key, value); err != nil {
		return fault.New(fault.StoreFailed, "write the ledger's value %s/%s: %w", name, printable(key), err)
	}
	return nil
}

func (tx *Tx) remove(name string, key []byte) error {
	tx.writes++
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	if err := bucket.Delete(key); err != nil {
		return fault.New(fault.StoreFailed, "remove the ledger's value %s/%s: %w", name, printable(key), err)
	}
	return nil
}

// entry is one key of an index.
type entry struct {
	bucket string
	key    []byte
	value  []byte
}

func (e entry) equal(o entry) bool {
	return e.bucket == o.bucket && bytes.Equal(e.key, o.key) && bytes.Equal(e.value, o.value)
}

// reindex replaces the entries of a record's old value with those of its new one.
func (tx *Tx) reindex(old, now []entry) error {
	for _, e := range old {
		if contains(now, e) {
			continue
		}
		if err := tx.remove(e.bucket, e.key); err != nil {
			return err
		}
	}
	for _, e := range now {
		if contains(old, e) {
			continue
		}
		if err := tx.put(e.bucket, e.key, e.value); err != nil {
			return err
		}
	}
	return nil
}

func contains(entries []entry, wanted entry) bool {
	for _, e := range entries {
		if e.equal(wanted) {
			return true
		}
	}
	return false
}

// record appends an event at revision; none when its kind is empty.
func (tx *Tx) record(revision uint64, event *recordv1.EventRecord) error {
	if event.GetKind() == "" {
		return nil
	}
	event.Time = timestamppb.New(tx.now())
	value, err := proto.Marshal(event)
	if err != nil {
		return fault.New(fault.Internal, "encode the event of revision %d: %w", revision, err)
	}
	if err := tx.put(eventsBucket, numberBytes(revision), value); err != nil {
		return err
	}
	tx.counts.events++
	return nil
}
