// Package record is the guest's own directory on disk: what makes a job start at most once, and its
// outcome survive. It never holds a command, an environment or any other secret.
//
//	lock                  held by the one guest that uses the directory
//	machine               whose it is
//	forgotten             16 bytes for each durable job that was forgotten: its ULID
//	boot.<n>              JobRecord that the quick jobs of this boot share
//	jobs/<job id>         of a quick job, which is not durable: a hard link to the file above
//	jobs/<job id>/job         of a durable job: JobRecord, before it begins
//	jobs/<job id>/status      Status, once it is done
//	jobs/<job id>/status.new  room for it, so that a full disk cannot lose an outcome
//	jobs/<job id>/stdout.…    its output, see package spool
//	output/<job id>/stdout.…  a quick job's output, if it has more than memory should hold
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
)

const (
	// statusRoom is written ahead for a status, in bytes: several times what one needs.
	statusRoom = 4 << 10
	// forgetAfter is how long a forgotten id is remembered, by the times in the ids: an id that is
	// older than the newest by more is refused as expired. A reservation is started within 24 h.
	forgetAfter = 48 * time.Hour
	// memoryTombstones bounds the forgotten ids of jobs that were not durable, which are in memory
	// only; 16 Ki of them take less than 1 MB.
	memoryTombstones = 16 << 10
	// compactFrom is how many durable ones there are before the file is worth rewriting.
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

	mu        sync.Mutex
	link      string // the file that quick jobs are links to
	links     int    // such files so far
	forgotten *os.File
	size      int64             // of its whole entries, in bytes
	compactAt int               // buried ids at which it is rewritten
	buried    map[ULID]struct{} // forgotten, durably
	recent    map[ULID]struct{} // forgotten, in memory
	ring      []ULID            // recent, in order; next is its oldest once it is full
	next      int
	newest    time.Time // of all ids that were seen
}

// Found is a job that an earlier boot left.
type Found struct {
	Record *guestv1.JobRecord
	Status *guestv1.Status // nil when it never became known
}

// Open locks the directory, making it if it is missing, and wipes what belongs to another machine.
func Open(path, machineID string, generation uint64, bootID string) (*Directory, error) {
	d := &Directory{
		path:   path,
		jobs:   filepath.Join(path, "jobs"),
		output: filepath.Join(path, "output"),
		buried: make(map[ULID]struct{}),
		recent: make(map[ULID]struct{}),
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
	// The records of earlier boots live on in the links to them.
	stale, err := filepath.Glob(filepath.Join(d.path, "boot.*"))
	if err != nil {
		return fmt.Errorf("find the records of earlier boots: %w", err)
	}
	for _, path := range stale {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("remove the record of an earlier boot: %w", err)
		}
	}
	return d.share(generation, bootID)
}

// share makes the record that quick jobs share from now on.
func (d *Directory) share(generation uint64, bootID string) error {
	shared, err := proto.Marshal(&guestv1.JobRecord{Generation: generation, BootId: bootID, AcceptTime: timestamppb.Now()})
	if err != nil {
		return fmt.Errorf("encode the record of this boot: %w", err)
	}
	d.shared = shared
	return d.newLink()
}

// Adopt makes the directory another machine's, or the same one's in another generation. What is in it
// stays. No job may be made meanwhile.
func (d *Directory) Adopt(machineID string, generation uint64, bootID string) error {
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

// Close gives the directory up.
func (d *Directory) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.forgotten.Close(), d.lock.Close())
}

func (d *Directory) acquire() error {
	lock, err := os.OpenFile(filepath.Join(d.path, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
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

// claim makes the directory this machine's.
func (d *Directory) claim(machineID string) error {
	file := filepath.Join(d.path, "machine")
	before, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read whose spool it is: %w", err)
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
		if err := os.MkdirAll(path, 0o700); err != nil {
			return fmt.Errorf("make the jobs' directories: %w", err)
		}
	}
	return nil
}

// newLink makes a file for quick jobs to be links to. A file system bounds the links of a file.
func (d *Directory) newLink() error {
	d.links++
	d.link = filepath.Join(d.path, "boot."+strconv.Itoa(d.links))
	if err := os.WriteFile(d.link, d.shared, 0o600); err != nil {
		return fmt.Errorf("write the record of this boot: %w", err)
	}
	return nil
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
		_, buried := d.buried[ulid]
		d.see(ulid)
		d.mu.Unlock()
		if buried {
			// Forgotten, and the guest died before the directory was gone.
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
		// Torn while it was written, so the job did not begin; but that cannot be told from damage,
		// and to begin it again might be the second time.
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

// OutputDir is where a job's output goes. A durable job's is there; a quick job's is made by who
// needs it.
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
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return ErrExists
	}
	if err != nil {
		return fmt.Errorf("make the job's entry: %w", err)
	}
	_, err = file.Write(d.shared)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write the job's entry: %w", errors.Join(err, os.Remove(path)))
	}
	return nil
}

func (d *Directory) writeRecord(dir string, record *guestv1.JobRecord) error {
	data, err := proto.Marshal(record)
	if err != nil {
		return fmt.Errorf("encode the job's record: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "status.new"), make([]byte, statusRoom), 0o600); err != nil {
		return fmt.Errorf("make room for the job's status: %w", err)
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
		return fmt.Errorf("put the job's status in place: %w", err)
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
	data, err := os.ReadFile(path)
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
	if err := os.Rename(fresh, path); err != nil {
		return fmt.Errorf("put %s in place: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

// writeSynced makes data the content of a file, on disk, using the blocks that it has.
func writeSynced(path string, data []byte, flags int) error {
	file, err := os.OpenFile(path, os.O_WRONLY|flags, 0o600)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	_, err = file.WriteAt(data, 0)
	if err == nil {
		err = file.Truncate(int64(len(data)))
	}
	if err == nil {
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
