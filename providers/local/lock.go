package local

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// A machine's lock is an open-file-description lock: it belongs to an open file, not to a process.
// The broker takes it and starts the guest with the open file as descriptor 3; then it closes its own
// and the guest's is the only one. The kernel drops the lock when the guest ends, however it ends,
// and not when the broker does. The guest marks descriptor 3 close-on-exec first of all
// (--lock-fd 3), so that its jobs do not hold the lock. To ask whether it is held takes nothing, so
// asking can't be mistaken for holding.

const lockFile = "lock"

// lockFD is the descriptor at which a guest finds its lock: the first after the three standard ones.
const lockFD = 3

// takeLock takes the lock of the machine in dir. It returns nil when somebody else holds it.
func takeLock(dir string) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening a machine's lock: %w", err)
	}
	whole := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	err = unix.FcntlFlock(file.Fd(), unix.F_OFD_SETLK, &whole)
	if err == nil {
		return file, nil
	}
	closeErr := file.Close()
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return nil, closeErr
	}
	return nil, fmt.Errorf("locking %s, which must be on a local file system: %w", file.Name(), err)
}

// lockHeld reports whether somebody holds the lock of the machine in dir.
func lockHeld(dir string) (bool, error) {
	file, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("opening a machine's lock: %w", err)
	}
	defer func() { _ = file.Close() }() // only looked at
	whole := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &whole); err != nil {
		return false, fmt.Errorf("looking at the lock %s: %w", file.Name(), err)
	}
	return whole.Type != unix.F_UNLCK, nil
}
