package hostfaults

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// trimSoon is beyond the period in which the broker looks for what was kept long enough.
const trimSoon = 11 * time.Minute

// beyondTheTest is a timeout that no test here lasts for, and shorter than what the clock is stepped by.
const beyondTheTest = 50 * time.Minute

// TestAStepOfTheWallClockLosesAndEndsNothing steps the clock of the broker and of the guest, as a step of
// the host's does, forward and back by an hour, and lets the broker's trimming come by. What is promised:
// what lasts seconds to minutes (timeouts of jobs, waits, graces, backoffs) is counted by the monotonic
// clock, or bounded; a request id is remembered for 24 hours also through an hour's step; receipts are kept
// by the wall clock, so that a step forward takes as much from their retention, and no more.
func TestAStepOfTheWallClockLosesAndEndsNothing(t *testing.T) {
	for name, by := range map[string]time.Duration{"forward": time.Hour, "back": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, "--retention", "2h")
			sandbox := w.create(t)
			finished := w.begin(t, sandbox, "echo whole; exit 3")
			w.wantExit(t, finished, 3)
			running := w.timed(t, "running", sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 5", beyondTheTest)
			begun := time.Now()
			short := w.timed(t, "short", sandbox, "sleep 1000", 6*time.Second)

			daemon := clockOf(t, w.Pid())
			var clocks []*clock
			for pid := range w.Processes() {
				clocks = append(clocks, clockOf(t, pid))
			}
			if len(clocks) == 0 {
				t.Fatal("no guest runs")
			}
			for _, c := range append(clocks, daemon) {
				c.step(t, by, 0)
			}

			// The order of what is made from now on, and the clock that is shown.
			later := w.begin(t, sandbox, "exit 6")
			w.wantExit(t, later, 6)
			if later <= running {
				t.Errorf("job %s was made after %s, and sorts before it", later, running)
			}
			list, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox})
			if err != nil || len(list.GetJobs()) == 0 || list.GetJobs()[0].GetId() != later {
				t.Errorf("the newest job is not listed first (%v)", err)
			}
			if shown := list.GetJobs()[0].GetCreateTime().AsTime().Sub(begun); (shown - by).Abs() > by.Abs()/2 {
				t.Errorf("the broker's clock was stepped by %s, and shows %s", by, shown)
			}
			// A repeated request finds its job, and is not made again.
			if again := w.timed(t, "running", sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 5", beyondTheTest); again != running {
				t.Errorf("a repeated request made job %s beside %s", again, running)
			}
			// Waits last as long as they say.
			asked := time.Now()
			polled, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: running, Wait: durationpb.New(2 * time.Second)})
			if took := time.Since(asked); err != nil || took < 1500*time.Millisecond || took > by.Abs()/2 {
				t.Errorf("a wait of 2 s took %s (%v)", took, err)
			}
			if polled.GetJob().GetState() != berthv1.JobState_JOB_STATE_RUNNING {
				t.Errorf("the running job is %s", polled.GetJob().GetState())
			}
			// And so do timeouts.
			timedOut, err := w.WaitJob(w.ctx, short)
			if took := time.Since(begun); err != nil || timedOut.GetOutcome().GetCause() != berthv1.Cause_CAUSE_TIMED_OUT || took < 5*time.Second {
				t.Errorf("a job with a timeout of 6 s ended as %v after %s (%v)", timedOut.GetOutcome(), took, err)
			}

			// Nothing is trimmed that is promised to be there.
			daemon.step(t, by, trimSoon)
			fixture.Pause(3 * time.Second)
			w.wantExit(t, finished, 3)
			w.wantOutput(t, finished, "whole\n")
			if again := w.timed(t, "running", sandbox, "echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 5", beyondTheTest); again != running {
				t.Errorf("after a trim a repeated request made job %s beside %s", again, running)
			}
			another := w.create(t) // operations go on
			if got := w.state(t, sandbox); got != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
				t.Errorf("the sandbox is %s", got)
			}

			// The next broker starts by the host's clock: for it the time was stepped the other way.
			w.Kill(t)
			w.Start(t)
			w.run(t, sandbox, "touch go")
			w.wantExit(t, running, 5)
			w.wantOutput(t, running, "begun\n")
			w.wantExit(t, w.begin(t, sandbox, "exit 7"), 7)
			if again := w.timed(t, "short", sandbox, "sleep 1000", 6*time.Second); again != short {
				t.Errorf("after the restart a repeated request made job %s beside %s", again, short)
			}
			w.destroy(t, sandbox)
			w.destroy(t, another)
			w.quiet(t)
		})
	}
}

// timed starts a job with a timeout, under a request id.
func (w *harness) timed(t *testing.T, request, sandbox, shell string, timeout time.Duration) string {
	t.Helper()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{
		RequestId: request, SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: shell, Timeout: durationpb.New(timeout)},
	})
	if err != nil {
		t.Fatal(fmt.Errorf("start %q: %w", shell, err))
	}
	return reply.GetJob().GetId()
}

func TestABrokerThatIsRestartedOftenDropsWhatItKeptLongEnough(t *testing.T) {
	t.Parallel()
	w := start(t, "--retention", "1h")
	sandbox := w.create(t)
	finished := w.begin(t, sandbox, "echo whole; exit 3")
	w.wantExit(t, finished, 3)
	w.Kill(t)
	w.Start(t)
	// A guest that was not told to forget the job before the kill names it again, and would bring it back.
	w.run(t, sandbox, "true")
	eventually(t, "the guest is heard again", func() error {
		info, err := w.Admin().GetInfo(w.ctx, &berthv1.GetInfoRequest{})
		if err == nil && info.GetRecoveringMachines() > 0 {
			err = fmt.Errorf("%d are silent", info.GetRecoveringMachines())
		}
		return err
	})
	clockOf(t, w.Pid()).step(t, 2*time.Hour, 2*time.Minute)
	eventually(t, "the receipt is dropped", func() error {
		_, err := w.Jobs().PollJob(w.ctx, &berthv1.PollJobRequest{JobId: finished})
		if client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND) {
			return nil
		}
		if err == nil {
			err = errors.New("it is there")
		}
		return err
	})
	w.destroy(t, sandbox)
	w.quiet(t)
}
