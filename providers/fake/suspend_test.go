package fake

import (
	"errors"
	"testing"

	"github.com/berth-sandbox/berth/providers"
)

func TestAMachineThatIsSuspendedByStoppingItIsBootedAgain(t *testing.T) {
	p, dir := open(t)
	const id = "m_a"
	machine := providers.Machine{ID: id}
	_, err := p.Create(t.Context(), spec(dir, id))
	must(t, err)
	must(t, p.Harness().Script(Fault{Call: CallSuspend, Kind: Kill, Times: 1}))
	must(t, p.Suspend(t.Context(), machine))
	wantState(t, p, id, providers.MachineStopped)
	for name, call := range map[string]error{"suspend": p.Suspend(t.Context(), machine), "resume": p.Resume(t.Context(), machine)} {
		if !errors.Is(call, providers.ErrRefused) {
			t.Errorf("%s of a stopped machine: %v", name, call)
		}
	}
	_, err = p.Create(t.Context(), spec(dir, id))
	must(t, err)
	wantState(t, p, id, providers.MachineRunning)
	wantBoots(t, p, id, 2)
	for name, call := range map[string]error{
		"suspend": p.Suspend(t.Context(), providers.Machine{ID: "m_b"}), "resume": p.Resume(t.Context(), providers.Machine{ID: "m_b"}),
	} {
		if !errors.Is(call, providers.ErrNotFound) {
			t.Errorf("%s of no machine: %v", name, call)
		}
	}
}

func TestSuspendMeetsItsFaults(t *testing.T) {
	p, dir := open(t)
	const id = "m_a"
	_, err := p.Create(t.Context(), spec(dir, id))
	must(t, err)
	must(t, p.Harness().Script(Fault{Call: CallSuspend, Kind: LoseReply, Times: 1}, Fault{Call: CallResume, Kind: Refuse, Times: 1}))
	if err := p.Suspend(t.Context(), providers.Machine{ID: id}); !errors.Is(err, providers.ErrAmbiguous) {
		t.Errorf("the error is %v", err)
	}
	wantState(t, p, id, providers.MachineSuspended)
	if err := p.Resume(t.Context(), providers.Machine{ID: id}); !errors.Is(err, providers.ErrRefused) {
		t.Errorf("the error is %v", err)
	}
	wantState(t, p, id, providers.MachineSuspended)
	must(t, p.Resume(t.Context(), providers.Machine{ID: id}))
	wantState(t, p, id, providers.MachineRunning)
}
