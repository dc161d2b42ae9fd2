package jobs

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/daemon/store"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// expireAtOnce is how many receipts lose their output in one transaction.
	expireAtOnce = 100
	// expireSpare is the part of the room for output that is made free at once, so that not every new
	// receipt has to look for more.
	expireSpare = 10
)

// RemoveReceipts drops the receipts of jobs that were done before a time, at most most of them, and
// returns how many it dropped.
func (s *Service) RemoveReceipts(ctx context.Context, before time.Time, most int) (int, error) {
	var ids []string
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(before, most)
		return err
	})
	if err != nil {
		return 0, err
	}
	return len(ids), s.remove(ctx, ids)
}

// RemoveExcess drops the oldest receipts of those beyond keep, at most most of them, and returns how many
// it dropped. The ledger remembers up to when the dropped ones had ended.
func (s *Service) RemoveExcess(ctx context.Context, keep, most int) (int, error) {
	var ids []string
	var last time.Time
	err := s.opts.Store.View(func(tx *store.Tx) error {
		ended, err := tx.CountEndedJobs()
		if err != nil || ended <= keep {
			return err
		}
		if ids, err = tx.EndedJobs(endOfTime, min(ended-keep, most)); err != nil || len(ids) == 0 {
			return err
		}
		job, err := tx.Job(ids[len(ids)-1])
		last = job.GetDoneTime().AsTime()
		return err
	})
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	if err := s.opts.Store.Update(ctx, func(tx *store.Tx) error { return tx.SetDroppedThrough(last) }); err != nil {
		return 0, err
	}
	return len(ids), s.remove(ctx, ids)
}

// endOfTime is after every job.
var endOfTime = time.UnixMicro(math.MaxInt64)

// droppedThrough is when the last of the jobs had ended whose receipts were dropped because there were too
// many; zero if none was.
func (s *Service) droppedThrough() (through time.Time, err error) {
	err = s.opts.Store.View(func(tx *store.Tx) error {
		through = tx.DroppedThrough()
		return nil
	})
	return through, err
}

// remove drops receipts. First they are made to name no output, then that goes, and then they: a receipt
// never names what is not there, and no output lies there without one that names its job.
func (s *Service) remove(ctx context.Context, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for _, id := range ids {
			if _, err := nameNoOutput(tx, id, ""); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := s.output.remove(id); err != nil {
			return fmt.Errorf("drop the output of job %s: %w", id, err)
		}
	}
	return s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		for _, id := range ids {
			if err := tx.DeleteJob(id); err != nil {
				return err
			}
		}
		return nil
	})
}

// nameNoOutput makes a receipt count its kept output as dropped, with an event if one is named, and returns
// how many bytes that is.
func nameNoOutput(tx *store.Tx, id, event string) (uint64, error) {
	job, err := tx.Job(id)
	if err != nil {
		return 0, err
	}
	bytes := length(job.GetStdout().GetKept()) + length(job.GetStderr().GetKept())
	if bytes == 0 {
		return 0, nil
	}
	for _, facts := range []*berthv1.OutputFacts{job.GetStdout(), job.GetStderr()} {
		facts.Kept, facts.DroppedBytes = nil, facts.GetTotalBytes()
	}
	detail := ""
	if event != "" {
		detail = "its output was among the oldest, and there was no more room"
	}
	return bytes, tx.PutJob(job, event, detail)
}

// OutputBytes returns how much output is kept in all.
func (s *Service) OutputBytes() uint64 { return s.output.size() }

// BoundOutput drops the output of the oldest receipts until what is kept takes no more than most bytes,
// and some room is left. The receipts stay, and count it as dropped.
func (s *Service) BoundOutput(ctx context.Context, most uint64) error {
	if !s.output.grown.Swap(false) {
		return nil
	}
	kept := s.output.size()
	if kept <= most {
		return nil
	}
	left, err := s.expireOldest(ctx, kept, most-most/expireSpare)
	if left > most {
		s.output.grown.Store(true) // by an error, or because the jobs are not complete yet
	}
	if left < kept {
		s.opts.Log.Info("dropped the oldest output", "dropped_bytes", kept-left, "kept_bytes", left, "most", most)
	}
	return err
}

// expireOldest drops output until so many bytes are left, if there is as much to drop, and returns how many
// are.
func (s *Service) expireOldest(ctx context.Context, kept, wanted uint64) (left uint64, err error) {
	var ids []string
	err = s.opts.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(endOfTime, math.MaxInt)
		return err
	})
	for part := range slices.Chunk(ids, expireAtOnce) {
		if err != nil || kept <= wanted {
			break
		}
		var freed uint64
		freed, err = s.expire(ctx, part, kept-wanted)
		kept -= min(freed, kept)
	}
	return kept, err
}

// expire drops the output of receipts until so many bytes are free, and returns how many are. The
// receipt goes first: it must not name what is not there.
func (s *Service) expire(ctx context.Context, ids []string, wanted uint64) (freed uint64, err error) {
	var expired []string
	err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		expired, freed = nil, 0
		for _, id := range ids {
			job, err := tx.Job(id)
			if err != nil {
				return err
			}
			if freed >= wanted || !isComplete(job) {
				continue
			}
			bytes, err := nameNoOutput(tx, id, "job.output_expired")
			if err != nil {
				return err
			}
			// Also where it names none: a crash may have left what it named before.
			expired, freed = append(expired, id), freed+bytes
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	for _, id := range expired {
		if err := s.output.remove(id); err != nil {
			s.opts.Log.Warn("dropped output could not be removed; it is tried again", "job", id, "error", err)
		}
	}
	return freed, nil
}
