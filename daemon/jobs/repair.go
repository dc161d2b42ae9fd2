package jobs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// IsOpen reports whether a job is not done.
func IsOpen(job *recordv1.JobRecord) bool { return !isDone(job) }

// IsAdrift reports whether a job is open although its sandbox is gone or lost, so that nobody will ever
// end it.
func IsAdrift(job *recordv1.JobRecord, sandbox *recordv1.SandboxRecord) bool {
	if isDone(job) {
		return false
	}
	switch sandbox.GetState() {
	case berthv1.SandboxState_SANDBOX_STATE_DESTROYED, berthv1.SandboxState_SANDBOX_STATE_FAILED, berthv1.SandboxState_SANDBOX_STATE_LOST:
		return true
	}
	return sandbox == nil
}

// EndAdrift ends a job that is adrift as lost, and reports whether it was.
func (s *Service) EndAdrift(ctx context.Context, id string) (bool, error) {
	adrift := false
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		adrift = false
		job, err := tx.Job(id)
		if err != nil || job == nil {
			return err
		}
		sandbox, err := tx.Sandbox(job.GetSandboxId())
		if err != nil || !IsAdrift(job, sandbox) {
			return err
		}
		adrift = true
		s.close(job, lost("sandbox_gone: its sandbox had ended, and nobody had ended it"))
		return tx.PutJob(job, "job.done", describeOutcome(job.GetOutcome()))
	})
	if err == nil && adrift {
		s.news.tell(id)
	}
	return adrift && err == nil, err
}

// LacksOutput reports whether output that a receipt names is not there.
func (s *Service) LacksOutput(job *recordv1.JobRecord) bool {
	if !isDone(job) || !job.GetKeepOutput() {
		return false
	}
	for _, stream := range streams {
		for _, kept := range factsOf(job, stream).GetKept() {
			info, err := os.Stat(s.output.file(job.GetId(), stream, kept.GetFrom()))
			if kept.GetTo() > kept.GetFrom() && (err != nil || uint64(max(info.Size(), 0)) < kept.GetTo()-kept.GetFrom()) {
				return true
			}
		}
	}
	return false
}

// RestateOutput makes a receipt name the output that is there, and count the rest as dropped. Its
// outcome stays as it is.
func (s *Service) RestateOutput(ctx context.Context, id string) error {
	job, err := s.job(id)
	if err != nil || !s.LacksOutput(job) {
		return err
	}
	stdout, stderr := s.restated(job, berthv1.Stream_STREAM_STDOUT), s.restated(job, berthv1.Stream_STREAM_STDERR)
	return s.opts.Store.Update(ctx, func(tx *store.Tx) error {
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

// restated is what a receipt says of a stream, less what is not there.
func (s *Service) restated(job *recordv1.JobRecord, stream berthv1.Stream) *berthv1.OutputFacts {
	facts := factsOf(job, stream)
	var kept []*berthv1.ByteRange
	for _, named := range facts.GetKept() {
		for _, there := range s.output.ranges(job.GetId(), stream) {
			if there.GetFrom() == named.GetFrom() {
				kept = append(kept, &berthv1.ByteRange{From: named.GetFrom(), To: min(there.GetTo(), named.GetTo())})
			}
		}
	}
	facts.Kept, facts.DroppedBytes = kept, facts.GetTotalBytes()-length(kept)
	return facts
}

// KeptOutput lists the names of what lies in the directory of kept output: a job's id each.
func (s *Service) KeptOutput() ([]string, error) {
	entries, err := os.ReadDir(s.output.dir)
	if err != nil {
		return nil, fmt.Errorf("look at the kept output: %w", err)
	}
	names := make([]string, 0, len(entries))
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, nil
}

// StrayOutput says what is known of kept output that no record names: when it was written last, and
// whether it has the name of a job. It is not there when it was removed meanwhile, or has a record after
// all.
func (s *Service) StrayOutput(name string) (written time.Time, ofJob, there bool, err error) {
	var job *recordv1.JobRecord
	err = s.opts.Store.View(func(tx *store.Tx) (err error) {
		job, err = tx.Job(name)
		return err
	})
	if err != nil || job != nil {
		return written, false, false, err
	}
	err = filepath.WalkDir(filepath.Join(s.output.dir, name), func(_ string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err == nil && info.ModTime().After(written) {
			written = info.ModTime()
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return written, false, false, nil
	}
	return written, validJobID(name), err == nil, err
}

// RemoveStrayOutput removes kept output of a job that no record names.
func (s *Service) RemoveStrayOutput(name string) error {
	if !validJobID(name) {
		return fmt.Errorf("%q is no job's output", name)
	}
	return s.output.remove(name)
}
