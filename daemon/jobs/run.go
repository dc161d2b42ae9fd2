package jobs

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// linkGrace is how long a guest lets an attached command run on when the connection to the broker
// breaks: long enough for a redial, short enough that nothing runs on for a broker that is gone.
const linkGrace = 10 * time.Second

// stopTimeout bounds the stop of a command whose caller went away, beyond its own grace.
const stopTimeout = 30 * time.Second

// Ran is a command that was run: its record, and as much of its output as was asked for.
type Ran struct {
	Job            *recordv1.JobRecord
	Stdout, Stderr *guestv1.Output
}

// Run runs a command and waits for it. With a request id it is recorded beforehand and goes on
// without its caller; without one only its guest knows it, its record is written behind, and it is
// stopped when the caller goes away.
func (s *Service) Run(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*Ran, error) {
	s.touch(sandboxID)
	if call.RequestID != "" {
		return s.runRecorded(ctx, call, sandboxID, spec, maxOutput)
	}
	return s.runAttached(ctx, call, sandboxID, spec, maxOutput)
}

func (s *Service) runRecorded(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*Ran, error) {
	job, err := s.reserveAndBegin(ctx, call, sandboxID, spec, false)
	if err != nil {
		return nil, err
	}
	if job, err = s.until(ctx, job.GetId(), isDone); err != nil {
		return nil, err
	}
	return s.fromReceipt(job, maxOutput)
}

// fromReceipt returns the head and the tail of what a receipt keeps.
func (s *Service) fromReceipt(job *recordv1.JobRecord, maxOutput uint64) (*Ran, error) {
	stdout, err := s.headAndTail(job, berthv1.Stream_STREAM_STDOUT, maxOutput)
	if err != nil {
		return nil, err
	}
	stderr, err := s.headAndTail(job, berthv1.Stream_STREAM_STDERR, maxOutput)
	return &Ran{Job: job, Stdout: stdout, Stderr: stderr}, err
}

func (s *Service) runAttached(ctx context.Context, call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec, maxOutput uint64) (*Ran, error) {
	job, command, err := s.newAttached(call, sandboxID, spec)
	if err != nil {
		return nil, err
	}
	grace := spec.GetDisconnectGrace().AsDuration()
	request := &guestv1.RunRequest{
		Start: &guestv1.StartRequest{
			JobId: job.GetId(), BootId: job.GetBootId(), Command: command,
			KillOnDisconnect: spec.GetOnDisconnect() != berthv1.OnDisconnect_ON_DISCONNECT_KEEP,
			DisconnectGrace:  durationpb.New(max(grace, linkGrace)),
		},
		MaxOutputBytes: maxOutput, // and it is remembered until its record is in the ledger
	}
	var response *guestv1.RunResponse
	err = s.opts.Links.Call(ctx, job.GetMachineId(), func(ctx context.Context, guest guestv1.GuestServiceClient) (err error) {
		response, err = guest.Run(ctx, request)
		return err
	})
	// The guest counts the caller's deadline too, and may be the first to say that it is over.
	if ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		s.callerLeft(job, request.GetStart().GetKillOnDisconnect(), grace)
		return nil, cmp.Or(ctx.Err(), err)
	}
	if errors.Is(err, guestlink.ErrOtherBoot) || errors.Is(err, guestlink.ErrOtherGeneration) {
		s.conclude(job, lost("guest_restarted: the machine's guest was started again while the command ran or was about to"))
		s.recordAttached(job)
		return &Ran{Job: job}, nil
	}
	if err != nil {
		s.unsetAttached(job.GetId()) // if it runs all the same, the guest will name it
		return nil, err
	}
	status, err := ended(response.GetStatus(), job.GetMachineId(), job.GetId())
	if err != nil {
		s.opts.Log.Warn("what became of a command is not known", "machine", job.GetMachineId(), "job", job.GetId(), "error", err)
		s.conclude(job, lost("guest_confused: "+boundedText(err.Error())))
		s.recordAttached(job)
		return &Ran{Job: job}, nil
	}
	s.fill(job, status)
	s.recordAttached(job)
	s.afterCommit(job.GetId(), job.GetMachineId())
	return &Ran{
		Job:    job,
		Stdout: boundedOutput(response.GetStdout(), job.GetStdout(), maxOutput), Stderr: boundedOutput(response.GetStderr(), job.GetStderr(), maxOutput),
	}, nil
}

