// Package follow keeps the ledger up to what guests say of their jobs: one long poll a machine, after an
// initial sync that reconciles what the ledger has open. It recovers jobs that a crash left without a
// record, and never believes a guest about another machine's jobs.
package follow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/receipt"
	"github.com/berth-sandbox/berth/daemon/jobs/start"
	"github.com/berth-sandbox/berth/daemon/jobs/unrecorded"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// Tuning.
const (
	listWait             = 30 * time.Second // one long poll for a machine's job changes
	listLimit            = 500              // statuses an answer: far below the message limit
	maxImportsConcurrent = 8                // a machine: they share commits
	retryInterval        = time.Second      // after an error that is not the link's
	// maxListed is how many jobs a guest may name in the initial sync, pages counted in; and maxRecovered
	// how many a machine that no record has: attached commands that were left by a crash, of which
	// there are some hundreds. A guest that names more makes them up, to fill the ledger.
	maxListed    = 100_000
	maxRecovered = 10_000
)

// Options configure a Follower. All are required.
type Options struct {
	Store      *store.Store
	Links      *guestlink.Links
	Starter    *start.Starter
	Unrecorded *unrecorded.Commands
	Receipts   *receipt.Receipts
	Background *background.Group
	Log        *slog.Logger
	Now        func() time.Time
	// BootChanged writes down that a machine's guest was started again behind the broker's back.
	BootChanged func(ctx context.Context, machineID string, hello *guestv1.HelloResponse) (bool, error)
	// Retention is how long receipts are kept: a job that ended longer ago and that no record has is not
	// recovered.
	Retention time.Duration
}

// Follower follows machines.
type Follower struct {
	Options

	mu       sync.Mutex
	machines map[string]*machine
}

// machine is what is known of one since the broker's start.
type machine struct {
	cancel    context.CancelFunc // ends the follower of the connection; nil while there is none
	done      chan struct{}      // closed when that has ended
	synced    bool
	recovered int // jobs that its guest named and no record had
}

// New returns a follower of no machine.
func New(opts Options) *Follower { return &Follower{Options: opts, machines: map[string]*machine{}} }

// Follow begins to follow a machine's jobs; call it when a connection to its guest was opened. It first
// syncs every job that the guest knows and reconciles what the ledger has open, and then takes each change
// as it comes.
func (f *Follower) Follow(machineID string, hello *guestv1.HelloResponse) {
	f.mu.Lock()
	m := f.machines[machineID]
	if m == nil {
		m = &machine{}
		f.machines[machineID] = m
	}
	endBefore, before := m.cancel, m.done
	following, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	m.cancel, m.done = cancel, done
	f.mu.Unlock()
	began := f.Background.Go(func(ctx context.Context) {
		defer close(done)
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		if endBefore != nil {
			endBefore()
		}
		if before != nil {
			<-before
		}
		f.follow(following, machineID, hello)
	})
	if !began {
		cancel()
		close(done)
	}
}

// Unfollow ends the follower of a machine whose connection is gone.
func (f *Follower) Unfollow(machineID string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.machines[machineID]; m != nil && m.cancel != nil {
		m.cancel()
		m.cancel = nil
	}
}

// Remove drops what is held in memory of a machine to which no link is kept any more.
func (f *Follower) Remove(machineID string) {
	f.Unfollow(machineID)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.machines, machineID)
}

// Syncing reports whether a machine that should run has not listed its jobs since the broker's start.
func (f *Follower) Syncing() bool {
	var live []*recordv1.MachineRecord
	err := f.Store.View(func(tx *store.Tx) (err error) {
		live, err = tx.LiveMachines()
		return err
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, machine := range live {
		known := f.machines[machine.GetId()]
		synced := known != nil && known.synced
		if machine.GetState() == recordv1.MachineState_MACHINE_STATE_BOOTED && !synced && f.Links.Awaited(machine.GetId()) {
			return true
		}
	}
	return err != nil
}

func (f *Follower) setSynced(machineID string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if m := f.machines[machineID]; m != nil {
		m.synced = true
	}
}

func (f *Follower) follow(ctx context.Context, machineID string, hello *guestv1.HelloResponse) {
	log := f.Log.With("machine", machineID)
	for ctx.Err() == nil {
		if _, err := f.BootChanged(ctx, machineID, hello); err == nil {
			break
		} else if ctx.Err() == nil {
			log.Warn("cannot record the guest's boot", "error", err)
			background.Pause(ctx, retryInterval)
		}
	}
	request := &guestv1.ListRequest{Limit: listLimit} // everything, attached commands included
	known, listed := map[string]bool{}, 0
	var reconciled time.Time
	var pacer background.Pacer
	warned := false
	for ctx.Err() == nil {
		response, err := f.Links.ListJobs(ctx, machineID, request)
		if err == nil && response.GetBootId() != hello.GetBootId() {
			// If the guest restarted, this connection is about to drop, and the next one's follower takes over.
			err = fmt.Errorf("it answers as boot %q, and was connected to as %q", response.GetBootId(), hello.GetBootId())
		}
		if err != nil {
			if ctx.Err() == nil {
				log.Log(ctx, severity(warned || errors.Is(err, context.Canceled)), "cannot list the guest's jobs", "error", err)
				warned = true
				background.Pause(ctx, retryInterval)
			}
			continue
		}
		warned = false
		if !f.takeAll(ctx, machineID, response.GetStatuses()) {
			background.Pause(ctx, retryInterval)
			continue // the same again: a job that is done announces no further change
		}
		pacer.Await(ctx, response.GetNextCursor() > request.GetSinceCursor())
		request.SinceCursor = response.GetNextCursor()
		if known == nil {
			if f.Now().Sub(reconciled) >= listWait {
				reconciled = f.Now()
				f.reconcileReserved(ctx, machineID, hello)
			}
			continue
		}
		listed += len(response.GetStatuses()) + 1
		for _, status := range response.GetStatuses() {
			known[status.GetJobId()] = true
		}
		if response.GetMore() && listed < maxListed {
			continue
		}
		f.reconcileOpen(ctx, machineID, hello, known)
		f.setSynced(machineID)
		known, reconciled = nil, f.Now()
		request.Wait, request.DurableOnly = durationpb.New(listWait), true
	}
}

// severity is what a failure is worth that happens again and again: a warning the first time.
func severity(warned bool) slog.Level {
	if warned {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// takeAll takes statuses, several at once, and reports whether all could be taken.
func (f *Follower) takeAll(ctx context.Context, machineID string, statuses []*guestv1.Status) bool {
	var group errgroup.Group
	group.SetLimit(maxImportsConcurrent)
	for _, status := range statuses {
		group.Go(func() error {
			err := f.take(ctx, machineID, status)
			if err != nil && ctx.Err() == nil {
				f.Log.Warn("cannot take a job's change; it is tried again", "machine", machineID, "job", status.GetJobId(), "error", err)
			}
			return err
		})
	}
	return group.Wait() == nil
}
