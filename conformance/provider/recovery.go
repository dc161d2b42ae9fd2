package provider

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/providers"
)

// obstacle has a boot meet an obstacle: the first of a machine, and that of a stopped one.
func obstacle(t *testing.T, factory Factory, name string) {
	ran, met := false, false
	for _, boot := range []struct {
		of   string
		make func(h *harness) *machine
	}{
		{"a new machine", (*harness).machine},
		{"a stopped machine", (*harness).stopped},
	} {
		t.Run(boot.of, func(t *testing.T) {
			ran = true
			h := newHarness(t, factory(t))
			m := boot.make(h)
			at := slices.IndexFunc(h.Obstacles, func(o Obstacle) bool { return o.Name == name })
			remove := h.Obstacles[at].Put(m, m.spec)
			_, err := m.provider.Create(m.Context(), m.spec)
			remove()
			if err != nil {
				met = true
				m.afterFailedBoot(err)
			}
			m.create(m.provider)
			m.works(m.provider)
			m.destroy()
		})
	}
	if ran && !met {
		t.Errorf("%s is in the way of no boot", name)
	}
}

// afterFailedBoot checks what a boot has left that failed: a stopped machine stays stopped, and of a new
// one nothing is left where the error says that nothing was made.
func (m *machine) afterFailedBoot(failure error) {
	m.Helper()
	var unavailable *providers.UnavailableError
	refused := errors.Is(failure, providers.ErrRefused) || errors.Is(failure, providers.ErrCapacity)
	may := []providers.MachineState{providers.MachineRunning}
	switch {
	case m.spec.Generation == 1 && refused:
		m.wantAbsent()
		return
	case m.spec.Generation == 1:
		may = append(may, providers.MachinePartial)
	default:
		may = append(may, providers.MachineStopped)
	}
	if refused || errors.As(failure, &unavailable) {
		may = may[1:] // nothing was booted
	}
	for range 2 { // also for the next broker
		found, err := m.provider.Inspect(m.Context(), m.spec.MachineID)
		if absent := errors.Is(err, providers.ErrNotFound); absent && m.spec.Generation == 1 {
			continue
		}
		if err != nil || !slices.Contains(may, found.State) {
			m.Fatalf("after %q the machine is %s (%v), want one of %v", failure, found.State, err, may)
		}
		if listed, ok := m.listed(m.provider); !ok || listed.State != found.State {
			m.Errorf("it is listed as %+v, and found %s", listed, found.State)
		}
		m.provider = m.Open(m, m.BrokerID)
	}
}

// crashes has a broker die at each failpoint that a call comes to.
func crashes(t *testing.T, factory Factory) {
	place := factory(t)
	for i, point := range place.Failpoints {
		ran, reached := false, false
		for _, c := range []struct {
			name string
			call Call
			make func(h *harness) *machine
			may  []providers.MachineState // and absent, but for a stopped one
		}{
			{"create", Create, (*harness).machine, []providers.MachineState{providers.MachinePartial, providers.MachineRunning}},
			{"boot of a stopped machine", Create, (*harness).stopped, []providers.MachineState{providers.MachineStopped, providers.MachineRunning}},
			{"destroy", Destroy, (*harness).created, []providers.MachineState{providers.MachinePartial, providers.MachineRunning, providers.MachineStopped}},
		} {
			comes := true
			for j, then := range []Call{Create, Destroy} {
				if c.call == Destroy && then == Create || !comes {
					continue // what is to be destroyed need not be made again
				}
				if c.call == Create && place.Slow && i%2 != j && !testenv.Night() {
					continue
				}
				t.Run(fmt.Sprintf("a crash at %s in a %s, and then a %s", point, c.name, then), func(t *testing.T) {
					h := newHarness(t, factory(t))
					m := c.make(h)
					ran = true
					if comes = h.Crash(t, c.call, m.spec, point); !comes {
						return
					}
					reached = true
					m.provider = h.Open(t, h.BrokerID)
					found, err := m.provider.Inspect(t.Context(), m.spec.MachineID)
					absent := errors.Is(err, providers.ErrNotFound) && m.spec.Generation == 1
					if !absent && (err != nil || !slices.Contains(c.may, found.State)) {
						t.Fatalf("the machine is %s (%v), want one of %v", found.State, err, c.may)
					}
					if listed, ok := m.listed(m.provider); ok == absent || !absent && listed.State != found.State {
						t.Errorf("it is listed as %+v, and found %s (%v)", listed, found.State, err)
					}
					if then == Create {
						m.create(m.provider)
						m.works(m.provider)
					}
					m.destroy()
				})
			}
		}
		if ran && !reached {
			t.Errorf("no call comes to %s", point)
		}
	}
}
