package restore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { fixture.Main(m) }

const (
	orphanGrace = time.Minute     // that docs/operations.md promises to a machine without a record
	soon        = 3 * time.Minute // for what must happen
)

// harness is a broker that runs, and a client of it.
type harness struct {
	*fixture.Broker
	*client.Client
	t   *testing.T
	ctx context.Context
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	b := fixture.NewBroker(t, fixture.Build(t), "--provider", "local")
	b.Start(t)
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	t.Cleanup(cancel)
	return &harness{Broker: b, Client: b.Client(t), t: t, ctx: ctx}
}

func (w *harness) create() *berthv1.Sandbox {
	w.t.Helper()
	reply, err := w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{})
	if err != nil {
		w.t.Fatalf("create a sandbox: %v", err)
	}
	return reply.GetSandbox()
}

// job is a detached job that writes, waits until its file is there, writes again, and exits.
func (w *harness) job(sandbox *berthv1.Sandbox, name string, code int) string {
	w.t.Helper()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
		RequestId: "start-" + name, SandboxId: sandbox.GetId(),
		Spec: &berthv1.JobSpec{Shell: fmt.Sprintf(
			`echo started >> %[1]s.count; printf 'before %%s\n' %[1]s; until [ -e %[1]s.go ]; do sleep 0.05; done; printf 'after %%s\n' %[1]s; exit %[2]d`, name, code)},
	})
	if err != nil {
		w.t.Fatalf("start %s: %v", name, err)
	}
	return reply.GetJob().GetId()
}

// release lets a job of that name come to its end.
func (w *harness) release(sandbox *berthv1.Sandbox, name string) {
	w.t.Helper()
	w.eventually("a command in "+sandbox.GetId(), func() error {
		_, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox.GetId(), Spec: &berthv1.JobSpec{Argv: []string{"touch", name + ".go"}},
		})
		return err
	})
}

func (w *harness) wantExit(job, name string, code int32) {
	w.t.Helper()
	done, err := w.WaitJob(w.ctx, job)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_EXITED || done.GetOutcome().GetExitCode() != code {
		w.t.Fatalf("%s ended as %v (%v), want exit code %d", name, done.GetOutcome(), err, code)
	}
	data, gaps, err := w.ReadAllOutput(w.ctx, job, berthv1.Stream_STREAM_STDOUT)
	if want := "before " + name + "\nafter " + name + "\n"; err != nil || len(gaps) > 0 || string(data) != want {
		w.t.Errorf("%s wrote %q (gaps %v, %v), want %q", name, data, gaps, err, want)
	}
}

// wantLost waits for the end of a job whose outcome can't be known.
func (w *harness) wantLost(job, name string) {
	w.t.Helper()
	done, err := w.WaitJob(w.ctx, job)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST || done.GetOutcome().Exit != nil {
		w.t.Errorf("%s ended as %v (%v), want it lost", name, done.GetOutcome(), err)
	}
}

func (w *harness) eventually(what string, try func() error) {
	w.t.Helper()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	var err error
	for deadline := time.Now().Add(soon); time.Now().Before(deadline); <-ticker.C {
		if err = try(); err == nil {
			return
		}
	}
	w.t.Fatalf("%s: %v", what, err)
}

func (w *harness) state(id string) berthv1.SandboxState {
	w.t.Helper()
	reply, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: id})
	if err != nil {
		w.t.Fatalf("get sandbox %s: %v", id, err)
	}
	return reply.GetSandbox().GetState()
}

func (w *harness) machineThere(id string) bool {
	_, err := os.Stat(filepath.Join(w.State(), "local", id))
	return !errors.Is(err, fs.ErrNotExist)
}

