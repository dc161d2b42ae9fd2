// Package spool keeps the output of one stream of one job: a bounded head and a bounded tail with
// absolute offsets, in memory while it is small, else in files. An append never fails and never
// waits for a reader; what cannot be kept is dropped and counted. The package knows no jobs.
//
// On disk a stream "stdout" in a directory is
//
//	stdout.head        its first bytes, at most half of the limit
//	stdout.<offset>    segments of its tail, each beginning at the offset that names it
//
// Invariants: bytes at an offset never change; the kept ranges are in order, disjoint, below the
// total and, together, never more than the limit; total = kept + dropped.
package spool

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
	"sync"
	"time"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/regular"
)

const (
	// DefaultLimit is how much of a stream is kept by default, in bytes.
	DefaultLimit = 64 << 20
	// memoryBytes is how much of a stream may stay in memory, in bytes: most commands write less and need no
	// file then.
	memoryBytes = 32 << 10
	// segmentsPerLimit divides the limit into segments of the tail, which are dropped as a whole.
	segmentsPerLimit = 16
	// minSegment keeps small limits from creating a file for every few bytes, in bytes, unless the tail would
	// have fewer than minSegments of them.
	minSegment  = 64 << 10
	minSegments = 4
	// maxRanges bounds the segments of a tail with gaps of failed writes.
	maxRanges = 32
	// maxOffset bounds the offsets of segments that are found on disk, in bytes, so that no sum of two
	// of them overflows.
	maxOffset = 1 << 62
)

// Options say how a stream is kept.
type Options struct {
	Dir    string // of the job; made with the first file, its parent exists
	Name   string // "stdout" or "stderr"
	Limit  uint64 // bytes kept; 0 is DefaultLimit
	Memory bool   // a small output may stay in memory, and be lost with it
}

// Stream is one stream. All its methods may be called concurrently, but Append by one writer only.
type Stream struct {
	options Options
	headMax uint64
	tailMax uint64
	segment uint64

	mu        sync.Mutex
	memory    []byte // the head, while it is in memory
	inMemory  bool
	head      uint64 // bytes of the head
	headEnded bool   // the head takes no more
	tail      []segment
	total     uint64
	exitEnd   *berthv1.OutputStats_EndAtExit // nil while the command's leader runs
	sealed    bool
	writing   *os.File // the head or the last segment
	files     bool     // there may be a file
	changed   chan struct{}
	marks     []mark
	markGap   int64 // nanoseconds between marks
	cursors   map[*Cursor]struct{}
	moved     chan struct{} // closed when a cursor moves, if the writer waits
}

// segment is a part of the tail in a file of its own.
type segment struct{ from, length uint64 }

func (s segment) to() uint64 { return s.from + s.length }

// New returns an empty stream. It creates no file before there is something to write to it.
func New(options Options) *Stream {
	if options.Limit == 0 {
		options.Limit = DefaultLimit
	}
	s := &Stream{options: options, inMemory: options.Memory}
	s.headMax = options.Limit / 2
	s.tailMax = options.Limit - s.headMax
	s.segment = max(options.Limit/segmentsPerLimit, min(minSegment, s.tailMax/minSegments), 1)
	return s
}

// Reopen returns a sealed stream as an earlier process left it on disk. stats are what was
// recorded about it, or nil.
func Reopen(options Options, stats *berthv1.OutputStats) (*Stream, error) {
	options.Memory = false
	s := New(options)
	s.sealed, s.headEnded = true, true
	entries, err := os.ReadDir(options.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the spool %s: %w", options.Dir, err)
	}
	for _, entry := range entries {
		name, found := strings.CutPrefix(entry.Name(), options.Name+".")
		info, err := entry.Info()
		if !found || err != nil || !info.Mode().IsRegular() || info.Size() <= 0 {
			continue
		}
		s.files = true
		size := uint64(info.Size())
		if name == "head" {
			s.head = size
		} else if from, err := strconv.ParseUint(name, 10, 64); err == nil && from <= maxOffset && name == strconv.FormatUint(from, 10) {
			s.tail = append(s.tail, segment{from, size})
		}
	}
	slices.SortFunc(s.tail, func(a, b segment) int { return cmp.Compare(a.from, b.from) })
	s.tail = disjoint(s.head, s.tail)
	s.total = max(s.head, min(stats.GetTotalBytes(), maxOffset))
	if len(s.tail) > 0 {
		s.total = max(s.total, s.tail[len(s.tail)-1].to())
	}
	if stats != nil {
		s.exitEnd, _ = stats.GetExit().(*berthv1.OutputStats_EndAtExit)
	}
	return s, nil
}

// disjoint drops segments that overlap an earlier one. None was ever written, but a job may have changed the
// files.
func disjoint(end uint64, tail []segment) []segment {
	return slices.DeleteFunc(tail, func(t segment) bool {
		if t.from < end {
			return true
		}
		end = t.to()
		return false
	})
}

// Append takes the next bytes of the stream, which were read at a time. It does not retain p.
func (s *Stream) Append(p []byte, when time.Time) {
	if len(p) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sealed {
		return
	}
	s.markTime(when)
	rest := s.appendHead(p)
	s.total += uint64(len(p) - len(rest))
	s.appendTail(rest)
	s.wake()
}

