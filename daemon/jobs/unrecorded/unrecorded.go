// Package unrecorded holds the commands that are begun before they are written down: those of callers who
// stay attached and gave no request id. Their records are written behind, and until one is in the ledger
// its command is found here. It never lets a guest forget a command whose end is not in the ledger.
package unrecorded

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/command"
	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// LinkGrace is how long a guest lets an attached command run on when the connection to the broker breaks:
// long enough for a redial, short enough that nothing runs on for a broker that is gone.
const LinkGrace = 10 * time.Second

// Tuning.
const (
	// maxUnwritten is how many commands may wait for their records to be written. With a full disk none is,
	// and each takes memory.
	maxUnwritten = 20_000
	// flushInterval is how long commands gather before the ledger and their guests are done with them.
	flushInterval = 100 * time.Millisecond
	// maxFlushBatch is how many records that a full disk kept out of the ledger are written in one commit.
	maxFlushBatch = 500
	// maxForgetBatch is how many jobs a guest is told to forget in one call: what the protocol allows.
	maxForgetBatch = 1000
	retryInterval  = time.Second
)

// Options configure Commands. All are required.
type Options struct {
	Store      *store.Store
	Links      *guestlink.Links
	Builder    command.Builder
	Receipts   *receipt.Receipts
	Background *background.Group
	Log        *slog.Logger
	Now        func() time.Time
}

// Commands holds unrecorded commands.
type Commands struct {
	Options
	waits waits

	mu       sync.Mutex
	known    map[string]*recordv1.JobRecord // by id, until the ledger is known to have them as they are here
	ended    map[string]bool                // those whose final record was handed to the ledger
	released map[string][]string            // of the ended ones, those that their guests may forget, by machine
	left     int                            // abandoned ones that the ledger does not have yet
	flushing bool                           // the flush goroutine is running
}

// New returns an empty set.
func New(opts Options) *Commands {
	return &Commands{
		Options: opts, waits: waits{jobs: map[string]bool{}},
		known: map[string]*recordv1.JobRecord{}, ended: map[string]bool{}, released: map[string][]string{},
	}
}

