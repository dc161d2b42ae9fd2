//go:build linux && (amd64 || arm64)

package main

// closedAtStart has bit n set where descriptor n was closed when the process began, if entry ran.
var closedAtStart uint64

// entry is where the process begins: the build names it with -ldflags "-E main.entry". It notes which of the
// standard descriptors are closed before Go's runtime opens /dev/null in their place, and goes on to the
// runtime. Without that flag it is not run, and what is written to a closed descriptor is lost.
func entry() //nolint:unused // the linker is told of it
