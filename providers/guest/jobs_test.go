package guest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestOutcomesAreWhatTheKernelSaid(t *testing.T) {
	m := boot(t)
	must(t, os.WriteFile(filepath.Join(m.config.GetWorkspace(), "plain"), []byte("echo no interpreter $1; exit 3"), 0o755))
	must(t, os.WriteFile(filepath.Join(m.config.GetWorkspace(), "data"), []byte("x"), 0o644))
	must(t, os.WriteFile(filepath.Join(m.config.GetWorkspace(), "lost"), []byte("#!/no/such/interpreter\n"), 0o755))
	for name, content := range map[string]string{
		"foreign": "\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x2b\x00\x01\x00\x00\x00echo this never runs\n",
		"binary":  "echo this never runs \x00\n", "empty": "", "archive": "echo unpacked; exit 4\n\x00\x01\x02",
	} {
		must(t, os.WriteFile(filepath.Join(m.config.GetWorkspace(), name), []byte(content), 0o755))
	}
	long := strings.Repeat("x", 3<<20)
	in := func(dir string, r *guestv1.StartRequest) *guestv1.StartRequest {
		r.Command.Cwd = dir
		return r
	}
	as := func(user string, r *guestv1.StartRequest) *guestv1.StartRequest {
		r.Command.User = user
		return r
	}
	for _, test := range []struct {
		name   string
		start  *guestv1.StartRequest
		cause  berthv1.Cause
		code   int32
		reason string
		stdout string
	}{
		{"true exits 0", argv("true"), berthv1.Cause_CAUSE_EXITED, 0, "", ""},
		{"false exits 1", argv("false"), berthv1.Cause_CAUSE_EXITED, 1, "", ""},
		{"42 is 42", shell("exit 42"), berthv1.Cause_CAUSE_EXITED, 42, "", ""},
		{"255 is 255", shell("exit 255"), berthv1.Cause_CAUSE_EXITED, 255, "", ""},
		{"its own KILL is a signal", shell("kill -9 $$"), berthv1.Cause_CAUSE_SIGNALED, 137, "signaled: SIGKILL", ""},
		{"its own TERM is a signal", shell("kill -15 $$"), berthv1.Cause_CAUSE_SIGNALED, 143, "signaled: SIGTERM", ""},
		{"a program that is not there", argv("no-such-program"), berthv1.Cause_CAUSE_FAILED_TO_START, 127, "not_found: ", ""},
		{"a path that is not there", argv("./no/such"), berthv1.Cause_CAUSE_FAILED_TO_START, 127, "not_found: ", ""},
		{"an empty name", argv(""), berthv1.Cause_CAUSE_FAILED_TO_START, 127, "not_found: ", ""},
		{"a file without the bit", argv("./data"), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "not_executable: ", ""},
		{"a directory", argv("/etc"), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "not_executable: ", ""},
		{"a program of another architecture", argv("./foreign"), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "not_executable: ", ""},
		{"a binary file", argv("./binary"), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "not_executable: ", ""},
		{"an empty file runs in sh", argv("./empty"), berthv1.Cause_CAUSE_EXITED, 0, "", ""},
		{"a script with binary data behind it runs in sh", argv("./archive"), berthv1.Cause_CAUSE_EXITED, 4, "", "unpacked\n"},
		{"an interpreter that is not there", argv("./lost"), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "not_executable: ", ""},
		{"a script without an interpreter runs in sh", argv("./plain", "here"), berthv1.Cause_CAUSE_EXITED, 3, "", "no interpreter here\n"},
		{"a directory that is not there", in("no/such", argv("true")), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "cwd_missing: ", ""},
		{"a directory that is a file", in("data", argv("true")), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "cwd_missing: ", ""},
		{"a user that is not there", as("nobody-knows", argv("true")), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "user_unknown: ", ""},
		{"a group that is not there", as("root:nobody-knows", argv("true")), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "user_unknown: ", ""},
		{"arguments that are too long", argv("true", long), berthv1.Cause_CAUSE_FAILED_TO_START, 126, "too_long: ", ""},
		{"the workspace is the directory", argv("sh", "-c", "basename $PWD"), berthv1.Cause_CAUSE_EXITED, 0, "", "work\n"},
		{"another directory", in("/", argv("pwd")), berthv1.Cause_CAUSE_EXITED, 0, "", "/\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			response := m.run(test.start)
			o := response.GetStatus().GetOutcome()
			if o.GetCause() != test.cause || o.GetExitCode() != test.code || !strings.HasPrefix(o.GetReason(), test.reason) {
				t.Errorf("outcome %v", o)
			}
			if got := string(response.GetStdout().GetHead()); got != test.stdout {
				t.Errorf("stdout %q", got)
			}
			if (o.GetWaitStatus() == nil) != (test.cause == berthv1.Cause_CAUSE_FAILED_TO_START) {
				t.Errorf("wait status %v", o.GetWaitStatus())
			}
		})
	}
}

