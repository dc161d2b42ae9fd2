package retention

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// IsOrphaned reports whether a job is open although its sandbox is gone or lost, so that nobody will ever
// end it.
func IsOrphaned(job *recordv1.JobRecord, sandbox *recordv1.SandboxRecord) bool {
	if record.IsDone(job) {
		return false
	}
	switch sandbox.GetState() {
	case berthv1.SandboxState_SANDBOX_STATE_DESTROYED, berthv1.SandboxState_SANDBOX_STATE_FAILED, berthv1.SandboxState_SANDBOX_STATE_LOST:
		return true
	}
	return sandbox == nil
}

// EndOrphaned ends a job that is orphaned as lost, and reports whether it was.
func (r *Retention) EndOrphaned(ctx context.Context, id string) (bool, error) {
	orphaned := false
	err := r.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
		orphaned = false
		job, err := tx.Job(id)
		if err != nil || job == nil {
			return err
		}
		sandbox, err := tx.Sandbox(job.GetSandboxId())
		if err != nil || !IsOrphaned(job, sandbox) {
			return err
		}
		orphaned = true
		return r.Receipts.CloseIn(tx, job, record.Lost("sandbox_gone: its sandbox had ended, and nobody had ended it"))
	})
	return orphaned && err == nil, err
}

// LacksOutput reports whether output that a receipt names is not there.
func (r *Retention) LacksOutput(job *recordv1.JobRecord) bool {
	if !record.IsDone(job) || !job.GetKeepOutput() {
		return false
	}
	return r.Output.Lacks(job.GetId(), berthv1.Stream_STREAM_STDOUT, job.GetStdout()) ||
		r.Output.Lacks(job.GetId(), berthv1.Stream_STREAM_STDERR, job.GetStderr())
}

// RestateOutput makes a receipt name the output that is there, and count the rest as dropped. Its
// outcome stays as it is.
func (r *Retention) RestateOutput(ctx context.Context, id string) error {
	var job *recordv1.JobRecord
	err := r.Store.View(func(tx *store.Tx) (err error) {
		job, err = tx.Job(id)
		return err
	})
	if err != nil || !r.LacksOutput(job) {
		return err
	}
	stdout := r.Output.Stored(id, berthv1.Stream_STREAM_STDOUT, record.Stats(job, berthv1.Stream_STREAM_STDOUT))
	stderr := r.Output.Stored(id, berthv1.Stream_STREAM_STDERR, record.Stats(job, berthv1.Stream_STREAM_STDERR))
	return r.Store.Update(ctx, func(tx *store.Tx) error {
		now, err := tx.Job(id)
		if err != nil {
			return err
		}
		if now.GetRevision() != job.GetRevision() {
			return errors.New("it has changed meanwhile: check again")
		}
		now.Stdout, now.Stderr = stdout, stderr
		return tx.PutJob(now, "job.output_lost", "kept output is no longer there")
	})
}

// KeptOutput lists the names of what lies in the directory of kept output: a job's id each.
func (r *Retention) KeptOutput() ([]string, error) { return r.Output.Names() }

// StrayOutput says what is known of kept output that no record names: when it was written last, and
// whether it has the name of a job. It is not there when it was removed meanwhile, or has a record after
// all.
func (r *Retention) StrayOutput(name string) (written time.Time, ofJob, there bool, err error) {
	var job *recordv1.JobRecord
	err = r.Store.View(func(tx *store.Tx) (err error) {
		job, err = tx.Job(name)
		return err
	})
	if err != nil || job != nil {
		return written, false, false, err
	}
	written, err = r.Output.Written(name)
	if errors.Is(err, fs.ErrNotExist) {
		return written, false, false, nil
	}
	return written, guestlink.ValidJobID(name), err == nil, err
}

// RemoveStrayOutput removes kept output of a job that no record names.
func (r *Retention) RemoveStrayOutput(name string) error {
	if !guestlink.ValidJobID(name) {
		return fmt.Errorf("%q is no job's output", name)
	}
	return r.Output.Remove(name)
}
