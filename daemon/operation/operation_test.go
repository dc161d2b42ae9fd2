package operation

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	undoable = recordv1.OperationKind_OPERATION_KIND_CREATE
	forever  = recordv1.OperationKind_OPERATION_KIND_DESTROY
	soon     = 30 * time.Second
)

// harness is an engine on a real ledger. Its operations have the steps first, second and undo, which a test
// makes fail; the resource is the sandbox "sb".
type harness struct {
	*Engine
	t      *testing.T
	ctx    context.Context
	ledger *store.Store
	hub    *events.Hub
	ahead  atomic.Int64 // of the clock, in nanoseconds

	mu      sync.Mutex
	done    []string // the steps that were begun
	act     map[string]func(context.Context) error
	verdict func(error) Verdict
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 2*soon)
	h := &harness{t: t, ctx: ctx, hub: events.New(), act: map[string]func(context.Context) error{}}
	var err error
	h.ledger, err = store.Open(filepath.Join(t.TempDir(), "ledger.db"), store.Options{Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	h.ledger.OnCommit(h.hub.Publish)
	must(t, h.ledger.Update(ctx, func(tx *store.Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb", Namespace: "n"}, "", "")
	}))
	h.start()
	t.Cleanup(func() {
		h.Close()
		must(t, h.ledger.Close())
		cancel()
	})
	return h
}

func (h *harness) start() {
	kind := Kind{
		First: "first", Undo: "undo",
		Steps: map[string]Step{"first": h.step("second"), "second": h.step(""), "undo": h.step("")},
		Examine: func(_ context.Context, _ *recordv1.OperationRecord, cause error) Verdict {
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.verdict != nil {
				return h.verdict(cause)
			}
			return Verdict{Cause: cause}
		},
		Failed: h.note,
	}
	never := kind
	never.Undo = ""
	h.Engine = New(Options{
		Store: h.ledger, Events: h.hub, Log: slog.New(slog.DiscardHandler),
		Now:     func() time.Time { return time.Now().Add(time.Duration(h.ahead.Load())) },
		Kinds:   map[recordv1.OperationKind]Kind{undoable: kind, forever: never},
		Blocked: h.note,
	})
}

// step acts as the test has it and goes on with the next step, or ends the operation.
func (h *harness) step(next string) Step {
	return func(ctx context.Context, op *recordv1.OperationRecord) error {
		h.mu.Lock()
		h.done = append(h.done, op.GetStep())
		act := h.act[op.GetStep()]
		h.mu.Unlock()
		if act != nil {
			if err := act(ctx); err != nil {
				return err
			}
		}
		if next != "" {
			return h.Advance(ctx, op, next, nil)
		}
		return h.Record(ctx, op, func(tx *store.Tx, op *recordv1.OperationRecord) error { return tx.DeleteOperation(op.GetId()) })
	}
}

func (h *harness) note(tx *store.Tx, _ *recordv1.OperationRecord, problem *berthv1.Problem) error {
	sandbox, err := tx.Sandbox("sb")
	sandbox.LastError = problem
	return errors.Join(err, tx.PutSandbox(sandbox, "", ""))
}

func (h *harness) on(step string, act func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.act[step] = act
}

func (h *harness) begun() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.done)
}

func (h *harness) add(kind recordv1.OperationKind, step string) string {
	h.t.Helper()
	op := &recordv1.OperationRecord{Kind: kind, Step: step}
	must(h.t, h.ledger.Update(h.ctx, func(tx *store.Tx) error { return h.Add(tx, op) }))
	return op.GetId()
}

func (h *harness) get(id string) *recordv1.OperationRecord {
	h.t.Helper()
	op, err := h.read(id)
	must(h.t, err)
	return op
}

// until waits until an operation is as wanted.
func (h *harness) until(id string, wanted func(*recordv1.OperationRecord) bool) {
	h.t.Helper()
	waiter := h.hub.Wait(events.Operation(id))
	defer waiter.Close()
	for !wanted(h.get(id)) {
		select {
		case <-waiter.Changed():
		case <-h.ctx.Done():
			h.t.Fatalf("the operation is still %v", h.get(id))
		}
	}
}