// newAttached makes the record of a command that is not written down before it runs, and the command
// itself.
func (s *Service) newAttached(call lifecycle.Call, sandboxID string, spec *berthv1.JobSpec) (*recordv1.JobRecord, *guestv1.Command, error) {
	if err := s.mayAttach(); err != nil {
		return nil, nil, err
	}
	var sandbox *recordv1.SandboxRecord
	var machine *recordv1.MachineRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		sandbox, machine, err = runningMachine(tx, call, sandboxID)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	now := s.opts.Now()
	job := &recordv1.JobRecord{
		Id: lifecycle.NewID("job"), Namespace: call.Namespace, SandboxId: sandboxID, Spec: proto.CloneOf(spec),
		State: berthv1.JobState_JOB_STATE_RUNNING, CreateTime: timestamppb.New(now),
		MachineId: machine.GetId(), Generation: sandbox.GetGeneration(), BootId: machine.GetBootId(),
	}
	redact(job.GetSpec())
	job.Spec.KeepOutput = proto.Bool(false)
	s.setAttached(job)
	command, err := s.command(sandbox, spec, &recordv1.JobSecrets{Env: spec.GetSecretEnv(), Stdin: spec.GetStdin().GetData()})
	if err != nil {
		s.unsetAttached(job.GetId())
	}
	return job, command, err
}

// fill gives an attached command's record what its guest said of its end.
func (s *Service) fill(job *recordv1.JobRecord, status *guestv1.Status) {
	s.conclude(job, boundedOutcome(status.GetOutcome()))
	s.setTimes(job, status)
	job.Stdout, job.Stderr = boundedFacts(status.GetStdout()), boundedFacts(status.GetStderr())
}

// notKept is a stream's facts in a receipt that keeps no output.
func notKept(facts *berthv1.OutputFacts) *berthv1.OutputFacts {
	return &berthv1.OutputFacts{
		TotalBytes: facts.GetTotalBytes(), DroppedBytes: facts.GetTotalBytes(), EndAtExit: endAtExit(facts), Sealed: true,
	}
}

// recordAttached writes an attached command's record behind its answer.
func (s *Service) recordAttached(job *recordv1.JobRecord) {
	record := proto.CloneOf(job)
	record.Stdout, record.Stderr = notKept(job.GetStdout()), notKept(job.GetStderr())
	s.setAttached(record)
	defer s.afterCommit(record.GetId(), "")
	s.opts.Store.UpdateLater(func(tx *store.Tx) error { return putAttached(tx, record) })
}

func putAttached(tx *store.Tx, record *recordv1.JobRecord) error {
	known, err := tx.Job(record.GetId())
	if err != nil {
		return err
	}
	if isDone(known) { // from the guest's own word, which knows less of it
		known.Spec, known.CreateTime = record.GetSpec(), record.GetCreateTime()
		return tx.PutJob(known, "", "")
	}
	return tx.PutJob(record, "job.done", describeOutcome(record.GetOutcome()))
}

// unrecordedMost is how many attached commands may wait for their records to be written. With a full disk
// none is, and each takes memory.
const unrecordedMost = 20_000

// mayAttach refuses another attached command while too many cannot be recorded.
func (s *Service) mayAttach() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.recorded) < unrecordedMost {
		return nil
	}
	return fault.New(fault.StoreFull, "the records of %d commands could not be written down so far: free disk space in the state directory and try again", len(s.recorded)).
		Retry(followRetry)
}

// spendEvery is how long attached commands gather before the ledger and their guests are done with
// them.
const spendEvery = 100 * time.Millisecond

// recordAtOnce is how many records that a full disk kept out of the ledger are written in one commit.
const recordAtOnce = 500

// afterCommit lets go of an attached command once its record is in the ledger: it is known from there
// then, and the guest of the machine, if one is named, may forget it.
func (s *Service) afterCommit(jobID, machineID string) {
	s.mu.Lock()
	s.recorded[jobID] = true
	if machineID != "" {
		s.spent[machineID] = append(s.spent[machineID], jobID)
	}
	begin := !s.spending
	s.spending = true
	s.mu.Unlock()
	if begin && !s.spawn(s.spend) {
		s.mu.Lock()
		s.spending = false
		s.mu.Unlock()
	}
}

