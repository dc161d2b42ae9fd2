// Package reconcile brings the ledger and the machines together: at boot it opens the link to every
// machine and resumes open operations, then it looks after machines that fell silent, destroys
// machines that no record names, and drops what was kept long enough. It acts on what it observed twice,
// never on one observation, and never touches a machine of another broker.
package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Tuning. What is exported is daemon/fsck's, too.
const (
	ObserveInterval = time.Second      // between two observations of a machine that is silent
	ObserveTimeout  = 10 * time.Second // of one machine; an unresponsive provider is not waited for longer
	MaxConcurrent   = 16               // machines that are observed at once
	SweepInterval   = 30 * time.Second // for machines without a record, and for those that rest
	OrphanGrace     = time.Minute      // a machine without a record is left alone this long
	trimInterval    = time.Minute      // of what was kept long enough, or is more than may be kept
	maxTrim         = 1000             // records a transaction
	eventRetention  = 24 * time.Hour   // for watches to resume from
	maxEvents       = 200_000
)

// Options configure a Service. All are required.
type Options struct {
	Store       *store.Store
	Links       *guestlink.Links
	Sandboxes   *lifecycle.Service
	Jobs        *jobs.Service
	Log         *slog.Logger
	Now         func() time.Time
	Retention   time.Duration // receipts and ended sandboxes are kept this long
	MaxReceipts int           // the oldest go first
	MaxOutput   uint64        // bytes that receipts keep in all: the oldest go first
}

// Service looks after machines.
type Service struct {
	opts         Options
	machines     *machines.Service
	kicked       chan struct{}
	trimInterval time.Duration

	mu       sync.Mutex
	observed map[string]observation // machines as they were last found, by id
	orphans  map[string]time.Time   // machines without a record, by id, and since when they are known
}

// observation is what was found of a machine, and since when.
type observation struct {
	found machines.Observation
	since time.Time
}

// New makes a service; Start and Run set it to work.
func New(opts Options) *Service {
	return &Service{
		opts: opts, machines: opts.Sandboxes.Machines(), kicked: make(chan struct{}, 1), trimInterval: trimInterval,
		observed: map[string]observation{}, orphans: map[string]time.Time{},
	}
}

// Start opens the link to every machine that was booted and resumes every open operation. It waits
// for no machine: one unresponsive guest never blocks the boot.
func (s *Service) Start() error {
	expected, _, err := s.recorded()
	if err != nil {
		return err
	}
	for _, m := range expected {
		if err := s.machines.OpenLink(m.Machine); err != nil {
			s.opts.Log.Error("cannot open the link to a machine", "machine", m.Machine.GetId(), "error", err)
		}
	}
	return s.opts.Sandboxes.ResumeOperations()
}

// Run looks after machines, and beside that trims, until the context ends.
func (s *Service) Run(ctx context.Context) {
	var trimming sync.WaitGroup
	defer trimming.Wait()
	trimming.Go(func() { s.runTrim(ctx) })
	observe, sweep := time.NewTicker(ObserveInterval), time.NewTicker(SweepInterval)
	defer observe.Stop()
	defer sweep.Stop()
	s.sweep(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kicked:
			s.observeSilent(ctx)
		case <-observe.C:
			s.observeSilent(ctx)
		case <-sweep.C:
			s.sweep(ctx)
			s.observeResting(ctx)
		}
	}
}

// Kick asks for observations soon; after a link went down.
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
	for _, since := range s.orphans {
		oldest = max(oldest, s.opts.Now().Sub(since))
	}
	return len(s.orphans), oldest
}

// Machine is a machine's record with its sandbox's.
type Machine struct {
	Machine *recordv1.MachineRecord
	Sandbox *recordv1.SandboxRecord
}

// recorded returns the machines whose guests should answer, and those that were booted and rest.
func (s *Service) recorded() (expected, resting []Machine, err error) {
	err = s.opts.Store.View(func(tx *store.Tx) error {
		live, err := tx.LiveMachines()
		if err != nil {
			return err
		}
		for _, machine := range live {
			record, err := tx.Sandbox(machine.GetSandboxId())
			switch {
			case err != nil:
				return err
			case machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED:
			case sandbox.IsResting(record.GetState()):
				resting = append(resting, Machine{machine, record})
			default:
				expected = append(expected, Machine{machine, record})
			}
		}
		return nil
	})
	return expected, resting, err
}

