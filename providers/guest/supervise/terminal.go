package supervise

import (
	"fmt"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const (
	// maxCells bounds a terminal's columns and rows.
	maxCells = 65535
	// endOfFile is ^D, for a terminal that does not say which character ends its input.
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

func checkSize(size *berthv1.TerminalSize) error {
	if size.GetCols() < 1 || size.GetCols() > maxCells || size.GetRows() < 1 || size.GetRows() > maxCells {
		return refuse(Invalid, "", "a terminal has 1 to %d columns and rows, not %d and %d", maxCells, size.GetCols(), size.GetRows())
	}
	return nil
}

// endsOfFile is what ends the input of a terminal: a line that has begun needs one character to be
// passed on, and one more to end what comes after it.
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

// Resize sets the size of a job's terminal.
func (s *Supervisor) Resize(r *guestv1.ResizeRequest) (*guestv1.ResizeResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	if err := j.resize(nil, r.GetSize()); err != nil {
		return nil, err
	}
	return &guestv1.ResizeResponse{}, nil
}

// resize sets the size for whoever owns the input; nil is nobody who is attached. The kernel tells
// the foreground process group.
func (j *job) resize(by *attachment, size *berthv1.TerminalSize) error {
	if err := checkSize(size); err != nil {
		return err
	}
	if err := j.input.allow(by); err != nil {
		return err
	}
	select {
	case <-j.done:
		return nil // a terminal that nobody looks at any more
	default:
	}
	if !j.tty {
		return refuse(Precondition, ReasonNoTerminal, "job %s has no terminal", j.id)
	}
	conn, err := j.pipes[0].file.SyscallConn()
	if err == nil {
		// It fails only when the terminal is gone, and the job about to be done.
		_ = conn.Control(func(fd uintptr) { _ = setSize(int(fd), size) })
	}
	return nil
}

// terminalAttributes make a terminal the controlling one.
func terminalAttributes(attr *syscall.SysProcAttr) {
	attr.Setctty = true
	attr.Ctty = 1 // of the command's descriptors
}
