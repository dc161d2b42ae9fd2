package cli

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// syncBuffer is a buffer that may be read while it is written.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *syncBuffer) Write(data []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(data)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// shell runs command lines in this process against one broker.
type shell struct {
	address      string
	env          map[string]string
	stdin        io.Reader
	terminal     bool
	pty          *os.File // the terminal that a person sits at
	resized      chan os.Signal
	continued    chan os.Signal
	stdoutTo     io.Writer     // nil: stdout
	stderrTo     io.Writer     // nil: stderr
	retryTimeout time.Duration // with a broker that was reached and is away; zero: 10 s
	interrupts   chan os.Signal
	exited       chan int
	stdout       syncBuffer
	stderr       syncBuffer
}

func (b *fakeBroker) shell() *shell { return &shell{address: "unix://" + b.socket} }

func (s *shell) run(t *testing.T, args ...string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if s.stdin == nil {
		s.stdin = strings.NewReader("")
	}
	retryTimeout := 10 * time.Second
	if s.retryTimeout > 0 {
		retryTimeout = s.retryTimeout
	}
	var stdout, stderr io.Writer = &s.stdout, &s.stderr
	if s.stdoutTo != nil {
		stdout = s.stdoutTo
	}
	if s.stderrTo != nil {
		stderr = s.stderrTo
	}
	return Run(ctx, command.Process{
		Args: args, Terminal: s.pty, Resized: s.resized, Continued: s.continued,
		LookupEnv: func(key string) (string, bool) {
			if key == client.AddressVariable {
				return s.address, true
			}
			value, found := s.env[key]
			return value, found
		},
		Stdin: s.stdin, Stdout: stdout, Stderr: stderr,
		StdoutTerminal: s.terminal, StderrTerminal: s.terminal, StdinTerminal: s.terminal,
		Interrupts: s.interrupts, Exit: func(code int) { s.exited <- code },
		Now: func() time.Time { return now }, Version: "v0.1.0-test",
		ClientOptions: []client.Option{client.WithRetryTimeout(retryTimeout, 100*time.Millisecond)},
	})
}

