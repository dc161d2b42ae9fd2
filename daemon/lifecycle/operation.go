package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Tuning.
const (
	retryFirst = 50 * time.Millisecond // after an ambiguous answer the step probes again this soon
	retryMost  = 15 * time.Second      // and at least this often: a provider that came back is used soon
	giveUp     = 10 * time.Minute      // a step of a create or resume that failed first this long ago is undone
	// maxReboots of a machine that stops while it is set up: a crash may be bad luck, three are not.
	maxReboots = 2
	// maxErrorText bounds what a provider's words may add to a record.
	maxErrorText = 2048
)

// errOvertaken ends the goroutine of an operation that another one replaced in the ledger.
var errOvertaken = errors.New("the operation was overtaken by another")

// failure is a step that fails, and since when.
type failure struct {
	step  string
	since time.Time
}

// run is an operation's goroutine.
type run struct {
	cancel context.CancelFunc
	done   chan struct{}
	// unwritten takes the error of a step that the ledger has no room for, if somebody waits: it is tried
	// again for as long as that lasts, which a caller should not have to sit through.
	unwritten chan error
}

// ResumeOperations launches every operation that the ledger has open; once, at start.
func (s *Service) ResumeOperations() error {
	var open []*recordv1.OperationRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		open, err = tx.OpenOperations()
		return err
	})
	for _, operation := range open {
		s.launch(operation.GetId(), "")
	}
	return err
}

// launch begins to carry an operation out; after the one that it overtakes, if any, has let go.
func (s *Service) launch(id, overtakes string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, running := s.running[id]; running || s.ctx.Err() != nil {
		return
	}
	overtaken := s.running[overtakes]
	ctx, cancel := context.WithCancel(s.ctx)
	r := &run{cancel: cancel, done: make(chan struct{}), unwritten: make(chan error)}
	s.running[id] = r
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		defer cancel()
		if overtaken != nil {
			overtaken.cancel()
			<-overtaken.done
		}
		s.carryOut(ctx, id, r)
		s.mu.Lock()
		delete(s.failing, id)
		delete(s.running, id)
		s.mu.Unlock()
		close(r.done)
	}()
}

// join waits until an operation's goroutine has ended.
func (s *Service) join(ctx context.Context, id string) error {
	s.mu.Lock()
	r := s.running[id]
	s.mu.Unlock()
	if r == nil {
		return s.halted(ctx, id)
	}
	select {
	case <-r.done:
		return nil
	case err := <-r.unwritten:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-s.drained:
		return stopping()
	}
}

// halted tells an operation that has just ended from one that stands still.
func (s *Service) halted(ctx context.Context, id string) error {
	var operation *recordv1.OperationRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		operation, err = tx.Operation(id)
		return err
	})
	switch {
	case err != nil || operation == nil:
		return err
	case s.ctx.Err() != nil:
		return stopping()
	case ctx.Err() != nil:
		return ctx.Err()
	case !KnowsStep(operation):
		return fault.New(fault.Internal, "operation %s halted: %s", id, operation.GetLastError())
	}
	s.launch(id, "") // between its record and its launch
	return nil
}

// KnowsStep reports whether this build can carry an operation on; one that it can't stands still.
func KnowsStep(operation *recordv1.OperationRecord) bool {
	return steps[operation.GetKind()][operation.GetStep()] != nil
}

func stopping() error {
	return fault.New(fault.Stopping, "the broker is being stopped; the operation goes on when it is started again").Retry(time.Second)
}

// carryOut takes an operation step by step to its end.
func (s *Service) carryOut(ctx context.Context, id string, r *run) {
	for ctx.Err() == nil {
		operation, err := s.due(ctx, id)
		if err != nil || operation == nil {
			if err != nil && ctx.Err() == nil {
				s.opts.Log.Error("cannot read operation", "operation", id, "error", err)
			}
			return
		}
		log := s.opts.Log.With("operation", id, "sandbox", operation.GetSandboxId(), "machine", operation.GetMachineId(),
			"step", describe(operation.GetKind(), operation.GetStep()))
		step := steps[operation.GetKind()][operation.GetStep()]
		if step == nil {
			s.halt(ctx, operation)
			log.Error("halted: this build does not know the step; start a build that does")
			return
		}
		switch err := step(s, ctx, operation); {
		case err == nil:
			log.Debug("step done")
		case errors.Is(err, errOvertaken) || ctx.Err() != nil:
			return
		default:
			log.Warn("step failed", "attempt", operation.GetAttempts()+1, "error", err)
			if err := s.failed(ctx, operation, err); err != nil && ctx.Err() == nil {
				log.Error("cannot record a failed step", "error", err)
				r.tell(err)
				pause(ctx, retryMost)
			}
			r.tell(err)
		}
	}
}

