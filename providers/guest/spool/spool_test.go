package spool

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// noon is when everything is written here.
var noon = time.Unix(1_700_000_000, 0)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestASmallOutputInMemoryTouchesNoFile(t *testing.T) {
	dir := t.TempDir()
	s := New(Options{Dir: dir, Name: "stdout", Memory: true})
	s.Append(bytes.Repeat([]byte("x"), memoryBytes), noon)
	if s.OnDisk() || files(t, dir) != 0 {
		t.Error("a file was made")
	}
	s.Append([]byte("y"), noon)
	if !s.OnDisk() || files(t, dir) != 1 || s.MemoryBytes() != 0 {
		t.Error("it did not move to disk")
	}
	s.Seal()
	data, _, err := s.Read(memoryBytes-1, 10)
	if err != nil || string(data) != "xy" {
		t.Errorf("read %q, %v", data, err)
	}
}

func TestAnExcerptIsAllOrTheTwoEnds(t *testing.T) {
	for _, test := range []struct {
		name       string
		limit      uint64
		head, tail string
		offset     uint64
	}{
		{"all of it", 10, "0123456789", "", 10},
		{"more than there is", 100, "0123456789", "", 10},
		{"half and half", 4, "01", "89", 8},
		{"an odd byte goes to the tail", 5, "01", "789", 7},
		{"a single byte", 1, "", "9", 9},
		{"nothing", 0, "", "", 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := New(Options{Dir: t.TempDir(), Name: "stdout", Memory: true})
			s.Append([]byte("0123456789"), noon)
			head, tail, offset, err := s.Excerpt(test.limit)
			if err != nil || string(head) != test.head || string(tail) != test.tail || offset != test.offset {
				t.Errorf("got %q, %q at %d, %v", head, tail, offset, err)
			}
		})
	}
}

func TestAnExcerptOfATornOutputIsItsTwoEnds(t *testing.T) {
	s := New(Options{Dir: t.TempDir(), Name: "stdout", Limit: 64})
	var all []byte
	for i := range 100 {
		all = append(all, byte(i), 'x', 'y', 'z')
		s.Append(all[len(all)-4:], noon)
	}
	head, tail, offset, err := s.Excerpt(1000)
	if err != nil || !bytes.Equal(head, all[:32]) || !bytes.Equal(tail, all[offset:]) || len(tail) < 16 || len(tail) > 32 {
		t.Errorf("head of %d, tail of %d at %d, %v", len(head), len(tail), offset, err)
	}
}

func TestWaitersWakeAtAppendAndSeal(t *testing.T) {
	s := New(Options{Dir: t.TempDir(), Name: "stdout", Memory: true})
	for _, change := range []func(){func() { s.Append([]byte("x"), noon) }, s.Seal} {
		changed, _, _ := s.Changed()
		select {
		case <-changed:
			t.Error("woken by nothing")
		default:
		}
		change()
		<-changed
	}
	if _, total, sealed := s.Changed(); total != 1 || !sealed {
		t.Errorf("total %d, sealed %v", total, sealed)
	}
	s.Append([]byte("late"), noon)
	if stats := s.Stats(); stats.GetTotalBytes() != 1 {
		t.Error("a sealed stream grew")
	}
}

// model remembers everything that was written; a stream must agree with it wherever it kept bytes.
type model struct{ all []byte }

func TestAStreamAgreesWithAModelWhateverIsWritten(t *testing.T) {
	for seed := range uint64(60) {
		random := rand.New(rand.NewPCG(seed, 1))
		limit := []uint64{1, 7, 64, 1000, 4 << 10, 100 << 10, 300 << 10, 2 << 20}[random.IntN(8)]
		options := Options{Dir: t.TempDir(), Name: "stdout", Limit: limit, Memory: random.IntN(2) == 0}
		s, m := New(options), &model{}
		exit := uint64(0)
		for step := range 60 {
			chunk := make([]byte, random.IntN(1+random.IntN(int(min(2*limit, 200<<10))+1)))
			for i := range chunk {
				chunk[i] = byte(random.Uint32())
			}
			s.Append(chunk, noon)
			m.all = append(m.all, chunk...)
			if step == 40 {
				s.MarkExit()
				exit = uint64(len(m.all))
			}
			if random.IntN(5) == 0 {
				m.check(t, seed, s, limit, random)
			}
		}
		m.check(t, seed, s, limit, random)
		s.Seal()
		before := s.Stats()
		if before.GetEndAtExit() != exit || !before.GetSealed() {
			t.Fatalf("seed %d: stats %v", seed, before)
		}
		if s.MemoryBytes() > 0 {
			continue
		}
		again, err := Reopen(options, before)
		if err != nil {
			t.Fatal(err)
		}
		if got := again.Stats(); got.String() != before.String() {
			t.Fatalf("seed %d: reopened as %v, was %v", seed, got, before)
		}
		m.check(t, seed, again, limit, random)
	}
}

