package fake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// What lies in a machine's directory, beside its workspace and spool.
const (
	recordFile      = "machine.json"
	bootFile        = "boot.json"
	lockFile        = "lock"   // held by the guest for as long as it lives
	bootsFile       = "boots"  // a line for each boot: the guest's pid
	terminatingFile = "doomed" // it is to be destroyed and never boots again
	gonePrefix      = ".gone-" // of a directory that is being removed
	newPrefix       = ".new-"  // of one that is being made
)

// machineVariable marks every process of a machine, by which they are found: its value is the
// machine's directory, for tests may give two machines one id.
const machineVariable = "BERTH_FAKE_MACHINE"

// lockFD is the descriptor at which a guest finds its lock.
const lockFD = 3

// machine is what is written down of one.
type machine struct {
	ID         string
	Broker     string
	ListenDir  string
	Generation uint64
	Created    time.Time

	harness Harness
	dir     string
}

// machine reads a machine's record. ErrNotFound when there is none.
func (w Harness) machine(id string) (*machine, error) {
	m := &machine{harness: w, dir: filepath.Join(w.dir, id)}
	if !name.MatchString(id) {
		return nil, fmt.Errorf("machine %q: %w", id, providers.ErrNotFound)
	}
	data, err := os.ReadFile(m.path(recordFile))
	if isAbsent(err) {
		return nil, fmt.Errorf("machine %s: %w", id, providers.ErrNotFound)
	}
	if err == nil {
		err = json.Unmarshal(data, m)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the record of machine %s: %w", id, err)
	}
	return m, nil
}

// stage makes a machine's directory with its record in it, at once.
func (w Harness) stage(spec providers.MachineSpec) (*machine, error) {
	dir, err := os.MkdirTemp(w.dir, newPrefix)
	if err != nil {
		return nil, fmt.Errorf("making machine %s: %w", spec.MachineID, err)
	}
	m := &machine{
		ID: spec.MachineID, Broker: spec.BrokerID, ListenDir: spec.ListenDir, Generation: spec.Generation,
		Created: time.Now(), harness: w, dir: dir,
	}
	if err := m.write(); err != nil {
		return nil, err
	}
	final := filepath.Join(w.dir, m.ID)
	if err := os.Rename(dir, final); err != nil && !errors.Is(err, syscall.ENOTEMPTY) && !errors.Is(err, syscall.EEXIST) {
		return nil, fmt.Errorf("making machine %s: %w", m.ID, err)
	}
	m.dir = final
	return m, os.RemoveAll(dir) // another process may have made it meanwhile
}

func (w Harness) gone(id string) string { return filepath.Join(w.dir, gonePrefix+id) }

func (m *machine) path(file string) string { return filepath.Join(m.dir, file) }

func (m *machine) write() error {
	data, err := json.Marshal(m)
	if err == nil {
		err = writeWhole(m.path(recordFile), data)
	}
	if err != nil {
		return fmt.Errorf("recording machine %s: %w", m.ID, err)
	}
	return nil
}

// writeWhole replaces a file at once.
func writeWhole(path string, data []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".tmp-")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err := errors.Join(err, file.Close()); err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return os.Rename(file.Name(), path)
}

func (m *machine) terminating() (bool, error) {
	_, err := os.Stat(m.path(terminatingFile))
	if isAbsent(err) {
		return false, nil
	}
	return err == nil, err
}

func (m *machine) describe() (providers.Machine, error) {
	found := providers.Machine{
		ID: m.ID, State: providers.MachineStopped, Handle: providers.Handle{Version: 1, Bytes: []byte(m.ID)}, Created: m.Created,
	}
	terminating, err := m.terminating()
	if err != nil || terminating {
		found.State, found.Note = providers.MachinePartial, "it is to be destroyed"
		return found, err
	}
	running, err := m.running()
	switch {
	case running && m.frozen():
		found.State, found.Note = providers.MachineSuspended, "it is suspended"
	case running:
		found.State = providers.MachineRunning
	default:
		found.Note = "its guest has ended"
		// Not by its boots, which are noted after the start: a broker that is killed in between has booted it.
		if _, err := os.Stat(m.path(bootFile)); isAbsent(err) {
			found.State, found.Note = providers.MachinePartial, "it was never booted"
		}
	}
	return found, err
}