// TestGolden compares whole runs with testdata/<name>.golden: the command line, the exit code, what
// was asked of the broker, and both streams.
func TestGolden(t *testing.T) {
	formats := []string{command.OutputTable, command.OutputJSON, command.OutputID}
	for _, test := range []struct {
		name     string
		args     []string
		formats  []string // one run each; none is one run as it stands
		env      map[string]string
		stdin    string
		terminal bool
		request  bool // show what was asked for
	}{
		{name: "create", args: []string{"create"}, formats: formats},
		{name: "create with every flag", request: true, env: map[string]string{"FROM_ENV": "e", "SECRET_FROM_ENV": "s"}, args: []string{
			"create", "--provider", "docker", "--image", "golang:1.26", "--repo", "https://example.org/a.git", "--ref", "main", "--depth", "1",
			"--env", "A=1", "--env", "B=x=y,z", "-e", "FROM_ENV", "--secret", "S=t", "--secret", "SECRET_FROM_ENV", "--cpus", "1.5", "--memory", "2GiB",
			"--disk", "20g", "--pids", "512", "--egress", "none", "--session", "issue-7", "--label", "run=42", "--label", "team=a", "--opt", "runtime=runsc",
			"--workspace", "/w", "--max-lifetime", "7d", "--idle", "30m", "--from", "cp_1", "--request-id", "mine",
		}},
		{name: "create from a pool", request: true, args: []string{"create", "--pool", "go", "--request-id", "mine", "-o", "id"}},
		{name: "create from a pool with a spec", args: []string{"create", "--pool", "go", "--image", "x"}},
		{name: "create at an unknown provider", args: []string{"create", "--provider", "nowhere"}},
		{name: "create with refused fields", args: []string{"create", "--provider", "invalid"}},
		{name: "create without the default image", args: []string{"create", "--provider", "imageless"}},
		{name: "create over the quota", args: []string{"create", "--provider", "full"}},
		{name: "create with a session key in use", args: []string{"create", "--session", "issue-42"}},
		{name: "create with a bad size", args: []string{"create", "--memory", "2 apples"}},
		{name: "create with a bad egress", args: []string{"create", "--egress", "some"}},
		{name: "create with a secret that is not in the environment", args: []string{"create", "--secret", "TOKEN"}},
		{name: "create with a secret without a name", args: []string{"create", "--secret", "=hunter2"}},
		{name: "create with a ref without a repo", args: []string{"create", "--ref", "main"}},
		{name: "create with CPUs that are no number", args: []string{"create", "--cpus", "many"}},
		{name: "create with too many CPUs", args: []string{"create", "--cpus", "-1"}},
		{name: "create with too many pids", args: []string{"create", "--pids", "99999999999999999999"}},
		{name: "create with pids that are no number", args: []string{"create", "--pids", "1.5"}},
		{name: "create with a negative depth", args: []string{"create", "--depth", "-1"}},
		{name: "create with too large a memory", args: []string{"create", "--memory", "99999999999999999999GiB"}},
		{name: "create with a negative idle", args: []string{"create", "--idle", "-5s"}},
		{name: "create with a directory that is not there", args: []string{"create", "--repo", "./nowhere"}},
		{name: "create with an argument", args: []string{"create", "local"}},

		{name: "ls", args: []string{"ls"}, formats: formats},
		{name: "ls --all", args: []string{"ls", "--all"}, formats: formats},
		{name: "ls by label", args: []string{"ls", "--label", "run", "--label", "team=a", "-o", "id"}},
		{name: "ls by state", args: []string{"ls", "--state", "stopped,destroyed", "-o", "id"}},
		{name: "ls by session", args: []string{"ls", "--session", "issue-42", "-o", "id"}},
		{name: "ls by an unknown state", args: []string{"ls", "--state", "happy"}},
		{name: "ls in a terminal", args: []string{"ls"}, terminal: true},
		{name: "ls in a terminal without colour", args: []string{"ls"}, terminal: true, env: map[string]string{"NO_COLOR": "1"}},
		{name: "ls of nothing", args: []string{"ls", "--session", "none"}, formats: formats},

		{name: "get", args: []string{"get", sbLive}, formats: formats},
		{name: "get a stopped one", args: []string{"get", sbStopped}},
		{name: "get a destroyed one", args: []string{"get", sbGone}},
		{name: "get by suffix", args: []string{"get", "7qk2", "-o", "id"}},
		{name: "get by prefix and suffix", args: []string{"get", "sb_AB12", "-o", "id"}},
		{name: "get by an ambiguous suffix", args: []string{"get", "12"}},
		{name: "get by an unknown suffix", args: []string{"get", "nope"}},
		{name: "get by a job's id", args: []string{"get", jobDone}},
		{name: "get a missing one", args: []string{"get", sbMissing}},
		{name: "get nothing", args: []string{"get"}},

		{name: "rm", args: []string{"rm", sbLive}, formats: formats},
		{name: "rm several of which one is missing", args: []string{"rm", sbLive, sbMissing, "AB12"}},
		{name: "rm a missing one", args: []string{"rm", sbMissing}},
		{name: "rm several with a request id", args: []string{"rm", "--request-id", "x", sbLive, sbGone}},
		{name: "rm nothing", args: []string{"rm"}},

		{name: "suspend", args: []string{"suspend", sbLive}, formats: formats},
		{name: "suspend with a request id", request: true, args: []string{"suspend", "--request-id", "mine", "7QK2"}},
		{name: "suspend a destroyed one", args: []string{"suspend", sbGone}},
		{name: "suspend nothing", args: []string{"suspend"}},

		{name: "resume", args: []string{"resume", sbStopped}, formats: formats},
		{name: "resume a destroyed one", args: []string{"resume", sbGone}},

		{name: "exec", args: []string{"exec", "7QK2", "--", "true"}, formats: formats},
		{name: "exec with every flag", request: true, env: map[string]string{"FROM_ENV": "e"}, args: []string{
			"exec", "--timeout", "90s", "--kill-grace", "0s", "--cwd", "sub", "--env", "FROM_ENV", "--secret", "S=t", "--user", "1000:1000",
			"--output-limit", "1MiB", "--label", "a=b", "--merge-stderr", "--request-id", "mine", sbLive, "--", "true", "-c", "--", "x",
		}},
		{name: "exec a script", request: true, args: []string{"exec", sbLive, "-c", "true && fail"}},
		{name: "exec that fails", args: []string{"exec", sbLive, "--", "fail"}},
		{name: "exec that crashes", args: []string{"exec", sbLive, "--", "crash"}},
		{name: "exec that times out", args: []string{"exec", "--timeout", "2s", sbLive, "--", "slow"}},
		{name: "exec that is killed for memory", args: []string{"exec", sbLive, "--", "oom"}},
		{name: "exec that is not found", args: []string{"exec", sbLive, "--", "nosuch"}},
		{name: "exec that is lost", args: []string{"exec", sbLive, "--", "lost"}},
		{name: "exec that is stopped", args: []string{"exec", sbLive, "--", "killed"}},
		{name: "exec whose outcome is missing", args: []string{"exec", sbLive, "--", "mystery"}},
		{name: "exec that leaves children", args: []string{"exec", sbLive, "--", "daemon"}},
		{name: "exec with much output", args: []string{"exec", sbLive, "--", "big"}},
		{name: "exec with much output as json", args: []string{"exec", "-o", "json", sbLive, "--", "big"}},
		{name: "exec with stdin", request: true, stdin: "hello", args: []string{"exec", "-i", sbLive, "--", "cat"}},
		{name: "exec without -i leaves stdin alone", request: true, stdin: "hello", args: []string{"exec", sbLive, "--", "cat"}},
		{name: "exec -t without a terminal", request: true, env: map[string]string{"TERM": "vt100"}, args: []string{"exec", "-t", sbLive, "--", "true"}},
		{name: "exec -t as json", args: []string{"exec", "-t", "-o", "json", sbLive, "--", "true"}},
		{name: "exec -i in a terminal as json", terminal: true, args: []string{"exec", "-i", "-o", "json", sbLive, "--", "sh"}},
		{name: "exec whose start is lost", args: []string{"exec", sbLive, "-c", "vanish"}},
		{name: "exec in a stopped sandbox", args: []string{"exec", sbStopped, "--", "true"}},
		{name: "exec in a missing sandbox", args: []string{"exec", sbMissing, "--", "true"}},
		{name: "exec without a dash", args: []string{"exec", sbLive, "ls"}},
		{name: "exec without a command", args: []string{"exec", sbLive}},
		{name: "exec without a sandbox", args: []string{"exec", "--", "true"}},
		{name: "exec of an empty command", args: []string{"exec", sbLive, "--", ""}},
		{name: "exec in a job", args: []string{"exec", "job_9XW4", "--", "true"}},
		{name: "exec with too long a timeout", args: []string{"exec", "--timeout", "99999999h", sbLive, "--", "true"}},
		{name: "exec with a timeout that is none", args: []string{"exec", "--timeout", "soon", sbLive, "--", "true"}},
		{name: "exec with a script and a command", args: []string{"exec", sbLive, "-c", "x", "--", "y"}},

		{name: "start", args: []string{"start", sbLive, "--", "forever"}, formats: formats},
		{name: "start a script", request: true, args: []string{"start", sbLive, "-c", "make", "--timeout", "1h", "--request-id", "mine"}},
		{name: "start what is not found", args: []string{"start", sbLive, "--", "nosuch"}},
		{name: "start with its input open in a terminal", request: true, args: []string{"start", "-it", "--request-id", "mine", sbLive, "--", "forever"}},
		{name: "start in a stopped sandbox", args: []string{"start", sbStopped, "--", "true"}},

		{name: "poll a running job", args: []string{"poll", jobRuns, "--wait", "10ms"}, formats: formats},
		{name: "poll a done job", args: []string{"poll", "8AA1"}, formats: formats},
		{name: "poll for too long", args: []string{"poll", jobRuns, "--wait", "11m"}},
		{name: "poll a missing job", args: []string{"poll", "job_01KBA1BBBB7Q5N3W8D4M1EZZZZ"}},

		{name: "wait", args: []string{"wait", jobDone}, formats: formats},
		{name: "wait for a lost job", args: []string{"wait", jobLost}, formats: formats},
		{name: "wait for a missing job", args: []string{"wait", "job_01KBA1BBBB7Q5N3W8D4M1EZZZZ"}},
		{name: "wait with a deadline", args: []string{"wait", "--deadline", "100ms", jobRuns}},

		{name: "logs", args: []string{"logs", jobDone}, formats: formats},
		{name: "logs of one stream", args: []string{"logs", "--stream", "stderr", "--offset", "9", jobDone}},
		{name: "logs -f of a done job", args: []string{"logs", "-f", jobDone}},
		{name: "logs -f of a lost job", args: []string{"logs", "-f", jobLost}},
		{name: "logs so far of a running job", args: []string{"logs", jobRuns}},
		{name: "logs of an unknown stream", args: []string{"logs", "--stream", "stdin", jobDone}},
		{name: "logs with a negative offset", args: []string{"logs", "--stream", "stdout", "--offset", "-1", jobDone}},
		{name: "logs with a follow that is none", args: []string{"logs", "--follow=maybe", jobDone}},
		{name: "logs with an offset in both streams", args: []string{"logs", "--offset", "9", jobDone}},

		{name: "logs --until-sealed without -f", args: []string{"logs", "--until-sealed", jobDone}},
		{name: "logs -f --until-sealed", args: []string{"logs", "-f", "--until-sealed", jobDone}},

		{name: "run", request: true, args: []string{"run", "--", "fail"}},
		{name: "run with flags of both", args: []string{"run", "--keep", "--image", "i", "-c", "true", "--timeout", "1m", "-e", "A=1"}},
		{name: "run with --keep", args: []string{"run", "--keep", "--", "true"}},
		{name: "run at an unknown provider", args: []string{"run", "--provider", "nowhere", "--", "true"}},
		{name: "run with a pool and flags of exec", args: []string{"run", "--pool", "go", "-t", "--", "true"}},
		{name: "run as json", args: []string{"run", "-o", "json", "--", "true"}},
		{name: "run with a request id", args: []string{"run", "--request-id", "x", "--", "true"}},
		{name: "run without a dash", args: []string{"run", "true"}},
		{name: "run without a command", args: []string{"run"}},
		{name: "run of an empty command", args: []string{"run", "--", ""}},
		{name: "run of a script and a command", args: []string{"run", "-c", "x", "--", "y"}},

		{name: "input with a request id", args: []string{"input", "--request-id", "mine", jobRuns}, stdin: "yes\n"},

		{name: "signal", request: true, args: []string{"signal", jobRuns, "sigterm"}},
		{name: "signal with a request id", request: true, args: []string{"signal", "--request-id", "mine", jobRuns, "HUP"}},
		{name: "signal by number", request: true, args: []string{"signal", "9XW4", "34"}},
		{name: "signal that is none", args: []string{"signal", jobRuns, "SIGNONE"}},
		{name: "signal without a signal", args: []string{"signal", jobRuns}},
		{name: "signal a missing job", args: []string{"signal", "job_01KBA1BBBB7Q5N3W8D4M1EZZZZ", "9"}},

		{name: "stop", args: []string{"stop", "9XW4"}, formats: formats},
		{name: "stop with a grace", request: true, args: []string{"stop", "--grace", "0s", "--request-id", "mine", jobRuns}},
		{name: "stop several of which one is missing", args: []string{"stop", jobRuns, "nope"}},

		{name: "jobs", args: []string{"jobs"}, formats: formats},
		{name: "jobs of a sandbox", args: []string{"jobs", "7QK2"}, formats: formats},
		{name: "jobs --open", args: []string{"jobs", "--open"}, formats: formats},
		{name: "jobs --open by state", args: []string{"jobs", "--open", "--state", "done"}},
		{name: "jobs by state", args: []string{"jobs", "--state", "DONE", "-o", "id"}},

		{name: "providers", args: []string{"providers"}, formats: formats},
		{name: "info", args: []string{"info"}, formats: formats},
		{name: "fsck", args: []string{"fsck"}, formats: formats},
		{name: "fsck --repair", args: []string{"fsck", "--repair"}},
		{name: "fsck with an argument", args: []string{"fsck", "all"}},
		{name: "backup without a file", args: []string{"backup"}},
		{name: "backup to a directory", args: []string{"backup", "/"}},
		{name: "backup to a terminal", args: []string{"backup", "-"}, terminal: true},
		{name: "backup where no file can be", args: []string{"backup", "/proc/nowhere/x"}},
		{name: "version", args: []string{"version"}, formats: formats},

		{name: "an unknown command", args: []string{"sl"}},
		{name: "a command that is like none but in length", args: []string{"bogus"}},
		{name: "help for an unknown command", args: []string{"help", "crate"}},
		{name: "the version by a flag", args: []string{"--version"}},
		{name: "help of create", args: []string{"create", "--help"}},
		{name: "completions for an unknown shell", args: []string{"completion", "tcsh"}},
		{name: "a deadline that is none", args: []string{"ls", "--deadline", "soon"}},
		{name: "a command like no other", args: []string{"frobnicate"}},
		{name: "an unknown flag", args: []string{"ls", "--colour"}},
		{name: "an unknown format", args: []string{"ls", "-o", "yaml"}},
		{name: "an address that is none", args: []string{"ls", "--addr", "berth.example.org"}},
	} {
		runs := test.formats
		if len(runs) == 0 {
			runs = []string{""}
		}
		for _, format := range runs {
			name, args := test.name, test.args
			if format != "" {
				name, args = name+" as "+format, append([]string{args[0], "-o", format}, args[1:]...)
			}
			t.Run(name, func(t *testing.T) {
				b := newBroker(t)
				s := b.shell()
				s.env, s.terminal, s.stdin = test.env, test.terminal, strings.NewReader(test.stdin)
				code := s.run(t, args...)

				var got strings.Builder
				fmt.Fprintf(&got, "$ berth %q\n-- exit %d\n", args, code)
				if test.request {
					got.WriteString("-- request\n")
					if err := present.WriteJSON(&got, b.last); err != nil {
						t.Fatal(err)
					}
				}
				fmt.Fprintf(&got, "-- stdout\n%s\n-- stderr\n%s", s.stdout.String(), s.stderr.String())
				said := madeRequestID.ReplaceAllString(got.String(), "rq_MADE")
				checkGolden(t, name, strings.ReplaceAll(said, b.socket, "SOCKET"))
			})
		}
	}
}

