package spool

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// FuzzReopen reopens a stream from arbitrary files: no read fails or loops for ever, and
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
		s, err := Reopen(Options{Dir: dir, Name: "stdout", Limit: 1 << 10}, &berthv1.OutputStats{TotalBytes: total})
		if err != nil {
			t.Fatal(err)
		}
		stats := s.Stats()
		kept, end := uint64(0), uint64(0)
		for i, r := range stats.GetKept() {
			if r.GetFrom() >= r.GetTo() || i > 0 && r.GetFrom() <= end || r.GetTo() > stats.GetTotalBytes() {
				t.Fatalf("kept %v", stats)
			}
			kept, end = kept+r.GetTo()-r.GetFrom(), r.GetTo()
			for _, offset := range []uint64{r.GetFrom(), r.GetTo() - 1} {
				if data, _, err := s.Read(offset, 1); err != nil || len(data) != 1 {
					t.Fatalf("read %d of %v: %d bytes, %v", offset, stats, len(data), err)
				}
			}
		}
		if kept+stats.GetDroppedBytes() != stats.GetTotalBytes() {
			t.Fatalf("stats %v", stats)
		}
		if _, _, _, err := s.Excerpt(100); err != nil {
			t.Fatal(err)
		}
		cursor := s.Follow(0)
		defer cursor.Close()
		buffer, at := make([]byte, 1<<16), uint64(0)
		for steps := 0; ; steps++ {
			chunk, err := cursor.Next(buffer)
			if err != nil || steps > 10 {
				t.Fatalf("step %d: %v, %v", steps, chunk.Offset, err)
			}
			if chunk.Offset != at {
				t.Fatal(fmt.Sprint("at ", chunk.Offset, ", not ", at))
			}
			if len(chunk.Data) == 0 && chunk.GapTo == 0 {
				break
			}
			at = max(chunk.GapTo, at+uint64(len(chunk.Data)))
		}
		if at != stats.GetTotalBytes() {
			t.Fatalf("a cursor ends at %d of %v", at, stats)
		}
	})
}
