package jobs

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

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// homeOutput is the output that receipts keep, beside the ledger: a directory for each job, and in
// it a file for each range of a stream, named <stream>.<offset of its first byte>. A head and a tail
// make at most two files a stream.
type homeOutput struct {
	dir   string
	grown atomic.Bool // since somebody looked at its size
}

func openHomeOutput(dir string) (*homeOutput, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for job output: %w", err)
	}
	home := &homeOutput{dir: dir}
	home.grown.Store(true)
	return home, nil
}

// write puts bytes of a range that begins at from, at offset.
func (h *homeOutput) write(jobID string, stream berthv1.Stream, from, offset uint64, data []byte) error {
	dir := filepath.Join(h.dir, jobID)
	file, err := os.OpenFile(h.file(jobID, stream, from), os.O_WRONLY|os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("keep output of job %s: %w", jobID, err)
		}
		file, err = os.OpenFile(h.file(jobID, stream, from), os.O_WRONLY|os.O_CREATE, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep output of job %s: %w", jobID, err)
	}
	h.grown.Store(true)
	_, err = file.WriteAt(data, int64(offset-from))
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("keep output of job %s: %w", jobID, err)
	}
	return nil
}

// sync makes what was written of a job durable.
func (h *homeOutput) sync(jobID string) error {
	dir := filepath.Join(h.dir, jobID)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the output of job %s: %w", jobID, err)
	}
	for _, entry := range entries {
		if err := syncPath(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("make the output of job %s durable: %w", jobID, err)
		}
	}
	return errors.Join(syncPath(dir), syncPath(h.dir))
}

// prune removes files of ranges that a receipt does not keep. One that can't be removed costs room only.
func (h *homeOutput) prune(jobID string, kept map[berthv1.Stream][]*berthv1.ByteRange) {
	entries, err := os.ReadDir(filepath.Join(h.dir, jobID))
	if err != nil {
		return
	}
	wanted := map[string]bool{}
	for stream, ranges := range kept {
		for _, r := range ranges {
			wanted[filepath.Base(h.file(jobID, stream, r.GetFrom()))] = true
		}
	}
	for _, entry := range entries {
		if !wanted[entry.Name()] {
			_ = os.Remove(filepath.Join(h.dir, jobID, entry.Name()))
		}
	}
}

func syncPath(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// ranges lists what lies at home of one stream, in order; it is what a job whose machine is gone has.
func (h *homeOutput) ranges(jobID string, stream berthv1.Stream) []*berthv1.ByteRange {
	entries, err := os.ReadDir(filepath.Join(h.dir, jobID))
	if err != nil {
		return nil
	}
	prefix := streamName(stream) + "."
	var ranges []*berthv1.ByteRange
	for _, entry := range entries {
		offset, found := strings.CutPrefix(entry.Name(), prefix)
		from, err := strconv.ParseUint(offset, 10, 63)
		info, infoErr := entry.Info()
		if found && err == nil && infoErr == nil && info.Size() > 0 {
			ranges = append(ranges, &berthv1.ByteRange{From: from, To: from + uint64(info.Size())})
		}
	}
	return inOrder(ranges)
}

// inOrder sorts the ranges of a stream and leaves out those that overlap one before them.
func inOrder(ranges []*berthv1.ByteRange) []*berthv1.ByteRange {
	slices.SortFunc(ranges, func(a, b *berthv1.ByteRange) int { return cmp.Compare(a.GetFrom(), b.GetFrom()) })
	ordered := ranges[:0]
	end := uint64(0)
	for _, r := range ranges {
		if len(ordered) == 0 || r.GetFrom() >= end {
			ordered, end = append(ordered, r), r.GetTo()
		}
	}
	return ordered
}

// errNotKept says that bytes which a receipt names are not there: they were dropped meanwhile to make
// room, or somebody removed them.
var errNotKept = errors.New("that output is no longer kept")

// read returns bytes of a kept range, one at least; errNotKept where there is none.
func (h *homeOutput) read(jobID string, stream berthv1.Stream, from, offset uint64, limit uint64) ([]byte, error) {
	file, err := os.Open(h.file(jobID, stream, from))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errNotKept
	}
	if err != nil {
		return nil, fmt.Errorf("read kept output of job %s: %w", jobID, err)
	}
	defer func() { _ = file.Close() }()
	data := make([]byte, limit)
	n, err := file.ReadAt(data, int64(offset-from))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read kept output of job %s: %w", jobID, err)
	}
	if n == 0 && limit > 0 {
		return nil, errNotKept
	}
	return data[:n], nil
}

// remove drops all that is kept of a job.
func (h *homeOutput) remove(jobID string) error {
	return os.RemoveAll(filepath.Join(h.dir, jobID))
}

// size returns the bytes kept in all.
func (h *homeOutput) size() uint64 {
	var total uint64
	_ = filepath.WalkDir(h.dir, func(_ string, entry fs.DirEntry, err error) error {
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

func (h *homeOutput) file(jobID string, stream berthv1.Stream, from uint64) string {
	return filepath.Join(h.dir, jobID, streamName(stream)+"."+strconv.FormatUint(from, 10))
}

func streamName(stream berthv1.Stream) string {
	if stream == berthv1.Stream_STREAM_STDERR {
		return "stderr"
	}
	return "stdout"
}
