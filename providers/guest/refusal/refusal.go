// Package refusal has the errors that the guest answers on purpose, with a kind that the caller acts on.
// It knows nothing of gRPC, which has its own codes for the kinds.
package refusal

import (
	"errors"
	"fmt"
	"syscall"
)

// Kind is the kind of a refusal.
type Kind int

// The kinds of refusals.
const (
	Invalid      Kind = iota // the request itself is wrong
	Unknown                  // there is no such job
	Precondition             // not in this state; Reason says which
	Unsupported              // this guest cannot do it
	Failed                   // the machine could not do it
	NoSpace                  // the machine's disk is full
)

// The reasons of refusals, for programs.
const (
	ReasonOtherGeneration = "OTHER_GENERATION"
	ReasonOtherBoot       = "OTHER_BOOT"
	ReasonForgotten       = "FORGOTTEN"
	ReasonExpired         = "EXPIRED"
	ReasonStopping        = "STOPPING"
	ReasonInputTaken      = "INPUT_TAKEN"
	ReasonInputClosed     = "INPUT_CLOSED"
	ReasonInputMissing    = "INPUT_MISSING"
	ReasonNoTerminal      = "NO_TERMINAL"
)

// Error is a refusal.
type Error struct {
	Kind   Kind
	Reason string // one of the above, or empty
	Text   string
}

// Error returns the text.
func (e *Error) Error() string { return e.Text }

// New returns a refusal.
func New(kind Kind, reason, format string, args ...any) error {
	return &Error{Kind: kind, Reason: reason, Text: fmt.Errorf(format, args...).Error()}
}

// System returns a refusal for an error of the system. A full disk, which can be remedied, has a kind of
// its own.
func System(err error, format string, args ...any) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return New(NoSpace, "", format+": %w: free disk space in the machine and try again", append(args, err)...)
	}
	return New(Failed, "", format+": %w", append(args, err)...)
}