func TestRequestsThatMakeNoSenseAreRefused(t *testing.T) {
	m := boot(t)
	for name, test := range map[string]struct {
		code    codes.Code
		request *guestv1.StartRequest
	}{
		"no command":              {codes.InvalidArgument, &guestv1.StartRequest{JobId: newID()}},
		"two commands":            {codes.InvalidArgument, &guestv1.StartRequest{JobId: newID(), Command: &guestv1.Command{Shell: "x", Argv: []string{"x"}}}},
		"an id that is a path":    {codes.InvalidArgument, &guestv1.StartRequest{JobId: "job_../../../../etc/xxxxxxxxxxx", Command: &guestv1.Command{Shell: "x"}}},
		"a NUL in an argument":    {codes.InvalidArgument, argv("echo", "a\x00b")},
		"an = in a variable":      {codes.InvalidArgument, &guestv1.StartRequest{JobId: newID(), Command: &guestv1.Command{Shell: "x", Env: map[string]string{"A=": "x"}}}},
		"a terminal without size": {codes.InvalidArgument, &guestv1.StartRequest{JobId: newID(), Command: &guestv1.Command{Shell: "x", Tty: &berthv1.TerminalSize{Cols: 1}}}},
		"another generation":      {codes.FailedPrecondition, &guestv1.StartRequest{JobId: newID(), Generation: 4, Command: &guestv1.Command{Shell: "x"}}},
		"another boot":            {codes.FailedPrecondition, &guestv1.StartRequest{JobId: newID(), BootId: "other", Command: &guestv1.Command{Shell: "x"}}},
		"an id before everything": {codes.FailedPrecondition, &guestv1.StartRequest{JobId: idAt(time.Now().Add(-49 * time.Hour)), Command: &guestv1.Command{Shell: "x"}}},
	} {
		t.Run(name, func(t *testing.T) {
			m.run(argv("true")) // so that the guest knows what time it is
			_, err := m.calls.Start(t.Context(), test.request)
			if status.Code(err) != test.code {
				t.Errorf("got %v, want %v", err, test.code)
			}
		})
	}
	if _, err := m.calls.Wait(t.Context(), &guestv1.WaitRequest{JobId: newID()}); status.Code(err) != codes.NotFound {
		t.Errorf("an unknown job: %v", err)
	}
}

func TestTheEnvironmentIsTheMachinesAndTheJobs(t *testing.T) {
	m := boot(t, func(c *guestv1.BootConfig) { c.Env = map[string]string{"MACHINE": "yes", "BOTH": "machine"} })
	r := argv("env")
	r.Command.Env = map[string]string{"BOTH": "job", "BERTH_JOB_ID": "a lie"}
	got := string(m.run(r).GetStdout().GetHead())
	for _, want := range []string{"MACHINE=yes", "BOTH=job", "BERTH_JOB_ID=" + r.GetJobId(), "BERTH_MACHINE_ID=" + m.config.GetMachineId(), "HOME=/root", "PATH=/usr/local/sbin"} {
		if !strings.Contains("\n"+got, "\n"+want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	if strings.Contains(got, "SECRET_OF_THE_GUEST") {
		t.Error("the guest's own environment leaks")
	}
}

func TestACommandRunsAsItsUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can run as others")
	}
	m := boot(t)
	must(t, os.Chmod(m.dir, 0o755))
	for spec, want := range map[string]string{
		"nobody":      "65534 65534 65534 unset unset /nonexistent",
		"65534:0":     "65534 0 0 unset unset /nonexistent",
		"4711":        "4711 0 0 unset unset /",
		"4711:daemon": "4711 1 1 unset unset /",
		"root":        "0 0 0 unset unset /root",
	} {
		r := shell("echo $(id -u) $(id -g) $(id -G) ${USER-unset} ${LOGNAME-unset} $HOME")
		r.Command.User = spec
		response := m.run(r)
		if got := strings.TrimSpace(string(response.GetStdout().GetHead())); got != want {
			t.Errorf("user %s: got %q, want %q (%v)", spec, got, want, response.GetStatus().GetOutcome())
		}
	}
	withHome := boot(t, func(c *guestv1.BootConfig) { c.Env = map[string]string{"HOME": "/of/the/image"} })
	must(t, os.Chmod(withHome.dir, 0o755))
	for _, user := range []string{"", "nobody", "4711"} {
		r := shell("echo $HOME")
		r.Command.User = user
		if got := string(withHome.run(r).GetStdout().GetHead()); got != "/of/the/image\n" {
			t.Errorf("user %q has the HOME %q, not the machine's", user, got)
		}
	}
	must(t, os.Mkdir(filepath.Join(m.dir, "closed"), 0o700))
	r := argv("true")
	r.Command.User, r.Command.Cwd = "nobody", filepath.Join(m.dir, "closed")
	if o := m.run(r).GetStatus().GetOutcome(); !strings.HasPrefix(o.GetReason(), "cwd_missing: ") {
		t.Errorf("a directory that the user may not enter: %v", o)
	}
}

