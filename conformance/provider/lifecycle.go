package provider

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/providers"
)

func (h *harness) capabilities() {
	if h.info.Name == "" || !h.info.Healthy || h.info.Isolation < providers.IsolationNone {
		h.Errorf("Info: %+v", h.info)
	}
	_, suspends := h.provider.(providers.Suspender)
	_, cuts := h.provider.(providers.EgressCutter)
	_, snapshots := h.provider.(providers.Snapshotter)
	implemented := map[providers.Capability]bool{
		providers.CapSuspend: suspends, providers.CapEgressNone: cuts, providers.CapSnapshot: snapshots,
		providers.CapMemorySnapshot: false, providers.CapFork: false,
	}
	for _, c := range h.info.Capabilities {
		if c.Describe() == "" {
			h.Errorf("%s is no capability that the contract has", c)
		}
		if is, needsInterface := implemented[c]; needsInterface && !is {
			h.Errorf("%s is declared, and its interface is not implemented", c)
		}
	}
	if suspender, ok := h.provider.(providers.Suspender); ok && !h.able(providers.CapSuspend) {
		m := h.created()
		if err := suspender.Suspend(m.Context(), m.found()); !errors.Is(err, providers.ErrRefused) {
			m.Errorf("Suspend, which is not declared: %v, want ErrRefused", err)
		}
		m.works(m.provider)
	}
}

func (h *harness) undeclared() {
	for capability, ask := range map[providers.Capability]func(*providers.MachineSpec){
		providers.CapImage:           func(s *providers.MachineSpec) { s.Image = "image" },
		providers.CapWorkspacePath:   func(s *providers.MachineSpec) { s.Workspace = "/elsewhere" },
		providers.CapCPUs:            func(s *providers.MachineSpec) { s.Resources.CPUs = 1 },
		providers.CapMemory:          func(s *providers.MachineSpec) { s.Resources.MemoryBytes = 1 << 30 },
		providers.CapDisk:            func(s *providers.MachineSpec) { s.Resources.DiskBytes = 1 << 30 },
		providers.CapPIDs:            func(s *providers.MachineSpec) { s.Resources.PIDs = 100 },
		providers.CapEgressNone:      func(s *providers.MachineSpec) { s.Egress.Mode = providers.EgressNone },
		providers.CapEgressAllowList: func(s *providers.MachineSpec) { s.Egress.Mode = providers.EgressAllowList },
		providers.CapSnapshot:        func(s *providers.MachineSpec) { s.Image, s.FromSnapshot = "", "snap_1" },
	} {
		if !h.able(capability) {
			h.wantRefused("what "+string(capability)+" would allow", ask)
		}
	}
	h.wantRefused("an option that is none", func(s *providers.MachineSpec) { s.Options = map[string]string{"no_such_option": "x"} })
}

func (h *harness) invalidSpecs() {
	for name, change := range map[string]func(*providers.MachineSpec){
		"another broker's machine":    func(s *providers.MachineSpec) { s.BrokerID = OtherBrokerID },
		"no token":                    func(s *providers.MachineSpec) { s.Token = nil },
		"a relative socket directory": func(s *providers.MachineSpec) { s.ListenDir = "sockets" },
		"a socket path too long":      func(s *providers.MachineSpec) { s.ListenDir = "/tmp/" + strings.Repeat("x", 120) },
	} {
		h.wantRefused(name, change)
	}
	for _, id := range []string{"", ".", "m_/../x", "m_" + strings.Repeat("x", 300)} {
		m := h.machine()
		spec := m.spec
		spec.MachineID = id
		if _, err := m.provider.Create(m.Context(), spec); !errors.Is(err, providers.ErrRefused) {
			m.Errorf("Create of %q: %v, want ErrRefused", id, err)
		}
		if _, err := m.provider.Inspect(m.Context(), id); !errors.Is(err, providers.ErrNotFound) {
			m.Errorf("Inspect of %q: %v, want ErrNotFound", id, err)
		}
	}
}

func (h *harness) wantRefused(what string, change func(*providers.MachineSpec)) {
	h.Helper()
	m := h.machine()
	spec := m.spec
	change(&spec)
	if _, err := m.provider.Create(m.Context(), spec); !errors.Is(err, providers.ErrRefused) {
		m.Errorf("Create of %s: %v, want ErrRefused", what, err)
	}
	m.wantAbsent()
}