// backup has the command line make one.
func (w *harness) backup() string {
	w.t.Helper()
	path := filepath.Join(w.Dir, "backup.db")
	if _, err := w.Berth(w.ctx, "backup", path); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// restore puts a backup in the ledger's place, as docs/operations.md says.
func (w *harness) restore(path string) {
	w.t.Helper()
	ledger := filepath.Join(w.State(), "ledger.db")
	data, err := os.ReadFile(path)
	if err == nil {
		err = os.Rename(ledger, ledger+".before")
	}
	if err == nil {
		err = os.WriteFile(ledger, data, 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// findings checks, and returns the kinds by subject. It is no error that some remain.
func (w *harness) findings(args ...string) map[string]string {
	w.t.Helper()
	out, err := w.Berth(w.ctx, append([]string{"fsck", "-o", "json"}, args...)...)
	found := map[string]string{}
	for line := range strings.Lines(string(out)) {
		var finding struct {
			Kind, Subject string
			Repaired      bool
		}
		if err := json.Unmarshal([]byte(line), &finding); err != nil {
			w.t.Fatalf("%q: %v", line, err)
		}
		if !finding.Repaired {
			found[finding.Subject] = finding.Kind
		}
	}
	if remain := len(found) > 0; remain != (err != nil) {
		w.t.Fatalf("it found %v, and its error is %v", found, err)
	}
	return found
}

func TestABrokerOnABackupTellsTheTruthAndBringsNothingBack(t *testing.T) {
	w := newHarness(t)
	kept, doomed := w.create(), w.create()
	running := w.job(kept, "running", 7)
	ended := w.job(kept, "ended", 5)
	w.job(doomed, "doomed", 1)
	done := w.job(kept, "done", 4)
	w.release(kept, "done")
	w.wantExit(done, "done", 4)
	path := w.backup()

	// What happens now is not in it.
	w.release(kept, "ended")
	w.wantExit(ended, "ended", 5)
	late := w.job(kept, "late", 9)
	if _, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: doomed.GetId()}); err != nil {
		t.Fatal(err)
	}
	orphan := w.create()
	w.job(orphan, "orphan", 1)
	before := w.revision()

	w.Kill(t)
	w.restore(path)
	begin := time.Now()
	w.Start(t)
	w.Kill(t) // it may be killed at any moment, as ever
	w.Start(t)

	if after := w.revision(); after <= before {
		t.Errorf("the revision went back from %d to %d", before, after)
	}
	w.orphanIsFound(orphan)
	w.wantExit(done, "done", 4)
	w.release(kept, "running")
	w.wantExit(running, "running", 7)
	w.eventually("the job of after the backup", func() error {
		_, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: late})
		return err
	})
	w.release(kept, "late")
	w.wantExit(late, "late", 9)
	w.wantLost(ended, "ended")
	if data, _, err := w.ReadAllOutput(w.ctx, ended, berthv1.Stream_STREAM_STDOUT); err != nil || string(data) != "before ended\nafter ended\n" {
		t.Errorf("of the job whose end is not known, the output is %q (%v)", data, err)
	}
	w.wantOnce(kept, "running", "ended", "late", "done")
	w.eventually("the loss of the sandbox that was destroyed", func() error {
		if state := w.state(doomed.GetId()); state != berthv1.SandboxState_SANDBOX_STATE_LOST {
			return fmt.Errorf("it is %s", state)
		}
		return nil
	})
	if w.machineThere(doomed.GetMachineId()) {
		t.Error("the machine of a destroyed sandbox is back")
	}
	w.orphanHasItsTime(orphan, begin)
	for _, id := range []string{kept.GetId(), doomed.GetId()} {
		if _, err := w.Sandboxes().DestroySandbox(w.ctx, &berthv1.DestroySandboxRequest{SandboxId: id}); err != nil {
			t.Error(err)
		}
	}
	w.WantNothingLeft(t)
	if found := w.findings(); len(found) > 0 {
		t.Errorf("in the end it finds %v", found)
	}
	w.Stop(t)
}

func (w *harness) revision() uint64 {
	w.t.Helper()
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return info.GetRevision()
}

// wantOnce fails the test if a command ran more than once.
func (w *harness) wantOnce(sandbox *berthv1.Sandbox, names ...string) {
	w.t.Helper()
	for _, name := range names {
		reply, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			SandboxId: sandbox.GetId(), Spec: &berthv1.JobSpec{Argv: []string{"cat", name + ".count"}},
		})
		if got := string(reply.GetStdout().GetHead()); err != nil || got != "started\n" {
			w.t.Errorf("%s was started as often as %q says (%v)", name, got, err)
		}
	}
}

