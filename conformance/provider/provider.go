// Package provider is the contract of a provider as a test suite: whatever boots machines for the broker
// runs Suite, and keeps tests of its own only for what is specific to it. The suite is a black box over
// providers.Provider. It does not know which provider it tests, and what it does behind a provider's back,
// such as killing a guest, is done by functions that the provider's test hands to it.
//
//	func TestTheContract(t *testing.T) { provider.Suite(t, newPlace) }
package provider

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/berth-sandbox/berth/providers"
)

const (
	// waitTimeout is for what must happen, on the busiest of hosts. Nothing is concluded from its length.
	waitTimeout  = 90 * time.Second
	pollInterval = 10 * time.Millisecond
)

// The brokers on a place.
const (
	BrokerID      = "broker"
	OtherBrokerID = "other"
)

// Factory makes a place for one test.
type Factory func(t *testing.T) *Place

// Place is where one test's machines lie: a directory, an engine. It ends with the test.
type Place struct {
	// Open makes a provider, as each start of that broker does. It is closed when the test ends.
	Open func(t testing.TB, brokerID string) providers.Provider
	// BrokerID is the broker that most machines are made for. Default: BrokerID.
	BrokerID string
	// Image is what machines are made from; empty: the provider's default.
	Image string
	// Sockets is a directory with a short name, for the machines' socket directories.
	Sockets string
	// KillGuest kills a machine's guest behind the provider's back. It need not wait for the death.
	KillGuest func(t testing.TB, id string)
	// Traces names everything that is there of a machine: processes, files, containers, volumes.
	Traces func(t testing.TB, id string) []string
	// Obstacles are what can be in the way of a boot. They do nothing but that, and deterministically.
	Obstacles []Obstacle
	// Failpoints are where a broker can be made to die, and Crash makes one of BrokerID die at one of them
	// while it creates or destroys a machine. It reports false when the call ended without coming there.
	Failpoints []string
	Crash      func(t testing.TB, call Call, spec providers.MachineSpec, failpoint string) bool
	// Slow is a place whose machines take seconds to boot: but for `make night`, what comes after a crash is
	// either a create or a destroy there, not one and then the other.
	Slow bool
}

// Call is what a broker that is to crash does.
type Call string

// The calls.
const (
	Create  Call = "create"
	Destroy Call = "destroy"
)

// Obstacle is in the way of a boot.
type Obstacle struct {
	Name string
	// Put puts it in the way of a machine that is absent or stopped. It may do nothing where it can't be in
	// the way of such a machine.
	Put func(t testing.TB, spec providers.MachineSpec) (remove func())
}

// Suite checks that a provider keeps the contract.
func Suite(t *testing.T, factory Factory) {
	for _, test := range []struct {
		name string
		run  func(h *harness)
	}{
		{"what it declares is implemented, and only that", (*harness).capabilities},
		{"what it does not declare is refused and leaves nothing", (*harness).undeclared},
		{"what cannot be a machine is refused and leaves nothing", (*harness).invalidSpecs},
		{"a machine that is not there", (*harness).absent},
		{"a machine lives from create to destroy", (*harness).life},
		{"a machine that is created again is the same", (*harness).createAgain},
		{"a machine survives its broker", (*harness).reattach},
		{"a machine whose guest died boots again on its own disk", (*harness).bootAgain},
		{"a stopped machine is destroyed", (*harness).destroyStopped},
		{"a destroy takes every process", (*harness).destroyProcesses},
		{"a suspended machine goes on where it was", (*harness).suspend},
		{"a suspended machine is destroyed", (*harness).destroySuspended},
		{"a suspended machine is created again", (*harness).createSuspended},
		{"a suspended machine whose guest died is stopped", (*harness).suspendedDeath},
		{"a guest is dialled often and at the same time", (*harness).dial},
		{"a guest that is dead is not reached, and the dial ends with its context", (*harness).dialDead},
		{"two brokers on one host leave each other's machines alone", (*harness).twoBrokers},
		{"every call ends with its context", (*harness).cancelled},
		{"concurrent calls on the same machines leave nothing", (*harness).concurrent},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(newHarness(t, factory(t))) })
	}
	for _, o := range factory(t).Obstacles {
		t.Run("an obstacle to a boot: "+o.Name, func(t *testing.T) { obstacle(t, factory, o.Name) })
	}
	crashes(t, factory)
}

// harness is one test's place with a provider on it.
type harness struct {
	*Place
	*testing.T
	provider providers.Provider
	info     providers.Info
}

func newHarness(t *testing.T, place *Place) *harness {
	t.Helper()
	if place.BrokerID == "" {
		place.BrokerID = BrokerID
	}
	h := &harness{Place: place, T: t, provider: place.Open(t, place.BrokerID)}
	info, err := h.provider.Info(t.Context())
	if err != nil {
		t.Fatalf("Info: %v", err)
	}
	h.info = info
	return h
}

func (h *harness) able(c providers.Capability) bool { return slices.Contains(h.info.Capabilities, c) }

// machine is a machine of a test.
type machine struct {
	*harness
	spec providers.MachineSpec
}

