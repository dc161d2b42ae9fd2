package crash

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/failpoint"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { fixture.Main(m) }

// Tuning.
const (
	storyTimeout  = 6 * time.Minute // for one line of work with a crash in it
	buildTimeout  = 30 * time.Minute
	maxRestarts   = 20                     // crashes in one story; more is a crash loop
	commitsIn     = 30                     // a story's commits, roughly; each is a place to crash before and after
	probeInterval = 100 * time.Millisecond // at something that is waited for
)

// unreached are the failpoints that this story cannot come to, and why. Each has a test of its own in
// its package.
var unreached = map[string]string{
	"guestBeforeAdopt":   "only a fork or a restore gives a guest another machine or generation",
	"guestAfterAdopt":    "only a fork or a restore gives a guest another machine or generation",
	"storeBeforeMigrate": "the ledger has one schema so far",
	"storeAfterMigrate":  "the ledger has one schema so far",
	"storeBeforeRename":  "a copy is made before an upgrade and for a backup only",
	"storeAfterRename":   "a copy is made before an upgrade and for a backup only",
}

// elsewhere says why a failpoint cannot be reached on the provider that the suite runs against; ""
// where it can.
func elsewhere(point failpoint.Failpoint) string {
	switch onDocker := fixture.OnDocker(); {
	case unreached[point.Name] != "":
		return unreached[point.Name]
	case onDocker && point.Package == "providers/local", !onDocker && point.Package == "providers/docker":
		return "it is in another provider than " + fixture.ProviderName()
	case !onDocker && point.Name == cutPoint:
		return "the local provider cannot cut a machine off"
	default:
		return ""
	}
}

// The failpoints that need something of their story.
const (
	cutPoint    = "lifecycleBeforeCut" // a machine that is to be cut off
	volumePoint = "dockerAfterVolume"  // a guest that the engine has not seen yet
)

// onEveryCommit are hit again and again in one story, so they are visited at each of the first times.
var onEveryCommit = map[string]bool{"storeBeforeCommit": true, "storeAfterCommit": true}