// madeRequestID is a request_id that the client made.
var madeRequestID = regexp.MustCompile(`rq_[0-9A-Z]{26}`)

var notForFiles = regexp.MustCompile(`[^a-zA-Z0-9]+`)

func checkGolden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", strings.Trim(notForFiles.ReplaceAllString(name, "-"), "-")+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: run with -update", err)
	}
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestBytesOfACommandAreExact(t *testing.T) {
	s := newBroker(t).shell()
	if code := s.run(t, "exec", sbLive, "--", "bytes"); code != 0 {
		t.Fatalf("exit %d: %s", code, s.stderr.String())
	}
	if got := s.stdout.String(); got != "a\x00\xff\xfeb\r\n\x1b[0m" {
		t.Errorf("stdout %q", got)
	}
	if got := s.stderr.String(); got != "\xc3(" {
		t.Errorf("stderr %q", got)
	}
}

func TestBytesOfLogsAreExactAndGapsAreTold(t *testing.T) {
	b := newBroker(t)
	all := exactBytes()
	want := append(append([]byte{}, all[:droppedBytes[0]]...), all[droppedBytes[1]:]...)
	for _, args := range [][]string{{"logs", jobBytes}, {"logs", "-f", jobBytes}} {
		s := b.shell()
		if code := s.run(t, args...); code != usage.ExitFailure {
			t.Fatalf("%v: exit %d although bytes are missing", args, code)
		}
		if s.stdout.String() != string(want) {
			t.Errorf("%v: stdout differs: %d bytes, want %d", args, len(s.stdout.String()), len(want))
		}
		const gap = "berth: logs: bytes 1048576 to 1052672 of stdout were dropped (4096 bytes over the job's output limit, where a higher --output-limit keeps more, or over the broker's --retention-output)\n"
		stderr := s.stderr.String()
		if !strings.Contains(stderr, gap) || strings.Replace(stderr, gap, "", 1) != strings.Repeat("\xff\x00\r", 1000) {
			t.Errorf("%v: stderr differs: %d bytes", args, len(stderr))
		}
	}
}

