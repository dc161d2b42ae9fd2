//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
)

// notifyResized delivers a signal whenever the terminal's size changed.
func notifyResized(resized chan<- os.Signal) { signal.Notify(resized, syscall.SIGWINCH) }
