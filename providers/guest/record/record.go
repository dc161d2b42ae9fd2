// Package record is the guest's own directory on disk: what makes a job start at most once and its
// outcome survive. It never contains a command, an environment or any other secret.
//
//	lock                  locked by the guest that uses the directory
//	machine               the id of the machine that it belongs to
//	forgotten             16 bytes for each durable job that was forgotten: its ULID
//	boot.<n>              JobRecord shared by the quick jobs of this boot
//	jobs/<job id>         of a quick job, which is not durable: a hard link to the file above
//	jobs/<job id>/job         of a durable job: JobRecord, before it begins
//	jobs/<job id>/status      Status, once it is done
//	jobs/<job id>/status.new  space reserved for it, so that a full disk cannot lose an outcome
//	jobs/<job id>/stdout.…    its output, see package spool
//	output/<job id>/stdout.…  a quick job's output, if it is too large for memory
//
// An entry in jobs, made exclusively, is what makes a job start at most once. A link is the cheapest
// such entry: making and removing a directory costs 80 µs on ext4, a link 5 µs.
package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/regular"
)

const (
	// statusReserve is reserved for a status, in bytes: several times the usual size.
	statusReserve = 4 << 10
	// maxRecord bounds a record, a status and a machine's id on disk, in bytes: many times the usual size.
	maxRecord = 64 << 10
	// maxForgotten bounds the file of tombstones, in bytes: a million within 48 h.
	maxForgotten = 16 << 20
	// forgetAfter is how long a forgotten id is remembered, by the times in the ids: an id that is
	// older than the newest by more is refused as expired. A reservation is started within 24 h.
	forgetAfter = 48 * time.Hour
	// memoryTombstones bounds the forgotten ids of jobs that were not durable, which are in memory
	// only; 16 Ki of them take less than 1 MB.
	memoryTombstones = 16 << 10
	// compactFrom is the least number of durable tombstones for which the file is rewritten.
	compactFrom = 16 << 10
	// clockSlack is how far the broker's clock may be ahead of the machine's.
	clockSlack = time.Hour
)

// Errors of Create and Check.
var (
	// ErrExists: the job's directory is there.
	ErrExists = errors.New("the job is known already")
	// ErrForgotten: the job was begun and forgotten.
	ErrForgotten = errors.New("the job was begun before and has been forgotten")
	// ErrExpired: the job's id is so old that it may have been begun and forgotten.
	ErrExpired = errors.New("the job's id is older than what the guest remembers")
)

// Directory is the guest's directory. Its methods may be called concurrently, for one job by one
// caller at a time.
type Directory struct {
	path   string
	jobs   string
	output string
	lock   *os.File
	shared []byte // JobRecord of this boot's quick jobs

	mu         sync.Mutex
	link       string // the file that quick jobs are links to
	links      int    // number of such files so far
	forgotten  *os.File
	size       int64             // of its whole entries, in bytes
	compactAt  int               // number of tombstones at which it is rewritten
	tombstones map[ULID]struct{} // of durable jobs
	recent     map[ULID]struct{} // of other jobs, in memory only
	ring       []ULID            // recent, in order; next is its oldest once it is full
	next       int
	newest     time.Time // of all ids seen
}

// Found is a job that an earlier boot left.
type Found struct {
	Record *guestv1.JobRecord
	Status *guestv1.Status // nil when it was never recorded
}

// Open locks the directory, making it if it is missing, and wipes what belongs to another machine.
func Open(path, machineID string, generation uint64, bootID string) (*Directory, error) {
	d := &Directory{
		path:       path,
		jobs:       filepath.Join(path, "jobs"),
		output:     filepath.Join(path, "output"),
		tombstones: make(map[ULID]struct{}),
		recent:     make(map[ULID]struct{}),
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the spool directory: %w", err)
	}
	if err := d.acquire(); err != nil {
		return nil, err
	}
	if err := d.prepare(machineID, generation, bootID); err != nil {
		_ = d.lock.Close()
		return nil, err
	}
	return d, nil
}

func (d *Directory) prepare(machineID string, generation uint64, bootID string) error {
	if err := d.claim(machineID); err != nil {
		return err
	}
	if err := d.loadForgotten(); err != nil {
		return err
	}
	// The records of earlier boots stay reachable by the links to them.
	stale, err := filepath.Glob(filepath.Join(d.path, "boot.*"))
	if err != nil {
		return fmt.Errorf("find the records of earlier boots: %w", err)
	}
	for _, path := range stale {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove the record of an earlier boot: %w", err)
		}
	}
	return d.share(generation, bootID)
}

// share writes the record that quick jobs share from now on.
func (d *Directory) share(generation uint64, bootID string) error {
	shared, err := proto.Marshal(&guestv1.JobRecord{Generation: generation, BootId: bootID, AcceptTime: timestamppb.Now()})
	if err != nil {
		return fmt.Errorf("encode the record of this boot: %w", err)
	}
	d.shared = shared
	return d.newLink()
}

