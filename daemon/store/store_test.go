package store

import (
	"bytes"
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

	bolt "go.etcd.io/bbolt"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// childVariable tells this test program to be a child of one of its tests: "commit:<path>" commits
// until it is killed, "hold:<path>" holds a ledger until its stdin ends.
const childVariable = "BERTH_STORE_CHILD"

func TestMain(m *testing.M) {
	role, path, _ := strings.Cut(os.Getenv(childVariable), ":")
	switch role {
	case "commit":
		commitForEver(path)
	case "hold":
		holdUntilStdinEnds(path)
	default:
		goleak.VerifyTestMain(m)
	}
}

// epoch is when the tests' clock stands.
var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func openTest(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(path, Options{
		Log:   slog.New(slog.DiscardHandler),
		Fatal: func(err error) { t.Errorf("the ledger ended the process: %v", err) },
		Now:   func() time.Time { return epoch },
	})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func newTest(t testing.TB) *Store {
	t.Helper()
	return openTest(t, filepath.Join(t.TempDir(), "ledger.db"))
}

func update(t testing.TB, s *Store, fn func(*Tx) error) {
	t.Helper()
	if err := s.Update(context.Background(), fn); err != nil {
		t.Fatalf("update: %v", err)
	}
}

func view(t testing.TB, s *Store, fn func(*Tx) error) {
	t.Helper()
	if err := s.View(fn); err != nil {
		t.Fatalf("view: %v", err)
	}
}

func sandbox(id string, state berthv1.SandboxState) *recordv1.SandboxRecord {
	return &recordv1.SandboxRecord{Id: id, Namespace: "default", State: state, CreateTime: timestamppb.New(epoch)}
}

func job(id, sandboxID string, state berthv1.JobState) *recordv1.JobRecord {
	return &recordv1.JobRecord{Id: id, Namespace: "default", SandboxId: sandboxID, MachineId: "m_" + sandboxID, State: state}
}

const (
	running   = berthv1.SandboxState_SANDBOX_STATE_RUNNING
	destroyed = berthv1.SandboxState_SANDBOX_STATE_DESTROYED
	failed    = berthv1.SandboxState_SANDBOX_STATE_FAILED
)

func TestANewLedgerHasAnInstanceASchemaAndIsPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	s := openTest(t, path)
	instance := s.Instance()
	if len(instance) != 16 || strings.Trim(instance, "0123456789abcdef") != "" {
		t.Errorf("instance %q is not 16 hexadecimal characters", instance)
	}
	if s.Schema() != uint32(len(migrations)) || s.Path() != path || s.Revision() != 0 {
		t.Errorf("schema %d, path %s, revision %d", s.Schema(), s.Path(), s.Revision())
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, error %v", info.Mode(), err)
	}
	if s.SizeBytes() != info.Size() || info.Size() == 0 {
		t.Errorf("size %d, the file has %d", s.SizeBytes(), info.Size())
	}
	update(t, s, func(tx *Tx) error { return tx.PutSandbox(sandbox("sb_1", running), "", "") })
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again := openTest(t, path)
	if again.Instance() != instance || again.Revision() != 1 {
		t.Errorf("reopened: instance %q, want %q; revision %d, want 1", again.Instance(), instance, again.Revision())
	}
	if other := newTest(t); other.Instance() == instance {
		t.Error("two ledgers have the same instance")
	}
}

func TestWhatIsNoLedgerIsRefusedInClearWords(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good.db")
	s := openTest(t, good)
	update(t, s, func(tx *Tx) error {
		return tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_1", Namespace: "n", SealedEnv: make([]byte, 1<<20)}, "", "")
	})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	text := bytes.Repeat([]byte("this is a letter\n"), 4096)
	cases := []struct {
		name    string
		content []byte
		wanted  string
	}{
		{"text", text, "not a ledger"},
		{"one byte", []byte("x"), "not a ledger"},
		{"zeros", make([]byte, 1<<16), "not a ledger"},
		{"the first half of a ledger", whole[:300<<10], "shorter than it says"},
		{"a ledger with one bad head opens", damage(whole, 0), ""},
		{"a ledger with the other head bad opens", damage(whole, os.Getpagesize()), ""},
		{"a ledger with two bad heads", damage(damage(whole, 0), os.Getpagesize()), "not a ledger"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "ledger.db")
			if err := os.WriteFile(path, c.content, 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := Open(path, Options{})
			if c.wanted == "" {
				if err != nil {
					t.Fatal(err)
				}
				_ = s.Close()
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.wanted) || !strings.Contains(err.Error(), path) {
				t.Fatalf("error %v, want %q and the path in it", err, c.wanted)
			}
			after, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(after, c.content) {
				t.Errorf("the refused file was changed (%v)", err)
			}
		})
	}
}

