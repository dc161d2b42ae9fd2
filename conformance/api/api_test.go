package api

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// atOnce is how many tests run beside one another unless -parallel says it: most of them wait.
const atOnce = 6

func TestMain(m *testing.M) {
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set(strconv.Itoa(atOnce)) // a number is one
	}
	fixture.Main(m)
}

// harness is a broker that runs, and a client of it.
type harness struct {
	*fixture.Broker
	*client.Client
	ctx context.Context
}

func start(t *testing.T, args ...string) *harness {
	t.Helper()
	b := fixture.NewBroker(t, fixture.Build(t), append(fixture.ProviderFlags(t), args...)...)
	b.Start(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	return &harness{Broker: b, Client: b.Client(t), ctx: ctx}
}

func (w *harness) create(t *testing.T, spec *berthv1.SandboxSpec) *berthv1.Sandbox {
	t.Helper()
	reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{Spec: spec})
	if err != nil {
		t.Fatalf("create a sandbox: %v", err)
	}
	return reply.GetSandbox()
}

func (w *harness) destroy(t *testing.T, id string) {
	t.Helper()
	reply, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	if err != nil {
		t.Fatalf("destroy sandbox %s: %v", id, err)
	}
	if state := reply.GetSandbox().GetState(); state != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		t.Fatalf("a destroyed sandbox is %s", state)
	}
}

func (w *harness) start(t *testing.T, sandbox, shell string) *berthv1.Job {
	t.Helper()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell}})
	if err != nil {
		t.Fatalf("start a job: %v", err)
	}
	return reply.GetJob()
}

func (w *harness) run(t *testing.T, sandbox, shell string) *berthv1.RunCommandResponse {
	t.Helper()
	reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
		SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell}, TextOutput: true,
	})
	if err != nil {
		t.Fatalf("run %q: %v", shell, err)
	}
	return reply
}

func (w *harness) wait(t *testing.T, job string) *berthv1.Job {
	t.Helper()
	done, err := w.WaitJob(w.ctx, job)
	if err != nil {
		t.Fatalf("wait for job %s: %v", job, err)
	}
	return done
}

func (w *harness) output(t *testing.T, job string) string {
	t.Helper()
	data, gaps, err := w.ReadAllOutput(w.ctx, job, berthv1.Stream_STREAM_STDOUT)
	if err != nil {
		t.Fatalf("read the output of job %s: %v", job, err)
	}
	if len(gaps) > 0 {
		t.Fatalf("the output of job %s has gaps: %v", job, gaps)
	}
	return string(data)
}

func (w *harness) restart(t *testing.T) {
	t.Helper()
	w.Kill(t)
	w.Start(t)
}

func wantExit(t *testing.T, job *berthv1.Job, code int32) {
	t.Helper()
	outcome := job.GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_EXITED || outcome.Exit == nil || outcome.GetExitCode() != code {
		t.Fatalf("job %s ended as %v, want exit code %d", job.GetId(), outcome, code)
	}
}

func wantReason(t *testing.T, err error, reason berthv1.Reason) {
	t.Helper()
	if !client.Is(err, reason) {
		t.Fatalf("the error is %v, want reason %s", err, reason)
	}
}

// repository makes a git repository with one file, a tag and a branch, or names the image's.
func repository(t *testing.T) string {
	t.Helper()
	if fixture.OnDocker() {
		return fixture.Repository
	}
	dir := filepath.Join(t.TempDir(), "repo")
	for _, args := range [][]string{
		{"init", "-q", "-b", "trunk", dir},
		{"-C", dir, "config", "user.name", "Test"},
		{"-C", dir, "config", "user.email", "test@example.invalid"},
		{"-C", dir, "commit", "-q", "--allow-empty", "-m", "first"},
		{"-C", dir, "tag", "v1"},
	} {
		git(t, args...)
	}
	if err := os.WriteFile(filepath.Join(dir, "README"), []byte("hello\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	git(t, "-C", dir, "add", ".")
	git(t, "-C", dir, "commit", "-q", "-m", "second")
	git(t, "-C", dir, "branch", "side")
	return dir
}

func git(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("git", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// TestTheTable comes first, for it takes longest.
func TestTheTable(t *testing.T) {
	t.Parallel()
	g := newGround(t)
	g.beSilent(t)
	t.Run("a command that", func(t *testing.T) {
		for _, r := range table {
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				r.holds(t, g)
			})
		}
	})
	g.destroy(t, g.sandbox)
	g.WantNothingLeft(t)
}

func TestAJobOutlivesItsBroker(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: repository(t)}}})
	if got := w.run(t, sandbox.GetId(), "cat README").GetStdout().GetText(); got != "hello\n" {
		t.Fatalf("the clone's README is %q", got)
	}
	job := w.start(t, sandbox.GetId(), `for i in 1 2 3 4 5 6 7 8 9 10; do printf 'line %d \377\000\n' $i | tee -a copy; sleep 0.2; done; exit 42`)
	if job.GetState() != berthv1.JobState_JOB_STATE_RUNNING || !job.GetDetached() {
		t.Fatalf("a started job is %s", job.GetState())
	}
	w.Kill(t)
	pause(300 * time.Millisecond)
	w.Start(t)
	wantExit(t, w.wait(t, job.GetId()), 42)
	got := w.output(t, job.GetId())
	want := w.run(t, sandbox.GetId(), "cat copy").GetStdout().GetHead()
	if got != string(want) || strings.Count(got, "line") != 10 {
		t.Fatalf("the broker has %q, and the job wrote %q", got, want)
	}
	w.destroy(t, sandbox.GetId())
	wantExit(t, w.wait(t, job.GetId()), 42)
	if w.output(t, job.GetId()) != string(want) {
		t.Fatal("the receipt's output changed when the machine was destroyed")
	}
	w.WantNothingLeft(t)
	w.Stop(t)
}

