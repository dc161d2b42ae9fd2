// Package regular reads and writes the guest's own files on a disk that a job may have changed: whatever
// stands in a file's place, a link is not followed, a pipe does not block, and no more is read than expected.
// It knows nothing of what the files contain.
package regular

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// ErrNotRegular says that what has the file's name is something else.
var ErrNotRegular = errors.New("not a regular file")

// Open opens a file with the flags of os.OpenFile and mode 0600. ErrNotRegular for anything else.
func Open(path string, flags int) (*os.File, error) {
	file, err := os.OpenFile(path, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EISDIR):
		return nil, fmt.Errorf("open %s: %w", path, ErrNotRegular)
	case err != nil:
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("open %s: %w", path, ErrNotRegular)
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// OpenOwn opens a file that belongs to the guest for writing, replacing anything else that has its name.
func OpenOwn(path string, flags int) (*os.File, error) {
	file, err := Open(path, flags)
	if !errors.Is(err, ErrNotRegular) {
		return file, err
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("remove what is in the place of a file: %w", err)
	}
	return Open(path, flags)
}

// Read returns the content of a file, at most limit bytes of it.
func Read(path string, limit int64) ([]byte, error) {
	file, err := Open(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	data, err := io.ReadAll(io.LimitReader(file, limit))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return data, nil
}

// MakeDir makes a directory that belongs to the guest, replacing anything else that has its name.
func MakeDir(path string, mode os.FileMode) error {
	info, err := os.Lstat(path)
	if err == nil && !info.IsDir() {
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove what is in the place of a directory: %w", err)
	}
	if err := os.MkdirAll(path, mode); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	return nil
}
