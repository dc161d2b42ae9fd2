package stdio

import (
	"errors"
	"math"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers/guest/buffer"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

const (
	// firstRead is the most that the first read of a pipe takes, in bytes: most commands write less.
	firstRead = 4 << 10
	// pipeBytes is the usual size of a pipe. One that its command fills is enlarged to largePipeBytes.
	pipeBytes      = 64 << 10
	largePipeBytes = 1 << 20
	// maxLargeReads bounds the reads at once that take more than pipeBytes.
	maxLargeReads = 8
	// reopenInterval is between probes of a terminal that no process has open while its leader runs.
	reopenInterval = 50 * time.Millisecond
)

var largeReads = make(chan struct{}, maxLargeReads)

// Outlet is our end of one output pipe, or of a terminal.
type Outlet struct {
	File     *os.File // nil when there is none
	terminal bool
	last     atomic.Int64 // when bytes were last read, in nanoseconds since 1970
	busy     atomic.Bool  // bytes are being read and spooled
}

// Open takes our end of the numbered output, 0 for stdout and 1 for stderr, if there is one.
func (o *Outlet) Open(ends *Ends, number int) bool {
	fd := ends.outputs[number]
	if fd == noFile {
		return false
	}
	o.File, o.terminal = os.NewFile(uintptr(fd), [2]string{"stdout", "stderr"}[number]), ends.Terminal
	return true
}

// ReadInto spools the output until its end, calling grew after each append, and closes the file. It has a
// buffer only while there is something in the pipe. exiting is closed when the leader of a job with a
// terminal has ended.
func (o *Outlet) ReadInto(stream *spool.Stream, exiting <-chan struct{}, grew func()) {
	defer func() { _ = o.File.Close() }()
	conn, err := o.File.SyscallConn()
	if err != nil {
		return
	}
	r := &outletReader{outlet: o, stream: stream, grew: grew, size: firstRead}
	for !r.ended {
		if err := conn.Read(r.take); err != nil {
			return // closed under us: the job was killed
		}
		if r.unused {
			r.unused = false
			r.ended = r.ended || !awaitReopen(exiting)
		}
	}
}

type outletReader struct {
	outlet *Outlet
	stream *spool.Stream
	grew   func()
	size   int // of the next read
	ended  bool
	unused bool // a terminal that no process has open
}

// take reads what there is, and returns false when it should be called again once there is more.
func (r *outletReader) take(fd uintptr) bool {
	outlet := r.outlet
	// From before the bytes leave the pipe until they are spooled: see Quiet.
	//mutation:busy-outlet
	outlet.busy.Store(true)
	defer outlet.busy.Store(false)
	for {
		// Before there is a buffer, since this may wait for a reader.
		r.stream.Pace(r.size)
		n, err := r.read(int(fd))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return false
		case errors.Is(err, unix.EIO) && outlet.terminal:
			r.unused = true
			return true
		case err != nil || n == 0:
			r.ended = true
			return true
		}
		r.grew()
	}
}

// read spools what one read returns. The buffer is as large as the reads before suggest.
func (r *outletReader) read(fd int) (n int, err error) {
	size := r.size
	if size > pipeBytes {
		select {
		case largeReads <- struct{}{}:
			defer func() { <-largeReads }()
		default:
			size = pipeBytes
		}
	}
	b := buffer.Get(size)
	defer buffer.Put(b)
	n, err = unix.Read(fd, *b)
	if err != nil || n == 0 {
		return n, err
	}
	now := time.Now()
	r.stream.Append((*b)[:n], now)
	r.outlet.Touch(now)
	switch {
	case n < len(*b):
		r.size = max(n, firstRead)
	case r.size < pipeBytes:
		r.size = pipeBytes
	case r.size == pipeBytes:
		// A command that fills its pipe gets a larger one; most never do.
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, largePipeBytes)
		r.size = buffer.Max
	}
	return n, nil
}

// awaitReopen waits a moment and says whether a terminal that no process has open may come into use again:
// while the leader runs, which may open it by name. Closing our end before that would hang up on a leader
// that closes its files and then exits.
func awaitReopen(exiting <-chan struct{}) bool {
	select {
	case <-exiting:
		return false
	default:
	}
	pause := time.NewTimer(reopenInterval)
	defer pause.Stop()
	select {
	case <-exiting: // its last output is still to be read
	case <-pause.C:
	}
	return true
}

// Touch notes that output was read at a time.
func (o *Outlet) Touch(when time.Time) { o.last.Store(when.UnixNano()) }

// Quiet returns for how long nothing was read, 0 while something is on its way: bytes, or the end, which a
// busy or frozen machine has not read yet.
func (o *Outlet) Quiet(now time.Time) time.Duration {
	if o.File == nil {
		return math.MaxInt64
	}
	// The pipe first, and then whether its bytes are being spooled: the other way round they could move on
	// in between and be seen in neither place.
	pending := false
	if conn, err := o.File.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			pending = err == nil && n > 0 || hungUp(fd)
		})
	}
	if pending || o.busy.Load() {
		return 0
	}
	return now.Sub(time.Unix(0, o.last.Load()))
}

// hungUp says whether nobody has the other end of a pipe or terminal open.
func hungUp(fd uintptr) bool {
	poll := []unix.PollFd{{Fd: int32(fd)}}
	_, err := unix.Poll(poll, 0)
	return err == nil && poll[0].Revents&unix.POLLHUP != 0
}
