package guest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/conformance/testenv"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// What is promised of any command, one row each.

func TestScriptsEndAsTheySay(t *testing.T) {
	t.Parallel()
	m := boot(t)
	limited := func(r *guestv1.StartRequest) *guestv1.StartRequest {
		r.Command.Timeout, r.Command.KillGrace = durationpb.New(3*time.Second), durationpb.New(3*time.Second)
		return r
	}
	for _, test := range []struct {
		name   string
		start  *guestv1.StartRequest
		cause  berthv1.Cause
		code   int32
		signal uint32
		stdout string
	}{
		{"exits within a pipe", shell("echo a | (cat; exit 9)"), berthv1.Cause_CAUSE_EXITED, 9, 0, "a\n"},
		{"execs another program", shell("exec sh -c 'echo other; exit 8'"), berthv1.Cause_CAUSE_EXITED, 8, 0, "other\n"},
		{"ends at the first failure", shell("set -e; echo one; false; echo two"), berthv1.Cause_CAUSE_EXITED, 1, 0, "one\n"},
		{"closes its output and runs on", shell("echo x; exec >&- 2>&-; sleep 0.3; exit 3"), berthv1.Cause_CAUSE_EXITED, 3, 0, "x\n"},
		{"segfaults", shell("kill -SEGV $$"), berthv1.Cause_CAUSE_SIGNALED, 139, 11, ""},
		{"stops itself and is killed in the end", limited(shell("echo stopped; kill -STOP $$; echo never")), berthv1.Cause_CAUSE_TIMED_OUT, 124, 9, "stopped\n"},
		{"exits in time", limited(shell("exit 5")), berthv1.Cause_CAUSE_EXITED, 5, 0, ""},
		{"has a child that stops itself", limited(shell("sh -c 'kill -STOP $$' & wait")), berthv1.Cause_CAUSE_TIMED_OUT, 124, 15, ""},
		{"has an argument of a mebibyte", argv("true", strings.Repeat("x", 1<<20)), berthv1.Cause_CAUSE_FAILED_TO_START, 126, 0, ""}, // the kernel takes 128 KiB
		{"has an argument of 127 KiB", argv("sh", "-c", "echo ${#1}", "sh", strings.Repeat("x", 127<<10)), berthv1.Cause_CAUSE_EXITED, 0, 0, "130048\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			response := m.run(test.start)
			o := response.GetStatus().GetOutcome()
			if o.GetCause() != test.cause || o.GetExitCode() != test.code || o.GetWaitStatus().GetSignal() != test.signal {
				t.Errorf("outcome %v", o)
			}
			if got := string(response.GetStdout().GetHead()); got != test.stdout {
				t.Errorf("stdout %q", got)
			}
		})
	}
}

func TestTenThousandVariables(t *testing.T) {
	t.Parallel()
	m := boot(t)
	r := argv("env")
	r.Command.Env = make(map[string]string)
	for i := range 10000 {
		r.Command.Env["BERTH_TEST_"+strconv.Itoa(i)] = strconv.Itoa(i * i)
	}
	out := m.run(r).GetStdout().GetHead()
	if got := strings.Count(string(out), "BERTH_TEST_"); got != 10000 || !bytes.Contains(out, []byte("BERTH_TEST_9999=99980001\n")) {
		t.Errorf("%d variables came through", got)
	}
}

func TestOutputIsBytes(t *testing.T) {
	t.Parallel()
	m := boot(t)
	var all []byte
	for i := range 256 {
		all = append(all, byte(i))
	}
	all = append(all, "\xf0\x9f\x98 \xc3\x28 \xff\xfe\x00"...)
	r := argv("cat")
	r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: all}}
	a := m.attachStart(r)
	if a.wait(); a.stdout() != string(all) {
		t.Errorf("attached %q", a.stdout())
	}
	if got := m.run(argv("printf", `\377\000\200`)).GetStdout().GetHead(); string(got) != "\xff\x00\x80" {
		t.Errorf("run %q", got)
	}
}

func TestInterleavedStreamsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	m := boot(t)
	a := m.attachStart(shell("i=0; while [ $i -lt 2000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"))
	a.wait()
	var out, errs strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&out, "o%d\n", i)
		fmt.Fprintf(&errs, "e%d\n", i)
	}
	if a.stdout() != out.String() || string(a.output[berthv1.Stream_STREAM_STDERR]) != errs.String() {
		t.Errorf("%d and %d bytes came", len(a.stdout()), len(a.output[berthv1.Stream_STREAM_STDERR]))
	}
}

