package store

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

var updateGolden = flag.Bool("update", false, "write the golden ledger of the newest schema anew")

// goldenPath is the golden ledger of a schema. It is made once, by -update before that schema is
// released, and never again: it is what old daemons left on disks.
func goldenPath(schema int) string {
	return filepath.Join("testdata", fmt.Sprintf("ledger.v%d.db", schema))
}

// The records of the golden ledger of schema 1.
var (
	goldenSandbox = &recordv1.SandboxRecord{
		Id: "sb_01", Namespace: "default", State: running, Generation: 2, Revision: 1, MachineId: "m_01",
		Spec:      &berthv1.SandboxSpec{Provider: "local", Labels: map[string]string{"team": "blue"}, SessionKey: "line-1"},
		SealedEnv: []byte{1, 2, 3}, WorkspacePath: "/workspace", CreateTime: timestamppb.New(epoch),
	}
	goldenEnded = &recordv1.SandboxRecord{
		Id: "sb_00", Namespace: "default", State: destroyed, Revision: 2,
		CreateTime: timestamppb.New(epoch), DestroyTime: timestamppb.New(epoch.Add(time.Hour)),
	}
	goldenMachine = &recordv1.MachineRecord{
		Id: "m_01", Provider: "local", SandboxId: "sb_01", Namespace: "default",
		State: recordv1.MachineState_MACHINE_STATE_BOOTED, HandleVersion: 1, Handle: []byte("{}"), BootId: "boot",
	}
	goldenJob = &recordv1.JobRecord{
		Id: "job_01", Namespace: "default", SandboxId: "sb_01", MachineId: "m_01", Revision: 4, Detached: true,
		State: berthv1.JobState_JOB_STATE_RUNNING, Spec: &berthv1.JobSpec{Argv: []string{"true"}},
	}
	goldenReceipt = &recordv1.JobRecord{
		Id: "job_00", Namespace: "default", SandboxId: "sb_01", MachineId: "m_01", Revision: 5,
		State: berthv1.JobState_JOB_STATE_DONE, DoneTime: timestamppb.New(epoch),
		Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 3}},
	}
	goldenOperation = &recordv1.OperationRecord{
		Id: "op_01", Namespace: "default", Kind: recordv1.OperationKind_OPERATION_KIND_DESTROY, Step: "jobs", SandboxId: "sb_01",
	}
	goldenRequest = &recordv1.RequestRecord{
		BodyHash: []byte{9}, HashVersion: 1, Method: "berth.v1.SandboxService/CreateSandbox", ResultId: "sb_01", ExpireTime: timestamppb.New(epoch),
	}
	goldenSession = &recordv1.SessionRecord{SandboxId: "sb_01"}
)

func writeGolden(tx *Tx) error {
	return errors.Join(
		tx.PutSandbox(proto.CloneOf(goldenSandbox), "sandbox.running", "it runs"),
		tx.PutSandbox(proto.CloneOf(goldenEnded), "sandbox.destroyed", ""),
		tx.PutMachine(proto.CloneOf(goldenMachine), "machine.booted", ""),
		tx.PutJob(proto.CloneOf(goldenJob), "job.running", ""),
		tx.PutJob(proto.CloneOf(goldenReceipt), "job.done", ""),
		tx.PutOperation(goldenOperation),
		tx.PutRequest("default", "request-1", goldenRequest),
		tx.PutSession("default", "line-1", goldenSession),
		tx.setMeta(fingerprintKey, []byte("0123abcd")),
	)
}

func TestGoldenLedgersOfEverySchemaOpenAndReadTheSame(t *testing.T) {
	if *updateGolden {
		makeGolden(t, goldenPath(len(migrations)))
	}
	for schema := 1; schema <= len(migrations); schema++ {
		t.Run(fmt.Sprintf("schema %d", schema), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "ledger.db")
			copyFile(t, goldenPath(schema), path)
			checkGolden(t, openTest(t, path))
		})
	}
}

func makeGolden(t *testing.T, target string) {
	t.Helper()
	s := newTest(t)
	update(t, s, writeGolden)
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := writeWhole(target, func(temp string) error { return s.compactTo(t.Context(), temp) }); err != nil {
		t.Fatal(err)
	}
}

