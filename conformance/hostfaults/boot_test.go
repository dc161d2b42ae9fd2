package hostfaults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

func TestOneMuteGuestAmongAHundredKeepsNobodyWaitingAtBoot(t *testing.T) {
	const machines = 100
	w := newHarness(t, fixture.NewBroker(t, asked(t), "--provider", "fake"))
	w.Start(t)
	harness := fake.At(filepath.Join(w.State(), "fake"))
	t.Cleanup(func() {
		if err := harness.Close(context.Background()); err != nil {
			t.Errorf("remove the machines: %v", err)
		}
	})
	sandboxes, made := make([]*berthv1.Sandbox, machines), make(chan int, machines)
	for i := range machines {
		made <- i
	}
	close(made)
	each(8, func() {
		for i := range made {
			reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{})
			if err != nil {
				t.Errorf("create sandbox %d: %v", i, err)
			}
			sandboxes[i] = reply.GetSandbox()
		}
	})
	if t.Failed() {
		return
	}
	w.Kill(t)
	mute := sandboxes[machines/2]
	if err := harness.Freeze(mute.GetMachineId()); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	w.Start(t)
	ready := time.Since(begin)
	talking := make(chan *berthv1.Sandbox, machines)
	for _, sandbox := range sandboxes {
		if sandbox != mute {
			talking <- sandbox
		}
	}
	close(talking)
	each(8, func() {
		for sandbox := range talking {
			w.wantCode(t, sandbox.GetId(), 7)
		}
	})
	took := time.Since(begin)
	t.Logf("ready after %s; %d of %d machines had run a command after %s", ready.Round(time.Millisecond), machines-1, machines, took.Round(time.Millisecond))
	// They were served while the broker still waits for the one.
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil || info.GetRecoveringMachines() != 1 {
		t.Errorf("%d machines are recovering (%v), want the one that is mute", info.GetRecoveringMachines(), err)
	}
	_, err = w.impatient.Jobs().RunCommand(brief(t, 30*time.Second), &berthv1.RunCommandRequest{SandboxId: mute.GetId(), Spec: &berthv1.JobSpec{Shell: "true"}})
	if !client.Is(err, berthv1.Reason_REASON_RECOVERING) && !client.Is(err, berthv1.Reason_REASON_GUEST_UNREACHABLE) {
		t.Errorf("a command in the mute machine gave %v", err)
	}
	if err := harness.Thaw(mute.GetMachineId()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mute machine speaks again", func() error {
		_, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: mute.GetId(), Spec: &berthv1.JobSpec{Shell: "exit 0"}})
		return err
	})
	gone := make(chan *berthv1.Sandbox, machines)
	for _, sandbox := range sandboxes {
		gone <- sandbox
	}
	close(gone)
	each(8, func() {
		for sandbox := range gone {
			if _, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: sandbox.GetId()}); err != nil {
				t.Errorf("destroy: %v", err)
			}
		}
	})
	w.quiet(t)
}

// wantCode runs a command that exits with a code.
func (w *harness) wantCode(t *testing.T, sandbox string, code int32) {
	t.Helper()
	ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: fmt.Sprintf("exit %d", code)}})
	if err != nil || ran.GetJob().GetOutcome().GetExitCode() != code {
		t.Errorf("a command in sandbox %s: %v (%v)", sandbox, ran.GetJob().GetOutcome(), err)
	}
}

// each runs a function that many times at once.
func each(times int, do func()) {
	var group sync.WaitGroup
	for range times {
		group.Go(do)
	}
	group.Wait()
}