// SetIdentity assigns the directory to another machine, or to the same one in another generation. Its
// content stays. No job may be created meanwhile.
func (d *Directory) SetIdentity(machineID string, generation uint64, bootID string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	// gofail: var guestBeforeAdopt struct{}
	// os.Exit(137)
	if err := replace(filepath.Join(d.path, "machine"), []byte(machineID)); err != nil {
		return err
	}
	// gofail: var guestAfterAdopt struct{}
	// os.Exit(137)
	return d.share(generation, bootID)
}

// Close unlocks the directory.
func (d *Directory) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.forgotten.Close(), d.lock.Close())
}

func (d *Directory) acquire() error {
	lock, err := regular.OpenOwn(filepath.Join(d.path, "lock"), os.O_RDWR|os.O_CREATE)
	if err != nil {
		return fmt.Errorf("open the spool's lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		return fmt.Errorf("lock the spool %s, is another guest running on it? %w", d.path, err)
	}
	d.lock = lock
	return nil
}

// claim assigns the directory to this machine, wiping what belongs to another.
func (d *Directory) claim(machineID string) error {
	file := filepath.Join(d.path, "machine")
	before, err := regular.Read(file, maxRecord)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, regular.ErrNotRegular) {
		return fmt.Errorf("read the spool's machine id: %w", err)
	}
	if string(before) != machineID {
		for _, path := range []string{d.jobs, d.output, filepath.Join(d.path, "forgotten")} {
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("wipe the spool of another machine: %w", err)
			}
		}
		if err := replace(file, []byte(machineID)); err != nil {
			return err
		}
	}
	for _, path := range []string{d.jobs, d.output} {
		if err := regular.MakeDir(path, 0o700); err != nil {
			return fmt.Errorf("make the jobs' directories: %w", err)
		}
	}
	return nil
}

// newLink creates a file that quick jobs are links to. File systems bound the number of links to a file.
func (d *Directory) newLink() error {
	d.links++
	d.link = filepath.Join(d.path, "boot."+strconv.Itoa(d.links))
	if err := os.RemoveAll(d.link); err != nil {
		return fmt.Errorf("remove what is in the place of this boot's record: %w", err)
	}
	return writeNew(d.link, d.shared)
}

// Load returns the jobs that earlier boots left, in the order of their ids.
func (d *Directory) Load() ([]Found, error) {
	entries, err := os.ReadDir(d.jobs)
	if err != nil {
		return nil, fmt.Errorf("read the jobs' directory: %w", err)
	}
	var all []Found
	known := make(map[string]bool)
	for _, entry := range entries {
		id := entry.Name()
		ulid, err := ParseID(id)
		if err != nil {
			continue
		}
		d.mu.Lock()
		_, forgotten := d.tombstones[ulid]
		d.see(ulid)
		d.mu.Unlock()
		if forgotten {
			// Forgotten, and the guest died before its directory was removed.
			if err := d.Remove(id); err != nil {
				return nil, err
			}
			continue
		}
		known[id] = true
		all = append(all, d.found(id, entry.IsDir()))
	}
	return all, d.removeStrays(known)
}

func (d *Directory) found(id string, durable bool) Found {
	f := Found{Record: &guestv1.JobRecord{}}
	path := filepath.Join(d.jobs, id)
	file := path
	if durable {
		file = filepath.Join(path, "job")
	}
	if err := read(file, f.Record); err != nil {
		// A torn write, so the job did not start; but that cannot be told from damage, and starting it might be
		// the second time.
		f.Record = &guestv1.JobRecord{}
	}
	f.Record.JobId, f.Record.Durable = id, durable
	status := &guestv1.Status{}
	if err := read(filepath.Join(path, "status"), status); err == nil && status.GetJobId() == id && status.GetDone() && status.GetOutcome() != nil {
		status.Durable = durable
		f.Status = status
	}
	return f
}

