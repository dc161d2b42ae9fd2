package guestlog_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/berth-sandbox/berth/providers/guestlog"
)

const (
	report = "time=2026-12-01T12:24:44.033Z level=INFO msg=\"the guest is up\" machine=m_1\n"

	// What Go prints, shortened.
	noThread = `runtime: failed to create new OS thread (have 5 already; errno=11)
runtime: may need to increase max user processes (ulimit -u)
fatal error: newosproc

runtime stack:
runtime.throw({0x9b1a3c?, 0x7ffd?})
	runtime/panic.go:1101 +0x48 fp=0x7ff sp=0x7fc pc=0x48

goroutine 1 gp=0xc000 m=0 mp=0x1 [running]:
runtime.systemstack_switch()
	runtime/asm_amd64.s:1771 +0x1 fp=0x2450e686e7e8 sp=0x2450e686e7e0 pc=0x48b6a1
`
	noMemory = "fatal error: runtime: out of memory\n\nruntime stack:\nruntime.throw(...)\n\truntime/panic.go:1101 +0x48\n"
	panicked = "panic: assignment to entry in nil map [recovered]\n\tpanic: assignment\n\ngoroutine 7 [running]:\nmain.main()\n\tmain.go:3 +0x18\nexit status 2\n"
	faulted  = "SIGBUS: bus error\nPC=0x48 m=3 sigcode=2 addr=0x1\n\ngoroutine 1 [running]:\nmain.main()\n\tmain.go:3 +0x18\n\nrax    0x0\nrbx    0x1\n"
)

func TestTheReasonOfAGuestsEnd(t *testing.T) {
	for name, test := range map[string]struct{ log, want string }{
		"nothing was said":              {"", ""},
		"it reported its work":          {report, ""},
		"it says itself why":            {report + "berth-guest: boot config: machine_id is missing\n", "boot config: machine_id is missing"},
		"it could not make a thread":    {report + noThread, "it could not create a thread: a limit of processes, the machine's (resources.pids) or its host's, is reached"},
		"it ran out of memory":          {noMemory, "it ran out of memory: the machine's (resources.memory_bytes) or its host's is used up"},
		"it has a defect":               {report + panicked, "it crashed: panic: assignment to entry in nil map [recovered]"},
		"its program cannot be read":    {faulted, "it crashed: SIGBUS: bus error"},
		"only the boot before crashed":  {noThread + report, ""},
		"it was started by something":   {"exec format error\n", "exec format error"},
		"it begins in the middle":       {"\tmain.go:3 +0x18\n" + report, ""},
		"a line that is no text":        {"berth-guest: \xff\x00\t x\x1b[2J\n", "? x [2J"},
		"a line that does not end":      {"berth-guest: no", "no"},
		"more than anybody reads":       {"berth-guest: " + strings.Repeat("é", 1000), strings.Repeat("é", 150) + "…"},
		"a log that was made to be big": {strings.Repeat("x", 3<<20), strings.Repeat("x", 300) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			got := guestlog.Reason(strings.NewReader(test.log))
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func FuzzReason(f *testing.F) {
	for _, log := range []string{report, noThread, noMemory, panicked, faulted, "berth-guest: x"} {
		f.Add(log)
	}
	f.Fuzz(func(t *testing.T, log string) {
		got := guestlog.Reason(strings.NewReader(log))
		if strings.Contains(got, "\n") || !utf8.ValidString(got) || len(got) > 400 {
			t.Errorf("%q", got)
		}
	})
}
