package supervise

import (
	"context"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// inputBuffer is what waits for a command that does not read, in bytes, and counts as taken.
	inputBuffer = 1 << 20
	// inputAhead is what an Attach may send beyond that, so that what is not taken yet holds up
	// nothing behind it.
	inputAhead = 1 << 20
	// inputPatience is how long an Input waits for room.
	inputPatience = time.Second
	// inputPiece is written to a command at once, in bytes: the size of a pipe.
	inputPiece = 64 << 10
	// inputMost bounds one piece of input from a caller, in bytes.
	inputMost = 1 << 20
)

// input is a job's stdin. Offsets count from its beginning.
type input struct {
	mu        sync.Mutex
	file      *os.File // our end; nil when there is none, or it was closed
	tty       bool     // file is the terminal, whose other users close it
	queue     [][]byte // came, and was not written yet
	queued    uint64   // bytes of it
	received  uint64   // bytes that came
	ended     bool     // nothing more comes
	broken    bool     // nobody reads it any more: what comes is dropped
	feeding   bool     // a goroutine writes the queue
	lineBegun bool     // the last byte written ended no line
	owner     *attachment
	changed   chan struct{} // closed when something changes, if anyone waits
}

// none makes it a stdin that has ended, after length bytes.
func (in *input) none(length int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.received, in.ended = uint64(length), true
}

// open makes it one that bytes are fed to, of which some were taken already.
func (in *input) open(file *os.File, tty bool, taken int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.file, in.tty, in.received = file, tty, uint64(taken)
}

// preload makes bytes all that ever comes.
func (in *input) preload(s *Supervisor, data []byte) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.take(s, data, uint64(len(data)))
	in.ended = true
	in.feed(s)
}

// takenLocked is how far stdin was taken: by the command, or by the guest for it.
func (in *input) takenLocked() uint64 {
	if in.queued <= inputBuffer {
		return in.received
	}
	return in.received - in.queued + inputBuffer
}

// state returns how far stdin was taken, whether it is closed, and what to wait for.
func (in *input) state() (taken uint64, closed bool, changed <-chan struct{}) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.changed == nil {
		in.changed = make(chan struct{})
	}
	return in.takenLocked(), in.ended || in.broken, in.changed
}

func (in *input) wake() {
	if in.changed != nil {
		close(in.changed)
		in.changed = nil
	}
}

// own takes the input over from whoever had it. What that one sent and was not told to be taken is
// dropped: the new owner goes on where the taken ends.
func (in *input) own(a *attachment) {
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

// disown gives the input up, if it is still a's.
func (in *input) disown(a *attachment) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.owner == a {
		in.owner = nil
	}
}

// allow refuses who does not own the input while another does.
func (in *input) allow(by *attachment) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.allowLocked(by)
}

func (in *input) allowLocked(by *attachment) error {
	if in.owner != by && (in.owner != nil || by != nil && by.owned) {
		return refuse(Precondition, ReasonInputTaken, "the job's input was taken over by another caller")
	}
	return nil
}

// accept takes a piece of input as far as there is room for: limit bytes that wait. It may be called
// again with the same piece for the rest.
func (in *input) accept(s *Supervisor, by *attachment, offset uint64, data []byte, eof bool, limit uint64) (whole bool, err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if err := in.allowLocked(by); err != nil {
		return false, err
	}
	if len(data) > inputMost {
		return false, refuse(Invalid, "", "%d bytes of input at once, at most %d", len(data), inputMost)
	}
	if offset > in.received {
		return false, refuse(Invalid, "", "input at offset %d, but only %d bytes came before it", offset, in.received)
	}
	end := offset + uint64(len(data))
	if end <= in.received {
		data = nil
	} else {
		data = data[in.received-offset:]
	}
	switch {
	case in.broken:
		in.received = max(in.received, end)
		in.ended = in.ended || eof
		return true, nil
	case in.ended:
		if len(data) > 0 {
			return false, refuse(Precondition, ReasonInputClosed, "the job's input ended at offset %d", in.received)
		}
		return true, nil
	case eof && end < in.received:
		return false, refuse(Invalid, "", "input ends at offset %d, but %d bytes came already", end, in.received)
	}
	in.take(s, data, limit)
	whole = end <= in.received
	if whole && eof {
		in.ended = true
		in.feed(s)
	}
	in.wake()
	return whole, nil
}

