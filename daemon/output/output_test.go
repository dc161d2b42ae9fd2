package output

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	stdout = berthv1.Stream_STREAM_STDOUT
	stderr = berthv1.Stream_STREAM_STDERR
)

func TestWhatIsStoredIsFoundInOrder(t *testing.T) {
	t.Parallel()
	s, err := Open(filepath.Join(t.TempDir(), "output"))
	must(t, err)
	const id = "job_1"
	copyIn := func(stream berthv1.Stream, from, offset uint64, text string) {
		t.Helper()
		copied, full, err := s.CopyIn(id, stream, from, offset, offset+uint64(len(text)), func(uint64, uint64) ([]byte, error) {
			return []byte(text + "and more than was asked for"), nil
		})
		if err != nil || full != nil || copied != offset+uint64(len(text)) {
			t.Fatalf("copied up to %d (%v, %v)", copied, full, err)
		}
	}
	copyIn(stdout, 100, 100, "tail")
	copyIn(stdout, 0, 0, "he")
	copyIn(stdout, 0, 2, "ad")
	copyIn(stderr, 0, 0, "err")
	must(t, os.WriteFile(filepath.Join(s.dir, id, "stdout.x"), []byte("no range"), 0o600))
	got := s.Ranges(id, stdout)
	if len(got) != 2 || !proto.Equal(got[0], byteRange(0, 4)) || !proto.Equal(got[1], byteRange(100, 104)) {
		t.Errorf("the ranges are %v", got)
	}
	if data, err := s.readRange(id, stdout, 100, 101, 2); err != nil || string(data) != "ai" {
		t.Errorf("it reads %q (%v)", data, err)
	}
	must(t, s.Sync(id))
	s.Prune(id, &berthv1.OutputStats{Kept: []*berthv1.ByteRange{byteRange(0, 4)}}, nil)
	if got := s.Ranges(id, stdout); len(got) != 1 || len(s.Ranges(id, stderr)) > 0 || s.Size() != 4 {
		t.Errorf("after the pruning: %v, %d bytes", got, s.Size())
	}
	must(t, s.Remove(id))
	must(t, s.Sync(id))
	if s.Size() != 0 || len(s.Ranges(id, stdout)) > 0 {
		t.Error("something is left")
	}
}

func byteRange(from, to uint64) *berthv1.ByteRange { return &berthv1.ByteRange{From: from, To: to} }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