func TestACrashAtEveryFailpointLosesNothing(t *testing.T) {
	testenv.Asked(t, "crash")
	if !fixture.OnDocker() {
		testenv.Root(t)
		testenv.Namespaces(t)
	}
	flags := fixture.ProviderFlags(t)
	ctx, cancel := context.WithTimeout(context.Background(), buildTimeout)
	defer cancel()
	programs, points, err := failpoint.Build(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	repo := fixture.Repository
	if !fixture.OnDocker() {
		repo = fixture.MakeRepository(t)
	}
	for _, point := range points {
		if elsewhere(point) != "" {
			continue
		}
		times := 1
		if onEveryCommit[point.Name] {
			times = commitsIn
		}
		for nth := range times {
			t.Run(fmt.Sprintf("%s/%d", point.Name, nth+1), func(t *testing.T) {
				t.Parallel()
				s := newStory(t, programs, flags, repo, point, nth)
				s.tell()
				if s.crashes() == 0 && !(onEveryCommit[point.Name] && nth > 5) {
					t.Errorf("the story never came to %s (%s:%d)", point.Name, point.File, point.Line)
				}
			})
		}
	}
}

// term is what switches a failpoint on, at its nth time from 0 on.
func term(name string, nth int) string {
	if nth == 0 {
		return name + "=return"
	}
	return fmt.Sprintf("%s=%d*off->return", name, nth)
}

// story is one line of work with one crash in it: a repository cloned, a command, a job that ends, a
// job that is stopped, a freeze, and the end of it all.
type story struct {
	t       *testing.T
	broker  *fixture.Broker
	client  *client.Client
	ctx     context.Context
	repo    string
	egress  berthv1.Egress_Mode
	began   time.Time
	inGuest bool

	mu       sync.Mutex
	restarts int
}

// counter is a file in the sandbox to which each job appends its name: how often it ran.
const counter = ".git/counter"

func newStory(t *testing.T, programs fixture.Programs, flags []string, repo string, point failpoint.Failpoint, nth int) *story {
	s := &story{t: t, repo: repo, began: time.Now(), inGuest: strings.HasPrefix(point.Package, "providers/guest")}
	if point.Name == cutPoint {
		s.egress = berthv1.Egress_MODE_NONE
	}
	var env []string
	switch {
	case s.inGuest && fixture.OnDocker():
		programs.Guest = explosiveGuestOfOneFile(t, programs.Guest, term(point.Name, nth))
	case s.inGuest:
		programs.Guest = explosiveGuest(t, programs.Guest, term(point.Name, nth))
	default:
		env = []string{failpoint.EnvironmentVariable + "=" + term(point.Name, nth)}
	}
	if point.Name == volumePoint {
		programs.Guest = guestOfItsOwn(t, programs.Guest)
	}
	s.broker = fixture.NewBroker(t, programs, append(slices.Clone(flags), "--guest", programs.Guest)...)
	ctx, cancel := context.WithTimeout(context.Background(), storyTimeout)
	t.Cleanup(cancel)
	s.ctx = ctx
	if err := s.broker.TryStart(env...); err != nil && s.broker.ExitCode() != failpoint.ExitCode {
		t.Fatalf("%v\n%s", err, s.broker.Log())
	}
	s.client = s.broker.Client(t)
	return s
}

// crashes is how often something crashed.
func (s *story) crashes() int {
	switch {
	case s.inGuest && fixture.OnDocker():
		deaths, err := s.broker.ContainerDeaths(s.began)
		if err != nil {
			s.t.Error(err)
		}
		return deaths
	case s.inGuest:
		return strings.Count(s.broker.Log(), "a guest has ended") // a destroyed one's end is not logged as such
	default:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.restarts
	}
}

// tell tells the story while somebody starts the broker again whenever it is gone.
func (s *story) tell() {
	told := make(chan struct{})
	go func() {
		defer close(told)
		s.work()
	}()
	for {
		select {
		case <-told:
			s.broker.WantNothingLeft(s.t)
			return
		case <-s.broker.Exited():
			s.restart()
		}
	}
}

func (s *story) restart() {
	s.mu.Lock()
	s.restarts++
	n := s.restarts
	s.mu.Unlock()
	if code := s.broker.ExitCode(); code != failpoint.ExitCode {
		s.t.Errorf("the broker exited with %d, not by a failpoint\n%s", code, s.broker.Log())
	}
	if n > maxRestarts {
		s.t.Fatalf("the broker crashes again and again\n%s", s.broker.Log())
	}
	if err := s.broker.TryStart(); err != nil {
		s.t.Fatalf("the broker does not start after a crash: %v\n%s", err, s.broker.Log())
	}
}

// work is the line of work; every call is made again with its request id until it is answered.
func (s *story) work() {
	sandbox, ok := s.create()
	if !ok {
		return
	}
	job := s.start(sandbox, "job", "echo job >> "+counter+"; echo one; sleep 0.3; echo two; exit 42")
	endless := s.start(sandbox, "endless", "echo endless >> "+counter+"; sleep 1000")
	s.stop(endless)
	s.suspend(sandbox)
	s.wait(sandbox, job)
	s.run(sandbox)
	s.count(sandbox)
	if _, err := s.client.Sandboxes().DestroySandbox(s.ctx, &berthv1.DestroySandboxRequest{RequestId: "destroy", SandboxId: sandbox}); err != nil {
		s.t.Errorf("destroy: %v", err)
	}
	s.wantFinal(sandbox)
}

func (s *story) create() (string, bool) {
	for attempt := range 2 {
		made, err := s.client.Sandboxes().CreateSandbox(s.ctx, &berthv1.CreateSandboxRequest{
			RequestId: fmt.Sprintf("create-%d", attempt),
			Spec: &berthv1.SandboxSpec{
				Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: s.repo}},
				Egress:    &berthv1.Egress{Mode: s.egress},
			},
		})
		if err == nil {
			return made.GetSandbox().GetId(), true
		}
		if !s.inGuest {
			s.t.Errorf("create: %v", err)
			return "", false
		}
		// A guest that dies under a create may fail it: definitely, and with nothing left.
		s.t.Logf("create: %v", err)
	}
	s.t.Error("create failed although the guest was whole the second time")
	return "", false
}

