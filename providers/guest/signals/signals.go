// Package signals decides which signals the guest obeys. It changes the kernel's table of signal handlers past
// the Go runtime, which has no word for who sent a signal. It never blocks a signal and changes nothing that a
// job would inherit: handlers end with the job's exec.
package signals

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What a process does on a signal: SIG_DFL and SIG_IGN of signal.h.
const (
	Default = 0
	Ignore  = 1
)

// fatal are the signals on which the Go runtime ends the process. On all others it does nothing, unless the
// program asked for them, or the kernel drops them for the first process of a PID namespace.
var fatal = []syscall.Signal{
	unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGBUS, unix.SIGFPE,
	unix.SIGSEGV, unix.SIGTERM, unix.SIGSTKFLT, unix.SIGSYS,
}

// next is the runtime's own handler, which is the same for all signals, and entry is the address of ours. See
// signals_amd64.s; the kernel calls it.
var next, entry uintptr

// ObeyOutside makes the first process of a PID namespace drop each fatal signal that a process of the namespace
// sends. It obeys those of processes outside, whose pid the kernel gives as 0, and those of the kernel itself,
// such as for a fault of this program. Elsewhere it must not be called: every sender has a pid there.
//
// The kernel would drop such a signal by itself if it had no handler, but it would then drop one from outside
// too, and an engine's stop would take until its KILL.
func ObeyOutside() error {
	for _, number := range fatal {
		var action action
		if err := change(number, nil, &action); err != nil {
			return fmt.Errorf("read the handler of %v: %w", number, err)
		}
		if action.handler == Default || action.handler == Ignore || action.handler == entry {
			continue
		}
		if next != 0 && action.handler != next {
			return fmt.Errorf("%v has a handler of its own", number)
		}
		next, action.handler = action.handler, entry
		if err := change(number, &action, nil); err != nil {
			return fmt.Errorf("replace the handler of %v: %w", number, err)
		}
	}
	return nil
}

// Dispose sets what a signal does to Default or Ignore, also of those that the runtime and C libraries keep to
// themselves.
func Dispose(number syscall.Signal, disposition uintptr) error {
	return change(number, &action{handler: disposition}, nil)
}

// action is the kernel's struct sigaction on amd64 and arm64.
type action struct{ handler, flags, restorer, mask uintptr }

// maskBytes is the size of a set of signals. Linux has 64 on every architecture that Go knows but MIPS.
const maskBytes = 8

// change asks the kernel itself: package unix has no call of this name.
func change(number syscall.Signal, wanted, found *action) error {
	_, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(number),
		uintptr(unsafe.Pointer(wanted)), uintptr(unsafe.Pointer(found)), maskBytes, 0, 0) //nolint:gosec // what the call is made of
	if errno != 0 {
		return errno
	}
	return nil
}
