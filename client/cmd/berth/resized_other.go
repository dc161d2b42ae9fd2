//go:build !unix

package main

import "os"

// notifyContinued does nothing: there is no signal for it here.
func notifyContinued(chan<- os.Signal) {}

// notifyResized does nothing: there is no signal for it here.
func notifyResized(chan<- os.Signal) {}