// Add makes the record of a command that is about to begin, and the command. From here on it is found by
// its id.
func (c *Commands) Add(call request.Call, sandboxID string, spec *berthv1.JobSpec) (*recordv1.JobRecord, *guestv1.Command, error) {
	if err := c.admit(); err != nil {
		return nil, nil, err
	}
	var sandbox *recordv1.SandboxRecord
	var machine *recordv1.MachineRecord
	err := c.Store.View(func(tx *store.Tx) (err error) {
		sandbox, machine, err = command.Target(tx, call, sandboxID)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	built, err := c.Builder.Build(sandbox, spec)
	if err != nil {
		return nil, nil, err
	}
	now := c.Now()
	job := &recordv1.JobRecord{
		Id: request.NewID("job"), Namespace: call.Namespace, SandboxId: sandboxID, Spec: command.Redacted(spec),
		State: berthv1.JobState_JOB_STATE_RUNNING, CreateTime: timestamppb.New(now),
		MachineId: machine.GetId(), Generation: sandbox.GetGeneration(), BootId: machine.GetBootId(),
	}
	job.Spec.Keep = &berthv1.JobSpec_KeepOutput{KeepOutput: false}
	c.set(job)
	if start.IsStale(sandbox, now) {
		c.touch(sandboxID, now)
	}
	return job, built, nil
}

// admit refuses another command while too many cannot be recorded.
func (c *Commands) admit() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	unwritten := len(c.ended) + c.left
	if unwritten < maxUnwritten {
		return nil
	}
	return fault.New(fault.StoreFull, "the records of %d commands could not be written down so far: free disk space in the state directory and try again", unwritten).
		Retry(retryInterval)
}

func (c *Commands) touch(sandboxID string, now time.Time) {
	c.Store.UpdateLater(func(tx *store.Tx) error {
		sandbox, err := tx.Sandbox(sandboxID)
		if err != nil || request.WantRunning(sandbox) != nil {
			return err
		}
		return start.Touch(tx, sandbox, now)
	})
}

// Find returns a copy of a command's record; nil where it is not held here, for then the ledger has it, or
// nobody does. Look here first and then in the ledger: then there is no instant at which it is in neither.
func (c *Commands) Find(id string) *recordv1.JobRecord {
	c.mu.Lock()
	defer c.mu.Unlock()
	if job := c.known[id]; job != nil {
		return proto.CloneOf(job)
	}
	return nil
}

// Running returns a command as its guest says that it was begun, and writes its record behind, unless it has
// ended by then. Without a status nothing is known of it yet.
func (c *Commands) Running(job *recordv1.JobRecord, status *guestv1.Status) *recordv1.JobRecord {
	id := job.GetId()
	if status != nil {
		job = proto.CloneOf(job)
		record.SetRunning(job, status)
		c.set(job)
	}
	c.Store.UpdateLater(func(tx *store.Tx) error {
		running := c.Find(id)
		if running == nil || record.IsDone(running) {
			return nil // its end is written by itself
		}
		return putRunning(tx, running, "job.running", "attached")
	})
	return job
}

func putRunning(tx *store.Tx, job *recordv1.JobRecord, event, message string) error {
	known, err := tx.Job(job.GetId())
	if err != nil || known != nil {
		return err
	}
	return tx.PutJob(job, event, message)
}

// Refused lets go of a command that its guest refused to begin. Where it is written down already, its
// record says so.
func (c *Commands) Refused(job *recordv1.JobRecord, cause error) {
	c.drop(job.GetId())
	c.Store.UpdateLater(func(tx *store.Tx) error {
		known, err := tx.Job(job.GetId())
		if err != nil || known == nil || record.IsDone(known) {
			return err
		}
		return c.Receipts.CloseIn(tx, known, record.FailedToStart("refused: "+cause.Error()))
	})
}

// Done concludes a command as its guest says, and writes its record behind the answer. Nothing of its output
// is kept.
func (c *Commands) Done(job *recordv1.JobRecord, status *guestv1.Status) *recordv1.JobRecord {
	done := proto.CloneOf(job)
	record.SetTimes(done, status)
	done.Stdout, done.Stderr = record.NotKept(status.GetStdout()), record.NotKept(status.GetStderr())
	return c.conclude(done, status.GetOutcome())
}

// Lost concludes a command of which its guest cannot tell how it ended.
func (c *Commands) Lost(job *recordv1.JobRecord, reason string) *recordv1.JobRecord {
	lost := proto.CloneOf(job)
	lost.Stdout, lost.Stderr = record.NotKept(nil), record.NotKept(nil)
	return c.conclude(lost, record.Lost(reason))
}

func (c *Commands) conclude(job *recordv1.JobRecord, outcome *berthv1.Outcome) *recordv1.JobRecord {
	record.Conclude(job, outcome, c.Now())
	c.set(job)
	c.Store.UpdateLater(func(tx *store.Tx) error { return putDone(tx, proto.CloneOf(job)) })
	c.release(job.GetId(), "")
	return job
}

func putDone(tx *store.Tx, job *recordv1.JobRecord) error {
	known, err := tx.Job(job.GetId())
	if err != nil {
		return err
	}
	if record.IsDone(known) { // from the guest's own word, which knows less of it
		known.Spec, known.CreateTime = job.GetSpec(), job.GetCreateTime()
		return tx.PutJob(known, "", "")
	}
	//mutation:record-behind-answer return nil
	return tx.PutJob(job, "job.done", record.Describe(job.GetOutcome()))
}

// Release has a machine's guest forget a command that is done, once its record is in the ledger.
func (c *Commands) Release(job *recordv1.JobRecord) { c.release(job.GetId(), job.GetMachineId()) }

func (c *Commands) release(id, machineID string) {
	c.mu.Lock()
	c.ended[id] = true
	if machineID != "" {
		c.released[machineID] = append(c.released[machineID], id)
	}
	begin := !c.flushing
	c.flushing = true
	c.mu.Unlock()
	if begin && !c.Background.Go(c.flush) {
		c.mu.Lock()
		c.flushing = false
		c.mu.Unlock()
	}
}

// flush works off what Release has gathered, until nothing gathers any more.
func (c *Commands) flush(ctx context.Context) {
	for {
		background.Pause(ctx, flushInterval)
		c.mu.Lock()
		ended, released := c.ended, c.released
		c.ended, c.released = map[string]bool{}, map[string][]string{}
		c.flushing = len(ended) > 0
		c.mu.Unlock()
		if len(ended) == 0 {
			return
		}
		if err := c.ensure(ctx, slices.Collect(maps.Keys(ended))); err != nil {
			c.putBack(ended, released)
			if ctx.Err() != nil {
				return
			}
			c.Log.Warn("cannot record attached commands; it is tried again", "commands", len(ended), "error", err)
			background.Pause(ctx, retryInterval)
			continue
		}
		for id := range ended {
			c.drop(id)
		}
		for machineID, ids := range released {
			for part := range slices.Chunk(ids, maxForgetBatch) {
				c.Receipts.Forget(ctx, machineID, part...)
			}
		}
	}
}

// ensure returns when the ledger has these commands, and writes those down that a full disk kept out of it.
func (c *Commands) ensure(ctx context.Context, ids []string) error {
	// Behind all that was handed to the ledger before.
	if err := c.Store.Update(ctx, func(*store.Tx) error { return nil }); err != nil {
		return err
	}
	var open, missing []string
	err := c.Store.View(func(tx *store.Tx) error {
		for _, id := range ids {
			job, err := tx.Job(id)
			if err != nil {
				return err
			}
			switch {
			case job == nil:
				missing = append(missing, id)
			case !record.IsDone(job):
				open = append(open, id)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	// That a job has ended may use a full disk's reserve. One more record may not.
	return errors.Join(c.writeDone(ctx, open, c.Store.UpdateUrgent), c.writeDone(ctx, missing, c.Store.Update))
}

// writeDone writes the records of commands that are done with one of the ledger's ways to change it.
func (c *Commands) writeDone(ctx context.Context, ids []string, update func(context.Context, func(*store.Tx) error) error) error {
	for part := range slices.Chunk(ids, maxFlushBatch) {
		err := update(ctx, func(tx *store.Tx) error {
			for _, id := range part {
				job := c.Find(id)
				if !record.IsDone(job) {
					continue // somebody else records its end
				}
				if err := putDone(tx, job); err != nil {
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

// putBack returns what flush could not be done with.
func (c *Commands) putBack(ended map[string]bool, released map[string][]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.Copy(c.ended, ended)
	for machineID, ids := range released {
		c.released[machineID] = append(c.released[machineID], ids...)
	}
}

// set holds a record, which is not changed from here on.
func (c *Commands) set(job *recordv1.JobRecord) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known[job.GetId()] = job
}

func (c *Commands) drop(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.known, id)
}

func isNoJob(err error) bool { return errors.Is(err, guestlink.ErrNoJob) }
