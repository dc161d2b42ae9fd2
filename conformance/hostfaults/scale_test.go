package hostfaults

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// What a ledger is filled with. What reading it costs is logged: figures are the bench's.
const (
	ledgerSandboxes = 1000
	ledgerJobs      = 100_000
	perCommit       = 1000
)

// writeLedger makes a ledger with sandboxes, whose machines are all gone behind the broker's back, and
// with finished jobs, as if a broker had been killed long ago.
func writeLedger(t *testing.T, dir string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	ledger, err := store.Open(filepath.Join(dir, "ledger.db"), store.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := ledger.Close(); err != nil {
			t.Error(err)
		}
	}()
	keys, err := vault.Open(dir)
	if err == nil {
		err = ledger.SetKeyFingerprint(t.Context(), keys.Fingerprint())
	}
	if err != nil {
		t.Fatal(err)
	}
	now := timestamppb.Now()
	var sandboxes []*recordv1.SandboxRecord
	var machines []*recordv1.MachineRecord
	for range ledgerSandboxes {
		sandbox := &recordv1.SandboxRecord{
			Id: request.NewID("sb"), Namespace: "default", State: berthv1.SandboxState_SANDBOX_STATE_RUNNING, Generation: 1,
			Spec: &berthv1.SandboxSpec{Provider: "fake"}, MachineId: request.NewID("m"), CreateTime: now, ReadyTime: now, LastActivityTime: now,
		}
		token, err := keys.Seal(sandbox.GetMachineId(), make([]byte, 32))
		if err != nil {
			t.Fatal(err)
		}
		sandboxes = append(sandboxes, sandbox)
		machines = append(machines, &recordv1.MachineRecord{
			Id: sandbox.GetMachineId(), Provider: "fake", SandboxId: sandbox.GetId(), Namespace: "default", Generation: 1, BootId: "boot",
			State: recordv1.MachineState_MACHINE_STATE_BOOTED, SealedToken: token, CreateTime: now,
		})
	}
	update(t, ledger, func(tx *store.Tx) error {
		var errs []error
		for i := range sandboxes {
			errs = append(errs, tx.PutSandbox(sandboxes[i], "sandbox.running", ""), tx.PutMachine(machines[i], "machine.booted", ""))
		}
		return errors.Join(errs...)
	})
	for done := 0; done < ledgerJobs; done += perCommit {
		update(t, ledger, func(tx *store.Tx) error {
			for i := done; i < done+perCommit; i++ {
				sandbox := sandboxes[i%len(sandboxes)]
				job := &recordv1.JobRecord{
					Id: request.NewID("job"), Namespace: "default", SandboxId: sandbox.GetId(), MachineId: sandbox.GetMachineId(), Generation: 1,
					State: berthv1.JobState_JOB_STATE_DONE, Detached: true, KeepOutput: true, CreateTime: now, StartTime: now, EndTime: now, DoneTime: now,
					Spec:    &berthv1.JobSpec{Argv: []string{"make", "test", strconv.Itoa(i)}},
					Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: int32(i % 256)}},
					Stdout:  &berthv1.OutputStats{Sealed: true}, Stderr: &berthv1.OutputStats{Sealed: true},
				}
				if err := tx.PutJob(job, "job.done", "EXITED"); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func update(t *testing.T, ledger *store.Store, fn func(*store.Tx) error) {
	t.Helper()
	if err := ledger.Update(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

func TestALargeLedgerIsReadWholeWhileItsMachinesAreFoundLost(t *testing.T) {
	w := newHarness(t, fixture.NewBroker(t, asked(t), "--provider", "fake", "--log-level", "error"))
	writeLedger(t, w.State())
	page := func() (*berthv1.ListJobsResponse, error) {
		return w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{PageSize: 100})
	}
	begin := time.Now()
	w.Start(t)
	ready := time.Since(begin)
	first, err := page()
	read := time.Since(begin)
	if err != nil || len(first.GetJobs()) != 100 {
		t.Fatalf("the first page has %d jobs (%v)", len(first.GetJobs()), err)
	}
	var took []time.Duration
	for range 50 {
		begun := time.Now()
		if _, err := page(); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(begun))
	}
	slices.Sort(took)
	info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d sandboxes and %d jobs (%d MiB): ready after %s, a page read after %s; a page of 100 jobs takes %s (median), %s (most); %d MiB resident",
		ledgerSandboxes, ledgerJobs, info.GetLedgerBytes()>>20, ready.Round(time.Millisecond), read.Round(time.Millisecond),
		took[len(took)/2].Round(10*time.Microsecond), took[len(took)-1].Round(10*time.Microsecond), info.GetResidentBytes()>>20)
	// Every machine is gone: that is found out for all of them, while reads go on.
	begun := time.Now()
	eventually(t, "all sandboxes are known to be lost", func() error {
		info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
		if err == nil && info.GetSandboxes()["LOST"] != ledgerSandboxes {
			err = fmt.Errorf("there are %v", info.GetSandboxes())
		}
		return err
	})
	t.Logf("%d lost machines were found out after %s", ledgerSandboxes, time.Since(begun).Round(10*time.Millisecond))
	pages, token := 0, ""
	for begun = time.Now(); ; pages++ {
		reply, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		if token = reply.GetNextPageToken(); token == "" {
			break
		}
	}
	t.Logf("all %d jobs were read in %s", ledgerJobs, time.Since(begun).Round(time.Millisecond))
	if pages+1 != ledgerJobs/1000 {
		t.Errorf("the jobs came in %d pages of 1000", pages+1)
	}
	w.Stop(t)
}

// jobsVariable is how many short jobs are run; by default shortJobs.
const (
	jobsVariable  = "BERTH_JOBS"
	shortJobs     = 1200
	rounds        = 3
	maxEmptyBytes = 512 << 10 // bytes of a ledger that are in use when all has ended and gone
)

// size is how much the broker keeps: bytes of the ledger that are in use, and files and bytes of output.
type size struct {
	ledger, output int64
	files          int
}

func (w *harness) size(t *testing.T) size {
	t.Helper()
	var s size
	err := filepath.WalkDir(w.State(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return nil //nolint:nilerr // what is being removed is not counted
		}
		info, err := entry.Info()
		switch {
		case err != nil:
		case entry.Name() == "ledger.db":
			s.ledger = info.Size()
		case filepath.Base(filepath.Dir(filepath.Dir(path))) == "output":
			s.output += info.Size()
			s.files++
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestShortJobsWithoutEndStayWithinTheirBounds runs many short jobs, attached and detached, lets their
// retention pass by the broker's clocks, and runs as many again: what was kept is gone, and neither the
// ledger nor the output has grown.
func TestShortJobsWithoutEndStayWithinTheirBounds(t *testing.T) {
	jobs := jobsAsked(t)
	w := patient(t, jobs, "--retention", "1h")
	clock := clockOf(t, w.Pid())
	sandbox := w.create(t)
	for round := range rounds {
		begun := time.Now()
		w.runMany(t, sandbox, jobs/2)
		full := w.size(t)
		took := time.Since(begun)
		later := time.Duration(round+1) * 30 * time.Hour // beyond the retention of receipts, events and request ids
		clock.step(t, later, later)
		eventually(t, "what was kept long enough is gone", func() error {
			info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
			if err == nil && info.GetOutputBytes() > 0 {
				err = fmt.Errorf("%d bytes of output are kept", info.GetOutputBytes())
			}
			list, listErr := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{PageSize: 1})
			if listErr == nil && len(list.GetJobs()) > 0 {
				listErr = errors.New("there are jobs")
			}
			return errors.Join(err, listErr)
		})
		t.Logf("round %d: %d jobs in %s; then the ledger has %d KiB (%d bytes a job), output %d KiB in %d files; after their retention %d files",
			round+1, jobs, took.Round(time.Millisecond), full.ledger>>10, full.ledger/int64(jobs), full.output>>10, full.files, w.size(t).files)
		if left := w.size(t); left.files != 0 || left.output != 0 {
			t.Errorf("after their retention %d files with %d bytes of output are left", left.files, left.output)
		}
	}
	w.destroy(t, sandbox)
	w.quiet(t)
	later := (rounds + 1) * 30 * time.Hour
	clock.step(t, later, later)
	eventually(t, "the sandbox is gone", func() error {
		_, err := w.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox})
		if client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND) {
			return nil
		}
		return fmt.Errorf("it is there (%w)", err)
	})
	w.Stop(t)
	used := inUse(t, filepath.Join(w.State(), "ledger.db"))
	t.Logf("in the end %d KiB of the ledger are in use", used>>10)
	if used > maxEmptyBytes {
		t.Errorf("when all is gone %d KiB of the ledger are in use", used>>10)
	}
}

// TestMoreJobsThanAreKeptLeaveTheYoungest runs more jobs than receipts may be kept, none of them old: the
// oldest are gone, and so is their output.
func TestMoreJobsThanAreKeptLeaveTheYoungest(t *testing.T) {
	const kept = 1000
	jobs := jobsAsked(t)
	if jobs <= kept {
		t.Fatalf("%s must be more than %d here", jobsVariable, kept)
	}
	w := patient(t, jobs, "--retention-jobs", strconv.Itoa(kept))
	sandbox := w.create(t)
	w.runMany(t, sandbox, jobs/2)
	youngest := w.begin(t, sandbox, "echo youngest")
	w.wantExit(t, youngest, 0)
	clockOf(t, w.Pid()).step(t, 0, 2*time.Minute) // to the broker's next look
	eventually(t, "the oldest receipts are dropped", func() error {
		left, page := 0, ""
		for {
			list, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{PageSize: 500, PageToken: page})
			if err != nil {
				return err
			}
			left, page = left+len(list.GetJobs()), list.GetNextPageToken()
			if page == "" {
				break
			}
		}
		if left != kept {
			return fmt.Errorf("%d receipts are kept", left)
		}
		return nil
	})
	size := w.size(t)
	t.Logf("of %d jobs %d receipts are kept, in a ledger of %d KiB; output %d KiB in %d files", jobs+1, kept, size.ledger>>10, size.output>>10, size.files)
	if size.files > kept {
		t.Errorf("%d receipts have %d files of output", kept, size.files)
	}
	if data, gaps, err := w.ReadAllOutput(w.ctx, youngest, berthv1.Stream_STREAM_STDOUT); err != nil || len(gaps) > 0 || string(data) != "youngest\n" {
		t.Errorf("the youngest has %q (gaps %v, %v)", data, gaps, err)
	}
	w.destroy(t, sandbox)
	w.quiet(t)
}

