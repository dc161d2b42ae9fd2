package robust

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/providers/fake"
)

// Tuning, in milliseconds where nothing else is said.
const (
	shortestLife   = 5 // of the broker, from its start on
	longestLife    = 1500
	longestStop    = 700 // that the broker is stopped by a signal
	maxRestarts    = 5   // tries to start it; it may be killed again while it starts
	calmFor        = 4 * time.Second
	maxDelayMillis = 300 // that a provider's late answer takes, or what it does twice
)

// chaos kills the broker a number of times, and does other harm in between.
func (s *suite) chaos(ctx context.Context, kills int) {
	random := s.random(fmt.Sprintf("chaos of episode %d", s.episodes))
	for left := kills; left > 0 && ctx.Err() == nil && !s.t.Failed(); {
		// Lives of very different lengths: half of them end while the broker is still settling in.
		life := shortestLife + random.IntN(longestLife)
		if random.IntN(2) == 0 {
			life = shortestLife + random.IntN(longestLife/10)
		}
		fixture.Pause(time.Duration(life) * time.Millisecond / 2)
		s.harm(ctx, random)
		fixture.Pause(time.Duration(life) * time.Millisecond / 2)
		left -= s.kill(random, left)
	}
}

// harm does something other than killing the broker, or nothing.
func (s *suite) harm(ctx context.Context, random *rand.Rand) {
	switch random.IntN(8) {
	case 0, 1:
		s.killGuest(ctx, random)
	case 2:
		s.hold(random)
	case 3, 4, 5:
		if s.harness != nil {
			s.script(random)
		}
	case 6:
		if s.harness != nil {
			s.freeze(random)
		}
	}
}

// kill kills the broker as kill -9 does, and starts it again; sometimes it is stopped by a signal
// first, so that its callers hang, and sometimes it is killed once more while it starts. It returns how
// many kills that were, at most most.
func (s *suite) kill(random *rand.Rand, most int) (kills int) {
	e := Event{Kind: KindKill, Begin: s.history.Now()}
	if random.IntN(5) == 0 {
		_ = syscall.Kill(s.broker.Pid(), syscall.SIGSTOP)
		fixture.Pause(time.Duration(random.IntN(longestStop)) * time.Millisecond)
		e.Op = "while stopped"
	}
	s.broker.Kill(s.t)
	kills = 1
	if most > 1 && random.IntN(4) == 0 {
		s.killStarting(time.Duration(random.IntN(60)) * time.Millisecond)
		kills, e.Op = 2, "and while starting"
	}
	fixture.Pause(time.Duration(random.IntN(100)) * time.Millisecond)
	if err := s.broker.TryStart(); err != nil {
		s.problem("start", "the broker does not start after a kill: %v", err)
		s.t.Errorf("the broker does not start after a kill: %v\n%s", err, s.broker.Log())
	}
	s.history.Add(e)
	return kills
}

// killStarting starts the broker and kills it after a while, whether it is ready by then or not.
func (s *suite) killStarting(after time.Duration) {
	old := s.broker.Pid()
	started := make(chan struct{})
	go func() {
		defer close(started)
		_ = s.broker.TryStart() // ready or not, it is dead then
	}()
	for s.broker.Pid() == old {
		fixture.Pause(time.Millisecond)
	}
	fixture.Pause(after)
	s.broker.Kill(s.t)
	<-started
}

// hold stops the broker by a signal and lets it go on.
func (s *suite) hold(random *rand.Rand) {
	e := Event{Kind: KindPause, Begin: s.history.Now()}
	_ = syscall.Kill(s.broker.Pid(), syscall.SIGSTOP)
	fixture.Pause(time.Duration(random.IntN(longestStop)) * time.Millisecond)
	_ = syscall.Kill(s.broker.Pid(), syscall.SIGCONT)
	s.history.Add(e)
}

// victim draws a machine of the sandboxes that there are.
func (s *suite) victim(random *rand.Rand) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sandboxes) == 0 {
		return ""
	}
	return s.machines[s.sandboxes[random.IntN(len(s.sandboxes))]]
}

