package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// gathered hands in functions while the writer is busy with another one, so that they are one batch
// in this order, and returns their errors.
func gathered(t *testing.T, s *Store, fns ...func(*Tx) error) []error {
	t.Helper()
	busy, free := make(chan struct{}), make(chan struct{})
	var entered sync.Once
	s.UpdateLater(func(*Tx) error {
		entered.Do(func() { close(busy) })
		<-free
		return nil
	})
	<-busy
	errs := make([]error, len(fns))
	var callers sync.WaitGroup
	for i, fn := range fns {
		callers.Go(func() { errs[i] = s.Update(context.Background(), fn) })
		waitQueued(t, s, i+1)
	}
	close(free)
	callers.Wait()
	return errs
}

// waitQueued waits until n changes wait for the writer.
func waitQueued(t *testing.T, s *Store, n int) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		s.queue.mu.Lock()
		have := len(s.queue.changes)
		s.queue.mu.Unlock()
		if have >= n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d changes wait, want %d", have, n)
		}
	}
}

func put(id string) func(*Tx) error {
	return func(tx *Tx) error { return tx.PutSandbox(sandbox(id, running), "sandbox.running", "") }
}

func ids(t *testing.T, s *Store) []string {
	t.Helper()
	var ids []string
	view(t, s, func(tx *Tx) error {
		live, err := tx.LiveSandboxes()
		for _, rec := range live {
			ids = append(ids, rec.Id)
		}
		return err
	})
	return ids
}

var errOwn = errors.New("its own reason")

func TestAFailingFunctionLosesOnlyItself(t *testing.T) {
	cases := []struct {
		name string
		bad  func(*Tx) error
		want func(error) bool
	}{
		{"that fails before it writes", func(*Tx) error { return errOwn },
			func(err error) bool { return err == errOwn }}, //nolint:errorlint // exactly this one
		{"that fails after it wrote", func(tx *Tx) error { return errors.Join(put("sb_bad")(tx), errOwn) },
			func(err error) bool { return errors.Is(err, errOwn) }},
		{"that panics after it wrote", func(tx *Tx) error {
			_ = put("sb_bad")(tx)
			panic("oh")
		}, func(err error) bool { return fault.Is(err, fault.Internal) && strings.Contains(err.Error(), "oh") }},
		{"that panics before it writes", func(*Tx) error {
			var nothing *recordv1.SandboxRecord
			nothing.Id = "x"
			return nil
		}, func(err error) bool { return fault.Is(err, fault.Internal) }},
		{"whose write is refused by the file", func(tx *Tx) error { return tx.put(sandboxesBucket, nil, nil) },
			func(err error) bool { return fault.Is(err, fault.StoreFailed) }},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := newTest(t)
			errs := gathered(t, s, put("sb_1"), c.bad, put("sb_2"), c.bad, put("sb_3"))
			for i, err := range errs {
				if bad := i == 1 || i == 3; bad != (err != nil) || bad && !c.want(err) {
					t.Errorf("function %d: %v", i, err)
				}
			}
			if got := ids(t, s); !slices.Equal(got, []string{"sb_1", "sb_2", "sb_3"}) {
				t.Errorf("the ledger holds %v", got)
			}
			if s.Revision() != 3 {
				t.Errorf("revision %d, want 3", s.Revision())
			}
			if findings, err := check(t, s); len(findings) > 0 || err != nil {
				t.Errorf("check: %v, %v", findings, err)
			}
		})
	}
}

func TestFunctionsOfABatchRunInOrderAndSeeEachOther(t *testing.T) {
	s := newTest(t)
	var commits atomic.Int32
	s.OnCommit(func(Commit) { commits.Add(1) })
	const n = 50
	seen := make([]uint64, n)
	fns := make([]func(*Tx) error, n)
	for i := range fns {
		fns[i] = func(tx *Tx) error {
			seen[i] = tx.Revision()
			return put(fmt.Sprintf("sb_%02d", i))(tx)
		}
	}
	for i, err := range gathered(t, s, fns...) {
		if err != nil || seen[i] != uint64(i) {
			t.Errorf("function %d saw revision %d: %v", i, seen[i], err)
		}
	}
	if commits.Load() != 1 {
		t.Errorf("%d commits, want 1", commits.Load())
	}
}