// jobsAsked is how many short jobs are to be run.
func jobsAsked(t *testing.T) int {
	t.Helper()
	said := os.Getenv(jobsVariable)
	if said == "" {
		return shortJobs
	}
	n, err := strconv.Atoi(said)
	if err != nil || n < 100 {
		t.Fatalf("%s is %q, want a number of jobs, at least 100", jobsVariable, said)
	}
	return n
}

// patient starts a broker whose test has the time for so many jobs.
func patient(t *testing.T, jobs int, flags ...string) *harness {
	t.Helper()
	b := fixture.NewBroker(t, asked(t), append([]string{"--provider", "local", "--log-level", "info"}, flags...)...)
	w := newHarness(t, b)
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout+time.Duration(jobs)*100*time.Millisecond)
	t.Cleanup(cancel)
	w.ctx = ctx
	w.Start(t)
	return w
}

// inUse is how many bytes of a ledger that nobody has open are not free.
func inUse(t *testing.T, path string) int64 {
	t.Helper()
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, PreLoadFreelist: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	var free, total int64
	err = db.View(func(tx *bolt.Tx) error {
		total = tx.Size()
		for id := range int(total) / db.Info().PageSize {
			page, err := tx.Page(id)
			if err != nil {
				return err
			}
			if page != nil && page.Type == "free" {
				free += int64(db.Info().PageSize)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return total - free
}

// runMany runs as many attached commands and as many detached jobs, each with a line of output, and waits
// for all.
func (w *harness) runMany(t *testing.T, sandbox string, of int) {
	t.Helper()
	var next atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for i := next.Add(1); i <= int64(of) && !t.Failed(); i = next.Add(1) {
				spec := &berthv1.JobSpec{Argv: []string{"echo", strconv.FormatInt(i, 10)}}
				if _, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: spec}); err != nil {
					t.Errorf("run command %d: %v", i, err)
				}
				reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: spec})
				if err != nil {
					t.Errorf("start job %d: %v", i, err)
					return
				}
				done, err := w.WaitJob(w.ctx, reply.GetJob().GetId())
				if err != nil || done.GetOutcome().Exit == nil || done.GetOutcome().GetExitCode() != 0 {
					t.Errorf("job %d ended as %v (%v)", i, done.GetOutcome(), err)
				}
			}
		})
	}
	group.Wait()
}
