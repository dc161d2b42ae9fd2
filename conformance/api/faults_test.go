package api

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestTwoHundredJobsAtOnceAreAllHonest(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	const jobs = 200
	ids := make([]string, jobs)
	var group sync.WaitGroup
	for i := range jobs {
		group.Go(func() {
			reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
				SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: fmt.Sprintf("echo begin %d; sleep 1; echo end %d; exit %d", i, i, i)},
			})
			if err != nil {
				t.Errorf("start job %d: %v", i, err)
				return
			}
			ids[i] = reply.GetJob().GetId()
		})
	}
	group.Wait()
	if t.Failed() {
		return
	}
	w.restart(t) // in the middle of them
	for i, id := range ids {
		wantExit(t, w.wait(t, id), int32(i))
		if got, want := w.output(t, id), fmt.Sprintf("begin %d\nend %d\n", i, i); got != want {
			t.Errorf("job %d wrote %q, want %q", i, got, want)
		}
	}
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

func TestFiftySandboxesAtOnce(t *testing.T) {
	t.Parallel()
	w := start(t)
	repo := repository(t)
	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{
				Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: repo}},
			}})
			if err != nil {
				t.Errorf("create sandbox %d: %v", i, err)
				return
			}
			id := reply.GetSandbox().GetId()
			ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
				SandboxId: id, Spec: &berthv1.JobSpec{Shell: fmt.Sprintf("cat README; exit %d", i)},
			})
			if err != nil || ran.GetJob().GetOutcome().GetExitCode() != int32(i) || string(ran.GetStdout().GetHead()) != "hello\n" {
				t.Errorf("sandbox %d: %v, %v", i, ran, err)
			}
			if _, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: id}); err != nil {
				t.Errorf("destroy sandbox %d: %v", i, err)
			}
		})
	}
	group.Wait()
	w.WantNothingLeft(t)
	w.Stop(t)
}

// story is one line of work that goes on while the broker is killed again and again: create, start,
// stop, wait, destroy, each repeated with its request id until it is answered.
type story struct {
	w       *harness
	number  int
	problem []string
}

func (s *story) wrong(format string, args ...any) {
	s.problem = append(s.problem, fmt.Sprintf("story %d: ", s.number)+fmt.Sprintf(format, args...))
}

func (s *story) tell(ctx context.Context) {
	made, err := s.w.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{RequestId: fmt.Sprintf("c%d", s.number)})
	if err != nil {
		s.wrong("create: %v", err)
		return
	}
	sandbox := made.GetSandbox().GetId()
	code := int32(s.number % 100)
	job := s.start(ctx, sandbox, "job", fmt.Sprintf("echo job >> count; for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; exit %d", code))
	endless := s.start(ctx, sandbox, "endless", "echo endless >> count; sleep 1000")
	if endless != "" {
		reply, err := s.w.Jobs().StopJob(ctx, &berthv1.StopJobRequest{RequestId: fmt.Sprintf("s%d", s.number), JobId: endless, Grace: durationpb.New(time.Second)})
		if err != nil || reply.GetJob().GetOutcome().GetCause() != berthv1.Cause_CAUSE_STOPPED {
			s.wrong("stop: %v, %v", reply, err)
		}
	}
	if job != "" {
		done, err := s.w.WaitJob(ctx, job)
		if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_EXITED || done.GetOutcome().GetExitCode() != code {
			s.wrong("the job ended as %v (%v), want %d", done.GetOutcome(), err, code)
		}
		if data, gaps, err := s.w.ReadAllOutput(ctx, job, berthv1.Stream_STREAM_STDOUT); err != nil || len(gaps) > 0 || string(data) != "1\n2\n3\n4\n5\n" {
			s.wrong("the output is %q (gaps %v, %v)", data, gaps, err)
		}
	}
	s.counted(ctx, sandbox)
	gone, err := s.w.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{RequestId: fmt.Sprintf("d%d", s.number), SandboxId: sandbox})
	if err != nil || gone.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		s.wrong("destroy: %v, %v", gone, err)
	}
}

// counted checks how often the story's commands ran.
func (s *story) counted(ctx context.Context, sandbox string) {
	ran, err := s.w.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
		RequestId: fmt.Sprintf("r%d", s.number), SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"cat", "count"}},
	})
	count := string(ran.GetStdout().GetHead())
	if err != nil || strings.Count(count, "job\n") != 1 || strings.Count(count, "endless\n") > 1 {
		s.wrong("its commands ran as often as %q says (%v)", count, err)
	}
}