func (h *harness) problem() string {
	h.t.Helper()
	var reason string
	must(h.t, h.ledger.View(func(tx *store.Tx) error {
		sandbox, err := tx.Sandbox("sb")
		reason = sandbox.GetLastError().GetReason()
		return err
	}))
	return reason
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// times fails an act so often, and lets it succeed from then on.
func times(n int, err error) func(context.Context) error {
	var called atomic.Int32
	return func(context.Context) error {
		if int(called.Add(1)) <= n {
			return err
		}
		return nil
	}
}

func TestAnOperationGoesStepByStepToItsEnd(t *testing.T) {
	h := newHarness(t)
	h.on("first", times(2, providers.ErrAmbiguous))
	h.on("second", times(1, errors.New("who knows")))
	id := h.add(undoable, "")
	must(t, h.Wait(h.ctx, id)) // launches it, too
	if want := []string{"first", "first", "first", "second", "second"}; !slices.Equal(h.begun(), want) || h.get(id) != nil {
		t.Errorf("steps %v, want %v; left is %v", h.begun(), want, h.get(id))
	}
	if h.problem() != string(fault.Internal) {
		t.Errorf("the resource says %q, want the last failure", h.problem())
	}
}

func TestADefiniteFailureIsUndone(t *testing.T) {
	h := newHarness(t)
	h.on("second", times(9, providers.ErrRefused))
	h.on("undo", times(2, providers.ErrRefused)) // undoing is never given up
	must(t, h.Wait(h.ctx, h.add(undoable, "")))
	if want := []string{"first", "second", "undo", "undo", "undo"}; !slices.Equal(h.begun(), want) {
		t.Errorf("steps %v, want %v", h.begun(), want)
	}
}

func TestWhatHasNoUndoIsNeverGivenUp(t *testing.T) {
	h := newHarness(t)
	h.on("first", times(3, providers.ErrRefused))
	must(t, h.Wait(h.ctx, h.add(forever, "")))
	if want := []string{"first", "first", "first", "first", "second"}; !slices.Equal(h.begun(), want) {
		t.Errorf("steps %v, want %v", h.begun(), want)
	}
}

func TestAStepThatFailsForTooLongIsUndoneUnlessThatIsForbidden(t *testing.T) {
	for name, keep := range map[string]bool{"allowed": false, "forbidden": true} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			h.verdict = func(cause error) Verdict { return Verdict{Cause: cause, Keep: keep} }
			failing := atomic.Bool{}
			failing.Store(true)
			h.on("first", func(context.Context) error {
				if failing.Load() {
					return providers.ErrAmbiguous
				}
				return nil
			})
			id := h.add(undoable, "")
			h.Launch(id, "")
			h.until(id, func(op *recordv1.OperationRecord) bool { return op.GetAttempts() >= 2 })
			if op := h.get(id); op.GetUndoing() != nil {
				t.Errorf("it is being undone already: %v", op)
			}
			h.ahead.Store(int64(giveUp + time.Minute))
			if keep {
				attempts := h.get(id).GetAttempts()
				h.until(id, func(op *recordv1.OperationRecord) bool { return op.GetAttempts() > attempts+1 })
				failing.Store(false)
			}
			must(t, h.Wait(h.ctx, id))
			if undone := slices.Contains(h.begun(), "undo"); undone == keep {
				t.Errorf("steps %v", h.begun())
			}
		})
	}
}

func TestAVerdictBeginsAnOperationAgain(t *testing.T) {
	h := newHarness(t)
	h.verdict = func(cause error) Verdict { return Verdict{Cause: cause, Restart: true} }
	h.on("second", times(2, providers.ErrRefused))
	must(t, h.Wait(h.ctx, h.add(undoable, "")))
	if want := []string{"first", "second", "first", "second", "first", "second"}; !slices.Equal(h.begun(), want) {
		t.Errorf("steps %v, want %v", h.begun(), want)
	}
}

