// Package backup makes copies of the ledger while the broker runs, and gives them out in chunks. It never
// reads a record.
package backup

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
)

// chunkBytes is the size of a backup's chunks: far below the message limit, and large enough for a disk.
const chunkBytes = 256 << 10

// Chunk is a part of a backup. The last one has no data and the checksum of all.
type Chunk struct {
	Data   []byte // the receiver's to keep
	Total  uint64 // bytes in all
	SHA256 []byte // in the last chunk only
}

// Service makes copies of a ledger.
type Service struct {
	store   *store.Store
	scratch string        // a directory for copies; it is there only while one is made or checked
	busy    chan struct{} // taken by who uses the scratch directory
}

// New makes a service and removes what a kill left in its scratch directory. That needs space for two copies.
func New(ledger *store.Store, scratch string) (*Service, error) {
	if err := os.RemoveAll(scratch); err != nil {
		return nil, fmt.Errorf("remove what an earlier copy of the ledger left: %w", err)
	}
	return &Service{store: ledger, scratch: scratch, busy: make(chan struct{}, 1)}, nil
}

// Backup makes a consistent copy of the ledger and gives it out in chunks. The copy is whole before the
// first chunk is given out, and has no name any more, so that a slow reader holds up nobody: only its space
// on the disk is taken until it has read the end. Errors: STORE_FULL when there is no space for the copy.
func (s *Service) Backup(ctx context.Context, compact bool, give func(Chunk) error) (err error) {
	var file *os.File
	err = s.Copy(ctx, func(path string) error {
		if err := s.store.BackupTo(ctx, path, compact); err != nil {
			return err
		}
		if file, err = os.Open(filepath.Clean(path)); err != nil {
			return fmt.Errorf("read the backup: %w", err)
		}
		return nil
	})
	if file != nil {
		defer func() { _ = file.Close() }()
	}
	if err != nil {
		return err
	}
	return giveOut(file, give)
}

func giveOut(file *os.File, give func(Chunk) error) error {
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("read the backup: %w", err)
	}
	total, sum := uint64(max(info.Size(), 0)), sha256.New()
	for {
		buffer := make([]byte, chunkBytes) // a new one: gRPC may read a message after Send has returned
		n, err := io.ReadFull(file, buffer)
		if n > 0 {
			_, _ = sum.Write(buffer[:n]) // a hash takes everything
			if err := give(Chunk{Data: buffer[:n], Total: total}); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return give(Chunk{Total: total, SHA256: sum.Sum(nil)})
		case err != nil:
			return fmt.Errorf("read the backup: %w", err)
		}
	}
}

// Copy lends out the path of a file for a copy of the ledger, to one at a time, and removes it with all that
// lies beside it afterwards. Errors: STORE_FULL when there is no space for the copy.
func (s *Service) Copy(ctx context.Context, use func(path string) error) (err error) {
	select {
	case s.busy <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("another copy of the ledger is being made: %w", ctx.Err())
	}
	defer func() { <-s.busy }()
	defer func() { err = fullDisk(errors.Join(err, os.RemoveAll(s.scratch))) }()
	if err := os.MkdirAll(s.scratch, 0o700); err != nil {
		return fmt.Errorf("make a directory for a copy of the ledger: %w", err)
	}
	return use(filepath.Join(s.scratch, "ledger.db"))
}

// fullDisk says in the broker's words that the disk is full.
func fullDisk(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return fault.New(fault.StoreFull, "no space left beside the ledger for a copy of it: free space in the state directory: %w", err)
	}
	return err
}
