package guest

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (m *machine) quiesce() {
	m.t.Helper()
	_, err := m.calls.Quiesce(m.t.Context(), &guestv1.QuiesceRequest{Reason: "test"})
	must(m.t, err)
}

func (m *machine) resumed(change ...func(*guestv1.ResumedRequest)) {
	m.t.Helper()
	r := &guestv1.ResumedRequest{Generation: m.config.GetGeneration(), Time: timestamppb.Now(), Entropy: make([]byte, 32)}
	for _, c := range change {
		c(r)
	}
	response, err := m.calls.Resumed(m.t.Context(), r)
	must(m.t, err)
	if response.GetClockStepped() {
		m.t.Error("the clock was stepped")
	}
}

func sleeper(limit, killGrace time.Duration) *guestv1.StartRequest {
	r := argv("sleep", "60")
	r.Command.Timeout, r.Command.KillGrace = durationpb.New(limit), durationpb.New(killGrace)
	r.Durable = true
	return r
}

// tookAtLeast fails unless a job ended by a cause after a time.
func tookAtLeast(t *testing.T, s *guestv1.Status, cause berthv1.Cause, want time.Duration) {
	t.Helper()
	took := s.GetEndTime().AsTime().Sub(s.GetStartTime().AsTime())
	if s.GetOutcome().GetCause() != cause || took < want-50*time.Millisecond {
		t.Errorf("it ended after %v by %v, want %v after %v", took, s.GetOutcome(), cause, want)
	}
}

func TestAQuiescedGuestCountsNoTimeForItsJobs(t *testing.T) {
	t.Parallel()
	const paused = 3 * time.Second
	m := boot(t)
	if !slices.Contains(m.hello.GetCapabilities(), "quiesce") {
		t.Error("Hello does not say so")
	}
	m.quiesce()
	timed := sleeper(500*time.Millisecond, time.Second)
	m.begin(timed)
	stubborn := shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
	stubborn.Command.KillGrace = durationpb.New(500 * time.Millisecond)
	m.begin(stubborn)
	abandoned := argv("sleep", "60")
	abandoned.KillOnDisconnect, abandoned.DisconnectGrace = true, durationpb.New(500*time.Millisecond)
	m.begin(abandoned)
	eventually(t, "the stubborn job is ready", func() bool {
		r, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: stubborn.GetJobId(), Stream: berthv1.Stream_STREAM_STDOUT, MaxBytes: 10})
		return err == nil && string(r.GetData()) == "ready\n"
	})
	stopped := make(chan error, 1)
	ctx := t.Context()
	stopBegan := time.Now()
	go func() {
		_, err := m.calls.Stop(ctx, &guestv1.StopRequest{JobId: stubborn.GetJobId()})
		stopped <- err
	}()
	m.quiesce()
	time.Sleep(paused) // they have that long to end by mistake
	for _, id := range []string{timed.GetJobId(), stubborn.GetJobId(), abandoned.GetJobId()} {
		r, err := m.calls.Wait(t.Context(), &guestv1.WaitRequest{JobId: id})
		must(t, err)
		if r.GetStatus().GetDone() {
			t.Errorf("job %s ended meanwhile: %v", id, r.GetStatus().GetOutcome())
		}
	}
	m.resumed()
	m.resumed()
	tookAtLeast(t, m.wait(timed.GetJobId()), berthv1.Cause_CAUSE_TIMED_OUT, 500*time.Millisecond+paused)
	tookAtLeast(t, m.wait(abandoned.GetJobId()), berthv1.Cause_CAUSE_STOPPED, 500*time.Millisecond+paused)
	must(t, <-stopped)
	if took := time.Since(stopBegan); took < 500*time.Millisecond+paused-50*time.Millisecond {
		t.Errorf("the kill came after %v", took)
	}
	if got := m.wait(stubborn.GetJobId()).GetOutcome().GetWaitStatus().GetSignal(); got != 9 {
		t.Errorf("the stubborn job ended by signal %d", got)
	}
}

func TestAGuestThatNobodyWakesCountsOnByItself(t *testing.T) {
	t.Parallel()
	m := bootAs(t, manner{quiesce: time.Second})
	m.quiesce()
	job := sleeper(500*time.Millisecond, time.Second)
	m.begin(job) // while time stands still
	tookAtLeast(t, m.wait(job.GetJobId()), berthv1.Cause_CAUSE_TIMED_OUT, 1500*time.Millisecond)
	again := sleeper(500*time.Millisecond, time.Second)
	m.begin(again)
	tookAtLeast(t, m.wait(again.GetJobId()), berthv1.Cause_CAUSE_TIMED_OUT, 500*time.Millisecond)
}

