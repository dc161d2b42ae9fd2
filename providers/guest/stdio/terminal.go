package stdio

import (
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

const (
	// maxCells bounds a terminal's columns and rows.
	maxCells = 65535
	// endOfFile is ^D, for a terminal that does not name the character that ends its input.
	endOfFile = 4
)

// openTerminal opens a new terminal of a size: our end, which does not block, and the command's.
func openTerminal(size *berthv1.TerminalSize) (ours, theirs int, err error) {
	ours, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return noFile, noFile, fmt.Errorf("open a terminal: %w", err)
	}
	theirs, err = openTheirs(ours)
	if err == nil {
		if err = setSize(ours, size); err == nil {
			return ours, theirs, nil
		}
		_ = unix.Close(theirs)
	}
	_ = unix.Close(ours)
	return noFile, noFile, err
}

func openTheirs(ours int) (int, error) {
	if err := unix.IoctlSetPointerInt(ours, unix.TIOCSPTLCK, 0); err != nil {
		return noFile, fmt.Errorf("unlock a terminal: %w", err)
	}
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	// By descriptor where the kernel can, since /dev/pts may be another's.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(ours), unix.TIOCGPTPEER, flags)
	if errno == 0 {
		return int(peer), nil
	}
	number, err := unix.IoctlGetInt(ours, unix.TIOCGPTN)
	if err != nil {
		return noFile, fmt.Errorf("name a terminal: %w", err)
	}
	theirs, err := unix.Open("/dev/pts/"+strconv.Itoa(number), flags, 0)
	if err != nil {
		return noFile, fmt.Errorf("open the command's end of a terminal: %w", err)
	}
	return theirs, nil
}

func setSize(fd int, size *berthv1.TerminalSize) error {
	err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(size.GetCols()), Row: uint16(size.GetRows())})
	if err != nil {
		return fmt.Errorf("size a terminal: %w", err)
	}
	return nil
}

// CheckSize refuses a size that no terminal has.
func CheckSize(size *berthv1.TerminalSize) error {
	if size.GetCols() < 1 || size.GetCols() > maxCells || size.GetRows() < 1 || size.GetRows() > maxCells {
		return refusal.New(refusal.Invalid, "", "a terminal has 1 to %d columns and rows, not %d and %d", maxCells, size.GetCols(), size.GetRows())
	}
	return nil
}

// endsOfFile returns what ends the input of a terminal: an unfinished line takes one character to be passed
// on, and a second one to signal the end.
func endsOfFile(file *os.File, lineBegun bool) []byte {
	end, canonical := byte(endOfFile), false
	if conn, err := file.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			if t, err := unix.IoctlGetTermios(int(fd), unix.TCGETS); err == nil {
				end, canonical = t.Cc[unix.VEOF], t.Lflag&unix.ICANON != 0
			}
		})
	}
	if canonical && lineBegun {
		return []byte{end, end}
	}
	return []byte{end}
}

// Resize sets the size of a terminal, by our end of it. The kernel signals the foreground process group.
func Resize(terminal *os.File, size *berthv1.TerminalSize) {
	conn, err := terminal.SyscallConn()
	if err == nil {
		// It fails only when the terminal is gone, and the job about to be done.
		_ = conn.Control(func(fd uintptr) { _ = setSize(int(fd), size) })
	}
}

// SetControllingTerminal makes the command's terminal its controlling one.
func SetControllingTerminal(attr *syscall.SysProcAttr) {
	attr.Setctty = true
	attr.Ctty = 1 // of the command's descriptors
}
