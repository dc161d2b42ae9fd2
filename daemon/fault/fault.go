// Package fault holds the broker's error kinds and reasons. Packages below the API say what went wrong
// in these words; daemon/api alone turns them into gRPC statuses. It imports the standard library
// only, and nothing anywhere matches on an error's text.
package fault

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"time"
)

// Kind is the coarse class of an error; each maps to one gRPC code.
type Kind int

// The kinds. KindInternal is what an error without a kind counts as.
const (
	KindInternal Kind = iota
	KindInvalid
	KindNotFound
	KindAlreadyExists
	KindPrecondition
	KindAborted
	KindUnavailable
	KindExhausted
	KindOutOfRange
	KindUnauthenticated
	KindPermissionDenied
	KindUnimplemented
	KindCanceled
	KindDeadline
)

// Reason is a value of berth.v1.Reason without its prefix, as it appears in ErrorInfo.reason.
type Reason string

// The reasons, one for each value of berth.v1.Reason; a test holds the two lists together.
const (
	InvalidField        Reason = "INVALID_FIELD"
	SandboxNotFound     Reason = "SANDBOX_NOT_FOUND"
	JobNotFound         Reason = "JOB_NOT_FOUND"
	CheckpointNotFound  Reason = "CHECKPOINT_NOT_FOUND"
	LeaseNotFound       Reason = "LEASE_NOT_FOUND"
	PoolNotFound        Reason = "POOL_NOT_FOUND"
	ProviderNotFound    Reason = "PROVIDER_NOT_FOUND"
	RequestIDReused     Reason = "REQUEST_ID_REUSED"
	SessionKeyInUse     Reason = "SESSION_KEY_IN_USE"
	CapabilityMissing   Reason = "CAPABILITY_MISSING"
	WrongState          Reason = "WRONG_STATE"
	OtherGeneration     Reason = "OTHER_GENERATION"
	NotRunning          Reason = "NOT_RUNNING"
	LeaseHeld           Reason = "LEASE_HELD"
	LeaseLost           Reason = "LEASE_LOST"
	MachineGone         Reason = "MACHINE_GONE"
	Recovering          Reason = "RECOVERING"
	RevisionCompacted   Reason = "REVISION_COMPACTED"
	GuestUnreachable    Reason = "GUEST_UNREACHABLE"
	ToolMissing         Reason = "TOOL_MISSING"
	QuotaExceeded       Reason = "QUOTA_EXCEEDED"
	PoolEmpty           Reason = "POOL_EMPTY"
	TooManyJobs         Reason = "TOO_MANY_JOBS"
	OutputExpired       Reason = "OUTPUT_EXPIRED"
	Unauthenticated     Reason = "UNAUTHENTICATED"
	PermissionDenied    Reason = "PERMISSION_DENIED"
	StoreFull           Reason = "STORE_FULL"
	StoreFailed         Reason = "STORE_FAILED"
	ImageNotFound       Reason = "IMAGE_NOT_FOUND"
	ProviderUnavailable Reason = "PROVIDER_UNAVAILABLE"
	ProviderRefused     Reason = "PROVIDER_REFUSED"
	WorkspaceFailed     Reason = "WORKSPACE_FAILED"
	Stopping            Reason = "STOPPING"
	Internal            Reason = "INTERNAL"
	Unimplemented       Reason = "UNIMPLEMENTED"
	Malformed           Reason = "MALFORMED"
	TooLarge            Reason = "TOO_LARGE"
	Canceled            Reason = "CANCELED"
	DeadlineExceeded    Reason = "DEADLINE_EXCEEDED"
	ServiceNotFound     Reason = "SERVICE_NOT_FOUND"
)