// orphanIsFound wants a machine of after the backup to be told of and left alone at first.
func (w *harness) orphanIsFound(sandbox *berthv1.Sandbox) {
	w.t.Helper()
	machine := sandbox.GetMachineId()
	if kind := w.findings("--repair")[machine]; kind != "orphan_machine" || !w.machineThere(machine) {
		w.t.Fatalf("the machine of after the backup is found as %q (there: %v)", kind, w.machineThere(machine))
	}
	if _, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox.GetId()}); !client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND) {
		w.t.Errorf("the sandbox of after the backup: %v", err)
	}
	if out, err := w.Berth(w.ctx, "info"); err != nil || !strings.Contains(string(out), "1 that no record names") {
		w.t.Errorf("berth info says %q (%v)", out, err)
	}
}

// orphanHasItsTime repairs again and again until the machine of after the backup is gone, which must not
// be before its grace is over.
func (w *harness) orphanHasItsTime(sandbox *berthv1.Sandbox, begin time.Time) {
	w.t.Helper()
	machine := sandbox.GetMachineId()
	ticker := time.NewTicker(2 * time.Second)
	defer ticker.Stop()
	for w.machineThere(machine) {
		if time.Since(begin) > 10*orphanGrace {
			w.t.Fatalf("the orphan is still there after %s: %v", time.Since(begin), w.findings())
		}
		<-ticker.C
		w.findings("--repair")
	}
	if lived := time.Since(begin); lived < orphanGrace {
		w.t.Errorf("the machine of after the backup was destroyed after %s", lived)
	}
}

func TestSandboxesThatWereSuspendedOrResumedSinceTheBackupAreTakenUpAsTheCheckSays(t *testing.T) {
	testenv.Root(t)
	testenv.Cgroup2(t)
	w := newHarness(t)
	frozen, awake := w.create(), w.create()
	inFrozen, inAwake := w.job(frozen, "frozen", 3), w.job(awake, "awake", 4)
	w.berth("suspend", awake.GetId())
	path := w.backup()
	w.berth("suspend", frozen.GetId())
	w.berth("resume", awake.GetId())
	w.Kill(t)
	w.restore(path)
	w.Start(t)
	want := map[string]string{frozen.GetMachineId(): "machine_frozen", awake.GetMachineId(): "machine_running"}
	if found := w.findings("--repair"); !maps.Equal(found, want) {
		t.Fatalf("it finds %v, want %v", found, want)
	}
	w.berth("suspend", frozen.GetId())
	w.berth("resume", frozen.GetId())
	w.berth("resume", awake.GetId())
	if found := w.findings(); len(found) > 0 {
		t.Errorf("afterwards it finds %v", found)
	}
	w.release(frozen, "frozen")
	w.release(awake, "awake")
	w.wantExit(inFrozen, "frozen", 3)
	w.wantExit(inAwake, "awake", 4)
	w.wantOnce(frozen, "frozen")
	w.wantOnce(awake, "awake")
	w.berth("rm", frozen.GetId(), awake.GetId())
	w.WantNothingLeft(t)
	w.Stop(t)
}

func (w *harness) berth(args ...string) {
	w.t.Helper()
	if _, err := w.Berth(w.ctx, args...); err != nil {
		w.t.Fatal(err)
	}
}

func TestABackupOfAnotherBrokerIsRefusedForItsKey(t *testing.T) {
	first, second := newHarness(t), newHarness(t)
	path := first.backup()
	second.Stop(t)
	second.restore(path)
	err := second.TryStart()
	if err == nil || !strings.Contains(second.Log(), "restore the file `key` that belongs to it") {
		t.Errorf("it started, or did not say why not: %v\n%s", err, second.Log())
	}
	// With the ledger that it had, it starts again.
	ledger := filepath.Join(second.State(), "ledger.db")
	if err := os.Rename(ledger+".before", ledger); err != nil {
		t.Fatal(err)
	}
	second.Start(t)
	second.Stop(t)
	first.Stop(t)
}

func TestWhatAKilledBackupLeavesGoesAtTheNextStart(t *testing.T) {
	w := newHarness(t)
	scratch := filepath.Join(w.State(), "scratch")
	w.Kill(t)
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(scratch, "ledger.db.part"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	w.Start(t)
	if _, err := os.Stat(scratch); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	for _, args := range [][]string{{"backup", filepath.Join(w.Dir, "a.db")}, {"backup", "--compact", filepath.Join(w.Dir, "b.db")}, {"fsck"}} {
		if _, err := w.Berth(w.ctx, args...); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(scratch); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%v left its copy: %v", args, err)
		}
	}
	w.Stop(t)
}
