package hostfaults

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// mounts are the fields of each line of the mount table.
func mounts(t *testing.T) [][]string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	var all [][]string
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 2 {
			all = append(all, fields)
		}
	}
	return all
}

// open are the broker's descriptors.
func (w *harness) open(t *testing.T) []int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", w.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	var open []int
	for _, entry := range entries {
		if fd, err := strconv.Atoi(entry.Name()); err == nil {
			open = append(open, fd)
		}
	}
	return open
}

// limitFiles bounds the descriptors of the broker to those that it has open, and returns how many
// that are at most, and what undoes it.
func (w *harness) limitFiles(t *testing.T) (limit int, raise func()) {
	t.Helper()
	for _, fd := range w.open(t) {
		limit = max(limit, fd+1) // free numbers below are few
	}
	var before unix.Rlimit
	if err := unix.Prlimit(w.Pid(), unix.RLIMIT_NOFILE, nil, &before); err != nil {
		t.Fatal(err)
	}
	none := unix.Rlimit{Cur: uint64(limit), Max: before.Max}
	if err := unix.Prlimit(w.Pid(), unix.RLIMIT_NOFILE, &none, nil); err != nil {
		t.Fatal(err)
	}
	return limit, func() {
		if err := unix.Prlimit(w.Pid(), unix.RLIMIT_NOFILE, &before, nil); err != nil {
			t.Error(err)
		}
	}
}

func TestABrokerWithoutDescriptorsRefusesClearlyAndLosesNothing(t *testing.T) {
	const remedy = "raise the limit on open files of berthd"
	w := start(t)
	sandbox := w.create(t)
	var waiting []string
	for i := range int32(8) {
		waiting = append(waiting, w.begin(t, sandbox, fmt.Sprintf("while [ ! -e go ]; do sleep 0.05; done; echo line; exit %d", i)))
	}
	if _, err := w.impatient.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{}); err != nil {
		t.Fatal(err) // and it has its connection now
	}
	limit, raise := w.limitFiles(t)
	defer raise()
	// What few numbers are free below the limit are taken by connections that nobody serves.
	for range limit {
		conn, err := net.Dial("unix", strings.TrimPrefix(w.Broker.Address, "unix://"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	eventually(t, "the broker has no descriptor left", func() error {
		if open := w.open(t); len(open) < limit {
			return fmt.Errorf("of %d descriptors it has %d open", limit, len(open))
		}
		return nil
	})

	// What a refused create had begun cannot be taken away without descriptors either: that goes on.
	_, err := w.impatient.Sandboxes().CreateSandbox(brief(t, 2*time.Second), &berthv1.CreateSandboxRequest{RequestId: "starved"})
	if status.Code(err) != codes.DeadlineExceeded {
		wantRefused(t, "CreateSandbox", err, codes.ResourceExhausted, berthv1.Reason_REASON_QUOTA_EXCEEDED, remedy)
	}
	eventually(t, "the list says why the sandbox could not be made", func() error {
		list, err := w.impatient.Sandboxes().ListSandboxes(w.ctx, &berthv1.ListSandboxesRequest{
			States: []berthv1.SandboxState{berthv1.SandboxState_SANDBOX_STATE_CREATING, berthv1.SandboxState_SANDBOX_STATE_FAILED},
		})
		if err == nil && (len(list.GetSandboxes()) != 1 || !strings.Contains(list.GetSandboxes()[0].GetLastError().GetMessage(), "too many open files")) {
			err = fmt.Errorf("it has %v", list.GetSandboxes())
		}
		return err
	})
	ran, err := w.impatient.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "touch go; exit 9"}})
	if err != nil || ran.GetJob().GetOutcome().GetExitCode() != 9 {
		t.Errorf("a command, which needs no descriptor of the broker's, gave %v, %v", ran, err)
	}
	fixture.Pause(4 * time.Second) // the jobs end, and the machines are looked at
	if got, err := w.impatient.Sandboxes().GetSandbox(w.ctx, &berthv1.GetSandboxRequest{SandboxId: sandbox}); err != nil ||
		got.GetSandbox().GetState() != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("the sandbox is %v (%v)", got.GetSandbox().GetState(), err)
	}
	raise()
	_, err = w.Sandboxes().CreateSandbox(w.ctx, &berthv1.CreateSandboxRequest{RequestId: "starved"})
	wantRefused(t, "the request that was given up", err, codes.ResourceExhausted, berthv1.Reason_REASON_QUOTA_EXCEEDED, remedy)
	for i, job := range waiting {
		w.wantExit(t, job, int32(i))
		w.wantOutput(t, job, "line\n")
	}
	another := w.create(t)
	w.destroy(t, sandbox)
	w.destroy(t, another)
	w.quiet(t)
}

func TestOutputThatCannotBeWrittenForAWhileIsNotLost(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t)
	job := w.begin(t, sandbox, "while [ ! -e go ]; do sleep 0.05; done; echo whole; exit 3")
	inTheWay := filepath.Join(w.State(), "output", job, "stdout.0")
	if err := os.MkdirAll(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	w.run(t, sandbox, "touch go")
	eventually(t, "the broker has tried twice", func() error {
		if tries := len(w.logged(t, "is a directory")); tries < 2 {
			return fmt.Errorf("it has tried %d times", tries)
		}
		return nil
	})
	if err := os.Remove(inTheWay); err != nil {
		t.Fatal(err)
	}
	w.wantExit(t, job, 3)
	w.wantOutput(t, job, "whole\n")
	w.destroy(t, sandbox)
	w.quiet(t)
}

