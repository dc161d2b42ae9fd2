package jobs

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// expireAtOnce is how many receipts lose their output in one transaction.
	expireAtOnce = 100
	// lookAtOnce is how many receipts are read in one transaction.
	lookAtOnce = 1000
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
	return s.remove(ctx, ids)
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
	return s.remove(ctx, ids)
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
// never names what is not there, and no output lies there without one that names its job. A job that left
// something running keeps its receipt as long as its machine lives.
func (s *Service) remove(ctx context.Context, ids []string) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	var going []string
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
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
		if err := s.output.remove(id); err != nil {
			return 0, fmt.Errorf("drop the output of job %s: %w", id, err)
		}
	}
	return len(going), s.opts.Store.Update(ctx, func(tx *store.Tx) error {
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
	if err != nil || job == nil || isComplete(job) {
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
	bytes := keptBytes(job)
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

// BoundOutput drops the output of the oldest receipts until what they keep takes no more than most bytes,
// and some room is left. The receipts stay, and count it as dropped. The output of jobs that are not
// complete is theirs, and does not count.
func (s *Service) BoundOutput(ctx context.Context, most uint64) error {
	if !s.output.grown.Swap(false) {
		return nil
	}
	err := s.boundOutput(ctx, most)
	if err != nil {
		s.output.grown.Store(true) // it is tried again
	}
	return err
}

func (s *Service) boundOutput(ctx context.Context, most uint64) error {
	if err := s.removeUnnamed(); err != nil {
		return err
	}
	var keeping []string
	var kept uint64
	err := s.eachEnded(func(job *recordv1.JobRecord) {
		if bytes := keptBytes(job); bytes > 0 && isComplete(job) {
			keeping, kept = append(keeping, job.GetId()), kept+bytes
		}
	})
	if err != nil || kept <= most {
		return err
	}
	wanted, before := most-most/expireSpare, kept
	for part := range slices.Chunk(keeping, expireAtOnce) {
		if kept <= wanted {
			break
		}
		freed, err := s.expire(ctx, part, kept-wanted)
		if err != nil {
			return err
		}
		kept -= min(freed, kept)
	}
	s.opts.Log.Info("dropped the oldest output", "dropped_bytes", before-kept, "kept_bytes", kept, "most", most)
	return nil
}

// eachEnded hands out every job that is done, the longest done first.
func (s *Service) eachEnded(yield func(*recordv1.JobRecord)) error {
	var ids []string
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		ids, err = tx.EndedJobs(endOfTime, math.MaxInt)
		return err
	})
	for part := range slices.Chunk(ids, lookAtOnce) {
		if err != nil {
			break
		}
		err = s.opts.Store.View(func(tx *store.Tx) error {
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

func keptBytes(job *recordv1.JobRecord) uint64 {
	return length(job.GetStdout().GetKept()) + length(job.GetStderr().GetKept())
}

// removeUnnamed removes the output of complete receipts that name none: a kill came between the two.
func (s *Service) removeUnnamed() error {
	names, err := s.KeptOutput()
	if err != nil {
		return err
	}
	for part := range slices.Chunk(names, lookAtOnce) {
		var unnamed []string
		err := s.opts.Store.View(func(tx *store.Tx) error {
			for _, name := range part {
				job, err := tx.Job(name)
				if err != nil {
					return err
				}
				if isComplete(job) && keptBytes(job) == 0 {
					unnamed = append(unnamed, name)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, id := range unnamed {
			if err := s.output.remove(id); err != nil {
				return fmt.Errorf("remove output of job %s that its receipt does not name: %w", id, err)
			}
		}
	}
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
			if freed >= wanted || !isComplete(job) {
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
		if err := s.output.remove(id); err != nil {
			s.opts.Log.Warn("dropped output could not be removed; it is tried again", "job", id, "error", err)
		}
	}
	return freed, nil
}
