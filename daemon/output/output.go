// Package output keeps job output beside the ledger: it copies it in, makes it durable, reads it, and
// removes it. A job has a directory, and in it a file for each kept range of a stream, named
// <stream>.<offset of its first byte>; a head and a tail make at most two files a stream. It never reads
// the ledger: what a receipt says of its output is handed in.
package output

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ChunkBytes is copied or replayed at a time: larger chunks are no faster, see docs/limits.md.
const ChunkBytes = 256 << 10

// Streams are a job's two.
var Streams = []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}

// Store is the output that is kept.
type Store struct {
	dir   string
	grown atomic.Bool // since Grown was called
}

// Open opens the store in a directory, which is made if it is missing.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for job output: %w", err)
	}
	s := &Store{dir: dir}
	s.grown.Store(true)
	return s, nil
}

// CopyIn copies [offset, to) of a range that begins at from, and returns how far it came. The copy ends
// early, without an error, where read returns no bytes, and where the disk is full: full is that error then.
func (s *Store) CopyIn(jobID string, stream berthv1.Stream, from, offset, to uint64, read func(offset, limit uint64) ([]byte, error)) (copied uint64, full, err error) {
	for offset < to {
		data, err := read(offset, min(to-offset, ChunkBytes))
		if err != nil || len(data) == 0 {
			return offset, nil, err
		}
		data = data[:min(uint64(len(data)), to-offset)]
		if err := s.write(jobID, stream, from, offset, data); err != nil {
			if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
				return offset, err, nil
			}
			return offset, nil, err // it passes, as a lack of descriptors does
		}
		offset += uint64(len(data))
	}
	return offset, nil, nil
}

// write puts bytes of a range that begins at from, at offset.
func (s *Store) write(jobID string, stream berthv1.Stream, from, offset uint64, data []byte) error {
	dir := filepath.Join(s.dir, jobID)
	file, err := os.OpenFile(s.file(jobID, stream, from), os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("keep output of %s: %w", jobID, err)
		}
		file, err = os.OpenFile(s.file(jobID, stream, from), os.O_WRONLY|os.O_CREATE, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep output of %s: %w", jobID, err)
	}
	s.grown.Store(true)
	_, err = file.WriteAt(data, int64(offset-from))
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("keep output of %s: %w", jobID, err)
	}
	return nil
}

// Sync makes what was copied in of a job durable.
func (s *Store) Sync(jobID string) error {
	dir := filepath.Join(s.dir, jobID)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the output of %s: %w", jobID, err)
	}
	for _, entry := range entries {
		if err := syncPath(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("make the output of %s durable: %w", jobID, err)
		}
	}
	return errors.Join(syncPath(dir), syncPath(s.dir))
}

