//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
)

// notifyContinued delivers a signal whenever this process runs again after it was stopped.
func notifyContinued(continued chan<- os.Signal) { signal.Notify(continued, syscall.SIGCONT) }

// notifyResized delivers a signal whenever the terminal's size changed.
func notifyResized(resized chan<- os.Signal) { signal.Notify(resized, syscall.SIGWINCH) }
