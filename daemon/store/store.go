// Package store holds the ledger: one bbolt file, its buckets (drawn in buckets.go), its migrations
// and its transactions. It is the only package of the daemon that knows bbolt. It never calls a network
// or a provider, never decides what a record should say, and never hands out a transaction that
// outlives the function it was made for.
//
// Every write goes through one goroutine that commits whatever has gathered (see writer.go): a
// caller alone pays for one commit, many callers share one.
package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/berth-sandbox/berth/daemon/fault"
)

const (
	// defaultLockTimeout is how long Open waits for another process to let go of the file: enough
	// for a daemon that is just ending, short enough for a person who waits.
	defaultLockTimeout = time.Second

	// initialMapBytes is how much address space the file is mapped with at first. Growing the map
	// waits for every open read transaction, so it should be rare; address space costs nothing on 64
	// bits.
	initialMapBytes = 256 << 20

	// maxBatch bounds the functions that share one commit, and with them the memory of one
	// transaction. Beyond it a commit's fixed cost is spread thin enough already.
	maxBatch = 1024

	// defaultPage is the size of a page of a list that was asked for without one.
	defaultPage = 100
)

// Options are what Open may be told. The zero value is right for a daemon.
type Options struct {
	// LockTimeout is how long to wait for another process that has the file. Default 1 s.
	LockTimeout time.Duration
	// Log is where write-behind errors and the reason of a fatal end go. Default slog.Default().
	Log *slog.Logger
	// Fatal is called, by the writer, when a commit failed in a way that leaves open whether it is on
	// disk (a failed fsync or meta write). Default: log and os.Exit(1), so that the restart finds
	// out. If it returns, every later Update fails with STORE_FAILED.
	Fatal func(error)
	// Now is the clock that stamps events. Default time.Now.
	Now func() time.Time
}

// Store is an open ledger. Its methods may be called concurrently.
type Store struct {
	path     string
	db       *bolt.DB
	log      *slog.Logger
	fatal    func(error)
	now      func() time.Time
	instance string
	schema   uint32
	revision atomic.Uint64

	queue    queue
	reserve  *reserve
	pageSize int64
	finished chan struct{} // closed when the writer goroutine is gone
	broken   atomic.Pointer[error]
	onCommit []func(Commit)
	closing  sync.Once
	closeErr error
}

// Open opens the ledger at path, or creates it with mode 0600 and a new instance id. The directory
// must exist. An older schema is upgraded, after a copy to <path>.v<N>.bak; a newer one is refused.
// A file that another process has is refused after LockTimeout, with that process's id where the
// system tells. Close ends it.
func Open(path string, opts Options) (*Store, error) {
	return open(path, opts, migrations, os.OpenFile)
}

// opener is how the ledger's file is opened; tests keep the file to make it fail.
type opener func(name string, flag int, mode fs.FileMode) (*os.File, error)

func open(path string, opts Options, steps []migration, openFile opener) (*Store, error) {
	s := &Store{
		path:     path,
		log:      opts.Log,
		fatal:    opts.Fatal,
		now:      opts.Now,
		finished: make(chan struct{}),
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.now == nil {
		s.now = time.Now
	}
	if s.fatal == nil {
		s.fatal = s.exit
	}
	timeout := opts.LockTimeout
	if timeout <= 0 {
		timeout = defaultLockTimeout
	}
	var file *os.File
	db, err := openFileLocked(path, timeout, func(name string, flag int, mode fs.FileMode) (_ *os.File, err error) {
		file, err = openFile(name, flag, mode)
		return file, err
	})
	if err != nil {
		return nil, err
	}
	s.db = db
	if err := s.prepare(steps); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	s.pageSize = int64(db.Info().PageSize)
	s.reserve = newReserve(file, path, s.log)
	if err := s.View(func(tx *Tx) error { s.keepReserve(tx); return nil }); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	s.queue.init()
	go s.write()
	return s, nil
}

// openFileLocked opens the bbolt file and turns every way in which that fails into words that say
// what to do.
func openFileLocked(path string, timeout time.Duration, openFile opener) (db *bolt.DB, err error) {
	defer func() {
		// bbolt panics on some kinds of damage while it scans for free pages.
		if reason := recover(); reason != nil {
			db, err = nil, fmt.Errorf("open the ledger %s: the file is damaged (%v): restore a copy of it", path, reason)
		}
	}()
	options := &bolt.Options{
		Timeout:        timeout,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
		OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
			return openChecked(name, flag, mode, openFile)
		},
	}
	if strconv.IntSize == 64 {
		options.InitialMmapSize = initialMapBytes
	}
	db, err = bolt.Open(path, 0o600, options)
	switch {
	case err == nil:
		return db, nil
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("open the ledger %s: %s has it; one ledger serves one daemon: stop that one or use another state directory", path, holder(path))
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch), errors.Is(err, berrors.ErrChecksum):
		return nil, fmt.Errorf("open the ledger %s: it is not a ledger, or both of its heads are damaged (%w): point berthd at its own state directory, or restore a copy of it", path, err)
	default:
		return nil, fmt.Errorf("open the ledger %s: %w%s", path, err, remedy(err))
	}
}

