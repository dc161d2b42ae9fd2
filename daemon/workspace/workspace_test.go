package workspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/request"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake"
)

var guestProgram string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "berth-workspace-")
	if err == nil {
		guestProgram = filepath.Join(dir, "berth-guest")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", guestProgram, "../../providers/guest/cmd/berth-guest").CombinedOutput(); err != nil {
			err = fmt.Errorf("build the guest: %w: %s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// machine is a machine with a real guest, and a link to it.
type machine struct {
	Preparer
	t         *testing.T
	ctx       context.Context
	id        string
	workspace string
}

func boot(t *testing.T) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "ws-") // short, for sockets
	must(t, err)
	log := slog.New(slog.DiscardHandler)
	provider, err := fake.New(fake.Options{
		Dir: filepath.Join(dir, "m"), BrokerID: "b", Log: log, GuestPath: func(string) (string, error) { return guestProgram, nil },
	})
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	links := guestlink.New(guestlink.Options{Log: log, Events: guestlink.Events{
		Up: func(string, *guestv1.HelloResponse) {}, Down: func(string, error) {},
	}})
	t.Cleanup(func() {
		links.Close()
		must(t, provider.Harness().Close(context.Background()))
		must(t, provider.Close())
		cancel()
		_ = os.RemoveAll(dir)
	})
	token := []byte("a token of thirty-two bytes, so.")
	id := request.NewID("m") // a guest kills what bears its machine's id
	_, err = provider.Create(ctx, providers.MachineSpec{MachineID: id, BrokerID: "b", Token: token, ListenDir: filepath.Join(dir, "s")})
	must(t, err)
	links.Open(guestlink.Target{MachineID: id, Token: token, Provider: provider, Machine: providers.Machine{ID: id}})
	hello, err := links.Wait(ctx, id)
	must(t, err)
	return &machine{t: t, ctx: ctx, id: id, workspace: hello.GetWorkspace(), Preparer: Preparer{
		Links: links, Environment: func(*recordv1.SandboxRecord) (map[string]string, error) { return map[string]string{}, nil },
	}}
}

func (m *machine) sandbox(repo *berthv1.Repo) *recordv1.SandboxRecord {
	return &recordv1.SandboxRecord{
		Id: request.NewID("sb"), MachineId: m.id,
		Spec: &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: repo, GitIdentity: &berthv1.GitIdentity{Name: "A. Gent", Email: "a@example.invalid"}}},
	}
}

func (m *machine) prepare(repo *berthv1.Repo) error { return m.Prepare(m.ctx, m.sandbox(repo)) }

func (m *machine) git(args ...string) string {
	m.t.Helper()
	return git(m.t, append([]string{"-C", m.workspace}, args...)...)
}

