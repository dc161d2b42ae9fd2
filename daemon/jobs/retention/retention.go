// Package retention drops receipts and kept output that are old, or more than may be kept, and repairs what
// a check finds of them. A receipt never names output that is not there, and no outcome is changed.
package retention

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Retention bounds what is kept.
type Retention struct {
	Store    *store.Store
	Output   *output.Store
	Receipts *receipt.Receipts
	Log      *slog.Logger
}

const (
	// maxExpireBatch is how many receipts lose their output in one transaction.
	maxExpireBatch = 100
	// maxReadBatch is how many receipts are read in one transaction.
	maxReadBatch = 1000
	// expireSpare is the part of the space for output that is freed ahead, so that not every new
	// receipt has to look for more.
	expireSpare = 10
)

// RemoveReceipts drops the receipts of jobs that were done before a time, at most limit of them, and
// returns how many it dropped.
func (r *Retention) RemoveReceipts(ctx context.Context, before time.Time, limit int) (int, error) {
	var ids []string
	err := r.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(before, limit)
		return err
	})
	if err != nil {
		return 0, err
	}
	return r.remove(ctx, ids)
}

// RemoveExcess drops the oldest receipts of those beyond keep, at most limit of them, and returns how many
// it dropped. The ledger remembers up to when the dropped ones had ended.
func (r *Retention) RemoveExcess(ctx context.Context, keep, limit int) (int, error) {
	var ids []string
	var last time.Time
	err := r.Store.View(func(tx *store.Tx) error {
		ended, err := tx.CountEndedJobs()
		if err != nil || ended <= keep {
			return err
		}
		if ids, err = tx.EndedJobs(endOfTime, min(ended-keep, limit)); err != nil || len(ids) == 0 {
			return err
		}
		job, err := tx.Job(ids[len(ids)-1])
		last = job.GetDoneTime().AsTime()
		return err
	})
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	if err := r.Store.UpdateUrgent(ctx, func(tx *store.Tx) error { return tx.SetDroppedThrough(last) }); err != nil {
		return 0, err
	}
	return r.remove(ctx, ids)
}

// endOfTime is after every job.
var endOfTime = time.UnixMicro(math.MaxInt64)

// remove drops receipts. First they are made to name no output, then that goes, and then they: a receipt
// never names what is not there, and no output lies there without one that names its job. A job that left
// something running keeps its receipt as long as its machine lives.
func (r *Retention) remove(ctx context.Context, ids []string) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	var going []string
	err := r.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
		going = going[:0]
		for _, id := range ids {
			stays, err := leftSomething(tx, id)
			if err != nil {
				return err
			}
			if stays {
				continue
			}
			if _, err := nameNoOutput(tx, id, ""); err != nil {
				return err
			}
			going = append(going, id)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	for _, id := range going {
		if err := r.Output.Remove(id); err != nil {
			return 0, fmt.Errorf("drop the output of %s: %w", id, err)
		}
	}
	return len(going), r.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
		for _, id := range going {
			if err := tx.DeleteJob(id); err != nil {
				return err
			}
		}
		return nil
	})
}

// leftSomething reports whether a job that is done left processes behind that may live and write: whoever
// wants to stop them needs its receipt.
func leftSomething(tx *store.Tx, id string) (bool, error) {
	job, err := tx.Job(id)
	if err != nil || job == nil || record.IsComplete(job) {
		return false, err
	}
	machine, err := tx.Machine(job.GetMachineId())
	return err == nil && machine != nil && machine.GetState() != recordv1.MachineState_MACHINE_STATE_GONE, err
}

// nameNoOutput makes a receipt count its kept output as dropped, with an event if one is named, and returns
// how many bytes that is.
func nameNoOutput(tx *store.Tx, id, event string) (uint64, error) {
	job, err := tx.Job(id)
	if err != nil {
		return 0, err
	}
	bytes := record.KeptBytes(job)
	if bytes == 0 {
		return 0, nil
	}
	for _, stats := range []*berthv1.OutputStats{job.GetStdout(), job.GetStderr()} {
		stats.Kept, stats.DroppedBytes = nil, stats.GetTotalBytes()
	}
	detail := ""
	if event != "" {
		detail = "its output was among the oldest, and there was too much"
	}
	return bytes, tx.PutJob(job, event, detail)
}

