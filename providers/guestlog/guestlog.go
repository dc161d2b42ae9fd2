// Package guestlog reads what a guest's log says of its end, in words for people. It never shows a stack trace,
// which is for the log, and decides nothing: a provider says in which state a machine is.
package guestlog

import (
	"bufio"
	"io"
	"strings"
	"unicode"
)

const (
	// maxLog bounds what is read of a log, in bytes: a stack trace of all goroutines is shorter.
	maxLog = 1 << 20
	// maxLine bounds a line that is kept, in bytes.
	maxLine = 300
	// program is what the guest begins with when it says why it cannot run.
	program = "berth-guest: "
)

// crashes are how the runtime says why it ends the program, and what that means.
var crashes = []struct{ says, means string }{
	{"failed to create new OS thread", "it could not create a thread: a limit of processes, the machine's (resources.pids) or its host's, is reached"},
	{"out of memory", "it ran out of memory: the machine's (resources.memory_bytes) or its host's is used up"},
	{"cannot allocate memory", "it ran out of memory: the machine's (resources.memory_bytes) or its host's is used up"},
}

// crashPrefixes begin the lines of the runtime that come before its stack trace.
var crashPrefixes = []string{"panic: ", "fatal error: ", "runtime: ", "unexpected fault ", "SIG"}

// Reason returns why a guest ended as the end of its log has it: in one line, empty where the log gives no reason.
// What it reports of its work is none.
func Reason(log io.Reader) string {
	var r reason
	lines := bufio.NewReader(io.LimitReader(log, maxLog))
	for {
		line, err := lines.ReadString('\n')
		r.read(oneLine(line))
		if err != nil {
			return r.words()
		}
	}
}

// oneLine drops what a terminal would act upon: a job may write into its machine's log.
func oneLine(line string) string {
	gap := func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(line, "?"), gap), " ")
}

// reason is what the lines so far say.
type reason struct {
	last   string // the last line that gives a reason
	crash  string // the runtime's own words for a crash
	meant  string // what they mean, where that is known
	traces bool   // a crash was read, whose stack trace goes on to the end of that boot
}

func (r *reason) read(line string) {
	words, fromGuest := strings.CutPrefix(line, program)
	switch {
	case strings.HasPrefix(line, "time="): // a report; also the first of another boot
		*r = reason{}
	case fromGuest:
		*r = reason{last: words}
	case line == "":
	case isCrash(line):
		r.traces = true
		r.note(line)
	case r.traces: // a frame of the stack, a register
	default:
		r.last = line
	}
}

func isCrash(line string) bool {
	for _, prefix := range crashPrefixes {
		if strings.HasPrefix(line, prefix) {
			return true
		}
	}
	return false
}

// note keeps what the first lines of a crash say; a trace has more of them further down.
func (r *reason) note(line string) {
	for _, known := range crashes {
		if r.meant == "" && strings.Contains(line, known.says) {
			r.meant = known.means
		}
	}
	if r.crash == "" || strings.HasPrefix(r.crash, "runtime: ") && strings.HasPrefix(line, "fatal error: ") {
		r.crash = line
	}
}

func (r *reason) words() string {
	switch {
	case r.meant != "":
		return r.meant
	case r.crash != "":
		return cut("it crashed: " + r.crash)
	}
	return cut(r.last)
}

func cut(text string) string {
	if len(text) > maxLine {
		return strings.ToValidUTF8(text[:maxLine], "") + "…"
	}
	return text
}