func git(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("git", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// repository is one with a branch trunk of two commits, a branch side/one and a tag v1 on the first.
func repository(t *testing.T) (url, first string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "r")
	git(t, "init", "-q", "-b", "trunk", dir)
	in := func(args ...string) string {
		return git(t, append([]string{"-C", dir, "-c", "user.name=T", "-c", "user.email=t@example.invalid"}, args...)...)
	}
	in("commit", "-q", "--allow-empty", "-m", "first")
	in("tag", "-a", "-m", "one", "v1")
	in("branch", "side/one")
	in("config", "uploadpack.allowAnySHA1InWant", "true")
	must(t, os.WriteFile(filepath.Join(dir, "README"), []byte("hello\n"), 0o600))
	in("add", ".")
	in("commit", "-q", "-m", "second")
	return "file://" + dir, in("rev-parse", "HEAD~1")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestARepositoryIsCheckedOutAtItsRef(t *testing.T) {
	url, first := repository(t)
	for _, test := range []struct {
		name   string
		repo   *berthv1.Repo
		branch string // empty: none, detached
		count  string // of commits
	}{
		{"the default branch", &berthv1.Repo{}, "trunk", "2"},
		{"a branch", &berthv1.Repo{Ref: "side/one"}, "side/one", "1"},
		{"a branch by its whole name", &berthv1.Repo{Ref: "refs/heads/side/one"}, "side/one", "1"},
		{"a tag", &berthv1.Repo{Ref: "v1"}, "", "1"},
		{"a commit", &berthv1.Repo{Ref: first}, "", "1"},
		{"the last commit only", &berthv1.Repo{Depth: 1}, "trunk", "1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := boot(t)
			test.repo.Url = url
			must(t, m.prepare(test.repo))
			if branch := m.git("branch", "--show-current"); branch != test.branch {
				t.Errorf("it is on branch %q, want %q", branch, test.branch)
			}
			if count := m.git("rev-list", "--count", "HEAD"); count != test.count {
				t.Errorf("it has %s commits, want %s", count, test.count)
			}
			if name := m.git("config", "user.name"); name != "A. Gent" {
				t.Errorf("who commits is %q", name)
			}
			if status := m.git("status", "--porcelain"); status != "" {
				t.Errorf("its status is %q", status)
			}
		})
	}
}

func TestACloneIsWhatGitCloneMakes(t *testing.T) {
	url, first := repository(t)
	dir := t.TempDir()
	shallow, sha256, separate := filepath.Join(dir, "shallow"), filepath.Join(dir, "sha256"), filepath.Join(dir, "detached")
	git(t, "clone", "-q", "--depth=1", url, shallow)
	git(t, "init", "-q", "-b", "trunk", "--object-format=sha256", sha256)
	git(t, "-C", sha256, "-c", "user.name=T", "-c", "user.email=t@example.invalid", "commit", "-q", "--allow-empty", "-m", "one")
	git(t, "-C", sha256, "tag", "v1")
	git(t, "clone", "-q", url, separate)
	git(t, "-C", separate, "checkout", "-q", "--detach", first)
	for _, test := range []struct {
		name string
		repo *berthv1.Repo
		ask  []string
		want string
	}{
		{"all branches", &berthv1.Repo{Url: url}, []string{"branch", "-r", "--format=%(refname)"}, "refs/remotes/origin/HEAD\nrefs/remotes/origin/side/one\nrefs/remotes/origin/trunk"},
		{"all tags, of a branch too", &berthv1.Repo{Url: url, Ref: "side/one"}, []string{"tag"}, "v1"},
		{"a branch that follows its own", &berthv1.Repo{Url: url, Ref: "side/one"}, []string{"rev-parse", "--abbrev-ref", "@{upstream}"}, "origin/side/one"},
		{"one branch of little depth", &berthv1.Repo{Url: url, Depth: 1}, []string{"branch", "-r", "--format=%(refname)"}, "refs/remotes/origin/HEAD\nrefs/remotes/origin/trunk"},
		{"a tag by its whole name, of little depth", &berthv1.Repo{Url: url, Ref: "refs/tags/v1", Depth: 1}, []string{"describe", "--exact-match"}, "v1"},
		{"a commit beside those of little depth", &berthv1.Repo{Url: url, Ref: first, Depth: 1}, []string{"rev-parse", "HEAD"}, first},
		{"a commit by its beginning, of little depth", &berthv1.Repo{Url: url, Ref: first[:12], Depth: 1}, []string{"rev-parse", "HEAD"}, first},
		{"of a shallow source", &berthv1.Repo{Url: "file://" + shallow}, []string{"rev-list", "--count", "HEAD"}, "1"},
		{"of a shallow source by its path", &berthv1.Repo{Url: shallow, Ref: "trunk"}, []string{"rev-list", "--count", "HEAD"}, "1"},
		{"of a directory, of little depth", &berthv1.Repo{Url: strings.TrimPrefix(url, "file://"), Depth: 1}, []string{"rev-list", "--count", "HEAD"}, "1"},
		{"of SHA-256", &berthv1.Repo{Url: "file://" + sha256}, []string{"rev-parse", "--show-object-format"}, "sha256"},
		{"of SHA-256 at a tag", &berthv1.Repo{Url: sha256, Ref: "v1"}, []string{"describe", "--tags", "--exact-match"}, "v1"},
		{"of one whose HEAD is no branch", &berthv1.Repo{Url: separate}, []string{"rev-parse", "HEAD"}, first},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := boot(t)
			must(t, m.prepare(test.repo))
			if got := m.git(test.ask...); got != test.want {
				t.Errorf("git %v says %q, want %q", test.ask, got, test.want)
			}
			if status := m.git("status", "--porcelain", "--ignored"); status != "" {
				t.Errorf("its status is %q", status)
			}
			if origin := m.git("config", "remote.origin.url"); origin != test.repo.GetUrl() {
				t.Errorf("its origin is %q", origin)
			}
			if out, err := exec.Command("find", filepath.Join(m.workspace, ".git", "objects"), "-type", "f", "-links", "+1").Output(); err != nil || len(out) > 0 {
				t.Errorf("it shares with its source: %s (%v)", out, err)
			}
		})
	}
}