func TestAJobThatEndsWhileTheBrokerIsDeadKeepsItsOutcome(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil)
	job := w.start(t, sandbox.GetId(), "echo done; exit 3")
	killed := w.start(t, sandbox.GetId(), "sleep 0.5; kill -9 $$")
	w.Kill(t)
	pause(time.Second)
	w.Start(t)
	wantExit(t, w.wait(t, job.GetId()), 3)
	outcome := w.wait(t, killed.GetId()).GetOutcome()
	if outcome.GetCause() != berthv1.Cause_CAUSE_SIGNALED || outcome.GetWaitStatus().GetSignal() != 9 || outcome.GetExitCode() != 137 {
		t.Fatalf("a job that killed itself ended as %v", outcome)
	}
	w.destroy(t, sandbox.GetId())
	w.WantNothingLeft(t)
}

func TestTheSameRequestGivesTheSameAnswer(t *testing.T) {
	t.Parallel()
	w := start(t)
	create := &berthv1.CreateSandboxRequest{RequestId: "create-1", Spec: &berthv1.SandboxSpec{Labels: map[string]string{"a": "b"}}}
	first, err := w.Sandboxes().CreateSandbox(w.ctx, create)
	if err != nil {
		t.Fatal(err)
	}
	sandbox := first.GetSandbox().GetId()
	startJob := &berthv1.StartJobRequest{RequestId: "start-1", SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "echo x >> count"}}
	runCommand := &berthv1.RunCommandRequest{RequestId: "run-1", SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "echo y >> count; echo $RANDOM$RANDOM"}}
	var job, random string
	for round := range 3 {
		again, err := w.Sandboxes().CreateSandbox(w.ctx, create)
		if err != nil || again.GetSandbox().GetId() != sandbox {
			t.Fatalf("round %d: the same create gave %v, %v", round, again, err)
		}
		started, err := w.Jobs().StartJob(w.ctx, startJob)
		if err != nil || job != "" && started.GetJob().GetId() != job {
			t.Fatalf("round %d: the same start gave %v, %v", round, started, err)
		}
		job = started.GetJob().GetId()
		ran, err := w.Jobs().RunCommand(w.ctx, runCommand)
		if err != nil || random != "" && string(ran.GetStdout().GetHead()) != random {
			t.Fatalf("round %d: the same run gave %v, %v; before it was %q", round, ran, err, random)
		}
		random = string(ran.GetStdout().GetHead())
		wantExit(t, w.wait(t, job), 0)
		w.restart(t)
	}
	count := w.run(t, sandbox, "cat count").GetStdout().GetText()
	if strings.Count(count, "x") != 1 || strings.Count(count, "y") != 1 {
		t.Fatalf("the commands ran as often as %q says", count)
	}
	create.Spec.Labels["a"] = "c"
	_, err = w.Sandboxes().CreateSandbox(w.ctx, create)
	wantReason(t, err, berthv1.Reason_REASON_REQUEST_ID_REUSED)
	_, err = w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{RequestId: "create-1", SandboxId: sandbox, Spec: startJob.GetSpec()})
	wantReason(t, err, berthv1.Reason_REASON_REQUEST_ID_REUSED)
	w.destroy(t, sandbox)
}

