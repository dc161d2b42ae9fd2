// Package reconcile brings the ledger and the world together: at boot it opens the link to every
// machine and resumes open operations, then it looks after machines that fell silent, destroys
// machines that no record names, and drops what was kept long enough. It acts on what it saw twice,
// never on one sighting, and never touches a machine of another broker.
package reconcile

import (
	"context"
	"errors"
	"log/slog"
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
	trimFirst   = time.Minute      // after the start: also a broker that is restarted often drops what it kept
	trimEvery   = 10 * time.Minute // of what was kept long enough
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
}

// Service looks after machines.
type Service struct {
	opts   Options
	kicked chan struct{}

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
	return &Service{opts: opts, kicked: make(chan struct{}, 1), seen: map[string]sighting{}, orphans: map[string]sighting{}}
}

// Start opens the link to every machine that was booted and resumes every open operation. It waits
// for no machine: one mute guest never blocks the boot.
func (s *Service) Start() error {
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

// Run looks after machines until the context ends.
func (s *Service) Run(ctx context.Context) {
	look, sweep, trim := time.NewTicker(lookEvery), time.NewTicker(sweepEvery), time.NewTimer(trimFirst)
	defer look.Stop()
	defer sweep.Stop()
	defer trim.Stop()
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
		case <-trim.C:
			s.trim(ctx)
			trim.Reset(trimEvery)
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
	_, resting, err := s.machines()
	if err != nil {
		s.opts.Log.Error("cannot read the machines", "error", err)
		return
	}
	s.lookAtAll(ctx, resting)
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
	verdict := s.opts.Sandboxes.Look(limited, machineID)
	if !s.seenTwice(machineID, verdict) {
		return
	}
	var err error
	switch verdict {
	case lifecycle.Stopped:
		err = s.opts.Sandboxes.MarkStopped(limited, machineID)
	case lifecycle.Gone:
		err = s.opts.Sandboxes.MarkLost(limited, machineID)
	}
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Error("cannot record what became of a machine", "machine", machineID, "error", err)
	}
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
	if info, err := named.Provider.Info(limited); err != nil || !info.Healthy {
		return
	}
	machines, err := named.Provider.List(limited)
	if err != nil {
		if ctx.Err() == nil {
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
		if s.orphanLongEnough(machine) {
			s.destroyOrphan(ctx, named, machine)
		}
	}
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

// orphanLongEnough notes a machine without a record and reports whether it was one already, a grace
// ago.
func (s *Service) orphanLongEnough(machine providers.Machine) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before, known := s.orphans[machine.ID]
	if !known {
		s.orphans[machine.ID] = sighting{since: s.opts.Now()}
		return false
	}
	return s.opts.Now().Sub(before.since) >= orphanGrace
}

func (s *Service) destroyOrphan(ctx context.Context, named lifecycle.Named, machine providers.Machine) {
	limited, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	machine.ListenDir = s.opts.Sandboxes.ListenDir(machine.ID)
	if err := named.Provider.Destroy(limited, machine); err != nil {
		if ctx.Err() == nil {
			s.opts.Log.Warn("cannot destroy a machine that no record names", "provider", named.Name, "machine", machine.ID, "error", err)
		}
		return
	}
	s.opts.Log.Info("destroyed a machine that no record names", "provider", named.Name, "machine", machine.ID)
}

// trim drops what was kept long enough: request ids, events, receipts, ended sandboxes.
func (s *Service) trim(ctx context.Context) {
	now := s.opts.Now()
	before := now.Add(-s.opts.Retention)
	err := errors.Join(
		s.untilFew(ctx, func() (n int, err error) {
			err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
				n, err = tx.TrimRequests(now, trimAtOnce)
				return err
			})
			return n, err
		}),
		s.untilFew(ctx, func() (n int, err error) {
			err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
				n, err = tx.TrimEvents(now.Add(-eventsKept), eventsMost, trimAtOnce)
				return err
			})
			return n, err
		}),
		s.untilFew(ctx, func() (int, error) { return s.opts.Jobs.RemoveReceipts(ctx, before, trimAtOnce) }),
		s.trimSandboxes(ctx, before),
	)
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("cannot drop what was kept long enough", "error", err)
	}
}

// untilFew trims again and again, one short transaction at a time, until there is little left to trim.
func (s *Service) untilFew(ctx context.Context, trim func() (int, error)) error {
	for {
		n, err := trim()
		if err != nil || n < trimAtOnce || ctx.Err() != nil {
			return err
		}
	}
}

func (s *Service) trimSandboxes(ctx context.Context, before time.Time) error {
	return s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		ids, err := tx.EndedSandboxes(before, trimAtOnce)
		if err != nil {
			return err
		}
		for _, id := range ids {
			sandbox, err := tx.Sandbox(id)
			if err != nil {
				return err
			}
			if sandbox == nil || sandbox.GetOperationId() != "" {
				continue
			}
			if err := errors.Join(tx.DeleteMachine(sandbox.GetMachineId()), tx.DeleteSandbox(id)); err != nil {
				return err
			}
		}
		return nil
	})
}
