// Package stdio has what stands between a guest and a command's standard streams: the pipes or the
// terminal, the feeding of stdin and the reading of stdout and stderr. It keeps no output (package spool
// does) and knows no jobs.
package stdio

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Ends are both ends of a command's pipes or of its terminal. Ours do not block.
type Ends struct {
	Child    [3]uintptr // the command's stdin, stdout and stderr
	owned    []int      // of Child, those to close
	outputs  [2]int
	stdin    int
	Terminal bool // outputs[0] is ours, for input as well
}

const noFile = -1

// Open opens what a command needs. null is the null device, open for reading.
func Open(null *os.File, c *guestv1.Command) (*Ends, error) {
	p := &Ends{Child: [3]uintptr{null.Fd()}, outputs: [2]int{noFile, noFile}, stdin: noFile}
	var err error
	if c.GetTty() != nil {
		err = p.openTerminal(c.GetTty())
	} else {
		err = p.openPipes(c)
	}
	if err != nil {
		p.CloseChild()
		p.CloseOurs()
		return nil, err
	}
	return p, nil
}

func (p *Ends) openTerminal(size *berthv1.TerminalSize) error {
	ours, theirs, err := openTerminal(size)
	if err != nil {
		return err
	}
	p.Terminal, p.outputs[0], p.owned = true, ours, []int{theirs}
	for i := range p.Child {
		p.Child[i] = uintptr(theirs)
	}
	return nil
}

// Give makes the command's user the owner of its pipes or terminal, so that it can open them by name, as
// /dev/stdout or /proc/self/fd/1. A guest that can run commands as another user can do that, too.
func (p *Ends) Give(user *syscall.Credential) {
	if user == nil {
		return
	}
	for _, fd := range p.owned {
		_ = unix.Fchown(fd, int(user.Uid), -1)
	}
}

func (p *Ends) openPipes(c *guestv1.Command) error {
	for i := range p.outputs {
		if i == 1 && c.GetMergeStderr() {
			p.Child[2] = p.Child[1]
			break
		}
		read, write, err := pipe()
		if err != nil {
			return fmt.Errorf("open a pipe for output: %w", err)
		}
		p.outputs[i] = read
		p.childEnd(1+i, write)
		_ = unix.SetNonblock(read, true)
	}
	if c.GetStdin().GetOpen() || len(c.GetStdin().GetData()) > 0 {
		read, write, err := pipe()
		if err != nil {
			return fmt.Errorf("open a pipe for stdin: %w", err)
		}
		p.stdin = write
		p.childEnd(0, read)
		_ = unix.SetNonblock(write, true)
	}
	return nil
}

func pipe() (read, write int, err error) {
	var ends [2]int
	err = unix.Pipe2(ends[:], unix.O_CLOEXEC)
	return ends[0], ends[1], err
}

func (p *Ends) childEnd(number, fd int) {
	p.Child[number] = uintptr(fd)
	p.owned = append(p.owned, fd)
}

// CloseChild closes the command's ends, which it has itself once it was started.
func (p *Ends) CloseChild() {
	for _, fd := range p.owned {
		_ = unix.Close(fd)
	}
	p.owned = nil
}

// CloseOurs closes our ends, of a command that did not start.
func (p *Ends) CloseOurs() {
	for _, fd := range []int{p.outputs[0], p.outputs[1], p.stdin} {
		if fd != noFile {
			_ = unix.Close(fd)
		}
	}
}