func TestCallsNameTheGenerationThatTheyMean(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil)
	if sandbox.GetGeneration() != 1 {
		t.Fatalf("the first generation is %d", sandbox.GetGeneration())
	}
	run := func(generation uint64) error {
		_, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox.GetId(), IfGeneration: generation, Spec: &berthv1.JobSpec{Argv: []string{"true"}},
		})
		return err
	}
	if err := run(1); err != nil {
		t.Fatal(err)
	}
	wantReason(t, run(2), berthv1.Reason_REASON_OTHER_GENERATION)
	_, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
		SandboxId: sandbox.GetId(), Lease: &berthv1.LeaseRef{Id: "ls_1", Epoch: 1}, Spec: &berthv1.JobSpec{Argv: []string{"true"}},
	})
	wantReason(t, err, berthv1.Reason_REASON_LEASE_LOST)
	w.destroy(t, sandbox.GetId())
	wantReason(t, run(1), berthv1.Reason_REASON_NOT_RUNNING)
	wantReason(t, run(0), berthv1.Reason_REASON_WRONG_STATE)
}

func TestBadInputIsRefusedInWordsThatNameTheField(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	for name, c := range map[string]struct {
		spec   *berthv1.SandboxSpec
		reason berthv1.Reason
		words  string
	}{
		"a provider that is not there": {&berthv1.SandboxSpec{Provider: "moon"}, berthv1.Reason_REASON_PROVIDER_NOT_FOUND, "spec.provider"},
		"a disk limit":                 {&berthv1.SandboxSpec{Resources: &berthv1.Resources{DiskBytes: 1 << 30}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "disk"},
		"egress to some hosts":         {&berthv1.SandboxSpec{Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST, AllowHosts: []string{"x.invalid"}}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "egress"},
		"an image":                     {&berthv1.SandboxSpec{Image: "debian"}, berthv1.Reason_REASON_CAPABILITY_MISSING, "spec.image"},
		"memory":                       {&berthv1.SandboxSpec{Resources: &berthv1.Resources{MemoryBytes: 1 << 30}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "memory_bytes"},
		"less memory than a guest has": {&berthv1.SandboxSpec{Resources: &berthv1.Resources{MemoryBytes: 6 << 20}}, berthv1.Reason_REASON_INVALID_FIELD, "spec.resources.memory_bytes: 6291456 bytes are too little for a machine and its guest: give at least 33554432 (32 MiB)"},
		"one process":                  {&berthv1.SandboxSpec{Resources: &berthv1.Resources{Pids: 1}}, berthv1.Reason_REASON_INVALID_FIELD, "spec.resources.pids: 1 are too few for a machine and its guest: give at least 32"},
		"no egress":                    {&berthv1.SandboxSpec{Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_NONE}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "spec.egress"},
		"a workspace of one's own":     {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Path: "/x"}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "workspace.path"},
		"a file as workspace":          {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Path: "/bin/bash"}}, berthv1.Reason_REASON_INVALID_FIELD, "spec.workspace.path: no command can run in /bin/bash: it is not a directory"},
		"an unknown option":            {&berthv1.SandboxSpec{ProviderOptions: map[string]string{"x": "y"}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "provider_options"},
		"a lifetime":                   {&berthv1.SandboxSpec{Lifetime: &berthv1.Lifetime{Max: durationpb.New(time.Hour)}}, berthv1.Reason_REASON_CAPABILITY_MISSING, "lifetime"},
		"a variable without a name":    {&berthv1.SandboxSpec{Env: map[string]string{"": "y"}}, berthv1.Reason_REASON_INVALID_FIELD, "spec.env"},
		"a secret twice":               {&berthv1.SandboxSpec{Env: map[string]string{"A": "y"}, SecretEnv: map[string]string{"A": "z"}}, berthv1.Reason_REASON_INVALID_FIELD, "secret_env"},
		"a password in a URL":          {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "https://user:pw@h/x"}}}, berthv1.Reason_REASON_INVALID_FIELD, "repo.url"},
		"an option as a URL":           {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "--upload-pack=x"}}}, berthv1.Reason_REASON_INVALID_FIELD, "repo.url"},
		"an option as a ref":           {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/x", Ref: "--x"}}}, berthv1.Reason_REASON_INVALID_FIELD, "repo.ref"},
		"a label's key":                {&berthv1.SandboxSpec{Labels: map[string]string{"a b": ""}}, berthv1.Reason_REASON_INVALID_FIELD, "spec.labels"},
		"a repository that is absent":  {&berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/no/such/repo"}}}, berthv1.Reason_REASON_WORKSPACE_FAILED, "/no/such/repo"},
	} {
		if fixture.OnDocker() && slices.Contains([]string{"an image", "memory", "no egress", "a workspace of one's own"}, name) {
			continue // docker can do these
		}
		if !fixture.OnDocker() && name == "a file as workspace" {
			continue // no other provider lets the path be chosen
		}
		t.Run(name, func(t *testing.T) {
			_, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{Spec: c.spec})
			wantReason(t, err, c.reason)
			if !strings.Contains(err.Error(), c.words) {
				t.Errorf("the error does not name %s: %v", c.words, err)
			}
			if c.reason == berthv1.Reason_REASON_INVALID_FIELD && len(client.Violations(err)) == 0 {
				t.Error("the error has no field violations")
			}
		})
	}
	for name, c := range map[string]struct {
		spec  *berthv1.JobSpec
		words string
	}{
		"a negative timeout":            {&berthv1.JobSpec{Argv: []string{"x"}, Timeout: durationpb.New(-1)}, "spec.timeout"},
		"a huge output limit":           {&berthv1.JobSpec{Argv: []string{"x"}, OutputLimitBytes: 5 << 30}, "output_limit_bytes"},
		"a variable with an equal sign": {&berthv1.JobSpec{Argv: []string{"x"}, Env: map[string]string{"A=B": "c"}}, "spec.env"},
	} { // the table has those of the command itself
		t.Run("a job with "+name, func(t *testing.T) {
			_, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: c.spec})
			wantReason(t, err, berthv1.Reason_REASON_INVALID_FIELD)
			if !strings.Contains(err.Error(), c.words) {
				t.Errorf("the error does not name %s: %v", c.words, err)
			}
		})
	}
	_, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: "sb_none"})
	wantReason(t, err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND)
	_, err = w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: "job_none"})
	wantReason(t, err, berthv1.Reason_REASON_JOB_NOT_FOUND)
	_, err = w.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{PageToken: "!"})
	wantReason(t, err, berthv1.Reason_REASON_INVALID_FIELD)
	w.destroy(t, sandbox)
	w.WantNothingLeft(t)
}

