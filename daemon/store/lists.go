package store

import (
	"bytes"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Page says which part of a list is wanted. Lists are newest first; ids sort by the time at which
// they were made.
type Page struct {
	// Size is how many records at most; not positive is 100.
	Size int
	// Bytes is how much their encodings may take in all; not positive is no limit. A page that is not the
	// last has at least one record.
	Bytes int
	// After is the next of the page before; empty is the first page. For records it is the last id of
	// that page, so that a list goes on where it was, whatever was added or removed meanwhile.
	After string
	// Cut, if set, shortens a record that is wanted before its bytes are counted.
	Cut func(proto.Message)
	// Canceled, if set, ends the scan with its error.
	Canceled func() error
}

func (p Page) size() int {
	if p.Size <= 0 {
		return defaultPage
	}
	return p.Size
}

func (p Page) canceled() error {
	if p.Canceled == nil {
		return nil
	}
	return p.Canceled()
}

// ListSandboxes returns a page of a namespace's sandboxes, newest first: those that keep accepts, or
// all where it is nil. next is the After of the next page, empty when nothing follows.
func (tx *Tx) ListSandboxes(namespace string, q Page, keep func(*recordv1.SandboxRecord) bool) (page []*recordv1.SandboxRecord, next string, err error) {
	return list(tx, sandboxesByNamespace, namespace, q, tx.Sandbox, func(rec *recordv1.SandboxRecord) bool {
		return keep == nil || keep(rec)
	})
}

// ListJobs is ListSandboxes for the jobs of a sandbox of the namespace, or of the whole namespace
// where sandboxID is empty.
func (tx *Tx) ListJobs(namespace, sandboxID string, q Page, keep func(*recordv1.JobRecord) bool) (page []*recordv1.JobRecord, next string, err error) {
	index, of := jobsByNamespace, namespace
	if sandboxID != "" {
		index, of = jobsBySandbox, sandboxID
	}
	return list(tx, index, of, q, tx.Job, func(rec *recordv1.JobRecord) bool {
		return rec.GetNamespace() == namespace && (keep == nil || keep(rec))
	})
}

// list returns a page of the records that an index names for of, newest first.
func list[R any, T interface {
	*R
	proto.Message
	GetId() string
}](tx *Tx, index, of string, q Page, get func(id string) (T, error), keep func(T) bool) (page []T, next string, err error) {
	var failed error
	bytes := 0
	err = tx.scanBack(index, of, q.After, func(id string) bool {
		rec, err := get(id)
		switch {
		case err == nil && rec == nil:
			err = dangling(index, id)
		case err == nil:
			err = q.canceled()
		}
		if failed = err; err != nil {
			return false
		}
		if !keep(rec) {
			return true
		}
		if q.Cut != nil {
			q.Cut(rec)
		}
		bytes += proto.Size(rec)
		if len(page) == q.size() || q.Bytes > 0 && bytes > q.Bytes && len(page) > 0 {
			next = page[len(page)-1].GetId()
			return false
		}
		page = append(page, rec)
		return true
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, "", err
	}
	return page, next, nil
}

// OpenJobs returns the jobs of a machine that are not DONE, oldest first; those of all machines
// where machineID is empty.
func (tx *Tx) OpenJobs(machineID string) ([]*recordv1.JobRecord, error) {
	var prefix []byte
	if machineID != "" {
		prefix = joinKey(machineID, "")
	}
	var ids []string
	err := tx.scanPrefix(jobsOpenByMachine, prefix, func(key, _ []byte) bool {
		ids = append(ids, string(key[bytes.IndexByte(key, separator)+1:]))
		return true
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(ids)
	return named(jobsOpenByMachine, ids, tx.Job)
}

// named returns the records that an index names; each must be there.
func named[T any](index string, ids []string, get func(id string) (*T, error)) ([]*T, error) {
	records := make([]*T, 0, len(ids))
	for _, id := range ids {
		rec, err := get(id)
		if err != nil {
			return nil, err
		}
		if rec == nil {
			return nil, dangling(index, id)
		}
		records = append(records, rec)
	}
	return records, nil
}

// LiveSandboxes returns every sandbox that is neither DESTROYED nor FAILED, oldest first.
func (tx *Tx) LiveSandboxes() ([]*recordv1.SandboxRecord, error) {
	ids, err := tx.keys(sandboxesLive)
	if err != nil {
		return nil, err
	}
	return named(sandboxesLive, ids, tx.Sandbox)
}

// LiveMachines returns every machine that is not GONE, oldest first.
func (tx *Tx) LiveMachines() ([]*recordv1.MachineRecord, error) {
	ids, err := tx.keys(machinesLive)
	if err != nil {
		return nil, err
	}
	return named(machinesLive, ids, tx.Machine)
}

// EndedSandboxes returns the ids of at most max sandboxes that became DESTROYED or FAILED before
// that time, the longest ended first.
func (tx *Tx) EndedSandboxes(before time.Time, max int) ([]string, error) {
	return tx.idsBefore(sandboxesByEnd, before, max)
}

// EndedJobs returns the ids of at most max jobs that became DONE before that time, the longest done
// first.
func (tx *Tx) EndedJobs(before time.Time, max int) ([]string, error) {
	return tx.idsBefore(jobsByEnd, before, max)
}

// CountEndedJobs returns how many jobs are DONE.
func (tx *Tx) CountEndedJobs() (int, error) {
	n := 0
	err := tx.scanPrefix(jobsByEnd, nil, func(_, _ []byte) bool {
		n++
		return true
	})
	return n, err
}

// EachEndedJob calls visit with the id and the sandbox of every job that is DONE, the longest done first, until it
// returns false; visit must not write. It reads the keys of indexes only.
func (tx *Tx) EachEndedJob(visit func(id, sandboxID string) bool) error {
	count, err := tx.CountEndedJobs()
	if err != nil {
		return err
	}
	sandboxes := make(map[string]string, count) // by job
	err = tx.scanPrefix(jobsBySandbox, nil, func(key, _ []byte) bool {
		if sandbox, id, found := strings.Cut(string(key), string(rune(separator))); found {
			sandboxes[id] = sandbox
		}
		return true
	})
	if err != nil {
		return err
	}
	return tx.scanPrefix(jobsByEnd, nil, func(key, _ []byte) bool {
		if len(key) <= timeKeyBytes {
			return true
		}
		id := string(key[timeKeyBytes:])
		return visit(id, sandboxes[id])
	})
}

// DroppedThrough is up to when the jobs had ended whose receipts were dropped because there were too many;
// zero if none was.
func (tx *Tx) DroppedThrough() time.Time {
	if at := tx.number64(droppedKey); at != 0 {
		return time.UnixMicro(int64(at))
	}
	return time.Time{}
}

// SetDroppedThrough moves it forward.
func (tx *Tx) SetDroppedThrough(at time.Time) error {
	if !at.After(tx.DroppedThrough()) {
		return nil
	}
	return tx.setMeta(droppedKey, numberBytes(uint64(at.UnixMicro())+1))
}

func dangling(index, id string) error {
	return fault.New(fault.StoreFailed, "the ledger's index %s names %s, which is not there: restore a copy of the ledger", index, id)
}

// keys returns every key of a bucket, in order.
func (tx *Tx) keys(name string) ([]string, error) {
	var keys []string
	err := tx.scanPrefix(name, nil, func(key, _ []byte) bool {
		keys = append(keys, string(key))
		return true
	})
	return keys, err
}

// idsBefore returns the ids of at most max keys of a time index that are before a time.
func (tx *Tx) idsBefore(name string, before time.Time, max int) ([]string, error) {
	keys, err := tx.keysBefore(name, before, max)
	if err != nil {
		return nil, err
	}
	ids := make([]string, 0, len(keys))
	for _, key := range keys {
		ids = append(ids, string(key[timeKeyBytes:]))
	}
	return ids, nil
}

// keysBefore returns at most max keys of a time index that are before a time, oldest first.
func (tx *Tx) keysBefore(name string, before time.Time, max int) ([][]byte, error) {
	var keys [][]byte
	end := timeBytes(before)
	err := tx.scanPrefix(name, nil, func(key, _ []byte) bool {
		if len(keys) >= max || len(key) < timeKeyBytes || bytes.Compare(key[:len(end)], end) >= 0 {
			return false
		}
		keys = append(keys, bytes.Clone(key))
		return true
	})
	return keys, err
}

// scanPrefix calls visit with the keys of a bucket that begin with prefix, in order, until it
// returns false. The slices are good within visit only, which must not write.
func (tx *Tx) scanPrefix(name string, prefix []byte, visit func(key, value []byte) bool) error {
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	cursor := bucket.Cursor()
	for key, value := cursor.Seek(prefix); key != nil && bytes.HasPrefix(key, prefix); key, value = cursor.Next() {
		if !visit(key, value) {
			return nil
		}
	}
	return nil
}

// scanBack calls visit with the ids that an index holds for of, newest first, from the one before
// after on, until it returns false. visit must not write.
func (tx *Tx) scanBack(name, of, after string, visit func(id string) bool) error {
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	prefix := joinKey(of, "")
	end := append([]byte(of), separator+1) // the first key behind all of them
	if after != "" {
		end = joinKey(of, after)
	}
	cursor := bucket.Cursor()
	for key := lastBefore(cursor, end); bytes.HasPrefix(key, prefix); key, _ = cursor.Prev() {
		if !visit(strings.TrimPrefix(string(key), string(prefix))) {
			return nil
		}
	}
	return nil
}

// lastBefore moves cursor to the last key that is less than end; nil when there is none.
func lastBefore(cursor *bolt.Cursor, end []byte) []byte {
	key, _ := cursor.Seek(end)
	if key == nil {
		key, _ = cursor.Last()
		return key
	}
	key, _ = cursor.Prev()
	return key
}
