package reconcile

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/conformance/need"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

// fsck checks, and that no copy of the ledger is left.
func (w *world) fsck(repair bool) *Report {
	w.t.Helper()
	report, err := w.Fsck(w.ctx, repair)
	must(w.t, err)
	if _, err := os.Stat(w.opts.Scratch); !errors.Is(err, os.ErrNotExist) {
		w.t.Errorf("the scratch directory is still there (%v)", err)
	}
	return report
}

// wantFindings fails the test unless a check finds these kinds about these subjects, as "kind subject".
func (w *world) wantFindings(report *Report, want ...string) []Finding {
	w.t.Helper()
	var got []string
	for _, finding := range report.Findings {
		got = append(got, finding.Kind+" "+finding.Subject)
		if finding.Message == "" || finding.Action == "" || finding.Action == "none" && finding.WhyNot == "" || finding.Repaired && finding.WhyNot != "" {
			w.t.Errorf("a finding does not say enough, or contradicts itself: %+v", finding)
		}
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		w.t.Fatalf("found %+v, want %q", report.Findings, want)
	}
	return report.Findings
}

func (w *world) update(fn func(*store.Tx) error) {
	w.t.Helper()
	must(w.t, w.ledger.Update(w.ctx, fn))
}

func TestACheckOfWhatIsWellFindsNothing(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	w.job(sandbox)
	w.orphan("m_foreign", "another")
	for _, repair := range []bool{false, true} {
		report := w.fsck(repair)
		w.wantFindings(report)
		if report.Sandboxes != 1 || report.Machines != 1 || report.Jobs != 1 {
			t.Errorf("it looked at %+v", report)
		}
	}
	w.wantMachine("m_foreign", true, "always")
}

func TestRepairDestroysNoOrphanBeforeItsTime(t *testing.T) {
	w := newWorld(t)
	w.orphan("m_orphan", w.ledger.Instance())
	for _, repair := range []bool{false, true} {
		finding := w.wantFindings(w.fsck(repair), "orphan_machine m_orphan")[0]
		if finding.Repaired || !strings.Contains(finding.WhyNot, "by the broker itself") || finding.Provider != "fake" {
			t.Errorf("repair %v, at first sight: %+v", repair, finding)
		}
		w.wantMachine("m_orphan", true, "at first sight")
	}
	w.later(orphanGrace)
	finding := w.wantFindings(w.fsck(false), "orphan_machine m_orphan")[0]
	if finding.Repaired || finding.WhyNot != "" || finding.Age < orphanGrace {
		t.Errorf("after the grace, dry: %+v", finding)
	}
	w.wantMachine("m_orphan", true, "after a dry run")
	if finding := w.wantFindings(w.fsck(true), "orphan_machine m_orphan")[0]; !finding.Repaired {
		t.Errorf("after the grace: %+v", finding)
	}
	w.wantMachine("m_orphan", false, "after the repair")
	w.wantFindings(w.fsck(true))
}

func TestNothingIsConcludedOfAProviderThatIsNotWell(t *testing.T) {
	for name, faults := range map[string][]fake.Fault{
		"it does not answer": {{Call: fake.CallInfo, Kind: fake.Unavailable}},
		"it cannot list":     {{Call: fake.CallList, Kind: fake.Fail}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			sandbox := w.sandbox()
			w.orphan("m_orphan", w.ledger.Instance())
			w.sweep(w.ctx)
			must(t, w.fake.World().Vanish(w.ctx, sandbox.GetMachineId()))
			w.silent(sandbox)
			must(t, w.fake.World().Script(faults...))
			w.later(time.Hour)
			for range 2 {
				if finding := w.wantFindings(w.fsck(true), "provider_unusable fake")[0]; finding.Repaired || finding.WhyNot == "" {
					t.Errorf("%+v", finding)
				}
			}
			w.wantState(sandbox, running, "while its provider does not say")
			w.wantMachine("m_orphan", true, "while its provider does not say")
		})
	}
}