// tell tells everybody who waits for the operation now that the ledger has no room for its next step, if
// that is what the error says.
func (r *run) tell(cause error) {
	for fault.Is(cause, fault.StoreFull) {
		select {
		case r.unwritten <- cause:
		default:
			return
		}
	}
}

// due returns the operation when its next attempt is due, nil when it has ended.
func (s *Service) due(ctx context.Context, id string) (*recordv1.OperationRecord, error) {
	var operation *recordv1.OperationRecord
	err := s.opts.Store.View(func(tx *store.Tx) (err error) {
		operation, err = tx.Operation(id)
		return err
	})
	if err != nil || operation == nil {
		return nil, err
	}
	// A clock that was stepped back must not delay the attempt for hours.
	wait := min(timeOf(operation.GetNotBefore()).Sub(s.opts.Now()), retryMost)
	if wait > 0 && !pause(ctx, wait) {
		return nil, ctx.Err()
	}
	return operation, nil
}

// failed writes down why a step did not do, and decides whether it is tried again or undone.
func (s *Service) failed(ctx context.Context, operation *recordv1.OperationRecord, cause error) error {
	now := s.opts.Now()
	stopped, gone, note := s.stoppedMeanwhile(ctx, operation)
	reboot := stopped && operation.GetReboots() < maxReboots
	if stopped && !reboot {
		cause = fault.New(fault.MachineGone, "machine %s stopped again and again while it was set up: %s", operation.GetMachineId(), note)
	}
	if gone {
		cause = fault.New(fault.MachineGone, "machine %s vanished while it was set up: %w", operation.GetMachineId(), cause)
	}
	undo := undoable(operation) && !reboot && (definite(cause) || now.Sub(s.failingSince(operation, now)) > giveUp)
	if keepsMachine(operation) && (stopped || !fault.Is(cause, fault.MachineGone)) {
		undo = false
	}
	return s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.Attempts++
		operation.LastError = cutText(cause.Error())
		operation.NotBefore = timestamppb.New(now.Add(backoff(operation.GetAttempts())))
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.PutOperation(operation))
		}
		sandbox.LastError = problem(cause, now)
		sandbox.LastError.Message = cutText(sandbox.GetLastError().GetMessage())
		if reboot {
			operation.Step, operation.Reboots, operation.NotBefore = firstStep[operation.GetKind()], operation.GetReboots()+1, nil
		}
		if undo {
			operation.Undoing, operation.NotBefore, operation.Attempts = sandbox.GetLastError(), nil, 0
			operation.Step = undoStep[operation.GetKind()]
			if operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE {
				if err := doom(tx, operation.GetMachineId()); err != nil {
					return err
				}
			}
		}
		return errors.Join(tx.PutSandbox(sandbox, "", ""), tx.PutOperation(operation))
	})
}

// failingSince returns when an operation's step failed first, as far as this process has seen: neither a
// long step that did not fail nor the broker's own absence counts against it.
func (s *Service) failingSince(operation *recordv1.OperationRecord, now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, known := s.failing[operation.GetId()]
	if !known || first.step != operation.GetStep() {
		first = failure{operation.GetStep(), now}
		s.failing[operation.GetId()] = first
	}
	return first.since
}

// stoppedMeanwhile reports whether the machine that an operation is setting up has stopped, so that
// it has to be booted again, or is gone, and what its provider knows of it.
func (s *Service) stoppedMeanwhile(ctx context.Context, operation *recordv1.OperationRecord) (stopped, gone bool, note string) {
	if !undoable(operation) || operation.GetStep() == firstStep[operation.GetKind()] ||
		operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_SUSPEND {
		return false, false, ""
	}
	machine, err := s.machineRecord(operation.GetMachineId())
	if err != nil {
		return false, false, ""
	}
	found, err := s.inspect(ctx, machine)
	return err == nil && found.State == providers.MachineStopped, isGone(found, err), found.Note
}

// undoable reports whether a step that fails for good can be given up: a destroy never is.
func undoable(operation *recordv1.OperationRecord) bool {
	return operation.GetUndoing() == nil && undoStep[operation.GetKind()] != ""
}

