package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newService makes a service on a real ledger, and a record of so many bytes in it.
func newService(t *testing.T, bytes int) (s *Service, dir string) {
	t.Helper()
	dir = t.TempDir()
	ledger, err := store.Open(filepath.Join(dir, "ledger.db"), store.Options{})
	must(t, err)
	t.Cleanup(func() { must(t, ledger.Close()) })
	must(t, ledger.Update(t.Context(), func(tx *store.Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{
			Id: "sb_1", Namespace: "n", State: berthv1.SandboxState_SANDBOX_STATE_FAILED, SealedEnv: make([]byte, bytes),
		}, "", "")
	}))
	s, err = New(ledger, filepath.Join(dir, "scratch"))
	must(t, err)
	return s, dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestABackupComesInChunksWithItsChecksumAndLeavesNothing(t *testing.T) {
	w, dir := newService(t, 1)
	failed := errors.New("the caller went away")
	if err := w.Backup(t.Context(), false, func(Chunk) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("the error is %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Backup(ended, true, func(Chunk) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	if _, err := os.Stat(w.scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the scratch directory is still there (%v)", err)
	}
	must(t, os.MkdirAll(filepath.Join(w.scratch, "x"), 0o700)) // as a kill leaves it
	_, err := New(w.store, w.scratch)
	must(t, err)
	if _, err := os.Stat(w.scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the scratch directory is still there after a start (%v)", err)
	}
	w.scratch = filepath.Join(dir, "ledger.db", "scratch") // where no directory can be
	if err := w.Backup(t.Context(), false, func(Chunk) error { return nil }); err == nil || fault.Is(err, fault.StoreFull) {
		t.Errorf("without a directory: %v", err)
	}
}

func TestABackupThatIsReadSlowlyHoldsUpNobody(t *testing.T) {
	w, _ := newService(t, 4*chunkBytes)
	reading, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error)
	var chunks [][]byte // as they came: none may be changed by the next
	var last Chunk
	go func() {
		first := true
		done <- w.Backup(t.Context(), false, func(chunk Chunk) error {
			if first {
				first = false
				close(reading)
				<-goOn
			}
			chunks, last = append(chunks, chunk.Data), chunk
			return nil
		})
	}()
	<-reading
	brief, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := w.Backup(brief, true, func(Chunk) error { return nil }); err != nil {
		t.Errorf("another backup meanwhile: %v", err)
	}
	if err := w.Copy(brief, func(string) error { return nil }); err != nil {
		t.Errorf("another copy meanwhile: %v", err)
	}
	if _, err := os.Stat(w.scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the copy still has a name (%v)", err)
	}
	close(goOn)
	must(t, <-done)
	whole := slices.Concat(chunks...)
	if sum := sha256.Sum256(whole); !bytes.Equal(sum[:], last.SHA256) || uint64(len(whole)) != last.Total || len(chunks) < 5 {
		t.Errorf("%d bytes in %d chunks with the sum %x, want %d with %x", len(whole), len(chunks), sum, last.Total, last.SHA256)
	}
}

func TestADiskWithoutSpaceForACopyIsSaidToBeFull(t *testing.T) {
	testenv.Root(t)
	w, dir := newService(t, 1<<20)
	small := filepath.Join(dir, "small")
	must(t, os.Mkdir(small, 0o700))
	must(t, syscall.Mount("tmpfs", small, "tmpfs", 0, "size=64k"))
	defer func() { must(t, syscall.Unmount(small, 0)) }()
	w.scratch = filepath.Join(small, "scratch")
	errs := map[string]error{}
	for name, compact := range map[string]bool{"a backup": false, "a compact backup": true} {
		errs[name] = w.Backup(t.Context(), compact, func(Chunk) error { return errors.New("there is nothing to give out") })
	}
	for name, err := range errs {
		if !fault.Is(err, fault.StoreFull) || !strings.Contains(err.Error(), "free space in the state directory") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, err := os.ReadDir(small); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