func TestOneLongLineAndAMillionTinyWrites(t *testing.T) {
	t.Parallel()
	m := boot(t)
	for name, test := range map[string]struct {
		script string
		size   int
	}{
		"a line of 200 MB":        {"head -c 200000000 /dev/zero | tr '\\0' x", 200_000_000},
		"a million writes of one": {"dd if=/dev/zero bs=1 count=1000000 status=none", 1_000_000},
	} {
		t.Run(name, func(t *testing.T) {
			stream, err := m.calls.Attach(t.Context())
			must(t, err)
			r := shell(test.script)
			r.Command.OutputLimitBytes = 512 << 20
			must(t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: r.GetJobId(), Start: r}}}))
			got := 0
			for {
				message, err := stream.Recv()
				must(t, err)
				if message.GetGap() != nil {
					t.Errorf("nothing was dropped, but there is a gap: %v", message)
				}
				if done := message.GetDone(); done != nil {
					if got != test.size || done.GetStdout().GetTotalBytes() != uint64(test.size) || done.GetOutcome().GetExitCode() != 0 {
						t.Errorf("%d bytes came, done %v", got, done)
					}
					break
				}
				got += len(message.GetChunk().GetData())
			}
		})
	}
	if mib := m.memoryMiB(); mib > maxGuestMiB {
		t.Errorf("the guest takes %d MiB", mib)
	}
}

// clean clears a daemon's environment, where it is tracked by more than that.
func (w way) clean() string {
	if w.kind == guestv1.Containment_CONTAINMENT_PROCESS_GROUP {
		return "env"
	}
	return "env -i"
}

// stubborn is a tree that TERM does not end, and that left its session, its parent and, where it can,
// its environment.
func stubborn(w way, seconds string) string {
	return fmt.Sprintf("trap '' TERM; (%s setsid sh -c \"trap '' TERM; (setsid sleep %s &); (setsid sh -c '(sleep %s &) ; exec sleep %s' &) ; exec sleep %s\" &); sleep %s",
		w.clean(), seconds, seconds, seconds, seconds, seconds)
}

func TestAKillTakesItsJobAndNoOther(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			spared, taken := unique(), unique()
			m.run(shell("setsid sleep " + spared + " >/dev/null 2>&1 & setsid " + way.clean() + " sleep " + spared + " & true"))
			m.begin(shell("sleep " + spared + "; true"))
			r := shell(stubborn(way, taken))
			r.Command.Timeout, r.Command.KillGrace = durationpb.New(300*time.Millisecond), durationpb.New(100*time.Millisecond)
			o := m.run(r).GetStatus().GetOutcome()
			if o.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || len(o.GetSurvivors()) != 0 {
				t.Errorf("outcome %v", o)
			}
			if left := processesWith("sleep " + taken); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
			if got := len(processesWith("sleep " + spared)); got != 4 { // three sleeps and a shell
				t.Errorf("%d of 4 processes of other jobs live", got)
			}
		})
	}
}

func TestATagThatWasResetLeavesTheEnvironment(t *testing.T) {
	t.Parallel()
	m := boot(t)
	seconds := unique()
	r := shell("(bash -c 'ulimit -S -x 77; exec setsid sleep " + seconds + "' &); sleep 0.3")
	m.run(r)
	if len(processesWith("sleep "+seconds)) != 1 {
		t.Fatal("the daemon does not live")
	}
	_, err := m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId(), Grace: durationpb.New(0)})
	must(t, err)
	if left := processesWith("sleep " + seconds); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestAForkStormIsKilled(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds, size := unique(), testenv.Size(1000, 200)
			// It grows while it is killed.
			r := shell("trap '' TERM; i=0; while [ $i -lt " + strconv.Itoa(size) + " ]; do (setsid sleep " + seconds + " &); i=$((i+1)); done; while :; do (setsid sleep " + seconds + " &); done")
			r.Command.KillGrace = durationpb.New(0)
			m.begin(r)
			eventually(t, "the storm rages", func() bool { return len(processesWith("sleep "+seconds)) >= size })
			stopped, err := m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId(), Grace: durationpb.New(0)})
			must(t, err)
			if o := stopped.GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_STOPPED || len(o.GetSurvivors()) != 0 {
				t.Errorf("outcome %v", o)
			}
			if left := len(processesWith("sleep " + seconds)); left != 0 {
				t.Errorf("%d are left", left)
			}
			if o := m.run(shell("exit 3")).GetStatus().GetOutcome(); o.GetExitCode() != 3 {
				t.Errorf("the next job: %v", o)
			}
		})
	}
}

func TestThousandsOfOrphansLeaveNoZombie(t *testing.T) {
	t.Parallel()
	m := boot(t)
	// Each child has a child, and leaves before it.
	script := fmt.Sprintf(`$SIG{CHLD} = "IGNORE"; for (1..%d) { next if fork; fork and exit; select undef, undef, undef, 0.01; exit } print "made\n"`, testenv.Size(10_000, 2000))
	if response := m.run(argv("perl", "-e", script)); string(response.GetStdout().GetHead()) != "made\n" {
		t.Fatalf("no orphans: %v", response)
	}
	eventually(t, "no zombies", func() bool {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.process.Process.Pid, m.process.Process.Pid))
		return err == nil && len(children) == 0
	})
}