func (s *story) start(ctx context.Context, sandbox, name, shell string) string {
	reply, err := s.w.Jobs().StartJob(ctx, &berthv1.StartJobRequest{
		RequestId: fmt.Sprintf("j%d-%s", s.number, name), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell},
	})
	if err != nil {
		s.wrong("start %s: %v", name, err)
		return ""
	}
	return reply.GetJob().GetId()
}

func TestKillsAtRandomMomentsLoseNothing(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if said := os.Getenv("BERTH_SEED"); said != "" {
		var err error
		if seed, err = strconv.ParseUint(said, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("BERTH_SEED=%d repeats the moments of the kills, as far as the kernel lets it", seed)
	moments := rand.New(rand.NewPCG(seed, 1))
	w := start(t)
	// A broker on a busy host may be killed many times over before it can answer: that is no loss.
	patient, err := client.Dial(w.Broker.Address, client.WithRetryTimeout(10*time.Minute, 10*time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = patient.Close() })
	w.Client = patient
	stories := make([]*story, 24)
	if fixture.OnDocker() {
		stories = stories[:8] // an engine starts a few machines a second, whatever one does
	}
	var telling sync.WaitGroup
	telling.Go(func() {
		for i := range stories {
			stories[i] = &story{w: w, number: i}
			telling.Go(func() { stories[i].tell(w.ctx) })
			pause(time.Duration(moments.IntN(300)) * time.Millisecond)
		}
	})
	over := make(chan struct{})
	go func() { telling.Wait(); close(over) }()
	kills := 0
	uptimes := rand.New(rand.NewPCG(seed, 2))
	for done := false; !done; {
		var kill <-chan time.Time
		if kills < 40 { // then it must come to its end
			kill = time.After(time.Duration(uptimes.IntN(500)) * time.Millisecond)
		}
		select {
		case <-over:
			done = true
		case <-kill:
			w.restart(t)
			kills++
		}
	}
	for _, s := range stories {
		for _, problem := range s.problem {
			t.Error(problem)
		}
	}
	t.Logf("the broker was killed %d times", kills)
	w.WantNothingLeft(t)
	live, err := w.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{})
	if err != nil || len(live.GetSandboxes()) != 0 {
		t.Errorf("the ledger has %v alive (%v)", live, err)
	}
}

func (w *harness) state(t *testing.T, id string) berthv1.SandboxState {
	t.Helper()
	reply, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: id})
	if err != nil {
		t.Fatal(err)
	}
	return reply.GetSandbox().GetState()
}

func TestADeadGuestIsToldAndTheSandboxCanBeResumed(t *testing.T) {
	t.Parallel()
	w := start(t)
	made := w.create(t, nil)
	sandbox := made.GetId()
	w.run(t, sandbox, "echo kept > file")
	before := w.start(t, sandbox, "while [ ! -e go ]; do sleep 0.05; done; exit 7").GetId()
	within := w.start(t, sandbox, "sleep 1000").GetId()
	w.Kill(t)
	w.letEnd(t, made, before)
	w.killMachines(t)
	w.Start(t)
	eventually(t, "the sandbox is STOPPED", func() bool {
		return w.state(t, sandbox) == berthv1.SandboxState_SANDBOX_STATE_STOPPED
	})
	for _, id := range []string{before, within} {
		reply, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: id, Wait: durationpb.New(time.Minute)})
		if err != nil || reply.GetJob().GetState() != berthv1.JobState_JOB_STATE_UNKNOWN {
			t.Fatalf("a job of a stopped machine is %v (%v), want UNKNOWN at once", reply, err)
		}
	}
	_, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
	wantReason(t, err, berthv1.Reason_REASON_WRONG_STATE)
	resumed, err := w.Sandboxes().ResumeSandbox(w.ctx, &berthv1.ResumeSandboxRequest{SandboxId: sandbox})
	if err != nil || resumed.GetSandbox().GetGeneration() != 2 {
		t.Fatalf("resumed: %v, %v; want generation 2", resumed, err)
	}
	wantExit(t, w.wait(t, before), 7)
	if outcome := w.wait(t, within).GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_LOST || outcome.Exit != nil {
		t.Errorf("a job whose guest was killed ended as %v, want LOST without a code", outcome)
	}
	if got := w.run(t, sandbox, "cat file").GetStdout().GetText(); got != "kept\n" {
		t.Errorf("the disk of a resumed machine has %q", got)
	}
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

