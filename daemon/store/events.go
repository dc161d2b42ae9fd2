package store

import (
	"encoding/binary"
	"strconv"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Events returns at most max events with a revision above after, oldest first, with their
// revisions. They are all there are as long as after+1 is not below OldestRevision.
func (tx *Tx) Events(after uint64, max int) ([]uint64, []*recordv1.EventRecord, error) {
	bucket, err := tx.bucket(eventsBucket)
	if err != nil || after+1 == 0 {
		return nil, nil, err
	}
	var revisions []uint64
	var events []*recordv1.EventRecord
	cursor := bucket.Cursor()
	for key, value := cursor.Seek(numberBytes(after + 1)); key != nil && len(events) < max; key, value = cursor.Next() {
		revision, event, err := decodeEvent(key, value)
		if err != nil {
			return nil, nil, err
		}
		revisions, events = append(revisions, revision), append(events, event)
	}
	return revisions, events, nil
}

// ListEvents returns a page of the events, newest first, with their revisions: those that keep
// accepts, or all where it is nil. q.After is the revision of the last one of the page before, in
// decimal; next is the After of the next page, empty when nothing follows. Errors: INVALID_FIELD
// for an After that is not a number.
func (tx *Tx) ListEvents(q Page, keep func(*recordv1.EventRecord) bool) (revisions []uint64, page []*recordv1.EventRecord, next string, err error) {
	end := ^uint64(0)
	if q.After != "" {
		if end, err = strconv.ParseUint(q.After, 10, 64); err != nil {
			return nil, nil, "", fault.Invalid("page_token", "%q is not a token that ListEvents gave out", q.After)
		}
	}
	bucket, err := tx.bucket(eventsBucket)
	if err != nil {
		return nil, nil, "", err
	}
	bytes := 0
	cursor := bucket.Cursor()
	for key := lastBefore(cursor, numberBytes(end)); key != nil; key, _ = cursor.Prev() {
		revision, event, err := decodeEvent(key, bucket.Get(key))
		if err != nil {
			return nil, nil, "", err
		}
		if err := q.canceled(); err != nil {
			return nil, nil, "", err
		}
		if keep != nil && !keep(event) {
			continue
		}
		bytes += proto.Size(event)
		if len(page) == q.size() || q.Bytes > 0 && bytes > q.Bytes && len(page) > 0 {
			next = strconv.FormatUint(revisions[len(revisions)-1], 10)
			break
		}
		revisions, page = append(revisions, revision), append(page, event)
	}
	return revisions, page, next, nil
}

// OldestRevision returns the lowest revision from which on every event is still held. A follower
// that has seen everything up to a revision below OldestRevision()-1 has missed some.
func (tx *Tx) OldestRevision() uint64 { return tx.counts.trimmed + 1 }

// TrimEvents removes the oldest events: those from before that time, and those beyond the newest
// maxKept (not positive: no bound). It removes at most max and returns how many it removed.
func (tx *Tx) TrimEvents(before time.Time, maxKept int, max int) (int, error) {
	bucket, err := tx.bucket(eventsBucket)
	if err != nil {
		return 0, err
	}
	var old []uint64
	cursor := bucket.Cursor()
	for key, value := cursor.First(); key != nil && len(old) < max; key, value = cursor.Next() {
		revision, event, err := decodeEvent(key, value)
		if err != nil {
			return 0, err
		}
		tooMany := maxKept > 0 && tx.counts.events > uint64(maxKept)+uint64(len(old))
		if !tooMany && !event.GetTime().AsTime().Before(before) {
			break
		}
		old = append(old, revision)
	}
	for _, revision := range old {
		if err := tx.remove(eventsBucket, numberBytes(revision)); err != nil {
			return 0, err
		}
		tx.counts.events--
		if revision > tx.counts.trimmed { // a restored ledger holds events from before its gap
			tx.counts.trimmed = revision
		}
		tx.changed = true
	}
	return len(old), nil
}

func decodeEvent(key, value []byte) (uint64, *recordv1.EventRecord, error) {
	if len(key) != 8 {
		return 0, nil, fault.New(fault.StoreFailed, "the ledger's key %s/%s is not a revision", eventsBucket, printable(key))
	}
	event := &recordv1.EventRecord{}
	if err := unmarshal(eventsBucket, key, value, event); err != nil {
		return 0, nil, err
	}
	return binary.BigEndian.Uint64(key), event, nil
}
