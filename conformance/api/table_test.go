package api

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// row is one promise about commands, which holds on every provider.
type row struct {
	name  string
	holds func(t *testing.T, g *ground)
}

// ground is where rows are tried: a broker, and one sandbox that they share.
type ground struct {
	*harness
	sandbox string
	silence chan error // how a silent stream ended
}

// table is all that is promised of any command, one row each; weighty has the rest of it.
var table = []row{
	// A command ends as the kernel says, and says the same to whoever asks.
	{"exits with 0", ends(shell("exit 0"), exited(0))},
	{"exits with 1", ends(shell("exit 1"), exited(1))},
	{"exits with 42", ends(shell("exit 42"), exited(42))},
	{"exits with 255", ends(shell("exit 255"), exited(255))},
	{"dies by TERM", ends(shell("kill -TERM $$"), killedBy(15))},
	{"dies by KILL", ends(shell("kill -KILL $$"), killedBy(9))},
	{"dies by SEGV", ends(shell("kill -SEGV $$"), killedBy(11))},
	{"takes too long, and goes at TERM", ends(limited(shell("exec sleep 60"), time.Minute), timedOut(15))},
	{"takes too long, and goes at KILL only", ends(limited(shell("trap '' TERM; sleep 60 & wait; sleep 60"), 300*time.Millisecond), timedOut(9))},
	{"would take too long, but ends in time", ends(limited(shell("exit 5"), 300*time.Millisecond), exited(5))},

	// What cannot start says why, and has no status of a process.
	{"is no program in PATH", ends(argv("no-such-program"), failed(127, "not_found: "))},
	{"is no program at its path", ends(argv("./no/such"), failed(127, "not_found: "))},
	{"is a file that is no program", ends(argv("/etc/passwd"), failed(126, "not_executable: "))},
	{"is a directory", ends(argv("/etc"), failed(126, "not_executable: "))},
	{"wants a directory that is not there", ends(in("no/such", argv("true")), failed(126, "cwd_missing: "))},
	{"wants a directory that is a file", ends(in("/etc/passwd", argv("true")), failed(126, "cwd_missing: "))},
	{"wants a user that is not there", ends(as("nobody-here", argv("true")), failed(126, "user_unknown: "))},
	{"wants a group that is not there", ends(as("root:nobody-here", argv("true")), failed(126, "user_unknown: "))},

	// What no machine could run is refused by its field, before any machine is asked.
	{"is nothing", refused(nil, "spec")},
	{"is no command", refused(&berthv1.JobSpec{}, "spec.argv")},
	{"is two commands", refused(&berthv1.JobSpec{Argv: []string{"true"}, Shell: "true"}, "spec.shell")},
	{"has a program without a name", refused(argv(""), "spec.argv[0]")},
	{"has a NUL in an argument", refused(argv("echo", "a\x00b"), "spec.argv[1]")},
	{"has a NUL in its script", refused(shell("echo a\x00b"), "spec.shell")},
	{"has a NUL in its directory", refused(in("a\x00b", argv("true")), "spec.cwd")},
	{"has a NUL in its user", refused(as("a\x00b", argv("true")), "spec.user")},
	{"has a NUL in a variable", refused(with("A", "a\x00b", argv("true")), "spec.env")},
	{"has a variable without a name", refused(with("", "a", argv("true")), "spec.env")},
	{"has over 2 MiB of arguments", refused(argv(strings.Fields(strings.Repeat(strings.Repeat("x", 100<<10)+" ", 21))...), "spec.argv")},

	// Sizes. The kernel takes 128 KiB of one argument, its end included, and 2 MiB of all with the usual
	// stack; a script is an argument of its shell.
	{"has 10,000 variables", ends(variables(10_000, shell("env | grep -c '^VARIABLE_[0-9]*=x$'")), exited(0).writing("10000\n"))},
	{"has an argument as long as can be", ends(argv("bash", "-c", "echo ${#1}", "bash", long(128<<10-1)), exited(0).writing("131071\n"))},
	{"has an argument of one byte more", ends(argv("true", long(128<<10)), failed(126, "too_long: argument 1 has 131072 bytes"))},
	{"has an argument of 1 MiB", ends(argv("true", long(1<<20)), failed(126, "too_long: argument 1 has 1048576 bytes"))},
	{"is a script of 1 MiB", ends(shell(": "+long(1<<20)), failed(126, "too_long: the script has 1048578 bytes"))},
	{"has a variable of 1 MiB", ends(with("LONG", long(1<<20-16), argv("true")), failed(126, "too_long: variable LONG has "))},
	{"has 1.5 MiB of arguments", ends(argv(append([]string{"bash", "-c", "echo $#", "bash"}, many(15, long(100<<10))...)...), exited(0).writing("15\n"))},

	// Scripts do as they like with their shell and their output.
	{"exits within a pipe", ends(shell("echo a | (cat; exit 9)"), exited(9).writing("a\n"))},
	{"execs another program", ends(shell("exec sh -c 'echo other; exit 8'"), exited(8).writing("other\n"))},
	{"ends at the first failure", ends(shell("set -e; echo one; false; echo two"), exited(1).writing("one\n"))},
	{"closes its output and runs on", ends(shell("echo x; exec >&- 2>&-; sleep 0.3; exit 3"), exited(3).writing("x\n"))},
	{"stops itself, and is killed in the end", ends(limited(shell("echo stopped; kill -STOP $$; echo never"), 300*time.Millisecond), timedOut(9).writing("stopped\n"))},
	{"has a child that stops itself", ends(limited(shell("sh -c 'kill -STOP $$' & wait"), 5*time.Second), timedOut(15))},

	// Output is bytes, in the order written, each stream by itself or both as one.
	{"writes what is no text", ends(shell(`printf '\377\000\200\303\050 \360\237\230'; printf '\376\000' >&2`),
		exited(0).writing("\xff\x00\x80\xc3\x28 \xf0\x9f\x98").complaining("\xfe\x00"))},
	{"is given what is no text", ends(given(everyByte(300), argv("cat")), exited(0).writing(everyByte(300)))},
	{"writes both streams in turn", ends(shell(inTurn), exited(0).writing(numbered("o")).complaining(numbered("e")))},
	{"writes both streams in turn into one", ends(merged(shell(inTurn)), exited(0).writing(numbered("o", "e")))},
	{"writes a million times one byte", attachedOutput(shell("seq 1000000 | head -c 1000000 | dd bs=1 status=none"), &numbers{separator: '\n'}, 1_000_000)},
	{"writes live", isLive},
	{"writes nothing for longer than any keepalive", silence},

	// Standard input.
	{"has no input, and reads its end at once", ends(argv("cat"), exited(0))},
	{"never reads the bytes that it is given", ends(given(long(1<<20), shell("sleep 0.3; exit 6")), exited(6))},
	{"never reads what its caller sends", neverRead},
	{"reads up to the end that its caller sends", halfClosed},
	{"gives back 100 MiB", hundredMebibytesThroughCat},

	// Terminals and signals.
	{"has a terminal of its size, and sees it change", terminal},
	{"has no terminal unless it asks", ends(shell("exec 3<>/dev/tty || echo none; test -t 0 -o -t 1 -o -t 2 || echo none"), exited(0).writing("none\nnone\n").complaining(anything))},
	{"is sent signals", signalled},

	// Its children.
	{"leaves a child that holds its output", daemonised},
	{"leaves a child that is silent", silentDaemon},
	{"hides its children, and goes with all of them at its timeout", hiding},
	{"hides its children, and goes with all of them when it is stopped", stoppedHiding},
	{"is a storm of forks", forkStorm},
	{"leaves thousands of orphans and no zombie", orphans},
}