func TestAQuiescedGuestEndsItsJobsWithGrace(t *testing.T) {
	t.Parallel()
	m := boot(t)
	m.begin(sleeper(time.Minute, time.Second))
	m.begin(shell("trap '' TERM; while :; do sleep 0.1; done"))
	m.quiesce()
	m.end()
}

func TestInTheSameGenerationNothingIsLost(t *testing.T) {
	t.Parallel()
	m := boot(t)
	r := shell("echo said; sleep 60")
	r.Durable = true
	m.begin(r)
	m.quiesce()
	m.resumed()
	m.resumed(func(r *guestv1.ResumedRequest) { r.Generation = 0 })
	response, err := m.calls.Read(t.Context(), &guestv1.ReadRequest{JobId: r.GetJobId(), Stream: berthv1.Stream_STREAM_STDOUT, MaxBytes: 10, Wait: durationpb.New(5 * time.Second)})
	must(t, err)
	if string(response.GetData()) != "said\n" {
		t.Errorf("it said %q", response.GetData())
	}
}

func TestAnotherGenerationHasNoJobOfTheOneBefore(t *testing.T) {
	t.Parallel()
	m := boot(t)
	const mark = "6174.6174"
	durable := shell("echo x; trap '' TERM; setsid sleep " + mark + " & sleep " + mark)
	durable.Durable = true
	m.begin(durable)
	quick := argv("true")
	m.run(quick)
	leaver := shell("setsid sleep " + mark + " >/dev/null 2>&1 &")
	m.run(leaver)
	_, err := m.calls.Forget(t.Context(), &guestv1.ForgetRequest{JobIds: []string{leaver.GetJobId()}})
	must(t, err)
	m.quiesce()
	before := m.config.GetMachineId()
	fork := func(r *guestv1.ResumedRequest) {
		r.Generation, r.MachineId, r.Token = 7, before+"FORK", bytes.Repeat([]byte("f"), 32)
	}
	m.resumed(fork)
	m.resumed(fork)
	if left := processesWith("sleep " + mark); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
	list, err := m.calls.List(t.Context(), &guestv1.ListRequest{})
	must(t, err)
	if len(list.GetStatuses()) > 0 {
		t.Errorf("there are jobs: %v", list.GetStatuses())
	}
	eventually(t, "the spool is empty", func() bool {
		entries, err := os.ReadDir(filepath.Join(m.config.GetSpoolDir(), "jobs"))
		return err == nil && len(entries) == 0
	})
	if _, err := m.calls.Start(t.Context(), durable); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a job of before begins again: %v", err)
	}
	stale := argv("true")
	stale.Generation = 3
	if _, err := m.calls.Start(t.Context(), stale); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a job for the generation before begins: %v", err)
	}
	fresh := shell("echo $BERTH_MACHINE_ID")
	fresh.Generation, fresh.Durable = 7, true
	response := m.run(fresh)
	if got := string(response.GetStdout().GetHead()); got != before+"FORK\n" || response.GetStatus().GetGeneration() != 7 {
		t.Errorf("it says %q in generation %d", got, response.GetStatus().GetGeneration())
	}
	// From now on it is the other machine, for who connects anew and after a restart as well.
	if _, err := m.calls.Hello(t.Context(), m.helloRequest(m.calls)); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("it still answers to its old name: %v", err)
	}
	m.config.MachineId, m.config.Token, m.config.Generation = before+"FORK", bytes.Repeat([]byte("f"), 32), 7
	hello, err := m.calls.Hello(t.Context(), m.helloRequest(m.calls))
	must(t, err)
	if hello.GetGeneration() != 7 {
		t.Errorf("it is in generation %d", hello.GetGeneration())
	}
	m.kill()
	m.start()
	if got := m.wait(fresh.GetJobId()).GetOutcome().GetCause(); got != berthv1.Cause_CAUSE_EXITED {
		t.Errorf("after a restart the job is %v", got)
	}
}

func TestATokenOfAnotherLengthIsRefused(t *testing.T) {
	t.Parallel()
	m := boot(t)
	_, err := m.calls.Resumed(t.Context(), &guestv1.ResumedRequest{Generation: 3, Token: []byte("short")})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v", err)
	}
}