func TestTermUnderLoadStopsInTimeAndLosesNothing(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t)
	const each = 20
	var jobs []string
	for i := range each {
		jobs = append(jobs, w.begin(t, sandbox, fmt.Sprintf("echo begun; while [ ! -e go ]; do sleep 0.1; done; exit %d", i)))
	}
	answers := make(chan error, 5*each)
	const untilGo = "while [ ! -e go ]; do sleep 0.1; done"
	following := make(chan bool, each)
	var callers sync.WaitGroup
	call := func(do func() error) { callers.Go(func() { answers <- do() }) }
	ctx := w.ctx
	for i := range each {
		call(func() error { // an attached command, which only this call knows
			_, err := w.impatient.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: untilGo}})
			return err
		})
		call(func() error {
			_, err := w.impatient.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{
				RequestId: fmt.Sprintf("run-%d", i), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: untilGo + "; exit 4"},
			})
			return err
		})
		call(func() error {
			_, err := w.impatient.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: jobs[i], Wait: durationpb.New(10 * time.Minute)})
			return err
		})
		call(func() error {
			stream, err := w.impatient.Jobs().FollowJob(ctx, &berthv1.FollowJobRequest{JobId: jobs[i]})
			if err == nil {
				_, err = stream.Recv()
			}
			following <- true
			for err == nil {
				_, err = stream.Recv()
			}
			if errors.Is(err, io.EOF) {
				return errors.New("a follower was told that its job has ended")
			}
			return err
		})
	}
	// And some that make work until the last moment.
	var acknowledged sync.Map
	for i := range each {
		call(func() error {
			for try := 0; ; try++ {
				reply, err := w.impatient.Jobs().StartJob(ctx, &berthv1.StartJobRequest{
					RequestId: fmt.Sprintf("load-%d-%d", i, try), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "exit 5"},
				})
				if client.Is(err, berthv1.Reason_REASON_TOO_MANY_JOBS) {
					fixture.Pause(probeInterval)
					continue
				}
				if err != nil {
					return err
				}
				acknowledged.Store(reply.GetJob().GetId(), true)
			}
		})
	}
	for range each {
		<-following
	}
	eventually(t, "jobs are started", func() error {
		started := 0
		acknowledged.Range(func(any, any) bool { started++; return true })
		if started < each {
			return fmt.Errorf("%d are", started)
		}
		return nil
	})
	begin := time.Now()
	w.Stop(t) // it exits with 0, in time
	t.Logf("it took %s to stop", time.Since(begin))
	callers.Wait()
	close(answers)
	for err := range answers {
		if status.Code(err) != codes.Unavailable {
			t.Errorf("a caller was told %v, want UNAVAILABLE", err)
		}
	}
	w.Start(t)
	w.run(t, sandbox, "touch go")
	for i, job := range jobs {
		w.wantExit(t, job, int32(i))
		w.wantOutput(t, job, "begun\n")
	}
	for i := range each {
		ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			RequestId: fmt.Sprintf("run-%d", i), SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: untilGo + "; exit 4"},
		})
		if err != nil || ran.GetJob().GetOutcome().GetExitCode() != 4 {
			t.Errorf("a command with a request id, asked for again, gave %v (%v)", ran.GetJob().GetOutcome(), err)
		}
	}
	n := 0
	acknowledged.Range(func(id, _ any) bool {
		w.wantExit(t, id.(string), 5)
		n++
		return true
	})
	t.Logf("%d jobs were acknowledged under the load", n)
	w.destroy(t, sandbox)
	w.quiet(t)
}

// frozen is how long the broker stands still: beyond every keepalive and patience between it, its guests
// and its clients.
const frozen = time.Minute

func TestAFrozenBrokerComesBackToEverything(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t)
	var jobs []string
	for i := range int32(8) {
		jobs = append(jobs, w.begin(t, sandbox, fmt.Sprintf("echo begun; sleep %d; exit %d", 10*i, i)))
	}
	attached := make(chan error, 1)
	go func() {
		ran, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{
			RequestId: "through", SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: "sleep 30; exit 4"},
		})
		if err == nil && ran.GetJob().GetOutcome().GetExitCode() != 4 {
			err = fmt.Errorf("it ended as %v", ran.GetJob().GetOutcome())
		}
		attached <- err
	}()
	eventually(t, "all of them run", func() error {
		list, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox})
		if err == nil && len(list.GetJobs()) <= len(jobs) {
			err = fmt.Errorf("%d do", len(list.GetJobs()))
		}
		return err
	})
	if err := syscall.Kill(w.Pid(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	fixture.Pause(frozen)
	if err := syscall.Kill(w.Pid(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "commands run again", func() error {
		_, err := w.Jobs().RunCommand(w.ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
		return err
	})
	if err := <-attached; err != nil {
		t.Errorf("a command with a request id: %v", err)
	}
	for i, job := range jobs {
		w.wantExit(t, job, int32(i))
		w.wantOutput(t, job, "begun\n")
	}
	if got := w.state(t, sandbox); got != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("the sandbox is %s", got)
	}
	w.destroy(t, sandbox)
	w.quiet(t)
}
