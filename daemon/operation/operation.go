// Package operation is the engine of durable operations. An operation is written down with its first step
// before anything is done, in the transaction that changes its resource's state. Each step probes, acts, and
// records its result together with the next step, so that an operation goes on after a crash at any
// instruction. An ambiguous answer is taken for neither success nor failure: the step stays pending and is
// begun again with backoff. A definite failure undoes what was done. The engine never knows what a step does
// or what it works on: a Kind says that.
package operation

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	firstBackoff = 50 * time.Millisecond // after an ambiguous answer the step probes again this soon
	maxBackoff   = 15 * time.Second      // and at least this often: a provider that came back is used soon
	giveUp       = 10 * time.Minute      // a step that failed first this long ago is undone
)

// ErrSuperseded ends an operation that another one has replaced in the ledger: nothing more is to be done or
// recorded for it.
var ErrSuperseded = errors.New("the operation was superseded by another")

// Step does one step of an operation: it probes what an earlier attempt did, acts, and records the result
// together with the next step (Advance, Record). It may be begun again after a crash at any instruction.
type Step func(ctx context.Context, operation *recordv1.OperationRecord) error

// Kind says how the operations of one kind go.
type Kind struct {
	// Steps by name. The names are in ledgers: a step is never renamed, and one that goes away stays as long
	// as a ledger can hold it.
	Steps map[string]Step
	// First names the step that an operation begins with.
	First string
	// Undo names the step with which one goes on that is given up; empty: it is never given up.
	Undo string
	// Examine says what a failure of a step means for an operation that can still be given up. It is called
	// before the failure is recorded and outside of any transaction, so it may look at the resource. Nil: the
	// failure means what its error says.
	Examine func(ctx context.Context, operation *recordv1.OperationRecord, cause error) Verdict
	// Failed notes a failure in the resource, in the transaction that records it. The operation is as it will
	// be stored: its Undoing is set once it is given up.
	Failed func(tx *store.Tx, operation *recordv1.OperationRecord, problem *berthv1.Problem) error
}

// Verdict is what a failure of a step means.
type Verdict struct {
	Cause   error // why the step failed
	Restart bool  // the operation begins again with its first step, and counts that in Reboots
	Keep    bool  // what was done must not be undone, however long the step fails
}

// Options configure an Engine. All are required.
type Options struct {
	Store  *store.Store
	Events *events.Hub // fed with the store's commits
	Log    *slog.Logger
	Now    func() time.Time
	Kinds  map[recordv1.OperationKind]Kind
	// Blocked notes in the resource, in the transaction that records it, that this build does not know the
	// step of an operation, which may be of a kind that it does not know either.
	Blocked func(tx *store.Tx, operation *recordv1.OperationRecord, problem *berthv1.Problem) error
}

// Engine carries operations out, each in a goroutine of its own.
type Engine struct {
	opts Options

	ctx     context.Context //nolint:containedctx // ends the operations' goroutines, which outlive every call
	cancel  context.CancelFunc
	drain   context.CancelFunc
	drained <-chan struct{}
	wg      sync.WaitGroup

	mu      sync.Mutex
	running map[string]*run // by operation id
}

// run is an operation's goroutine.
type run struct {
	cancel  context.CancelFunc
	done    chan struct{}
	failing failure // the goroutine's own
	// unwritten is the error of the last step that the ledger had no space for, and unwrittenCount how many
	// there were; guarded by the engine's mutex. Such a step is tried again for as long as that lasts, which
	// a caller should not have to sit through.
	unwritten      error
	unwrittenCount int
}

// failure is a step that fails, and since when.
type failure struct {
	step  string
	since time.Time
}

// New makes an engine; nothing runs until Resume or Launch.
func New(opts Options) *Engine {
	ctx, cancel := context.WithCancel(context.Background())
	draining, drain := context.WithCancel(ctx)
	return &Engine{opts: opts, ctx: ctx, cancel: cancel, drain: drain, drained: draining.Done(), running: map[string]*run{}}
}

// Drain ends the calls of Wait; operations go on.
func (e *Engine) Drain() { e.drain() }

// Close interrupts the operations in progress, which go on at the next start, and waits for them.
func (e *Engine) Close() {
	e.cancel()
	e.wg.Wait()
}

// Add writes an operation down, under a new id and with the first step of its kind unless it names another.
// Launch it after the commit.
func (e *Engine) Add(tx *store.Tx, operation *recordv1.OperationRecord) error {
	operation.Id, operation.CreateTime = request.NewID("op"), timestamppb.New(e.opts.Now())
	if operation.GetStep() == "" {
		operation.Step = e.opts.Kinds[operation.GetKind()].First
	}
	return tx.PutOperation(operation)
}

