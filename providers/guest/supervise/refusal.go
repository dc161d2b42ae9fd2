package supervise

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
	NoRoom                   // the machine's disk is full
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

// Refusal is an error whose kind the caller acts on.
type Refusal struct {
	Kind   Kind
	Reason string // one of the above, or empty
	Text   string
}

// Error returns the text.
func (r *Refusal) Error() string { return r.Text }

func refuse(kind Kind, reason, format string, args ...any) error {
	return &Refusal{Kind: kind, Reason: reason, Text: fmt.Errorf(format, args...).Error()}
}

// failed refuses for what the system said: a full disk, which clears, is told from anything else.
func failed(err error, format string, args ...any) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return refuse(NoRoom, "", format+": %w: free disk space in the machine and try again", append(args, err)...)
	}
	return refuse(Failed, "", format+": %w", append(args, err)...)
}

func unknown(id string) error { return refuse(Unknown, "", "no job %q in this machine", id) }
