// Package fsck compares the ledger with the providers, with what lies beside it, and with itself, and says in
// words what is not as it should be. Repairs are what the broker itself does when it comes to it: nothing is
// destroyed or given up on one observation.
package fsck

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/backup"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/operation"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	failingTimeout = time.Minute      // an operation whose step fails is a finding after this long
	workingTimeout = 10 * time.Minute // and one that is at work after this long: a boot is far quicker
	maxPage        = 500              // records read in one transaction, so that none is long
)

// Options configure a Service. All are required.
type Options struct {
	Store     *store.Store
	Links     *guestlink.Links
	Sandboxes *lifecycle.Service
	Reconcile *reconcile.Service
	Jobs      *jobs.Service
	Backup    *backup.Service
	Now       func() time.Time
	Retention time.Duration // receipts are kept this long
}

// Service checks and repairs.
type Service struct {
	opts Options
}

// New makes a service.
func New(opts Options) *Service { return &Service{opts} }

// Finding is one thing that is not as it should be, and what repairing does about it.
type Finding struct {
	Kind     string        // one of those that docs/operations.md lists
	Subject  string        // as FsckFinding.subject says
	Provider string        // empty where none is concerned
	Message  string        // what is wrong
	Action   string        // what repairing does
	WhyNot   string        // why repairing does not do it now, and what would; empty: it does
	Age      time.Duration // how long it has been so; zero is not known
	Repaired bool
}

// Report is what a check found and how much it looked at.
type Report struct {
	Findings                            []Finding
	Sandboxes, Machines, Jobs, Requests int
}

// check is one run of Check.
type check struct {
	opts   Options
	at     *machines.Service
	repair bool

	mu       sync.Mutex // of report's findings
	report   Report
	machines map[string]bool // machines that were looked at, those without a record too
	unlisted map[string]bool // providers that did not say what they have
}

// Check looks at everything, and with repair also repairs what it finds. It reads the ledger a page at a time,
// and waits for providers outside of any transaction. Errors: STORE_FULL where there is no space for the copy
// that it checks; what a damaged ledger says.
func (s *Service) Check(ctx context.Context, repair bool) (*Report, error) {
	c := &check{opts: s.opts, at: s.opts.Sandboxes.Machines(), repair: repair, machines: map[string]bool{}, unlisted: map[string]bool{}}
	if err := c.ledger(ctx); err != nil {
		return nil, err
	}
	for _, part := range []func(context.Context) error{
		c.atProviders, c.inLedger, c.operations, c.sandboxes, c.jobs, c.requests, c.sockets,
	} {
		err := part(ctx)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case fault.Is(err, fault.StoreFailed) && len(c.report.Findings) > 0:
			// What was found of the ledger says more than that it cannot be read on.
			c.found(Finding{
				Kind: "not_checked", Subject: s.opts.Store.Path(), Message: err.Error(), Action: "check the rest",
				WhyNot: "the ledger must be repaired first",
			})
			return c.sorted(), nil
		case err != nil:
			return nil, err
		}
	}
	return c.sorted(), nil
}

func (c *check) found(finding Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Findings = append(c.report.Findings, finding)
}

func (c *check) sorted() *Report {
	c.report.Machines = len(c.machines)
	slices.SortStableFunc(c.report.Findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Subject, b.Subject))
	})
	return &c.report
}

// fix carries a repair out, where one is asked for and possible, and notes the finding with what came
// of it.
func (c *check) fix(finding Finding, repair func() error) {
	if c.repair && finding.WhyNot == "" {
		if err := repair(); err != nil {
			finding.WhyNot = "it was tried: " + err.Error()
		} else {
			finding.Repaired = true
		}
	}
	c.found(finding)
}

