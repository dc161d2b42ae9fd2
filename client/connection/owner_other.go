//go:build !unix

package connection

// checkOwner has nothing to check where files have no numeric owner.
func checkOwner(string) error { return nil }