// OutputBytes returns how much output is kept in all.
func (r *Retention) OutputBytes() uint64 { return r.Output.Size() }

// BoundOutput drops the output of the oldest receipts until what they keep takes no more than maxBytes,
// and some space is left. The receipts stay, and count it as dropped. The output of jobs that are not
// complete is theirs, and does not count.
func (r *Retention) BoundOutput(ctx context.Context, maxBytes uint64) error {
	if !r.Output.Grown() {
		return nil
	}
	err := r.boundOutput(ctx, maxBytes)
	if err != nil {
		r.Output.Regrow() // it is tried again
	}
	return err
}

func (r *Retention) boundOutput(ctx context.Context, maxBytes uint64) error {
	if err := r.removeUnnamed(); err != nil {
		return err
	}
	var keeping []string
	var kept uint64
	err := r.eachEnded(func(job *recordv1.JobRecord) {
		if bytes := record.KeptBytes(job); bytes > 0 && record.IsComplete(job) {
			keeping, kept = append(keeping, job.GetId()), kept+bytes
		}
	})
	if err != nil || kept <= maxBytes {
		return err
	}
	wanted, before := maxBytes-maxBytes/expireSpare, kept
	for part := range slices.Chunk(keeping, maxExpireBatch) {
		if kept <= wanted {
			break
		}
		freed, err := r.expire(ctx, part, kept-wanted)
		if err != nil {
			return err
		}
		kept -= min(freed, kept)
	}
	r.Log.Info("dropped the oldest output", "dropped_bytes", before-kept, "kept_bytes", kept, "max_bytes", maxBytes)
	return nil
}

// eachEnded hands out every job that is done, the longest done first.
func (r *Retention) eachEnded(yield func(*recordv1.JobRecord)) error {
	var ids []string
	err := r.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(endOfTime, math.MaxInt)
		return err
	})
	for part := range slices.Chunk(ids, maxReadBatch) {
		if err != nil {
			break
		}
		err = r.Store.View(func(tx *store.Tx) error {
			for _, id := range part {
				job, err := tx.Job(id)
				if err != nil {
					return err
				}
				if job != nil {
					yield(job)
				}
			}
			return nil
		})
	}
	return err
}

// removeUnnamed removes the output of complete receipts that name none: a kill came between the two.
func (r *Retention) removeUnnamed() error {
	names, err := r.KeptOutput()
	if err != nil {
		return err
	}
	for part := range slices.Chunk(names, maxReadBatch) {
		var unnamed []string
		err := r.Store.View(func(tx *store.Tx) error {
			for _, name := range part {
				job, err := tx.Job(name)
				if err != nil {
					return err
				}
				if record.IsComplete(job) && record.KeptBytes(job) == 0 {
					unnamed = append(unnamed, name)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, id := range unnamed {
			if err := r.Output.Remove(id); err != nil {
				return fmt.Errorf("remove output of %s that its receipt does not name: %w", id, err)
			}
		}
	}
	return nil
}

// expire drops the output of receipts until so many bytes are free, and returns how many are. The
// receipt goes first: it must not name what is not there.
func (r *Retention) expire(ctx context.Context, ids []string, wanted uint64) (freed uint64, err error) {
	var expired []string
	err = r.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
		expired, freed = nil, 0
		for _, id := range ids {
			job, err := tx.Job(id)
			if err != nil {
				return err
			}
			if freed >= wanted || !record.IsComplete(job) {
				continue
			}
			bytes, err := nameNoOutput(tx, id, "job.output_expired")
			if err != nil {
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
		if err := r.Output.Remove(id); err != nil {
			r.Log.Warn("dropped output could not be removed; it is tried again", "job", id, "error", err)
		}
	}
	return freed, nil
}