// observeSilent asks the providers about every machine that is silent, and again about those that rest and
// were found to be otherwise than their sandbox says; it records what was found twice.
func (s *Service) observeSilent(ctx context.Context) {
	expected, resting, err := s.recorded()
	if err != nil {
		s.opts.Log.Error("cannot read the machines", "error", err)
		return
	}
	var due []Machine
	for _, m := range expected {
		if s.opts.Links.Hello(m.Machine.GetId()) != nil {
			s.forget(m.Machine.GetId())
			continue
		}
		due = append(due, m)
	}
	for _, m := range resting {
		if found, _ := s.last(m.Machine.GetId()); m.Contradicts(found) {
			due = append(due, m)
		}
	}
	s.observeAll(ctx, due)
}

// observeResting asks about machines that rest: a suspended one can lose its processes, and any can vanish.
func (s *Service) observeResting(ctx context.Context) {
	expected, resting, err := s.recorded()
	if err != nil {
		s.opts.Log.Error("cannot read the machines", "error", err)
		return
	}
	s.forgetOthers(append(expected, resting...))
	s.observeAll(ctx, resting)
}

// forgetOthers forgets how machines were found that are there no more.
func (s *Service) forgetOthers(there []Machine) {
	ids := map[string]bool{}
	for _, m := range there {
		ids[m.Machine.GetId()] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.observed, func(id string, _ observation) bool { return !ids[id] })
}

func (s *Service) observeAll(ctx context.Context, due []Machine) {
	var group errgroup.Group
	group.SetLimit(MaxConcurrent)
	for _, m := range due {
		group.Go(func() error {
			s.observe(ctx, m.Machine.GetId())
			return nil
		})
	}
	_ = group.Wait()
}

func (s *Service) observe(ctx context.Context, machineID string) {
	limited, cancel := context.WithTimeout(ctx, ObserveTimeout)
	defer cancel()
	found, confirmed := s.Observe(limited, machineID)
	if !confirmed {
		return
	}
	if err := s.Record(limited, machineID, found); err != nil && ctx.Err() == nil {
		s.opts.Log.Error("cannot record what became of a machine", "machine", machineID, "error", err)
	}
}

// sweep destroys machines that bear the broker's label and that no record names: what a provider still has
// although it was told to destroy it, or answered late.
func (s *Service) sweep(ctx context.Context) {
	found := map[string]bool{}
	for _, named := range s.machines.Providers() {
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

func (s *Service) sweepProvider(ctx context.Context, named machines.Named, found map[string]bool) {
	limited, cancel := context.WithTimeout(ctx, ObserveTimeout)
	defer cancel()
	listed, err := machines.List(limited, named)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, machines.ErrUnwell) {
			s.opts.Log.Warn("cannot list a provider's machines", "provider", named.Name, "error", err)
		}
		return
	}
	for _, machine := range listed {
		recorded, err := s.machines.IsRecorded(machine.ID)
		if err != nil || recorded {
			continue
		}
		found[machine.ID] = true
		if _, ripe := s.Orphan(machine.ID); !ripe {
			continue
		}
		if err := s.DestroyOrphan(ctx, named, machine); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("cannot destroy a machine that no record names", "provider", named.Name, "machine", machine.ID, "error", err)
		}
	}
}

// Orphan notes a machine without a record; it returns since when it is known as one, and whether that is
// a grace ago, so that it may be destroyed.
func (s *Service) Orphan(machineID string) (since time.Time, ripe bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.opts.Now()
	since, known := s.orphans[machineID]
	if !known {
		s.orphans[machineID] = now
		return now, false
	}
	//mutation:orphan-grace return since, true
	return since, now.Sub(since) >= OrphanGrace
}

// DestroyOrphan destroys a machine without a record at its provider.
func (s *Service) DestroyOrphan(ctx context.Context, named machines.Named, machine providers.Machine) error {
	limited, cancel := context.WithTimeout(ctx, ObserveTimeout)
	defer cancel()
	machine.ListenDir = s.machines.ListenDir(machine.ID)
	if err := named.Provider.Destroy(limited, machine); err != nil {
		return err
	}
	s.opts.Log.Info("destroyed a machine that no record names", "provider", named.Name, "machine", machine.ID)
	return nil
}