// ledger checks a copy of the ledger's file, and has the indexes say what the records say.
func (c *check) ledger(ctx context.Context) error {
	var findings []store.Finding
	err := c.opts.Backup.Copy(ctx, func(path string) (err error) {
		findings, err = c.opts.Store.Check(ctx, path)
		return err
	})
	if err != nil {
		return err
	}
	indexes := sync.OnceValue(func() error {
		_, err := c.opts.Store.RepairIndexes(ctx)
		return err
	})
	for _, found := range findings {
		finding := Finding{Kind: found.Kind, Subject: found.Subject, Message: found.Message}
		switch found.Kind {
		case "damaged_page", "undecodable_record":
			finding.Action, finding.WhyNot = "none", "nobody can tell what stood there: restore a backup"
			c.found(finding)
		default:
			finding.Action = "make the indexes say what the records say; writers wait meanwhile"
			c.fix(finding, indexes)
		}
	}
	return nil
}

// operations looks for operations that do not come on.
func (c *check) operations(context.Context) error {
	return c.opts.Store.View(func(tx *store.Tx) error {
		open, err := tx.OpenOperations()
		if err != nil {
			return err
		}
		for _, operation := range open {
			sandbox, err := tx.Sandbox(operation.GetSandboxId())
			if err != nil {
				return err
			}
			if finding, stuck := c.stuck(operation, sandbox); stuck {
				c.found(finding)
			}
		}
		return nil
	})
}

func (c *check) stuck(op *recordv1.OperationRecord, sandbox *recordv1.SandboxRecord) (Finding, bool) {
	age := c.age(op.GetCreateTime())
	finding := Finding{Kind: "operation_stuck", Subject: op.GetId(), Action: "none", Age: age}
	finding.Message = fmt.Sprintf("%s of sandbox %s stands at step %q since %s, begun %d times",
		operation.Name(op), op.GetSandboxId(), op.GetStep(), age.Round(time.Second), op.GetAttempts()+1)
	if op.GetLastError() != "" {
		finding.Message += ": " + op.GetLastError()
	}
	remove := "destroy the sandbox: `berth rm " + op.GetSandboxId() + "`"
	switch {
	case sandbox.GetOperationId() != op.GetId():
		finding.Kind = "operation_orphaned"
		finding.Message = fmt.Sprintf("%s of sandbox %s is open, and the sandbox does not name it", operation.Name(op), op.GetSandboxId())
		finding.WhyNot = "nobody can tell what it was to do: " + remove
	case !c.opts.Sandboxes.KnowsStep(op):
		finding.WhyNot = "this build does not know the step: start one that does, or " + remove
	case op.GetLastError() != "" && age >= failingTimeout, age >= workingTimeout:
		finding.WhyNot = "the broker tries it again by itself: repair what it says, or " + remove
	default:
		return finding, false
	}
	return finding, true
}

// sandboxes looks for sandboxes that are on their way to a state, and nothing takes them there.
func (c *check) sandboxes(ctx context.Context) error {
	var stuck []*recordv1.SandboxRecord
	err := c.opts.Store.View(func(tx *store.Tx) error {
		live, err := tx.LiveSandboxes()
		c.report.Sandboxes = len(live)
		if err != nil {
			return err
		}
		for _, record := range live {
			operation, err := tx.Operation(record.GetOperationId())
			if err != nil {
				return err // whether there is one is not known
			}
			if operation == nil && sandbox.IsTransitional(record.GetState()) {
				stuck = append(stuck, record)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, record := range stuck {
		finding := Finding{
			Kind: "sandbox_stuck", Subject: record.GetId(), Provider: record.GetSpec().GetProvider(),
			Message: fmt.Sprintf("it is %s, and no operation is at work on it", request.StateName(record.GetState())),
			Action:  "destroy it, as it was to be",
		}
		if record.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING {
			finding.Action, finding.WhyNot = "none", "nobody can tell how far it came: `berth rm "+record.GetId()+"` destroys it"
		}
		c.fix(finding, func() error {
			limited, cancel := context.WithTimeout(ctx, reconcile.ObserveTimeout)
			defer cancel()
			_, err := c.opts.Sandboxes.Destroy(limited, request.Call{Namespace: record.GetNamespace()}, record.GetId())
			return err
		})
	}
	return nil
}

// age is how long ago a time was; zero for none, and for one that lies ahead.
func (c *check) age(at *timestamppb.Timestamp) time.Duration {
	if at == nil {
		return 0
	}
	return max(c.opts.Now().Sub(at.AsTime()), 0)
}