func syncPath(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// Prune removes files of ranges that a receipt does not keep. One that can't be removed costs disk space
// only.
func (s *Store) Prune(jobID string, stdout, stderr *berthv1.OutputStats) {
	entries, err := os.ReadDir(filepath.Join(s.dir, jobID))
	if err != nil {
		return
	}
	wanted := map[string]bool{}
	for _, r := range stdout.GetKept() {
		wanted[fileName(berthv1.Stream_STREAM_STDOUT, r.GetFrom())] = true
	}
	for _, r := range stderr.GetKept() {
		wanted[fileName(berthv1.Stream_STREAM_STDERR, r.GetFrom())] = true
	}
	for _, entry := range entries {
		if !wanted[entry.Name()] {
			_ = os.Remove(filepath.Join(s.dir, jobID, entry.Name()))
		}
	}
}

// Ranges lists what is stored of a stream, in order and without overlaps.
func (s *Store) Ranges(jobID string, stream berthv1.Stream) []*berthv1.ByteRange {
	entries, err := os.ReadDir(filepath.Join(s.dir, jobID))
	if err != nil {
		return nil
	}
	prefix := StreamName(stream) + "."
	var ranges []*berthv1.ByteRange
	for _, entry := range entries {
		offset, found := strings.CutPrefix(entry.Name(), prefix)
		from, err := strconv.ParseUint(offset, 10, 63)
		info, infoErr := entry.Info()
		if found && err == nil && infoErr == nil && info.Size() > 0 {
			ranges = append(ranges, &berthv1.ByteRange{From: from, To: from + uint64(info.Size())})
		}
	}
	slices.SortFunc(ranges, func(a, b *berthv1.ByteRange) int { return cmp.Compare(a.GetFrom(), b.GetFrom()) })
	ordered, end := ranges[:0], uint64(0)
	for _, r := range ranges {
		if len(ordered) == 0 || r.GetFrom() >= end {
			ordered, end = append(ordered, r), r.GetTo()
		}
	}
	return ordered
}

// errGone says that bytes which a receipt names are not there: they were dropped meanwhile to free disk
// space, or somebody removed them.
var errGone = errors.New("that output is no longer stored")

// readRange returns bytes of a kept range, one at least; errGone where there is none.
func (s *Store) readRange(jobID string, stream berthv1.Stream, from, offset, limit uint64) ([]byte, error) {
	file, err := os.Open(s.file(jobID, stream, from))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errGone
	}
	if err != nil {
		return nil, fmt.Errorf("read kept output of %s: %w", jobID, err)
	}
	defer func() { _ = file.Close() }()
	data := make([]byte, limit)
	n, err := file.ReadAt(data, int64(offset-from))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read kept output of %s: %w", jobID, err)
	}
	if n == 0 && limit > 0 {
		return nil, errGone
	}
	return data[:n], nil
}

// Lacks reports whether output that a receipt names is not there.
func (s *Store) Lacks(jobID string, stream berthv1.Stream, stats *berthv1.OutputStats) bool {
	for _, kept := range stats.GetKept() {
		info, err := os.Stat(s.file(jobID, stream, kept.GetFrom()))
		if kept.GetTo() > kept.GetFrom() && (err != nil || uint64(max(info.Size(), 0)) < kept.GetTo()-kept.GetFrom()) {
			return true
		}
	}
	return false
}

// Remove drops all that is stored of a job.
func (s *Store) Remove(jobID string) error { return os.RemoveAll(filepath.Join(s.dir, jobID)) }

// Size returns the bytes that are stored in all.
func (s *Store) Size() uint64 {
	var total uint64
	_ = filepath.WalkDir(s.dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return nil //nolint:nilerr // a job that is being removed is not counted
		}
		if info, err := entry.Info(); err == nil {
			total += uint64(info.Size())
		}
		return nil
	})
	return total
}

// Grown reports whether bytes were copied in since it was called last, or since Regrow.
func (s *Store) Grown() bool { return s.grown.Swap(false) }

// Regrow has the next Grown report growth.
func (s *Store) Regrow() { s.grown.Store(true) }

// Names lists the names of what lies in the directory of kept output: a job's id each.
func (s *Store) Names() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list the kept output: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, nil
}

// Written returns when something below a name was written last; fs.ErrNotExist when it is not there.
func (s *Store) Written(name string) (written time.Time, err error) {
	err = filepath.WalkDir(filepath.Join(s.dir, name), func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil && info.ModTime().After(written) {
			written = info.ModTime()
		}
		return err
	})
	return written, err
}

func (s *Store) file(jobID string, stream berthv1.Stream, from uint64) string {
	return filepath.Join(s.dir, jobID, fileName(stream, from))
}

func fileName(stream berthv1.Stream, from uint64) string {
	return StreamName(stream) + "." + strconv.FormatUint(from, 10)
}

// StreamName is a stream's name in files and errors.
func StreamName(stream berthv1.Stream) string {
	if stream == berthv1.Stream_STREAM_STDERR {
		return "stderr"
	}
	return "stdout"
}
