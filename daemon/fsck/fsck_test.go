package fsck

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/daemon/backup"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/harness"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestMain(m *testing.M) { fixture.Main(m) }

const (
	retention = 24 * time.Hour
	running   = berthv1.SandboxState_SANDBOX_STATE_RUNNING
	suspended = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED
	stopped   = berthv1.SandboxState_SANDBOX_STATE_STOPPED
	lost      = berthv1.SandboxState_SANDBOX_STATE_LOST
)

// harnessed is a check of what a harness has.
type harnessed struct {
	*harness.Harness
	*Service
}

func newHarness(t *testing.T) *harnessed {
	t.Helper()
	t.Parallel()
	w := &harnessed{Harness: harness.New(t)}
	w.make()
	return w
}

func (w *harnessed) scratch() string { return filepath.Join(w.Dir, "scratch") }

func (w *harnessed) make() {
	w.T.Helper()
	copies, err := backup.New(w.Ledger, w.scratch())
	harness.Must(w.T, err)
	w.Service = New(Options{
		Store: w.Ledger, Links: w.Links, Sandboxes: w.Sandboxes, Jobs: w.Jobs, Backup: copies, Now: w.Now, Retention: retention,
		Reconcile: reconcile.New(reconcile.Options{
			Store: w.Ledger, Links: w.Links, Sandboxes: w.Sandboxes, Jobs: w.Jobs, Log: slog.New(slog.DiscardHandler), Now: w.Now,
			Retention: retention, MaxReceipts: 1000, MaxOutput: 1 << 20,
		}),
	})
}

// fsck checks, and that no copy of the ledger is left.
func (w *harnessed) fsck(repair bool) *Report {
	w.T.Helper()
	report, err := w.Check(w.Ctx, repair)
	harness.Must(w.T, err)
	if _, err := os.Stat(w.scratch()); !errors.Is(err, os.ErrNotExist) {
		w.T.Errorf("the scratch directory is still there (%v)", err)
	}
	return report
}

// wantFindings fails the test unless a check finds these kinds about these subjects, as "kind subject".
func (w *harnessed) wantFindings(report *Report, want ...string) []Finding {
	w.T.Helper()
	var got []string
	for _, finding := range report.Findings {
		got = append(got, finding.Kind+" "+finding.Subject)
		if finding.Message == "" || finding.Action == "" || finding.Action == "none" && finding.WhyNot == "" || finding.Repaired && finding.WhyNot != "" {
			w.T.Errorf("a finding does not say enough, or contradicts itself: %+v", finding)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		w.T.Fatalf("found %+v, want %q", report.Findings, want)
	}
	return report.Findings
}

func TestACheckOfWhatIsWellFindsNothing(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	w.Job(sandbox)
	w.Orphan("m_foreign", "another")
	for _, repair := range []bool{false, true} {
		report := w.fsck(repair)
		w.wantFindings(report)
		if report.Sandboxes != 1 || report.Machines != 1 || report.Jobs != 1 {
			t.Errorf("it looked at %+v", report)
		}
	}
	w.WantMachine("m_foreign", true, "always")
}

func TestRepairDestroysNoOrphanBeforeItsTime(t *testing.T) {
	w := newHarness(t)
	w.Orphan("m_orphan", w.Ledger.Instance())
	for _, repair := range []bool{false, true} {
		finding := w.wantFindings(w.fsck(repair), "orphan_machine m_orphan")[0]
		if finding.Repaired || !strings.Contains(finding.WhyNot, "by the broker itself") || finding.Provider != "fake" {
			t.Errorf("repair %v, at first sight: %+v", repair, finding)
		}
		w.WantMachine("m_orphan", true, "at first sight")
	}
	w.Later(reconcile.OrphanGrace)
	finding := w.wantFindings(w.fsck(false), "orphan_machine m_orphan")[0]
	if finding.Repaired || finding.WhyNot != "" || finding.Age < reconcile.OrphanGrace {
		t.Errorf("after the grace, dry: %+v", finding)
	}
	w.WantMachine("m_orphan", true, "after a dry run")
	if finding := w.wantFindings(w.fsck(true), "orphan_machine m_orphan")[0]; !finding.Repaired {
		t.Errorf("after the grace: %+v", finding)
	}
	w.WantMachine("m_orphan", false, "after the repair")
	w.wantFindings(w.fsck(true))
}

func TestNothingIsConcludedOfAProviderThatIsNotWell(t *testing.T) {
	for name, faults := range map[string][]fake.Fault{
		"it does not answer": {{Call: fake.CallInfo, Kind: fake.Unavailable}},
		"it cannot list":     {{Call: fake.CallList, Kind: fake.Fail}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newHarness(t)
			sandbox := w.Sandbox()
			w.Orphan("m_orphan", w.Ledger.Instance())
			_, err := w.Check(w.Ctx, false)
			harness.Must(t, err)
			harness.Must(t, w.Fake.Harness().Vanish(w.Ctx, sandbox.GetMachineId()))
			w.Silent(sandbox)
			harness.Must(t, w.Fake.Harness().Script(faults...))
			w.Later(time.Hour)
			for range 2 {
				if finding := w.wantFindings(w.fsck(true), "provider_unusable fake")[0]; finding.Repaired || finding.WhyNot == "" {
					t.Errorf("%+v", finding)
				}
			}
			w.WantState(sandbox, running, "while its provider does not say")
			w.WantMachine("m_orphan", true, "while its provider does not say")
		})
	}
}