// remedy says what helps against an error of the file system; empty where that is not known.
func remedy(err error) string {
	switch {
	case full(err):
		return ": free disk space and start berthd again"
	case errors.Is(err, syscall.EROFS):
		return ": mount the file system for writing, or use another state directory"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return ": raise the limit on open files (ulimit -n, LimitNOFILE=)"
	case errors.Is(err, fs.ErrPermission):
		return ": run berthd as the user that owns it, or use another state directory"
	}
	return ""
}

// prepare brings the file to the newest schema and reads what does not change while it is open.
func (s *Store) prepare(steps []migration) error {
	if err := syncDir(filepath.Dir(s.path)); err != nil {
		return fmt.Errorf("open the ledger %s: %w", s.path, err)
	}
	if err := s.migrate(steps); err != nil {
		return err
	}
	if err := s.takeUpBackup(); err != nil {
		return err
	}
	return s.View(func(tx *Tx) error {
		s.schema = tx.number32(schemaKey)
		s.instance = string(tx.meta(instanceKey))
		s.revision.Store(tx.Revision())
		return nil
	})
}

// Close waits until everything that was handed in is committed, then closes the file. Updates
// handed in later fail with STOPPING. It may be called more than once. It waits for open Views.
func (s *Store) Close() error {
	s.closing.Do(func() {
		s.queue.close()
		<-s.finished
		if err := s.db.Close(); err != nil {
			s.closeErr = fmt.Errorf("close the ledger %s: %w", s.path, err)
		}
	})
	return s.closeErr
}

// Instance returns the broker's instance id: 16 hexadecimal characters made with the ledger.
func (s *Store) Instance() string { return s.instance }

// Schema returns the version of the file's layout.
func (s *Store) Schema() uint32 { return s.schema }

// Path returns the file's path as it was given to Open.
func (s *Store) Path() string { return s.path }

// SizeBytes returns the file's size, free pages included; 0 when the file can't be looked at.
func (s *Store) SizeBytes() int64 {
	info, err := os.Stat(s.path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// Revision returns the ledger's revision as of the last commit.
func (s *Store) Revision() uint64 { return s.revision.Load() }

// OnCommit has f called after each commit, in their order, by the writer and before the callers of
// that commit are answered. f must be quick and must not call Update. Register before the first Update.
func (s *Store) OnCommit(f func(Commit)) { s.onCommit = append(s.onCommit, f) }

// View runs fn on a consistent snapshot of what is committed. The transaction is over when fn
// returns; fn must not block and must not call Update, since a growing file waits for it. It returns
// fn's error as it is, or STOPPING after Close.
func (s *Store) View(fn func(*Tx) error) error {
	tx, err := s.begin(false)
	if err != nil {
		return err
	}
	defer func() { _ = tx.bolt.Rollback() }()
	return fn(tx)
}

// begin starts a transaction.
func (s *Store) begin(writable bool) (*Tx, error) {
	raw, err := s.db.Begin(writable)
	if errors.Is(err, berrors.ErrDatabaseNotOpen) {
		return nil, errStopping()
	}
	if err != nil {
		return nil, fault.New(fault.StoreFailed, "begin a transaction on the ledger %s: %w", s.path, err)
	}
	return newTx(raw, s.now)
}

func errStopping() error {
	return fault.New(fault.Stopping, "the ledger is closed: the broker is stopping")
}

// KeyFingerprint returns the fingerprint of the key with which the ledger's secrets are sealed, ""
// while none was set.
func (s *Store) KeyFingerprint() (string, error) {
	var fingerprint string
	err := s.View(func(tx *Tx) error {
		fingerprint = string(tx.meta(fingerprintKey))
		return nil
	})
	return fingerprint, err
}

// SetKeyFingerprint stores the fingerprint of the key with which the ledger's secrets are sealed.
func (s *Store) SetKeyFingerprint(ctx context.Context, fingerprint string) error {
	return s.Update(ctx, func(tx *Tx) error {
		return tx.setMeta(fingerprintKey, []byte(fingerprint))
	})
}
