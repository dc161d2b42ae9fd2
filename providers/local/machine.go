package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/guestlog"
)

// A machine's directory moves through three names, each move one rename, so that a directory under
// its own name always has its record and a half-removed one is never mistaken for a machine:
//
//	.new-<id>   being made: no process has existed
//	<id>        made
//	.gone-<id>  being removed: no process exists any more
//
// In it:
//
//	machine.json  the record
//	boot.json     berth.guest.v1.BootConfig; the only place that holds the token
//	lock          held by the guest for as long as it lives
//	doomed        there once Destroy was called; sticky
//	guest.log     what the guest says
//	workspace/    where the agent works
//	spool/        the guest's own
const (
	stagedPrefix    = ".new-"
	gonePrefix      = ".gone-"
	recordFile      = "machine.json"
	bootFile        = "boot.json"
	terminatingFile = "doomed"
	logFile         = "guest.log"
	noteBytes       = 1 << 20 // of that log are read for a Note: the stack traces of a crash come last
	workspaceDir    = "workspace"
	spoolDir        = "spool"
)

// place is which of its three names a machine's directory bears.
type place int

const (
	placeStaged place = iota
	placeMade
	placeGone
)

// machine is a machine as it lies on the disk.
type machine struct {
	id          string
	dir         string
	place       place
	terminating bool
	record      record
}

// record is what machine.json holds.
type record struct {
	Version    int       `json:"version"` // of this layout: 1
	BrokerID   string    `json:"broker_id"`
	MachineID  string    `json:"machine_id"`
	Created    time.Time `json:"created"`
	ListenDir  string    `json:"listen_dir"`
	Generation uint64    `json:"generation"`       // of the boot that is meant
	Isolation  string    `json:"isolation"`        // of that boot: "namespace" or "none"
	Cgroup     string    `json:"cgroup,omitempty"` // of that boot: its cgroup2 directory
	Guest      *process  `json:"guest,omitempty"`  // absent: nobody has seen that boot happen
}

const (
	recordVersion      = 1
	isolationNamespace = "namespace"
	isolationNone      = "none"
)

// handle is what the ledger remembers of a machine. It is for people: a machine's id is enough to
// find it.
type handle struct {
	Directory string `json:"directory"`
	Isolation string `json:"isolation"`
}

const handleVersion = 1

// machineID returns the id of the machine whose directory this could be, or nothing.
func machineID(entry fs.DirEntry) string {
	id := entry.Name()
	for _, prefix := range []string{stagedPrefix, gonePrefix} {
		id = strings.TrimPrefix(id, prefix)
	}
	if !entry.IsDir() || !name.MatchString(id) {
		return ""
	}
	if id == entry.Name() && !strings.HasPrefix(id, "m_") {
		return "" // a stranger's
	}
	return id
}

// find looks for a machine's directory under its three names, in the order in which it moves through
// them, so that one that moves meanwhile is not missed.
func (p *Provider) find(id string) (*machine, error) {
	if !name.MatchString(id) {
		return nil, fmt.Errorf("%q cannot be a machine: %w", id, providers.ErrNotFound)
	}
	for at, prefix := range []string{stagedPrefix, "", gonePrefix} {
		m := &machine{id: id, dir: filepath.Join(p.dir, prefix+id), place: place(at)}
		_, err := os.Lstat(m.dir)
		if err == nil {
			err = m.read()
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("looking for machine %s: %w", id, err)
		}
		return m, nil
	}
	return nil, fmt.Errorf("machine %s: %w", id, providers.ErrNotFound)
}

// read reads the record. Only a directory under a name of transition may lack it; fs.ErrNotExist
// when the directory itself is no longer there.
func (m *machine) read() error {
	path := filepath.Join(m.dir, recordFile)
	content, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(m.dir); err != nil {
			return err
		}
		if m.place == placeMade {
			return fmt.Errorf("%s is missing: the directory was not made by Berth or was tampered with; remove it by hand", path)
		}
		return nil
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, &m.record); err != nil {
		if m.place != placeMade {
			return nil // never finished, or on its way out
		}
		return fmt.Errorf("%s is damaged: %w", path, err)
	}
	if m.record.Version != recordVersion {
		return fmt.Errorf("%s has layout %d and this build knows %d: use the build that wrote it", path, m.record.Version, recordVersion)
	}
	if _, err := os.Lstat(filepath.Join(m.dir, terminatingFile)); err == nil {
		m.terminating = true
	}
	return nil
}

// foreign reports whether the machine bears another broker's label. One under a name of transition
// that has lost its record is ours: nobody else uses such names.
func (m *machine) foreign(broker string) bool {
	return m.record.BrokerID != "" && m.record.BrokerID != broker
}

// describe returns the machine as the contract has it.
func (m *machine) describe() (providers.Machine, error) {
	state, err := m.state()
	if err != nil {
		return providers.Machine{}, fmt.Errorf("looking at machine %s: %w", m.id, err)
	}
	note := ""
	if state == providers.MachineStopped {
		note = "its guest ended"
		if reason := lastWords(m.path(logFile)); reason != "" {
			note += ": " + reason
		}
	}
	return providers.Machine{
		ID:        m.id,
		State:     state,
		Note:      note,
		Handle:    m.handle(),
		Created:   m.record.Created,
		ListenDir: m.record.ListenDir,
	}, nil
}

func (m *machine) state() (providers.MachineState, error) {
	if m.place != placeMade || m.terminating {
		return providers.MachinePartial, nil
	}
	alive, err := m.guestAlive()
	switch {
	case err != nil:
		return 0, err
	case alive && m.frozen():
		return providers.MachineSuspended, nil
	case alive:
		return providers.MachineRunning, nil
	case m.record.Guest != nil:
		return providers.MachineStopped, nil
	default:
		return providers.MachinePartial, nil
	}
}

func (m *machine) frozen() bool {
	if m.record.Cgroup == "" {
		return false
	}
	frozen, err := cgroupFrozen(m.record.Cgroup)
	return frozen && err == nil
}

// guestAlive asks the kernel: a guest that lives holds its lock. The recorded process is asked too,
// in case somebody removed the lock's file.
func (m *machine) guestAlive() (bool, error) {
	held, err := lockHeld(m.dir)
	if err != nil {
		return false, err
	}
	return held || m.record.Guest.alive(), nil
}

func (m *machine) handle() providers.Handle {
	content, err := json.Marshal(handle{Directory: m.dir, Isolation: m.record.Isolation})
	if err != nil {
		content = nil // two strings always marshal
	}
	return providers.Handle{Version: handleVersion, Bytes: content}
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

// write makes the record durable.
func (m *machine) write() error {
	content, err := json.MarshalIndent(m.record, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the record of machine %s: %w", m.id, err)
	}
	if err := writeFile(m.path(recordFile), append(content, '\n')); err != nil {
		return fmt.Errorf("writing the record of machine %s: %w", m.id, err)
	}
	return nil
}

// writeFile replaces a file's content at once and durably, with mode 0600.
func writeFile(path string, content []byte) error {
	next := path + ".next"
	file, err := os.OpenFile(next, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes names in a directory durable.
func syncDir(dir string) error {
	file, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = file.Sync()
	if errors.Is(err, syscall.EINVAL) {
		err = nil // this file system has nothing to flush there
	}
	return errors.Join(err, file.Close())
}

// lastWords is why a guest ended, as its log has it; empty if it does not say.
func lastWords(path string) string {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }() // only read
	end, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	return guestlog.Reason(io.NewSectionReader(file, max(0, end-noteBytes), noteBytes))
}