func TestOpenOperationsGoOnAfterAStart(t *testing.T) {
	h := newHarness(t)
	h.on("second", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	ids := []string{h.add(undoable, ""), h.add(forever, "")}
	for _, id := range ids {
		h.Launch(id, "")
		h.until(id, func(op *recordv1.OperationRecord) bool { return op.GetStep() == "second" })
	}
	waited := make(chan error, 1)
	go func() { waited <- h.Wait(h.ctx, ids[0]) }()
	h.Close()
	if err := <-waited; !fault.Is(err, fault.Stopping) {
		t.Errorf("who waits is told %v", err)
	}
	h.on("second", nil)
	h.start()
	must(t, h.Resume())
	for _, id := range ids {
		must(t, h.Wait(h.ctx, id))
	}
	firsts := slices.DeleteFunc(h.begun(), func(step string) bool { return step != "first" })
	if len(firsts) != len(ids) {
		t.Errorf("steps %v: one was begun again that was done", h.begun())
	}
}

func TestOneThatIsSupersededRecordsNothingMore(t *testing.T) {
	h := newHarness(t)
	entered := make(chan struct{})
	h.on("first", func(ctx context.Context) error {
		close(entered)
		<-ctx.Done()
		return providers.ErrRefused // would be undone
	})
	old := h.add(undoable, "")
	h.Launch(old, "")
	<-entered
	next := &recordv1.OperationRecord{Kind: forever, Step: "second"}
	must(t, h.ledger.Update(h.ctx, func(tx *store.Tx) error { return errors.Join(tx.DeleteOperation(old), h.Add(tx, next)) }))
	h.Launch(next.GetId(), old)
	must(t, h.Wait(h.ctx, next.GetId()))
	must(t, h.Wait(h.ctx, old))
	if want := []string{"first", "second"}; !slices.Equal(h.begun(), want) {
		t.Errorf("steps %v, want %v", h.begun(), want)
	}
	if op := h.get(old); op != nil {
		t.Errorf("the superseded one is back: %v", op)
	}
}

func TestAnUnknownStepBlocksItsOperation(t *testing.T) {
	for name, kind := range map[string]recordv1.OperationKind{"of a known kind": undoable, "of an unknown kind": 99} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			id := h.add(kind, "teleport")
			must(t, h.Resume())
			if err := h.Wait(h.ctx, id); !fault.Is(err, fault.Internal) {
				t.Errorf("who waits is told %v", err)
			}
			h.until(id, func(op *recordv1.OperationRecord) bool { return op.GetLastError() != "" })
			if h.problem() != string(fault.Internal) || h.get(id).GetStep() != "teleport" {
				t.Errorf("the resource says %q, the operation is %v", h.problem(), h.get(id))
			}
		})
	}
}

func TestACallerDoesNotSitThroughAFullLedger(t *testing.T) {
	h := newHarness(t)
	full := atomic.Bool{}
	full.Store(true)
	h.on("first", func(context.Context) error {
		if full.Load() {
			return fault.New(fault.StoreFull, "no space left")
		}
		return nil
	})
	id := h.add(undoable, "")
	if err := h.Wait(h.ctx, id); !fault.Is(err, fault.StoreFull) {
		t.Errorf("who waits is told %v", err)
	}
	full.Store(false)
	must(t, h.Wait(h.ctx, id)) // it goes on by itself
}

func TestAnOperationHasOneGoroutineHoweverOftenItIsLaunched(t *testing.T) {
	h := newHarness(t)
	entered := make(chan struct{}, 100)
	release := make(chan struct{})
	h.on("first", func(context.Context) error { entered <- struct{}{}; <-release; return nil })
	id := h.add(undoable, "")
	var group sync.WaitGroup
	for range 50 {
		group.Go(func() { h.Launch(id, "") })
	}
	group.Wait()
	<-entered
	for range 50 {
		group.Go(func() { must(t, h.Wait(h.ctx, id)) })
	}
	close(release)
	group.Wait()
	if want := []string{"first", "second"}; !slices.Equal(h.begun(), want) {
		t.Errorf("steps %v, want %v", h.begun(), want)
	}
}
