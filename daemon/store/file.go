package store

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// openChecked opens the ledger's file for bbolt and looks at its head first, since bbolt maps the
// file and a map that reaches beyond the file's end kills the process at the first touch. It looks
// only when it gets the file's lock at once: while another process writes, a head may be half there,
// and then bbolt waits for the lock and refuses anyway.
func openChecked(name string, flag int, mode fs.FileMode, openFile opener) (*os.File, error) {
	file, err := openFile(name, flag, mode)
	if err != nil {
		return nil, err
	}
	if err := lockAndCheck(file); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

func lockAndCheck(file *os.File) error {
	// The lock belongs to the open file, so bbolt's own on the same one is a repetition.
	err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lock it: %w", err)
	}
	return checkLength(file)
}

// The layout of bbolt's heads, pages 0 and 1, in the byte order of the machine. See
// https://github.com/etcd-io/bbolt/blob/v1.5.0/internal/common/meta.go
const (
	headOffset   = 16 // behind the page's own header
	headBytes    = 64
	headMagic    = 0xED0CDAED
	headPageSize = 8
	headPages    = 40 // the number of pages that are in use
	headNumber   = 48
	headSum      = 56
)

// errNotLedger and errTooShort are what checkLength finds.
var (
	errNotLedger = errors.New("it is not a ledger: point berthd at its own state directory")
	errTooShort  = errors.New("the file is shorter than it says, so a part of it is missing: restore a copy of it")
)

// checkLength reads the newest good head and compares what it says with the file's length. An empty
// file is good; bbolt fills it. A file whose heads are both bad is bbolt's to refuse.
func checkLength(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errNotLedger
	}
	if info.Size() == 0 {
		return nil
	}
	first, ok, err := readHead(file, 0)
	if err != nil {
		return err
	}
	pageSize := first.pageSize
	if !ok {
		pageSize = int64(os.Getpagesize())
	}
	second, secondOK, err := readHead(file, pageSize)
	if err != nil {
		return err
	}
	switch {
	case !ok && !secondOK:
		return errNotLedger
	case !ok || secondOK && second.number > first.number:
		first = second
	}
	if first.pages*first.pageSize > info.Size() {
		return errTooShort
	}
	return nil
}

type head struct {
	pageSize, pages int64
	number          uint64
}

// readHead reads the head on the page at offset; false when it is not whole.
func readHead(file *os.File, offset int64) (head, bool, error) {
	buf := make([]byte, headBytes)
	if _, err := file.ReadAt(buf, offset+headOffset); errors.Is(err, io.EOF) {
		return head{}, false, nil
	} else if err != nil {
		return head{}, false, err
	}
	sum := fnv.New64a()
	_, _ = sum.Write(buf[:headSum])
	order := binary.NativeEndian
	h := head{
		pageSize: int64(order.Uint32(buf[headPageSize:])),
		pages:    int64(order.Uint64(buf[headPages:])), // #nosec G115 -- covered by the checksum
		number:   order.Uint64(buf[headNumber:]),
	}
	return h, order.Uint32(buf) == headMagic && order.Uint64(buf[headSum:]) == sum.Sum64(), nil
}

// holder says, for people, which process has the file locked, as far as the system tells.
func holder(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return "another process"
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "another process"
	}
	pid := lockHolder(stat.Ino)
	if pid <= 0 {
		return "another process"
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return fmt.Sprintf("process %d", pid)
	}
	return fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(name)))
}

// lockHolder finds the process that holds a flock on the file with this inode in /proc/locks, whose
// lines are "1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF". It compares the inode alone: the
// device there is not the one that stat gives on overlay and btrfs. 0 when it finds none.
func lockHolder(inode uint64) int {
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return 0
	}
	defer func() { _ = locks.Close() }()
	lines := bufio.NewScanner(locks)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[1] != "FLOCK" || !strings.HasSuffix(fields[5], ":"+strconv.FormatUint(inode, 10)) {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err == nil {
			return pid
		}
	}
	return 0
}