// damage flips a byte within the head at an offset.
func damage(content []byte, offset int) []byte {
	bad := bytes.Clone(content)
	bad[offset+headOffset+headNumber] ^= 0xff
	return bad
}

func TestAnotherProgramsDatabaseIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "other.db")
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucket([]byte("key"))
		return err
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, Options{}); err == nil || !strings.Contains(err.Error(), "something else") {
		t.Errorf("error %v", err)
	}
}

func TestADirectoryThatCannotBeWrittenIsNamed(t *testing.T) {
	cases := []struct {
		name string
		path func(t *testing.T) string
	}{
		{"an absent directory", func(t *testing.T) string { return filepath.Join(t.TempDir(), "absent", "ledger.db") }},
		{"a directory in place of the file", func(t *testing.T) string { return t.TempDir() }},
		{"a read-only directory", readOnlyDir},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			path := c.path(t)
			if _, err := Open(path, Options{}); err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want one that names %s", err, path)
			}
		})
	}
}

func TestASecondDaemonIsToldWhoHasTheLedger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	child := exec.Command(os.Args[0]) // #nosec G204 -- this test program
	child.Env = append(os.Environ(), childVariable+"=hold:"+path)
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = child.Wait()
	})
	if _, err := stdout.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the child did not open the ledger: %v", err)
	}
	begin := time.Now()
	_, err = Open(path, Options{LockTimeout: 200 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", child.Process.Pid)) {
		t.Errorf("error %v, want one that names process %d", err, child.Process.Pid)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	_ = stdin.Close()
	if err := child.Wait(); err != nil {
		t.Fatal(err)
	}
	openTest(t, path)
}

func holdUntilStdinEnds(path string) {
	s, err := Open(path, Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("held")
	_, _ = os.Stdin.Read(make([]byte, 1))
	_ = s.Close()
}

func TestAClosedLedgerSaysThatItIsStopping(t *testing.T) {
	s := newTest(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("closing twice: %v", err)
	}
	if err := s.Update(context.Background(), func(*Tx) error { return nil }); !fault.Is(err, fault.Stopping) {
		t.Errorf("update: %v", err)
	}
	if err := s.View(func(*Tx) error { return nil }); !fault.Is(err, fault.Stopping) {
		t.Errorf("view: %v", err)
	}
	s.UpdateLater(func(*Tx) error { t.Error("it ran"); return nil })
}

func TestTheKeysFingerprintIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	s := openTest(t, path)
	if got, err := s.KeyFingerprint(); got != "" || err != nil {
		t.Errorf("of a new ledger: %q, %v", got, err)
	}
	if err := s.SetKeyFingerprint(context.Background(), "0123abcd"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := openTest(t, path).KeyFingerprint(); got != "0123abcd" || err != nil {
		t.Errorf("reopened: %q, %v", got, err)
	}
}

func TestAValueThatCannotBeDecodedIsNamed(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		for _, err := range []error{
			tx.PutSandbox(sandbox("sb_1", running), "sandbox.running", ""),
			tx.PutJob(job("job_1", "sb_1", berthv1.JobState_JOB_STATE_RUNNING), "", ""),
			tx.PutMachine(&recordv1.MachineRecord{Id: "m_1"}, "", ""),
			tx.PutOperation(&recordv1.OperationRecord{Id: "op_1"}),
			tx.PutSession("default", "line", &recordv1.SessionRecord{SandboxId: "sb_1"}),
			tx.PutRequest("default", "r1", &recordv1.RequestRecord{ExpireTime: timestamppb.New(epoch)}),
		} {
			if err != nil {
				return err
			}
		}
		for _, at := range [][2]string{{sandboxesBucket, "sb_1"}, {jobsBucket, "job_1"}, {machinesBucket, "m_1"}, {operationsBucket, "op_1"}, {eventsBucket, string(numberBytes(1))}} {
			if err := tx.put(at[0], []byte(at[1]), []byte{0xff}); err != nil {
				return err
			}
		}
		for _, at := range [][2]string{{sessionsBucket, "line"}, {requestsBucket, "r1"}} {
			inner, err := tx.nested(at[0], "default")
			if err != nil {
				return err
			}
			if err := inner.Put([]byte(at[1]), []byte{0xff}); err != nil {
				return err
			}
		}
		return nil
	})
	reads := map[string]func(tx *Tx) error{
		"sandboxes/sb_1":            func(tx *Tx) error { _, err := tx.Sandbox("sb_1"); return err },
		"jobs/job_1":                func(tx *Tx) error { _, err := tx.OpenJobs(""); return err },
		"machines/m_1":              func(tx *Tx) error { _, err := tx.LiveMachines(); return err },
		"operations/op_1":           func(tx *Tx) error { _, err := tx.OpenOperations(); return err },
		"sessions/default/line":     func(tx *Tx) error { _, err := tx.Session("default", "line"); return err },
		"requests/default/r1":       func(tx *Tx) error { _, err := tx.Request("default", "r1"); return err },
		"events/0x0000000000000001": func(tx *Tx) error { _, _, err := tx.Events(0, 10); return err },
	}
	for wanted, read := range reads {
		if err := s.View(read); !fault.Is(err, fault.StoreFailed) || !strings.Contains(err.Error(), wanted) {
			t.Errorf("reading %s: %v", wanted, err)
		}
	}
	if err := s.View(func(tx *Tx) error { _, _, err := tx.ListSandboxes("default", Page{}, nil); return err }); !fault.Is(err, fault.StoreFailed) {
		t.Errorf("listing: %v", err)
	}
	findings, err := check(t, s)
	if err != nil || len(findings) == 0 || findings[0].Kind != "undecodable_record" {
		t.Errorf("check found %v, %v", findings, err)
	}
}