// appendHead returns what the head did not take.
func (s *Stream) appendHead(p []byte) []byte {
	if s.headEnded {
		return p
	}
	take := min(uint64(len(p)), s.headMax-s.head)
	if s.inMemory && s.head+take <= memoryBytes && take == uint64(len(p)) {
		s.memory = append(s.memory, p...)
		s.head += take
		return nil
	}
	if s.inMemory && !s.spill() {
		s.headEnded = true // what is in memory stays there
		return p
	}
	var n uint64
	if take > 0 {
		n = s.write("head", p[:take])
		s.head += n
	}
	if n < take || s.head == s.headMax {
		s.headEnded = true
		s.closeWriter()
	}
	return p[n:]
}

// spill moves the head from memory to its file, and says whether it could.
func (s *Stream) spill() bool {
	if len(s.memory) == 0 {
		s.inMemory = false
		return true
	}
	if n := s.write("head", s.memory); n < uint64(len(s.memory)) {
		s.closeWriter()
		_ = os.Remove(s.path("head"))
		return false
	}
	s.memory, s.inMemory = nil, false
	return true
}

// appendTail counts p and adds it to the tail, dropping the oldest segments. Bytes that would be dropped
// within the same call are not written at all.
func (s *Stream) appendTail(p []byte) {
	if skip := uint64(len(p)); skip > s.tailMax {
		skip -= s.tailMax
		s.closeWriter()
		s.total += skip
		p = p[skip:]
	}
	for len(p) > 0 {
		last := len(s.tail) - 1
		if last < 0 || s.tail[last].to() != s.total || s.tail[last].length >= s.segment {
			s.closeWriter()
			s.tail = append(s.tail, segment{from: s.total})
			last++
		}
		chunk := p[:min(uint64(len(p)), s.segment-s.tail[last].length)]
		s.makeSpace(uint64(len(chunk)))
		last = len(s.tail) - 1
		n := s.write(strconv.FormatUint(s.tail[last].from, 10), chunk)
		s.tail[last].length += n
		if n < uint64(len(chunk)) {
			// The disk is full or broken: the rest of this chunk is dropped, and the next one tries a segment of
			// its own.
			s.closeWriter()
			if s.tail[last].length == 0 {
				_ = os.Remove(s.path(strconv.FormatUint(s.tail[last].from, 10)))
				s.tail = s.tail[:last]
			}
		}
		s.total += uint64(len(chunk))
		p = p[len(chunk):]
	}
}

// makeSpace drops the oldest segments, never the last, until n more bytes fit into the tail.
func (s *Stream) makeSpace(n uint64) {
	var size uint64
	for _, t := range s.tail {
		size += t.length
	}
	for len(s.tail) > 1 && (size+n > s.tailMax || len(s.tail) > maxRanges) {
		size -= s.tail[0].length
		_ = os.Remove(s.path(strconv.FormatUint(s.tail[0].from, 10)))
		s.tail = slices.Delete(s.tail, 0, 1)
	}
}

// write appends to the file that is being written, opening it if none is, and returns how many
// bytes were written.
func (s *Stream) write(name string, p []byte) uint64 {
	if s.writing == nil {
		file, err := s.create(name)
		if err != nil {
			return 0
		}
		s.writing, s.files = file, true
	}
	n, _ := s.writing.Write(p)
	return uint64(max(n, 0))
}

func (s *Stream) create(name string) (*os.File, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_APPEND
	file, err := regular.OpenOwn(s.path(name), flags)
	if !errors.Is(err, fs.ErrNotExist) {
		return file, err
	}
	if err := os.Mkdir(s.options.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return regular.Open(s.path(name), flags)
}

func (s *Stream) closeWriter() {
	if s.writing != nil {
		_ = s.writing.Close()
		s.writing = nil
	}
}

// MarkExit records that the command's leader has ended and its output was drained.
func (s *Stream) MarkExit() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exitEnd == nil {
		s.exitEnd = &berthv1.OutputStats_EndAtExit{EndAtExit: s.total}
		s.wake()
	}
}

// Seal ends the stream and closes its files.
func (s *Stream) Seal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeWriter()
	s.sealed = true
	s.wake()
}

// Sync syncs the output of a stream that is still written to.
func (s *Stream) Sync() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writing == nil {
		return nil
	}
	if err := s.writing.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", s.writing.Name(), err)
	}
	return nil
}

// Sealed says whether the stream has ended.
func (s *Stream) Sealed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sealed
}

// EndAtExit returns the total when the command's leader had ended, and before that the total.
func (s *Stream) EndAtExit() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exitEnd != nil {
		return s.exitEnd.EndAtExit
	}
	return s.total
}

// OnDisk says whether the stream may have files in its directory.
func (s *Stream) OnDisk() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.files
}

// MemoryBytes returns how much of it is in memory.
func (s *Stream) MemoryBytes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.memory)
}

// Changed returns a channel that is closed at the next append or seal, and the state before that.
func (s *Stream) Changed() (changed <-chan struct{}, total uint64, sealed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed, s.total, s.sealed
}

