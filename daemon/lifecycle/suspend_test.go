package lifecycle

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/fake"
)

const suspended = berthv1.SandboxState_SANDBOX_STATE_SUSPENDED

// impatient is a harness that waits a short time only for its provider.
func impatient(t *testing.T) *harness {
	t.Helper()
	w := newHarness(t)
	w.stop()
	w.providerTimeout = 1500 * time.Millisecond
	w.start()
	return w
}

func TestACallThatIsMadeAgainIsAnsweredAlsoWhenTheSandboxHasGoneOn(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.created()
	suspend := func() (*recordv1.SandboxRecord, error) {
		return w.Suspend(w.ctx, call("suspend", "s"), sandbox.GetId())
	}
	resume := func() (*recordv1.SandboxRecord, error) {
		return w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
	}
	for _, made := range []struct {
		call func() (*recordv1.SandboxRecord, error)
		want berthv1.SandboxState
	}{{suspend, suspended}, {resume, running}, {suspend, running}, {resume, running}} {
		got, err := made.call()
		must(t, err)
		if got.GetState() != made.want {
			t.Errorf("it is %s, want %s", got.GetState(), made.want)
		}
	}
	_, err := w.Suspend(w.ctx, call("suspend", "s2"), sandbox.GetId())
	must(t, err)
	if got, err := resume(); err != nil || got.GetState() != suspended {
		t.Errorf("the resume of before: %v (%v)", got.GetState(), err)
	}
}

func TestASuspendMeetsFaults(t *testing.T) {
	for _, test := range []struct {
		kind   fake.Kind
		reason fault.Reason // of the call's error; empty: it succeeds
		state  berthv1.SandboxState
		boots  int // once it was resumed
	}{
		{fake.Late, "", suspended, 1},
		{fake.Fail, "", suspended, 1},
		{fake.Unavailable, "", suspended, 1},
		{fake.LoseReply, "", suspended, 1},
		{fake.Hang, "", suspended, 1},
		{fake.HangAfter, "", suspended, 1},
		{fake.Kill, "", suspended, 2},
		{fake.Refuse, fault.ProviderRefused, running, 1},
		{fake.Vanish, fault.MachineGone, stopped, 0},
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			t.Parallel()
			w := impatient(t)
			sandbox := w.created()
			w.script(fake.Fault{Call: fake.CallSuspend, Kind: test.kind, Times: 1, DelayMillis: 50})
			_, err := w.Suspend(w.ctx, call("suspend", "s"), sandbox.GetId())
			if test.reason == "" {
				must(t, err)
			} else if !fault.Is(err, test.reason) {
				t.Errorf("the error is %v, want %s", err, test.reason)
			}
			w.wantState(test.state)
			if w.operation() != nil {
				t.Errorf("operation %v is left", w.operation())
			}
			if test.boots == 0 {
				return
			}
			again, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
			must(t, err)
			w.wantState(running)
			w.wantBoots(test.boots)
			if again.GetGeneration() != uint64(test.boots) {
				t.Errorf("it is in generation %d, want %d", again.GetGeneration(), test.boots)
			}
		})
	}
}

func TestAResumeOfASuspendedMachineMeetsFaults(t *testing.T) {
	for _, test := range []struct {
		kind   fake.Kind
		reason fault.Reason
		state  berthv1.SandboxState
		boots  int
	}{
		{fake.Late, "", running, 1},
		{fake.Fail, "", running, 1},
		{fake.Unavailable, "", running, 1},
		{fake.LoseReply, "", running, 1},
		{fake.Hang, "", running, 1},
		{fake.HangAfter, "", running, 1},
		{fake.Kill, "", running, 2},
		{fake.Refuse, fault.ProviderRefused, suspended, 1},
		{fake.Vanish, fault.MachineGone, stopped, 0},
	} {
		t.Run(string(test.kind), func(t *testing.T) {
			t.Parallel()
			w := impatient(t)
			sandbox := w.created()
			_, err := w.Suspend(w.ctx, call("suspend", "s"), sandbox.GetId())
			must(t, err)
			w.script(fake.Fault{Call: fake.CallResume, Kind: test.kind, Times: 1, DelayMillis: 50})
			_, err = w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
			if test.reason == "" {
				must(t, err)
			} else if !fault.Is(err, test.reason) {
				t.Errorf("the error is %v, want %s", err, test.reason)
			}
			w.wantState(test.state)
			if test.boots > 0 {
				w.wantBoots(test.boots)
			}
		})
	}
}

func TestAResumeTakesNoMachineForRunningThatNobodyAnswersFor(t *testing.T) {
	away := fake.Fault{Call: fake.CallInspect, Kind: fake.Unavailable}
	for name, test := range map[string]struct {
		killed bool
		faults []fake.Fault
		reason fault.Reason
	}{
		"it runs":                                       {false, nil, ""},
		"it runs, and its provider is away":             {false, []fake.Fault{away}, ""},
		"it died, and its provider is away":             {true, []fake.Fault{away}, fault.ProviderUnavailable},
		"it died, and nobody has written that down yet": {true, nil, fault.GuestUnreachable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.created()
			if test.killed {
				must(t, w.fake.Harness().Kill(w.ctx, sandbox.GetMachineId()))
				w.wait("the link is down", func() bool { return w.links.Hello(sandbox.GetMachineId()) == nil })
			}
			w.script(test.faults...)
			for range 2 { // the same request, which must not have been remembered as done
				_, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
				if test.reason == "" {
					must(t, err)
				} else if !fault.Is(err, test.reason) {
					t.Errorf("the error is %v, want %s", err, test.reason)
				}
			}
			if !test.killed {
				return
			}
			w.script()
			w.markStopped()
			_, err := w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
			must(t, err)
			w.wantState(running)
		})
	}
}

func TestASuspendGoesOnAfterACrash(t *testing.T) {
	for _, kind := range []fake.Kind{fake.Hang, fake.HangAfter} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.created()
			w.script(fake.Fault{Call: fake.CallSuspend, Kind: kind})
			first := make(chan error, 1)
			go func() {
				_, err := w.Suspend(w.ctx, call("suspend", "s"), sandbox.GetId())
				first <- err
			}()
			w.wait("the suspend to be begun", func() bool { return w.calls(fake.CallSuspend) > 0 })
			w.stop()
			if err := <-first; err == nil {
				t.Error("a suspend was answered although it had not been done")
			}
			w.script()
			w.start()
			must(t, w.ResumeOperations())
			_, err := w.Suspend(w.ctx, call("suspend", "s"), sandbox.GetId())
			must(t, err)
			w.wantState(suspended)
			_, err = w.Resume(w.ctx, call("resume", "r"), sandbox.GetId())
			must(t, err)
			w.wantState(running)
			w.wantBoots(1)
		})
	}
}