// TestAHostThatRebootsLeavesSandboxesThatResume ends everything that a reboot ends: the broker, every
// machine with all its processes and its cgroup, and what lies in /run. What a test cannot do is give the
// kernel another boot id; that a machine's processes are gone is told by its lock alone.
func TestAHostThatRebootsLeavesSandboxesThatResume(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t)
	w.run(t, sandbox, "echo kept > kept")
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	running := w.begin(t, sandbox, "echo begun; touch begun; sleep 1000")
	ended := w.begin(t, sandbox, "while [ ! -e go ]; do sleep 0.05; done; exit 4")
	w.run(t, sandbox, "until [ -e begun ]; do sleep 0.05; done")
	got, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
	if err != nil {
		t.Fatal(err)
	}
	w.Kill(t)
	// It ends while no broker is there to hear it; only the machine's disk knows.
	if err := os.WriteFile(filepath.Join(got.GetSandbox().GetWorkspacePath(), "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the machine's disk knows", func() error {
		_, err := os.Stat(filepath.Join(w.State(), "local", got.GetSandbox().GetMachineId(), "spool", "jobs", ended, "status"))
		return err
	})
	w.reboot(t, got.GetSandbox().GetMachineId())

	w.Start(t)
	w.wantExit(t, finished, 3)
	w.wantOutput(t, finished, "whole\n")
	eventually(t, "the sandbox is stopped", func() error {
		if got := w.state(t, sandbox); got != berthv1.SandboxState_SANDBOX_STATE_STOPPED {
			return fmt.Errorf("it is %s", got)
		}
		return nil
	})
	for _, job := range []string{running, ended} {
		polled, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: job})
		if err != nil || polled.GetJob().GetState() != berthv1.JobState_JOB_STATE_UNKNOWN || polled.GetJob().GetOutcome() != nil {
			t.Errorf("job %s of a stopped machine is %v (%v)", job, polled.GetJob().GetState(), err)
		}
	}
	resumed, err := w.Sandboxes().ResumeSandbox(w.ctx, &berthv1.ResumeSandboxRequest{SandboxId: sandbox})
	if err != nil || resumed.GetSandbox().GetGeneration() != 2 {
		t.Fatalf("resume: %v, %v", resumed, err)
	}
	w.wantExit(t, ended, 4)
	lost, err := w.WaitJob(w.ctx, running)
	if err != nil || lost.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST || lost.GetOutcome().Exit != nil {
		t.Errorf("the job that ran at the reboot ended as %v (%v)", lost.GetOutcome(), err)
	}
	if ran := w.run(t, sandbox, "cat kept"); string(ran.GetStdout().GetHead()) != "kept\n" {
		t.Errorf("the disk holds %v", ran.GetStdout())
	}
	w.destroy(t, sandbox)
	w.quiet(t)
}

// reboot ends what a reboot of the host ends, while the broker is gone.
func (w *harness) reboot(t *testing.T, machine string) {
	t.Helper()
	for pid := range w.Processes() { // each is the first in its namespace, and takes the others with it
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	eventually(t, "no process is left", func() error {
		if left := w.Processes(); len(left) > 0 {
			return fmt.Errorf("there are %v", left)
		}
		return nil
	})
	for _, mount := range mounts(t) {
		if mount[2] == "cgroup2" {
			eventually(t, "the machine's cgroup is gone", func() error { return removeGroups(mount[1], machine) })
		}
	}
	if err := errors.Join(os.RemoveAll(filepath.Join(w.Dir, "run")), os.RemoveAll(strings.TrimPrefix(w.Broker.Address, "unix://"))); err != nil {
		t.Fatal(err)
	}
}

// removeGroups removes the cgroups of a machine, the inner ones first.
func removeGroups(root, machine string) error {
	var groups []string
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.Contains(path+"/", "/"+machine+"/") {
			groups = append(groups, path)
		}
		return nil //nolint:nilerr // others' groups come and go
	})
	for _, group := range slices.Backward(groups) {
		err = errors.Join(err, syscall.Rmdir(group))
	}
	return err
}

// previousCommit is a build of the same guest protocol, whose ledger and guests the current one takes over. It
// is moved forward with each release.
const previousCommit = "75839297f5d3454a25c30483160397a958b432e5"