// keepsMachine reports whether an operation's undoing would destroy a machine that may be in use: a
// create that was open in a backup may have come to its end after that. It stands until a person says
// what is to become of it; `berth rm` destroys it.
func keepsMachine(operation *recordv1.OperationRecord) bool {
	return operation.GetRestored() && operation.GetKind() == recordv1.OperationKind_OPERATION_KIND_CREATE
}

// definite reports whether an error says for sure that the step did not happen and won't: anything
// else, a deadline or a lost connection for example, is probed again.
func definite(err error) bool {
	var unavailable *providers.UnavailableError
	if errors.As(err, &unavailable) || errors.Is(err, providers.ErrAmbiguous) {
		return false
	}
	if errors.Is(err, providers.ErrRefused) || errors.Is(err, providers.ErrCapacity) {
		return true
	}
	switch fault.KindOf(err) {
	case fault.KindInvalid, fault.KindNotFound, fault.KindPrecondition, fault.KindExhausted, fault.KindPermissionDenied:
		return !fault.Is(err, fault.StoreFull)
	default:
		return false
	}
}

// reasonOf names an error's reason, a provider's own kinds included.
func reasonOf(err error) fault.Reason {
	var known *fault.Error
	var unavailable *providers.UnavailableError
	switch {
	case errors.As(err, &known):
		return known.Reason
	case errors.Is(err, providers.ErrNoImage):
		return fault.ImageNotFound
	case errors.Is(err, providers.ErrNoTool):
		return fault.ToolMissing
	case errors.Is(err, providers.ErrCapacity):
		return fault.QuotaExceeded
	case errors.Is(err, providers.ErrRefused):
		return fault.ProviderRefused
	case errors.As(err, &unavailable), errors.Is(err, providers.ErrAmbiguous), errors.Is(err, context.DeadlineExceeded):
		return fault.ProviderUnavailable
	default:
		return fault.Internal
	}
}

// halt marks the sandbox of an operation that this build cannot carry on.
func (s *Service) halt(ctx context.Context, operation *recordv1.OperationRecord) {
	cause := fault.New(fault.Internal, "operation %s stands at step %q, which this build does not know: start a newer build, or destroy the sandbox",
		operation.GetId(), operation.GetStep())
	err := s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.LastError = cause.Error()
		sandbox, err := tx.Sandbox(operation.GetSandboxId())
		if err != nil || sandbox == nil {
			return errors.Join(err, tx.PutOperation(operation))
		}
		sandbox.LastError = problem(cause, s.opts.Now())
		return errors.Join(tx.PutSandbox(sandbox, "sandbox.halted", cause.Error()), tx.PutOperation(operation))
	})
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Error("cannot record a halted operation", "operation", operation.GetId(), "error", err)
	}
}

// record changes the ledger as part of an operation, unless that was overtaken meanwhile. It gives
// fn a fresh copy of the operation, which fn puts or deletes.
func (s *Service) record(ctx context.Context, operation *recordv1.OperationRecord, fn func(*store.Tx, *recordv1.OperationRecord) error) error {
	return s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		current, err := tx.Operation(operation.GetId())
		if err != nil {
			return err
		}
		if current == nil || current.GetStep() != operation.GetStep() {
			return errOvertaken
		}
		return fn(tx, current)
	})
}

// advance records a step as done: the next one, and what fn changes beside it.
func (s *Service) advance(ctx context.Context, operation *recordv1.OperationRecord, next string, fn func(*store.Tx) error) error {
	return s.record(ctx, operation, func(tx *store.Tx, operation *recordv1.OperationRecord) error {
		operation.Step, operation.Attempts, operation.LastError, operation.NotBefore = next, 0, "", nil
		if err := tx.PutOperation(operation); err != nil || fn == nil {
			return err
		}
		return fn(tx)
	})
}

func backoff(attempts uint32) time.Duration {
	wait := retryFirst
	for range min(attempts, 16) {
		wait = min(2*wait, retryMost)
	}
	return wait
}

// pause waits and reports whether the context still holds.
func pause(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// cutText bounds a text, and makes it one that a record can hold: with any other, the failed step
// could not be recorded.
func cutText(text string) string {
	if len(text) > maxErrorText {
		text = fmt.Sprintf("%s… (%d bytes more)", strings.ToValidUTF8(text[:maxErrorText], ""), len(text)-maxErrorText)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
