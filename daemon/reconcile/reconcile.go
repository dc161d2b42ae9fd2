// Package reconcile brings the ledger and the world together: at boot it opens the link to every
// machine and resumes open operations, then it looks after machines that fell silent, destroys
// machines that no record names, and drops what was kept long enough. It acts on what it saw twice,
// never on one sighting, and never touches a machine of another broker. For those who run the broker it
// does the same at once and in words (fsck.go), and hands out copies of the ledger (backup.go).
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Tuning.
const (
	lookEvery   = time.Second      // at machines that are silent
	lookTimeout = 10 * time.Second // one machine's look; a mute provider is not waited for longer
	looksAtOnce = 16
	sweepEvery  = 30 * time.Second // for machines without a record
	orphanGrace = time.Minute      // a machine without a record is left alone this long
	trimEvery   = time.Minute      // of what was kept long enough, or is more than may be kept
	trimAtOnce  = 1000             // records a transaction
	eventsKept  = 24 * time.Hour   // for watches to resume from
	eventsMost  = 200_000
)

// Options configure a Service. All are required.
type Options struct {
	Store     *store.Store
	Links     *guestlink.Links
	Sandboxes *lifecycle.Service
	Jobs      *jobs.Service
	Log       *slog.Logger
	Now       func() time.Time
	Retention time.Duration // receipts and ended sandboxes are kept this long
	// ReceiptsMost is how many receipts are kept, and OutputMost how many bytes of output they keep in all:
	// the oldest go first.
	ReceiptsMost int
	OutputMost   uint64
	Scratch      string // a directory for copies of the ledger, with room for two; it is there only while one is made or checked
}

// Service looks after machines.
type Service struct {
	opts    Options
	kicked  chan struct{}
	copying chan struct{} // held by who uses the scratch directory
	trims   time.Duration // between two trims

	mu      sync.Mutex
	seen    map[string]sighting // silent machines, by id, as last found
	orphans map[string]sighting // machines without a record, by id
}

// sighting is what was found, and since when.
type sighting struct {
	verdict lifecycle.Verdict
	since   time.Time
}

// New makes a service; Start and Run set it to work.
func New(opts Options) *Service {
	return &Service{
		opts: opts, kicked: make(chan struct{}, 1), copying: make(chan struct{}, 1), trims: trimEvery,
		seen: map[string]sighting{}, orphans: map[string]sighting{},
	}
}

// Start opens the link to every machine that was booted and resumes every open operation. It waits
// for no machine: one mute guest never blocks the boot.
func (s *Service) Start() error {
	if err := os.RemoveAll(s.opts.Scratch); err != nil { // a copy that a kill left
		s.opts.Log.Warn("cannot remove what an earlier copy of the ledger left", "error", err)
	}
	machines, _, err := s.machines()
	if err != nil {
		return err
	}
	for _, machine := range machines {
		if err := s.opts.Sandboxes.OpenLink(machine); err != nil {
			s.opts.Log.Error("cannot open the link to a machine", "machine", machine.GetId(), "error", err)
		}
	}
	return s.opts.Sandboxes.ResumeOperations()
}

// Run looks after machines, and beside that trims, until the context ends.
func (s *Service) Run(ctx context.Context) {
	var trimming sync.WaitGroup
	defer trimming.Wait()
	trimming.Go(func() { s.runTrim(ctx) })
	look, sweep := time.NewTicker(lookEvery), time.NewTicker(sweepEvery)
	defer look.Stop()
	defer sweep.Stop()
	s.sweep(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kicked:
			s.look(ctx)
		case <-look.C:
			s.look(ctx)
		case <-sweep.C:
			s.sweep(ctx)
			s.lookAtRest(ctx)
		}
	}
}

// Kick asks for a look soon; after a link went down.
func (s *Service) Kick() {
	select {
	case s.kicked <- struct{}{}:
	default:
	}
}

// Orphans returns how many machines without a record are known, and for how long the oldest.
func (s *Service) Orphans() (count int, oldest time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, orphan := range s.orphans {
		oldest = max(oldest, s.opts.Now().Sub(orphan.since))
	}
	return len(s.orphans), oldest
}

// machines returns the machines whose guests should answer, and those that were booted and rest.
func (s *Service) machines() (awake, resting []*recordv1.MachineRecord, err error) {
	err = s.opts.Store.View(func(tx *store.Tx) error {
		machines, err := tx.LiveMachines()
		if err != nil {
			return err
		}
		for _, machine := range machines {
			sandbox, err := tx.Sandbox(machine.GetSandboxId())
			switch {
			case err != nil:
				return err
			case machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED:
			case rests(sandbox.GetState()):
				resting = append(resting, machine)
			default:
				awake = append(awake, machine)
			}
		}
		return nil
	})
	return awake, resting, err
}

func rests(state berthv1.SandboxState) bool {
	switch state {
	case berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_LOST:
		return true
	}
	return false
}

// look asks the providers about every machine that is silent, and writes down what was found twice.
func (s *Service) look(ctx context.Context) {
	awake, _, err := s.machines()
	if err != nil {
		s.opts.Log.Error("cannot read the machines", "error", err)
		return
	}
	silent := awake[:0]
	for _, machine := range awake {
		if s.opts.Links.Hello(machine.GetId()) != nil {
			s.forget(machine.GetId())
			continue
		}
		silent = append(silent, machine)
	}
	s.lookAtAll(ctx, silent)
}