func (h *harness) absent() {
	m := h.machine()
	m.wantAbsent()
	for range 2 {
		m.destroy()
	}
	if _, err := m.provider.Dialer(m.Context(), m.found()); !errors.Is(err, providers.ErrNotFound) {
		m.Errorf("Dialer: %v, want ErrNotFound", err)
	}
	if suspender, ok := m.provider.(providers.Suspender); ok {
		for name, call := range map[string]func(context.Context, providers.Machine) error{"Suspend": suspender.Suspend, "Resume": suspender.Resume} {
			if err := call(m.Context(), m.found()); !errors.Is(err, providers.ErrNotFound) {
				m.Errorf("%s: %v, want ErrNotFound", name, err)
			}
		}
	}
}

func (h *harness) life() {
	m := h.machine()
	handle, err := m.provider.Create(m.Context(), m.spec)
	if err != nil {
		m.Fatalf("Create: %v", err)
	}
	if len(handle.Bytes) == 0 || handle.Version == 0 {
		m.Errorf("its handle is %+v", handle)
	}
	m.wantState(providers.MachineRunning)
	found, _ := m.listed(m.provider)
	if found.State != providers.MachineRunning || found.Created.IsZero() || found.Note != "" {
		m.Errorf("it is listed as %+v", found)
	}
	g := m.connect(m.provider)
	if got := g.Hello.GetMachineId(); got != m.spec.MachineID {
		m.Errorf("its guest says that it is in %q", got)
	}
	if got := g.Shell("echo out; echo err >&2; exit 3"); got.Out != "out\n" || got.Err != "err\n" || got.Code != 3 {
		m.Errorf("a command ended as %+v", got)
	}
	m.destroy()
	m.destroy()
	m.create(m.provider) // the same id, and nothing of what was
	m.works(m.provider)
	m.destroy()
}

func (h *harness) createAgain() {
	m := h.machine()
	each(h, 4, func(int) error {
		_, err := m.provider.Create(m.Context(), m.spec)
		return err
	})
	boot := m.works(m.provider)
	m.create(m.provider)
	if again := m.works(m.provider); again != boot {
		m.Error("a machine that ran was booted again")
	}
}

func (h *harness) reattach() {
	m := h.created()
	boot := m.works(m.provider)
	m.provider = m.Open(m, m.BrokerID)
	if found, ok := m.listed(m.provider); !ok || found.State != providers.MachineRunning {
		m.Errorf("the next broker lists it as %+v", found)
	}
	m.wantState(providers.MachineRunning)
	m.create(m.provider)
	if again := m.works(m.provider); again != boot {
		m.Error("a machine that ran was booted again")
	}
	m.provider = m.Open(m, m.BrokerID)
	m.destroy()
}

func (h *harness) bootAgain() {
	m := h.created()
	boot := m.connect(m.provider)
	boot.shell("echo kept >kept")
	process := m.start(boot, false)
	boot.Close()
	m.killGuest()
	if found, _ := m.listed(m.provider); found.State != providers.MachineStopped {
		m.Errorf("it is listed as %+v", found)
	}
	m.provider = m.Open(m, m.BrokerID)
	m.wantState(providers.MachineStopped)
	m.spec.Generation = 2
	for range 2 { // once is enough, twice is the same
		m.create(m.provider)
		if m.works(m.provider) == boot.Hello.GetBootId() {
			m.Error("it was not booted again")
		}
	}
	if left := process.running(m.connect(m.provider)); left != 0 {
		m.Errorf("%d processes of the generation before are running", left)
	}
	m.destroy()
}

func (h *harness) destroyStopped() {
	m := h.stopped()
	m.destroy()
}

func (h *harness) destroyProcesses() {
	m := h.created()
	process := m.start(m.connect(m.provider), true)
	m.destroy()
	other := h.created()
	if left := process.running(other.connect(other.provider)); left != 0 {
		m.Errorf("%d processes are left", left)
	}
}

// process is a command that can be told from all others by its argument.
type process string