// letEnd makes the file go in the sandbox's workspace while the broker is away, and waits until the guest has
// written down how the job that waited for it ended. What a container's guest has written is not to be seen
// from here: there, only time is left to wait for.
func (w *harness) letEnd(t *testing.T, sandbox *berthv1.Sandbox, job string) {
	t.Helper()
	file := filepath.Join(sandbox.GetWorkspacePath(), "go")
	if fixture.OnDocker() {
		containers, err := w.Containers()
		if err != nil || len(containers) != 1 {
			t.Fatalf("there are containers %v (%v)", containers, err)
		}
		if out, err := exec.Command("docker", "exec", containers[0], "touch", file).CombinedOutput(); err != nil {
			t.Fatalf("let the job end: %v: %s", err, out)
		}
		pause(5 * time.Second)
		return
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the machine's disk has the outcome", func() bool {
		found, err := filepath.Glob(filepath.Join(w.State(), "*", "*", "spool", "jobs", job, "status"))
		return err == nil && len(found) == 1
	})
}

func TestAMachineRemovedBehindOurBackIsLost(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	job := w.start(t, sandbox, "sleep 1000").GetId()
	w.Kill(t)
	w.removeMachines(t)
	w.Start(t)
	eventually(t, "the sandbox is LOST", func() bool { return w.state(t, sandbox) == berthv1.SandboxState_SANDBOX_STATE_LOST })
	if outcome := w.wait(t, job).GetOutcome(); outcome.GetCause() != berthv1.Cause_CAUSE_LOST || !strings.HasPrefix(outcome.GetReason(), "machine_gone") {
		t.Errorf("a job of a machine that is gone ended as %v", outcome)
	}
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

func TestDestroyOvertakesACreate(t *testing.T) {
	t.Parallel()
	w := start(t)
	created := make(chan error, 1)
	go func() {
		_, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{RequestId: "slow", Spec: &berthv1.SandboxSpec{
			Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "ssh://127.0.0.1:1/x"}},
			Env:       map[string]string{"GIT_SSH_COMMAND": "sleep 1000;"},
		}})
		created <- err
	}()
	var sandbox string
	eventually(t, "the sandbox is being set up", func() bool {
		list, err := w.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{})
		if err != nil || len(list.GetSandboxes()) != 1 {
			return false
		}
		sandbox = list.GetSandboxes()[0].GetId()
		got, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
		return err == nil && got.GetSandbox().GetProgress().GetStep() == "workspace"
	})
	w.restart(t) // the setup goes on across it
	var destroying sync.WaitGroup
	for range 5 {
		destroying.Go(func() {
			if _, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: sandbox}); err != nil {
				t.Errorf("destroy: %v", err)
			}
		})
	}
	destroying.Wait()
	wantReason(t, <-created, berthv1.Reason_REASON_WRONG_STATE)
	w.WantNothingLeft(t)
}

func TestTermDrainsAndJobsLiveOn(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	job := w.start(t, sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 9").GetId()
	waiting := make(chan error, 1)
	impatient, err := client.Dial(w.Broker.Address, client.WithRetryTimeout(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = impatient.Close() }()
	go func() {
		_, err := impatient.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: job, Wait: durationpb.New(10 * time.Minute)})
		waiting <- err
	}()
	pause(2 * time.Second) // that the call is waiting can't be seen from outside
	w.Stop(t)              // in less time than the caller meant to wait
	wantReason(t, <-waiting, berthv1.Reason_REASON_STOPPING)
	w.Start(t)
	w.run(t, sandbox, "touch go")
	wantExit(t, w.wait(t, job), 9)
	w.destroy(t, sandbox)
}

