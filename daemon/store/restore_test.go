package store

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestABackupKnowsThatTheWorldHasGoneOnSince(t *testing.T) {
	for _, compact := range []bool{false, true} {
		t.Run(fmt.Sprintf("compact %v", compact), func(t *testing.T) {
			s := newTest(t)
			update(t, s, func(tx *Tx) error {
				reserved := job("job_1", "sb_1", berthv1.JobState_JOB_STATE_RESERVED)
				reserved.BootId = "boot"
				begun := job("job_2", "sb_1", berthv1.JobState_JOB_STATE_RUNNING)
				begun.BootId = "boot"
				return errors.Join(
					tx.PutSandbox(sandbox("sb_1", running), "sandbox.running", ""), tx.PutJob(reserved, "", ""), tx.PutJob(begun, "", ""),
					tx.PutOperation(&recordv1.OperationRecord{Id: "op_1", Kind: recordv1.OperationKind_OPERATION_KIND_CREATE, Step: "boot"}),
				)
			})
			before := s.Revision()
			path := filepath.Join(t.TempDir(), "ledger.db")
			if err := s.BackupTo(context.Background(), path, compact); err != nil {
				t.Fatal(err)
			}
			for life, name := range []string{"its first start", "its second start"} {
				restored := openTest(t, path)
				var after uint64
				view(t, restored, func(tx *Tx) error {
					after = tx.Revision()
					first, err := tx.Job("job_1")
					second, err2 := tx.Job("job_2")
					operation, err3 := tx.Operation("op_1")
					if first.GetBootId() != "" || second.GetBootId() != "boot" || !operation.GetRestored() {
						t.Errorf("%s: boots %q and %q, operation %v", name, first.GetBootId(), second.GetBootId(), operation)
					}
					revisions, events, err4 := tx.Events(before, 10)
					if len(events) != 1 || events[0].GetKind() != "ledger.restored" || revisions[0] != after || !strings.Contains(events[0].GetMessage(), epoch.UTC().Format(time.RFC3339)) {
						t.Errorf("%s: events %v at %v", name, events, revisions)
					}
					if tx.OldestRevision() != after {
						t.Errorf("%s: the oldest revision is %d, want %d", name, tx.OldestRevision(), after)
					}
					return errors.Join(err, err2, err3, err4)
				})
				// The reserved job's own change is one more.
				if want := before + 1 + restoredGap; after < want || after >= 1<<53 {
					t.Errorf("%s: revision %d, want %d", name, after, want)
				}
				if findings, err := check(t, restored); err != nil || len(findings) > 0 {
					t.Errorf("%s: %v, %v", name, findings, err)
				}
				if life == 1 {
					trimmedEventsKeepTheGap(t, restored, after)
				}
				if err := restored.Close(); err != nil {
					t.Fatal(err)
				}
			}
			view(t, s, func(tx *Tx) error {
				operation, err := tx.Operation("op_1")
				if operation.GetRestored() || tx.Revision() != before {
					t.Errorf("the ledger itself was changed by its backup: %v at %d", operation, tx.Revision())
				}
				return err
			})
		})
	}
}

// trimmedEventsKeepTheGap trims the event of before the backup.
func trimmedEventsKeepTheGap(t *testing.T, s *Store, after uint64) {
	t.Helper()
	update(t, s, func(tx *Tx) error {
		n, err := tx.TrimEvents(epoch.Add(time.Hour), 1, 1)
		if n != 1 || tx.OldestRevision() != after {
			t.Errorf("%d trimmed, the oldest revision is %d, want %d", n, tx.OldestRevision(), after)
		}
		return err
	})
}

func TestEveryJobAndRequestIsWalkedOnceWhateverThePage(t *testing.T) {
	s := newTest(t)
	want := map[string]int{}
	update(t, s, func(tx *Tx) error {
		for i := range 7 {
			id := fmt.Sprintf("job_%d", i)
			want[id] = 1
			if err := tx.PutJob(job(id, "sb_1", berthv1.JobState_JOB_STATE_RUNNING), "", ""); err != nil {
				return err
			}
			namespace := []string{"a", "ab", "b"}[i%3]
			want[namespace+"/"+id] = 1
			if err := tx.PutRequest(namespace, id, &recordv1.RequestRecord{ResultId: id, ExpireTime: timestamppb.New(epoch)}); err != nil {
				return err
			}
		}
		return errors.Join(tx.put(jobsBucket, []byte("job_5x"), []byte{0xff}))
	})
	for most := 1; most < 10; most++ {
		seen := map[string]int{}
		view(t, s, func(tx *Tx) error {
			for after, more := "", true; more; more = after != "" {
				page, next, err := tx.JobsAfter(after, most)
				if err != nil {
					return err
				}
				for _, rec := range page {
					seen[rec.GetId()]++
				}
				after = next
			}
			for after, more := (RequestKey{}), true; more; {
				page, next, goes, err := tx.RequestsAfter(after, most)
				if err != nil {
					return err
				}
				for _, request := range page {
					seen[request.Namespace+"/"+request.RequestID]++
				}
				after, more = next, goes
			}
			return nil
		})
		if fmt.Sprint(seen) != fmt.Sprint(want) {
			t.Errorf("%d a page: saw %v, want %v", most, seen, want)
		}
	}
}