func TestBadKeysAreRefused(t *testing.T) {
	s := newTest(t)
	long := strings.Repeat("x", maxKeyBytes+1)
	soon := &recordv1.RequestRecord{ExpireTime: timestamppb.New(epoch)}
	cases := map[string]func(tx *Tx) error{
		"sandbox without id":        func(tx *Tx) error { return tx.PutSandbox(&recordv1.SandboxRecord{Namespace: "n"}, "", "") },
		"sandbox without namespace": func(tx *Tx) error { return tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_1"}, "", "") },
		"sandbox with a NUL": func(tx *Tx) error {
			return tx.PutSandbox(&recordv1.SandboxRecord{Id: "a\x00b", Namespace: "n"}, "", "")
		},
		"sandbox with a long id":    func(tx *Tx) error { return tx.PutSandbox(&recordv1.SandboxRecord{Id: long, Namespace: "n"}, "", "") },
		"machine without id":        func(tx *Tx) error { return tx.PutMachine(&recordv1.MachineRecord{}, "", "") },
		"job without id":            func(tx *Tx) error { return tx.PutJob(&recordv1.JobRecord{Namespace: "n", SandboxId: "s"}, "", "") },
		"job without sandbox":       func(tx *Tx) error { return tx.PutJob(&recordv1.JobRecord{Id: "j", Namespace: "n"}, "", "") },
		"operation without id":      func(tx *Tx) error { return tx.PutOperation(&recordv1.OperationRecord{}) },
		"request without id":        func(tx *Tx) error { return tx.PutRequest("n", "", soon) },
		"request without namespace": func(tx *Tx) error { return tx.PutRequest("", "r", soon) },
		"request without expiry":    func(tx *Tx) error { return tx.PutRequest("n", "r", &recordv1.RequestRecord{}) },
		"session without key":       func(tx *Tx) error { return tx.PutSession("n", "", &recordv1.SessionRecord{}) },
		"nil sandbox":               func(tx *Tx) error { return tx.PutSandbox(nil, "", "") },
		"nil job":                   func(tx *Tx) error { return tx.PutJob(nil, "", "") },
	}
	for name, put := range cases {
		if err := s.Update(context.Background(), put); !fault.Is(err, fault.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if s.Revision() != 0 {
		t.Errorf("revision %d", s.Revision())
	}
}

func TestReadOfNothingIsNilWithoutError(t *testing.T) {
	s := newTest(t)
	for _, id := range []string{"absent", ""} {
		view(t, s, func(tx *Tx) error {
			if rec, err := tx.Sandbox(id); rec != nil || err != nil {
				t.Errorf("sandbox %q: %v, %v", id, rec, err)
			}
			if rec, err := tx.Machine(id); rec != nil || err != nil {
				t.Errorf("machine %q: %v, %v", id, rec, err)
			}
			if rec, err := tx.Job(id); rec != nil || err != nil {
				t.Errorf("job %q: %v, %v", id, rec, err)
			}
			if rec, err := tx.Operation(id); rec != nil || err != nil {
				t.Errorf("operation %q: %v, %v", id, rec, err)
			}
			if rec, err := tx.Request(id, "r"); rec != nil || err != nil {
				t.Errorf("request of %q: %v, %v", id, rec, err)
			}
			if rec, err := tx.Session("default", id); rec != nil || err != nil {
				t.Errorf("session %q: %v, %v", id, rec, err)
			}
			return nil
		})
		update(t, s, func(tx *Tx) error {
			if id == "" {
				return nil
			}
			return errors.Join(tx.DeleteSandbox(id), tx.DeleteMachine(id), tx.DeleteJob(id), tx.DeleteOperation(id), tx.DeleteSession("default", id))
		})
	}
}

func TestWhatIsFinalStaysSo(t *testing.T) {
	done := func(code uint32) *recordv1.JobRecord {
		rec := job("job_1", "sb_1", berthv1.JobState_JOB_STATE_DONE)
		rec.Outcome = &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: code}}}
		return rec
	}
	machine := func(state recordv1.MachineState) *recordv1.MachineRecord {
		return &recordv1.MachineRecord{Id: "m_1", State: state}
	}
	cases := []struct {
		name    string
		first   func(tx *Tx) error
		second  func(tx *Tx) error
		refused bool
	}{
		{"a destroyed sandbox does not run again",
			func(tx *Tx) error { return tx.PutSandbox(sandbox("sb_1", destroyed), "", "") },
			func(tx *Tx) error { return tx.PutSandbox(sandbox("sb_1", running), "", "") }, true},
		{"a destroyed sandbox can be written again",
			func(tx *Tx) error { return tx.PutSandbox(sandbox("sb_2", destroyed), "", "") },
			func(tx *Tx) error { return tx.PutSandbox(sandbox("sb_2", destroyed), "", "") }, false},
		{"a done job does not run again",
			func(tx *Tx) error { return tx.PutJob(done(0), "", "") },
			func(tx *Tx) error { return tx.PutJob(job("job_1", "sb_1", berthv1.JobState_JOB_STATE_RUNNING), "", "") }, true},
		{"a done job keeps its outcome",
			func(tx *Tx) error { return tx.PutJob(done(0), "", "") },
			func(tx *Tx) error { return tx.PutJob(done(1), "", "") }, true},
		{"a done job with the same outcome can be written again",
			func(tx *Tx) error { return tx.PutJob(done(0), "", "") },
			func(tx *Tx) error { return tx.PutJob(done(0), "", "") }, false},
		{"a doomed machine does not come back",
			func(tx *Tx) error {
				return tx.PutMachine(machine(recordv1.MachineState_MACHINE_STATE_TERMINATING), "", "")
			},
			func(tx *Tx) error { return tx.PutMachine(machine(recordv1.MachineState_MACHINE_STATE_BOOTED), "", "") }, true},
		{"a doomed machine goes",
			func(tx *Tx) error { return nil },
			func(tx *Tx) error { return tx.PutMachine(machine(recordv1.MachineState_MACHINE_STATE_GONE), "", "") }, false},
		{"a gone machine is not doomed again",
			func(tx *Tx) error { return nil },
			func(tx *Tx) error {
				return tx.PutMachine(machine(recordv1.MachineState_MACHINE_STATE_TERMINATING), "", "")
			}, true},
	}
	s := newTest(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			update(t, s, c.first)
			err := s.Update(context.Background(), c.second)
			if c.refused != fault.Is(err, fault.Internal) || !c.refused && err != nil {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestABackupIsALedger(t *testing.T) {
	dir := t.TempDir()
	s := openTest(t, filepath.Join(dir, "ledger.db"))
	for i := range 200 {
		update(t, s, func(tx *Tx) error {
			rec := sandbox(fmt.Sprintf("sb_%03d", i), running)
			rec.SealedEnv = make([]byte, 8<<10)
			return tx.PutSandbox(rec, "sandbox.running", "")
		})
	}
	update(t, s, func(tx *Tx) error {
		for i := range 190 {
			if err := tx.DeleteSandbox(fmt.Sprintf("sb_%03d", i)); err != nil {
				return err
			}
		}
		return nil
	})
	sizes := map[bool]int64{}
	for _, compact := range []bool{false, true} {
		path := filepath.Join(dir, fmt.Sprintf("copy-%v.db", compact))
		for range 2 { // the second replaces the first
			if err := s.BackupTo(context.Background(), path, compact); err != nil {
				t.Fatal(err)
			}
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("mode %v, error %v", info, err)
		}
		sizes[compact] = info.Size()
		copied := openTest(t, path)
		if copied.Instance() != s.Instance() || copied.Revision() < s.Revision()+restoredGap {
			t.Errorf("compact %v: instance %s, revision %d", compact, copied.Instance(), copied.Revision())
		}
		view(t, copied, func(tx *Tx) error {
			live, err := tx.LiveSandboxes()
			if len(live) != 10 {
				t.Errorf("compact %v: %d sandboxes", compact, len(live))
			}
			return err
		})
		if findings, err := check(t, copied); len(findings) > 0 || err != nil {
			t.Errorf("compact %v: %v, %v", compact, findings, err)
		}
	}
	if sizes[true]*2 > sizes[false] {
		t.Errorf("compact %d bytes, plain %d", sizes[true], sizes[false])
	}
	if err := s.BackupTo(context.Background(), s.Path(), false); err == nil {
		t.Error("the ledger was backed up onto itself")
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	for _, compact := range []bool{false, true} {
		if err := s.BackupTo(ended, filepath.Join(dir, "never.db"), compact); !errors.Is(err, context.Canceled) {
			t.Errorf("compact %v with an ended context: %v", compact, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.db"))
	if err != nil || len(left) != 3 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestBrokenIndexesAreFoundAndMended(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		if err := tx.PutSandbox(sandbox("sb_1", running), "sandbox.running", ""); err != nil {
			return err
		}
		return tx.PutJob(job("job_1", "sb_1", berthv1.JobState_JOB_STATE_RUNNING), "", "")
	})
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Fatalf("before: %v, %v", findings, err)
	}
	update(t, s, func(tx *Tx) error {
		tx.counts.events, tx.changed = 7, true
		return errors.Join(
			tx.put(sandboxesLive, []byte("sb_ghost"), nil),
			tx.remove(jobsOpenByMachine, joinKey("m_sb_1", "job_1")),
			tx.put(jobsOpenBySandbox, joinKey("sb_1", "job_1"), []byte{1}),
		)
	})
	if err := s.View(func(tx *Tx) error { _, err := tx.LiveSandboxes(); return err }); !fault.Is(err, fault.StoreFailed) {
		t.Errorf("a dangling index: %v", err)
	}
	findings, err := check(t, s)
	if err != nil || len(findings) != 4 {
		t.Errorf("found %v, %v", findings, err)
	}
	repaired, err := s.RepairIndexes(context.Background())
	if err != nil || len(repaired) != 4 {
		t.Errorf("repaired %v, %v", repaired, err)
	}
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Errorf("after: %v, %v", findings, err)
	}
}

func readOnlyDir(t *testing.T) string {
	dir := mountTmpfs(t, "size=1m,ro")
	return filepath.Join(dir, "ledger.db")
}

// mountTmpfs mounts a tmpfs for the test; without the right to, it skips the test.
func mountTmpfs(t *testing.T, options string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skipped: mounting a file system needs root")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", options, "tmpfs", dir).CombinedOutput(); err != nil { // #nosec G204
		t.Skipf("skipped: mounting a tmpfs failed: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil { // #nosec G204
			t.Errorf("umount %s: %v: %s", dir, err, out)
		}
	})
	return dir
}

// check checks a ledger, and that its copy is gone afterwards.
func check(t testing.TB, s *Store) ([]Finding, error) {
	t.Helper()
	scratch := filepath.Join(t.TempDir(), "copy.db")
	findings, err := s.Check(context.Background(), scratch)
	if _, gone := os.Stat(scratch); !errors.Is(gone, os.ErrNotExist) {
		t.Errorf("the checked copy is still there (%v)", gone)
	}
	return findings, err
}