func TestStdinIsPassedOnWhole(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.stdin = bytes.NewReader(exactBytes())
	if code := s.run(t, "exec", "-i", sbLive, "--", "cat"); code != 0 || s.stdout.String() != string(exactBytes()) {
		t.Errorf("exit %d, %d bytes came back: %s", code, len(s.stdout.String()), s.stderr.String())
	}
	s = b.shell()
	s.stdin = bytes.NewReader(exactBytes()[:1<<20+1])
	if code := s.run(t, "exec", "-i", "-o", "json", sbLive, "--", "cat"); code != usage.ExitUsage || !strings.Contains(s.stderr.String(), "over 1 MiB") {
		t.Errorf("exit %d: %s", code, s.stderr.String())
	}
}

func TestWaitOutlastsAKilledBroker(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		b.kill()
		time.Sleep(300 * time.Millisecond)
		b.start()
		<-b.entered
		b.change(func() {
			done := proto.Clone(b.jobs[0]).(*berthv1.Job)
			done.State, done.Outcome = berthv1.JobState_JOB_STATE_DONE, exited(5)
			b.jobs[0] = done
		})
	})
	code := s.run(t, "wait", jobRuns)
	story.Wait()
	if code != 5 || s.stdout.String() != jobRuns+" exited 5\n" {
		t.Errorf("exit %d, stdout %q, stderr %q", code, s.stdout.String(), s.stderr.String())
	}
}