func TestAMachineThatVanishedIsFoundAndItsSandboxLostByARepair(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	job := w.job(sandbox)
	must(t, w.fake.World().Vanish(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	want := "machine_gone " + sandbox.GetMachineId()
	for range 2 {
		finding := w.wantFindings(w.fsck(false), want)[0]
		if finding.Repaired || finding.WhyNot != "" || !strings.Contains(finding.Action, "1 open job") {
			t.Errorf("dry: %+v", finding)
		}
		w.wantState(sandbox, running, "after a dry run")
	}
	if finding := w.wantFindings(w.fsck(true), want)[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.wantState(sandbox, lost, "after the repair")
	done, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), 0)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST || done.GetOutcome().ExitCode != nil {
		t.Errorf("its job ended as %v (%v)", done.GetOutcome(), err)
	}
	w.wantFindings(w.fsck(true))
}

func TestARepairThatSeesSomethingElseTheSecondTimeDoesNothing(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	reports := make(chan *Report)
	go func() {
		report, err := w.Fsck(w.ctx, true)
		if err != nil {
			t.Error(err)
		}
		reports <- report
	}()
	w.wait("the first look", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.seen[sandbox.GetMachineId()].verdict == lifecycle.Stopped
	})
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallInspect, Kind: fake.Unavailable}))
	finding := w.wantFindings(<-reports, "machine_stopped "+sandbox.GetMachineId())[0]
	must(t, w.fake.World().Script())
	if finding.Repaired || !strings.Contains(finding.WhyNot, "second look") {
		t.Errorf("%+v", finding)
	}
	w.wantState(sandbox, running, "after two looks that differ")
	if finding := w.wantFindings(w.fsck(true), "machine_stopped "+sandbox.GetMachineId())[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.wantState(sandbox, stopped, "after two looks that agree")
}

func TestASecondLookHasTheTimeOfALookHoweverLongTheFirstTook(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallInspect, Kind: fake.Late, Times: 1, DelayMillis: (lookTimeout - lookEvery/2).Milliseconds()}))
	if finding := w.wantFindings(w.fsck(true), "machine_stopped "+sandbox.GetMachineId())[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.wantState(sandbox, stopped, "after the repair")
}

func TestOperationsThatDoNotComeOnAreFound(t *testing.T) {
	w := newWorld(t)
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallCreate, Kind: fake.Unavailable}))
	go func() { _, _ = w.sandboxes.Create(w.ctx, call("create", "c"), &berthv1.SandboxSpec{}) }()
	var operation *recordv1.OperationRecord
	w.wait("a failed step", func() bool {
		must(t, w.ledger.View(func(tx *store.Tx) error {
			open, err := tx.OpenOperations()
			if len(open) == 1 && open[0].GetLastError() != "" {
				operation = open[0]
			}
			return err
		}))
		return operation != nil
	})
	w.wantFindings(w.fsck(false)) // it is young
	w.later(operationPatience)
	finding := w.wantFindings(w.fsck(true), "operation_stuck "+operation.GetId())[0]
	for _, word := range []string{"create of sandbox " + operation.GetSandboxId(), `"boot"`, "unavailable"} {
		if !strings.Contains(finding.Message, word) {
			t.Errorf("%q does not say %q", finding.Message, word)
		}
	}
	if finding.Repaired || finding.Age < operationPatience || !strings.Contains(finding.WhyNot, "berth rm") {
		t.Errorf("%+v", finding)
	}
}