// previous builds what this build follows: the programs of that commit. A clone without history has none;
// then it is this tree under another name, which shows the taking over and not what changed.
func previous(t *testing.T) fixture.Programs {
	t.Helper()
	tree, err := fixture.ModuleRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if exec.Command("git", "-C", tree, "cat-file", "-e", previousCommit+"^{commit}").Run() == nil {
		unpack := exec.Command("sh", "-c", `git -C "$1" archive "$2" | tar -x -C "$3"`, "sh", tree, previousCommit, dir)
		if out, err := unpack.CombinedOutput(); err != nil {
			t.Fatalf("unpack %s: %v: %s", previousCommit, err, out)
		}
		tree = dir
	} else {
		t.Logf("this clone has no history with %s in it: the build before is this tree, under another name", previousCommit)
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-X main.version=before", "-o", bin+"/",
		"./daemon/cmd/berthd", "./client/cmd/berth", "./providers/guest/cmd/berth-guest")
	build.Dir, build.Env = tree, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", previousCommit, err, out)
	}
	return fixture.Programs{Berthd: filepath.Join(bin, "berthd"), Berth: filepath.Join(bin, "berth"), Guest: filepath.Join(bin, "berth-guest")}
}

func TestTheNextBuildTakesOverTheLedgerAndTheGuestsOfTheOneBefore(t *testing.T) {
	t.Parallel()
	current := asked(t)
	w := newHarness(t, fixture.NewBroker(t, previous(t), "--provider", "local"))
	w.Start(t)
	w.wantBuild(t, true)
	running, suspended, stopped := w.create(t), w.create(t), w.create(t)
	finished := w.begin(t, running, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	attached := w.run(t, running, "exit 9").GetJob().GetId()
	open := w.begin(t, running, "echo begun; while [ ! -e go ]; do sleep 0.05; done; echo end; exit 5")
	frozen := w.begin(t, suspended, "echo begun; sleep 3; exit 6")
	if _, err := w.Sandboxes().SuspendSandbox(w.ctx, &berthv1.SuspendSandboxRequest{SandboxId: suspended}); err != nil {
		t.Fatal(err)
	}
	request := &berthv1.StartJobRequest{RequestId: "once", SandboxId: running, Spec: &berthv1.JobSpec{Shell: "echo once >> once; exit 8"}}
	once, err := w.Jobs().StartJob(w.ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	w.destroy(t, stopped)
	w.Kill(t)

	w.Programs = current
	w.Start(t)
	w.wantBuild(t, false)
	w.wantExit(t, finished, 3)
	w.wantOutput(t, finished, "whole\n")
	w.wantExit(t, attached, 9)
	again, err := w.Jobs().StartJob(w.ctx, request)
	if err != nil || again.GetJob().GetId() != once.GetJob().GetId() {
		t.Errorf("a request of before the upgrade, repeated, gave %v (%v)", again.GetJob().GetId(), err)
	}
	w.wantExit(t, once.GetJob().GetId(), 8)
	if ran := w.run(t, running, "touch go; cat once"); string(ran.GetStdout().GetHead()) != "once\n" {
		t.Errorf("it ran %q", ran.GetStdout().GetHead())
	}
	w.wantExit(t, open, 5)
	w.wantOutput(t, open, "begun\nend\n")
	if _, err := w.Sandboxes().ResumeSandbox(w.ctx, &berthv1.ResumeSandboxRequest{SandboxId: suspended}); err != nil {
		t.Errorf("resume what the build before suspended: %v", err)
	}
	w.wantExit(t, frozen, 6)
	if got := w.state(t, stopped); got != berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		t.Errorf("what was destroyed before is %s", got)
	}
	fresh := w.create(t)
	for _, sandbox := range []string{running, suspended, fresh} {
		w.destroy(t, sandbox)
	}
	w.quiet(t)
}

// wantBuild checks which of the two builds answers.
func (w *harness) wantBuild(t *testing.T, before bool) {
	t.Helper()
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil || (info.GetVersion() == "before") != before {
		t.Errorf("the build that answers is %q (%v)", info.GetVersion(), err)
	}
}
