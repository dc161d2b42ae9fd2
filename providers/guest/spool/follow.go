package spool

import (
	"fmt"
	"os"
	"time"

	"github.com/berth-sandbox/berth/providers/guest/regular"
)

const (
	// paceFloor is how fast a command may always write, in bytes a second. A slower reader finds gaps; a faster
	// one finds none, since a command that would drop unread output is delayed for as long as it takes to
	// write one segment at this rate.
	paceFloor = 16 << 20
	// maxMarks bounds the recorded times of output; the resolution halves when it is reached.
	maxMarks = 128
	// minMarkInterval is the least time between marks.
	minMarkInterval = time.Millisecond
)

// mark records when the bytes from an offset on were read.
type mark struct {
	offset uint64
	when   int64 // nanoseconds since 1970
}

func (s *Stream) markTime(when time.Time) {
	now := when.UnixNano()
	if n := len(s.marks); n > 0 && now-s.marks[n-1].when < max(int64(minMarkInterval), s.markGap) {
		return
	}
	if len(s.marks) == maxMarks {
		for i := range maxMarks / 2 {
			s.marks[i] = s.marks[2*i]
		}
		s.marks = s.marks[:maxMarks/2]
		s.markGap = (now - s.marks[0].when) / (maxMarks / 2)
	}
	s.marks = append(s.marks, mark{s.total, now})
}

// timeAt returns when the byte at an offset was read, or zero.
func (s *Stream) timeAt(offset uint64) time.Time {
	var when int64
	for _, m := range s.marks {
		if m.offset > offset {
			break
		}
		when = m.when
	}
	if when == 0 {
		return time.Time{}
	}
	return time.Unix(0, when)
}

// Cursor reads a stream in order. It belongs to one reader.
type Cursor struct {
	stream *Stream
	file   *os.File // the file read last
	from   uint64   // offset of its first byte

	// The stream's lock guards these.
	offset  uint64
	stalled bool // a command waited for it until the timeout
}

// Chunk is what a cursor reads: bytes, or a gap, or nothing yet.
type Chunk struct {
	Offset uint64
	Data   []byte    // in the buffer that was given, or
	Shared bool      // Data is the stream's own and never changes
	GapTo  uint64    // above Offset when the bytes up to here were dropped
	Time   time.Time // when the first of Data was read; zero if unknown
}

// Follow returns a cursor at an offset. Close it.
func (s *Stream) Follow(offset uint64) *Cursor {
	c := &Cursor{stream: s, offset: offset}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cursors == nil {
		s.cursors = make(map[*Cursor]struct{})
	}
	s.cursors[c] = struct{}{}
	return c
}

// Close releases the cursor.
func (c *Cursor) Close() {
	c.stream.mu.Lock()
	delete(c.stream.cursors, c)
	c.stream.advanced()
	c.stream.mu.Unlock()
	c.closeFile()
}

// Offset returns the cursor's position.
func (c *Cursor) Offset() uint64 {
	c.stream.mu.Lock()
	defer c.stream.mu.Unlock()
	return c.offset
}

// Next reads what comes next, at most a buffer full, and advances the cursor.
func (c *Cursor) Next(buffer []byte) (Chunk, error) {
	s := c.stream
	s.mu.Lock()
	p := Chunk{Offset: c.offset, Time: s.timeAt(c.offset)}
	at := s.locate(c.offset)
	switch {
	case at.end:
		s.mu.Unlock()
		return p, nil
	case at.memory != nil:
		p.Data, p.Shared = at.memory[:min(len(at.memory), len(buffer))], true
		c.move(uint64(len(p.Data)))
		s.mu.Unlock()
		return p, nil
	}
	err := c.open(at)
	s.mu.Unlock()
	if err != nil {
		return p, err
	}
	// A segment that was dropped can be read while it is open here.
	if c.file != nil && c.from <= p.Offset {
		limit := len(buffer)
		if at.name != "" {
			limit = int(min(uint64(limit), at.from+at.length-p.Offset))
		}
		n, err := c.file.ReadAt(buffer[:limit], int64(p.Offset-c.from))
		if n > 0 {
			p.Data = buffer[:n]
			s.mu.Lock()
			c.move(uint64(n))
			s.mu.Unlock()
			return p, nil
		}
		if at.name != "" {
			return p, fmt.Errorf("read spooled output %s at %d: %w", c.file.Name(), p.Offset-c.from, err)
		}
	}
	p.GapTo = at.nextKept
	s.mu.Lock()
	c.move(at.nextKept - p.Offset)
	s.mu.Unlock()
	return p, nil
}

// open opens the file that has the cursor's offset, if there is one. It runs under the stream's lock, so
// that the file is not dropped meanwhile.
func (c *Cursor) open(at place) error {
	if at.name == "" || c.file != nil && c.file.Name() == c.stream.path(at.name) {
		return nil
	}
	c.closeFile()
	file, err := regular.Open(c.stream.path(at.name), os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("open spooled output: %w", err)
	}
	c.file, c.from = file, at.from
	return nil
}

func (c *Cursor) closeFile() {
	if c.file != nil {
		_ = c.file.Close()
		c.file = nil
	}
}

// move is called under the stream's lock.
func (c *Cursor) move(n uint64) {
	c.offset += n
	c.stalled = false
	c.stream.advanced()
}

// advanced wakes a writer that waits for readers.
func (s *Stream) advanced() {
	if s.moved != nil {
		close(s.moved)
		s.moved = nil
	}
}

// Pace is called by the writer before it appends n bytes. When that would drop output which a cursor has yet
// to read, it waits for a limited time: a command is never slowed below paceFloor, and not at all for a
// reader that makes no progress.
func (s *Stream) Pace(n int) {
	s.mu.Lock()
	if len(s.cursors) == 0 || !s.wouldDrop(uint64(n)) {
		s.mu.Unlock()
		return
	}
	timeout := time.NewTimer(time.Duration(s.segment) * time.Second / paceFloor)
	defer timeout.Stop()
	for s.wouldDrop(uint64(n)) {
		if s.moved == nil {
			s.moved = make(chan struct{})
		}
		moved := s.moved
		s.mu.Unlock()
		select {
		case <-moved:
			s.mu.Lock()
		case <-timeout.C:
			s.mu.Lock()
			s.markStalled(uint64(n))
		}
	}
	s.mu.Unlock()
}

// wouldDrop says whether n more bytes drop output that a cursor which makes progress has yet to read.
func (s *Stream) wouldDrop(n uint64) bool {
	dropped := s.pushedOut(n)
	for c := range s.cursors {
		if !c.stalled && c.offset < dropped {
			return true
		}
	}
	return false
}

func (s *Stream) markStalled(n uint64) {
	dropped := s.pushedOut(n)
	for c := range s.cursors {
		if c.offset < dropped {
			c.stalled = true
		}
	}
}

// pushedOut returns the offset below which n more bytes drop the tail, 0 when they drop nothing.
func (s *Stream) pushedOut(n uint64) uint64 {
	if len(s.tail) < 2 || s.sealed {
		return 0
	}
	var size uint64
	for _, t := range s.tail {
		size += t.length
	}
	if size+n <= s.tailMax {
		return 0
	}
	return s.tail[0].to()
}

// Discard drops all that is kept of a sealed stream from memory. Its files are the caller's.
func (s *Stream) Discard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.memory, s.marks, s.tail, s.head = nil, nil, nil, 0
	s.sealed, s.headEnded = true, true
}
