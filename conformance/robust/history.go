package robust

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"
)

// Kind says what an event is.
type Kind string

// The kinds of events.
const (
	KindSeed    Kind = "seed"    // the first: what the run was made from
	KindCall    Kind = "call"    // one try of one call, with what it was answered
	KindKill    Kind = "kill"    // the broker was killed; End is when it answered again
	KindPause   Kind = "pause"   // the broker was stopped by a signal, and let go on at End
	KindDisturb Kind = "disturb" // a guest or a machine was killed, stopped or taken away, on purpose
	KindFault   Kind = "fault"   // the provider's script of faults was changed
	KindQuiet   Kind = "quiet"   // everything was let come to rest and looked at
	KindStarts  Kind = "starts"  // how often the command of a token began, counted by itself
	KindProblem Kind = "problem" // something that must not be, seen at once
)

// What a call came to, beside a Reason of the API without its prefix.
const (
	ResultOK      = "OK"
	ResultUnknown = "?" // no answer of the broker: what was asked may have been done or not
)

// Event is one line of a history. Times are nanoseconds since the history began, by the monotonic
// clock. Fields that do not apply are absent.
type Event struct {
	Kind      Kind     `json:"kind"`
	Begin     int64    `json:"begin"`
	End       int64    `json:"end,omitempty"`
	Client    int      `json:"client,omitempty"` // from 1 on; 0 is the suite itself
	Op        string   `json:"op,omitempty"`     // the call's name, or what was done
	RequestID string   `json:"request_id,omitempty"`
	Body      string   `json:"body,omitempty"`   // tells the bodies under one request id apart
	Token     string   `json:"token,omitempty"`  // of the command that the call is to start
	Result    string   `json:"result,omitempty"` // ResultOK, ResultUnknown or a reason
	Error     string   `json:"error,omitempty"`
	ID        string   `json:"id,omitempty"` // what the call made or acted on: the request id's result
	Sandbox   string   `json:"sandbox,omitempty"`
	State     string   `json:"state,omitempty"` // of the sandbox
	Machine   string   `json:"machine,omitempty"`
	Jobs      []Job    `json:"jobs,omitempty"`   // as the reply showed them
	Chunks    []Chunk  `json:"chunks,omitempty"` // bytes of output that the reply held, in their order
	Whole     bool     `json:"whole,omitempty"`  // the chunks are all that there is of the job's output
	Count     int      `json:"count,omitempty"`  // of a token's starts
	Sent      uint64   `json:"sent,omitempty"`   // the end of the input that the call sent
	Taken     uint64   `json:"taken,omitempty"`  // up to where the job has taken its input, as the reply says
	Plan      *Plan    `json:"plan,omitempty"`   // of the command that the call is to start
	Seed      uint64   `json:"seed,omitempty"`
	Provider  string   `json:"provider,omitempty"`
	Notes     []string `json:"notes,omitempty"`
}

// Job is a job as a reply showed it.
type Job struct {
	ID      string `json:"id"`
	Sandbox string `json:"sandbox"`
	Machine string `json:"machine"`
	// Generation is the machine's that it belongs to.
	Generation uint64 `json:"generation"`
	Token      string `json:"token,omitempty"` // from its label
	State      string `json:"state"`
	Cause      string `json:"cause,omitempty"` // of its outcome, absent until it has one
	Code       *int32 `json:"code,omitempty"`  // its exit code, absent where there is none
	Signal     uint32 `json:"signal,omitempty"`
	Reason     string `json:"reason,omitempty"`
	Kept       bool   `json:"kept,omitempty"` // the receipt keeps its output
}

// Chunk is a run of bytes of one stream, by their checksum.
type Chunk struct {
	Job    string `json:"job,omitempty"` // absent: of the event's only job
	Stderr bool   `json:"stderr,omitempty"`
	Offset uint64 `json:"offset"`
	Bytes  uint64 `json:"bytes"`
	Sum    uint32 `json:"sum"`           // CRC-32, Castagnoli
	Gap    bool   `json:"gap,omitempty"` // the bytes were said to be dropped
}

// History gathers events in the order in which they ended, and writes each to a file of JSON lines at
// once, so that a run that is ended has its history too. It is safe for concurrent use.
type History struct {
	began time.Time
	path  string

	mu     sync.Mutex
	file   *os.File
	out    *bufio.Writer
	events []Event
	failed error
}

// NewHistory makes a history whose file is at path.
func NewHistory(path string) (*History, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("making the history's file: %w", err)
	}
	return &History{began: time.Now(), path: path, file: file, out: bufio.NewWriter(file)}, nil
}

// Path is the file's.
func (h *History) Path() string { return h.path }

// Now is the time in a history's terms.
func (h *History) Now() int64 { return int64(time.Since(h.began)) }

// Add adds an event; without an End it ends now.
func (h *History) Add(e Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if e.End == 0 {
		e.End = h.Now()
	}
	h.events = append(h.events, e)
	line, err := json.Marshal(e)
	if err == nil {
		_, err = h.out.Write(append(line, '\n'))
	}
	if err == nil {
		err = h.out.Flush()
	}
	if err != nil && h.failed == nil {
		h.failed = fmt.Errorf("writing the history: %w", err)
	}
}

// Events returns what there is so far.
func (h *History) Events() []Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Event(nil), h.events...)
}

// Close ends the file, and says whether all of it was written.
func (h *History) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.file.Close(); h.failed == nil && err != nil {
		h.failed = err
	}
	return h.failed
}

// ReadHistory reads the events of a history's file.
func ReadHistory(path string) ([]Event, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading a history: %w", err)
	}
	var events []Event
	decoder := json.NewDecoder(bytes.NewReader(data))
	for decoder.More() {
		var e Event
		if err := decoder.Decode(&e); err != nil {
			return events, fmt.Errorf("reading a history: event %d: %w", len(events)+1, err)
		}
		events = append(events, e)
	}
	return events, nil
}