func TestStdinIsEmptyOrTheGivenBytes(t *testing.T) {
	m := boot(t)
	if response := m.run(argv("cat")); response.GetStatus().GetOutcome().GetExitCode() != 0 {
		t.Errorf("cat without stdin: %v", response)
	}
	for _, size := range []int{1, 64 << 10, 1 << 20} {
		data := bytes.Repeat([]byte("0123456\n"), (size+7)/8)[:size]
		r := argv("sh", "-c", "sleep 0.05; exec cat")
		r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: data}}
		response := m.run(r)
		if !bytes.Equal(response.GetStdout().GetHead(), data) {
			t.Errorf("%d bytes came back as %d", size, len(response.GetStdout().GetHead()))
		}
		if got := response.GetStatus().GetInputOffset(); got != uint64(size) {
			t.Errorf("%d bytes of stdin, %d taken", size, got)
		}
	}
	r := argv("true")
	r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: make([]byte, 1<<20)}}
	if o := m.run(r).GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_EXITED {
		t.Errorf("a command that does not read: %v", o)
	}
}

func TestStreamsAreApartOrMerged(t *testing.T) {
	m := boot(t)
	script := "echo one; echo two >&2; echo three"
	response := m.run(shell(script))
	if string(response.GetStdout().GetHead()) != "one\nthree\n" || string(response.GetStderr().GetHead()) != "two\n" {
		t.Errorf("apart: %v", response)
	}
	merged := shell(script)
	merged.Command.MergeStderr = true
	response = m.run(merged)
	if string(response.GetStdout().GetHead()) != "one\ntwo\nthree\n" || len(response.GetStderr().GetHead()) != 0 {
		t.Errorf("merged: %v", response)
	}
	if !response.GetStatus().GetStderr().GetSealed() {
		t.Errorf("stderr of a merged job is not sealed")
	}
}

func TestADaemonThatHoldsTheOutputDelaysNobody(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds := unique()
			r := shell("sleep " + seconds + " & echo hi")
			response := m.run(r)
			o := response.GetStatus().GetOutcome()
			if o.GetCause() != berthv1.Cause_CAUSE_EXITED || o.GetExitCode() != 0 || !o.GetOutputStillOpen() {
				t.Errorf("outcome %v", o)
			}
			if string(response.GetStdout().GetHead()) != "hi\n" || response.GetStatus().GetStdout().GetSealed() {
				t.Errorf("output %v", response)
			}
			if len(processesWith("sleep "+seconds)) != 1 {
				t.Error("the daemon does not live")
			}
			forgotten, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{r.GetJobId()}})
			must(t, err)
			if len(forgotten.GetKeptJobIds()) != 1 {
				t.Error("a job whose output is open was forgotten")
			}
			stopped, err := m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId()})
			must(t, err)
			if len(processesWith("sleep "+seconds)) != 0 {
				t.Error("Stop left the daemon")
			}
			if got := stopped.GetStatus().GetOutcome(); got.String() != o.String() {
				t.Errorf("the outcome changed to %v", got)
			}
			if !stopped.GetStatus().GetStdout().GetSealed() {
				t.Error("the output is not sealed after Stop")
			}
			forgotten, err = m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{r.GetJobId()}})
			must(t, err)
			if len(forgotten.GetKeptJobIds()) != 0 {
				t.Error("a sealed job was kept")
			}
		})
	}
}

func TestWhatADaemonWritesLaterIsSpooled(t *testing.T) {
	m := boot(t)
	r := shell("(sleep 0.3; echo late) & echo early")
	response := m.run(r)
	if got := response.GetStatus().GetStdout().GetEndAtExit(); got != 6 || !response.GetStatus().GetOutcome().GetOutputStillOpen() {
		t.Errorf("at exit %v", response)
	}
	read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId(), Offset: 6, Wait: durationpb.New(5 * time.Second)})
	must(t, err)
	if string(read.GetData()) != "late\n" {
		t.Errorf("read %v", read)
	}
	eventually(t, "sealed", func() bool { return m.wait(r.GetJobId()).GetStdout().GetSealed() })
	final := m.wait(r.GetJobId())
	if final.GetStdout().GetTotalBytes() != 11 || final.GetStdout().GetEndAtExit() != 6 {
		t.Errorf("in the end %v", final)
	}
}