func TestWaitWaitsForABrokerThatIsAwayForLong(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.retryTimeout = 100 * time.Millisecond
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		b.kill()
		for !strings.Contains(s.stderr.String(), "being reached again") && t.Context().Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		b.change(func() {
			for _, job := range b.jobs {
				if job.GetId() == jobRuns {
					job.State, job.Outcome = berthv1.JobState_JOB_STATE_DONE, exited(3)
				}
			}
		})
		b.start()
	})
	code := s.run(t, "wait", jobRuns)
	story.Wait()
	if code != 3 || strings.Count(s.stderr.String(), "being reached again") != 1 {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
}

func TestLogsFollowOverAKilledBroker(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	grow := func(stdout, stderr string) {
		output := b.output[jobRuns]
		b.output[jobRuns] = [2][]byte{append(output[0], stdout...), append(output[1], stderr...)}
	}
	var story sync.WaitGroup
	story.Go(func() {
		<-b.entered
		<-b.entered
		b.change(func() { grow("more\n", "oops\n") })
		b.kill()
		b.change(func() { grow("and more\n", "") })
		b.start()
		<-b.entered
		b.change(func() {
			grow("the end\n", "\x00")
			done := proto.Clone(b.jobs[0]).(*berthv1.Job)
			done.State, done.Outcome = berthv1.JobState_JOB_STATE_DONE, exited(5)
			b.jobs[0] = done
		})
	})
	code := s.run(t, "logs", "-f", jobRuns)
	story.Wait()
	if code != 0 || s.stdout.String() != "working\nmore\nand more\nthe end\n" || s.stderr.String() != "oops\n\x00" {
		t.Errorf("exit %d, stdout %q, stderr %q", code, s.stdout.String(), s.stderr.String())
	}
}