func TestAMachineThatVanishedIsFoundAndItsSandboxLostByARepair(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	job := w.Job(sandbox)
	harness.Must(t, w.Fake.Harness().Vanish(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	want := "machine_gone " + sandbox.GetMachineId()
	for range 2 {
		finding := w.wantFindings(w.fsck(false), want)[0]
		if finding.Repaired || finding.WhyNot != "" || !strings.Contains(finding.Action, "1 open job") {
			t.Errorf("dry: %+v", finding)
		}
		w.WantState(sandbox, running, "after a dry run")
	}
	if finding := w.wantFindings(w.fsck(true), want)[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.WantState(sandbox, lost, "after the repair")
	w.WantLost(job.GetId())
	w.wantFindings(w.fsck(true))
}

func TestASuspendedMachineWhoseProcessesDiedIsFoundAndMarkedStopped(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	_, err := w.Sandboxes.Suspend(w.Ctx, harness.Call("suspend", ""), sandbox.GetId())
	harness.Must(t, err)
	w.wantFindings(w.fsck(true))
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	finding := w.wantFindings(w.fsck(true), "machine_stopped "+sandbox.GetMachineId())[0]
	if !finding.Repaired || !strings.Contains(finding.Message, "SUSPENDED") {
		t.Errorf("%+v", finding)
	}
	w.WantState(sandbox, stopped, "after the repair")
	w.wantFindings(w.fsck(true))
}

func TestARepairThatSeesSomethingElseTheSecondTimeDoesNothing(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	reports := make(chan *Report)
	go func() {
		report, err := w.Check(w.Ctx, true)
		if err != nil {
			t.Error(err)
		}
		reports <- report
	}()
	w.Wait("the first look", func() bool { return w.opts.Reconcile.FoundFor(sandbox.GetMachineId()) > 0 })
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallInspect, Kind: fake.Unavailable}))
	finding := w.wantFindings(<-reports, "machine_stopped "+sandbox.GetMachineId())[0]
	harness.Must(t, w.Fake.Harness().Script())
	if finding.Repaired || !strings.Contains(finding.WhyNot, "second look") {
		t.Errorf("%+v", finding)
	}
	w.WantState(sandbox, running, "after two looks that differ")
	if finding := w.wantFindings(w.fsck(true), "machine_stopped "+sandbox.GetMachineId())[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.WantState(sandbox, stopped, "after two looks that agree")
}

func TestASecondLookHasTheTimeOfALookHoweverLongTheFirstTook(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	harness.Must(t, w.Fake.Harness().Kill(w.Ctx, sandbox.GetMachineId()))
	w.Silent(sandbox)
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallInspect, Kind: fake.Late, Times: 1, DelayMillis: (reconcile.ObserveTimeout - reconcile.ObserveInterval/2).Milliseconds()}))
	if finding := w.wantFindings(w.fsck(true), "machine_stopped "+sandbox.GetMachineId())[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.WantState(sandbox, stopped, "after the repair")
}