// takeLock takes the machine's lock, an open-file-description lock as in package local: the guest
// inherits it and the kernel drops it when the guest ends. Nil when it is held.
func (m *machine) takeLock() (*os.File, error) {
	file, err := os.OpenFile(m.path(lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the lock of machine %s: %w", m.ID, err)
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
	return nil, fmt.Errorf("locking machine %s: %w", m.ID, err)
}

// running reports whether the machine's lock is held.
func (m *machine) running() (bool, error) {
	file, err := os.OpenFile(m.path(lockFile), os.O_RDWR, 0)
	if isAbsent(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("opening the lock of machine %s: %w", m.ID, err)
	}
	defer func() { _ = file.Close() }() // only looked at
	whole := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(file.Fd(), unix.F_OFD_GETLK, &whole); err != nil {
		return false, fmt.Errorf("looking at the lock of machine %s: %w", m.ID, err)
	}
	return whole.Type != unix.F_UNLCK, nil
}

// start starts the machine's guest in a session of its own, with the lock, and notes the boot.
func (m *machine) start(program string, token []byte, lock *os.File) (int, error) {
	for _, dir := range []string{m.path("workspace"), m.path("spool"), m.ListenDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return 0, err
		}
	}
	config := &guestv1.BootConfig{
		MachineId: m.ID, Token: token, DialSocket: filepath.Join(m.ListenDir, reverse.SocketName),
		SpoolDir: m.path("spool"), Workspace: m.path("workspace"), Generation: m.Generation,
		Env: map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", machineVariable: m.dir},
	}
	content, err := protojson.Marshal(config)
	if err != nil {
		return 0, err
	}
	if err := writeWhole(m.path(bootFile), content); err != nil {
		return 0, err
	}
	output, err := os.OpenFile(m.path("guest.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { _ = output.Close() }() // the guest writes to it
	input, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer func() { _ = input.Close() }() // nothing is read from it
	environment := make([]string, 0, len(config.GetEnv()))
	for key, value := range config.GetEnv() {
		environment = append(environment, key+"="+value)
	}
	child, err := os.StartProcess(program, []string{"berth-guest", "init", "--config", m.path(bootFile), "--lock-fd", strconv.Itoa(lockFD)}, &os.ProcAttr{
		Dir: m.path("workspace"), Env: environment, Files: []*os.File{input, output, output, lock},
		Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, err
	}
	pid := child.Pid
	return pid, errors.Join(child.Release(), appendLine(m.path(bootsFile), strconv.Itoa(pid)))
}

func appendLine(path, line string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, line+"\n")
	return errors.Join(err, file.Close())
}

// destroy ends every process of the machine, the guest first with the signal, and removes it.
func (m *machine) destroy(ctx context.Context, first syscall.Signal) error {
	if err := errors.Join(appendLine(m.path(terminatingFile), ""), m.signalGuest(syscall.SIGCONT), m.signalGuest(first)); err != nil {
		return fmt.Errorf("destroying machine %s: %w", m.ID, err)
	}
	_ = await(ctx, termTimeout, "its guest", func() (bool, error) { // killed below if it takes longer
		running, err := m.running()
		return !running, err
	})
	if err := m.killMembers(ctx); err != nil {
		return err
	}
	gone := m.harness.gone(m.ID)
	if err := errors.Join(os.RemoveAll(m.ListenDir), os.RemoveAll(gone)); err != nil {
		return fmt.Errorf("removing machine %s: %w", m.ID, err)
	}
	if err := os.Rename(m.dir, gone); err != nil && !isAbsent(err) {
		return fmt.Errorf("removing machine %s: %w", m.ID, err)
	}
	if err := os.RemoveAll(gone); err != nil {
		return fmt.Errorf("removing machine %s: %w", m.ID, err)
	}
	return nil
}

// killMembers kills what bears the machine's mark, until nothing does.
func (m *machine) killMembers(ctx context.Context) error {
	return await(ctx, killTimeout, "the processes of machine "+m.ID, func() (bool, error) {
		members, err := m.members()
		for _, pid := range members {
			_ = syscall.Kill(pid, syscall.SIGKILL) // gone already is as good
		}
		return len(members) == 0, err
	})
}

// members are the living processes of the machine.
func (m *machine) members() ([]int, error) {
	return processesWith("environ", "\x00"+machineVariable+"="+m.dir+"\x00")
}

// signalGuest sends a signal to the machine's guest, if it lives.
func (m *machine) signalGuest(signal syscall.Signal) error {
	guests, err := processesWith("cmdline", "\x00--config\x00"+m.path(bootFile)+"\x00")
	for _, pid := range guests {
		if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("sending %v to the guest of machine %s: %w", signal, m.ID, err)
		}
	}
	return err
}

// processesWith returns the processes whose file in /proc holds a text. A dead one's holds nothing.
func processesWith(file, text string) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("listing processes: %w", err)
	}
	var found []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		content, err := os.ReadFile(filepath.Join("/proc", entry.Name(), file))
		if err == nil && bytes.Contains(append([]byte{0}, content...), []byte(text)) {
			found = append(found, pid)
		}
	}
	return found, nil
}
