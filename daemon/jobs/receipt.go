package jobs

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"syscall"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// forgetAtOnce is how many jobs a guest is told to forget in one call: what the protocol allows.
const forgetAtOnce = 1000

// chunkBytes is asked of a guest at a time: larger chunks are no faster, see docs/limits.md.
const chunkBytes = 256 << 10

// streams are a job's two.
var streams = []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR}

var jobID = regexp.MustCompile(`^job_[0-9A-HJKMNP-TV-Z]{26}$`)

func validJobID(id string) bool { return jobID.MatchString(id) }

// bringHome makes a done job's receipt: its kept output first, durably, then its outcome in the
// ledger, and then the guest is told to forget it. It may be done again after a crash anywhere; what
// is at home already stays as it is. A job whose output is not sealed (a child still holds the pipe)
// gets its receipt all the same, and is finished when the guest says that it is sealed.
func (s *Service) bringHome(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	// One import serves everybody who asks at once, and none of them can end it for the others. One
	// that begins when the output is sealed does more than one that began before.
	key := fmt.Sprint(status.GetJobId(), sealed(status))
	imported := s.importing.DoChan(key, func() (any, error) {
		job, err := s.importReceipt(s.ctx, machineID, status)
		return job, err
	})
	select {
	case result := <-imported:
		job, _ := result.Val.(*recordv1.JobRecord)
		return job, result.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Service) importReceipt(ctx context.Context, machineID string, status *guestv1.Status) (*recordv1.JobRecord, error) {
	job, err := s.job(status.GetJobId())
	if err != nil {
		return nil, err
	}
	if job.GetMachineId() != machineID {
		return nil, fmt.Errorf("machine %s names a job of another machine", machineID)
	}
	if !isComplete(job) && (!isDone(job) || sealed(status)) {
		stdout, err := s.fetch(ctx, machineID, job, berthv1.Stream_STREAM_STDOUT, status.GetStdout())
		if err != nil {
			return nil, err
		}
		stderr, err := s.fetch(ctx, machineID, job, berthv1.Stream_STREAM_STDERR, status.GetStderr())
		if err != nil {
			return nil, err
		}
		if job, err = s.writeReceipt(ctx, job, status, stdout, stderr); err != nil {
			return nil, err
		}
	}
	switch {
	case !sealed(status) || !s.mayForget(job.GetId()):
	case status.GetDurable() || job.GetKeepOutput():
		s.forget(ctx, machineID, job.GetId())
	default:
		s.Thanked(job, false) // its caller may come back for the end
	}
	return job, nil
}

// isComplete reports whether a job's receipt can't grow any more.
func isComplete(job *recordv1.JobRecord) bool {
	return isDone(job) && job.GetStdout().GetSealed() && job.GetStderr().GetSealed()
}

func sealed(status *guestv1.Status) bool {
	return status.GetStdout().GetSealed() && status.GetStderr().GetSealed()
}

func (s *Service) writeReceipt(ctx context.Context, job *recordv1.JobRecord, status *guestv1.Status, stdout, stderr *berthv1.OutputFacts) (*recordv1.JobRecord, error) {
	if job.GetKeepOutput() {
		if err := s.output.sync(job.GetId()); err != nil {
			return nil, err
		}
	}
	// gofail: var jobsBeforeReceipt struct{}
	// fault.Die()
	job, err := s.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) {
		job.Stdout, job.Stderr = stdout, stderr
		if isDone(job) {
			return // only its output had been left open
		}
		s.conclude(job, boundedOutcome(status.GetOutcome()))
		s.setTimes(job, status)
	})
	// gofail: var jobsAfterReceipt struct{}
	// fault.Die()
	if err == nil && job.GetKeepOutput() {
		// What the receipt no longer names may go, now that it is the receipt.
		s.output.prune(job.GetId(), map[berthv1.Stream][]*berthv1.ByteRange{
			berthv1.Stream_STREAM_STDOUT: job.GetStdout().GetKept(), berthv1.Stream_STREAM_STDERR: job.GetStderr().GetKept(),
		})
	}
	return job, err
}

// finish changes a job's record for good and tells who waits for it.
func (s *Service) finish(ctx context.Context, id string, change func(*recordv1.JobRecord)) (*recordv1.JobRecord, error) {
	var job *recordv1.JobRecord
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) (err error) {
		if job, err = tx.Job(id); err != nil {
			return err
		}
		if job == nil {
			return noJob(id)
		}
		if isComplete(job) {
			return nil
		}
		outcome := job.GetOutcome()
		change(job)
		if outcome != nil {
			job.Outcome = outcome // once given it never changes
			return tx.PutJob(job, "job.sealed", "")
		}
		return tx.PutJob(job, "job.done", describeOutcome(job.GetOutcome()))
	})
	if err == nil {
		s.news.tell(id)
	}
	return job, err
}