// weighty are the rows in which the memory of broker and guest is measured, so each is alone.
var weighty = []row{
	{"writes 1 GiB", attachedOutput(spooling(2<<30, shell("seq 1000000000 | head -c 1073741824")), &numbers{separator: '\n'}, 1<<30)},
	{"writes a line of 200 MB", attachedOutput(spooling(256<<20, shell(`seq 1000000000 | head -c 200000000 | tr '\n' x`)), &numbers{separator: 'x'}, 200_000_000)},
	{"writes 200 MB while nobody reads, and little is kept", bounded},
}

// What broker and guest may hold at their worst. The broker's has room for copying the guest to an
// engine, which takes up to 110 MiB and has nothing to do with output: without it there are 60.
const (
	maxBrokerBytes = 160 << 20
	maxGuestBytes  = 64 << 20
)

func TestMuchOutputFillsNoMemory(t *testing.T) {
	t.Parallel()
	g := newGround(t)
	for _, r := range weighty {
		t.Run("a command that "+r.name, func(t *testing.T) {
			r.holds(t, g)
			broker, guest := g.peaks(t)
			t.Logf("at its worst the broker held %d MiB, the guest %d MiB", broker>>20, guest>>20)
			if broker > maxBrokerBytes || guest > maxGuestBytes {
				t.Errorf("the broker held up to %d MiB of %d, the guest %d of %d", broker>>20, maxBrokerBytes>>20, guest>>20, maxGuestBytes>>20)
			}
		})
	}
	g.destroy(t, g.sandbox)
	g.WantNothingLeft(t)
}

