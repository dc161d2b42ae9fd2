package store

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// restoredGap is how far a restored ledger's revision jumps, so that no revision that was given out
// after the backup is given out again: 10^12 changes, months at the highest rate that was measured, and
// far below 2^53, up to which every client's numbers are whole.
const restoredGap = 1 << 40

// takeUpBackup makes a ledger of a copy that BackupTo made, or that was taken before an upgrade. The harness has
// gone on since, so what the ledger says was to happen may have happened, and have been undone again:
//
//   - revisions jump, and the gap counts as trimmed: a follower is told that it missed something;
//   - a job that was RESERVED loses the boot that it was reserved for, so that no guest starts it: it may
//     have run since, and been forgotten;
//   - an open operation is marked as restored, so that it makes no machine anew: its sandbox may have been
//     destroyed since.
//
// All of it is one transaction. It does nothing to a ledger that was opened before.
func (s *Store) takeUpBackup() error {
	tx, err := s.begin(true)
	if err != nil {
		return err
	}
	defer func() { _ = tx.bolt.Rollback() }() // after a commit it does nothing
	mark := tx.meta(backupKey)
	if mark == nil {
		return nil
	}
	taken := time.Time{}
	if len(mark) == 8 {
		taken = time.UnixMicro(int64(binary.BigEndian.Uint64(mark))).UTC() // #nosec G115 -- timeBytes wrote it
	}
	if err := tx.takeUp(taken); err != nil {
		return fmt.Errorf("take up the backup %s: %w", s.path, err)
	}
	if err := tx.bolt.Commit(); err != nil {
		return fault.New(fault.StoreFailed, "take up the backup %s: %w", s.path, err)
	}
	s.log.Warn("the ledger is a backup: what happened after it was taken is not in it", "ledger", s.path, "taken", taken)
	return nil
}

func (tx *Tx) takeUp(taken time.Time) error {
	if err := tx.unfenceReserved(); err != nil {
		return err
	}
	if err := tx.markOperations(); err != nil {
		return err
	}
	// The time makes another restore of the same backup give out others.
	tx.counts.revision = max(tx.counts.revision+restoredGap, uint64(tx.now().UnixMicro()))
	tx.counts.trimmed = tx.counts.revision - 1
	tx.changed = true
	err := tx.record(tx.counts.revision, &recordv1.EventRecord{
		Kind: "ledger.restored", Message: "from a backup of " + taken.Format(time.RFC3339),
	})
	if err != nil {
		return err
	}
	if err := tx.remove(metaBucket, []byte(backupKey)); err != nil {
		return err
	}
	return tx.flushMeta()
}

// unfenceReserved takes the boot from every job that is RESERVED.
func (tx *Tx) unfenceReserved() error {
	open, err := tx.OpenJobs("")
	if err != nil {
		return err
	}
	for _, job := range open {
		if !jobReserved(job) {
			continue
		}
		job.BootId = ""
		if err := tx.PutJob(job, "", ""); err != nil {
			return err
		}
	}
	return nil
}

// markOperations marks every open operation as restored.
func (tx *Tx) markOperations() error {
	open, err := tx.OpenOperations()
	if err != nil {
		return err
	}
	for _, operation := range open {
		operation.Restored = true
		if err := tx.PutOperation(operation); err != nil {
			return err
		}
	}
	return nil
}