func (m *model) check(t *testing.T, seed uint64, s *Stream, limit uint64, random *rand.Rand) {
	t.Helper()
	stats := s.Stats()
	if stats.GetTotalBytes() != uint64(len(m.all)) {
		t.Fatalf("seed %d: total %d, wrote %d", seed, stats.GetTotalBytes(), len(m.all))
	}
	var kept, end uint64
	for i, r := range stats.GetKept() {
		if r.GetFrom() >= r.GetTo() || i > 0 && r.GetFrom() <= end || r.GetTo() > stats.GetTotalBytes() {
			t.Fatalf("seed %d: kept %v", seed, stats.GetKept())
		}
		end = r.GetTo()
		kept += r.GetTo() - r.GetFrom()
		data, _, err := s.Read(r.GetFrom(), r.GetTo()-r.GetFrom())
		if err != nil || !bytes.Equal(data, m.all[r.GetFrom():r.GetTo()]) {
			t.Fatalf("seed %d: the bytes of %v changed: %v", seed, r, err)
		}
	}
	if kept > limit || kept+stats.GetDroppedBytes() != stats.GetTotalBytes() {
		t.Fatalf("seed %d: limit %d, kept %d, stats %v", seed, limit, kept, stats)
	}
	if stats.GetTotalBytes() > 0 && end != stats.GetTotalBytes() {
		t.Fatalf("seed %d: the last byte is not kept: %v", seed, stats)
	}
	for range 10 {
		offset := random.Uint64N(stats.GetTotalBytes() + 2)
		data, next, err := s.Read(offset, 1+random.Uint64N(100))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if len(data) > 0 {
			if !bytes.Equal(data, m.all[offset:offset+uint64(len(data))]) {
				t.Fatalf("seed %d: wrong bytes at %d", seed, offset)
			}
		} else if offset < stats.GetTotalBytes() && next <= offset {
			t.Fatalf("seed %d: %d was dropped, next kept %d", seed, offset, next)
		}
	}
}

func TestADiskThatFailsDropsAndRecovers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later", "job")
	s := New(Options{Dir: dir, Name: "stdout", Limit: 1 << 20})
	s.Append([]byte("lost "), noon)
	if stats := s.Stats(); stats.GetTotalBytes() != 5 || stats.GetDroppedBytes() != 5 || len(stats.GetKept()) != 0 {
		t.Errorf("on a broken disk: %v", stats)
	}
	if data, next, err := s.Read(0, 10); len(data) != 0 || next != 5 || err != nil {
		t.Errorf("read %q, %d, %v", data, next, err)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	s.Append([]byte("kept"), noon)
	if data, _, err := s.Read(5, 10); string(data) != "kept" || err != nil {
		t.Errorf("read %q, %v", data, err)
	}
	s.Seal()
	again, err := Reopen(Options{Dir: dir, Name: "stdout", Limit: 1 << 20}, s.Stats())
	if err != nil || again.Stats().String() != s.Stats().String() {
		t.Errorf("reopened as %v, %v", again.Stats(), err)
	}
}

func TestMemoryThatCannotMoveToDiskIsKept(t *testing.T) {
	s := New(Options{Dir: filepath.Join(t.TempDir(), "missing", "job"), Name: "stdout", Memory: true})
	s.Append([]byte("first"), noon)
	s.Append(bytes.Repeat([]byte("x"), memoryBytes), noon)
	stats := s.Stats()
	if len(stats.GetKept()) != 1 || stats.GetKept()[0].GetTo() != 5 || stats.GetDroppedBytes() != memoryBytes {
		t.Errorf("stats %v", stats)
	}
	if data, _, err := s.Read(0, 10); string(data) != "first" || err != nil {
		t.Errorf("read %q, %v", data, err)
	}
}

func TestATailThatADiskTearsStaysBounded(t *testing.T) {
	dir := t.TempDir()
	s := New(Options{Dir: dir, Name: "stdout", Limit: 1 << 20})
	s.Append(make([]byte, 1<<19), noon)
	for range 100 {
		s.Append([]byte("kept"), noon)
		s.mu.Lock()
		s.closeWriter()
		s.options.Dir = filepath.Join(dir, "missing", "job")
		s.mu.Unlock()
		s.Append([]byte("lost"), noon)
		s.mu.Lock()
		s.options.Dir = dir
		s.mu.Unlock()
	}
	if n := len(s.Stats().GetKept()); n > maxRanges+2 {
		t.Errorf("%d ranges", n)
	}
	s.Seal()
}

func TestStatsOfNothingAreZero(t *testing.T) {
	s := New(Options{Dir: t.TempDir(), Name: "stdout"})
	if got := s.Stats().String(); got != (&berthv1.OutputStats{}).String() {
		t.Error(got)
	}
}

func files(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "stdout.") {
			n++
		}
	}
	return n
}