func TestOperationsThatDoNotComeOnAreFound(t *testing.T) {
	w := newHarness(t)
	harness.Must(t, w.Fake.Harness().Script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unavailable}))
	go func() { _, _ = w.Sandboxes.Create(w.Ctx, harness.Call("create", "c"), &berthv1.SandboxSpec{}) }()
	var operation *recordv1.OperationRecord
	w.Wait("a failed step", func() bool {
		harness.Must(t, w.Ledger.View(func(tx *store.Tx) error {
			open, err := tx.OpenOperations()
			if len(open) == 1 && open[0].GetLastError() != "" {
				operation = open[0]
			}
			return err
		}))
		return operation != nil
	})
	w.wantFindings(w.fsck(false)) // it is young
	w.Later(failingTimeout)
	finding := w.wantFindings(w.fsck(true), "operation_stuck "+operation.GetId())[0]
	for _, word := range []string{"create of sandbox " + operation.GetSandboxId(), `"boot"`, "unavailable"} {
		if !strings.Contains(finding.Message, word) {
			t.Errorf("%q does not say %q", finding.Message, word)
		}
	}
	if finding.Repaired || finding.Age < failingTimeout || !strings.Contains(finding.WhyNot, "berth rm") {
		t.Errorf("%+v", finding)
	}
}

func TestSandboxesAndJobsThatNobodyTakesOnAreFound(t *testing.T) {
	w := newHarness(t)
	going, stuck, ended := w.Sandbox(), w.Sandbox(), w.Sandbox()
	_, err := w.Sandboxes.Destroy(w.Ctx, harness.Call("destroy", ""), ended.GetId())
	harness.Must(t, err)
	job := request.NewID("job")
	w.Update(func(tx *store.Tx) error {
		going.State, going.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, "op_gone"
		stuck.State, stuck.OperationId = berthv1.SandboxState_SANDBOX_STATE_RESUMING, ""
		return errors.Join(
			tx.PutSandbox(going, "", ""), tx.PutSandbox(stuck, "", ""),
			tx.PutJob(&recordv1.JobRecord{
				Id: job, Namespace: harness.Namespace, SandboxId: ended.GetId(), MachineId: ended.GetMachineId(), State: berthv1.JobState_JOB_STATE_RUNNING,
			}, "", ""),
		)
	})
	want := []string{"sandbox_stuck " + going.GetId(), "sandbox_stuck " + stuck.GetId(), "job_orphaned " + job}
	w.wantFindings(w.fsck(false), want...)
	for _, finding := range w.wantFindings(w.fsck(true), want...) {
		if wanted := finding.Subject != stuck.GetId(); finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	w.WantState(going, berthv1.SandboxState_SANDBOX_STATE_DESTROYED, "after the repair")
	done, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job, 0)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST {
		t.Errorf("the job is %v (%v)", done, err)
	}
	if _, err := w.Sandboxes.Destroy(w.Ctx, harness.Call("destroy", ""), stuck.GetId()); err != nil { // as the finding says
		t.Error(err)
	}
	w.wantFindings(w.fsck(true))
}