func TestStopFindsWhatAForgottenJobLeft(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			for _, byRun := range []bool{false, true} {
				seconds := unique()
				r := shell("setsid sleep " + seconds + " >/dev/null 2>&1 & exit 6")
				r.Durable = !byRun
				_, err := m.calls.Run(t.Context(), &guestv1.RunRequest{Start: r, Forget: byRun})
				must(t, err)
				forgotten, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{r.GetJobId()}})
				must(t, err)
				if len(forgotten.GetKeptJobIds()) != 0 {
					t.Errorf("kept %v", forgotten)
				}
				time.Sleep(600 * time.Millisecond) // beyond the first look
				list, err := m.calls.List(t.Context(), &guestv1.ListRequest{})
				must(t, err)
				if len(list.GetStatuses()) != 0 {
					t.Errorf("listed: %v", list)
				}
				refusedFor(t, m, r, "FORGOTTEN")
				if len(processesWith("sleep "+seconds)) != 1 {
					t.Fatal("the daemon does not live")
				}
				stopped, err := m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId()})
				must(t, err)
				if s := stopped.GetStatus(); !s.GetDone() || s.GetOutcome().GetExitCode() != 6 || s.GetOutcome().GetCause() != berthv1.Cause_CAUSE_EXITED {
					t.Errorf("stopped: %v", s)
				}
				if len(processesWith("sleep "+seconds)) != 0 {
					t.Error("Stop left the daemon")
				}
				if _, err = m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId()}); err == nil {
					t.Error("a job of which nothing is left is found")
				}
			}
		})
	}
}

func TestListOfDurableJobsSleepsThroughTheOthers(t *testing.T) {
	t.Parallel()
	m := boot(t)
	list := func(since uint64, wait time.Duration) *guestv1.ListResponse {
		response, err := m.calls.List(t.Context(), &guestv1.ListRequest{SinceCursor: since, Wait: durationpb.New(wait), DurableOnly: true})
		must(t, err)
		return response
	}
	r := argv("true")
	r.Durable = true
	m.run(r)
	m.run(argv("true"))
	first := list(0, 0)
	if len(first.GetStatuses()) != 1 || first.GetStatuses()[0].GetJobId() != r.GetJobId() {
		t.Errorf("at first %v", first)
	}
	answered := make(chan error)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		_, err := m.calls.List(ctx, &guestv1.ListRequest{SinceCursor: first.GetNextCursor(), Wait: durationpb.New(time.Hour), DurableOnly: true})
		answered <- err
	}()
	m.run(argv("true"))
	m.run(shell("echo x; sleep 0.3"))
	select {
	case err := <-answered:
		t.Errorf("a job that is not durable woke it: %v", err)
	default:
	}
	r = argv("true")
	r.Durable = true
	m.begin(r)
	must(t, <-answered)
}

func TestTheMachinesUserIsEveryJobs(t *testing.T) {
	testenv.Root(t) // to run as others
	t.Parallel()
	m := boot(t, func(c *guestv1.BootConfig) { c.DefaultUser = "nobody" })
	must(t, os.Chmod(m.dir, 0o755))
	for user, want := range map[string]string{"": "65534\n", "root": "0\n"} {
		r := argv("id", "-u")
		r.Command.User = user
		if got := string(m.run(r).GetStdout().GetHead()); got != want {
			t.Errorf("user %q runs as %q", user, got)
		}
	}
}

// unresponsiveConn is a connection that can fall silent, as one behind a network that is gone.
type unresponsiveConn struct {
	net.Conn
	unresponsive atomic.Bool
	over         chan struct{}
}

func (c *unresponsiveConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.unresponsive.Load() {
		<-c.over
		return 0, net.ErrClosed
	}
	return n, err
}

func TestSilenceIsNoEndAndABlackHoleIs(t *testing.T) {
	t.Parallel()
	// A second stands for ten: ten minutes of silence are as good as these.
	m := bootAs(t, manner{keepalive: time.Second})
	silent := m.attachStart(shell("sleep 4; echo still here"))
	conn := &unresponsiveConn{Conn: m.accept(), over: make(chan struct{})}
	client := clientOn(t, conn)
	defer close(conn.over)
	calls := guestv1.NewGuestServiceClient(client)
	_, err := calls.Hello(t.Context(), m.helloRequest(calls))
	must(t, err)
	lost := argv("sleep", "60")
	lost.KillOnDisconnect, lost.DisconnectGrace = true, durationpb.New(200*time.Millisecond)
	stream, err := calls.Attach(t.Context())
	must(t, err)
	must(t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: lost.GetJobId(), Start: lost}}}))
	_, err = stream.Recv()
	must(t, err)
	conn.unresponsive.Store(true)
	final := m.listed(lost.GetJobId())
	if final.GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
		t.Errorf("behind the black hole: %v", final.GetOutcome())
	}
	if silent.wait(); silent.stdout() != "still here\n" {
		t.Errorf("after the silence %q", silent.stdout())
	}
}
