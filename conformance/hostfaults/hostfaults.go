// Package hostfaults holds the faults around the daemon: a full disk, a ledger that is read-only, too few
// descriptors, a wall clock that is stepped, a guest that says nothing, a stop under load, a freeze, a
// reboot of the host, an upgrade, and more jobs than anybody will read. Each is done to a real berthd
// from outside; `make hostfaults` runs them. It never changes anything of the host itself.
package hostfaults
