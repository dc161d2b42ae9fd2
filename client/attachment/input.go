package attachment

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/client/connection"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// inputWindow holds what was read of a command's standard input and not yet taken by its machine.
type inputWindow struct {
	mu       sync.Mutex
	changed  chan struct{} // closed and renewed at every change
	base     uint64        // offset of buffered's first byte; everything before it was taken
	buffered []byte
	skip     uint64 // bytes that were taken before they were read here: the next ones read are dropped
	ended    bool   // nothing comes behind buffered
	reading  bool   // a Read is under way
	stopped  bool
}

// inputChunk is what can be sent now, or the channel that is closed when that may have changed.
type inputChunk struct {
	offset  uint64
	data    []byte
	eof     bool // input ends after data
	changed <-chan struct{}
}

func newInputWindow() *inputWindow { return &inputWindow{changed: make(chan struct{})} }

// change does something to the window and wakes who waits for that.
func (w *inputWindow) change(how func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	how()
	close(w.changed)
	w.changed = make(chan struct{})
}

// fill reads ahead until r ends or the returned function is called, which waits for everything but a
// Read that blocks. failed is called with an error of r's.
func (w *inputWindow) fill(r io.Reader, failed func(error)) (stop func()) {
	over := make(chan struct{})
	go func() {
		defer close(over)
		if err := w.readAhead(r); err != nil {
			failed(err)
		}
	}()
	return func() {
		var reading bool
		w.change(func() { w.stopped, reading = true, w.reading })
		if !reading {
			<-over
		}
	}
}