func TestAJobIsKilledWithItsWholeTree(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds := unique()
			// Ignores TERM, makes a session of its own, loses its parent and, where it is tracked by more than that
			// its environment.
			r := shell(fmt.Sprintf("trap '' TERM; (%s setsid sh -c \"trap '' TERM; (setsid sleep %s) & setsid sleep %s\" &) ; while :; do sleep %s; done", way.clean(), seconds, seconds, seconds))
			r.Command.Timeout = durationpb.New(300 * time.Millisecond)
			r.Command.KillGrace = durationpb.New(200 * time.Millisecond)
			start := time.Now()
			o := m.run(r).GetStatus().GetOutcome()
			if took := time.Since(start); took < 500*time.Millisecond {
				t.Errorf("took %v", took)
			}
			if o.GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || o.GetExitCode() != 124 || o.GetWaitStatus().GetSignal() != 9 ||
				!strings.HasPrefix(o.GetReason(), "timed_out: ") || len(o.GetSurvivors()) != 0 {
				t.Errorf("outcome %v", o)
			}
			if left := processesWith("sleep " + seconds); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

func TestStopTermsThenKills(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			for _, test := range []struct {
				name, script string
				grace        time.Duration
				code         int32
				wait         string
			}{
				{"what dies of TERM", "exec sleep 60", 5 * time.Second, 143, "signal:15"},
				{"what exits by itself after TERM", "trap 'exit 7' TERM; sleep 60 & wait", 5 * time.Second, 7, "code:7"},
				{"what ignores TERM", "trap '' TERM; while :; do sleep 1; done", 100 * time.Millisecond, 137, "signal:9"},
				{"without grace", "exec sleep 60", 0, 137, "signal:9"},
			} {
				t.Run(test.name, func(t *testing.T) {
					r := shell(test.script)
					m.begin(r)
					time.Sleep(100 * time.Millisecond) // for the trap
					var all sync.WaitGroup
					for range 5 {
						all.Go(func() {
							stopped, err := m.calls.Stop(context.Background(), &guestv1.StopRequest{
								JobId: r.GetJobId(), Grace: durationpb.New(test.grace), Reason: "stop_requested: by a test",
							})
							if err != nil {
								t.Error(err)
								return
							}
							o := stopped.GetStatus().GetOutcome()
							if o.GetCause() != berthv1.Cause_CAUSE_STOPPED || o.GetExitCode() != test.code ||
								o.GetReason() != "stop_requested: by a test" || o.GetWaitStatus().String() != test.wait {
								t.Errorf("outcome %v", o)
							}
						})
					}
					all.Wait()
				})
			}
		})
	}
}

func TestAStopThatComesAfterTheEndChangesNothing(t *testing.T) {
	m := boot(t)
	r := shell("exit 4")
	before := m.run(r).GetStatus().GetOutcome()
	stopped, err := m.calls.Stop(t.Context(), &guestv1.StopRequest{JobId: r.GetJobId()})
	must(t, err)
	if got := stopped.GetStatus().GetOutcome(); got.String() != before.String() || got.GetCause() != berthv1.Cause_CAUSE_EXITED {
		t.Errorf("outcome %v", got)
	}
}

func TestASignalReachesTheProcessGroup(t *testing.T) {
	m := boot(t)
	r := shell("trap 'echo got it; exit 5' USR1; echo ready; sleep 60 & wait")
	m.begin(r)
	_, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId(), Wait: durationpb.New(5 * time.Second)})
	must(t, err)
	_, err = m.calls.Signal(t.Context(), &guestv1.SignalRequest{JobId: r.GetJobId(), Signal: 10})
	must(t, err)
	if o := m.wait(r.GetJobId()).GetOutcome(); o.GetExitCode() != 5 {
		t.Errorf("outcome %v", o)
	}
	if _, err = m.calls.Signal(t.Context(), &guestv1.SignalRequest{JobId: r.GetJobId(), Signal: 65}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("signal 65: %v", err)
	}
}

func TestFiftyStartsOfOneJobBeginItOnce(t *testing.T) {
	m := boot(t)
	file := filepath.Join(m.dir, "begun")
	r := shell("echo x >> " + file + "; sleep 0.1")
	var all sync.WaitGroup
	var mu sync.Mutex
	first := 0
	for range 50 {
		all.Go(func() {
			response, err := m.calls.Start(context.Background(), r)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if !response.GetAlreadyStarted() {
				first++
			}
		})
	}
	all.Wait()
	m.wait(r.GetJobId())
	if first != 1 || lines(t, file) != 1 {
		t.Errorf("%d began it, it ran %d times", first, lines(t, file))
	}
	// Not even a request that would be refused is refused, once the job is known.
	r.Generation, r.BootId = 99, "other"
	response, err := m.calls.Start(t.Context(), r)
	must(t, err)
	if !response.GetAlreadyStarted() || !response.GetStatus().GetDone() {
		t.Errorf("again: %v", response)
	}
}

func TestARestartKeepsOutcomesAndLosesWhatIsUnknown(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			boot1 := m.hello.GetBootId()
			done := shell("echo kept; exit 9")
			done.Durable = true
			m.run(done)
			quick := shell("exit 1")
			m.run(quick)
			seconds := unique()
			running := shell("echo begun; sleep " + seconds)
			running.Durable = true
			m.begin(running)
			forgotten := argv("true")
			forgotten.Durable = true
			m.run(forgotten)
			_, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{forgotten.GetJobId()}})
			must(t, err)
			_, err = m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: running.GetJobId(), Wait: durationpb.New(5 * time.Second)})
			must(t, err)

			m.kill()
			m.start()
			if m.hello.GetBootId() == boot1 {
				t.Error("the boot id stayed")
			}
			for _, test := range []struct {
				request *guestv1.StartRequest
				cause   berthv1.Cause
				output  string
			}{
				{done, berthv1.Cause_CAUSE_EXITED, "kept\n"},
				{quick, berthv1.Cause_CAUSE_LOST, ""},
				{running, berthv1.Cause_CAUSE_LOST, "begun\n"},
			} {
				response, err := m.calls.Start(t.Context(), test.request)
				must(t, err)
				s := response.GetStatus()
				if !response.GetAlreadyStarted() || s.GetOutcome().GetCause() != test.cause || s.GetBootId() != boot1 || s.GetGeneration() != 3 {
					t.Errorf("%v", response)
				}
				if test.cause == berthv1.Cause_CAUSE_LOST && (s.GetOutcome().Exit != nil || !strings.HasPrefix(s.GetOutcome().GetReason(), "guest_restarted: ")) {
					t.Errorf("lost: %v", s.GetOutcome())
				}
				read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: test.request.GetJobId()})
				must(t, err)
				if string(read.GetData()) != test.output || !read.GetStats().GetSealed() {
					t.Errorf("output %v", read)
				}
			}
			if got := m.wait(done.GetJobId()).GetOutcome(); got.GetExitCode() != 9 || got.GetWaitStatus().GetCode() != 9 {
				t.Errorf("the durable outcome is %v", got)
			}
			refusedFor(t, m, forgotten, "FORGOTTEN")
			eventually(t, "the lost job's process is gone", func() bool { return len(processesWith("sleep "+seconds)) == 0 })
		})
	}
}