// NewID is an id for a machine.
func NewID() string { return "m_" + ulid.Make().String() }

// machine names a machine, which is destroyed when the test ends.
func (h *harness) machine() *machine {
	id := NewID()
	m := &machine{harness: h, spec: providers.MachineSpec{
		MachineID: id, BrokerID: h.BrokerID, Generation: 1, Image: h.Image, ListenDir: filepath.Join(h.Sockets, id),
		Token: bytes.Repeat([]byte("t"), 32),
	}}
	h.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
		defer cancel()
		if err := h.Open(h, h.BrokerID).Destroy(ctx, m.found()); err != nil {
			h.Errorf("Destroy at the end: %v", err)
		}
	})
	return m
}

// created is a machine that runs.
func (h *harness) created() *machine {
	h.Helper()
	m := h.machine()
	m.create(h.provider)
	return m
}

// stopped is a machine that ran, wrote "kept" into the file of that name, and whose guest was killed.
func (h *harness) stopped() *machine {
	h.Helper()
	m := h.created()
	g := m.connect(h.provider)
	g.shell("echo kept >kept")
	g.Close()
	m.killGuest()
	m.spec.Generation = 2
	return m
}

func (m *machine) found() providers.Machine {
	return providers.Machine{ID: m.spec.MachineID, ListenDir: m.spec.ListenDir}
}

func (m *machine) create(p providers.Provider) {
	m.Helper()
	if _, err := p.Create(m.Context(), m.spec); err != nil {
		m.Fatalf("Create: %v", err)
	}
}

// killGuest kills the guest and waits until the machine is found stopped.
func (m *machine) killGuest() {
	m.Helper()
	m.KillGuest(m, m.spec.MachineID)
	m.await("the machine is stopped", func() bool { return m.state(m.provider) == providers.MachineStopped })
}

func (m *machine) state(p providers.Provider) providers.MachineState {
	m.Helper()
	found, err := p.Inspect(m.Context(), m.spec.MachineID)
	if err != nil {
		m.Fatalf("Inspect: %v", err)
	}
	if found.ID != m.spec.MachineID {
		m.Fatalf("Inspect found %q", found.ID)
	}
	return found.State
}

func (m *machine) wantState(want providers.MachineState) {
	m.Helper()
	if got := m.state(m.provider); got != want {
		m.Fatalf("the machine is %s, want %s", got, want)
	}
}

// listed returns the machine as List has it.
func (m *machine) listed(p providers.Provider) (found providers.Machine, ok bool) {
	m.Helper()
	machines, err := p.List(m.Context())
	if err != nil {
		m.Fatalf("List: %v", err)
	}
	for _, listed := range machines {
		if listed.ID != m.spec.MachineID {
			continue
		}
		if ok {
			m.Errorf("it is listed twice: %+v", machines)
		}
		found, ok = listed, true
	}
	return found, ok
}

// wantAbsent fails unless the provider knows nothing of the machine and nothing is there of it.
func (m *machine) wantAbsent() {
	m.Helper()
	if found, err := m.provider.Inspect(m.Context(), m.spec.MachineID); !errors.Is(err, providers.ErrNotFound) {
		m.Errorf("Inspect: %+v, %v, want ErrNotFound", found, err)
	}
	if found, ok := m.listed(m.provider); ok {
		m.Errorf("it is listed: %+v", found)
	}
	if left := m.Traces(m, m.spec.MachineID); len(left) > 0 {
		m.Errorf("left behind:\n%s", strings.Join(left, "\n"))
	}
}

func (m *machine) destroy() {
	m.Helper()
	if err := m.provider.Destroy(m.Context(), m.found()); err != nil {
		m.Fatalf("Destroy: %v", err)
	}
	m.wantAbsent()
}

// works fails unless the machine runs and its guest runs commands; where it was booted before, its disk
// must have been kept.
func (m *machine) works(p providers.Provider) (bootID string) {
	m.Helper()
	m.wantState(providers.MachineRunning)
	g := m.connect(p)
	defer g.Close()
	if got := g.Hello.GetGeneration(); got != m.spec.Generation {
		m.Errorf("its guest is in generation %d, want %d", got, m.spec.Generation)
	}
	want := "no file\n"
	if m.spec.Generation > 1 {
		want = "kept\n"
	}
	if got := g.shell("cat kept 2>/dev/null || echo no file"); got != want {
		m.Errorf("the disk holds %q, want %q", got, want)
	}
	return g.Hello.GetBootId()
}

// await waits until something is so.
func (h *harness) await(what string, is func() bool) {
	h.Helper()
	deadline := time.NewTimer(waitTimeout)
	defer deadline.Stop()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for !is() {
		select {
		case <-ticker.C:
		case <-deadline.C:
			h.Fatalf("not so after %s: %s", waitTimeout, what)
		}
	}
}

// each calls fn for each machine at the same time and fails for what it returns.
func each(h *harness, count int, fn func(i int) error) {
	h.Helper()
	var all sync.WaitGroup
	for i := range count {
		all.Go(func() {
			if err := fn(i); err != nil {
				h.Error(err)
			}
		})
	}
	all.Wait()
}