// spend works off what afterCommit has gathered, until nothing gathers any more.
func (s *Service) spend() {
	for {
		pause(s.ctx, spendEvery)
		s.mu.Lock()
		recorded, spent := s.recorded, s.spent
		s.recorded, s.spent = map[string]bool{}, map[string][]string{}
		s.spending = len(recorded) > 0
		s.mu.Unlock()
		if len(recorded) == 0 {
			return
		}
		if err := s.makeSure(slices.Collect(maps.Keys(recorded))); err != nil {
			s.putOff(recorded, spent)
			if s.ctx.Err() != nil {
				return
			}
			s.opts.Log.Warn("cannot record attached commands; it is tried again", "commands", len(recorded), "error", err)
			pause(s.ctx, followRetry)
			continue
		}
		for id := range recorded {
			s.unsetAttached(id)
		}
		for machineID, ids := range spent {
			for part := range slices.Chunk(ids, forgetAtOnce) {
				s.forget(s.ctx, machineID, part...)
			}
		}
	}
}

// makeSure returns when the ledger has these attached commands, and writes those down that a full disk
// kept out of it.
func (s *Service) makeSure(ids []string) error {
	// Behind all that was handed to the ledger before.
	if err := s.opts.Store.Update(s.ctx, func(*store.Tx) error { return nil }); err != nil {
		return err
	}
	var missing []string
	err := s.opts.Store.View(func(tx *store.Tx) error {
		for _, id := range ids {
			job, err := tx.Job(id)
			if err != nil {
				return err
			}
			if !isDone(job) {
				missing = append(missing, id)
			}
		}
		return nil
	})
	if err != nil || len(missing) == 0 {
		return err
	}
	for part := range slices.Chunk(missing, recordAtOnce) {
		err := s.opts.Store.Update(s.ctx, func(tx *store.Tx) error {
			for _, id := range part {
				record := s.attachedHere(id)
				if !isDone(record) {
					continue // somebody else records its end
				}
				if err := putAttached(tx, record); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// putOff gives back what spend could not be done with.
func (s *Service) putOff(recorded map[string]bool, spent map[string][]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(s.recorded, recorded)
	for machineID, ids := range spent {
		s.spent[machineID] = append(s.spent[machineID], ids...)
	}
}

// callerLeft stops, after the grace, an attached command whose caller went away, and records what
// became of it. A command that was to be kept is recorded as running, and followed.
func (s *Service) callerLeft(job *recordv1.JobRecord, kill bool, grace time.Duration) {
	s.spawn(func() {
		defer s.unsetAttached(job.GetId())
		err := s.opts.Store.Update(s.ctx, func(tx *store.Tx) error {
			known, err := tx.Job(job.GetId())
			if err != nil || known != nil {
				return err
			}
			return tx.PutJob(proto.CloneOf(job), "job.abandoned", "the caller went away")
		})
		if err != nil {
			return // the guest counts the grace too, and names the command at the next connection
		}
		if !kill {
			s.await(s.ctx, job.GetMachineId(), job.GetId())
			return
		}
		if grace > 0 && !pause(s.ctx, grace) {
			return // the guest counts it too
		}
		ctx, cancel := context.WithTimeout(s.ctx, stopTimeout+killGrace(job))
		defer cancel()
		status, err := s.stopInGuest(ctx, job.GetMachineId(), killGrace(job), &guestv1.StopRequest{
			JobId: job.GetId(), Reason: "disconnected: the caller went away",
		})
		switch {
		case errors.Is(err, guestlink.ErrNoJob):
			// It ended just before, or never came to begin: either way nobody was given an outcome.
			_, err = s.finish(ctx, job.GetId(), func(job *recordv1.JobRecord) {
				s.close(job, lost("disconnected: the caller went away, and the guest no longer knows the command"))
			})
		case err == nil:
			_, err = s.bringHome(ctx, job.GetMachineId(), status)
		}
		if err != nil && s.ctx.Err() == nil {
			s.opts.Log.Warn("cannot record a command whose caller went away", "job", job.GetId(), "error", err)
		}
	})
}

func killGrace(job *recordv1.JobRecord) time.Duration {
	if job.GetSpec().GetKillGrace() != nil {
		return job.GetSpec().GetKillGrace().AsDuration()
	}
	return DefaultKillGrace
}
