package hostfaults

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"
)

// clock is the clocks of one process, which can be stepped while it runs, as the host's can: its
// clock_gettime in the vDSO, from which Go reads the time, is replaced by one that asks the kernel and
// adds an offset. Nothing else of the process changes, and no other process is touched.
type clock struct {
	pid  int
	mem  *os.File
	code int64 // address of the replacement
}

// replacement is what replaces it, for x86-64:
//
//	mov eax, 228; syscall      // clock_gettime(edi, rsi)
//	test edi, edi; je wall     // CLOCK_REALTIME
//	cmp edi, 1; je monotonic   // CLOCK_MONOTONIC
//	ret
//	wall:      mov rcx, <seconds>; add [rsi], rcx; ret
//	monotonic: mov rcx, <seconds>; add [rsi], rcx; ret
var replacement = []byte{
	0xb8, 0xe4, 0, 0, 0, 0x0f, 0x05,
	0x85, 0xff, 0x74, 0x06,
	0x83, 0xff, 0x01, 0x74, 0x0f,
	0xc3,
	0x48, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, 0x48, 0x01, 0x0e, 0xc3,
	0x48, 0xb9, 0, 0, 0, 0, 0, 0, 0, 0, 0x48, 0x01, 0x0e, 0xc3,
}

// Where the offsets lie in the replacement, in seconds.
const (
	wallOffset      = 19
	monotonicOffset = 33
)

// clockOf takes the clocks of a Go process over.
func clockOf(t *testing.T, pid int) *clock {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the clock of a process is stepped by machine code for x86-64, and this is " + runtime.GOARCH)
	}
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	c := &clock{pid: pid, mem: mem}
	function, size, err := c.find()
	if err != nil {
		t.Fatal(err)
	}
	if size < uint64(len(replacement)) {
		t.Skipf("this kernel's clock_gettime has %d bytes, too few for another", size)
	}
	c.code = int64(function)
	for deadline := time.Now().Add(comesBack); ; fixture.Pause(probeInterval) {
		if err = c.replace(size); err == nil {
			return c
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// find returns where the process has clock_gettime, and how long that is.
func (c *clock) find() (address, size uint64, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", c.pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
			return 0, 0, err
		}
		image := make([]byte, to-from)
		if _, err := c.mem.ReadAt(image, int64(from)); err != nil {
			return 0, 0, err
		}
		file, err := elf.NewFile(bytes.NewReader(image))
		if err != nil {
			return 0, 0, err
		}
		symbols, err := file.DynamicSymbols()
		if err != nil {
			return 0, 0, err
		}
		for _, symbol := range symbols {
			if symbol.Name == "__vdso_clock_gettime" {
				return from + symbol.Value, symbol.Size, nil
			}
		}
	}
	return 0, 0, errors.New("the process has no clock_gettime in a vDSO")
}

// replace writes the replacement while the process stands still and no thread is in what it replaces.
func (c *clock) replace(size uint64) error {
	if err := syscall.Kill(c.pid, syscall.SIGSTOP); err != nil {
		return err
	}
	defer func() { _ = syscall.Kill(c.pid, syscall.SIGCONT) }()
	var inside []string
	for deadline := time.Now().Add(comesBack); ; fixture.Pause(time.Millisecond) {
		still, at, err := threads(c.pid)
		if err != nil {
			return err
		}
		if still {
			for _, pc := range at {
				if pc >= uint64(c.code) && pc < uint64(c.code)+size {
					inside = append(inside, strconv.FormatUint(pc, 16))
				}
			}
			break
		}
		if time.Now().After(deadline) {
			return errors.New("the process does not stand still")
		}
	}
	if len(inside) > 0 {
		return fmt.Errorf("threads read the clock just now, at %v", inside)
	}
	_, err := c.mem.WriteAt(replacement, c.code)
	return err
}

// threads reports whether a process stands still, and where each of its threads does.
func threads(pid int) (still bool, at []uint64, err error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(tasks) == 0 {
		return false, nil, fmt.Errorf("process %d has no threads (%w)", pid, err)
	}
	for _, task := range tasks {
		stat, err := os.ReadFile(filepath.Join(task, "stat"))
		if err != nil {
			return false, nil, err
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		if !strings.HasPrefix(rest, "T") {
			return false, nil, nil
		}
		where, err := os.ReadFile(filepath.Join(task, "syscall"))
		if err != nil {
			return false, nil, err
		}
		fields := strings.Fields(string(where))
		pc, err := strconv.ParseUint(strings.TrimPrefix(fields[len(fields)-1], "0x"), 16, 64)
		if err != nil {
			return false, nil, fmt.Errorf("a thread stands at %q", where)
		}
		at = append(at, pc)
	}
	return true, at, nil
}

// step sets the wall clock and the monotonic one off from the host's.
func (c *clock) step(t *testing.T, wall, monotonic time.Duration) {
	t.Helper()
	if err := syscall.Kill(c.pid, syscall.SIGSTOP); err != nil { // both at once: timers fire by one, and their work reads the other
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(c.pid, syscall.SIGCONT) }()
	c.set(t, wallOffset, wall)
	c.set(t, monotonicOffset, monotonic)
}

func (c *clock) set(t *testing.T, offset int64, by time.Duration) {
	t.Helper()
	seconds := binary.LittleEndian.AppendUint64(nil, uint64(int64(by/time.Second)))
	if _, err := c.mem.WriteAt(seconds, c.code+offset); err != nil {
		t.Fatal(err)
	}
}