func TestAnAbsentBrokerIsSaidInWords(t *testing.T) {
	b := newBroker(t)
	b.kill()
	want := "berth: cannot reach berthd at unix://" + b.socket +
		": connect: no such file or directory (start it with `berthd`, or set --addr / BERTH_ADDR)\n"
	for _, test := range []struct {
		args []string
		code int
	}{
		{[]string{"ls"}, usage.ExitFailure},
		{[]string{"get", "7QK2"}, usage.ExitFailure},
		{[]string{"exec", sbLive, "--", "true"}, usage.ExitBroker},
		{[]string{"wait", jobDone}, usage.ExitBroker},
		{[]string{"logs", "-f", jobDone}, usage.ExitFailure},
	} {
		s := b.shell()
		if code := s.run(t, test.args...); code != test.code || s.stderr.String() != want {
			t.Errorf("%v: exit %d, stderr %q", test.args, code, s.stderr.String())
		}
	}
	s := b.shell()
	if code := s.run(t, "version"); code != 0 || !strings.Contains(s.stdout.String(), "berthd: cannot reach berthd at") {
		t.Errorf("version: exit %d, stdout %q", code, s.stdout.String())
	}
	b.start()
}

func TestTheFirstInterruptCancelsAndSaysWhatBecomesOfIt(t *testing.T) {
	for _, test := range []struct {
		name   string
		args   []string
		signal os.Signal
		enters int
		code   int
		want   string
	}{
		{
			"a create", []string{"create", "--provider", "slow", "--request-id", "mine"}, os.Interrupt, 1, 130,
			"berth: create: interrupted: the operation continues in the background: join it with the same command and --request-id mine, find it with `berth ls`, or destroy it with `berth rm sb_01KBA9ZZZZ7Q5N3W8D4M1E7NEW`\n",
		},
		{"a command as json", []string{"exec", "-o", "json", sbLive, "--", "hang"}, os.Interrupt, 1, 130, "berth: exec: interrupted: the command is killed\n"},
		{
			"a command with a request id", []string{"exec", "--request-id", "x", sbLive, "--", "hang"}, syscall.SIGTERM, 1, 143,
			"berth: exec: interrupted: the command continues in the background; the same --request-id joins it\n",
		},
		{"a wait", []string{"wait", jobRuns}, os.Interrupt, 1, 130, "berth: wait: interrupted: the job continues in the background\n"},
		{"logs", []string{"logs", "-f", jobRuns}, os.Interrupt, 2, 130, "berth: logs: interrupted: the job continues in the background\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			s := b.shell()
			s.interrupts = make(chan os.Signal, 2)
			var story sync.WaitGroup
			story.Go(func() {
				for range test.enters {
					<-b.entered
				}
				s.interrupts <- test.signal
			})
			code := s.run(t, test.args...)
			story.Wait()
			if code != test.code || s.stderr.String() != test.want {
				t.Errorf("exit %d, stderr %q", code, s.stderr.String())
			}
		})
	}
}

func TestTheSecondInterruptExitsAtOnce(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.interrupts, s.exited = make(chan os.Signal, 2), make(chan int, 1)
	read, write := io.Pipe() // a stdin that blocks: it is not freed by the first interrupt
	s.stdin = read
	var story sync.WaitGroup
	story.Go(func() {
		s.interrupts <- os.Interrupt
		s.interrupts <- os.Interrupt
		if code := <-s.exited; code != 130 {
			t.Errorf("exit %d", code)
		}
		if err := write.Close(); err != nil {
			t.Error(err)
		}
	})
	s.run(t, "exec", "-i", "-o", "json", sbLive, "--", "cat")
	story.Wait()
}

