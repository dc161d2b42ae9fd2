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

// RemoveReceipts drops the receipts of jobs that were done before a time, at most max of them, and
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

// RemoveExcess drops the oldest receipts of those beyond keep, at most max of them, and returns how many
// it dropped.
func (s *Service) RemoveExcess(ctx context.Context, keep, most int) (int, error) {
	var ids []string
	err := s.opts.Store.View(func(tx *store.Tx) error {
		ended, err := tx.CountEndedJobs()
		if err != nil || ended <= keep {
			return err
		}
		ids, err = tx.EndedJobs(endOfTime, min(ended-keep, most))
		return err
	})
	if err != nil {
		return 0, err
	}
	return len(ids), s.remove(ctx, ids)
}

// endOfTime is after every job.
var endOfTime = time.UnixMicro(math.MaxInt64)

// remove drops receipts. The output goes first: a record without output says what it dropped, output
// without a record would lie there for ever.
func (s *Service) remove(ctx context.Context, ids []string) error {
	if len(ids) == 0 {
		return nil
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
	var ids []string
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(endOfTime, math.MaxInt)
		return err
	})
	if err != nil {
		return err
	}
	wanted := most - most/expireSpare
	for part := range slices.Chunk(ids, expireAtOnce) {
		if kept <= wanted {
			break
		}
		freed, err := s.expire(ctx, part, kept-wanted)
		if err != nil {
			s.output.grown.Store(true) // it is tried again
			return err
		}
		kept -= min(freed, kept)
	}
	s.opts.Log.Info("dropped the oldest output", "kept_bytes", kept, "most", most)
	return nil
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
			bytes := length(job.GetStdout().GetKept()) + length(job.GetStderr().GetKept())
			if freed >= wanted || bytes == 0 || !isComplete(job) {
				continue
			}
			for _, facts := range []*berthv1.OutputFacts{job.GetStdout(), job.GetStderr()} {
				facts.Kept, facts.DroppedBytes = nil, facts.GetTotalBytes()
			}
			if err := tx.PutJob(job, "job.output_expired", "its output was among the oldest, and there was no more room"); err != nil {
				return err
			}
			expired, freed = append(expired, id), freed+bytes
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	for _, id := range expired {
		if err := s.output.remove(id); err != nil {
			// fsck finds it, and it goes with its receipt at the latest.
			s.opts.Log.Warn("dropped output could not be removed", "job", id, "error", err)
		}
	}
	return freed, nil
}