func TestARepositoryOfAnotherUserIsRefusedWithWhatHelps(t *testing.T) {
	testenv.Root(t)
	t.Parallel()
	url, _ := repository(t)
	const nobody = 65534
	must(t, filepath.WalkDir(strings.TrimPrefix(url, "file://"), func(path string, _ os.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, nobody, nobody))
	}))
	m := boot(t)
	err := m.prepare(&berthv1.Repo{Url: url})
	if err == nil {
		t.Skip("this git trusts repositories of other users")
	}
	_, command, _ := strings.Cut(err.Error(), "git config --system ")
	command, _, _ = strings.Cut(command, "`")
	if !fault.Is(err, fault.WorkspaceFailed) || command == "" {
		t.Fatalf("the error is %v", err)
	}
	system := filepath.Join(t.TempDir(), "gitconfig") // stands where /etc/gitconfig does
	git(t, append([]string{"config", "--file", system}, strings.Fields(command)...)...)
	m.Environment = func(*recordv1.SandboxRecord) (map[string]string, error) {
		return map[string]string{"GIT_CONFIG_SYSTEM": system}, nil
	}
	if err := m.prepare(&berthv1.Repo{Url: url}); err != nil {
		t.Errorf("what the error says does not help: %v", err)
	}
}

func TestGitTrustsAWorkspaceOfAnyUserWhereItsConfigurationIsTheMachines(t *testing.T) {
	testenv.Root(t)
	t.Parallel()
	url, _ := repository(t)
	const nobody = 65534
	for isolation, trusted := range map[berthv1.Isolation]bool{berthv1.Isolation_ISOLATION_CONTAINER: true, berthv1.Isolation_ISOLATION_NAMESPACE: false} {
		system := filepath.Join(t.TempDir(), "gitconfig") // stands where /etc/gitconfig does
		m := boot(t)
		m.Environment = func(*recordv1.SandboxRecord) (map[string]string, error) {
			return map[string]string{"GIT_CONFIG_SYSTEM": system}, nil
		}
		sandbox := m.sandbox(&berthv1.Repo{Url: url})
		sandbox.Isolation = isolation
		for range 2 { // again after a crash
			must(t, m.Prepare(m.ctx, sandbox))
		}
		must(t, filepath.WalkDir(m.workspace, func(path string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, nobody, nobody))
		}))
		status := exec.Command("git", "-C", m.workspace, "status", "--porcelain")
		status.Env = append(os.Environ(), "GIT_CONFIG_SYSTEM="+system)
		if out, err := status.CombinedOutput(); (err == nil) != trusted {
			t.Errorf("%s: git status as root: %s (%v)", isolation, out, err)
		}
		written, err := os.ReadFile(system)
		if trusted && strings.Count(string(written), m.workspace) != 1 || !trusted && !os.IsNotExist(err) {
			t.Errorf("%s: the configuration is %q (%v)", isolation, written, err)
		}
	}
}

func TestAPreparationThatIsBegunAgainDoesNothingTwice(t *testing.T) {
	t.Parallel()
	url, _ := repository(t)
	m := boot(t)
	sandbox := m.sandbox(&berthv1.Repo{Url: url})
	must(t, m.Prepare(m.ctx, sandbox))
	must(t, os.WriteFile(filepath.Join(m.workspace, "work"), []byte("mine"), 0o600))
	must(t, m.Prepare(m.ctx, sandbox)) // joins the clone that has run
	again := m.sandbox(&berthv1.Repo{Url: url})
	must(t, m.Prepare(m.ctx, again)) // finds it done
	if work, err := os.ReadFile(filepath.Join(m.workspace, "work")); err != nil || string(work) != "mine" {
		t.Errorf("what was done since is %q (%v)", work, err)
	}
}

func TestWhatAnInterruptedCloneLeftIsRemoved(t *testing.T) {
	t.Parallel()
	url, _ := repository(t)
	m := boot(t)
	for _, name := range []string{".berth-cloning", "half", ".hidden"} {
		must(t, os.WriteFile(filepath.Join(m.workspace, name), nil, 0o600))
	}
	must(t, os.MkdirAll(filepath.Join(m.workspace, ".git", "objects"), 0o700))
	must(t, os.WriteFile(filepath.Join(m.workspace, ".git", "berth-clone"), []byte(url+" "), 0o600)) // killed right before its end
	must(t, m.prepare(&berthv1.Repo{Url: url}))
	if status := m.git("status", "--porcelain", "--ignored"); status != "" {
		t.Errorf("its status is %q", status)
	}
}

