package supervise

import "fmt"

// Kind is the kind of a refusal.
type Kind int

// The kinds of refusals.
const (
	Invalid      Kind = iota // the request itself is wrong
	Unknown                  // there is no such job
	Precondition             // not in this state; Reason says which
	Unsupported              // this guest cannot do it
	Failed                   // the machine could not do it
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
	return &Refusal{Kind: kind, Reason: reason, Text: fmt.Sprintf(format, args...)}
}

func unknown(id string) error { return refuse(Unknown, "", "no job %q in this machine", id) }
