package reconcile

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
)

// pieceBytes is the size of a backup's pieces: far below the message limit, and large enough for a disk.
const pieceBytes = 256 << 10

// Piece is a part of a backup. The last one has no data and the checksum of all.
type Piece struct {
	Data   []byte // the receiver's to keep
	Total  uint64 // bytes in all
	SHA256 []byte // in the last piece only
}

// Backup makes a consistent copy of the ledger and gives it out in pieces. The copy is whole before the
// first piece is given out, and has no name any more, so that a slow reader holds up nobody: only its room
// on the disk is taken until it has read the end. Errors: STORE_FULL when there is no room for the copy.
func (s *Service) Backup(ctx context.Context, compact bool, give func(Piece) error) (err error) {
	var file *os.File
	err = s.withScratch(ctx, func(path string) error {
		if err := s.opts.Store.BackupTo(ctx, path, compact); err != nil {
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

func giveOut(file *os.File, give func(Piece) error) error {
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("read the backup: %w", err)
	}
	total, sum := uint64(max(info.Size(), 0)), sha256.New()
	for {
		buffer := make([]byte, pieceBytes) // a new one: gRPC may read a message after Send has returned
		n, err := io.ReadFull(file, buffer)
		if n > 0 {
			_, _ = sum.Write(buffer[:n]) // a hash takes everything
			if err := give(Piece{Data: buffer[:n], Total: total}); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return give(Piece{Total: total, SHA256: sum.Sum(nil)})
		case err != nil:
			return fmt.Errorf("read the backup: %w", err)
		}
	}
}

// withScratch lends out the path of a file in the scratch directory, to one at a time, and removes the
// directory with all that is in it afterwards. What a kill leaves there goes at the next start.
func (s *Service) withScratch(ctx context.Context, use func(path string) error) (err error) {
	select {
	case s.copying <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("another copy of the ledger is being made: %w", ctx.Err())
	}
	defer func() { <-s.copying }()
	defer func() { err = roomless(errors.Join(err, os.RemoveAll(s.opts.Scratch))) }()
	if err := os.MkdirAll(s.opts.Scratch, 0o700); err != nil {
		return fmt.Errorf("make room for a copy of the ledger: %w", err)
	}
	return use(filepath.Join(s.opts.Scratch, "ledger.db"))
}

// roomless says in our words that the disk is full.
func roomless(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return fault.New(fault.StoreFull, "there is no room beside the ledger for a copy of it: make room in the state directory: %w", err)
	}
	return err
}