// killGuest kills a machine's guest, and with it all that runs in the machine.
func (s *suite) killGuest(ctx context.Context, random *rand.Rand) {
	machine := s.victim(random)
	if machine == "" {
		return
	}
	e := Event{Kind: KindDisturb, Op: "kill", Machine: machine, Begin: s.history.Now()}
	var err error
	switch {
	case s.harness != nil:
		err = s.harness.Kill(ctx, machine)
	case fixture.OnDocker():
		err = exec.CommandContext(ctx, "docker", "kill", containerOf(ctx, machine)).Run()
	default:
		if pid := s.guest(machine); pid != 0 {
			err = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if err != nil {
		e.Error = err.Error() // it is stopped or gone already
	}
	s.history.Add(e)
}

func containerOf(ctx context.Context, machine string) string {
	out, err := exec.CommandContext(ctx, "docker", "ps", "-q", "--filter", "label=dev.berth.machine="+machine).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// guest is the process of a machine's guest on this host; 0 when there is none.
func (s *suite) guest(machine string) int {
	for pid, command := range s.broker.Processes() {
		if strings.Contains(command, "/"+machine+"/") && strings.Contains(command, " init ") {
			return pid
		}
	}
	return 0
}

// freeze stops a machine's guest by a signal for a while.
func (s *suite) freeze(random *rand.Rand) {
	machine := s.victim(random)
	if machine == "" {
		return
	}
	e := Event{Kind: KindDisturb, Op: "freeze", Machine: machine, Begin: s.history.Now()}
	if err := s.harness.Freeze(machine); err != nil {
		e.Error = err.Error()
	}
	fixture.Pause(time.Duration(random.IntN(longestStop)) * time.Millisecond)
	if err := s.harness.Thaw(machine); err != nil {
		e.Error = err.Error()
	}
	s.history.Add(e)
}

// faults are what a provider's call may be made to do, beside what ends a machine.
var faults = []fake.Fault{
	{Call: fake.CallInfo, Kind: fake.Fail}, {Call: fake.CallInfo, Kind: fake.Hang}, {Call: fake.CallInfo, Kind: fake.Unavailable},
	{Call: fake.CallCreate, Kind: fake.Refuse}, {Call: fake.CallCreate, Kind: fake.Capacity}, {Call: fake.CallCreate, Kind: fake.Unavailable},
	{Call: fake.CallCreate, Kind: fake.Fail}, {Call: fake.CallCreate, Kind: fake.Hang}, {Call: fake.CallCreate, Kind: fake.LoseReply},
	{Call: fake.CallCreate, Kind: fake.HangAfter}, {Call: fake.CallCreate, Kind: fake.Late}, {Call: fake.CallCreate, Kind: fake.Twice},
	{Call: fake.CallCreate, Kind: fake.Kill}, {Call: fake.CallCreate, Kind: fake.Unresponsive},
	{Call: fake.CallInspect, Kind: fake.Fail}, {Call: fake.CallInspect, Kind: fake.Unavailable}, {Call: fake.CallInspect, Kind: fake.Hang},
	{Call: fake.CallInspect, Kind: fake.Late}, {Call: fake.CallInspect, Kind: fake.Vanish},
	{Call: fake.CallList, Kind: fake.Fail}, {Call: fake.CallList, Kind: fake.Stale}, {Call: fake.CallList, Kind: fake.Hang},
	{Call: fake.CallDestroy, Kind: fake.Fail}, {Call: fake.CallDestroy, Kind: fake.Refuse}, {Call: fake.CallDestroy, Kind: fake.Hang},
	{Call: fake.CallDestroy, Kind: fake.LoseReply}, {Call: fake.CallDestroy, Kind: fake.HangAfter}, {Call: fake.CallDestroy, Kind: fake.Late},
	{Call: fake.CallDestroy, Kind: fake.Twice}, {Call: fake.CallDestroy, Kind: fake.Unavailable},
	{Call: fake.CallDialer, Kind: fake.Fail}, {Call: fake.CallDialer, Kind: fake.Hang}, {Call: fake.CallDialer, Kind: fake.Late},
	{Call: fake.CallDialer, Kind: fake.LoseReply}, {Call: fake.CallDialer, Kind: fake.Kill}, {Call: fake.CallDialer, Kind: fake.Vanish},
}

// script gives the provider some faults in the place of those that it had.
func (s *suite) script(random *rand.Rand) {
	e := Event{Kind: KindFault, Begin: s.history.Now()}
	var chosen []fake.Fault
	for range 1 + random.IntN(3) {
		fault := faults[random.IntN(len(faults))]
		fault.Times, fault.DelayMillis = 1+random.IntN(2), int64(random.IntN(maxDelayMillis))
		chosen = append(chosen, fault)
		e.Notes = append(e.Notes, fmt.Sprintf("%s %s, %d times", fault.Call, fault.Kind, fault.Times))
	}
	if err := s.harness.Script(chosen...); err != nil {
		e.Error = err.Error()
	}
	s.history.Add(e)
}

// gatherFaults reads out of the broker's log which faults of the script struck which machine: only the
// provider knows that.
func (s *suite) gatherFaults() {
	if s.harness == nil {
		return
	}
	log, err := os.ReadFile(filepath.Join(s.broker.Dir, "berthd.log"))
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range bytes.Lines(log[s.log:]) {
		if !bytes.Contains(line, []byte("a fault on purpose")) {
			continue
		}
		kind, machine := field(line, "kind="), field(line, "machine=")
		at, err := time.Parse(time.RFC3339Nano, field(line, "time="))
		if err != nil || kind != string(fake.Kill) && kind != string(fake.Vanish) && kind != string(fake.Unresponsive) {
			continue
		}
		begin := s.history.Now() - int64(time.Since(at))
		s.history.Add(Event{Kind: KindDisturb, Op: kind, Machine: machine, Begin: begin, End: begin + 1, Notes: []string{"by the script of faults"}})
	}
	s.log = int64(len(log))
}

func field(line []byte, name string) string {
	_, rest, _ := bytes.Cut(line, []byte(" "+name))
	if bytes.HasPrefix(line, []byte(name)) {
		rest = line[len(name):]
	}
	value, _, _ := bytes.Cut(rest, []byte(" "))
	return strings.TrimSpace(string(value))
}

// wakeAll undoes what the script muted.
func (s *suite) wakeAll() {
	if s.harness == nil {
		return
	}
	if err := s.harness.Script(); err != nil {
		s.t.Fatal(err)
	}
	machines, err := s.harness.Machines()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, machine := range machines {
		_ = s.harness.Thaw(machine) // half made ones have no guest
	}
}