func TestFunctionsAreRunAgainWithoutTheOneThatFailed(t *testing.T) {
	s := newTest(t)
	runs := make([]int, 3)
	counted := func(i int, fn func(*Tx) error) func(*Tx) error {
		return func(tx *Tx) error { runs[i]++; return fn(tx) }
	}
	errs := gathered(t, s,
		counted(0, put("sb_1")),
		counted(1, func(tx *Tx) error { return errors.Join(put("sb_bad")(tx), errOwn) }),
		counted(2, func(tx *Tx) error {
			if rec, err := tx.Sandbox("sb_bad"); rec != nil || err != nil {
				return fmt.Errorf("sees what failed: %v, %w", rec, err)
			}
			return put("sb_2")(tx)
		}))
	if errs[0] != nil || !errors.Is(errs[1], errOwn) || errs[2] != nil {
		t.Errorf("errors %v", errs)
	}
	if !slices.Equal(runs, []int{2, 1, 1}) {
		t.Errorf("runs %v", runs)
	}
}

func TestAnUpdateThatWritesNothingCostsNoCommit(t *testing.T) {
	s := newTest(t)
	s.OnCommit(func(Commit) { t.Error("a commit happened") })
	update(t, s, func(tx *Tx) error { _, err := tx.Sandbox("sb_1"); return err })
}

