//go:build unix

package connection

import (
	"fmt"
	"os"
	"syscall"
)

// checkOwner refuses a directory that belongs to somebody else: a socket in it could be anybody's,
// and calls carry secrets.
func checkOwner(dir string) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(stat.Uid) != os.Getuid() {
		return fmt.Errorf("%s: %w", dir, ErrOthersSocket)
	}
	return nil
}
