package guest

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/berth-sandbox/berth/providers/guest/launch"
)

// makeWorkspace makes the default working directory and gives it to the user whose the jobs are. One
// that is there and holds something is left as it is: the image, or an earlier boot, made it so.
func makeWorkspace(path, user string) error {
	if err := os.MkdirAll(path, 0o755); err != nil { //nolint:gosec // a job's user may be another
		return fmt.Errorf("make the workspace: %w", err)
	}
	if user == "" || os.Geteuid() != 0 {
		return nil
	}
	empty, err := isEmpty(path)
	if err != nil || !empty {
		return err
	}
	uid, gid, err := launch.Owner(user)
	if err != nil {
		return nil //nolint:nilerr // each job says so, and one that names another user runs
	}
	if err := os.Lchown(path, uid, gid); err != nil {
		return fmt.Errorf("give the workspace to user %s: %w", user, err)
	}
	return nil
}

func isEmpty(path string) (bool, error) {
	dir, err := os.Open(path)
	if err != nil {
		return false, fmt.Errorf("look into the workspace: %w", err)
	}
	defer func() { _ = dir.Close() }() // it was only read
	_, err = dir.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look into the workspace: %w", err)
	}
	return false, nil
}
