package spool

import (
	"bytes"
	"testing"
	"time"
)

// follow reads all there is, and says where gaps are.
func follow(t *testing.T, c *Cursor) (data []byte, gaps [][2]uint64) {
	t.Helper()
	buffer := make([]byte, 1<<10)
	for {
		chunk, err := c.Next(buffer)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case chunk.GapTo > 0:
			gaps = append(gaps, [2]uint64{chunk.Offset, chunk.GapTo})
		case len(chunk.Data) > 0:
			data = append(data, chunk.Data...)
		default:
			return data, gaps
		}
	}
}

func TestACursorReadsInOrderAndTellsGaps(t *testing.T) {
	for _, memory := range []bool{true, false} {
		s := New(Options{Dir: t.TempDir(), Name: "stdout", Limit: 64 << 10, Memory: memory})
		c := s.Follow(0)
		s.Append([]byte("first "), noon)
		if data, gaps := follow(t, c); string(data) != "first " || gaps != nil {
			t.Errorf("%q, %v", data, gaps)
		}
		s.Append(bytes.Repeat([]byte("x"), 32<<10-6), noon)
		s.Append(bytes.Repeat([]byte("y"), 100<<10), noon)
		s.Append([]byte("last"), noon)
		data, gaps := follow(t, c)
		if len(gaps) != 1 || gaps[0][0] != 32<<10 || !bytes.HasSuffix(data, []byte("yyylast")) {
			t.Errorf("%d bytes, gaps %v", len(data), gaps)
		}
		if got := uint64(len(data)) + 6 + gaps[0][1] - gaps[0][0]; got != 132<<10+4 || c.Offset() != got {
			t.Errorf("%d in all, at %d", got, c.Offset())
		}
		c.Close()
		late := s.Follow(1 << 40)
		if data, gaps := follow(t, late); data != nil || gaps != nil {
			t.Errorf("beyond the end: %q, %v", data, gaps)
		}
		late.Close()
		s.Seal()
	}
}

func TestAWriterWaitsForAReaderThatMovesAndNotForOneThatStands(t *testing.T) {
	s := New(Options{Dir: t.TempDir(), Name: "stdout", Limit: 16 << 20})
	c := s.Follow(0)
	defer c.Close()
	chunk := make([]byte, 256<<10)
	for range 400 { // 100 MiB, which ends only if a reader that stands still stops counting
		s.Pace(len(chunk))
		s.Append(chunk, time.Now())
	}
	follow(t, c)
	read := make(chan [][2]uint64)
	go func() {
		var gaps [][2]uint64
		for buffer := make([]byte, 64<<10); c.Offset() < 200<<20; {
			changed, _, _ := s.Changed()
			p, err := c.Next(buffer)
			if err != nil {
				t.Error(err)
			}
			if p.GapTo > 0 {
				gaps = append(gaps, [2]uint64{p.Offset, p.GapTo})
			} else if len(p.Data) == 0 {
				<-changed
			}
		}
		read <- gaps
	}()
	for range 400 {
		s.Pace(len(chunk))
		s.Append(chunk, time.Now())
	}
	if gaps := <-read; gaps != nil {
		t.Errorf("a reader that moves lost %v", gaps)
	}
}

func TestTheTimesOfBytesAreRememberedRoughly(t *testing.T) {
	s := New(Options{Name: "stdout", Memory: true})
	for i := range 1000 {
		s.Append([]byte("x"), noon.Add(time.Duration(i)*time.Second))
	}
	if len(s.marks) > maxMarks {
		t.Errorf("%d marks", len(s.marks))
	}
	c := s.Follow(500)
	defer c.Close()
	p, err := c.Next(make([]byte, 1))
	if late := noon.Add(500 * time.Second).Sub(p.Time); err != nil || late < 0 || late > 20*time.Second {
		t.Errorf("byte 500 is from %v, %v late, %v", p.Time, late, err)
	}
}
