package store

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
)

// migration is one step from the schema before to the next. It must do all its work in the
// transaction that it is given; the schema's number is written for it in the same one.
type migration struct {
	name string
	run  func(tx *bolt.Tx, root *bolt.Bucket, now time.Time) error
}

// migrations are the steps in order: the first makes schema 1 out of an empty file. Steps are
// appended, never changed, once a ledger was written with them; each gets a golden ledger in
// testdata/.
var migrations = []migration{
	{name: "create", run: createSchema1},
}

// migrate brings the file to the newest schema that steps know, in one transaction and after a copy.
func (s *Store) migrate(steps []migration) error {
	newest := uint32(len(steps))
	have, empty, err := s.readSchema()
	switch {
	case err != nil:
		return err
	case have > newest:
		return fmt.Errorf("ledger %s has schema %d, this berthd knows up to %d: use a newer berthd or restore the copy that was taken before the upgrade, %s", s.path, have, newest, copyPath(s.path, newest))
	case have == newest:
		return nil
	case have == 0 && !empty:
		return fmt.Errorf("open the ledger %s: it is a bbolt file of something else: point berthd at its own state directory", s.path)
	case have > 0:
		if err := s.copyBefore(have); err != nil {
			return err
		}
	}

	// gofail: var storeBeforeMigrate struct{}
	// os.Exit(137)
	err = s.db.Update(func(tx *bolt.Tx) error { return runSteps(tx, steps, have, s.now()) })
	// gofail: var storeAfterMigrate struct{}
	// os.Exit(137)

	if err != nil {
		return fmt.Errorf("bring the ledger %s from schema %d to %d: %w: nothing of it was changed%s", s.path, have, newest, err, remedy(err))
	}
	return nil
}

// readSchema returns the file's schema, 0 when it has none, and whether the file holds nothing.
func (s *Store) readSchema() (schema uint32, empty bool, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		first, _ := tx.Cursor().First()
		empty = first == nil
		root := tx.Bucket([]byte(rootBucket))
		if root == nil {
			return nil
		}
		meta := root.Bucket([]byte(metaBucket))
		if meta == nil {
			return nil
		}
		if value := meta.Get([]byte(schemaKey)); len(value) == 4 {
			schema = binary.BigEndian.Uint32(value)
		}
		return nil
	})
	if err != nil {
		return 0, false, fmt.Errorf("read the schema of the ledger %s: %w", s.path, err)
	}
	return schema, empty, nil
}

func runSteps(tx *bolt.Tx, steps []migration, have uint32, now time.Time) error {
	root, err := tx.CreateBucketIfNotExists([]byte(rootBucket))
	if err != nil {
		return err
	}
	for i, step := range steps[have:] {
		number := have + uint32(i) + 1 // #nosec G115 -- the number of steps is small
		if err := step.run(tx, root, now); err != nil {
			return fmt.Errorf("step %d (%s): %w", number, step.name, err)
		}
		meta := root.Bucket([]byte(metaBucket))
		if meta == nil {
			return fmt.Errorf("step %d (%s) left no bucket %s", number, step.name, metaBucket)
		}
		if err := meta.Put([]byte(schemaKey), binary.BigEndian.AppendUint32(nil, number)); err != nil {
			return fmt.Errorf("step %d (%s): %w", number, step.name, err)
		}
	}
	return nil
}

// createSchema1 makes every bucket and the instance id.
func createSchema1(_ *bolt.Tx, root *bolt.Bucket, now time.Time) error {
	for _, name := range plainBuckets {
		if _, err := root.CreateBucketIfNotExists([]byte(name)); err != nil {
			return fmt.Errorf("make bucket %s: %w", name, err)
		}
	}
	index := root.Bucket([]byte(indexBucket))
	for _, name := range indexBuckets {
		if _, err := index.CreateBucketIfNotExists([]byte(name)); err != nil {
			return fmt.Errorf("make bucket %s/%s: %w", indexBucket, name, err)
		}
	}
	var instance [8]byte
	_, _ = rand.Read(instance[:]) // never fails: see its documentation
	meta := root.Bucket([]byte(metaBucket))
	if err := meta.Put([]byte(instanceKey), hex.AppendEncode(nil, instance[:])); err != nil {
		return fmt.Errorf("write the instance id: %w", err)
	}
	if err := meta.Put([]byte(createdKey), timeBytes(now)); err != nil {
		return fmt.Errorf("write the creation time: %w", err)
	}
	return nil
}

// copyPath is where the copy of a ledger with this schema is put before its upgrade.
func copyPath(path string, schema uint32) string { return fmt.Sprintf("%s.v%d.bak", path, schema) }

// copyBefore copies the ledger aside before it is upgraded. An older copy of the same schema is
// replaced: the ledger as it is now is the one that an interrupted upgrade would need.
func (s *Store) copyBefore(schema uint32) error {
	target := copyPath(s.path, schema)
	err := writeWhole(target, func(temp string) error {
		taken := s.now()
		if err := s.db.View(func(tx *bolt.Tx) error { return tx.CopyFile(temp, 0o600) }); err != nil {
			return err
		}
		return markBackup(temp, taken)
	})
	if err != nil {
		return fmt.Errorf("copy the ledger %s to %s before its upgrade: %w", s.path, target, err)
	}
	return nil
}

// writeWhole makes the file target so that it is there whole and on disk, or not at all: fill
// writes a file beside it, which is then synced and renamed.
func writeWhole(target string, fill func(temp string) error) (err error) {
	temp := target + ".part"
	defer func() {
		if removed := os.Remove(temp); removed != nil && !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := fill(temp); err != nil {
		return err
	}
	if err := syncFile(temp); err != nil {
		return err
	}
	// gofail: var storeBeforeRename struct{}
	// os.Exit(137)
	if err := os.Rename(temp, target); err != nil {
		return err
	}
	// gofail: var storeAfterRename struct{}
	// os.Exit(137)
	return syncDir(filepath.Dir(target))
}

func syncFile(path string) error {
	file, err := os.OpenFile(path, os.O_RDWR, 0) // #nosec G304 -- a file that this package just wrote
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	dir, err := os.Open(path) // #nosec G304 -- the ledger's or the copy's own directory
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