func TestAFailedCreateIsRememberedAndLeavesNothing(t *testing.T) {
	t.Parallel()
	w := start(t)
	request := &berthv1.CreateSandboxRequest{RequestId: "bad", Spec: &berthv1.SandboxSpec{
		SessionKey: "line", Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/no/such/repo"}},
	}}
	for range 2 {
		_, err := w.Sandboxes().CreateSandbox(w.ctx, request)
		wantReason(t, err, berthv1.Reason_REASON_WORKSPACE_FAILED)
		w.restart(t)
	}
	failed, err := w.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{States: []berthv1.SandboxState{berthv1.SandboxState_SANDBOX_STATE_FAILED}})
	if err != nil || len(failed.GetSandboxes()) != 1 {
		t.Fatalf("there are %v FAILED sandboxes (%v), want one", failed, err)
	}
	w.WantNothingLeft(t)
	w.create(t, &berthv1.SandboxSpec{SessionKey: "line"}) // the key is free again
	_, err = w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{SessionKey: "line"}})
	wantReason(t, err, berthv1.Reason_REASON_SESSION_KEY_IN_USE)
}

func TestRefsOfARepository(t *testing.T) {
	t.Parallel()
	w := start(t)
	repo := repository(t)
	first := w.create(t, &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: repo}}}).GetId()
	head := strings.TrimSpace(w.run(t, first, "git rev-parse HEAD").GetStdout().GetText())
	w.destroy(t, first)
	for name, c := range map[string]struct{ ref, branch string }{
		"the default": {"", "trunk"}, "a branch": {"side", "side"}, "a tag": {"v1", "HEAD"}, "a commit": {head, "HEAD"},
	} {
		t.Run(name, func(t *testing.T) {
			sandbox := w.create(t, &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{
				Repo: &berthv1.Repo{Url: repo, Ref: c.ref}, GitIdentity: &berthv1.GitIdentity{Name: "Ann", Email: "ann@example.invalid"},
			}})
			defer w.destroy(t, sandbox.GetId())
			got := w.run(t, sandbox.GetId(), "git rev-parse --abbrev-ref HEAD; git config user.name; git status --porcelain").GetStdout().GetText()
			if got != c.branch+"\nAnn\n" {
				t.Errorf("the clone is at %q, want branch %s, identity Ann and nothing changed", got, c.branch)
			}
		})
	}
	_, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{
		Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: repo, Ref: "no-such-ref"}},
	}})
	wantReason(t, err, berthv1.Reason_REASON_WORKSPACE_FAILED)
}