// conclude gives a job its outcome.
func (s *Service) conclude(job *recordv1.JobRecord, outcome *berthv1.Outcome) {
	job.State, job.Outcome, job.SealedSecrets = berthv1.JobState_JOB_STATE_DONE, outcome, nil
	job.DoneTime = timestamppb.New(s.opts.Now())
}

// close gives a job an outcome that no guest gave, and seals what of its output is at home.
func (s *Service) close(job *recordv1.JobRecord, outcome *berthv1.Outcome) {
	if !isDone(job) {
		s.conclude(job, outcome)
	}
	job.Stdout = s.closedFacts(job.GetId(), berthv1.Stream_STREAM_STDOUT, job.GetStdout())
	job.Stderr = s.closedFacts(job.GetId(), berthv1.Stream_STREAM_STDERR, job.GetStderr())
}

// closedFacts is what is known of a stream of which no more can be had.
func (s *Service) closedFacts(jobID string, stream berthv1.Stream, known *berthv1.OutputFacts) *berthv1.OutputFacts {
	facts := &berthv1.OutputFacts{Sealed: true, EndAtExit: endAtExit(known), TotalBytes: known.GetTotalBytes()}
	facts.Kept = s.output.ranges(jobID, stream)
	for _, r := range facts.GetKept() {
		facts.TotalBytes = max(facts.GetTotalBytes(), r.GetTo())
	}
	facts.DroppedBytes = facts.GetTotalBytes() - length(facts.GetKept())
	return facts
}

// LoseJobs ends, in the transaction, every job of a machine that is gone; it returns their ids.
func (s *Service) LoseJobs(tx *store.Tx, machineID, reason string) ([]string, error) {
	open, err := tx.OpenJobs(machineID)
	if err != nil {
		return nil, err
	}
	ended := make([]string, 0, len(open))
	for _, job := range open {
		s.close(job, lost(reason))
		if err := tx.PutJob(job, "job.done", describeOutcome(job.GetOutcome())); err != nil {
			return nil, err
		}
		ended = append(ended, job.GetId())
	}
	return ended, nil
}

// JobsChanged tells who waits for jobs to look at them again.
func (s *Service) JobsChanged(ids []string) {
	for _, id := range ids {
		s.news.tell(id)
	}
}

// fetch copies the output that a guest keeps of one stream and returns the facts of the copy. A full
// disk here loses output, counted as dropped, and never the outcome.
func (s *Service) fetch(ctx context.Context, machineID string, job *recordv1.JobRecord, stream berthv1.Stream, from *berthv1.OutputFacts) (*berthv1.OutputFacts, error) {
	facts := &berthv1.OutputFacts{TotalBytes: from.GetTotalBytes(), Sealed: from.GetSealed(), EndAtExit: endAtExit(from)}
	if before := factsOf(job, stream); isDone(job) && before.GetTotalBytes() > from.GetTotalBytes() {
		// A stream does not shrink: what the receipt says of it already is all that can be believed.
		before.Sealed = from.GetSealed()
		return before, nil
	}
	if job.GetKeepOutput() {
		budget := outputLimit(job)
		for _, kept := range inOrder(firstTwo(from.GetKept())) {
			length := min(kept.GetTo()-kept.GetFrom(), budget)
			if kept.GetTo() < kept.GetFrom() || kept.GetTo() > from.GetTotalBytes() {
				break // the guest contradicts itself: nothing more of this stream can be believed
			}
			budget -= length
			to := kept.GetFrom() + length
			copied, err := s.copyRange(ctx, machineID, job.GetId(), stream, kept.GetFrom(), min(to, receipted(job, stream, kept.GetFrom())), to)
			if copied > kept.GetFrom() {
				facts.Kept = append(facts.Kept, &berthv1.ByteRange{From: kept.GetFrom(), To: copied})
			}
			if err != nil {
				return nil, err
			}
		}
	}
	facts.DroppedBytes = facts.GetTotalBytes() - length(facts.GetKept())
	return facts, nil
}

// receipted returns how far a receipt that was left open has the range of a stream that begins at from:
// those bytes may have been read by somebody, and are not asked for again.
func receipted(job *recordv1.JobRecord, stream berthv1.Stream, from uint64) uint64 {
	if isDone(job) {
		for _, kept := range factsOf(job, stream).GetKept() {
			if kept.GetFrom() == from {
				return kept.GetTo()
			}
		}
	}
	return from
}