// removeStrays removes the output of jobs that are not known.
func (d *Directory) removeStrays(known map[string]bool) error {
	entries, err := os.ReadDir(d.output)
	if err != nil {
		return fmt.Errorf("read the output directory: %w", err)
	}
	for _, entry := range entries {
		if !known[entry.Name()] {
			if err := d.RemoveOutput(entry.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// OutputDir is where a job's output goes. A durable job's exists; a quick job's is created on demand.
func (d *Directory) OutputDir(id string, durable bool) string {
	if durable {
		return filepath.Join(d.jobs, id)
	}
	return filepath.Join(d.output, id)
}

// Create makes a job's entry, which for a durable job is on disk with its record when it returns.
// ErrExists when it is there; after any other error the job must not be begun.
func (d *Directory) Create(record *guestv1.JobRecord) error {
	if !record.GetDurable() {
		return d.createQuick(filepath.Join(d.jobs, record.GetJobId()))
	}
	dir := filepath.Join(d.jobs, record.GetJobId())
	// gofail: var guestBeforeJobDir struct{}
	// os.Exit(137)

	//mutation:exclusive-entry if err := unix.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
	if err := unix.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return ErrExists
		}
		return fmt.Errorf("make the job's directory: %w", err)
	}
	// gofail: var guestAfterJobDir struct{}
	// os.Exit(137)
	if err := d.writeRecord(dir, record); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	// gofail: var guestAfterRecord struct{}
	// os.Exit(137)
	return nil
}

func (d *Directory) createQuick(path string) error {
	d.mu.Lock()
	link := d.link
	d.mu.Unlock()
	err := unix.Link(link, path)
	if errors.Is(err, unix.EMLINK) {
		d.mu.Lock()
		if d.link == link {
			err = d.newLink()
		}
		link = d.link
		d.mu.Unlock()
		if err == nil || errors.Is(err, unix.EMLINK) {
			err = unix.Link(link, path)
		}
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrExist):
		return ErrExists
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
		return d.createCopy(path) // a file system without links
	}
	return fmt.Errorf("make the job's entry: %w", err)
}

func (d *Directory) createCopy(path string) error {
	err := writeNew(path, d.shared)
	if errors.Is(err, fs.ErrExist) {
		return ErrExists
	}
	return err
}

// writeNew writes a small file that must not exist.
func writeNew(path string, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create a record: %w", err)
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write a record: %w", errors.Join(err, os.Remove(path)))
	}
	return nil
}

func (d *Directory) writeRecord(dir string, record *guestv1.JobRecord) error {
	data, err := proto.Marshal(record)
	if err != nil {
		return fmt.Errorf("encode the job's record: %w", err)
	}
	if err := writeNew(filepath.Join(dir, "status.new"), make([]byte, statusReserve)); err != nil {
		return fmt.Errorf("reserve space for the job's status: %w", err)
	}
	if err := writeSynced(filepath.Join(dir, "job"), data, os.O_CREATE|os.O_EXCL); err != nil {
		return err
	}
	return errors.Join(syncDir(dir), syncDir(d.jobs))
}

// WriteStatus puts a durable job's status on disk before it returns.
func (d *Directory) WriteStatus(status *guestv1.Status) error {
	data, err := proto.Marshal(status)
	if err != nil {
		return fmt.Errorf("encode the job's status: %w", err)
	}
	dir := filepath.Join(d.jobs, status.GetJobId())
	fresh := filepath.Join(dir, "status.new")
	if err := writeSynced(fresh, data, os.O_CREATE); err != nil {
		return err
	}
	// gofail: var guestBeforeStatusRename struct{}
	// os.Exit(137)
	if err := os.Rename(fresh, filepath.Join(dir, "status")); err != nil {
		return fmt.Errorf("rename the job's status into place: %w", err)
	}
	// gofail: var guestAfterStatusRename struct{}
	// os.Exit(137)
	return syncDir(dir)
}

// Remove removes a job's entry, with all that is in it if it is a directory.
func (d *Directory) Remove(id string) error {
	path := filepath.Join(d.jobs, id)
	err := unix.Unlink(path)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
		err = os.RemoveAll(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the job's entry: %w", err)
	}
	return nil
}

// RemoveOutput removes the output of a quick job.
func (d *Directory) RemoveOutput(id string) error {
	if err := os.RemoveAll(filepath.Join(d.output, id)); err != nil {
		return fmt.Errorf("remove the job's output: %w", err)
	}
	return nil
}

func read(path string, message proto.Message) error {
	data, err := regular.Read(path, maxRecord)
	if err != nil {
		return err
	}
	return proto.Unmarshal(data, message)
}

// replace writes a small file so that after a crash it is the old one or the new one.
func replace(path string, data []byte) error {
	fresh := path + ".new"
	if err := writeSynced(fresh, data, os.O_CREATE|os.O_TRUNC); err != nil {
		return err
	}
	err := os.Rename(fresh, path)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, unix.EISDIR) {
		// A directory in its place.
		if err = os.RemoveAll(path); err == nil {
			err = os.Rename(fresh, path)
		}
	}
	if err != nil {
		return fmt.Errorf("rename %s into place: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

// writeSynced makes data the content of a file, on disk, using the blocks that it has.
func writeSynced(path string, data []byte, flags int) error {
	file, err := regular.OpenOwn(path, os.O_WRONLY|flags)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	_, err = file.WriteAt(data, 0)
	if err == nil {
		err = file.Truncate(int64(len(data)))
	}
	if err == nil {
		//mutation:fsync-of-outcome
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	return nil
}