func TestWhatCannotBeClonedIsSaidInGitsWords(t *testing.T) {
	url, _ := repository(t)
	for _, test := range []struct {
		name   string
		repo   *berthv1.Repo
		reason fault.Reason
		words  string
	}{
		{"no repository", &berthv1.Repo{Url: "file:///no/such/repository"}, fault.WorkspaceFailed, "/no/such/repository"},
		{"no ref", &berthv1.Repo{Url: url, Ref: "nowhere"}, fault.WorkspaceFailed, `"nowhere"`},
		{"a ref that is shell", &berthv1.Repo{Url: url, Ref: "$(touch hacked)`touch hacked`;touch hacked"}, fault.WorkspaceFailed, "touch hacked"},
		{"a URL that is shell", &berthv1.Repo{Url: "file:///$(touch hacked)"}, fault.WorkspaceFailed, "touch hacked"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := boot(t)
			err := m.prepare(test.repo)
			if !fault.Is(err, test.reason) || !strings.Contains(err.Error(), test.words) || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is %v", err)
			}
			if _, err := os.Stat(filepath.Join(m.workspace, "hacked")); err == nil {
				t.Error("a caller's word was run as shell")
			}
		})
	}
}

func TestAWorkspaceWithSomethingInItIsNotTouched(t *testing.T) {
	t.Parallel()
	url, _ := repository(t)
	m := boot(t)
	must(t, os.WriteFile(filepath.Join(m.workspace, "work"), nil, 0o600))
	if err := m.prepare(&berthv1.Repo{Url: url}); !fault.Is(err, fault.WorkspaceFailed) || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("the error is %v", err)
	}
	if _, err := os.Stat(filepath.Join(m.workspace, "work")); err != nil {
		t.Error(err)
	}
}

func TestAnEmptyRepositoryIsAnEmptyWorkspace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	git(t, "init", "-q", "--bare", dir)
	m := boot(t)
	must(t, m.prepare(&berthv1.Repo{Url: "file://" + dir}))
	if origin := m.git("config", "remote.origin.url"); origin != "file://"+dir {
		t.Errorf("its origin is %q", origin)
	}
}

func TestAMachineWithoutGitIsToldFromARepositoryThatIsBroken(t *testing.T) {
	t.Parallel()
	m := boot(t)
	m.Environment = func(*recordv1.SandboxRecord) (map[string]string, error) {
		return map[string]string{"PATH": "/nowhere"}, nil
	}
	if err := m.prepare(&berthv1.Repo{Url: "file:///r"}); !fault.Is(err, fault.ToolMissing) {
		t.Errorf("the error is %v", err)
	}
	cause := errors.New("no key")
	m.Environment = func(*recordv1.SandboxRecord) (map[string]string, error) { return nil, cause }
	if err := m.prepare(&berthv1.Repo{Url: "file:///r"}); !errors.Is(err, cause) {
		t.Errorf("the error is %v", err)
	}
	if err := m.prepare(nil); err != nil {
		t.Errorf("without a repository: %v", err)
	}
}

func TestEachEndOfACloneHasItsVerdict(t *testing.T) {
	t.Parallel()
	exited := func(code int32) *berthv1.Outcome {
		return &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: code}}
	}
	for _, test := range []struct {
		name        string
		outcome     *berthv1.Outcome
		reason      fault.Reason // empty with an error: no word on the repository
		ok          bool
		interrupted bool
	}{
		{"done", exited(0), "", true, false},
		{"no git", exited(exitNoGit), fault.ToolMissing, false, false},
		{"not empty", exited(exitNotEmpty), fault.WorkspaceFailed, false, false},
		{"no ref", exited(exitNoRef), fault.WorkspaceFailed, false, false},
		{"git's own failure", exited(128), fault.WorkspaceFailed, false, false},
		{"too long", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_TIMED_OUT, Exit: &berthv1.Outcome_ExitCode{ExitCode: 124}}, fault.WorkspaceFailed, false, false},
		{"no shell", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_FAILED_TO_START}, fault.ToolMissing, false, false},
		{"killed", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_SIGNALED}, "", false, true},
		{"lost", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST}, "", false, true},
		{"stopped", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_STOPPED}, "", false, true},
		{"a cause that nobody knows", &berthv1.Outcome{Cause: 99}, "", false, true},
		{"nothing", nil, "", false, true},
	} {
		response := &guestv1.RunResponse{Status: &guestv1.Status{Outcome: test.outcome}, Stdout: &guestv1.Output{Head: []byte("fatal: \xff\nno\n")}}
		err := verdict(&berthv1.Repo{Url: "u", Ref: "r"}, response)
		if (err == nil) != test.ok || test.reason != "" && !fault.Is(err, test.reason) || interrupted(response) != test.interrupted {
			t.Errorf("%s: %v", test.name, err)
		}
		if test.reason == "" && err != nil && fault.KindOf(err) != fault.KindInternal {
			t.Errorf("%s says something of the repository: %v", test.name, err)
		}
	}
}