func (s *story) start(sandbox, name, shell string) string {
	reply, err := s.client.Jobs().StartJob(s.ctx, &berthv1.StartJobRequest{
		RequestId: "start-" + name, SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell, Labels: map[string]string{"name": name}},
	})
	if err == nil {
		return reply.GetJob().GetId()
	}
	if !s.inGuest {
		s.t.Errorf("start %s: %v", name, err)
		return ""
	}
	// The guest died under it: resumed, the sandbox tells what became of the job, if there is one.
	s.resume(sandbox)
	jobs, err := s.client.Jobs().ListJobs(s.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox, Labels: map[string]string{"name": name}})
	if err != nil || len(jobs.GetJobs()) > 1 {
		s.t.Errorf("there are jobs %v (%v)", jobs.GetJobs(), err)
	}
	for _, job := range jobs.GetJobs() {
		return job.GetId()
	}
	return ""
}

// resume makes the sandbox run again if its guest died.
func (s *story) resume(sandbox string) {
	for deadline := time.Now().Add(storyTimeout / 3); time.Now().Before(deadline); fixture.Pause(probeInterval) {
		got, err := s.client.Sandboxes().GetSandbox(s.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
		if err != nil {
			s.t.Errorf("get: %v", err)
			return
		}
		switch got.GetSandbox().GetState() {
		case berthv1.SandboxState_SANDBOX_STATE_STOPPED:
			if _, err := s.client.Sandboxes().ResumeSandbox(s.ctx, &berthv1.ResumeSandboxRequest{SandboxId: sandbox}); err != nil {
				s.t.Errorf("resume: %v", err)
			}
			return
		case berthv1.SandboxState_SANDBOX_STATE_RUNNING:
			ran, err := s.client.Jobs().RunCommand(s.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
			if err == nil && ran.GetJob().GetOutcome().GetCause() == berthv1.Cause_CAUSE_EXITED {
				return // it runs
			}
		}
	}
	s.t.Error("the sandbox of a dead guest is neither STOPPED nor runs")
}

// stop ends the endless job; whatever happens, its outcome is STOPPED, or LOST where its guest died.
func (s *story) stop(job string) {
	if job == "" {
		return
	}
	reply, err := s.client.Jobs().StopJob(s.ctx, &berthv1.StopJobRequest{RequestId: "stop", JobId: job, Grace: durationpb.New(time.Second)})
	if err != nil {
		if !s.inGuest {
			s.t.Errorf("stop: %v", err)
		}
		return
	}
	switch cause := reply.GetJob().GetOutcome().GetCause(); {
	case cause == berthv1.Cause_CAUSE_STOPPED, s.inGuest && cause == berthv1.Cause_CAUSE_LOST:
	default:
		s.t.Errorf("a stopped job ended as %v", reply.GetJob().GetOutcome())
	}
}

// suspend freezes the sandbox and lets it go on.
func (s *story) suspend(sandbox string) {
	_, err := s.client.Sandboxes().SuspendSandbox(s.ctx, &berthv1.SuspendSandboxRequest{RequestId: "suspend", SandboxId: sandbox})
	if err == nil {
		_, err = s.client.Sandboxes().ResumeSandbox(s.ctx, &berthv1.ResumeSandboxRequest{RequestId: "resume", SandboxId: sandbox})
	}
	if err != nil && !s.inGuest {
		s.t.Errorf("suspend and resume: %v", err)
	}
}

// wait waits for the job that ends, and checks its receipt.
func (s *story) wait(sandbox, id string) {
	if id == "" {
		return
	}
	job, err := s.client.WaitJob(s.ctx, id)
	var unknown *client.UnknownOutcomeError
	if errors.As(err, &unknown) && s.inGuest {
		s.resume(sandbox)
		job, err = s.client.WaitJob(s.ctx, id)
	}
	if err != nil {
		s.t.Errorf("wait: %v", err)
		return
	}
	outcome := job.GetOutcome()
	switch {
	case s.inGuest && outcome.GetCause() == berthv1.Cause_CAUSE_LOST:
		if outcome.Exit != nil {
			s.t.Errorf("a lost job has the exit code %d", outcome.GetExitCode())
		}
		return
	case outcome.GetCause() != berthv1.Cause_CAUSE_EXITED || outcome.GetExitCode() != 42:
		s.t.Errorf("the job ended as %v, want exit code 42", outcome)
	}
	data, gaps, err := s.client.ReadAllOutput(s.ctx, id, berthv1.Stream_STREAM_STDOUT)
	if err != nil || len(gaps) > 0 || string(data) != "one\ntwo\n" {
		s.t.Errorf("the output is %q (gaps %v, %v)", data, gaps, err)
	}
}

func (s *story) run(sandbox string) {
	reply, err := s.client.Jobs().RunCommand(s.ctx, &berthv1.RunCommandRequest{
		RequestId: "run", SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"cat", "README"}},
	})
	if err != nil {
		if !s.inGuest {
			s.t.Errorf("run: %v", err)
		}
		return
	}
	if got := string(reply.GetStdout().GetHead()); got != "hello\n" && !s.inGuest {
		s.t.Errorf("README is %q, %v", got, reply.GetJob().GetOutcome())
	}
}