func TestACallerThatGoesAwayBeforeItsTurnIsNotServed(t *testing.T) {
	s := newTest(t)
	busy, free := make(chan struct{}), make(chan struct{})
	s.UpdateLater(func(*Tx) error { close(busy); <-free; return nil })
	<-busy
	ctx, cancel := context.WithCancel(context.Background())
	answer := make(chan error)
	go func() {
		answer <- s.Update(ctx, func(*Tx) error { t.Error("it ran"); return nil })
	}()
	waitQueued(t, s, 1)
	cancel()
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	close(free)
	if err := s.Update(ctx, func(*Tx) error { t.Error("it ran"); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

func TestACallerThatGoesAwayInItsTurnWaitsForTheResult(t *testing.T) {
	s := newTest(t)
	ctx, cancel := context.WithCancel(context.Background())
	err := s.Update(ctx, func(tx *Tx) error {
		cancel()
		return put("sb_1")(tx)
	})
	if err != nil || !slices.Equal(ids(t, s), []string{"sb_1"}) {
		t.Errorf("error %v, the ledger holds %v", err, ids(t, s))
	}
}

func TestWriteBehindIsCommittedInItsTurnAndByClose(t *testing.T) {
	var log bytes.Buffer
	path := filepath.Join(t.TempDir(), "ledger.db")
	s, err := Open(path, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		s.UpdateLater(put(fmt.Sprintf("sb_%02d", i)))
	}
	s.UpdateLater(func(*Tx) error { return errOwn })
	update(t, s, func(tx *Tx) error {
		if rec, err := tx.Sandbox("sb_99"); rec == nil || err != nil {
			return fmt.Errorf("the write-behind before it is not there: %w", err)
		}
		return nil
	})
	s.UpdateLater(put("sb_last"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(log.String(), errOwn.Error()) {
		t.Errorf("the log does not have the error: %s", log.String())
	}
	if got := ids(t, openTest(t, path)); len(got) != 101 {
		t.Errorf("%d sandboxes", len(got))
	}
}

func TestHooksGetTheRevisionBeforeTheCallerIsAnswered(t *testing.T) {
	s := newTest(t)
	var told atomic.Uint64
	s.OnCommit(func(commit Commit) {
		if commit.Revision != s.Revision() {
			t.Errorf("told %d, the ledger is at %d", commit.Revision, s.Revision())
		}
		told.Store(commit.Revision)
	})
	for i := range 5 {
		update(t, s, put(fmt.Sprintf("sb_%d", i)))
		if told.Load() != uint64(i+1) {
			t.Errorf("told %d, want %d", told.Load(), i+1)
		}
	}
}

func TestManyCallersAtOnceAllGetThrough(t *testing.T) {
	s := newTest(t)
	const callers, each = 32, 40
	var group sync.WaitGroup
	for c := range callers {
		group.Go(func() {
			for i := range each {
				id := fmt.Sprintf("sb_%02d_%02d", c, i)
				err := s.Update(context.Background(), func(tx *Tx) error {
					if i%7 == 3 {
						return errors.Join(put(id)(tx), errOwn)
					}
					return put(id)(tx)
				})
				if (i%7 == 3) != errors.Is(err, errOwn) {
					t.Errorf("%s: %v", id, err)
				}
			}
		})
	}
	group.Wait()
	want := 0
	for i := range each {
		if i%7 != 3 {
			want += callers
		}
	}
	if got := ids(t, s); len(got) != want || s.Revision() != uint64(want) {
		t.Errorf("%d sandboxes at revision %d, want %d", len(got), s.Revision(), want)
	}
}

func TestAFullDiskIsRefusedCleanlyAndPasses(t *testing.T) {
	dir := mountTmpfs(t, "size=1m")
	s := openTest(t, filepath.Join(dir, "ledger.db"))
	big := func(i int) func(*Tx) error {
		return func(tx *Tx) error {
			rec := sandbox(fmt.Sprintf("sb_%03d", i), running)
			rec.SealedEnv = make([]byte, 64<<10)
			return tx.PutSandbox(rec, "", "")
		}
	}
	n, full := 0, error(nil)
	for ; n < 100 && full == nil; n++ {
		full = s.Update(context.Background(), big(n))
	}
	if !fault.Is(full, fault.StoreFull) {
		t.Fatalf("after %d records: %v", n, full)
	}
	n-- // the last one failed
	if got := ids(t, s); len(got) != n || s.Revision() != uint64(n) {
		t.Errorf("%d sandboxes at revision %d, want %d", len(got), s.Revision(), n)
	}
	errs := gathered(t, s, big(n), func(tx *Tx) error {
		if rec, _ := tx.Sandbox(fmt.Sprintf("sb_%03d", n)); rec != nil {
			return errOwn // rests on a write that will not last
		}
		return nil
	})
	if !fault.Is(errs[0], fault.StoreFull) || errs[1] != nil && !fault.Is(errs[1], fault.StoreFull) {
		t.Errorf("in a batch that did not fit: %v", errs)
	}
	err := s.UpdateUrgent(t.Context(), func(tx *Tx) error { // frees pages
		for i := range n {
			if err := tx.DeleteSandbox(fmt.Sprintf("sb_%03d", i)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Errorf("what frees space is refused: %v", err)
	}
	update(t, s, func(*Tx) error { return nil })
	update(t, s, big(n))
	if got := ids(t, s); len(got) != 1 {
		t.Errorf("%d sandboxes, want 1", len(got))
	}
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Errorf("check: %v, %v", findings, err)
	}
}

func TestACommitThatFailsInAnOpenWayEndsTheLedger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	var file *os.File
	keep := func(name string, flag int, mode fs.FileMode) (*os.File, error) {
		var err error
		file, err = os.OpenFile(name, flag, mode) // #nosec G304
		return file, err
	}
	var fatal error
	s, err := open(path, Options{Log: slog.New(slog.DiscardHandler), Fatal: func(err error) { fatal = err }}, migrations, keep)
	if err != nil {
		t.Fatal(err)
	}
	update(t, s, put("sb_1"))
	if err := file.Close(); err != nil { // every write fails from here on
		t.Fatal(err)
	}
	if err := s.Update(context.Background(), put("sb_2")); !fault.Is(err, fault.StoreFailed) || fatal == nil {
		t.Errorf("error %v, fatal %v", err, fatal)
	}
	fatal = nil
	if err := s.Update(context.Background(), put("sb_3")); !fault.Is(err, fault.StoreFailed) || fatal != nil {
		t.Errorf("the next one: error %v, fatal %v", err, fatal)
	}
	_ = s.Close() // its file is closed already
	if got := ids(t, openTest(t, path)); !slices.Equal(got, []string{"sb_1"}) {
		t.Errorf("reopened, it holds %v", got)
	}
}

func TestACommitNamesWhatItChangedAndNothingOfWhatWasRolledBack(t *testing.T) {
	s := newTest(t)
	var commits []Commit
	s.OnCommit(func(commit Commit) { commits = append(commits, commit) })
	refused := errors.New("refused")

	update(t, s, put("sb_1"))
	if err := s.Update(t.Context(), func(tx *Tx) error { return errors.Join(put("sb_2")(tx), refused) }); !errors.Is(err, refused) {
		t.Fatalf("the refused function: %v", err)
	}
	update(t, s, func(tx *Tx) error { return tx.DeleteSandbox("sb_1") })
	update(t, s, func(tx *Tx) error { return tx.PutOperation(&recordv1.OperationRecord{Id: "op_1"}) })

	want := [][]Change{
		{{Kind: KindSandbox, ID: "sb_1", Revision: 1}},
		{{Kind: KindSandbox, ID: "sb_1", Revision: 1, Deleted: true}},
		{{Kind: KindOperation, ID: "op_1", Revision: 1}},
	}
	if len(commits) != len(want) {
		t.Fatalf("told of %d commits, want %d: %v", len(commits), len(want), commits)
	}
	for i, commit := range commits {
		if !slices.Equal(commit.Changes, want[i]) {
			t.Errorf("commit %d changed %v, want %v", i, commit.Changes, want[i])
		}
	}
}