// copyHead copies what a running job's stream has grown by, as far as the head goes; the tail moves
// and is fetched when the job is done.
func (s *Service) copyHead(ctx context.Context, machineID string, job *recordv1.JobRecord, status *guestv1.Status) error {
	if !job.GetKeepOutput() {
		return nil
	}
	for _, stream := range streams {
		facts := status.GetStdout()
		if stream == berthv1.Stream_STREAM_STDERR {
			facts = status.GetStderr()
		}
		if len(facts.GetKept()) == 0 || facts.GetKept()[0].GetFrom() != 0 {
			continue
		}
		var have uint64
		if at := s.output.ranges(job.GetId(), stream); len(at) > 0 && at[0].GetFrom() == 0 {
			have = at[0].GetTo()
		}
		to := min(facts.GetKept()[0].GetTo(), outputLimit(job)/2)
		if have >= to {
			continue
		}
		if _, err := s.copyRange(ctx, machineID, job.GetId(), stream, 0, have, to); err != nil {
			return err
		}
	}
	return nil
}

// copyRange copies [offset, to) of a range that begins at from, and returns how far it came. Output
// that the guest dropped meanwhile, or that has no room here, ends the copy without an error.
func (s *Service) copyRange(ctx context.Context, machineID, jobID string, stream berthv1.Stream, from, offset, to uint64) (uint64, error) {
	for offset < to {
		data, err := s.readInGuest(ctx, machineID, &guestv1.ReadRequest{
			JobId: jobID, Stream: stream, Offset: offset, MaxBytes: min(to-offset, chunkBytes),
		})
		if errors.Is(err, guestlink.ErrDropped) || err == nil && len(data.GetData()) == 0 {
			return offset, nil
		}
		if err != nil {
			return offset, err
		}
		chunk := data.GetData()[:min(uint64(len(data.GetData())), to-offset)]
		if err := s.output.write(jobID, stream, from, offset, chunk); err != nil {
			if !noRoom(err) {
				return offset, err // it passes, as a lack of descriptors does: the guest has it as long
			}
			s.opts.Log.Error("output is not kept", "job", jobID, "stream", streamName(stream), "offset", offset, "error", err)
			return offset, nil
		}
		offset += uint64(len(chunk))
	}
	return offset, nil
}

// noRoom reports whether the disk is full, or the quota on it.
func noRoom(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

func (s *Service) readInGuest(ctx context.Context, machineID string, request *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
	var response *guestv1.ReadResponse
	err := s.ask(ctx, machineID, request.GetWait().AsDuration(), func(ctx context.Context, guest guestv1.GuestServiceClient) (err error) {
		response, err = guest.Read(ctx, request)
		return err
	})
	return response, err
}

// forget lets a guest drop a job that is at home. A failure costs only the guest's disk: the job is
// named again at the next connection.
func (s *Service) forget(ctx context.Context, machineID string, ids ...string) {
	err := s.ask(ctx, machineID, 0, func(ctx context.Context, guest guestv1.GuestServiceClient) error {
		_, err := guest.Forget(ctx, &guestv1.ForgetRequest{JobIds: ids})
		return err
	})
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Debug("the guest could not be told to forget jobs", "jobs", ids, "error", err)
	}
}

// endAtExit is a stream's length at the leader's exit, where it is known.
func endAtExit(facts *berthv1.OutputFacts) *uint64 {
	if facts == nil || facts.EndAtExit == nil {
		return nil
	}
	return proto.Uint64(min(facts.GetEndAtExit(), facts.GetTotalBytes()))
}

func outputLimit(job *recordv1.JobRecord) uint64 {
	if limit := job.GetSpec().GetOutputLimitBytes(); limit != 0 {
		return limit
	}
	return DefaultOutputLimit
}

func firstTwo(ranges []*berthv1.ByteRange) []*berthv1.ByteRange {
	copied := make([]*berthv1.ByteRange, 0, 2)
	for _, r := range ranges[:min(len(ranges), 2)] {
		copied = append(copied, proto.CloneOf(r))
	}
	return copied
}

func length(ranges []*berthv1.ByteRange) uint64 {
	var total uint64
	for _, r := range ranges {
		total += r.GetTo() - r.GetFrom()
	}
	return total
}

func describeOutcome(outcome *berthv1.Outcome) string {
	text := outcome.GetCause().String()[len("CAUSE_"):]
	if outcome.ExitCode != nil {
		text += fmt.Sprintf(" exit %d", outcome.GetExitCode())
	}
	if outcome.GetReason() != "" {
		text += " " + outcome.GetReason()
	}
	return text
}
