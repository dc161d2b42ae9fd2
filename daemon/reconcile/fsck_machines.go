package reconcile

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

	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// atProviders looks at every machine that a provider has of this broker. Those of another broker are not
// among them.
func (c *check) atProviders(ctx context.Context) error {
	for _, named := range c.opts.Sandboxes.Providers() {
		limited, cancel := context.WithTimeout(ctx, lookTimeout)
		machines, err := survey(limited, named)
		cancel()
		if err != nil {
			c.unlisted[named.Name] = true
			c.found(Finding{
				Kind: "provider_unusable", Subject: named.Name, Provider: named.Name, Message: err.Error(),
				Action: "none", WhyNot: "nothing is concluded about its machines until it is well: see `berth providers`",
			})
			continue
		}
		for _, machine := range machines {
			c.machines[machine.ID] = true
			if err := c.atProvider(ctx, named, machine); err != nil {
				return err
			}
		}
	}
	return nil
}

// atProvider compares what a provider says of one machine with its record.
func (c *check) atProvider(ctx context.Context, named lifecycle.Named, machine providers.Machine) error {
	recorded, err := c.service.recorded(machine.ID)
	if err != nil {
		return err
	}
	if !recorded {
		c.orphaned(ctx, named, machine)
		return nil
	}
	_, sandbox, err := c.recordOf(machine.ID)
	if err != nil || sandbox == nil || sandbox.GetOperationId() != "" {
		return err
	}
	id := sandbox.GetId()
	switch {
	case machine.State == providers.MachineSuspended && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_RUNNING:
		c.found(Finding{
			Kind: "machine_frozen", Subject: machine.ID, Provider: named.Name, Action: "none",
			Message: fmt.Sprintf("sandbox %s is RUNNING, and its machine is frozen", id),
			WhyNot:  fmt.Sprintf("somebody froze it: `berth suspend %s` and `berth resume %s` let it go on", id, id),
		})
	case machine.State == providers.MachineRunning && rests(sandbox.GetState()):
		remedy := fmt.Sprintf("`berth resume %s` takes it up, `berth rm %s` destroys it", id, id)
		if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_LOST {
			remedy = fmt.Sprintf("its jobs were given up: `berth rm %s` destroys it", id)
		}
		c.found(Finding{
			Kind: "machine_awake", Subject: machine.ID, Provider: named.Name, Action: "none",
			Message: fmt.Sprintf("sandbox %s is %s, and its machine runs", id, lifecycle.StateName(sandbox.GetState())),
			WhyNot:  remedy,
		})
	}
	return nil
}

func (c *check) recordOf(machineID string) (machine *recordv1.MachineRecord, sandbox *recordv1.SandboxRecord, err error) {
	err = c.opts.Store.View(func(tx *store.Tx) error {
		if machine, err = tx.Machine(machineID); err != nil {
			return err
		}
		sandbox, err = tx.Sandbox(machine.GetSandboxId())
		return err
	})
	return machine, sandbox, err
}

// orphaned is a machine that no record names.
func (c *check) orphaned(ctx context.Context, named lifecycle.Named, machine providers.Machine) {
	since, ripe := c.service.orphan(machine.ID)
	known := c.opts.Now().Sub(since)
	finding := Finding{
		Kind: "orphan_machine", Subject: machine.ID, Provider: named.Name, Age: known,
		Message: fmt.Sprintf("no record names it; it is %s%s", machine.State, madeAgo(c.opts.Now(), machine.Created)),
		Action:  "destroy it with all that runs in it",
	}
	if !ripe {
		finding.WhyNot = fmt.Sprintf("it is known for %s, and destroyed when that is %s: by another repair in %s, or by the broker itself at most %s later",
			known.Round(time.Second), orphanGrace, (orphanGrace - known).Round(time.Second), sweepEvery)
	}
	c.mend(finding, func() error { return c.service.destroyOrphan(ctx, named, machine) })
}

func madeAgo(now, created time.Time) string {
	if created.IsZero() {
		return ""
	}
	return fmt.Sprintf(", made %s ago", max(now.Sub(created), 0).Round(time.Second))
}

// kept is a machine's record with its sandbox's.
type kept struct {
	machine *recordv1.MachineRecord
	sandbox *recordv1.SandboxRecord
	open    int // its jobs that are not done
}

