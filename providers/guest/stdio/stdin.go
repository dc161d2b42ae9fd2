package stdio

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/clock"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

const (
	// StdinBuffer is how much is queued for a command that does not read, in bytes, and counts as taken.
	StdinBuffer = 1 << 20
	// StdinAhead is what an attached caller may send beyond that, so that input which is not taken yet
	// does not hold up the messages behind it.
	StdinAhead = 1 << 20
	// stdinWrite is written to a command at once, in bytes: the size of a pipe.
	stdinWrite = 64 << 10
	// maxStdinMessage bounds one message of input from a caller, in bytes.
	maxStdinMessage = 1 << 20
	// maxAppends is how many of a job's newest appends are known when they are repeated: more than a caller
	// that lost its answer can have missed, at less than 50 KiB.
	maxAppends = 256
)

// Feeder is an attached caller that may send input. Its address is its identity.
type Feeder struct {
	Exclusive bool // it took, or had taken, the input for itself
}

// Stdin is a job's standard input. Offsets count from its beginning.
type Stdin struct {
	work      *clock.Work
	mu        sync.Mutex
	file      *os.File // our end; nil when there is none, or it was closed
	tty       bool     // file is the terminal, whose other users close it
	queue     [][]byte // received and not yet written
	queued    uint64   // bytes of it
	received  uint64   // bytes received
	ended     bool     // no more will be received
	broken    bool     // the command no longer reads: what is received is dropped
	feeding   bool     // a goroutine writes the queue
	lineBegun bool     // the last byte written ended no line
	owner     *Feeder
	appends   []appended    // the newest, oldest first
	changed   chan struct{} // closed when something changes, if anyone waits
}

// appended is an append that was done.
type appended struct {
	id     string
	offset uint64 // of its first byte
}

// Connect gives a command its stdin: the given bytes, which need no goroutine and no poller when the pipe
// takes them at once, or an open one. terminal is our end of the job's terminal, if it has one.
func (in *Stdin) Connect(work *clock.Work, ends *Ends, terminal *os.File, spec *berthv1.Stdin) {
	in.work = work
	data := spec.GetData()
	_, given := spec.GetSource().(*berthv1.Stdin_Data)
	switch {
	case ends.Terminal:
		in.open(terminal, true, 0)
	case spec.GetOpen():
		in.open(os.NewFile(uintptr(ends.stdin), "stdin"), false, 0)
		return
	case ends.stdin == noFile:
		in.End(0)
		return
	default:
		n, _ := unix.Write(ends.stdin, data)
		n = max(n, 0)
		if n == len(data) {
			in.End(n)
			_ = unix.Close(ends.stdin)
			return
		}
		in.open(os.NewFile(uintptr(ends.stdin), "stdin"), false, n)
		data = data[n:]
	}
	if given {
		in.preload(data)
	}
}

// End makes it a stdin that has ended after length bytes.
func (in *Stdin) End(length int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.received, in.ended = uint64(length), true
}

// open connects it to our end of a pipe or terminal, to which some bytes were written already.
func (in *Stdin) open(file *os.File, tty bool, taken int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.file, in.tty, in.received = file, tty, uint64(taken)
}

// preload queues all the input that there will be.
func (in *Stdin) preload(data []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.take(data, uint64(len(data)))
	in.ended = true
	in.feed()
}

// takenLocked returns the offset up to which stdin was taken, by the command or by the guest for it.
func (in *Stdin) takenLocked() uint64 {
	if in.queued <= StdinBuffer {
		return in.received
	}
	return in.received - in.queued + StdinBuffer
}

// State returns the offset up to which stdin was taken, whether it is closed, and a channel that is closed
// at the next change.
func (in *Stdin) State() (taken uint64, closed bool, changed <-chan struct{}) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.changed == nil {
		in.changed = make(chan struct{})
	}
	return in.takenLocked(), in.ended || in.broken, in.changed
}

func (in *Stdin) wake() {
	if in.changed != nil {
		close(in.changed)
		in.changed = nil
	}
}

// Own takes the input over from its owner. What that one sent and was not acknowledged is dropped: the new
// owner continues at the acknowledged offset.
func (in *Stdin) Own(a *Feeder) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.owner = a
	for excess := in.received - in.takenLocked(); excess > 0; {
		last := len(in.queue) - 1
		cut := min(excess, uint64(len(in.queue[last])))
		in.queue[last] = in.queue[last][:uint64(len(in.queue[last]))-cut]
		if len(in.queue[last]) == 0 {
			in.queue = in.queue[:last]
		}
		in.queued -= cut
		in.received -= cut
		excess -= cut
		in.ended = false
	}
	in.wake()
}

// Disown releases the input, if it is still a's.
func (in *Stdin) Disown(a *Feeder) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.owner == a {
		in.owner = nil
	}
}

// Allow refuses a caller that does not own the input while another does, or that lost it. nil is a caller
// that is not attached.
func (in *Stdin) Allow(by *Feeder) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.allowLocked(by)
}

func (in *Stdin) allowLocked(by *Feeder) error {
	if in.owner != by && (in.owner != nil || by != nil && by.Exclusive) {
		return refusal.New(refusal.Precondition, refusal.ReasonInputTaken, "the job's input was taken over by another caller")
	}
	return nil
}