// Resume launches every operation that the ledger has open; once, at start.
func (e *Engine) Resume() error {
	var open []*recordv1.OperationRecord
	err := e.opts.Store.View(func(tx *store.Tx) (err error) {
		open, err = tx.OpenOperations()
		return err
	})
	for _, operation := range open {
		e.Launch(operation.GetId(), "")
	}
	return err
}

// Launch begins to carry an operation out, unless it is being carried out already; after the one that it
// supersedes, if any, has let go.
func (e *Engine) Launch(id, superseded string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, running := e.running[id]; running || e.ctx.Err() != nil {
		return
	}
	before := e.running[superseded]
	ctx, cancel := context.WithCancel(e.ctx)
	r := &run{cancel: cancel, done: make(chan struct{})}
	e.running[id] = r
	e.wg.Go(func() {
		defer cancel()
		if before != nil {
			before.cancel()
			<-before.done
		}
		e.carryOut(ctx, id, r)
		e.mu.Lock()
		delete(e.running, id)
		e.mu.Unlock()
		close(r.done)
	})
}

// Wait waits until an operation has ended, in whatever way. Errors: STORE_FULL when the ledger has no space
// for its next step, so that nobody knows how long it takes; INTERNAL when it is blocked; STOPPING; the
// context's.
func (e *Engine) Wait(ctx context.Context, id string) error {
	waiter := e.opts.Events.Wait(events.Operation(id))
	defer waiter.Close()
	before, _ := e.unwritten(id)
	for {
		operation, err := e.read(id)
		switch {
		case err != nil || operation == nil:
			return err
		case e.ctx.Err() != nil:
			return stopping()
		case !e.KnowsStep(operation):
			return blocked(operation)
		}
		if now, err := e.unwritten(id); now > before {
			return err
		}
		e.Launch(id, "") // it may be between its record and its launch
		select {
		case <-waiter.Changed():
		case <-ctx.Done():
			return ctx.Err()
		case <-e.drained:
			return stopping()
		}
	}
}

// unwritten returns how many steps of the operation the ledger had no space for, and the last one's error.
func (e *Engine) unwritten(id string) (count int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r := e.running[id]; r != nil {
		return r.unwrittenCount, r.unwritten
	}
	return 0, nil
}

// KnowsStep reports whether this build can carry an operation on; one that it can't is blocked.
func (e *Engine) KnowsStep(operation *recordv1.OperationRecord) bool { return e.step(operation) != nil }

func (e *Engine) step(operation *recordv1.OperationRecord) Step {
	return e.opts.Kinds[operation.GetKind()].Steps[operation.GetStep()]
}

func (e *Engine) read(id string) (*recordv1.OperationRecord, error) {
	var operation *recordv1.OperationRecord
	err := e.opts.Store.View(func(tx *store.Tx) (err error) {
		operation, err = tx.Operation(id)
		return err
	})
	return operation, err
}

func stopping() error {
	return fault.New(fault.Stopping, "the broker is being stopped; the operation goes on when it is started again").Retry(time.Second)
}

// carryOut takes an operation step by step to its end.
func (e *Engine) carryOut(ctx context.Context, id string, r *run) {
	for ctx.Err() == nil {
		operation, err := e.due(ctx, id)
		switch {
		case ctx.Err() != nil || err == nil && operation == nil:
			return
		case err != nil:
			e.opts.Log.Error("cannot read operation", "operation", id, "error", err)
			pause(ctx, maxBackoff)
			continue
		}
		log := e.opts.Log.With("operation", id, "sandbox", operation.GetSandboxId(), "machine", operation.GetMachineId(),
			"step", Name(operation)+"/"+operation.GetStep())
		step := e.step(operation)
		if step == nil {
			log.Error("blocked: this build does not know the step; start a build that does")
			if err := e.block(ctx, operation); err != nil && ctx.Err() == nil {
				log.Error("cannot record a blocked operation", "error", err)
			}
			return
		}
		switch err := step(ctx, operation); {
		case err == nil:
			log.Debug("step done")
		case errors.Is(err, ErrSuperseded) || ctx.Err() != nil:
			return
		default:
			log.Warn("step failed", "attempt", operation.GetAttempts()+1, "error", err)
			if err := e.failed(ctx, operation, r, err); err != nil && ctx.Err() == nil {
				log.Error("cannot record a failed step", "error", err)
				e.tell(id, r, err)
				pause(ctx, maxBackoff)
			}
			e.tell(id, r, err)
		}
	}
}

// tell tells who waits for the operation that the ledger has no space for its next step, if that is what
// the error says.
func (e *Engine) tell(id string, r *run, cause error) {
	if !fault.Is(cause, fault.StoreFull) {
		return
	}
	e.mu.Lock()
	r.unwritten = cause
	r.unwrittenCount++
	e.mu.Unlock()
	e.opts.Events.Notify(events.Operation(id)) // a commit that failed notifies nobody
}