// count checks how often the jobs ran: what the sandbox itself remembers.
func (s *story) count(sandbox string) {
	read := func() (*berthv1.RunCommandResponse, error) {
		return s.client.Jobs().RunCommand(s.ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "cat " + counter},
		})
	}
	reply, err := read()
	if s.inGuest && (err != nil || reply.GetJob().GetOutcome().GetCause() != berthv1.Cause_CAUSE_EXITED) {
		s.resume(sandbox)
		reply, err = read()
	}
	// The crash may come as late as this; the command may be run again.
	for deadline := time.Now().Add(storyTimeout / 3); err != nil && time.Now().Before(deadline); fixture.Pause(probeInterval) {
		reply, err = read()
	}
	if err != nil {
		s.t.Errorf("count what ran: %v", err)
		return
	}
	ran := string(reply.GetStdout().GetHead())
	if n := strings.Count(ran, "job\n"); n > 1 || n == 0 && !s.inGuest {
		s.t.Errorf("the job ran %d times", n)
	}
	if n := strings.Count(ran, "endless\n"); n > 1 {
		s.t.Errorf("the endless job ran %d times", n)
	}
}

// wantFinal checks that everything of a destroyed sandbox has come to its end.
func (s *story) wantFinal(sandbox string) {
	got, err := s.client.Sandboxes().GetSandbox(s.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
	if err != nil || got.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		s.t.Errorf("the sandbox is %v (%v), want DESTROYED", got.GetSandbox().GetState(), err)
	}
	jobs, err := s.client.Jobs().ListJobs(s.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox})
	if err != nil {
		s.t.Errorf("list jobs: %v", err)
	}
	for _, job := range jobs.GetJobs() {
		if job.GetState() != berthv1.JobState_JOB_STATE_DONE {
			s.t.Errorf("job %s of a destroyed sandbox is %s", job.GetId(), job.GetState())
		}
	}
	info, err := s.client.Admin().GetInfo(s.ctx, &berthv1.GetInfoRequest{})
	if err != nil || info.GetOpenOperations() != 0 || info.GetOpenJobs() != 0 || len(info.GetSandboxes()) != 0 {
		s.t.Errorf("when all is quiet the broker has %v (%v)", info, err)
	}
}