func newGround(t *testing.T) *ground {
	t.Helper()
	w := start(t)
	return &ground{harness: w, sandbox: w.create(t, nil).GetId()}
}

// peaks are the bytes of memory that the broker and the sandbox's guest, which every job's leader is a
// child of, held at their worst; with a bridge, it counts as the guest's.
func (g *ground) peaks(t *testing.T) (broker, guest int) {
	t.Helper()
	own, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	script := `cat /proc/$PPID/comm /proc/$PPID/status`
	if fixture.OnDocker() {
		script = `cat /proc/$PPID/comm; for p in $(pgrep -x berth-guest); do cat /proc/$p/status; done`
	}
	inside := g.run(t, g.sandbox, script).GetStdout().GetText()
	if !strings.HasPrefix(inside, "berth-guest\n") {
		t.Fatalf("a job's parent is not the guest: %q", inside)
	}
	return peak(t, string(own)), peak(t, inside)
}

// peak adds up the peaks in what /proc says of processes.
func peak(t *testing.T, status string) (bytes int) {
	t.Helper()
	for line := range strings.Lines(status) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[0] != "VmHWM:" {
			continue
		}
		kib, err := strconv.Atoi(fields[1])
		if err != nil {
			t.Fatal(err)
		}
		bytes += kib << 10
	}
	if bytes == 0 {
		t.Fatalf("there is no peak in %q", status)
	}
	return bytes
}

var seconds atomic.Uint32

// unique is a number of seconds to sleep, over an hour, that no other process on this host sleeps: plain
// machines see one another's processes.
func unique() string {
	return fmt.Sprintf("%d.%d", 4000+seconds.Add(1), time.Now().UnixNano()%1e9*1e6+int64(os.Getpid()%1e6))
}

// alive counts the sandbox's processes whose command line begins with a text.
func (w *harness) alive(t *testing.T, sandbox, text string) int {
	t.Helper()
	reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
		SandboxId: sandbox, Spec: argv("pgrep", "-fc", "^"+strings.ReplaceAll(text, ".", "[.]")), TextOutput: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(reply.GetStdout().GetText()))
	if err != nil {
		t.Fatalf("counting the processes of %q: %v: %s", text, err, reply.GetStderr().GetText())
	}
	return n
}

// wantAlive fails the test unless so many live, at once.
func (w *harness) wantAlive(t *testing.T, sandbox, text string, want int, who string) {
	t.Helper()
	if got := w.alive(t, sandbox, text); got != want {
		t.Errorf("%d processes of %s live, want %d", got, who, want)
	}
}