func (w *inputWindow) readAhead(r io.Reader) error {
	chunk := make([]byte, inputChunkBytes)
	for {
		space := w.waitForSpace()
		if space == 0 {
			return nil
		}
		n, err := r.Read(chunk[:min(space, len(chunk))])
		var stopped bool
		w.change(func() {
			w.reading, stopped = false, w.stopped
			w.add(chunk[:max(n, 0)])
			w.ended = errors.Is(err, io.EOF)
		})
		switch {
		case stopped, errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// waitForSpace returns how much may be read now, and notes that it is; zero when filling is over.
func (w *inputWindow) waitForSpace() int {
	for {
		w.mu.Lock()
		space, changed, stopped := inputWindowBytes-len(w.buffered), w.changed, w.stopped
		w.reading = !stopped && space > 0
		w.mu.Unlock()
		switch {
		case stopped:
			return 0
		case space > 0:
			return space
		}
		<-changed
	}
}

// add puts read bytes behind the buffered ones, but those that were taken already. Chunks that were
// handed out stay as they are: buffered only ever grows at its end and shrinks at its beginning.
func (w *inputWindow) add(data []byte) {
	known := min(w.skip, uint64(len(data)))
	w.skip -= known
	w.buffered = append(w.buffered, data[known:]...)
}

// from is what is to be sent when everything before an offset was sent.
func (w *inputWindow) from(sent uint64) inputChunk {
	w.mu.Lock()
	defer w.mu.Unlock()
	sent = max(sent, w.base)
	rest := w.buffered[min(sent-w.base, uint64(len(w.buffered))):]
	data := rest[:min(len(rest), inputChunkBytes)]
	return inputChunk{
		offset: sent, data: data, changed: w.changed,
		eof: w.ended && len(data) == len(rest),
	}
}

// taken notes that everything before an offset was taken, and returns from where on nothing is known to
// be: an older report does not undo a newer one.
func (w *inputWindow) taken(offset uint64) uint64 {
	var base uint64
	w.change(func() {
		if offset > w.base {
			n := offset - w.base
			w.skip += n - min(n, uint64(len(w.buffered)))
			w.buffered = w.buffered[min(n, uint64(len(w.buffered))):]
			w.base = offset
		}
		base = w.base
	})
	return base
}

// beginAt makes an offset that of the first byte; nothing was sent yet.
func (w *inputWindow) beginAt(offset uint64) {
	w.change(func() { w.base = offset })
}

// Feed writes what r holds to a job's standard input from an offset on, and closes that at r's end if
// thenClose. It returns the offset behind the last byte that the job's machine has taken, also beside an
// error: the same bytes may be fed again from the same offset, what was taken is not taken twice. It
// outlasts restarts of the broker, and waits for a job that does not read. Errors: JOB_NOT_FOUND,
// WRONG_STATE, r's own, *UnreachableError, ctx's end.
func Feed(ctx context.Context, c *connection.Conn, jobID string, offset uint64, r io.Reader, thenClose bool) (uint64, error) {
	buffer := make([]byte, inputWindowBytes)
	for {
		n, err := r.Read(buffer)
		over := errors.Is(err, io.EOF)
		if n > 0 || over && thenClose {
			next, err := feedChunk(ctx, c, &berthv1.WriteJobInputRequest{
				JobId: jobID, Position: &berthv1.WriteJobInputRequest_Offset{Offset: offset}, Data: buffer[:n], Eof: over && thenClose,
			})
			offset = next
			if err != nil {
				return offset, err
			}
		}
		switch {
		case over:
			return offset, nil
		case err != nil:
			return offset, fmt.Errorf("reading the input for %s: %w", jobID, err)
		}
	}
}

// feedChunk writes one chunk until all of it was taken.
func feedChunk(ctx context.Context, c *connection.Conn, request *berthv1.WriteJobInputRequest) (uint64, error) {
	end := request.GetOffset() + uint64(len(request.GetData()))
	for idle := 0; ; idle++ {
		begun := time.Now()
		reply, err := c.Jobs().WriteJobInput(ctx, request)
		switch next := reply.GetNextOffset(); {
		case err != nil && !c.KeepWaiting(ctx, err):
			return request.GetOffset(), err
		case err != nil:
		case next >= end:
			return end, nil
		case next > request.GetOffset():
			request.Data = request.GetData()[next-request.GetOffset():]
			request.Position, idle = &berthv1.WriteJobInputRequest_Offset{Offset: next}, -1
			continue
		case time.Since(begun) >= time.Second:
			idle = -1 // it waited for the job to read: ask again at once
			continue
		}
		if !connection.Pause(ctx, connection.BackoffFor(idle, err)) {
			return request.GetOffset(), connection.EndedWhile(ctx, "feeding "+request.GetJobId())
		}
	}
}

// Append writes what r holds to a job's standard input, behind all that was written before, and closes that at
// r's end if thenClose. Each piece that r gives, up to 1 MiB, is written as a whole and once, whoever else
// appends. It outlasts restarts of the broker, and waits for a job that does not read. Errors: as Feed.
func Append(ctx context.Context, c *connection.Conn, jobID string, r io.Reader, thenClose bool) error {
	buffer := make([]byte, inputWindowBytes)
	for {
		n, err := r.Read(buffer)
		over := errors.Is(err, io.EOF)
		if n > 0 || over && thenClose {
			if err := appendChunk(ctx, c, jobID, buffer[:n], over && thenClose); err != nil {
				return err
			}
		}
		switch {
		case over:
			return nil
		case err != nil:
			return fmt.Errorf("reading the input for %s: %w", jobID, err)
		}
	}
}

// appendChunk appends one chunk, once: a lost answer is asked for again under the same id.
func appendChunk(ctx context.Context, c *connection.Conn, jobID string, data []byte, eof bool) error {
	request := &berthv1.WriteJobInputRequest{RequestId: connection.NewRequestID(), JobId: jobID, Data: data, Eof: eof}
	for idle := 0; ; idle++ {
		begun := time.Now()
		reply, err := c.Jobs().WriteJobInput(ctx, request)
		switch {
		case err != nil && !c.KeepWaiting(ctx, err):
			return err
		case err != nil:
		case len(data) == 0 || reply.GetNextOffset() > reply.GetOffset():
			return nil
		case time.Since(begun) >= time.Second:
			idle = -1 // it waited for the job to read: ask again at once
			continue
		}
		if !connection.Pause(ctx, connection.BackoffFor(idle, err)) {
			return connection.EndedWhile(ctx, "feeding "+jobID)
		}
	}
}

// InputOffset returns how far a job's standard input was taken: where Feed continues. Errors:
// JOB_NOT_FOUND, WRONG_STATE for a job that is over, *UnreachableError, ctx's end.
func InputOffset(ctx context.Context, c *connection.Conn, jobID string) (uint64, error) {
	for idle := 0; ; idle++ {
		// Without data and eof it writes nothing and only answers.
		reply, err := c.Jobs().WriteJobInput(ctx, &berthv1.WriteJobInputRequest{JobId: jobID})
		if err == nil || !c.KeepWaiting(ctx, err) {
			return reply.GetNextOffset(), err
		}
		if !connection.Pause(ctx, connection.BackoffFor(idle, err)) {
			return 0, connection.EndedWhile(ctx, "asking how far the input of "+jobID+" was taken")
		}
	}
}