func (s *Stream) wake() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// Stats returns the stream's stats.
func (s *Stream) Stats() *berthv1.OutputStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	stats := &berthv1.OutputStats{TotalBytes: s.total, Kept: s.kept(), Sealed: s.sealed}
	if s.exitEnd != nil {
		stats.Exit = s.exitEnd
	}
	stats.DroppedBytes = s.total
	for _, r := range stats.Kept {
		stats.DroppedBytes -= r.To - r.From
	}
	return stats
}

// kept returns the ranges that can be read, with adjacent ones merged.
func (s *Stream) kept() []*berthv1.ByteRange {
	var ranges []*berthv1.ByteRange
	if s.head > 0 {
		ranges = append(ranges, &berthv1.ByteRange{To: s.head})
	}
	for _, t := range s.tail {
		if n := len(ranges); n > 0 && ranges[n-1].To == t.from {
			ranges[n-1].To = t.to()
		} else if t.length > 0 {
			ranges = append(ranges, &berthv1.ByteRange{From: t.from, To: t.to()})
		}
	}
	return ranges
}

// Read returns at most limit bytes from an offset on, as far as they lie in one range. When the
// offset was dropped there are none, and nextKept is the next offset that can be read, which is the
// total when there is none yet.
func (s *Stream) Read(offset, limit uint64) (data []byte, nextKept uint64, err error) {
	for uint64(len(data)) < limit {
		more, next, err := s.readChunk(offset+uint64(len(data)), limit-uint64(len(data)))
		if err != nil {
			return nil, 0, err
		}
		if len(more) == 0 {
			if len(data) == 0 {
				nextKept = next
			}
			break
		}
		if data == nil {
			data = more
		} else {
			data = append(data, more...)
		}
	}
	return data, nextKept, nil
}

// place is where an offset's bytes are.
type place struct {
	end          bool   // beyond the total
	memory       []byte // the bytes, when they are in memory
	name         string // of the file, when they are in one
	from, length uint64 // the file's range
	nextKept     uint64 // when they were dropped
}

// locate runs under the lock.
func (s *Stream) locate(offset uint64) place {
	switch {
	case offset >= s.total:
		return place{end: true}
	case offset < s.head && s.memory != nil:
		return place{memory: s.memory[offset:s.head:s.head]}
	case offset < s.head:
		return place{name: "head", length: s.head}
	}
	for _, t := range s.tail {
		switch {
		case offset < t.from:
			return place{nextKept: t.from}
		case offset < t.to():
			return place{name: strconv.FormatUint(t.from, 10), from: t.from, length: t.length}
		}
	}
	return place{nextKept: s.total}
}

// readChunk reads from one file or the memory. It opens the file under the lock, so that a segment
// which is dropped meanwhile can still be read, and reads outside of it.
func (s *Stream) readChunk(offset, limit uint64) (data []byte, nextKept uint64, err error) {
	s.mu.Lock()
	at := s.locate(offset)
	if at.name == "" {
		s.mu.Unlock()
		data = at.memory[:min(uint64(len(at.memory)), limit)]
		return data[:len(data):len(data)], at.nextKept, nil
	}
	file, err := regular.Open(s.path(at.name), os.O_RDONLY)
	s.mu.Unlock()
	if err != nil {
		return nil, 0, fmt.Errorf("open spooled output: %w", err)
	}
	defer func() { _ = file.Close() }()
	data = make([]byte, min(limit, at.from+at.length-offset))
	n, err := file.ReadAt(data, int64(offset-at.from))
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, 0, fmt.Errorf("read spooled output %s: %w", file.Name(), err)
	}
	if n == 0 {
		return nil, 0, fmt.Errorf("read spooled output %s at %d: %w", file.Name(), offset-at.from, io.ErrUnexpectedEOF)
	}
	return data[:n], 0, nil
}

// Excerpt returns the first and the last bytes, at most limit in all. When everything fits, it is
// all in head.
func (s *Stream) Excerpt(limit uint64) (head, tail []byte, tailOffset uint64, err error) {
	s.mu.Lock()
	ranges, total := s.kept(), s.total
	s.mu.Unlock()
	if len(ranges) == 0 || limit == 0 {
		return nil, nil, total, nil
	}
	first, last := ranges[0], ranges[len(ranges)-1]
	headLength, tailFrom := uint64(0), last.From
	if first.From == 0 {
		headLength = first.To
		if headLength == total && total <= limit {
			head, _, err = s.Read(0, total)
			return head, nil, total, err
		}
		headLength = min(headLength, limit/2)
	}
	tailFrom = max(tailFrom, headLength)
	if rest := limit - headLength; last.To-tailFrom > rest {
		tailFrom = last.To - rest
	}
	if headLength > 0 {
		if head, _, err = s.Read(0, headLength); err != nil {
			return nil, nil, 0, err
		}
	}
	tail, _, err = s.Read(tailFrom, last.To-tailFrom)
	return head, tail, tailFrom, err
}

func (s *Stream) path(name string) string {
	return filepath.Join(s.options.Dir, s.options.Name+"."+name)
}
