package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	bolt "go.etcd.io/bbolt"

	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// maxDamage bounds how many findings about pages Check returns: one damaged page brings many.
const maxDamage = 20

// Finding is one thing that is wrong within the ledger's file.
type Finding struct {
	Kind    string // damaged_page, undecodable_record, dangling_index, missing_index, wrong_count
	Subject string // bucket and key
	Message string // for people
}

// Check reads the whole ledger: whether its pages are sound, every record can be decoded, and the
// indexes say what the records say. RepairIndexes repairs all but the first two kinds. It reads a copy,
// which it makes at scratch and removes: reading pages beside a writer is not safe, and would make the
// writer wait.
func (s *Store) Check(ctx context.Context, scratch string) (findings []Finding, err error) {
	if err := removeIfThere(scratch); err != nil { // a copy that a kill left
		return nil, fmt.Errorf("check the ledger %s: %w", s.path, err)
	}
	defer func() { err = errors.Join(err, removeIfThere(scratch)) }()
	if err := s.copyTo(ctx, scratch); err != nil {
		return nil, fmt.Errorf("copy the ledger %s to %s, to check it: %w", s.path, scratch, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	db, err := bolt.Open(scratch, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("check the ledger's copy %s: %w", scratch, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	raw, err := db.Begin(false)
	if err != nil {
		return nil, fmt.Errorf("check the ledger's copy %s: %w", scratch, err)
	}
	defer func() { _ = raw.Rollback() }()
	tx, err := newTx(raw, s.now)
	if err != nil {
		return nil, err
	}
	return tx.check(s.path)
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func (tx *Tx) check(path string) ([]Finding, error) {
	var findings []Finding
	for damage := range tx.bolt.Check() {
		if len(findings) < maxDamage {
			findings = append(findings, Finding{"damaged_page", path, damage.Error()})
		}
	}
	if len(findings) > 0 {
		return findings, nil // what stands in damaged pages is not worth reading
	}
	wanted, undecodable, err := tx.wantedEntries()
	if err != nil {
		return nil, err
	}
	different, err := tx.compareEntries(wanted)
	return slices.Concat(undecodable, different), err
}

// RepairIndexes makes the indexes say what the records say, as far as those can be decoded, and
// returns what it repaired.
func (s *Store) RepairIndexes(ctx context.Context) ([]Finding, error) {
	var repaired []Finding
	err := s.Update(ctx, func(tx *Tx) error {
		wanted, _, err := tx.wantedEntries()
		if err != nil {
			return err
		}
		if repaired, err = tx.compareEntries(wanted); err != nil || len(repaired) == 0 {
			return err
		}
		return tx.rewriteEntries(wanted)
	})
	return repaired, err
}

// wantedEntries computes every index entry from the records, by bucket and key.
func (tx *Tx) wantedEntries() (map[string]map[string][]byte, []Finding, error) {
	wanted := make(map[string]map[string][]byte, len(indexBuckets))
	for _, name := range indexBuckets {
		wanted[name] = map[string][]byte{}
	}
	var undecodable []Finding
	want := func(subject string, err error, entries []entry) {
		if err != nil {
			undecodable = append(undecodable, Finding{"undecodable_record", subject, err.Error()})
			return
		}
		for _, e := range entries {
			wanted[e.bucket][string(e.key)] = e.value
		}
	}
	err := tx.eachRecord(sandboxesBucket, func(key, value []byte) {
		rec := &recordv1.SandboxRecord{}
		want(subject(sandboxesBucket, string(key)), unmarshal(sandboxesBucket, key, value, rec), sandboxEntries(rec))
	})
	if err != nil {
		return nil, nil, err
	}
	err = tx.eachRecord(machinesBucket, func(key, value []byte) {
		rec := &recordv1.MachineRecord{}
		want(subject(machinesBucket, string(key)), unmarshal(machinesBucket, key, value, rec), machineEntries(rec))
	})
	if err != nil {
		return nil, nil, err
	}
	err = tx.eachRecord(jobsBucket, func(key, value []byte) {
		rec := &recordv1.JobRecord{}
		want(subject(jobsBucket, string(key)), unmarshal(jobsBucket, key, value, rec), jobEntries(rec))
	})
	if err != nil {
		return nil, nil, err
	}
	err = tx.eachNested(requestsBucket, func(namespace string, key, value []byte) {
		rec := &recordv1.RequestRecord{}
		err := unmarshal(requestsBucket+"/"+namespace, key, value, rec)
		want(subject(requestsBucket+"/"+namespace, string(key)), err, requestEntries(namespace, string(key), rec))
	})
	return wanted, undecodable, err
}

// compareEntries lists what the indexes and the count of events have wrong, in the order of the
// buckets.
func (tx *Tx) compareEntries(wanted map[string]map[string][]byte) ([]Finding, error) {
	var findings []Finding
	for _, name := range indexBuckets {
		found := map[string]bool{}
		err := tx.scanPrefix(name, nil, func(key, value []byte) bool {
			found[string(key)] = true
			right, ok := wanted[name][string(key)]
			switch {
			case !ok:
				findings = append(findings, Finding{"dangling_index", subject(name, string(key)), "no record asks for it"})
			case !bytes.Equal(right, value):
				findings = append(findings, Finding{"dangling_index", subject(name, string(key)), fmt.Sprintf("it has the value %x, its record says %x", value, right)})
			}
			return true
		})
		if err != nil {
			return nil, err
		}
		for key := range wanted[name] {
			if !found[key] {
				findings = append(findings, Finding{"missing_index", subject(name, key), "its record is there, it is not"})
			}
		}
	}
	held, err := tx.countEvents()
	if err != nil {
		return nil, err
	}
	if held != tx.counts.events {
		findings = append(findings, Finding{"wrong_count", eventsBucket, fmt.Sprintf("there are %d events, the ledger counts %d", held, tx.counts.events)})
	}
	return findings, nil
}

// rewriteEntries replaces every index with wanted, and counts the events again.
func (tx *Tx) rewriteEntries(wanted map[string]map[string][]byte) error {
	for _, name := range indexBuckets {
		keys, err := tx.keys(name)
		if err != nil {
			return err
		}
		for _, key := range keys {
			if _, ok := wanted[name][key]; ok {
				continue
			}
			if err := tx.remove(name, []byte(key)); err != nil {
				return err
			}
		}
		for key, value := range wanted[name] {
			if err := tx.put(name, []byte(key), value); err != nil {
				return err
			}
		}
	}
	held, err := tx.countEvents()
	tx.counts.events, tx.changed = held, true
	return err
}

func (tx *Tx) countEvents() (uint64, error) {
	held := uint64(0)
	err := tx.eachRecord(eventsBucket, func(_, _ []byte) { held++ })
	return held, err
}

// eachRecord calls visit with every key and value of a bucket.
func (tx *Tx) eachRecord(name string, visit func(key, value []byte)) error {
	return tx.scanPrefix(name, nil, func(key, value []byte) bool {
		visit(key, value)
		return true
	})
}

// eachNested calls visit with every key and value of the buckets within a bucket.
func (tx *Tx) eachNested(name string, visit func(inner string, key, value []byte)) error {
	bucket, err := tx.bucket(name)
	if err != nil {
		return err
	}
	return bucket.ForEachBucket(func(inner []byte) error {
		return bucket.Bucket(inner).ForEach(func(key, value []byte) error {
			visit(string(inner), key, value)
			return nil
		})
	})
}

// subject is an index key as a person can read it.
func subject(name, key string) string {
	if len(key) > timeKeyBytes && strings.HasSuffix(name, "_by_end") || name == requestsByExpiry {
		key = key[min(timeKeyBytes, len(key)):]
	}
	return name + "/" + strings.ReplaceAll(key, string(rune(separator)), " · ")
}
