package guest

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// DenyInspection keeps this process to itself: who runs as the same user in the machine, be it root, can
// neither trace it nor read its memory, its environment or its descriptors, unless it has CAP_SYS_PTRACE. The
// kernel gives it up at exec, so that jobs can be debugged; it comes after whatever executes the program anew.
func DenyInspection() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("keep other processes out of this one: %w", err)
	}
	return nil
}