func TestADaemonThatCannotServeSaysWhyInOneLine(t *testing.T) {
	t.Parallel()
	w := start(t)
	for name, c := range map[string]struct {
		args  []string
		words string
	}{
		"a second daemon on one ledger": {[]string{"--listen", "unix://" + filepath.Join(w.Dir, "c.sock")}, fmt.Sprint(w.Pid())},
		"an address in use":             {[]string{"--state", filepath.Join(w.Dir, "other")}, "in use"},
		"a state that is a file":        {[]string{"--state", filepath.Join(w.Dir, "berthd.log")}, "--state"},
		"a missing guest":               {[]string{"--guest", filepath.Join(w.Dir, "none")}, "make build"},
		"a long socket path":            {[]string{"--listen", "unix:///" + strings.Repeat("x", 120)}, "107"},
		"a relative socket path":        {[]string{"--listen", "unix://x.sock"}, "absolute"},
		"an address of no kind":         {[]string{"--listen", "x"}, "unix:///path"},
		"an address beyond loopback":    {[]string{"--listen", "tcp://0.0.0.0:0"}, "loopback"},
		"an unknown provider":           {[]string{"--provider", "moon"}, "moon"},
		"a ledger from the future":      {[]string{"--state", futureLedger(t)}, "schema"},
		"a ledger that is none":         {[]string{"--state", brokenLedger(t)}, "ledger"},
		"an unknown flag":               {[]string{"--moon"}, "--moon"},
		"a config with a typo":          {[]string{"--config", typo(t)}, "stat"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(fixture.Build(t).Berthd, append([]string{
				"--state", w.State(), "--run", filepath.Join(w.Dir, "run2"), "--listen", w.Broker.Address}, c.args...)...)
			if c.args[0] == "--listen" && name != "a second daemon on one ledger" {
				cmd.Args = append(cmd.Args[:1], append([]string{"--state", filepath.Join(t.TempDir(), "s")}, c.args...)...)
			}
			out, err := cmd.CombinedOutput()
			if cmd.ProcessState.ExitCode() != 1 {
				t.Fatalf("it exited with %d (%v): %s", cmd.ProcessState.ExitCode(), err, out)
			}
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			if len(lines) != 1 || !strings.HasPrefix(lines[0], "berthd: ") || !strings.Contains(lines[0], c.words) {
				t.Errorf("it says %q, want one line that begins with berthd: and names %q", out, c.words)
			}
		})
	}
}

func futureLedger(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	b := fixture.NewBroker(t, fixture.Build(t), "--state", dir)
	b.Start(t)
	b.Stop(t)
	db, err := bolt.Open(filepath.Join(dir, "ledger.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		meta := tx.Bucket([]byte("v1")).Bucket([]byte("meta"))
		return meta.ForEach(func(key, value []byte) error {
			if !strings.Contains(string(key), "schema") {
				return nil
			}
			future := append([]byte(nil), value...)
			future[len(future)-1] += 6
			return meta.Put(key, future)
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func brokenLedger(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "ledger.db"), []byte(strings.Repeat("no ledger ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func typo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "berthd.yaml")
	if err := os.WriteFile(path, []byte("stat: /x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestAnOrdinaryUserCanServeTrustedWork(t *testing.T) {
	t.Parallel()
	if fixture.OnDocker() {
		t.Skip("who may speak to an engine is no ordinary user")
	}
	testenv.Root(t) // to become another user
	b := fixture.NewBroker(t, fixture.Build(t))
	// The other user needs a directory of its own.
	if err := os.Chmod(b.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	home := filepath.Join(b.Dir, "u")
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	if err := os.Chown(home, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(b.Programs.Berthd, "--state", filepath.Join(home, "state"), "--run", filepath.Join(home, "run"),
		"--listen", "unix://"+filepath.Join(home, "b.sock"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home}
	var log strings.Builder
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	defer func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}()
	c, err := client.Dial("unix://"+filepath.Join(home, "b.sock"), client.WithRetryTimeout(time.Minute, time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	eventually(t, "it answers", func() bool {
		_, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		return err == nil
	})
	reply, err := c.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{})
	if err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	if got := reply.GetSandbox().GetIsolation(); got != berthv1.Isolation_ISOLATION_NONE && got != berthv1.Isolation_ISOLATION_NAMESPACE {
		t.Errorf("the isolation is %s", got)
	}
	marker := "sleep " + unique()
	ran, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: reply.GetSandbox().GetId(), Spec: &berthv1.JobSpec{Shell: "id -u; (setsid " + marker + " &); exit 5"}})
	if err != nil || ran.GetJob().GetOutcome().GetExitCode() != 5 || string(ran.GetStdout().GetHead()) != "65534\n" {
		t.Errorf("a command gave %v, %v", ran, err)
	}
	if _, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: reply.GetSandbox().GetId()}); err != nil {
		t.Errorf("destroy: %v\n%s", err, log.String())
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ended with %v\n%s", err, log.String())
	}
	ended = true
	if out, err := exec.Command("pgrep", "-f", "^"+marker).Output(); err == nil {
		t.Errorf("processes of a destroyed machine are left: %s", out)
	}
}