// start starts processes in a machine, some of which try to stay, and waits until they run.
func (m *machine) start(g *Guest, stubborn bool) process {
	m.Helper()
	p := process(strconv.FormatInt(time.Now().UnixNano(), 10)) // seconds to sleep
	scripts := []string{"setsid sleep %s >/dev/null 2>&1 &"}
	if stubborn {
		scripts = append(scripts,
			"(setsid sh -c 'trap \"\" TERM HUP INT; sleep %s; true' >/dev/null 2>&1 &)",
			"setsid sh -c 'sleep %s & exit' >/dev/null 2>&1 </dev/null &")
		if m.info.Isolation != providers.IsolationNone {
			scripts = append(scripts, "env -i setsid sleep %s >/dev/null 2>&1 &")
		}
	}
	for _, script := range scripts {
		g.shell(fmt.Sprintf(script, string(p)))
	}
	m.await("the processes run", func() bool { return p.running(g) >= len(scripts) })
	return p
}

// running counts the processes that a machine sees.
func (p process) running(g *Guest) int {
	g.t.Helper()
	// An argument is a line here, and that of a script is longer.
	out := g.shell("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^" + string(p) + "$'")
	n, err := strconv.Atoi(strings.TrimSpace(out))
	if err != nil {
		g.t.Fatalf("counting processes: %v", err)
	}
	return n
}

// suspender is the provider as one, or nil where the capability is not declared.
func (m *machine) suspender() providers.Suspender {
	suspender, _ := m.provider.(providers.Suspender)
	return suspender
}

// suspended is a machine that was suspended; nil where machines can't be.
func (h *harness) suspended() (m *machine, boot string, processes process) {
	h.Helper()
	if !h.able(providers.CapSuspend) {
		return nil, "", ""
	}
	m = h.created()
	g := m.connect(m.provider)
	g.shell("echo kept >kept")
	processes = m.start(g, false)
	g.Close()
	for range 2 {
		if err := m.suspender().Suspend(m.Context(), m.found()); err != nil {
			m.Fatalf("Suspend: %v", err)
		}
		m.wantState(providers.MachineSuspended)
	}
	m.provider = m.Open(m, m.BrokerID)
	m.wantState(providers.MachineSuspended)
	if found, _ := m.listed(m.provider); found.State != providers.MachineSuspended {
		m.Errorf("it is listed as %+v", found)
	}
	return m, g.Hello.GetBootId(), processes
}

// wentOn fails unless a machine that was suspended goes on with its processes.
func (m *machine) wentOn(boot string, processes process) {
	m.Helper()
	m.wantState(providers.MachineRunning)
	g := m.connect(m.provider)
	if got := processes.running(g); g.Hello.GetBootId() != boot || got == 0 {
		m.Errorf("it was booted again, or lost processes: %d run", got)
	}
}

func (h *harness) suspend() {
	m, boot, processes := h.suspended()
	if m == nil {
		return
	}
	for range 2 {
		if err := m.suspender().Resume(m.Context(), m.found()); err != nil {
			m.Fatalf("Resume: %v", err)
		}
		m.wentOn(boot, processes)
	}
	m.destroy()
}

func (h *harness) destroySuspended() {
	if m, _, _ := h.suspended(); m != nil {
		m.destroy()
	}
}

func (h *harness) createSuspended() {
	m, boot, processes := h.suspended()
	if m == nil {
		return
	}
	m.create(m.provider)
	m.wentOn(boot, processes)
	m.destroy()
}

func (h *harness) suspendedDeath() {
	m, _, processes := h.suspended()
	if m == nil {
		return
	}
	m.killGuest()
	if found, _ := m.listed(m.provider); found.State != providers.MachineStopped {
		m.Errorf("it is listed as %+v", found)
	}
	for name, call := range map[string]func(context.Context, providers.Machine) error{"Suspend": m.suspender().Suspend, "Resume": m.suspender().Resume} {
		if err := call(m.Context(), m.found()); !errors.Is(err, providers.ErrRefused) {
			m.Errorf("%s of a stopped machine: %v, want ErrRefused", name, err)
		}
	}
	m.wantState(providers.MachineStopped)
	m.spec.Generation = 2
	m.create(m.provider)
	m.works(m.provider)
	if left := processes.running(m.connect(m.provider)); left != 0 {
		m.Errorf("%d processes of the generation before are running", left)
	}
	m.destroy()
}