func TestSandboxesAndJobsThatNobodyTakesOnAreFound(t *testing.T) {
	w := newWorld(t)
	going, stuck, ended := w.sandbox(), w.sandbox(), w.sandbox()
	_, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), ended.GetId())
	must(t, err)
	job := lifecycle.NewID("job")
	w.update(func(tx *store.Tx) error {
		going.State, going.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, "op_gone"
		stuck.State, stuck.OperationId = berthv1.SandboxState_SANDBOX_STATE_RESUMING, ""
		return errors.Join(
			tx.PutSandbox(going, "", ""), tx.PutSandbox(stuck, "", ""),
			tx.PutJob(&recordv1.JobRecord{
				Id: job, Namespace: namespace, SandboxId: ended.GetId(), MachineId: ended.GetMachineId(), State: berthv1.JobState_JOB_STATE_RUNNING,
			}, "", ""),
		)
	})
	want := []string{"sandbox_adrift " + going.GetId(), "sandbox_adrift " + stuck.GetId(), "job_adrift " + job}
	w.wantFindings(w.fsck(false), want...)
	for _, finding := range w.wantFindings(w.fsck(true), want...) {
		if wanted := finding.Subject != stuck.GetId(); finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	w.wantState(going, berthv1.SandboxState_SANDBOX_STATE_DESTROYED, "after the repair")
	done, err := w.jobs.Poll(w.ctx, namespace, job, 0)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST {
		t.Errorf("the job is %v (%v)", done, err)
	}
	if _, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), stuck.GetId()); err != nil { // as the finding says
		t.Error(err)
	}
	w.wantFindings(w.fsck(true))
}

func TestKeptOutputAndReceiptsThatDoNotAgreeAreFound(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	job, err := w.jobs.Start(w.ctx, call("start", "r"), sandbox.GetId(), &berthv1.JobSpec{Shell: "echo some; exit 3"})
	must(t, err)
	done, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), soon)
	must(t, err)
	w.wantFindings(w.fsck(true))
	must(t, os.RemoveAll(filepath.Join(w.dir, "output", job.GetId())))
	stray := lifecycle.NewID("job")
	for _, name := range []string{stray, "notes"} {
		must(t, os.MkdirAll(filepath.Join(w.dir, "output", name), 0o700))
	}
	must(t, os.WriteFile(filepath.Join(w.dir, "output", stray, "stdout.0"), []byte("bytes"), 0o600))

	want := []string{"output_missing " + job.GetId(), "output_astray " + stray, "output_astray notes"}
	w.wantFindings(w.fsck(false), want...)
	for _, finding := range w.wantFindings(w.fsck(true), want...) {
		if wanted := finding.Kind == "output_missing"; finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	now, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), 0)
	must(t, err)
	if now.GetOutcome().GetExitCode() != 3 || len(now.GetStdout().GetKept()) > 0 ||
		now.GetStdout().GetDroppedBytes() != 5 || now.GetStdout().GetTotalBytes() != done.GetStdout().GetTotalBytes() {
		t.Errorf("its receipt is %v", now)
	}
	w.later(retention + time.Hour)
	for _, finding := range w.wantFindings(w.fsck(true), "output_astray "+stray, "output_astray notes") {
		if wanted := finding.Subject == stray; finding.Repaired != wanted {
			t.Errorf("repaired %v, want %v: %+v", finding.Repaired, wanted, finding)
		}
	}
	w.wantFindings(w.fsck(true), "output_astray notes")
}

func TestRequestIdsThatNameNothingAreFoundAndKept(t *testing.T) {
	w := newWorld(t)
	gone := lifecycle.NewID("job")
	w.update(func(tx *store.Tx) error {
		return tx.PutRequest(namespace, "r", &recordv1.RequestRecord{
			Method: "berth.v1.JobService/StartJob", ResultId: gone, ExpireTime: timestamppb.New(w.now().Add(48 * time.Hour)),
		})
	})
	if finding := w.wantFindings(w.fsck(true), "dangling_request default/r")[0]; finding.Repaired || !strings.Contains(finding.WhyNot, "twice") {
		t.Errorf("%+v", finding)
	}
	w.later(retention + time.Hour) // its job may have been dropped by now
	w.wantFindings(w.fsck(true))
}

func TestDirectoriesForSocketsOfNoMachineAreRemoved(t *testing.T) {
	w := newWorld(t)
	w.sandbox()
	astray := w.sandboxes.ListenDir("m_astray")
	must(t, os.MkdirAll(astray, 0o700))
	w.wantFindings(w.fsck(true)) // it may be in the making
	w.later(2 * orphanGrace)
	if finding := w.wantFindings(w.fsck(true), "sockets_astray "+astray)[0]; !finding.Repaired {
		t.Errorf("%+v", finding)
	}
	w.wantFindings(w.fsck(true))
}

