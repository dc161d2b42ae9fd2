//go:build !unix

package main

import "os"

// notifyResized does nothing: there is no signal for it here.
func notifyResized(chan<- os.Signal) {}
