package jobs

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ReadOutput returns bytes of one stream from an offset, waiting for one if asked to.
func (s *Service) ReadOutput(ctx context.Context, namespace, id string, stream berthv1.Stream, offset, limit uint64, wait time.Duration) (*output.Chunk, error) {
	job, err := s.jobs.Find(namespace, id)
	if err != nil {
		return nil, err
	}
	stats := record.Stats(job, stream)
	if record.IsDone(job) && !stats.GetSealed() && s.jobs.MachineGone(job) {
		// The machine is gone; the stored output is final.
		return s.output.Read(id, stream, s.output.Final(id, stream, stats), offset, limit)
	}
	if !record.IsDone(job) || !stats.GetSealed() && offset >= stats.GetTotalBytes() {
		chunk, err := s.readLive(ctx, job, stream, offset, limit, wait)
		if err == nil || !isNoJob(err) {
			return chunk, err
		}
		// Its receipt was imported between the look at the ledger and the call.
		if job, err = s.jobs.Find(namespace, id); err != nil {
			return nil, err
		}
		if !record.IsDone(job) {
			return nil, fault.New(fault.Recovering, "%s is being started: try again", id).Retry(time.Second)
		}
	}
	return s.output.Read(id, stream, record.Stats(job, stream), offset, limit)
}

// readLive asks the guest, which has all there is of a job until its receipt is stored.
func (s *Service) readLive(ctx context.Context, job *recordv1.JobRecord, stream berthv1.Stream, offset, limit uint64, wait time.Duration) (*output.Chunk, error) {
	if err := s.jobs.Reachable(job); err != nil {
		return s.readStored(job, stream, offset, limit, err)
	}
	response, err := s.links.ReadJob(ctx, job.GetMachineId(), &guestv1.ReadRequest{
		JobId: job.GetId(), Stream: stream, Offset: offset, MaxBytes: limit, Wait: durationpb.New(wait),
	})
	if err != nil {
		return nil, err
	}
	stats, data := response.GetStats(), response.GetData()
	total := stats.GetTotalBytes()
	if offset > total {
		return nil, output.Beyond(stream, offset, total)
	}
	data = data[:min(uint64(len(data)), total-offset)]
	if len(data) == 0 && offset < total {
		next := response.GetNextKept()
		if next <= offset || next > total {
			next = total // else the caller would ask here for ever
		}
		return nil, output.Expired(job.GetId(), stream, offset, next)
	}
	return &output.Chunk{Data: data, Stats: stats, EOF: stats.GetSealed() && offset+uint64(len(data)) == total}, nil
}

// readStored returns what is stored of a job whose machine cannot be asked, and then why there is no more.
func (s *Service) readStored(job *recordv1.JobRecord, stream berthv1.Stream, offset, limit uint64, unreachable error) (*output.Chunk, error) {
	stats := s.output.Final(job.GetId(), stream, record.Stats(job, stream))
	stats.Sealed = false
	if offset >= stats.GetTotalBytes() {
		return nil, unreachable
	}
	return s.output.Read(job.GetId(), stream, stats, offset, limit)
}

// Tails returns the last bytes of both streams.
func (s *Service) Tails(ctx context.Context, job *recordv1.JobRecord, limit uint64) (*RunResult, error) {
	stdout, err := s.tail(ctx, job, berthv1.Stream_STREAM_STDOUT, limit)
	if err != nil {
		return nil, err
	}
	stderr, err := s.tail(ctx, job, berthv1.Stream_STREAM_STDERR, limit)
	return &RunResult{Job: job, Stdout: stdout, Stderr: stderr}, err
}

func (s *Service) tail(ctx context.Context, job *recordv1.JobRecord, stream berthv1.Stream, limit uint64) (*guestv1.Output, error) {
	kept := record.Stats(job, stream).GetKept()
	if len(kept) == 0 {
		return &guestv1.Output{}, nil
	}
	last := kept[len(kept)-1]
	from := max(last.GetFrom(), last.GetTo()-min(limit, last.GetTo()))
	chunk, err := s.ReadOutput(ctx, job.GetNamespace(), job.GetId(), stream, from, last.GetTo()-from, 0)
	if fault.Is(err, fault.OutputExpired) {
		return &guestv1.Output{}, nil // it moved on meanwhile
	}
	if err != nil {
		return nil, err
	}
	if from == 0 {
		return &guestv1.Output{Head: chunk.Data}, nil
	}
	return &guestv1.Output{Tail: chunk.Data, TailOffset: from}, nil
}

// Filter says which jobs a list shows.
type Filter struct {
	SandboxID string
	States    []berthv1.JobState
	Labels    map[string]string // an empty value matches any
}

// List returns a page of jobs, newest first, and the ledger's revision that it shows.
func (s *Service) List(namespace string, filter Filter, page store.Page) (jobs []*recordv1.JobRecord, next string, revision uint64, err error) {
	stopped := map[string]bool{}
	err = s.store.View(func(tx *store.Tx) (err error) {
		revision = tx.Revision()
		jobs, next, err = tx.ListJobs(namespace, filter.SandboxID, page, func(job *recordv1.JobRecord) bool {
			if !record.IsDone(job) && isStopped(tx, job.GetSandboxId(), stopped) {
				job.State = berthv1.JobState_JOB_STATE_UNKNOWN
			}
			return (len(filter.States) == 0 || slices.Contains(filter.States, job.GetState())) &&
				request.MatchesLabels(job.GetSpec().GetLabels(), filter.Labels)
		})
		return err
	})
	return jobs, next, revision, err
}

func isStopped(tx *store.Tx, sandboxID string, seen map[string]bool) bool {
	if stopped, known := seen[sandboxID]; known {
		return stopped
	}
	sandbox, err := tx.Sandbox(sandboxID)
	seen[sandboxID] = err == nil && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_STOPPED
	return seen[sandboxID]
}

// Open returns how many jobs of a sandbox are not done; with an empty id, how many jobs of all.
func (s *Service) Open(sandboxID string) (int, error) {
	open := 0
	err := s.store.View(func(tx *store.Tx) (err error) {
		if sandboxID != "" {
			open, err = tx.CountOpenJobs(sandboxID)
			return err
		}
		all, err := tx.OpenJobs("")
		open = len(all)
		return err
	})
	return open, err
}