// due returns the operation when its next attempt is due, nil when it has ended.
func (e *Engine) due(ctx context.Context, id string) (*recordv1.OperationRecord, error) {
	operation, err := e.read(id)
	if err != nil || operation.GetNotBefore() == nil {
		return operation, err
	}
	// A clock that was stepped back must not delay the attempt for hours.
	pause(ctx, min(operation.GetNotBefore().AsTime().Sub(e.opts.Now()), maxBackoff))
	return operation, nil
}

// failed records why a step did not do, and decides whether it is tried again or undone.
func (e *Engine) failed(ctx context.Context, operation *recordv1.OperationRecord, r *run, cause error) error {
	kind, now := e.opts.Kinds[operation.GetKind()], e.opts.Now()
	verdict := Verdict{Cause: cause}
	if kind.Examine != nil && e.undoable(operation) {
		verdict = kind.Examine(ctx, operation, cause)
	}
	undo := e.undoable(operation) && !verdict.Restart && !verdict.Keep &&
		(definite(verdict.Cause) || now.Sub(r.failingSince(operation, now)) > giveUp)
	problem := Problem(verdict.Cause, now)
	return e.Record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.Attempts++
		operation.LastError = problem.GetMessage()
		operation.NotBefore = timestamppb.New(now.Add(backoff(operation.GetAttempts())))
		if verdict.Restart {
			operation.Step, operation.Reboots, operation.NotBefore = kind.First, operation.GetReboots()+1, nil
		}
		if undo {
			operation.Step, operation.Undoing, operation.Attempts, operation.NotBefore = kind.Undo, problem, 0, nil
		}
		return errors.Join(kind.Failed(tx, operation, problem), tx.PutOperation(operation))
	})
}

// undoable reports whether a step that fails for good can be given up.
func (e *Engine) undoable(operation *recordv1.OperationRecord) bool {
	//mutation:destroy-is-never-undone return operation.GetUndoing() == nil
	return operation.GetUndoing() == nil && e.opts.Kinds[operation.GetKind()].Undo != ""
}

// failingSince returns when the operation's step failed first, as far as this process has seen: neither a
// long step that did not fail nor the broker's own absence counts against it.
func (r *run) failingSince(operation *recordv1.OperationRecord, now time.Time) time.Time {
	if r.failing.since.IsZero() || r.failing.step != operation.GetStep() {
		r.failing = failure{operation.GetStep(), now}
	}
	return r.failing.since
}

func blocked(operation *recordv1.OperationRecord) error {
	return fault.New(fault.Internal, "operation %s is blocked at step %q, which this build does not know: start a newer build, or destroy the sandbox",
		operation.GetId(), operation.GetStep())
}

// block records that this build cannot carry an operation on.
func (e *Engine) block(ctx context.Context, operation *recordv1.OperationRecord) error {
	cause := blocked(operation)
	return e.Record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.LastError = cause.Error()
		return errors.Join(e.opts.Blocked(tx, operation, Problem(cause, e.opts.Now())), tx.PutOperation(operation))
	})
}

// Record changes the ledger as part of an operation, unless that was superseded meanwhile. It gives fn a
// fresh copy of the operation, which fn puts or deletes.
func (e *Engine) Record(ctx context.Context, operation *recordv1.OperationRecord, fn func(*store.Tx, *recordv1.OperationRecord) error) error {
	update := e.opts.Store.Update
	if e.opts.Kinds[operation.GetKind()].Undo == "" {
		update = e.opts.Store.UpdateUrgent // what is never given up ends a resource
	}
	return update(ctx, func(tx *store.Tx) error {
		current, err := tx.Operation(operation.GetId())
		if err != nil {
			return err
		}
		if current == nil || current.GetStep() != operation.GetStep() {
			return ErrSuperseded
		}
		return fn(tx, current)
	})
}

// Advance records a step as done: the next one, and what fn changes beside it.
func (e *Engine) Advance(ctx context.Context, operation *recordv1.OperationRecord, next string, fn func(*store.Tx) error) error {
	return e.Record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.Step, operation.Attempts, operation.LastError, operation.NotBefore = next, 0, "", nil
		if err := tx.PutOperation(operation); err != nil || fn == nil {
			return err
		}
		return fn(tx)
	})
}

// Name says for people what an operation does, such as "create"; a number for one that only a newer build
// knows.
func Name(operation *recordv1.OperationRecord) string {
	return strings.ToLower(strings.TrimPrefix(operation.GetKind().String(), "OPERATION_KIND_"))
}

func backoff(attempts uint32) time.Duration {
	wait := firstBackoff
	for range min(attempts, 16) {
		wait = min(2*wait, maxBackoff)
	}
	return wait
}

// pause waits, or until the context ends.
func pause(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
