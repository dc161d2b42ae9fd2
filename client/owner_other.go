//go:build !unix

package client

// checkOwner has nothing to check where files have no numeric owner.
func checkOwner(string) error { return nil }