// Accept takes as much of data as fits into limit queued bytes. It may be called again with the same data
// for the rest.
func (in *Stdin) Accept(by *Feeder, offset uint64, data []byte, eof bool, limit uint64) (whole bool, err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if err := in.allowLocked(by); err != nil {
		return false, err
	}
	if len(data) > maxStdinMessage {
		return false, refusal.New(refusal.Invalid, "", "%d bytes of input at once, at most %d", len(data), maxStdinMessage)
	}
	if offset > in.received {
		return false, refusal.New(refusal.Invalid, "", "input at offset %d, but only %d bytes were received before it", offset, in.received)
	}
	end := offset + uint64(len(data))
	if end <= in.received {
		data = nil
	} else {
		//mutation:input-offset data = data[:]
		data = data[in.received-offset:]
	}
	switch {
	case in.broken:
		in.received = max(in.received, end)
		in.ended = in.ended || eof
		return true, nil
	case in.ended:
		if len(data) > 0 {
			return false, refusal.New(refusal.Precondition, refusal.ReasonInputClosed, "the job's input ended at offset %d", in.received)
		}
		return true, nil
	case eof && end < in.received:
		return false, refusal.New(refusal.Invalid, "", "input ends at offset %d, but %d bytes were received already", end, in.received)
	}
	in.take(data, limit)
	whole = end <= in.received
	if whole && eof {
		in.ended = true
		in.feed()
	}
	in.wake()
	return whole, nil
}

// Append takes data behind what was received, all of it or, where it has no room, nothing. It returns where
// data begins. An id that is not empty and was given before takes nothing and is answered as it was.
func (in *Stdin) Append(id string, data []byte, eof bool) (offset uint64, whole bool, err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, done := range in.appends {
		if id != "" && done.id == id {
			return done.offset, true, nil
		}
	}
	if err := in.allowLocked(nil); err != nil {
		return 0, false, err
	}
	offset = in.received
	switch {
	case len(data) > maxStdinMessage:
		return 0, false, refusal.New(refusal.Invalid, "", "%d bytes of input at once, at most %d", len(data), maxStdinMessage)
	case in.ended && len(data) > 0:
		return 0, false, refusal.New(refusal.Precondition, refusal.ReasonInputClosed, "the job's input ended at offset %d", in.received)
	case in.broken:
		in.received += uint64(len(data)) // the command reads no more: it is dropped
		in.ended = in.ended || eof
	case in.queued+uint64(len(data)) > StdinBuffer:
		return offset, false, nil
	default:
		in.take(data, StdinBuffer)
		if eof {
			in.ended = true
			in.feed()
		}
	}
	in.noteAppend(id, offset)
	in.wake()
	return offset, true, nil
}

func (in *Stdin) noteAppend(id string, offset uint64) {
	if id == "" {
		return
	}
	if len(in.appends) == maxAppends {
		in.appends = in.appends[:copy(in.appends, in.appends[1:])]
	}
	in.appends = append(in.appends, appended{id, offset})
}

// take writes what the pipe takes without waiting and queues as much of the rest as fits.
func (in *Stdin) take(data []byte, limit uint64) {
	if !in.feeding && len(in.queue) == 0 && len(data) > 0 {
		n := in.writeNow(data)
		in.written(data[:n])
		in.received += uint64(n)
		data = data[n:]
	}
	if free := limit - min(limit, in.queued); uint64(len(data)) > free {
		data = data[:free]
	}
	if len(data) > 0 {
		in.queue = append(in.queue, data)
		in.queued += uint64(len(data))
		in.received += uint64(len(data))
		in.feed()
	}
}

// writeNow writes without waiting.
func (in *Stdin) writeNow(data []byte) (n int) {
	conn, err := in.file.SyscallConn()
	if err != nil {
		return 0
	}
	_ = conn.Write(func(fd uintptr) bool {
		n, _ = unix.Write(int(fd), data)
		return true
	})
	return max(n, 0) // the writer goroutine meets the error
}

func (in *Stdin) written(data []byte) {
	if len(data) > 0 {
		in.lineBegun = data[len(data)-1] != '\n'
	}
}

// feed starts the goroutine that writes the queue and the end, if one is needed.
func (in *Stdin) feed() {
	if in.feeding || in.file == nil {
		return
	}
	if in.ended && len(in.queue) == 0 && !in.tty {
		in.closeFile()
		return
	}
	in.feeding = true
	in.work.Go(in.write)
}

// write writes the queue, and the end if it was received, waiting for the command.
func (in *Stdin) write() {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.file != nil && len(in.queue) > 0 {
		chunk := in.queue[0][:min(len(in.queue[0]), stdinWrite)]
		n, err := in.writeOut(chunk)
		if err != nil {
			// A command that closes its stdin, or ends, does not want the rest.
			in.breakOff()
		} else if len(in.queue) > 0 {
			in.written(chunk)
			in.queue[0] = in.queue[0][n:]
			if len(in.queue[0]) == 0 {
				in.queue = in.queue[1:]
			}
			in.queued -= uint64(n)
		}
		in.wake()
	}
	if in.ended && in.file != nil && in.tty {
		_, _ = in.writeOut(endsOfFile(in.file, in.lineBegun))
	}
	if in.ended {
		in.closeFile()
	}
	in.feeding = false
}

// writeOut releases the lock while it waits.
func (in *Stdin) writeOut(p []byte) (int, error) {
	file := in.file
	in.mu.Unlock()
	defer in.mu.Lock()
	return file.Write(p)
}

func (in *Stdin) closeFile() {
	if in.file != nil && !in.tty {
		_ = in.file.Close()
	}
	in.file = nil
}

// breakOff drops what was not written and all that is received later.
func (in *Stdin) breakOff() {
	in.broken = true
	in.queue, in.queued = nil, 0
	in.closeFile()
}

// Abandon drops the rest of the input when the job is done.
func (in *Stdin) Abandon() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.breakOff()
	in.wake()
}