// lookAtRest asks about machines that rest: they can vanish too, but nobody waits to hear of it.
func (s *Service) lookAtRest(ctx context.Context) {
	awake, resting, err := s.machines()
	if err != nil {
		s.opts.Log.Error("cannot read the machines", "error", err)
		return
	}
	s.forgetOthers(append(awake, resting...))
	s.lookAtAll(ctx, resting)
}

// forgetOthers forgets how machines were found that are there no more.
func (s *Service) forgetOthers(machines []*recordv1.MachineRecord) {
	there := map[string]bool{}
	for _, machine := range machines {
		there[machine.GetId()] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.seen, func(id string, _ sighting) bool { return !there[id] })
}

func (s *Service) lookAtAll(ctx context.Context, machines []*recordv1.MachineRecord) {
	var group errgroup.Group
	group.SetLimit(looksAtOnce)
	for _, machine := range machines {
		group.Go(func() error {
			s.lookAt(ctx, machine.GetId())
			return nil
		})
	}
	_ = group.Wait()
}

func (s *Service) lookAt(ctx context.Context, machineID string) {
	limited, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	verdict, twice := s.sight(limited, machineID)
	if !twice {
		return
	}
	if err := s.writeDown(limited, machineID, verdict); err != nil && ctx.Err() == nil {
		s.opts.Log.Error("cannot record what became of a machine", "machine", machineID, "error", err)
	}
}

// sight asks what became of a machine, and reports whether the look before had found the same.
func (s *Service) sight(ctx context.Context, machineID string) (verdict lifecycle.Verdict, twice bool) {
	verdict = s.opts.Sandboxes.Look(ctx, machineID)
	return verdict, s.seenTwice(machineID, verdict)
}

// writeDown records what was seen twice of a machine.
func (s *Service) writeDown(ctx context.Context, machineID string, verdict lifecycle.Verdict) error {
	switch verdict {
	case lifecycle.Stopped:
		return s.opts.Sandboxes.MarkStopped(ctx, machineID)
	case lifecycle.Gone:
		return s.opts.Sandboxes.MarkLost(ctx, machineID)
	}
	return nil
}

// seenTwice notes a verdict and reports whether the look before, at least most of a period ago, had
// found the same.
func (s *Service) seenTwice(machineID string, verdict lifecycle.Verdict) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.seen[machineID]
	if !known || before.verdict != verdict {
		s.seen[machineID] = sighting{verdict, s.opts.Now()}
		return false
	}
	return s.opts.Now().Sub(before.since) >= lookEvery/2
}

func (s *Service) forget(machineID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.seen, machineID)
}

// sweep destroys machines that bear our label and that no record names: what a provider still has
// although it was told to destroy it, or answered late.
func (s *Service) sweep(ctx context.Context) {
	found := map[string]bool{}
	for _, named := range s.opts.Sandboxes.Providers() {
		s.sweepProvider(ctx, named, found)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.orphans {
		if !found[id] {
			delete(s.orphans, id)
		}
	}
}

func (s *Service) sweepProvider(ctx context.Context, named lifecycle.Named, found map[string]bool) {
	limited, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	machines, err := survey(limited, named)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, errUnwell) {
			s.opts.Log.Warn("cannot list a provider's machines", "provider", named.Name, "error", err)
		}
		return
	}
	for _, machine := range machines {
		recorded, err := s.recorded(machine.ID)
		if err != nil || recorded {
			continue
		}
		found[machine.ID] = true
		if _, ripe := s.orphan(machine.ID); !ripe {
			continue
		}
		if err := s.destroyOrphan(ctx, named, machine); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("cannot destroy a machine that no record names", "provider", named.Name, "machine", machine.ID, "error", err)
		}
	}
}

// errUnwell is a provider that says that it can't be used now: nothing is concluded from what it lists.
var errUnwell = errors.New("it is not well")

// survey lists the machines of a provider that is well.
func survey(ctx context.Context, named lifecycle.Named) ([]providers.Machine, error) {
	info, err := named.Provider.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnwell, err)
	}
	if !info.Healthy {
		return nil, fmt.Errorf("%w: %s", errUnwell, info.Message)
	}
	return named.Provider.List(ctx)
}

func (s *Service) recorded(machineID string) (bool, error) {
	recorded := false
	err := s.opts.Store.View(func(tx *store.Tx) error {
		machine, err := tx.Machine(machineID)
		recorded = machine != nil && machine.GetState() != recordv1.MachineState_MACHINE_STATE_GONE
		return err
	})
	return recorded, err
}

// orphan notes a machine without a record; it returns since when it is known as one, and whether that is
// a grace ago, so that it may be destroyed.
func (s *Service) orphan(machineID string) (since time.Time, ripe bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Now()
	before, known := s.orphans[machineID]
	if !known {
		s.orphans[machineID] = sighting{since: now}
		return now, false
	}
	return before.since, now.Sub(before.since) >= orphanGrace
}

func (s *Service) destroyOrphan(ctx context.Context, named lifecycle.Named, machine providers.Machine) error {
	limited, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	machine.ListenDir = s.opts.Sandboxes.ListenDir(machine.ID)
	if err := named.Provider.Destroy(limited, machine); err != nil {
		return err
	}
	s.opts.Log.Info("destroyed a machine that no record names", "provider", named.Name, "machine", machine.ID)
	return nil
}