// take writes what the command takes at once, and queues what there is room for of the rest.
func (in *input) take(s *Supervisor, data []byte, limit uint64) {
	if !in.feeding && len(in.queue) == 0 && len(data) > 0 {
		n := in.writeNow(data)
		in.written(data[:n])
		in.received += uint64(n)
		data = data[n:]
	}
	if room := limit - min(limit, in.queued); uint64(len(data)) > room {
		data = data[:room]
	}
	if len(data) > 0 {
		in.queue = append(in.queue, data)
		in.queued += uint64(len(data))
		in.received += uint64(len(data))
		in.feed(s)
	}
}

// writeNow writes without waiting.
func (in *input) writeNow(data []byte) (n int) {
	conn, err := in.file.SyscallConn()
	if err != nil {
		return 0
	}
	_ = conn.Write(func(fd uintptr) bool {
		n, _ = unix.Write(int(fd), data)
		return true
	})
	return max(n, 0) // the feeding finds out about errors
}

func (in *input) written(data []byte) {
	if len(data) > 0 {
		in.lineBegun = data[len(data)-1] != '\n'
	}
}

// feed makes sure that what is queued, and the end, reach the command.
func (in *input) feed(s *Supervisor) {
	if in.feeding || in.file == nil {
		return
	}
	if in.ended && len(in.queue) == 0 && !in.tty {
		in.closeFile()
		return
	}
	in.feeding = true
	s.work.Go(in.write)
}

// write writes the queue, and the end if it has come, waiting for the command.
func (in *input) write() {
	in.mu.Lock()
	defer in.mu.Unlock()
	for in.file != nil && len(in.queue) > 0 {
		piece := in.queue[0][:min(len(in.queue[0]), inputPiece)]
		n, err := in.writeOut(piece)
		if err != nil {
			// A command that closes its stdin, or ends, does not want the rest.
			in.breakOff()
		} else if len(in.queue) > 0 {
			in.written(piece)
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

// writeOut gives the lock up while it waits.
func (in *input) writeOut(p []byte) (int, error) {
	file := in.file
	in.mu.Unlock()
	defer in.mu.Lock()
	return file.Write(p)
}

func (in *input) closeFile() {
	if in.file != nil && !in.tty {
		_ = in.file.Close()
	}
	in.file = nil
}

// breakOff drops what was not written, and all that will come.
func (in *input) breakOff() {
	in.broken = true
	in.queue, in.queued = nil, 0
	in.closeFile()
}

// abandon breaks the input off when the job is done.
func (in *input) abandon() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.breakOff()
	in.wake()
}

// Input writes to a job's stdin at an offset, as far as there is room.
func (s *Supervisor) Input(ctx context.Context, r *guestv1.InputRequest) (*guestv1.InputResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	over, cancel := wait(inputPatience)
	defer cancel()
	for {
		before, _, changed := j.input.state()
		whole, err := j.input.accept(s, nil, r.GetOffset(), r.GetData(), false, inputBuffer)
		if err != nil {
			return nil, err
		}
		if taken, _, _ := j.input.state(); whole || taken > max(before, r.GetOffset()) {
			return &guestv1.InputResponse{NextOffset: taken}, nil
		}
		select {
		case <-changed:
		case <-over:
			return &guestv1.InputResponse{NextOffset: before}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// CloseInput closes a job's stdin.
func (s *Supervisor) CloseInput(r *guestv1.CloseInputRequest) (*guestv1.CloseInputResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	taken, closed, _ := j.input.state()
	switch {
	case closed:
		return &guestv1.CloseInputResponse{}, nil
	case r.GetOffset() > taken:
		return nil, refuse(Precondition, ReasonInputMissing, "the job's input is to end at offset %d, but only %d bytes were taken", r.GetOffset(), taken)
	}
	if _, err := j.input.accept(s, nil, r.GetOffset(), nil, true, inputBuffer); err != nil {
		return nil, err
	}
	return &guestv1.CloseInputResponse{}, nil
}
