package spool

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// FuzzReopen reopens a stream from whatever files there are: no read fails or goes on for ever, and
// what is said to be kept can be read.
func FuzzReopen(f *testing.F) {
	f.Add("head", 10, "10", 5, "20", 3, uint64(23))
	f.Add("head", 10, "5", 50, "07", 3, uint64(0))
	f.Add("18446744073709551615", 9, "9223372036854775807", 9, "-1", 3, uint64(1)<<63)
	f.Add("new", 0, "head", 0, "0", 4, uint64(2))
	f.Fuzz(func(t *testing.T, a string, sizeA int, b string, sizeB int, c string, sizeC int, total uint64) {
		dir := t.TempDir()
		for name, size := range map[string]int{a: sizeA, b: sizeB, c: sizeC} {
			if size >= 0 && size < 1<<16 && name != "" && filepath.Base(name) == name {
				_ = os.WriteFile(filepath.Join(dir, "stdout."+name), make([]byte, size), 0o600)
			}
		}
		s, err := Reopen(Options{Dir: dir, Name: "stdout", Limit: 1 << 10}, &berthv1.OutputFacts{TotalBytes: total})
		if err != nil {
			t.Fatal(err)
		}
		facts := s.Facts()
		kept, end := uint64(0), uint64(0)
		for i, r := range facts.GetKept() {
			if r.GetFrom() >= r.GetTo() || i > 0 && r.GetFrom() <= end || r.GetTo() > facts.GetTotalBytes() {
				t.Fatalf("kept %v", facts)
			}
			kept, end = kept+r.GetTo()-r.GetFrom(), r.GetTo()
			for _, offset := range []uint64{r.GetFrom(), r.GetTo() - 1} {
				if data, _, err := s.Read(offset, 1); err != nil || len(data) != 1 {
					t.Fatalf("read %d of %v: %d bytes, %v", offset, facts, len(data), err)
				}
			}
		}
		if kept+facts.GetDroppedBytes() != facts.GetTotalBytes() {
			t.Fatalf("facts %v", facts)
		}
		if _, _, _, err := s.Excerpt(100); err != nil {
			t.Fatal(err)
		}
		cursor := s.Follow(0)
		defer cursor.Close()
		buffer, at := make([]byte, 1<<16), uint64(0)
		for steps := 0; ; steps++ {
			piece, err := cursor.Next(buffer)
			if err != nil || steps > 10 {
				t.Fatalf("step %d: %v, %v", steps, piece.Offset, err)
			}
			if piece.Offset != at {
				t.Fatal(fmt.Sprint("at ", piece.Offset, ", not ", at))
			}
			if len(piece.Data) == 0 && piece.GapTo == 0 {
				break
			}
			at = max(piece.GapTo, at+uint64(len(piece.Data)))
		}
		if at != facts.GetTotalBytes() {
			t.Fatalf("a cursor ends at %d of %v", at, facts)
		}
	})
}