func TestACreatesDeadlineSaysThatTheOperationGoesOn(t *testing.T) {
	s := newBroker(t).shell()
	code := s.run(t, "create", "--provider", "slow", "--request-id", "mine", "--deadline", "200ms")
	if code != usage.ExitFailure || !strings.HasPrefix(s.stderr.String(), "berth: create: the --deadline of 200ms passed: the operation continues in the background: join it") {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
}

func TestProgressIsShownOnATerminalOnlyAndCleaned(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.terminal = true
	s.interrupts = make(chan os.Signal, 2)
	var story sync.WaitGroup
	story.Go(func() {
		for deadline := time.Now().Add(5 * time.Second); !strings.Contains(s.stderr.String(), "cloning…") && time.Now().Before(deadline); {
			time.Sleep(20 * time.Millisecond)
		}
		s.interrupts <- os.Interrupt
	})
	s.run(t, "create", "--provider", "slow")
	story.Wait()
	shown := s.stderr.String()
	if !strings.Contains(shown, "\r\x1b[K| creating… 0s") || !strings.Contains(shown, "cloning… ") {
		t.Errorf("stderr %q", shown)
	}
	_, after, _ := strings.Cut(shown, "cloning…")
	if !strings.Contains(after, "\r\x1b[Kberth: create: interrupted") {
		t.Errorf("the line was not cleaned: %q", after)
	}
}

func TestCompletion(t *testing.T) {
	b := newBroker(t)
	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"sandboxes", []string{"get", ""}, []string{sbLive + "\tRUNNING docker golang:1.26 issue-42"}},
		{"sandboxes by what is typed", []string{"rm", "sb_01KB9"}, nil},
		{"a sandbox by the end of its id", []string{"exec", "7qk2"}, []string{sbLive + "\tRUNNING docker golang:1.26 issue-42"}},
		{"one sandbox only", []string{"exec", sbLive, ""}, nil},
		{"jobs", []string{"logs", "job_01KBA1B"}, []string{jobDone + "\tDONE go build './x y'"}},
		{"several jobs", []string{"stop", jobRuns, "job_01KBA1C"}, []string{jobLost + "\tDONE sleep 1000"}},
		{"states", []string{"jobs", "--state", ""}, []string{"reserved", "running", "done", "unknown"}},
		{"formats", []string{"ls", "-o", ""}, []string{"table", "json", "id"}},
		{"providers", []string{"create", "--provider", ""}, []string{"local\tnamespace", "docker\tcontainer"}},
		{"nothing where there is nothing", []string{"info", ""}, nil},
		{"nothing for a check", []string{"fsck", ""}, nil},
		{"one file only", []string{"backup", "a", ""}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := b.shell()
			s.run(t, append([]string{cobra.ShellCompRequestCmd}, test.args...)...)
			lines := strings.Split(strings.TrimSpace(s.stdout.String()), "\n")
			got := lines[:len(lines)-1] // the last is the directive
			if strings.Join(got, "|") != strings.Join(test.want, "|") || lines[len(lines)-1] != ":4" {
				t.Errorf("got %q, want %q", lines, test.want)
			}
		})
	}
	t.Run("without a broker there is none, at once", func(t *testing.T) {
		s := &shell{address: "unix:///nowhere/d.sock"}
		begun := time.Now()
		s.run(t, cobra.ShellCompRequestCmd, "get", "")
		if got := strings.TrimSpace(s.stdout.String()); got != ":4" || time.Since(begun) > command.CompletionTimeout {
			t.Errorf("got %q after %v", got, time.Since(begun))
		}
	})
	t.Run("every shell has a script", func(t *testing.T) {
		for _, name := range []string{"bash", "zsh", "fish", "powershell"} {
			s := b.shell()
			if code := s.run(t, "completion", name); code != 0 || !strings.Contains(s.stdout.String(), "berth") {
				t.Errorf("%s: exit %d", name, code)
			}
		}
	})
}

func TestEveryCommandIsDocumented(t *testing.T) {
	p := &command.Program{Process: command.Process{LookupEnv: os.LookupEnv}}
	for _, cmd := range rootCommand(p).Commands() {
		if cmd.Short == "" || cmd.Example == "" || strings.Contains(cmd.Short, "\n") {
			t.Errorf("%s needs one line and an example", cmd.Name())
		}
		if !strings.Contains(cmd.Example, "berth "+cmd.Name()) {
			t.Errorf("the examples of %s do not show it", cmd.Name())
		}
	}
}