func TestKeptOutputAndReceiptsThatDoNotAgreeAreFound(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	job, err := w.Jobs.Start(w.Ctx, harness.Call("start", "r"), sandbox.GetId(), &berthv1.JobSpec{Shell: "echo some; exit 3"})
	harness.Must(t, err)
	done, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), harness.Soon)
	harness.Must(t, err)
	w.wantFindings(w.fsck(true))
	harness.Must(t, os.RemoveAll(filepath.Join(w.Dir, "output", job.GetId())))
	stray := request.NewID("job")
	for _, name := range []string{stray, "notes"} {
		harness.Must(t, os.MkdirAll(filepath.Join(w.Dir, "output", name), 0o700))
	}
	harness.Must(t, os.WriteFile(filepath.Join(w.Dir, "output", stray, "stdout.0"), []byte("bytes"), 0o600))

	want := []string{"output_missing " + job.GetId(), "output_orphaned " + stray, "output_orphaned notes"}
	w.wantFindings(w.fsck(false), want...)
	for _, finding := range w.wantFindings(w.fsck(true), want...) {
		if wanted := finding.Kind == "output_missing"; finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	now, err := w.Jobs.Poll(w.Ctx, harness.Namespace, job.GetId(), 0)
	harness.Must(t, err)
	if now.GetOutcome().GetExitCode() != 3 || len(now.GetStdout().GetKept()) > 0 ||
		now.GetStdout().GetDroppedBytes() != 5 || now.GetStdout().GetTotalBytes() != done.GetStdout().GetTotalBytes() {
		t.Errorf("its receipt is %v", now)
	}
	w.Later(retention + time.Hour)
	for _, finding := range w.wantFindings(w.fsck(true), "output_orphaned "+stray, "output_orphaned notes") {
		if wanted := finding.Subject == stray; finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	w.wantFindings(w.fsck(true), "output_orphaned notes")
}

func TestRequestIdsThatNameNothingAreFoundAndKept(t *testing.T) {
	w := newHarness(t)
	gone := request.NewID("job")
	w.Update(func(tx *store.Tx) error {
		return tx.PutRequest(harness.Namespace, "r", &recordv1.RequestRecord{
			Method: "berth.v1.JobService/StartJob", ResultId: gone, ExpireTime: timestamppb.New(w.Now().Add(48 * time.Hour)),
		})
	})
	if finding := w.wantFindings(w.fsck(true), "dangling_request default/r")[0]; finding.Repaired || !strings.Contains(finding.WhyNot, "twice") {
		t.Errorf("%+v", finding)
	}
	w.Later(retention + time.Hour) // its job may have been dropped by now
	w.wantFindings(w.fsck(true))
}

func TestDirectoriesForSocketsOfNoMachineAreRemoved(t *testing.T) {
	w := newHarness(t)
	w.Sandbox()
	nobodys := w.Sandboxes.Machines().ListenDir("m_nobody")
	harness.Must(t, os.MkdirAll(nobodys, 0o700))
	w.wantFindings(w.fsck(true)) // it may be in the making
	w.Later(2 * reconcile.OrphanGrace)
	if finding := w.wantFindings(w.fsck(true), "sockets_orphaned "+nobodys)[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.wantFindings(w.fsck(true))
}

func TestAMachineWhoseSandboxSaysOtherwiseIsFound(t *testing.T) {
	w := newHarness(t)
	goingOn, elsewhere := w.Sandbox(), w.Sandbox()
	w.Update(func(tx *store.Tx) error {
		goingOn.State = stopped
		machine, err := tx.Machine(elsewhere.GetMachineId())
		machine.Provider = "moon"
		return errors.Join(err, tx.PutSandbox(goingOn, "", ""), tx.PutMachine(machine, "", ""))
	})
	w.wantFindings(w.fsck(true), "machine_running "+goingOn.GetMachineId(), "provider_missing "+elsewhere.GetMachineId())
	w.Update(func(tx *store.Tx) error {
		machine, err := tx.Machine(elsewhere.GetMachineId())
		machine.Provider = "fake"
		return errors.Join(err, tx.PutMachine(machine, "", ""))
	})
	if _, err := w.Sandboxes.Resume(w.Ctx, harness.Call("resume", ""), goingOn.GetId()); err != nil { // as the finding says
		t.Error(err)
	}
	w.wantFindings(w.fsck(true))
}

func TestACheckHoldsUpNoWriterHoweverMuchThereIs(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	const many = 20_000
	for from := 0; from < many; from += 1000 {
		w.Update(func(tx *store.Tx) error {
			for range 1000 {
				err := tx.PutJob(&recordv1.JobRecord{
					Id: request.NewID("job"), Namespace: harness.Namespace, SandboxId: sandbox.GetId(), MachineId: sandbox.GetMachineId(),
					State: berthv1.JobState_JOB_STATE_DONE, Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}, DoneTime: timestamppb.New(w.Now()),
					Spec: &berthv1.JobSpec{Shell: "true"},
				}, "", "")
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	ctx, cancel := context.WithCancel(w.Ctx)
	written := make(chan int)
	go func() {
		n := 0
		for ctx.Err() == nil {
			if err := w.Ledger.Update(ctx, func(tx *store.Tx) error {
				return tx.PutOperation(&recordv1.OperationRecord{Id: "op_busy", SandboxId: fmt.Sprint(n)})
			}); err == nil {
				n++
			}
		}
		written <- n
	}()
	begin := time.Now()
	report := w.fsck(false)
	took := time.Since(begin)
	cancel()
	n := <-written
	if report.Jobs != many {
		t.Errorf("it looked at %d jobs of %d", report.Jobs, many)
	}
	t.Logf("a check of %d jobs took %s; %d commits were made meanwhile", many, took.Round(time.Millisecond), n)
	if n == 0 {
		t.Errorf("nothing could be written for %s", took)
	}
}

func TestBrokenIndexesAreRepairedAndTheRestIsCheckedAfterwards(t *testing.T) {
	w := newHarness(t)
	w.Sandbox()
	w.Stop()
	harness.Must(t, w.Ledger.Close())
	db, err := bolt.Open(w.Ledger.Path(), 0o600, nil)
	harness.Must(t, err)
	harness.Must(t, db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("v1")).Bucket([]byte("index")).Bucket([]byte("machines_live")).Put([]byte("m_ghost"), nil)
	}))
	harness.Must(t, db.Close())
	w.OpenLedger()
	w.Start()
	w.make()
	report := w.fsck(false)
	kinds := map[string]int{}
	for _, finding := range report.Findings {
		kinds[finding.Kind]++
	}
	if kinds["dangling_index"] != 1 || kinds["not_checked"] != 1 {
		t.Errorf("found %+v", report.Findings)
	}
	for _, finding := range w.wantFindings(w.fsck(true), "dangling_index machines_live/m_ghost") {
		if !finding.Repaired {
			t.Errorf("%+v", finding)
		}
	}
	w.wantFindings(w.fsck(false))
}

func TestNothingIsRepairedWhereAnOperationCannotBeRead(t *testing.T) {
	w := newHarness(t)
	sandbox := w.Sandbox()
	w.Update(func(tx *store.Tx) error {
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, "op_spoilt"
		return tx.PutSandbox(sandbox, "", "")
	})
	w.Stop()
	harness.Must(t, w.Ledger.Close())
	db, err := bolt.Open(w.Ledger.Path(), 0o600, nil)
	harness.Must(t, err)
	harness.Must(t, db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("v1")).Bucket([]byte("operations")).Put([]byte("op_spoilt"), []byte("no record"))
	}))
	harness.Must(t, db.Close())
	w.OpenLedger()
	w.Start()
	w.make()
	c := &check{opts: w.opts, at: w.Sandboxes.Machines(), repair: true}
	if err := c.sandboxes(w.Ctx); !fault.Is(err, fault.StoreFailed) {
		t.Errorf("the error is %v, want %s", err, fault.StoreFailed)
	}
	if len(c.report.Findings) > 0 {
		t.Errorf("found %+v", c.report.Findings)
	}
	harness.Must(t, w.Ledger.View(func(tx *store.Tx) error {
		now, err := tx.Sandbox(sandbox.GetId())
		if now.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING {
			t.Errorf("after the check the sandbox is %s", now.GetState())
		}
		return err
	}))
}
