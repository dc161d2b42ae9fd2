package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers/guest/launch"
)

// whyNoDirectory says why no command can run in what a path leads to; empty if one can.
func whyNoDirectory(path string) string {
	info, err := os.Stat(path)
	var failed *fs.PathError
	switch {
	case errors.As(err, &failed):
		return failed.Err.Error()
	case err != nil:
		return err.Error()
	case !info.IsDir():
		return "it is not a directory"
	}
	return ""
}

// makeWorkspace creates the default working directory for the user of the jobs. One that exists and is not
// empty, or that a link leads to, is left alone: the image or an earlier boot made it so.
func makeWorkspace(path, user string) error {
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // a job's user may be another
		return fmt.Errorf("make the workspace: %w", err)
	}
	if user == "" || os.Geteuid() != 0 {
		return nil
	}
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the workspace: %w", err)
	}
	defer func() { _ = dir.Close() }() // it was only read
	if _, err := dir.Readdirnames(1); !errors.Is(err, io.EOF) {
		return nil //nolint:nilerr // not empty, or not readable
	}
	uid, gid, err := launch.Owner(user)
	if err != nil {
		return nil //nolint:nilerr // each job reports it, and one with another user runs
	}
	if err := dir.Chown(uid, gid); err != nil {
		return fmt.Errorf("give the workspace to user %s: %w", user, err)
	}
	return nil
}