// inLedger looks at every machine that a record names.
func (c *check) inLedger(ctx context.Context) error {
	var all []kept
	err := c.opts.Store.View(func(tx *store.Tx) error {
		machines, err := tx.LiveMachines()
		if err != nil {
			return err
		}
		for _, machine := range machines {
			sandbox, err := tx.Sandbox(machine.GetSandboxId())
			if err != nil {
				return err
			}
			open, err := tx.CountOpenJobs(machine.GetSandboxId())
			if err != nil {
				return err
			}
			all = append(all, kept{machine, sandbox, open})
		}
		return nil
	})
	if err != nil {
		return err
	}
	wellKnown := map[string]bool{}
	for _, named := range c.opts.Sandboxes.Providers() {
		wellKnown[named.Name] = true
	}
	var group errgroup.Group
	group.SetLimit(looksAtOnce)
	for _, k := range all {
		c.machines[k.machine.GetId()] = true
		if !wellKnown[k.machine.GetProvider()] {
			c.found(providerMissing(k.machine))
			continue
		}
		if c.unlisted[k.machine.GetProvider()] || c.misplaced(k) {
			continue
		}
		group.Go(func() error {
			c.lookInto(ctx, k)
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
	ended := k.sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED ||
		k.sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_FAILED
	if k.sandbox != nil && !ended {
		return k.sandbox.GetOperationId() != "" || k.machine.GetState() != recordv1.MachineState_MACHINE_STATE_BOOTED
	}
	c.found(Finding{
		Kind: "machine_astray", Subject: k.machine.GetId(), Provider: k.machine.GetProvider(), Action: "none",
		Message: fmt.Sprintf("its record says %s, and its sandbox %q has ended", strings.TrimPrefix(k.machine.GetState().String(), "MACHINE_STATE_"), k.machine.GetSandboxId()),
		WhyNot:  "the broker ends both at once, so this is a defect: report it with the broker's log",
	})
	return true
}

// lookInto asks the provider about a machine that is silent or rests, as the broker itself does.
func (c *check) lookInto(ctx context.Context, k kept) {
	id := k.machine.GetId()
	if !rests(k.sandbox.GetState()) && c.opts.Links.Hello(id) != nil {
		return
	}
	limited, cancel := context.WithTimeout(ctx, lookTimeout)
	verdict, _ := c.service.sight(limited, id)
	cancel()
	finding, wrong := c.became(k, verdict)
	if !wrong {
		return
	}
	c.mend(finding, func() error { return c.lookAgain(ctx, id, verdict) })
}

// became says what is wrong with a machine that was seen in this way.
func (c *check) became(k kept, verdict lifecycle.Verdict) (Finding, bool) {
	finding := Finding{Subject: k.machine.GetId(), Provider: k.machine.GetProvider(), Age: c.seenFor(k.machine.GetId())}
	state := k.sandbox.GetState()
	switch {
	case verdict == lifecycle.Gone && state != berthv1.SandboxState_SANDBOX_STATE_LOST:
		finding.Kind = "machine_gone"
		finding.Message = fmt.Sprintf("sandbox %s is %s, and the provider no longer has its machine", k.sandbox.GetId(), lifecycle.StateName(state))
		finding.Action = fmt.Sprintf("mark the sandbox LOST, and its %d open jobs as lost", k.open)
	case verdict == lifecycle.Stopped && state == berthv1.SandboxState_SANDBOX_STATE_RUNNING:
		finding.Kind = "machine_stopped"
		finding.Message = fmt.Sprintf("sandbox %s is RUNNING, and its machine's processes are gone", k.sandbox.GetId())
		finding.Action = fmt.Sprintf("mark the sandbox STOPPED, so that `berth resume %s` goes on with its disk", k.sandbox.GetId())
	case verdict == lifecycle.Unsure:
		finding.Kind, finding.Action = "machine_unsure", "none"
		finding.Message = fmt.Sprintf("its guest is silent, and the provider does not say how it is (sandbox %s)", k.sandbox.GetId())
		finding.WhyNot = "nothing is concluded from that: ask again"
	default:
		return finding, false
	}
	return finding, true
}

// seenFor is how long a machine has been found as it is.
func (c *check) seenFor(machineID string) time.Duration {
	c.service.mu.Lock()
	defer c.service.mu.Unlock()
	if sighting, known := c.service.seen[machineID]; known {
		return max(c.opts.Now().Sub(sighting.since), 0)
	}
	return 0
}

// lookAgain sees a machine a second time, if need be after the time between two looks, and writes down
// what was seen twice.
func (c *check) lookAgain(ctx context.Context, machineID string, verdict lifecycle.Verdict) error {
	timer := time.NewTimer(lookEvery)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	limited, cancel := context.WithTimeout(ctx, lookTimeout) // the first look may have taken all of its own
	defer cancel()
	again, twice := c.service.sight(limited, machineID)
	if again != verdict || !twice {
		return errors.New("a second look found something else: check again")
	}
	if err := c.service.writeDown(limited, machineID, verdict); err != nil {
		return err
	}
	machine, sandbox, err := c.recordOf(machineID)
	if err != nil {
		return err
	}
	if _, wrong := c.became(kept{machine: machine, sandbox: sandbox}, verdict); wrong {
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
	parent := filepath.Dir(c.opts.Sandboxes.ListenDir("m_"))
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
		recorded, err := c.service.recorded(entry.Name())
		if err != nil {
			return err
		}
		age := c.opts.Now().Sub(info.ModTime())
		if recorded || age < orphanGrace {
			continue
		}
		path := filepath.Join(parent, entry.Name())
		c.mend(Finding{
			Kind: "sockets_astray", Subject: path, Age: age,
			Message: "it is a machine's directory for sockets, and there is no such machine", Action: "remove it",
		}, func() error { return os.RemoveAll(path) })
	}
	return nil
}
