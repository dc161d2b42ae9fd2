package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
)

// compactTxBytes bounds one transaction of a compaction, and with it the memory that it takes.
const compactTxBytes = 4 << 20

// BackupTo writes a consistent copy of the ledger to path, mode 0600, replacing what is there: whole
// and on disk, or not at all. With compact the copy has next to no free pages. Updates go on meanwhile;
// only one that makes the file's map grow waits for the copying. The copy says of itself that it is one,
// so that a broker that is started on it knows that the harness has gone on since (see restore.go). The
// ledger itself is refused as a path.
func (s *Store) BackupTo(ctx context.Context, path string, compact bool) error {
	same, err := sameFile(path, s.path)
	if err == nil && same {
		err = errors.New("that is the ledger itself: choose another path")
	}
	if err != nil {
		return fmt.Errorf("back the ledger up to %s: %w", path, err)
	}
	err = writeWhole(path, func(temp string) error {
		copyTo := s.copyTo
		if compact {
			copyTo = s.compactTo
		}
		taken := s.now()
		if err := copyTo(ctx, temp); err != nil {
			return err
		}
		return markBackup(temp, taken)
	})
	if err != nil {
		return fmt.Errorf("back the ledger %s up to %s: %w", s.path, path, err)
	}
	return nil
}

func sameFile(a, b string) (bool, error) {
	first, err := os.Stat(a)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	second, err := os.Stat(b)
	if err != nil {
		return false, err
	}
	return os.SameFile(first, second), nil
}

// copyTo copies the pages as they are. It is the only long read transaction of this package, bounded by
// the speed of a local disk.
func (s *Store) copyTo(ctx context.Context, path string) error {
	file, err := os.OpenFile(filepath.Clean(path), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	writer := &untilDone{ctx: ctx, file: file}
	err = s.View(func(tx *Tx) error {
		_, err := tx.bolt.WriteTo(writer)
		return err
	})
	if err != nil && writer.failed != nil {
		err = writer.failed // bbolt does not wrap what the writer said
	}
	return errors.Join(err, file.Close())
}

// compactTo copies the pages first, so that the ledger's transaction is short, and compacts that
// copy.
func (s *Store) compactTo(ctx context.Context, path string) (err error) {
	plain := path + ".plain"
	defer func() {
		if removed := os.Remove(plain); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	if err := s.copyTo(ctx, plain); err != nil {
		return err
	}
	source, err := bolt.Open(plain, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, source.Close()) }()
	if err := ctx.Err(); err != nil {
		return err
	}
	// The caller syncs the whole file at the end.
	target, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true, NoFreelistSync: true, FreelistType: bolt.FreelistMapType})
	if err != nil {
		return err
	}
	err = bolt.Compact(target, source, compactTxBytes)
	return errors.Join(err, target.Close())
}

// markBackup writes into a copy when it was taken. The caller syncs the file.
func markBackup(path string, taken time.Time) error {
	db, err := bolt.Open(path, 0o600, &bolt.Options{NoSync: true, NoFreelistSync: true, FreelistType: bolt.FreelistMapType})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(rootBucket)).Bucket([]byte(metaBucket)).Put([]byte(backupKey), timeBytes(taken))
	})
	return errors.Join(err, db.Close())
}

// untilDone is a file that takes no more bytes once its context is done, and remembers what failed.
type untilDone struct {
	ctx    context.Context //nolint:containedctx // it is one copy's, and io.Writer has no place for it
	file   *os.File
	failed error
}

func (w *untilDone) Write(p []byte) (n int, err error) {
	if w.failed = w.ctx.Err(); w.failed == nil {
		n, w.failed = w.file.Write(p)
	}
	return n, w.failed
}
