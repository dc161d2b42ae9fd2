// Package crash visits every failpoint of the broker and of the guest: it lets one line of work run
// into a crash there, starts the broker again, and checks what must hold. It knows the broker only by
// its programs and its API, and never simulates a crash: the process ends as kill -9 ends it.
package crash