// kinds says which kind each reason has; every reason has exactly one.
var kinds = map[Reason]Kind{
	InvalidField:        KindInvalid,
	SandboxNotFound:     KindNotFound,
	JobNotFound:         KindNotFound,
	CheckpointNotFound:  KindNotFound,
	LeaseNotFound:       KindNotFound,
	PoolNotFound:        KindNotFound,
	ProviderNotFound:    KindNotFound,
	RequestIDReused:     KindAlreadyExists,
	SessionKeyInUse:     KindAlreadyExists,
	CapabilityMissing:   KindPrecondition,
	WrongState:          KindPrecondition,
	OtherGeneration:     KindPrecondition,
	NotRunning:          KindPrecondition,
	LeaseHeld:           KindPrecondition,
	LeaseLost:           KindAborted,
	MachineGone:         KindPrecondition,
	Recovering:          KindUnavailable,
	RevisionCompacted:   KindOutOfRange,
	GuestUnreachable:    KindUnavailable,
	ToolMissing:         KindPrecondition,
	QuotaExceeded:       KindExhausted,
	PoolEmpty:           KindExhausted,
	TooManyJobs:         KindExhausted,
	OutputExpired:       KindOutOfRange,
	Unauthenticated:     KindUnauthenticated,
	PermissionDenied:    KindPermissionDenied,
	StoreFull:           KindExhausted,
	StoreFailed:         KindInternal,
	ImageNotFound:       KindPrecondition,
	ProviderUnavailable: KindUnavailable,
	ProviderRefused:     KindPrecondition,
	WorkspaceFailed:     KindPrecondition,
	Stopping:            KindUnavailable,
	Internal:            KindInternal,
	Unimplemented:       KindUnimplemented,
	Malformed:           KindInvalid,
	TooLarge:            KindExhausted,
	Canceled:            KindCanceled,
	DeadlineExceeded:    KindDeadline,
	ServiceNotFound:     KindNotFound,
}

// Reasons returns every reason; for tests and documentation.
func Reasons() map[Reason]Kind { return maps.Clone(kinds) }

// Error is an error that a caller of the API may see: what happened, to what, and what to do.
type Error struct {
	Reason     Reason
	Message    string
	Metadata   map[string]string // as the reason's comment in common.proto says
	Fields     []Field           // for InvalidField
	RetryAfter time.Duration     // not zero where a retry can help
	cause      error
}

// Field is one field of a request that is not as it must be.
type Field struct {
	Path        string // in proto names, as spec.workspace.repo.url
	Description string // what is wrong and what would be right
}

// New makes an error. The message says what happened, to what, and what to do.
func New(reason Reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Reason: reason, Message: err.Error(), cause: errors.Unwrap(err)}
}

// Invalid makes an InvalidField error for one field.
func Invalid(path, format string, args ...any) *Error {
	description := fmt.Sprintf(format, args...)
	return &Error{
		Reason:  InvalidField,
		Message: path + ": " + description,
		Fields:  []Field{{Path: path, Description: description}},
	}
}

// With adds one piece of metadata and returns the error itself.
func (e *Error) With(key, value string) *Error {
	if e.Metadata == nil {
		e.Metadata = map[string]string{}
	}
	e.Metadata[key] = value
	return e
}

// Retry says after how long a retry can help and returns the error itself.
func (e *Error) Retry(after time.Duration) *Error {
	e.RetryAfter = after
	return e
}

// Error returns the message.
func (e *Error) Error() string { return e.Message }

// Unwrap returns what caused it, if anything.
func (e *Error) Unwrap() error { return e.cause }

// Kind returns the class of the error's reason.
func (e *Error) Kind() Kind { return kinds[e.Reason] }

// Is reports whether err is, or wraps, an Error with this reason.
func Is(err error, reason Reason) bool {
	var e *Error
	return errors.As(err, &e) && e.Reason == reason
}

// KindOf returns the kind of err, KindInternal when it has none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind()
	}
	return KindInternal
}

// killedCode is the exit code of a process that SIGKILL ended, as a shell says it.
const killedCode = 137

// Die ends the process at once, as kill -9 would: nothing deferred runs. Only failpoints call it.
func Die() { os.Exit(killedCode) }