func (h *harness) twoBrokers() {
	mine := h.created()
	boot := mine.works(mine.provider)
	theirs := mine.Open(h, OtherBrokerID)
	if found, err := theirs.Inspect(h.Context(), mine.spec.MachineID); !errors.Is(err, providers.ErrNotFound) {
		h.Errorf("the other broker's Inspect: %+v, %v, want ErrNotFound", found, err)
	}
	if _, err := theirs.Dialer(h.Context(), mine.found()); !errors.Is(err, providers.ErrNotFound) {
		h.Errorf("the other broker's Dialer: %v, want ErrNotFound", err)
	}
	if suspender, ok := theirs.(providers.Suspender); ok {
		if err := suspender.Suspend(h.Context(), mine.found()); !errors.Is(err, providers.ErrNotFound) {
			h.Errorf("the other broker's Suspend: %v, want ErrNotFound", err)
		}
	}
	spec := mine.spec
	spec.BrokerID = OtherBrokerID
	if _, err := theirs.Create(h.Context(), spec); !errors.Is(err, providers.ErrRefused) {
		h.Errorf("the other broker's Create under the same id: %v, want ErrRefused", err)
	}
	stranger := mine.found()
	stranger.ListenDir = "" // it knows nothing of the machine's sockets
	if err := theirs.Destroy(h.Context(), stranger); err != nil && !errors.Is(err, providers.ErrRefused) {
		h.Errorf("the other broker's Destroy: %v, want ErrRefused or nothing done", err)
	}
	if again := mine.works(mine.provider); again != boot {
		h.Error("the other broker ended it")
	}

	others := &machine{harness: h, spec: spec}
	others.spec.MachineID = NewID()
	others.spec.ListenDir = filepath.Join(h.Sockets, others.spec.MachineID)
	h.Cleanup(func() {
		if err := theirs.Destroy(context.Background(), others.found()); err != nil {
			h.Error(err)
		}
	})
	others.create(theirs)
	if _, ok := others.listed(theirs); !ok {
		h.Error("the other broker does not list its machine")
	}
	if found, ok := others.listed(mine.provider); ok {
		h.Errorf("another broker's machine is listed: %+v", found)
	}
	mine.destroy()
	if found, err := theirs.Inspect(h.Context(), others.spec.MachineID); err != nil || found.State != providers.MachineRunning {
		h.Errorf("the other broker's machine is %+v, %v", found, err)
	}
}

func (h *harness) cancelled() {
	ctx, cancel := context.WithCancel(h.Context())
	cancel()
	running, none := h.created(), h.machine()
	calls := map[string]func(*machine) error{
		"Create":  func(m *machine) error { _, err := m.provider.Create(ctx, m.spec); return err },
		"Inspect": func(m *machine) error { _, err := m.provider.Inspect(ctx, m.spec.MachineID); return err },
		"List":    func(m *machine) error { _, err := m.provider.List(ctx); return err },
		"Destroy": func(m *machine) error { return m.provider.Destroy(ctx, m.found()) },
		"Dialer":  func(m *machine) error { _, err := m.provider.Dialer(ctx, m.found()); return err },
	}
	if h.able(providers.CapSuspend) {
		calls["Suspend"] = func(m *machine) error { return m.suspender().Suspend(ctx, m.found()) }
	}
	for name, call := range calls {
		for _, m := range []*machine{running, none} {
			if err := call(m); !errors.Is(err, context.Canceled) {
				h.Errorf("%s: %v, want context.Canceled", name, err)
			}
		}
	}
	none.wantAbsent()
	running.works(running.provider)
}

func (h *harness) concurrent() {
	machines := []*machine{h.machine(), h.machine()}
	each(h, 6, func(worker int) error {
		for round := range 4 {
			m := machines[(worker+round)%len(machines)]
			var err error
			switch (worker + round/2) % 3 {
			case 0:
				_, err = m.provider.Create(m.Context(), m.spec)
			case 1:
				err = m.provider.Destroy(m.Context(), m.found())
			default:
				if _, err = m.provider.Inspect(m.Context(), m.spec.MachineID); errors.Is(err, providers.ErrNotFound) {
					err = nil
				}
			}
			if err == nil {
				_, err = m.provider.List(m.Context())
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	for _, m := range machines {
		m.destroy()
	}
}
