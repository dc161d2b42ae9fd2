// Package usage is what a command line may say: arguments, the values of flags, and the error of a
// command line that is wrong; and the exit codes by which it answers. It never calls a broker.
package usage

import (
	"errors"
	"fmt"
)

// The exit codes that are not a command's own.
const (
	ExitFailure = 1   // the call failed
	ExitUsage   = 2   // the arguments are wrong
	ExitRunning = 3   // poll: not done yet
	ExitTimeout = 124 // the command's timeout passed
	ExitBroker  = 125 // run, exec, attach, wait: the broker failed, so that the command's code is not known
	ExitSignal  = 128 // plus the signal's number
)

// Error is a command line that can't be meant.
type Error struct{ message string }

func (e *Error) Error() string { return e.message }

// Is reports whether err is an Error.
func Is(err error) bool {
	var usage *Error
	return errors.As(err, &usage)
}

// Errorf makes an Error.
func Errorf(format string, args ...any) error {
	return &Error{message: fmt.Sprintf(format, args...)}
}