func TestTheSpoolOfAnotherMachineIsWiped(t *testing.T) {
	m := boot(t)
	r := argv("true")
	r.Durable = true
	m.run(r)
	m.kill()
	m.config.MachineId = "m_02OTHER"
	m.start()
	if _, err := m.calls.Wait(t.Context(), &guestv1.WaitRequest{JobId: r.GetJobId()}); status.Code(err) != codes.NotFound {
		t.Errorf("the other machine's job: %v", err)
	}
}

func TestTwoHundredDurableJobsAtOnce(t *testing.T) {
	m := boot(t, firstContainment(t)...)
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			r := shell(fmt.Sprintf("echo %d; exit %d", i, i%100))
			r.Durable = true
			if _, err := m.calls.Start(context.Background(), r); err != nil {
				t.Error(err)
				return
			}
			response, err := m.calls.Wait(context.Background(), &guestv1.WaitRequest{JobId: r.GetJobId(), Wait: durationpb.New(30 * time.Second)})
			if err != nil || response.GetStatus().GetOutcome().GetExitCode() != int32(i%100) {
				t.Errorf("job %d: %v, %v", i, response, err)
			}
			if got := response.GetStatus().GetStdout().GetTotalBytes(); got != uint64(len(strconv.Itoa(i))+1) {
				t.Errorf("job %d: %d bytes", i, got)
			}
		})
	}
	all.Wait()
}

func TestNoStatusIsLostWhenManyJobsEndAtOnce(t *testing.T) {
	const jobs, callers = 2000, 16
	n := jobs
	if testing.Short() {
		n = 200
	}
	m := boot(t, firstContainment(t)...)
	spread(callers, n, func() {
		r := shell("(true &) ; exit 7") // with an orphan
		response, err := m.calls.Run(context.Background(), &guestv1.RunRequest{Start: r, Forget: true})
		if err != nil || response.GetStatus().GetOutcome().GetExitCode() != 7 {
			t.Errorf("%v, %v", response, err)
		}
	})
	eventually(t, "no zombies", func() bool {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.process.Process.Pid, m.process.Process.Pid))
		return err == nil && len(children) == 0
	})
	list, err := m.calls.List(t.Context(), &guestv1.ListRequest{})
	must(t, err)
	if len(list.GetStatuses()) != 0 {
		t.Errorf("%d jobs were not forgotten", len(list.GetStatuses()))
	}
	entries, err := os.ReadDir(filepath.Join(m.config.GetSpoolDir(), "jobs"))
	must(t, err)
	eventually(t, "no directory is left", func() bool {
		entries, err = os.ReadDir(filepath.Join(m.config.GetSpoolDir(), "jobs"))
		return err == nil && len(entries) == 0
	})
}

func TestOutputIsBoundedWithAHeadAndATail(t *testing.T) {
	m := boot(t)
	r := shell("seq -f %07g 0 99999") // 8 bytes a line, 800,000 in all
	r.Command.OutputLimitBytes = 256 << 10
	response := m.run(r)
	stats := response.GetStatus().GetStdout()
	kept := uint64(0)
	for _, k := range stats.GetKept() {
		kept += k.GetTo() - k.GetFrom()
	}
	if stats.GetTotalBytes() != 800000 || kept+stats.GetDroppedBytes() != 800000 || kept > 256<<10 || len(stats.GetKept()) != 2 {
		t.Errorf("stats %v", stats)
	}
	head, tail := stats.GetKept()[0], stats.GetKept()[1]
	if head.GetFrom() != 0 || head.GetTo() != 128<<10 || tail.GetTo() != 800000 || tail.GetTo()-tail.GetFrom() < 64<<10 {
		t.Errorf("kept %v", stats.GetKept())
	}
	for offset := range stats.GetTotalBytes() / 4000 {
		offset *= 4000
		read, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId(), Offset: offset, MaxBytes: 8})
		must(t, err)
		switch {
		case offset+8 <= head.GetTo() || offset >= tail.GetFrom():
			if want := fmt.Sprintf("%07d\n", offset/8); string(read.GetData()) != want {
				t.Fatalf("at %d: %q, want %q", offset, read.GetData(), want)
			}
		case offset >= head.GetTo():
			if len(read.GetData()) != 0 || read.GetNextKept() != tail.GetFrom() {
				t.Fatalf("dropped %d: %v", offset, read)
			}
		}
	}
	if got := response.GetStdout(); !bytes.HasSuffix(got.GetTail(), []byte("0099999\n")) || !bytes.HasPrefix(got.GetHead(), []byte("0000000\n")) ||
		got.GetTailOffset()+uint64(len(got.GetTail())) != 800000 {
		t.Errorf("excerpt of %d and %d bytes, tail at %d", len(got.GetHead()), len(got.GetTail()), got.GetTailOffset())
	}
}

