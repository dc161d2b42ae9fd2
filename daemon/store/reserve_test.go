package store

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// clock is a time that a test sets.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

// fullDisk opens a ledger on a small file system and fills that, then writes until a change that is not urgent is
// refused. It returns how many sandboxes are there.
func fullDisk(t *testing.T) (s *Store, fill *filler, now *clock, n int) {
	t.Helper()
	dir := mountTmpfs(t, "size=40m")
	now = &clock{time.Unix(1e9, 0)}
	s = openAt(t, filepath.Join(dir, "ledger.db"), now)
	for ; n < 300; n++ {
		update(t, s, putLarge(n))
	}
	fill = &filler{filepath.Join(dir, "filler")}
	fill.fill(t)
	return s, fill, now, fillLedger(t, s, n)
}

func openAt(t *testing.T, path string, now *clock) *Store {
	t.Helper()
	s, err := Open(path, Options{Now: now.Now, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// fillLedger puts sandboxes, from number n on, until one is refused, and returns the number of that one.
func fillLedger(t *testing.T, s *Store, n int) int {
	t.Helper()
	for ; n < 20_000; n++ {
		if err := s.Update(t.Context(), putLarge(n)); err != nil {
			if !fault.Is(err, fault.StoreFull) {
				t.Fatalf("after %d records: %v", n, err)
			}
			return n
		}
	}
	t.Fatal("the ledger never was full")
	return n
}

func putLarge(n int) func(*Tx) error {
	return func(tx *Tx) error {
		rec := sandbox(fmt.Sprintf("sb_%05d", n), running)
		rec.SealedEnv = make([]byte, 8<<10)
		return tx.PutSandbox(rec, "", "")
	}
}

// filler is a file that takes all space.
type filler struct{ path string }

func (f *filler) fill(t *testing.T) {
	t.Helper()
	file, err := os.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = file.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
}

func (f *filler) free(t *testing.T) {
	t.Helper()
	if err := os.Remove(f.path); err != nil {
		t.Fatal(err)
	}
}

// endEach ends sandboxes one after the other, as many destroys do. Each takes more than it frees.
func endEach(t *testing.T, s *Store, n int) {
	t.Helper()
	for i := range n {
		err := s.UpdateUrgent(t.Context(), func(tx *Tx) error {
			rec, err := tx.Sandbox(fmt.Sprintf("sb_%05d", i))
			if err != nil {
				return err
			}
			rec.State, rec.SealedEnv = destroyed, make([]byte, len(rec.GetSealedEnv())+4<<10)
			return tx.PutSandbox(rec, "sandbox.destroyed", "")
		})
		if err != nil {
			t.Fatalf("the end of sandbox %d is refused: %v", i, err)
		}
	}
}

func TestOnAFullDiskWhatEndsSomethingIsWrittenAndNothingElse(t *testing.T) {
	for _, test := range []struct {
		name     string
		allocate func(int, uint32, int64, int64) error
	}{
		{"where the file system allocates ahead", syscall.Fallocate},
		{"where it cannot", func(int, uint32, int64, int64) error { return syscall.EOPNOTSUPP }},
	} {
		t.Run(test.name, func(t *testing.T) {
			allocate = test.allocate
			t.Cleanup(func() { allocate = syscall.Fallocate })
			s, fill, now, n := fullDisk(t)
			path := s.Path()
			endEach(t, s, 50)
			if err := s.Update(t.Context(), putLarge(n)); !fault.Is(err, fault.StoreFull) {
				t.Errorf("between them another change: %v", err)
			}
			if err := s.Update(t.Context(), func(tx *Tx) error { _, err := tx.Sandbox("sb_00000"); return err }); err != nil {
				t.Errorf("a change that writes nothing is refused: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}

			s = openAt(t, path, now) // on the full disk
			endEach(t, s, 50)
			if findings, err := check(t, s); len(findings) > 0 || err != nil {
				t.Errorf("check: %v, %v", findings, err)
			}
			fill.free(t)
			update(t, s, putLarge(n))
			if info, err := os.Stat(path + ".reserve"); err != nil || info.Size() != s.reserve.bytes {
				t.Errorf("with space again the spare file is not there: %v, %v", info, err)
			}
			fill.fill(t)
			fillLedger(t, s, n+1)
			endEach(t, s, 50)
		})
	}
}

func TestInABatchOnAFullDiskOnlyTheUrgentChangesAreWritten(t *testing.T) {
	s, _, _, n := fullDisk(t)
	end := func(tx *Tx) error { return tx.DeleteSandbox("sb_00000") }
	busy, free := make(chan struct{}), make(chan struct{})
	s.UpdateLater(func(*Tx) error { close(busy); <-free; return nil })
	<-busy
	answers := make([]chan error, 3)
	for i, ask := range []func() error{
		func() error { return s.Update(t.Context(), putLarge(n)) },
		func() error { return s.UpdateUrgent(t.Context(), end) },
		func() error { return s.Update(t.Context(), putLarge(n+1)) },
	} {
		answers[i] = make(chan error, 1)
		go func() { answers[i] <- ask() }()
		waitQueued(t, s, i+1)
	}
	close(free)
	first, urgent, last := <-answers[0], <-answers[1], <-answers[2]
	if !fault.Is(first, fault.StoreFull) || urgent != nil || !fault.Is(last, fault.StoreFull) {
		t.Errorf("the batch ended with %v, %v, %v", first, urgent, last)
	}
	if got := ids(t, s); slices.Contains(got, "sb_00000") || len(got) != n-1 {
		t.Errorf("%d sandboxes, want %d", len(got), n-1)
	}
}

func TestWhatIsDroppedFromALedgerOnAFullDiskMakesRoomForMore(t *testing.T) {
	s, _, _, n := fullDisk(t)
	for i := range n {
		if err := s.UpdateUrgent(t.Context(), func(tx *Tx) error { return tx.DeleteSandbox(fmt.Sprintf("sb_%05d", i)) }); err != nil {
			t.Fatalf("dropping record %d: %v", i, err)
		}
	}
	update(t, s, putLarge(n))
}

func TestSpaceIsGivenUpInPartsAndOnlyOnAFullDisk(t *testing.T) {
	dir := mountTmpfs(t, "size=40m")
	s := openAt(t, filepath.Join(dir, "ledger.db"), &clock{time.Unix(1e9, 0)})
	fill := filler{filepath.Join(dir, "filler")}
	kept := func() int64 {
		info, err := os.Stat(s.Path() + ".reserve")
		if err != nil {
			t.Fatal(err)
		}
		return info.Size()
	}
	s.GiveWay()
	if got := kept(); got != s.reserve.bytes {
		t.Errorf("with space on the disk %d bytes are kept, want %d", got, s.reserve.bytes)
	}
	fill.fill(t)
	parts := 0
	for before := kept(); before > 0; before = kept() {
		s.GiveWay()
		if kept() >= before {
			t.Fatalf("on a full disk it keeps %d bytes", kept())
		}
		s.GiveWay()
		if after := kept(); after > 0 && after < before/2 {
			t.Errorf("while there is space again it gives up more: %d bytes are left of %d", after, before)
		}
		fill.fill(t)
		parts++
	}
	if parts < 5 {
		t.Errorf("it was given up in %d parts", parts)
	}
	s.GiveWay() // nothing is left
	if file, err := os.Create(filepath.Join(dir, "x")); err == nil {
		if _, err := io.WriteString(file, "x"); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("writing on the full disk: %v", err)
		}
		_ = file.Close()
	}
}
