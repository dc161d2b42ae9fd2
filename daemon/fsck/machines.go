package fsck

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// atProviders looks at every machine that a provider has of this broker. Those of another broker are not
// among them.
func (c *check) atProviders(ctx context.Context) error {
	for _, named := range c.at.Providers() {
		limited, cancel := context.WithTimeout(ctx, reconcile.ObserveTimeout)
		listed, err := machines.List(limited, named)
		cancel()
		if err != nil {
			c.unlisted[named.Name] = true
			c.found(Finding{
				Kind: "provider_unusable", Subject: named.Name, Provider: named.Name, Message: err.Error(),
				Action: "none", WhyNot: "nothing is concluded about its machines until it is well: see `berth providers`",
			})
			continue
		}
		for _, machine := range listed {
			c.machines[machine.ID] = true
			if err := c.atProvider(ctx, named, machine); err != nil {
				return err
			}
		}
	}
	return nil
}

// atProvider compares what a provider says of one machine with its record.
func (c *check) atProvider(ctx context.Context, named machines.Named, machine providers.Machine) error {
	recorded, err := c.at.IsRecorded(machine.ID)
	if err != nil {
		return err
	}
	if !recorded {
		c.orphaned(ctx, named, machine)
		return nil
	}
	m, err := c.recordOf(machine.ID)
	if err != nil || m.Sandbox == nil || m.Sandbox.GetOperationId() != "" {
		return err
	}
	id, state := m.Sandbox.GetId(), m.Sandbox.GetState()
	switch {
	case machine.State == providers.MachineSuspended && state == berthv1.SandboxState_SANDBOX_STATE_RUNNING:
		c.found(Finding{
			Kind: "machine_frozen", Subject: machine.ID, Provider: named.Name, Action: "none",
			Message: fmt.Sprintf("sandbox %s is RUNNING, and its machine is frozen", id),
			WhyNot:  fmt.Sprintf("somebody froze it: `berth suspend %s` and `berth resume %s` let it go on", id, id),
		})
	case machine.State == providers.MachineRunning && sandbox.IsResting(state):
		remedy := fmt.Sprintf("`berth resume %s` takes it up, `berth rm %s` destroys it", id, id)
		if state == berthv1.SandboxState_SANDBOX_STATE_LOST {
			remedy = fmt.Sprintf("its jobs were given up: `berth rm %s` destroys it", id)
		}
		c.found(Finding{
			Kind: "machine_running", Subject: machine.ID, Provider: named.Name, Action: "none",
			Message: fmt.Sprintf("sandbox %s is %s, and its machine runs", id, request.StateName(state)),
			WhyNot:  remedy,
		})
	}
	return nil
}

func (c *check) recordOf(machineID string) (m reconcile.Machine, err error) {
	err = c.opts.Store.View(func(tx *store.Tx) error {
		if m.Machine, err = tx.Machine(machineID); err != nil {
			return err
		}
		m.Sandbox, err = tx.Sandbox(m.Machine.GetSandboxId())
		return err
	})
	return m, err
}

// orphaned is a machine that no record names.
func (c *check) orphaned(ctx context.Context, named machines.Named, machine providers.Machine) {
	since, ripe := c.opts.Reconcile.Orphan(machine.ID)
	known := c.opts.Now().Sub(since)
	finding := Finding{
		Kind: "orphan_machine", Subject: machine.ID, Provider: named.Name, Age: known,
		Message: fmt.Sprintf("no record names it; it is %s%s", machine.State, madeAgo(c.opts.Now(), machine.Created)),
		Action:  "destroy it with all that runs in it",
	}
	if !ripe {
		finding.WhyNot = fmt.Sprintf("it is known for %s, and destroyed when that is %s: by another repair in %s, or by the broker itself at most %s later",
			known.Round(time.Second), reconcile.OrphanGrace, (reconcile.OrphanGrace - known).Round(time.Second), reconcile.SweepInterval)
	}
	c.fix(finding, func() error { return c.opts.Reconcile.DestroyOrphan(ctx, named, machine) })
}

func madeAgo(now, created time.Time) string {
	if created.IsZero() {
		return ""
	}
	return fmt.Sprintf(", made %s ago", max(now.Sub(created), 0).Round(time.Second))
}

// kept is a machine with its sandbox, as recorded.
type kept struct {
	reconcile.Machine
	openJobs int
}

// inLedger looks at every machine that a record names.
func (c *check) inLedger(ctx context.Context) error {
	var all []kept
	err := c.opts.Store.View(func(tx *store.Tx) error {
		live, err := tx.LiveMachines()
		if err != nil {
			return err
		}
		for _, machine := range live {
			sandbox, err := tx.Sandbox(machine.GetSandboxId())
			if err != nil {
				return err
			}
			open, err := tx.CountOpenJobs(machine.GetSandboxId())
			if err != nil {
				return err
			}
			all = append(all, kept{reconcile.Machine{Machine: machine, Sandbox: sandbox}, open})
		}
		return nil
	})
	if err != nil {
		return err
	}
	wellKnown := map[string]bool{}
	for _, named := range c.at.Providers() {
		wellKnown[named.Name] = true
	}
	var group errgroup.Group
	group.SetLimit(reconcile.MaxConcurrent)
	for _, k := range all {
		c.machines[k.Machine.Machine.GetId()] = true
		if !wellKnown[k.Machine.Machine.GetProvider()] {
			c.found(providerMissing(k.Machine.Machine))
			continue
		}
		if c.unlisted[k.Machine.Machine.GetProvider()] || c.misplaced(k) {
			continue
		}
		group.Go(func() error {
			c.observe(ctx, k)
			return nil
		})
	}
	return group.Wait()
}