func TestAMachineWhoseSandboxSaysOtherwiseIsFound(t *testing.T) {
	w := newWorld(t)
	awake, elsewhere := w.sandbox(), w.sandbox()
	w.update(func(tx *store.Tx) error {
		awake.State = stopped
		machine, err := tx.Machine(elsewhere.GetMachineId())
		machine.Provider = "moon"
		return errors.Join(err, tx.PutSandbox(awake, "", ""), tx.PutMachine(machine, "", ""))
	})
	w.wantFindings(w.fsck(true), "machine_awake "+awake.GetMachineId(), "provider_missing "+elsewhere.GetMachineId())
	w.update(func(tx *store.Tx) error {
		machine, err := tx.Machine(elsewhere.GetMachineId())
		machine.Provider = "fake"
		return errors.Join(err, tx.PutMachine(machine, "", ""))
	})
	if _, err := w.sandboxes.Resume(w.ctx, call("resume", ""), awake.GetId()); err != nil { // as the finding says
		t.Error(err)
	}
	w.wantFindings(w.fsck(true))
}

func TestACheckHoldsUpNoWriterHoweverMuchThereIs(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	const many = 20_000
	for from := 0; from < many; from += 1000 {
		w.update(func(tx *store.Tx) error {
			for range 1000 {
				err := tx.PutJob(&recordv1.JobRecord{
					Id: lifecycle.NewID("job"), Namespace: namespace, SandboxId: sandbox.GetId(), MachineId: sandbox.GetMachineId(),
					State: berthv1.JobState_JOB_STATE_DONE, Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}, DoneTime: timestamppb.New(w.now()),
					Spec: &berthv1.JobSpec{Shell: "true"},
				}, "", "")
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	ctx, cancel := context.WithCancel(w.ctx)
	written := make(chan int)
	go func() {
		n := 0
		for ctx.Err() == nil {
			if err := w.ledger.Update(ctx, func(tx *store.Tx) error {
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

func TestBrokenIndexesAreMendedAndTheRestIsCheckedAfterwards(t *testing.T) {
	w := newWorld(t)
	w.sandbox()
	w.stop()
	must(t, w.ledger.Close())
	db, err := bolt.Open(w.ledger.Path(), 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("v1")).Bucket([]byte("index")).Bucket([]byte("machines_live")).Put([]byte("m_ghost"), nil)
	}))
	must(t, db.Close())
	w.ledger, err = store.Open(w.ledger.Path(), store.Options{})
	must(t, err)
	w.start()
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

func TestNothingIsMendedWhereAnOperationCannotBeRead(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	w.update(func(tx *store.Tx) error {
		sandbox.State, sandbox.OperationId = berthv1.SandboxState_SANDBOX_STATE_DESTROYING, "op_spoilt"
		return tx.PutSandbox(sandbox, "", "")
	})
	w.stop()
	must(t, w.ledger.Close())
	db, err := bolt.Open(w.ledger.Path(), 0o600, nil)
	must(t, err)
	must(t, db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("v1")).Bucket([]byte("operations")).Put([]byte("op_spoilt"), []byte("no record"))
	}))
	must(t, db.Close())
	w.ledger, err = store.Open(w.ledger.Path(), store.Options{})
	must(t, err)
	w.start()
	c := &check{service: w.Service, opts: w.opts, repair: true}
	if err := c.sandboxes(w.ctx); !fault.Is(err, fault.StoreFailed) {
		t.Errorf("the error is %v, want %s", err, fault.StoreFailed)
	}
	if len(c.report.Findings) > 0 {
		t.Errorf("found %+v", c.report.Findings)
	}
	must(t, w.ledger.View(func(tx *store.Tx) error {
		now, err := tx.Sandbox(sandbox.GetId())
		if now.GetState() != berthv1.SandboxState_SANDBOX_STATE_DESTROYING {
			t.Errorf("after the check the sandbox is %s", now.GetState())
		}
		return err
	}))
}

func TestABackupComesInPiecesWithItsChecksumAndLeavesNothing(t *testing.T) {
	w := newWorld(t)
	w.sandbox()
	failed := errors.New("the caller went away")
	if err := w.Backup(w.ctx, false, func(Piece) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("the error is %v", err)
	}
	ended, cancel := context.WithCancel(w.ctx)
	cancel()
	if err := w.Backup(ended, true, func(Piece) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	if _, err := os.Stat(w.opts.Scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the scratch directory is still there (%v)", err)
	}
	must(t, os.MkdirAll(filepath.Join(w.opts.Scratch, "x"), 0o700)) // as a kill leaves it
	must(t, w.Start())
	if _, err := os.Stat(w.opts.Scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the scratch directory is still there after a start (%v)", err)
	}
	w.opts.Scratch = filepath.Join(w.dir, "ledger.db", "scratch") // where no directory can be
	if err := w.Backup(w.ctx, false, func(Piece) error { return nil }); err == nil || fault.Is(err, fault.StoreFull) {
		t.Errorf("without a directory: %v", err)
	}
}

func TestABackupThatIsReadSlowlyHoldsUpNobody(t *testing.T) {
	w := newWorld(t)
	w.update(func(tx *store.Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{
			Id: lifecycle.NewID("sb"), Namespace: namespace, State: berthv1.SandboxState_SANDBOX_STATE_FAILED, SealedEnv: make([]byte, 4*pieceBytes),
		}, "", "")
	})
	reading, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error)
	var pieces [][]byte // as they came: none may be changed by the next
	var last Piece
	go func() {
		first := true
		done <- w.Backup(w.ctx, false, func(piece Piece) error {
			if first {
				first = false
				close(reading)
				<-goOn
			}
			pieces, last = append(pieces, piece.Data), piece
			return nil
		})
	}()
	<-reading
	brief, cancel := context.WithTimeout(w.ctx, soon)
	defer cancel()
	if err := w.Backup(brief, true, func(Piece) error { return nil }); err != nil {
		t.Errorf("another backup meanwhile: %v", err)
	}
	if _, err := w.Fsck(brief, false); err != nil {
		t.Errorf("a check meanwhile: %v", err)
	}
	if _, err := os.Stat(w.opts.Scratch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the copy still has a name (%v)", err)
	}
	close(goOn)
	must(t, <-done)
	whole := slices.Concat(pieces...)
	if sum := sha256.Sum256(whole); !bytes.Equal(sum[:], last.SHA256) || uint64(len(whole)) != last.Total || len(pieces) < 5 {
		t.Errorf("%d bytes in %d pieces with the sum %x, want %d with %x", len(whole), len(pieces), sum, last.Total, last.SHA256)
	}
}

func TestADiskWithoutRoomForACopyIsSaidToBeFull(t *testing.T) {
	need.Root(t)
	w := newWorld(t)
	w.update(func(tx *store.Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{
			Id: lifecycle.NewID("sb"), Namespace: namespace, State: berthv1.SandboxState_SANDBOX_STATE_FAILED, SealedEnv: make([]byte, 1<<20),
		}, "", "")
	})
	small := filepath.Join(w.dir, "small")
	must(t, os.Mkdir(small, 0o700))
	must(t, syscall.Mount("tmpfs", small, "tmpfs", 0, "size=64k"))
	defer func() { must(t, syscall.Unmount(small, 0)) }()
	w.opts.Scratch = filepath.Join(small, "scratch")
	_, err := w.Fsck(w.ctx, false)
	errs := map[string]error{"a check": err}
	for name, compact := range map[string]bool{"a backup": false, "a compact backup": true} {
		errs[name] = w.Backup(w.ctx, compact, func(Piece) error { return errors.New("there is nothing to give out") })
	}
	for name, err := range errs {
		if !fault.Is(err, fault.StoreFull) || !strings.Contains(err.Error(), "make room in the state directory") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, err := os.ReadDir(small); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