func TestFastOutputFillsNoMemory(t *testing.T) {
	m := boot(t)
	r := argv("sh", "-c", "head -c 1000000000 /dev/zero; echo the end >&2")
	r.Command.OutputLimitBytes = 8 << 20
	m.begin(r)
	status := m.wait(r.GetJobId())
	if status.GetStdout().GetTotalBytes() != 1e9 || status.GetOutcome().GetExitCode() != 0 {
		t.Errorf("status %v", status)
	}
	if mib := m.memoryMiB(); mib > maxGuestMiB {
		t.Errorf("the guest takes %d MiB", mib)
	}
}

// memoryMiB is the most memory that the guest ever took, less its program's pages.
func (m *machine) memoryMiB() int {
	m.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.process.Process.Pid))
	must(m.t, err)
	var peak, file int
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		switch f[0] {
		case "VmHWM:":
			peak, err = strconv.Atoi(f[1])
		case "RssFile:":
			file, err = strconv.Atoi(f[1])
		}
		must(m.t, err)
	}
	return (peak - file) >> 10
}

func TestADiskThatIsFullStopsNoJob(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can mount a small disk")
	}
	small := smallDisk(t)
	m := boot(t, func(c *guestv1.BootConfig) { c.SpoolDir = filepath.Join(small, "spool") })
	r := shell("head -c 30000000 /dev/zero; rm -f " + filepath.Join(small, "ballast") + "; sleep 0.2; head -c 100000 /dev/zero; exit 6")
	must(t, os.WriteFile(filepath.Join(small, "ballast"), make([]byte, 2<<20), 0o600))
	r.Durable = true
	r.Command.OutputLimitBytes = 64 << 20
	m.begin(r)
	status := m.wait(r.GetJobId())
	stats := status.GetStdout()
	if status.GetOutcome().GetExitCode() != 6 || stats.GetTotalBytes() != 30100000 || stats.GetDroppedBytes() == 0 {
		t.Errorf("status %v", status)
	}
	if kept := stats.GetKept(); len(kept) == 0 || kept[len(kept)-1].GetTo() != 30100000 {
		t.Errorf("it did not recover: %v", kept)
	}
}

func TestListTellsWhatChanged(t *testing.T) {
	m := boot(t)
	list := func(since uint64, wait time.Duration) *guestv1.ListResponse {
		t.Helper()
		response, err := m.calls.List(t.Context(), &guestv1.ListRequest{SinceCursor: since, Wait: durationpb.New(wait)})
		must(t, err)
		return response
	}
	if first := list(0, 0); len(first.GetStatuses()) != 0 || first.GetBootId() != m.hello.GetBootId() {
		t.Errorf("at first %v", first)
	}
	answers := make(chan *guestv1.ListResponse)
	go func() {
		response, _ := m.calls.List(context.Background(), &guestv1.ListRequest{Wait: durationpb.New(time.Minute)})
		answers <- response
	}()
	let := filepath.Join(m.dir, "let")
	r := shell("for i in $(seq 1000); do echo $i; done; while [ ! -e " + let + " ]; do sleep 0.01; done; exit 3")
	m.begin(r)
	a := <-answers
	if len(a.GetStatuses()) != 1 || a.GetStatuses()[0].GetDone() {
		t.Fatalf("the start: %v", a)
	}
	cursor, growths := a.GetNextCursor(), 0
	for {
		response := list(cursor, time.Minute)
		if len(response.GetStatuses()) != 1 || response.GetNextCursor() <= cursor || response.GetStatuses()[0].GetCursor() <= cursor {
			t.Fatalf("a change: %v after %d", response, cursor)
		}
		cursor = response.GetNextCursor()
		if s := response.GetStatuses()[0]; s.GetDone() {
			if s.GetOutcome().GetExitCode() != 3 {
				t.Errorf("the end: %v", s)
			}
			break
		}
		growths++
		if response.GetStatuses()[0].GetStdout().GetTotalBytes() == 3893 {
			must(t, os.WriteFile(let, nil, 0o600))
		}
	}
	if growths < 1 || growths > 100 {
		t.Errorf("a thousand lines were announced %d times", growths)
	}
	begun := time.Now()
	if response := list(cursor, 100*time.Millisecond); len(response.GetStatuses()) != 0 || time.Since(begun) < 100*time.Millisecond {
		t.Errorf("nothing: %v after %v", response, time.Since(begun))
	}
	ids := []string{r.GetJobId()}
	for range 4 {
		other := argv("true")
		m.run(other)
		ids = append(ids, other.GetJobId())
	}
	var paged []string
	for since := uint64(0); ; {
		response, err := m.calls.List(t.Context(), &guestv1.ListRequest{SinceCursor: since, Limit: 2})
		must(t, err)
		for _, s := range response.GetStatuses() {
			paged = append(paged, s.GetJobId())
		}
		since = response.GetNextCursor()
		if !response.GetMore() {
			break
		}
	}
	if fmt.Sprint(paged) != fmt.Sprint(ids) {
		t.Errorf("pages %v, want %v", paged, ids)
	}
}

