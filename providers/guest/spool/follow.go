package spool

import (
	"fmt"
	"os"
	"time"
)

const (
	// paceFloor is how fast a command may always write, in bytes a second: a reader that is slower
	// finds gaps. One that is faster finds none, since a command that overtakes it is held back for
	// as long as it takes to write one segment at this rate.
	paceFloor = 16 << 20
	// maxMarks bounds what is remembered of when bytes came; the resolution halves when it is reached.
	maxMarks = 128
	// markEvery is how far marks are apart at least.
	markEvery = time.Millisecond
)

// mark says when the bytes from an offset on came.
type mark struct {
	offset uint64
	when   int64 // nanoseconds since 1970
}

func (s *Stream) markTime(when time.Time) {
	now := when.UnixNano()
	if n := len(s.marks); n > 0 && now-s.marks[n-1].when < max(int64(markEvery), s.markGap) {
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

// timeAt returns when the byte at an offset came, as far as it is known.
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
	stalled bool // a command waited for it, in vain
}

// Piece is what a cursor finds: bytes, or a gap, or nothing yet.
type Piece struct {
	Offset uint64
	Data   []byte    // in the buffer that was given, or
	Shared bool      // the stream's own, which never change
	GapTo  uint64    // above Offset when the bytes up to here were dropped
	Time   time.Time // when the first of Data came; zero when that is not known
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

// Close gives the cursor up.
func (c *Cursor) Close() {
	c.stream.mu.Lock()
	delete(c.stream.cursors, c)
	c.stream.advanced()
	c.stream.mu.Unlock()
	c.closeFile()
}

// Offset is where the cursor stands.
func (c *Cursor) Offset() uint64 {
	c.stream.mu.Lock()
	defer c.stream.mu.Unlock()
	return c.offset
}

// Next reads what comes next, at most a buffer full, and moves on.
func (c *Cursor) Next(buffer []byte) (Piece, error) {
	s := c.stream
	s.mu.Lock()
	p := Piece{Offset: c.offset, Time: s.timeAt(c.offset)}
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
	// A segment that was dropped can be read for as long as it is open here.
	if c.file != nil && c.from <= p.Offset {
		room := len(buffer)
		if at.name != "" {
			room = int(min(uint64(room), at.from+at.length-p.Offset))
		}
		n, err := c.file.ReadAt(buffer[:room], int64(p.Offset-c.from))
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

// open makes the cursor's file the one that holds its offset, if there is one. It runs under the
// stream's lock, so that the file is not dropped meanwhile.
func (c *Cursor) open(at place) error {
	if at.name == "" || c.file != nil && c.file.Name() == c.stream.path(at.name) {
		return nil
	}
	c.closeFile()
	file, err := os.Open(c.stream.path(at.name))
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

// advanced wakes a writer that waits for its readers.
func (s *Stream) advanced() {
	if s.room != nil {
		close(s.room)
		s.room = nil
	}
}

// Pace is called by the writer before it appends n bytes. When they would push out what a cursor is
// about to read, it waits a moment: a command is never slowed below paceFloor, and not at all for a
// reader that stands still.
func (s *Stream) Pace(n int) {
	s.mu.Lock()
	if len(s.cursors) == 0 || !s.overtakes(uint64(n)) {
		s.mu.Unlock()
		return
	}
	patience := time.NewTimer(time.Duration(s.segment) * time.Second / paceFloor)
	defer patience.Stop()
	for s.overtakes(uint64(n)) {
		if s.room == nil {
			s.room = make(chan struct{})
		}
		room := s.room
		s.mu.Unlock()
		select {
		case <-room:
			s.mu.Lock()
		case <-patience.C:
			s.mu.Lock()
			s.giveUpOn(uint64(n))
		}
	}
	s.mu.Unlock()
}

// overtakes says whether n more bytes push out what a cursor that moves has yet to read.
func (s *Stream) overtakes(n uint64) bool {
	dropped := s.pushedOut(n)
	for c := range s.cursors {
		if !c.stalled && c.offset < dropped {
			return true
		}
	}
	return false
}

func (s *Stream) giveUpOn(n uint64) {
	dropped := s.pushedOut(n)
	for c := range s.cursors {
		if c.offset < dropped {
			c.stalled = true
		}
	}
}

// pushedOut returns the offset below which n more bytes push out the tail, 0 when they push nothing
// out.
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