func providerMissing(machine *recordv1.MachineRecord) Finding {
	return Finding{
		Kind: "provider_missing", Subject: machine.GetId(), Provider: machine.GetProvider(), Action: "none",
		Message: fmt.Sprintf("it belongs to provider %q, which this broker was not started with", machine.GetProvider()),
		WhyNot:  fmt.Sprintf("start the broker with --provider %s", machine.GetProvider()),
	}
}

// misplaced finds records of machines that are nobody's, and reports whether there is nothing to look at
// the provider for: because of that, or because an operation is at work on it.
func (c *check) misplaced(k kept) bool {
	ended := k.Sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED ||
		k.Sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_FAILED
	if k.Sandbox != nil && !ended {
		return k.Sandbox.GetOperationId() != "" || k.Machine.Machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED
	}
	c.found(Finding{
		Kind: "machine_stuck", Subject: k.Machine.Machine.GetId(), Provider: k.Machine.Machine.GetProvider(), Action: "none",
		Message: fmt.Sprintf("its record says %s, and its sandbox %q has ended", strings.TrimPrefix(k.Machine.Machine.GetState().String(), "MACHINE_STATE_"), k.Machine.Machine.GetSandboxId()),
		WhyNot:  "the broker ends both at once, so this is a defect: report it with the broker's log",
	})
	return true
}

// observe asks the provider about a machine that is silent or rests, as the broker itself does.
func (c *check) observe(ctx context.Context, k kept) {
	id := k.Machine.Machine.GetId()
	if !sandbox.IsResting(k.Sandbox.GetState()) && c.opts.Links.Hello(id) != nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, reconcile.ObserveTimeout)
	found, _ := c.opts.Reconcile.Observe(limited, id)
	cancel()
	if finding, wrong := c.became(k, found); wrong {
		c.fix(finding, func() error { return c.observeAgain(ctx, id, found) })
	}
}

// became says what is wrong with a machine that was found in this way.
func (c *check) became(k kept, found machines.Observation) (Finding, bool) {
	id, state := k.Sandbox.GetId(), request.StateName(k.Sandbox.GetState())
	finding := Finding{
		Subject: k.Machine.Machine.GetId(), Provider: k.Machine.Machine.GetProvider(), Age: c.opts.Reconcile.FoundFor(k.Machine.Machine.GetId()),
	}
	switch {
	case found == machines.Unsure:
		finding.Kind, finding.Action = "machine_unsure", "none"
		finding.Message = fmt.Sprintf("its guest is silent, and the provider does not say how it is (sandbox %s)", id)
		finding.WhyNot = "nothing is concluded from that: ask again"
	case !k.Contradicts(found):
		return finding, false
	case found == machines.Missing:
		finding.Kind = "machine_gone"
		finding.Message = fmt.Sprintf("sandbox %s is %s, and the provider no longer has its machine", id, state)
		finding.Action = fmt.Sprintf("mark the sandbox LOST, and its %d open jobs as lost", k.openJobs)
	default:
		finding.Kind = "machine_stopped"
		finding.Message = fmt.Sprintf("sandbox %s is %s, and its machine's processes are gone", id, state)
		finding.Action = fmt.Sprintf("mark the sandbox STOPPED, so that `berth resume %s` goes on with its disk", id)
	}
	return finding, true
}

// observeAgain observes a machine a second time, after the interval between two observations, and records
// what was found twice.
func (c *check) observeAgain(ctx context.Context, machineID string, found machines.Observation) error {
	timer := time.NewTimer(reconcile.ObserveInterval)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	limited, cancel := context.WithTimeout(ctx, reconcile.ObserveTimeout) // the first one may have taken all of its own
	defer cancel()
	if again, confirmed := c.opts.Reconcile.Observe(limited, machineID); again != found || !confirmed {
		return errors.New("a second look found something else: check again")
	}
	if err := c.opts.Reconcile.Record(limited, machineID, found); err != nil {
		return err
	}
	m, err := c.recordOf(machineID)
	if err != nil {
		return err
	}
	if m.Contradicts(found) {
		return errors.New("an operation is at work on it now: check again")
	}
	return nil
}

// sockets looks for directories of machines' sockets whose machine is neither in the ledger nor at a
// provider.
func (c *check) sockets(context.Context) error {
	if len(c.unlisted) > 0 {
		return nil // whose they are is not known
	}
	parent := filepath.Dir(c.at.ListenDir("m_"))
	entries, err := os.ReadDir(parent)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the directory for sockets: %w", err)
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil || !strings.HasPrefix(entry.Name(), "m_") || c.machines[entry.Name()] {
			continue // gone meanwhile, not ours, or a machine's
		}
		recorded, err := c.at.IsRecorded(entry.Name())
		if err != nil {
			return err
		}
		age := c.opts.Now().Sub(info.ModTime())
		if recorded || age < reconcile.OrphanGrace {
			continue
		}
		path := filepath.Join(parent, entry.Name())
		c.fix(Finding{
			Kind: "sockets_orphaned", Subject: path, Age: age,
			Message: "it is a machine's directory for sockets, and there is no such machine", Action: "remove it",
		}, func() error { return os.RemoveAll(path) })
	}
	return nil
}