func TestAForgottenJobNeverBeginsAgain(t *testing.T) {
	m := boot(t)
	file := filepath.Join(m.dir, "begun")
	for _, durable := range []bool{false, true} {
		r := shell("echo x >> " + file)
		r.Durable = durable
		m.run(r)
		for range 2 { // it is idempotent
			response, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{r.GetJobId(), newID(), r.GetJobId()}})
			must(t, err)
			if len(response.GetKeptJobIds()) != 0 {
				t.Errorf("kept %v", response)
			}
		}
		refusedFor(t, m, r, "FORGOTTEN")
	}
	quick := shell("echo x >> " + file)
	_, err := m.calls.Run(t.Context(), &guestv1.RunRequest{Start: quick, Forget: true})
	must(t, err)
	refusedFor(t, m, quick, "FORGOTTEN")
	if n := lines(t, file); n != 3 {
		t.Errorf("three jobs ran %d times", n)
	}
	running := argv("sleep", "60")
	m.begin(running)
	response, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{running.GetJobId()}})
	must(t, err)
	if fmt.Sprint(response.GetKeptJobIds()) != fmt.Sprint([]string{running.GetJobId()}) {
		t.Errorf("a running job: kept %v", response)
	}
}

func TestAJobWithoutReadersIsKilledAfterItsGrace(t *testing.T) {
	m := boot(t)
	attached := func(grace time.Duration) (*guestv1.StartRequest, context.CancelFunc) {
		r := argv("sleep", "60")
		r.KillOnDisconnect, r.DisconnectGrace = true, durationpb.New(grace)
		ctx, cancel := context.WithCancel(context.Background())
		go func() { _, _ = m.calls.Run(ctx, &guestv1.RunRequest{Start: r}) }()
		eventually(t, "it runs", func() bool {
			response, err := m.calls.List(context.Background(), &guestv1.ListRequest{})
			if err != nil {
				return false
			}
			for _, s := range response.GetStatuses() {
				if s.GetJobId() == r.GetJobId() {
					return true
				}
			}
			return false
		})
		return r, cancel
	}
	outcomeIn := func(r *guestv1.StartRequest, within time.Duration) *berthv1.Outcome {
		var o *berthv1.Outcome
		for deadline := time.Now().Add(within); o == nil; time.Sleep(10 * time.Millisecond) {
			list, err := m.calls.List(context.Background(), &guestv1.ListRequest{})
			must(t, err)
			for _, s := range list.GetStatuses() {
				if s.GetJobId() == r.GetJobId() {
					o = s.GetOutcome()
				}
			}
			if time.Now().After(deadline) {
				break
			}
		}
		return o
	}
	r, cancel := attached(0)
	cancel()
	if o := outcomeIn(r, time.Minute); o.GetCause() != berthv1.Cause_CAUSE_STOPPED || !strings.HasPrefix(o.GetReason(), "disconnected: ") {
		t.Errorf("without grace: %v", o)
	}
	r, cancel = attached(300 * time.Millisecond)
	// A second reader saves it while it stays.
	reading, leave := context.WithCancel(t.Context())
	ended := make(chan struct{})
	stream, err := m.calls.Attach(reading)
	must(t, err)
	must(t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: r.GetJobId()}}}))
	_, err = stream.Recv()
	must(t, err)
	go func() {
		defer close(ended)
		_, _ = stream.Recv()
	}()
	cancel()
	if o := outcomeIn(r, 600*time.Millisecond); o != nil {
		t.Errorf("killed beside a reader: %v", o)
	}
	leave()
	<-ended
	// A call that waits is no reader.
	waited, err := m.calls.Wait(t.Context(), &guestv1.WaitRequest{JobId: r.GetJobId(), Wait: durationpb.New(time.Minute)})
	must(t, err)
	if o := waited.GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_STOPPED {
		t.Errorf("after the reader left: %v", o)
	}
	started := argv("sleep", "60")
	started.KillOnDisconnect, started.DisconnectGrace = true, durationpb.New(100*time.Millisecond)
	m.begin(started)
	if o := outcomeIn(started, time.Minute); o.GetCause() != berthv1.Cause_CAUSE_STOPPED {
		t.Errorf("never attached: %v", o)
	}
	kept := argv("sleep", "60")
	ctx, leave := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer leave()
	_, err = m.calls.Run(ctx, &guestv1.RunRequest{Start: kept})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a caller that leaves: %v", err)
	}
	if o := outcomeIn(kept, 300*time.Millisecond); o != nil {
		t.Errorf("a job that may continue: %v", o)
	}
}