func checkGolden(t *testing.T, s *Store) {
	t.Helper()
	if s.Schema() != uint32(len(migrations)) || len(s.Instance()) != 16 || s.Revision() != 5 {
		t.Errorf("schema %d, instance %q, revision %d", s.Schema(), s.Instance(), s.Revision())
	}
	if got, err := s.KeyFingerprint(); got != "0123abcd" || err != nil {
		t.Errorf("fingerprint %q, %v", got, err)
	}
	view(t, s, func(tx *Tx) error {
		same := func(what string, got proto.Message, err error, want proto.Message) {
			t.Helper()
			if err != nil || !proto.Equal(got, want) {
				t.Errorf("%s: %v, %v, want %v", what, got, err, want)
			}
		}
		sandbox, err := tx.Sandbox("sb_01")
		same("sandbox", sandbox, err, goldenSandbox)
		ended, err := tx.Sandbox("sb_00")
		same("ended sandbox", ended, err, goldenEnded)
		machine, err := tx.Machine("m_01")
		same("machine", machine, err, goldenMachine)
		job, err := tx.Job("job_01")
		same("job", job, err, goldenJob)
		receipt, err := tx.Job("job_00")
		same("receipt", receipt, err, goldenReceipt)
		operation, err := tx.Operation("op_01")
		same("operation", operation, err, goldenOperation)
		request, err := tx.Request("default", "request-1")
		same("request", request, err, goldenRequest)
		session, err := tx.Session("default", "line-1")
		same("session", session, err, goldenSession)
		revisions, events, err := tx.Events(0, 100)
		if err != nil || !slices.Equal(revisions, []uint64{1, 2, 3, 4, 5}) || events[0].Message != "it runs" {
			t.Errorf("events %v, %v", revisions, err)
		}
		for _, name := range slices.Concat(plainBuckets, indexBuckets) {
			if _, err := tx.bucket(name); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Errorf("check: %v, %v", findings, err)
	}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	source, err := os.Open(filepath.Clean(from))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = source.Close() }()
	target, err := os.Create(filepath.Clean(to))
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(target, source)
	if err := errors.Join(err, target.Close()); err != nil {
		t.Fatal(err)
	}
}

// openSteps opens a ledger as a berthd that knows these steps would.
func openSteps(path string, steps []migration) (*Store, error) {
	return open(path, Options{}, steps, os.OpenFile)
}

// nextSteps are today's steps and one more.
func nextSteps(run func(tx *bolt.Tx, root *bolt.Bucket, now time.Time) error) []migration {
	return append(slices.Clone(migrations), migration{name: "next", run: run})
}

func TestAnUpgradeTakesACopyAndRunsInOneTransaction(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	old := len(migrations)
	s := openTest(t, path)
	update(t, s, writeGolden)
	instance := s.Instance()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	failing := nextSteps(func(_ *bolt.Tx, root *bolt.Bucket, _ time.Time) error {
		return errors.Join(root.DeleteBucket([]byte(jobsBucket)), errOwn)
	})
	if _, err := openSteps(path, failing); !errors.Is(err, errOwn) || !strings.Contains(err.Error(), "(next)") {
		t.Fatalf("a failing step: %v", err)
	}
	s = openTest(t, path)
	checkGolden(t, s)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	steps := nextSteps(func(_ *bolt.Tx, root *bolt.Bucket, _ time.Time) error {
		_, err := root.CreateBucket([]byte("moorings"))
		return err
	})
	for range 2 { // the second finds nothing to do
		s, err := openSteps(path, steps)
		if err != nil {
			t.Fatal(err)
		}
		if s.Schema() != uint32(old+1) || s.Instance() != instance || s.Revision() != 5 {
			t.Errorf("schema %d, instance %q, revision %d", s.Schema(), s.Instance(), s.Revision())
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}

	_, err := openSteps(path, migrations)
	want := fmt.Sprintf("has schema %d, this berthd knows up to %d: use a newer berthd or restore the copy", old+1, old)
	if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), copyPath(path, uint32(old))) {
		t.Errorf("a newer schema: %v", err)
	}
	unmark(t, copyPath(path, uint32(old)))
	checkGolden(t, openTest(t, copyPath(path, uint32(old))))
	left, err := filepath.Glob(path + "*")
	if err != nil || len(left) != 2 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// unmark takes from a copy that it is one, and fails the test where it does not say so.
func unmark(t *testing.T, path string) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		meta := tx.Bucket([]byte(rootBucket)).Bucket([]byte(metaBucket))
		if len(meta.Get([]byte(backupKey))) != 8 {
			t.Errorf("the copy %s does not say that it is one", path)
		}
		return meta.Delete([]byte(backupKey))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestANewLedgerLeavesNoCopy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	openTest(t, path)
	if left, err := filepath.Glob(path + "*"); err != nil || len(left) != 1 {
		t.Errorf("files: %v, %v", left, err)
	}
}
