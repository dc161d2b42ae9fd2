package store

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
)

const (
	// maxReserveBytes is what is kept for urgent changes, in the ledger and once more beside it: some thousand
	// pages, of which ending a job or a sandbox takes about ten.
	maxReserveBytes = 2 << 20
	// reserveShare is the part of the file system that the reserve takes at most, for small ones.
	reserveShare = 16
	// spareMargin is how many times the size of the spare file must be free for it to be made again: whoever it was
	// given up for needs the space first. Where that fails all the same, it is tried again after spareInterval.
	spareMargin   = 4
	spareInterval = 10 * time.Second
	// spareNeed is less than which nothing can be counted on to be written, and the last part of the spare.
	spareNeed = 64 << 10
)

// reserve keeps blocks of the file system for urgent changes, so that a full disk never keeps somebody from
// ending what fills it. A part is in the ledger itself, behind its last page, where nobody else can take it: bbolt
// alone would grow the file sparsely and need blocks for every page. The spare lies beside the ledger. Only the
// writer uses a reserve, except for its spare.
type reserve struct {
	file      *os.File // the ledger
	log       *slog.Logger
	bytes     int64 // how much is kept
	allocated int64 // how much of the ledger has blocks, as far as is known
	spare     spare

	// low says that so much is not there: only urgent changes are written.
	low bool
}

// allocate is fallocate(2); tests replace it.
var allocate = syscall.Fallocate

func newReserve(ledger *os.File, path string, log *slog.Logger) *reserve {
	bytes := int64(maxReserveBytes)
	if total, _, err := space(path); err == nil {
		bytes = min(bytes, total/reserveShare)
	}
	r := &reserve{file: ledger, log: log, bytes: bytes}
	r.spare = spare{path: path + ".reserve", bytes: bytes}
	if info, err := os.Stat(r.spare.path); err == nil {
		r.spare.given = info.Size() < bytes
	}
	return r
}

// keep makes sure of the reserve behind the used bytes of the ledger, of which free can be used again.
func (r *reserve) keep(used, free int64) {
	if r.spare.missing() {
		r.set(true) // what is free is for whom it was given up for
		return
	}
	if used+r.bytes <= r.allocated+free {
		r.set(false)
		return
	}
	// Twice as much, so that not every new page asks for more.
	for _, to := range []int64{used + 2*r.bytes, used + r.bytes} {
		switch err := r.extend(to); {
		case err == nil:
			r.set(false)
			return
		case !full(err):
			r.set(false) // a file system that reserves nothing: it is found out by writing
			return
		}
	}
	r.set(true)
}

// keepReserve makes sure of the reserve as a transaction finds the ledger.
func (s *Store) keepReserve(tx *Tx) {
	s.reserve.spare.make(s.now())
	stats := s.db.Stats()
	s.reserve.keep(tx.bolt.Size(), int64(stats.FreePageN+stats.PendingPageN)*s.pageSize)
}

// extend gives the ledger blocks up to a length, holes in it included.
func (r *reserve) extend(to int64) error {
	for {
		err := allocate(int(r.file.Fd()), 0, r.allocated, to-r.allocated)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err == nil {
			err = r.file.Sync()
		}
		if err == nil {
			r.allocated = to
		}
		return err
	}
}

func (r *reserve) set(low bool) {
	switch {
	case low && !r.low:
		r.log.Warn("the disk is full: only what ends jobs and sandboxes is still written; free disk space", "ledger", r.file.Name())
	case !low && r.low:
		r.log.Info("there is disk space again", "ledger", r.file.Name())
	}
	//mutation:reserve r.low = false
	r.low = low
}

// errFull is what a change that is not urgent gets while the reserve is all that is left.
func (s *Store) errFull(cause error) error {
	return fault.New(fault.StoreFull, "write the ledger %s: %w: free disk space and try again", s.path, cause)
}

// spare is a file that holds disk space, and is given up for what else an end needs: a guest on the same disk writes
// down how its job ended, and some file systems need new blocks even to overwrite old ones.
type spare struct {
	mu    sync.Mutex
	path  string
	bytes int64
	made  bool
	given bool      // it was given up, and is not there again
	next  time.Time // it is not made before
}

// missing reports whether it was given up and is not there again.
func (p *spare) missing() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.given
}

// make makes the file where that leaves enough space. It is as good as it gets: without it the ledger's own reserve is
// still there.
func (p *spare) make(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.made || now.Before(p.next) {
		return
	}
	if _, free, err := space(p.path); err != nil || free < spareMargin*p.bytes {
		return
	}
	// Written, not allocated: not every file system can do that.
	if err := os.WriteFile(p.path, make([]byte, p.bytes), 0o600); err != nil {
		_ = os.Truncate(p.path, 0)
		p.next = now.Add(spareInterval)
		return
	}
	p.made, p.given = true, false
}

// giveUp gives half of the file's space back, and reports whether there was any: what fills the disk may live for some
// time yet and take what is given up first.
func (p *spare) giveUp() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made, p.given = false, p.made || p.given
	info, err := os.Stat(p.path)
	if err != nil || info.Size() == 0 {
		return false
	}
	left := info.Size() / 2
	if left < spareNeed {
		left = 0
	}
	// Truncating needs no new block, also where removing a name does.
	return os.Truncate(p.path, left) == nil
}

// GiveWay gives up a part of the reserve for who ends something and writes that elsewhere on the same disk, as a guest
// does, if there is next to no space left. It may be called again until there is.
func (s *Store) GiveWay() {
	if _, free, err := space(s.path); err == nil && free < spareNeed {
		s.giveUp()
	}
}

func (s *Store) giveUp() bool {
	given := s.reserve.spare.giveUp()
	if given {
		s.log.Warn("the disk is full: space held in reserve is given up for what is being ended; free disk space", "reserve", s.reserve.spare.path)
	}
	return given
}

// space returns the size of the file system that a path's directory is on, and what may still be taken of it, in
// bytes.
func space(path string) (total, free int64, err error) {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(filepath.Dir(path), &stat); err != nil {
		return 0, 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(stat.Blocks) * stat.Bsize, int64(stat.Bavail) * stat.Bsize, nil
}