func TestTheEndOfTheGuestIsTheEndOfItsJobs(t *testing.T) {
	for name, way := range containments(t) {
		t.Run(name, func(t *testing.T) {
			m := way.boot(t)
			seconds := unique()
			m.begin(shell("trap '' TERM; setsid sleep " + seconds + " & while :; do sleep " + seconds + "; done"))
			m.begin(shell("sleep " + seconds))
			_, err := m.calls.Run(t.Context(), &guestv1.RunRequest{Start: shell("setsid sleep " + seconds + " >/dev/null 2>&1 &"), Forget: true})
			must(t, err)
			m.end()
			if left := processesWith("sleep " + seconds); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
			if dir := m.config.GetCgroupDir(); dir != "" {
				entries, err := os.ReadDir(filepath.Join(dir, "jobs"))
				must(t, err)
				for _, e := range entries {
					if e.IsDir() {
						t.Errorf("the cgroup %s is left", e.Name())
					}
				}
			}
		})
	}
}

func TestAsPID1ItSeesOnlyItsMachineReapsItsOrphansAndObeysNoJob(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make namespaces")
	}
	m := boot(t, append(firstContainment(t), func(c *guestv1.BootConfig) { c.MountProc = true })...)
	response := m.run(shell("readlink /proc/1/exe; (sleep 0.1 &); setsid sleep 0.1 & exit 3"))
	if o := response.GetStatus().GetOutcome(); o.GetExitCode() != 3 {
		t.Errorf("outcome %v", o)
	}
	if got, self := strings.TrimSpace(string(response.GetStdout().GetHead())), m.process.Path; filepath.Base(got) != filepath.Base(self) {
		t.Errorf("process 1 is %q, want %q", got, self)
	}
	eventually(t, "the orphans are reaped", func() bool {
		out := m.run(shell("cat /proc/[0-9]*/stat | grep -c '(sleep)'")).GetStdout().GetHead()
		return strings.TrimSpace(string(out)) == "0"
	})
	for _, script := range []string{"kill 1", "kill $PPID", "kill -HUP 1", "kill -INT 1", "kill -QUIT 1", "kill -SEGV 1", "kill -KILL 1", "kill -STOP 1"} {
		if o := m.run(shell(script)).GetStatus().GetOutcome(); o.Exit == nil || o.GetExitCode() != 0 {
			t.Errorf("%s: %v", script, o)
		}
	}
	m.end() // TERM, from outside, and it exits 0
}

// way is a way of keeping a job together.
type way struct {
	kind   guestv1.Containment
	how    manner
	change []func(*guestv1.BootConfig)
}

func (w way) boot(t *testing.T, change ...func(*guestv1.BootConfig)) *machine {
	t.Helper()
	m := bootAs(t, w.how, append(slices.Clone(w.change), change...)...)
	if got := m.hello.GetContainment(); got != w.kind {
		t.Errorf("Hello says %v, want %v", got, w.kind)
	}
	return m
}

// containments are the ways of keeping a job together that can be tried here.
func containments(t *testing.T) map[string]way {
	t.Helper()
	all := map[string]way{
		"tag": {kind: guestv1.Containment_CONTAINMENT_TAG},
		"process group": {
			kind: guestv1.Containment_CONTAINMENT_PROCESS_GROUP,
			how:  manner{script: `ulimit -x 1000; exec "$0"`}, // no space for a tag
		},
	}
	if os.Getuid() == 0 {
		all["tag, without root"] = way{
			kind: guestv1.Containment_CONTAINMENT_TAG,
			how:  manner{credential: &syscall.Credential{Uid: 65534, Gid: 65534}},
		}
	}
	if dir := cgroupDir(t); dir != "" {
		all["cgroup"] = way{
			kind:   guestv1.Containment_CONTAINMENT_CGROUP,
			change: []func(*guestv1.BootConfig){func(c *guestv1.BootConfig) { c.CgroupDir = dir }},
		}
	} else {
		t.Log("no cgroup2 directory can be made here: that way is not tried")
	}
	return all
}

// firstContainment is the best way that can be tried here.
func firstContainment(t *testing.T) []func(*guestv1.BootConfig) {
	t.Helper()
	if dir := cgroupDir(t); dir != "" {
		return []func(*guestv1.BootConfig){func(c *guestv1.BootConfig) { c.CgroupDir = dir }}
	}
	return nil
}

var sleeps = 100000 + os.Getpid()%100000

// unique returns a number of seconds to sleep that no other process sleeps.
func unique() string {
	sleeps++
	return strconv.Itoa(sleeps)
}

func refusedFor(t *testing.T, m *machine, r *guestv1.StartRequest, reason string) {
	t.Helper()
	_, err := m.calls.Start(t.Context(), r)
	wantRefusal(t, err, reason)
}

// reasonOf returns the reason in an error of this guest's, for programs.
func reasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == errorDomain {
			return info.GetReason()
		}
	}
	return ""
}