func TestGitWorksInTheWorkspaceForRootAndForTheJobsUser(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: repository(t)}}}).GetId()
	users := []string{""}
	if fixture.OnDocker() {
		users = append(users, "root", "nobody")
	}
	for _, user := range users {
		reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"git", "status", "--porcelain"}, User: user, MergeStderr: true}, TextOutput: true,
		})
		if err != nil || reply.GetJob().GetOutcome().GetExitCode() != 0 || reply.GetStdout().GetText() != "" {
			t.Errorf("git status as user %q: %v: %q (%v)", user, reply.GetJob().GetOutcome(), reply.GetStdout().GetText(), err)
		}
	}
	w.destroy(t, sandbox)
}

func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	w := start(t)
	const sandboxSecret, jobSecret, input = "sandbox-hunter2", "job-hunter3", "stdin-hunter4"
	sandbox := w.create(t, &berthv1.SandboxSpec{SecretEnv: map[string]string{"ONE": sandboxSecret}})
	if got := sandbox.GetSpec().GetSecretEnv(); len(got) != 1 || got["ONE"] != "" {
		t.Errorf("a reply shows secret_env as %v", got)
	}
	spec := &berthv1.JobSpec{
		Shell: "printf %s \"$ONE$TWO\" | wc -c; cat | wc -c; sleep 0.5", SecretEnv: map[string]string{"TWO": jobSecret},
		Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte(input)}},
	}
	started, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox.GetId(), Spec: spec})
	if err != nil {
		t.Fatal(err)
	}
	w.restart(t) // the secrets of the sandbox survive it
	wantExit(t, w.wait(t, started.GetJob().GetId()), 0)
	if got := strings.Fields(w.output(t, started.GetJob().GetId())); len(got) != 2 || got[0] != fmt.Sprint(len(sandboxSecret+jobSecret)) || got[1] != fmt.Sprint(len(input)) {
		t.Errorf("the job saw %v", got)
	}
	if got := strings.TrimSpace(w.run(t, sandbox.GetId(), "printf %s $ONE | wc -c").GetStdout().GetText()); got != fmt.Sprint(len(sandboxSecret)) {
		t.Errorf("after the restart a command sees a secret of %s bytes", got)
	}
	for _, secret := range []string{sandboxSecret, jobSecret, input} {
		out, err := exec.Command("grep", "-rl", secret, w.Dir).CombinedOutput()
		if err == nil {
			t.Errorf("%s lies in the clear in %s", secret, out)
		}
	}
	w.destroy(t, sandbox.GetId())
}

func TestACommandEndsWithItsCaller(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil)
	ctx, leave := context.WithCancel(w.ctx)
	defer leave()
	ended := make(chan error, 1)
	go func() {
		_, err := w.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox.GetId(), Spec: &berthv1.JobSpec{Shell: "echo $$ > pid; exec sleep 3600"},
		})
		ended <- err
	}()
	eventually(t, "the command runs", func() bool {
		return w.run(t, sandbox.GetId(), "test -s pid").GetJob().GetOutcome().GetExitCode() == 0
	})
	leave()
	if err := <-ended; err == nil {
		t.Fatal("a command of an hour returned to a caller that went away")
	}
	eventually(t, "the command's record says that it was stopped", func() bool {
		jobs, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox.GetId()})
		return err == nil && slices.ContainsFunc(jobs.GetJobs(), func(job *berthv1.Job) bool { return job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_STOPPED })
	})
	if got := w.run(t, sandbox.GetId(), "kill -0 $(cat pid) 2>/dev/null && echo alive || echo gone").GetStdout().GetText(); got != "gone\n" {
		t.Errorf("the command of a caller that went away is %s", got)
	}
	w.destroy(t, sandbox.GetId())
}

func TestListsPage(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	var want []string
	for i := range 7 {
		want = append([]string{w.start(t, sandbox, fmt.Sprintf("exit %d", i)).GetId()}, want...)
	}
	var got []string
	for token, pages := "", 0; ; pages++ {
		page, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox, PageSize: 3, PageToken: token})
		if err != nil || pages > 3 {
			t.Fatalf("page %d: %v", pages, err)
		}
		for _, job := range page.GetJobs() {
			got = append(got, job.GetId())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("the pages hold %v, want %v", got, want)
	}
	w.destroy(t, sandbox)
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); pause(50 * time.Millisecond) {
		if holds() {
			return
		}
	}
	t.Fatalf("it does not come about that %s", what)
}

func pause(d time.Duration) {
	timer := time.NewTimer(d)
	<-timer.C
}
