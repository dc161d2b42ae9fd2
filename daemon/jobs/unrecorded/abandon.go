package unrecorded

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Tuning.
const (
	awaitWait = 10 * time.Second // one wait for an abandoned command's end
	// A call that begins a command may be on its way although its caller has left: a guest that does not know
	// the command is asked again, this often, before it counts as never begun.
	lateBeginChecks   = 10
	lateBeginInterval = 200 * time.Millisecond
)

// Abandon takes over a command whose caller left, or whose call failed: it is written down as running, and
// what becomes of it is recorded. Its guest ends it by its own disconnect rule.
func (c *Commands) Abandon(job *recordv1.JobRecord) {
	c.takeOver(job, func(ctx context.Context) { c.await(ctx, job.GetMachineId(), job.GetId()) })
}

// AbandonAndStop is Abandon, and stops the command after a grace.
func (c *Commands) AbandonAndStop(job *recordv1.JobRecord, grace time.Duration) {
	c.takeOver(job, func(ctx context.Context) {
		if grace > 0 && !background.Pause(ctx, grace) {
			return // the guest counts it too
		}
		status, err := c.Links.StopJob(ctx, job.GetMachineId(), record.KillGrace(job), &guestv1.StopRequest{
			JobId: job.GetId(), Reason: "disconnected: the caller went away",
		})
		if err == nil {
			_, err = c.Receipts.Import(ctx, job.GetMachineId(), status)
		}
		if err != nil {
			c.await(ctx, job.GetMachineId(), job.GetId())
		}
	})
}

// takeOver runs then once the ledger has the command. Until that it is found here.
func (c *Commands) takeOver(job *recordv1.JobRecord, then func(context.Context)) {
	c.Background.Go(func(ctx context.Context) {
		c.countLeft(1)
		err := c.writeDown(ctx, job)
		for err != nil && background.Pause(ctx, retryInterval) {
			err = c.writeDown(ctx, job)
		}
		c.countLeft(-1)
		if err != nil {
			return // the broker stops: the guest names the command at the next connection
		}
		c.drop(job.GetId())
		then(ctx)
	})
}

func (c *Commands) writeDown(ctx context.Context, job *recordv1.JobRecord) error {
	return c.Store.Update(ctx, func(tx *store.Tx) error {
		return putRunning(tx, proto.CloneOf(job), "job.abandoned", "the caller went away")
	})
}

func (c *Commands) countLeft(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left += n
}

// Await records in the background how a command ends that is in the ledger and that no list announces. It
// does nothing where that is under way.
func (c *Commands) Await(machineID, jobID string) {
	c.Background.Go(func(ctx context.Context) { c.await(ctx, machineID, jobID) })
}

func (c *Commands) await(ctx context.Context, machineID, jobID string) {
	if !c.waits.begin(jobID) {
		return
	}
	defer c.waits.end(jobID)
	var pacer background.Pacer
	for unknown := 0; ctx.Err() == nil; {
		status, err := c.Links.WaitJob(ctx, machineID, jobID, awaitWait)
		switch {
		case isNoJob(err) && unknown < lateBeginChecks:
			unknown++
			background.Pause(ctx, lateBeginInterval)
			continue
		case isNoJob(err):
			_, err = c.Receipts.Close(ctx, jobID, record.Lost("disconnected: its caller went away, and the machine's guest has no record of it"))
		case err == nil && status.GetDone():
			_, err = c.Receipts.Import(ctx, machineID, status)
		case err == nil:
			pacer.Await(ctx, false)
			continue
		}
		if err == nil || !c.Links.Awaited(machineID) {
			return // what is still open is reconciled at the next connection, or with the machine
		}
		if ctx.Err() == nil {
			c.Log.Debug("cannot learn how an attached command ends; it is tried again", "job", jobID, "error", err)
		}
		background.Pause(ctx, retryInterval)
	}
}

// waits are the commands whose end is waited for.
type waits struct {
	mu   sync.Mutex
	jobs map[string]bool
}

func (w *waits) begin(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.jobs[id] {
		return false
	}
	w.jobs[id] = true
	return true
}

func (w *waits) end(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.jobs, id)
}