func TestOpenJobsAreCountedAlike(t *testing.T) {
	b := newBroker(t)
	b.change(func() { // attached, and so not in the sandbox's own count
		b.jobs = append(b.jobs, &berthv1.Job{Id: "job_01KBA1EEEE7Q5N3W8D4M1E9DD1", SandboxId: sbLive, State: berthv1.JobState_JOB_STATE_RUNNING})
	})
	listed := b.shell()
	if code := listed.run(t, "jobs", sbLive, "--open", "-o", "id"); code != 0 {
		t.Fatalf("exit %d, stderr %q", code, listed.stderr.String())
	}
	want := fmt.Sprint(strings.Count(listed.stdout.String(), "job_"))
	for args, column := range map[string]string{"get " + sbLive: "Open jobs:", "ls": sbLive} {
		s := b.shell()
		if code := s.run(t, strings.Fields(args)...); code != 0 {
			t.Fatalf("%s: exit %d, stderr %q", args, code, s.stderr.String())
		}
		_, line, _ := strings.Cut(s.stdout.String(), column)
		line, _, _ = strings.Cut(line, "\n")
		if !slices.Contains(strings.Fields(line), want) {
			t.Errorf("%s shows %q, want %s open jobs", args, line, want)
		}
	}
}

func TestOutputThatWasNotKeptIsSaidToBe(t *testing.T) {
	b := newBroker(t)
	b.change(func() {
		for _, job := range b.jobs {
			if job.GetId() == jobBytes {
				job.Spec.Keep = &berthv1.JobSpec_KeepOutput{KeepOutput: false}
				job.Stdout = &berthv1.OutputStats{TotalBytes: 38, DroppedBytes: 38, Sealed: true}
			}
		}
	})
	const words = "not kept (an attached command's output goes to its caller; start it detached to keep it)\n"
	s := b.shell()
	if code := s.run(t, "poll", jobBytes); code != 0 || !strings.Contains(s.stdout.String(), "38B, "+words) {
		t.Errorf("poll: exit %d, stdout %q", code, s.stdout.String())
	}
	s = b.shell()
	if code := s.run(t, "logs", "--stream", "stdout", jobBytes); code != usage.ExitFailure || s.stderr.String() != "berth: logs: bytes 1048576 to 1052672 of stdout were "+words {
		t.Errorf("logs: exit %d, stderr %q", code, s.stderr.String())
	}
}

func TestADirectoryAsRepoIsMadeAbsolute(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.MkdirAll("a/b", 0o700); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for given, want := range map[string]string{
		".": here, "a/b": filepath.Join(here, "a/b"), "./a/../a": filepath.Join(here, "a"), "..": filepath.Dir(here),
		"/srv/app": "/srv/app", "https://example.org/a.git": "https://example.org/a.git", "git@example.org:a.git": "git@example.org:a.git",
		"file:///srv/a": "file:///srv/a", "not-here": "not-here",
	} {
		b := newBroker(t)
		s := b.shell()
		if code := s.run(t, "create", "--repo", given); code != 0 {
			t.Errorf("%s: exit %d, stderr %q", given, code, s.stderr.String())
			continue
		}
		if got := b.last.(*berthv1.CreateSandboxRequest).GetSpec().GetWorkspace().GetRepo().GetUrl(); got != want {
			t.Errorf("%s: sent as %s, want %s", given, got, want)
		}
	}
}

func TestAnAddressInTheEnvironmentThatIsNoneIsAUsageError(t *testing.T) {
	for _, command := range []string{"ls", "version"} {
		s := &shell{address: "nowhere"}
		if code := s.run(t, command); code != usage.ExitUsage || !strings.Contains(s.stderr.String(), `BERTH_ADDR "nowhere": it must be unix:///path or tcp://host:port`) {
			t.Errorf("%s: exit %d, stderr %q", command, code, s.stderr.String())
		}
	}
}

func TestNoUsageGivesAFlagAFalseType(t *testing.T) {
	var check func(*cobra.Command)
	check = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(flag *pflag.Flag) {
			if strings.Contains(flag.Usage, "`") {
				t.Errorf("%s --%s: a backquote in %q", cmd.CommandPath(), flag.Name, flag.Usage)
			}
		})
		for _, sub := range cmd.Commands() {
			check(sub)
		}
	}
	check(rootCommand((&command.Program{Process: command.Process{LookupEnv: os.LookupEnv}})))
}
