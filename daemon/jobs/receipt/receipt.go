// Package receipt makes the receipts of jobs: it copies the output that a guest has kept, durably, writes
// the outcome into the ledger, and then tells the guest to forget the job. A receipt's outcome and bytes
// never change. It decides nothing about jobs that run.
package receipt

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ReplayWindow is how long a guest keeps the output of an attached command that is done, for a caller
// whose connection broke just before the end.
const ReplayWindow = 2 * time.Minute

// Options configure Receipts. All are required.
type Options struct {
	Store      *store.Store
	Links      *guestlink.Links
	Output     *output.Store
	Background *background.Group
	Log        *slog.Logger
	Now        func() time.Time
}

// Receipts makes receipts.
type Receipts struct {
	Options
	pins    pins
	imports singleflight.Group // by job
}

// New returns a maker of receipts.
func New(opts Options) *Receipts {
	return &Receipts{Options: opts, pins: pins{held: map[string]int{}, releasable: map[string]bool{}}}
}

// Import makes a done job's receipt: its kept output first, durably, then its outcome in the ledger, and
// then the guest is told to forget it. It may be done again after a crash anywhere; what is stored already
// stays as it is. A job whose output is not sealed (a child still holds the pipe) gets its receipt all the
// same, which is completed when the guest says that the output is sealed.
func (r *Receipts) Import(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	// One import serves everybody who asks at once, and none of them can end it for the others. One
	// that begins when the output is sealed does more than one that began before.
	key := fmt.Sprint(status.GetJobId(), record.Sealed(status))
	imported := r.imports.DoChan(key, func() (any, error) {
		type answer struct {
			job *recordv1.JobRecord
			err error
		}
		done := make(chan answer, 1)
		if !r.Background.Go(func(ctx context.Context) {
			job, err := r.imported(ctx, machineID, status)
			done <- answer{job, err}
		}) {
			return (*recordv1.JobRecord)(nil), context.Canceled
		}
		a := <-done
		return a.job, a.err
	})
	select {
	case result := <-imported:
		job, _ := result.Val.(*recordv1.JobRecord)
		return job, result.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (r *Receipts) imported(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	var job *recordv1.JobRecord
	err := r.Store.View(func(tx *store.Tx) (err error) {
		job, err = tx.Job(status.GetJobId())
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case job == nil:
		return nil, record.NotFound(status.GetJobId())
	case job.GetMachineId() != machineID:
		return nil, fmt.Errorf("machine %s names a job of another machine", machineID)
	}
	if !record.IsComplete(job) && (!record.IsDone(job) || record.Sealed(status)) {
		stdout, err := r.fetch(ctx, machineID, job, berthv1.Stream_STREAM_STDOUT, status.GetStdout())
		if err != nil {
			return nil, err
		}
		stderr, err := r.fetch(ctx, machineID, job, berthv1.Stream_STREAM_STDERR, status.GetStderr())
		if err != nil {
			return nil, err
		}
		if job, err = r.write(ctx, job, status, stdout, stderr); err != nil {
			return nil, err
		}
	}
	switch {
	case !record.Sealed(status) || !r.MayForget(job.GetId()):
	case status.GetDurable() || job.GetKeepOutput():
		r.Forget(ctx, machineID, job.GetId())
	default:
		// Its caller may come back for the end.
		r.Background.Go(func(ctx context.Context) {
			if background.Pause(ctx, ReplayWindow) && r.MayForget(job.GetId()) {
				r.Forget(ctx, machineID, job.GetId())
			}
		})
	}
	return job, nil
}

func (r *Receipts) write(ctx context.Context, job *recordv1.JobRecord, status *guestv1.Status, stdout, stderr *berthv1.OutputStats) (*recordv1.JobRecord, error) {
	if job.GetKeepOutput() {
		if err := r.Output.Sync(job.GetId()); err != nil {
			return nil, err
		}
	}
	// gofail: var jobsBeforeReceipt struct{}
	// fault.Die()
	job, err := r.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) {
		job.Stdout, job.Stderr = stdout, stderr
		if record.IsDone(job) {
			return // only its output had been left open
		}
		record.Conclude(job, status.GetOutcome(), r.Now())
		record.SetTimes(job, status)
	})
	// gofail: var jobsAfterReceipt struct{}
	// fault.Die()
	if err == nil && job.GetKeepOutput() {
		// What the receipt no longer names may go, now that it is the receipt.
		r.Output.Prune(job.GetId(), job.GetStdout(), job.GetStderr())
	}
	return job, err
}

// finish changes a job's record for good.
func (r *Receipts) finish(ctx context.Context, id string, change func(*recordv1.JobRecord)) (*recordv1.JobRecord, error) {
	var job *recordv1.JobRecord
	err := r.Store.UpdateUrgent(ctx, func(tx *store.Tx) (err error) {
		if job, err = tx.Job(id); err != nil {
			return err
		}
		if job == nil {
			return record.NotFound(id)
		}
		if record.IsComplete(job) {
			return nil
		}
		outcome := job.GetOutcome()
		change(job)
		if outcome != nil {
			job.Outcome = outcome // once given it never changes
			return tx.PutJob(job, "job.sealed", "")
		}
		return tx.PutJob(job, "job.done", record.Describe(job.GetOutcome()))
	})
	return job, err
}

// Close ends a job with an outcome that no guest gave, and seals what is stored of its output.
func (r *Receipts) Close(ctx context.Context, id string, outcome *berthv1.Outcome) (*recordv1.JobRecord, error) {
	return r.finish(ctx, id, func(job *recordv1.JobRecord) { r.close(job, outcome) })
}

// CloseIn is Close of a job that is open, in a transaction.
func (r *Receipts) CloseIn(tx *store.Tx, job *recordv1.JobRecord, outcome *berthv1.Outcome) error {
	r.close(job, outcome)
	return tx.PutJob(job, "job.done", record.Describe(job.GetOutcome()))
}

func (r *Receipts) close(job *recordv1.JobRecord, outcome *berthv1.Outcome) {
	if !record.IsDone(job) {
		record.Conclude(job, outcome, r.Now())
	}
	job.Stdout = r.Output.Final(job.GetId(), berthv1.Stream_STREAM_STDOUT, job.GetStdout())
	job.Stderr = r.Output.Final(job.GetId(), berthv1.Stream_STREAM_STDERR, job.GetStderr())
}

// LoseJobs ends, in the transaction, every job of a machine that is gone.
func (r *Receipts) LoseJobs(tx *store.Tx, machineID, reason string) error {
	open, err := tx.OpenJobs(machineID)
	if err != nil {
		return err
	}
	for _, job := range open {
		if err := r.CloseIn(tx, job, record.Lost(reason)); err != nil {
			return err
		}
	}
	return nil
}

// fetch copies the output that a guest keeps of one stream and returns the stats of the copy. A full
// disk here loses output, counted as dropped, and never the outcome.
func (r *Receipts) fetch(ctx context.Context, machineID string, job *recordv1.JobRecord, stream berthv1.Stream, from *berthv1.OutputStats) (*berthv1.OutputStats, error) {
	if before := record.Stats(job, stream); record.IsDone(job) && before.GetTotalBytes() > from.GetTotalBytes() {
		// A stream does not shrink: what the receipt says of it already is all that can be believed.
		before.Sealed = from.GetSealed()
		return before, nil
	}
	stats := &berthv1.OutputStats{TotalBytes: from.GetTotalBytes(), Sealed: from.GetSealed(), Exit: from.Exit}
	if job.GetKeepOutput() {
		budget := record.OutputLimit(job)
		for _, kept := range from.GetKept() {
			length := min(kept.GetTo()-kept.GetFrom(), budget)
			budget -= length
			to := kept.GetFrom() + length
			copied, err := r.copyIn(ctx, machineID, job.GetId(), stream, kept.GetFrom(), min(to, receipted(job, stream, kept.GetFrom())), to)
			if copied > kept.GetFrom() {
				stats.Kept = append(stats.Kept, &berthv1.ByteRange{From: kept.GetFrom(), To: copied})
			}
			if err != nil {
				return nil, err
			}
		}
	}
	stats.DroppedBytes = stats.GetTotalBytes() - output.Length(stats.GetKept())
	return stats, nil
}

// receipted returns how far a receipt that was left open has the range of a stream that begins at from:
// those bytes may have been read by somebody, and are not asked for again.
func receipted(job *recordv1.JobRecord, stream berthv1.Stream, from uint64) uint64 {
	if record.IsDone(job) {
		for _, kept := range record.Stats(job, stream).GetKept() {
			if kept.GetFrom() == from {
				return kept.GetTo()
			}
		}
	}
	return from
}

// CopyHeads copies what a running job's streams have grown by, as far as their heads go; the tails move
// and are fetched when the job is done.
func (r *Receipts) CopyHeads(ctx context.Context, machineID string, job *recordv1.JobRecord, status *guestv1.Status) error {
	if !job.GetKeepOutput() {
		return nil
	}
	for _, stream := range output.Streams {
		stats := status.GetStdout()
		if stream == berthv1.Stream_STREAM_STDERR {
			stats = status.GetStderr()
		}
		if len(stats.GetKept()) == 0 || stats.GetKept()[0].GetFrom() != 0 {
			continue
		}
		var have uint64
		if stored := r.Output.Ranges(job.GetId(), stream); len(stored) > 0 && stored[0].GetFrom() == 0 {
			have = stored[0].GetTo()
		}
		to := min(stats.GetKept()[0].GetTo(), record.OutputLimit(job)/2)
		if have >= to {
			continue
		}
		if _, err := r.copyIn(ctx, machineID, job.GetId(), stream, 0, have, to); err != nil {
			return err
		}
	}
	return nil
}

// copyIn copies [offset, to) of a range that begins at from, and returns how far it came. Output that the
// guest dropped meanwhile, or for which no space is left here, ends the copy without an error.
func (r *Receipts) copyIn(ctx context.Context, machineID, jobID string, stream berthv1.Stream, from, offset, to uint64) (uint64, error) {
	copied, full, err := r.Output.CopyIn(jobID, stream, from, offset, to, func(offset, limit uint64) ([]byte, error) {
		response, err := r.Links.ReadJob(ctx, machineID, &guestv1.ReadRequest{JobId: jobID, Stream: stream, Offset: offset, MaxBytes: limit})
		if errors.Is(err, guestlink.ErrDropped) {
			return nil, nil
		}
		return response.GetData(), err
	})
	if full != nil {
		r.Log.Error("output is not kept", "job", jobID, "stream", output.StreamName(stream), "offset", copied, "error", full)
	}
	return copied, err
}

// Forget lets a guest drop jobs that are stored; at most 1000. A failure costs only the guest's disk: the
// jobs are named again at the next connection.
func (r *Receipts) Forget(ctx context.Context, machineID string, ids ...string) {
	if err := r.Links.ForgetJobs(ctx, machineID, ids); err != nil && ctx.Err() == nil {
		r.Log.Debug("the guest could not be told to forget jobs", "jobs", ids, "error", err)
	}
}
