package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake"
)

var guestProgram string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "berth-reconcile-")
	if err == nil {
		guestProgram = filepath.Join(dir, "berth-guest")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", guestProgram, "../../providers/guest/cmd/berth-guest").CombinedOutput(); err != nil {
			err = fmt.Errorf("build the guest: %w: %s", err, out)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

const (
	namespace = "default"
	soon      = 20 * time.Second // for what must happen
	retention = 24 * time.Hour
)

// world is all rooms below the API, over machines that fail as the test has it. Its clock stands
// ahead as far as the test says; Run is not running, the test does what it does.
type world struct {
	*Service
	t         *testing.T
	ctx       context.Context
	dir       string
	ledger    *store.Store
	keys      *vault.Vault
	fake      *fake.Provider
	links     *guestlink.Links
	sandboxes *lifecycle.Service
	jobs      *jobs.Service
	ahead     atomic.Int64
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	dir, err := os.MkdirTemp("", "rc-") // short, for sockets
	must(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w := &world{t: t, ctx: ctx, dir: dir}
	w.ledger, err = store.Open(filepath.Join(dir, "ledger.db"), store.Options{})
	must(t, err)
	w.keys, err = vault.Open(dir)
	must(t, err)
	w.fake, err = fake.New(fake.Options{
		Dir: filepath.Join(dir, "m"), BrokerID: w.ledger.Instance(), Log: slog.New(slog.DiscardHandler),
		GuestPath: func(string) (string, error) { return guestProgram, nil },
	})
	must(t, err)
	w.start()
	t.Cleanup(func() {
		w.stop()
		must(t, w.fake.World().Strike(context.Background()))
		must(t, w.fake.Close())
		must(t, w.ledger.Close())
		cancel()
		_ = os.RemoveAll(dir)
	})
	return w
}

func (w *world) now() time.Time { return time.Now().Add(time.Duration(w.ahead.Load())) }

func (w *world) later(d time.Duration) { w.ahead.Add(int64(d)) }

func (w *world) start() {
	w.t.Helper()
	log := slog.New(slog.DiscardHandler)
	w.links = guestlink.New(guestlink.Options{Build: "test", Log: log, Events: guestlink.Events{
		Up:   func(machineID string, hello *guestv1.HelloResponse) { w.jobs.Follow(machineID, hello) },
		Down: func(machineID string, _ error) { w.jobs.Unfollow(machineID) },
	}})
	w.sandboxes = lifecycle.New(lifecycle.Options{
		Store: w.ledger, Vault: w.keys, Links: w.links, Providers: []lifecycle.Named{{Name: "fake", Provider: w.fake}},
		SocketDir: filepath.Join(w.dir, "s"), Log: log, Now: w.now,
	})
	var err error
	w.jobs, err = jobs.New(jobs.Options{
		Store: w.ledger, Vault: w.keys, Links: w.links, Sandboxes: w.sandboxes, OutputDir: filepath.Join(w.dir, "output"), Log: log, Now: w.now,
	})
	must(w.t, err)
	w.sandboxes.SetHooks(lifecycle.Hooks{
		PrepareWorkspace: func(context.Context, *recordv1.SandboxRecord) error { return nil },
		SettleJobs:       w.jobs.SettleJobs, LoseJobs: w.jobs.LoseJobs, JobsChanged: w.jobs.JobsChanged,
	})
	w.Service = New(Options{
		Store: w.ledger, Links: w.links, Sandboxes: w.sandboxes, Jobs: w.jobs, Log: log, Now: w.now, Retention: retention, ReceiptsMost: 1000, OutputMost: 1 << 20,
		Scratch: filepath.Join(w.dir, "scratch"),
	})
}

func (w *world) stop() {
	w.sandboxes.Close()
	w.jobs.Close()
	w.links.Close()
}

func call(method, requestID string) lifecycle.Call {
	return lifecycle.Call{Namespace: namespace, RequestID: requestID, Method: method, BodyHash: []byte("body")}
}

func (w *world) sandbox() *recordv1.SandboxRecord {
	w.t.Helper()
	sandbox, err := w.sandboxes.Create(w.ctx, call("create", ""), &berthv1.SandboxSpec{})
	must(w.t, err)
	return sandbox
}

func (w *world) job(sandbox *recordv1.SandboxRecord) *recordv1.JobRecord {
	w.t.Helper()
	job, err := w.jobs.Start(w.ctx, call("start", ""), sandbox.GetId(), &berthv1.JobSpec{Shell: "sleep 100"})
	must(w.t, err)
	return job
}

// silent waits until the machine's link is down.
func (w *world) silent(sandbox *recordv1.SandboxRecord) {
	w.t.Helper()
	w.wait("the end of the link", func() bool { return w.links.Hello(sandbox.GetMachineId()) == nil })
}

func (w *world) wantState(sandbox *recordv1.SandboxRecord, want berthv1.SandboxState, when string) {
	w.t.Helper()
	now, _, err := w.sandboxes.Get(namespace, sandbox.GetId())
	if err != nil || now.GetState() != want {
		w.t.Fatalf("%s the sandbox is %s (%v), want %s", when, now.GetState(), err, want)
	}
}

func (w *world) wantMachine(id string, want bool, when string) {
	w.t.Helper()
	machines, err := w.fake.World().Machines()
	must(w.t, err)
	found := false
	for _, machine := range machines {
		found = found || machine == id
	}
	if found != want {
		w.t.Fatalf("%s machine %s is there: %v", when, id, found)
	}
}

// orphan boots a machine that no record names.
func (w *world) orphan(id, broker string) {
	w.t.Helper()
	provider := w.fake
	if broker != w.ledger.Instance() {
		var err error
		provider, err = fake.New(fake.Options{
			Dir: filepath.Join(w.dir, "m"), BrokerID: broker, GuestPath: func(string) (string, error) { return guestProgram, nil },
		})
		must(w.t, err)
		defer func() { must(w.t, provider.Close()) }()
	}
	_, err := provider.Create(w.ctx, providers.MachineSpec{
		MachineID: id, BrokerID: broker, Token: make([]byte, 32), ListenDir: w.sandboxes.ListenDir(id),
	})
	must(w.t, err)
}

func (w *world) wait(what string, so func() bool) {
	w.t.Helper()
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for deadline := time.Now().Add(soon); !so(); <-ticker.C {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not so after %s", what, soon)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const (
	running = berthv1.SandboxState_SANDBOX_STATE_RUNNING
	stopped = berthv1.SandboxState_SANDBOX_STATE_STOPPED
	lost    = berthv1.SandboxState_SANDBOX_STATE_LOST
)

func TestAMachineThatVanishedIsLostWhenThatWasSeenTwice(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	job := w.job(sandbox)
	must(t, w.fake.World().Vanish(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	w.look(w.ctx)
	w.wantState(sandbox, running, "after one look")
	w.look(w.ctx)
	w.wantState(sandbox, running, "after another look in the same moment")
	w.later(lookEvery)
	w.look(w.ctx)
	w.wantState(sandbox, lost, "after a second look")
	done, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), 0)
	if err != nil || done.GetOutcome().GetCause() != berthv1.Cause_CAUSE_LOST || done.GetOutcome().ExitCode != nil {
		t.Errorf("its job ended as %v (%v)", done.GetOutcome(), err)
	}
	w.later(lookEvery)
	w.look(w.ctx)
	if _, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId()); err != nil {
		t.Errorf("destroying a lost sandbox: %v", err)
	}
}

func TestAProviderThatDoesNotSayChangesNothing(t *testing.T) {
	for _, kind := range []fake.Kind{fake.Unavailable, fake.Fail, fake.Refuse} {
		t.Run(string(kind), func(t *testing.T) {
			w := newWorld(t)
			sandbox := w.sandbox()
			must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
			w.silent(sandbox)
			w.look(w.ctx)
			must(t, w.fake.World().Script(fake.Fault{Call: fake.CallInspect, Kind: kind}))
			for range 3 {
				w.later(time.Hour)
				w.look(w.ctx)
			}
			w.wantState(sandbox, running, "after looks without an answer")
			must(t, w.fake.World().Script())
			w.later(time.Hour)
			w.look(w.ctx)
			w.wantState(sandbox, running, "after one look with an answer")
			w.later(lookEvery)
			w.look(w.ctx)
			w.wantState(sandbox, stopped, "after a second one")
		})
	}
}

func TestAStoppedMachineThatVanishesIsLost(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	w.look(w.ctx)
	w.later(lookEvery)
	w.look(w.ctx)
	w.wantState(sandbox, stopped, "after two looks")
	must(t, w.fake.World().Vanish(w.ctx, sandbox.GetMachineId()))
	for range 2 {
		w.later(sweepEvery)
		w.look(w.ctx)
		w.lookAtRest(w.ctx)
	}
	w.wantState(sandbox, lost, "after two looks more")
}

func TestAMuteGuestHoldsUpNobodyAndItsMachineStays(t *testing.T) {
	w := newWorld(t)
	mute, other := w.sandbox(), w.sandbox()
	w.stop()
	must(t, w.fake.World().Mute(mute.GetMachineId()))
	begin := time.Now()
	w.start()
	must(t, w.Start())
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("the start took %s", took)
	}
	if _, err := w.jobs.Run(w.ctx, call("run", ""), other.GetId(), &berthv1.JobSpec{Shell: "true"}, 10); err != nil {
		t.Errorf("a command in another sandbox: %v", err)
	}
	for range 3 {
		w.later(time.Hour)
		w.look(w.ctx)
		w.sweep(w.ctx)
	}
	w.wantState(mute, running, "while its guest is mute")
	w.wantMachine(mute.GetMachineId(), true, "while its guest is mute")
	must(t, w.fake.World().Wake(mute.GetMachineId()))
	if _, err := w.jobs.Run(w.ctx, call("run", ""), mute.GetId(), &berthv1.JobSpec{Shell: "true"}, 10); err != nil && !fault.Is(err, fault.Recovering) {
		t.Errorf("a command in it when it woke: %v", err)
	}
}

func TestAMachineWithoutARecordIsDestroyedWhenItWasSeenTwiceAGraceApart(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	w.orphan("m_orphan", w.ledger.Instance())
	w.orphan("m_foreign", "another")
	w.sweep(w.ctx)
	w.wantMachine("m_orphan", true, "after one sweep")
	w.later(orphanGrace / 2)
	w.sweep(w.ctx)
	w.wantMachine("m_orphan", true, "within the grace")
	if count, oldest := w.Orphans(); count != 1 || oldest < orphanGrace/2 {
		t.Errorf("%d orphans, the oldest for %s", count, oldest)
	}
	w.later(orphanGrace)
	w.sweep(w.ctx)
	w.wantMachine("m_orphan", false, "after the grace")
	if sockets, err := os.ReadDir(filepath.Join(w.dir, "s")); err != nil || len(sockets) != 2 {
		t.Errorf("sockets %v are there (%v), want the sandbox's and the foreign one's", sockets, err)
	}
	w.sweep(w.ctx)
	if count, _ := w.Orphans(); count != 0 {
		t.Errorf("%d orphans are left", count)
	}
	w.wantMachine("m_foreign", true, "always")
	w.wantMachine(sandbox.GetMachineId(), true, "always")
	w.wantState(sandbox, running, "always")
}

func TestAnOrphanIsLeftAloneWhileItsProviderIsNotWell(t *testing.T) {
	w := newWorld(t)
	w.orphan("m_orphan", w.ledger.Instance())
	w.sweep(w.ctx)
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallInfo, Kind: fake.Unavailable}))
	w.later(time.Hour)
	w.sweep(w.ctx)
	w.wantMachine("m_orphan", true, "while its provider is not well")
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallList, Kind: fake.Fail}))
	w.later(time.Hour)
	w.sweep(w.ctx)
	w.wantMachine("m_orphan", true, "while its provider can't list it")
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallDestroy, Kind: fake.LoseReply, Times: 1}))
	for range 3 {
		w.later(time.Hour)
		w.sweep(w.ctx)
	}
	w.wantMachine("m_orphan", false, "in the end")
}

func TestAStaleListDestroysNothing(t *testing.T) {
	w := newWorld(t)
	gone := w.sandbox()
	w.sweep(w.ctx) // so that there is a list to be stale
	if _, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), gone.GetId()); err != nil {
		t.Fatal(err)
	}
	sandbox := w.sandbox()
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallList, Kind: fake.Stale}))
	for range 3 {
		w.later(time.Hour)
		w.sweep(w.ctx)
		w.look(w.ctx)
	}
	w.wantState(sandbox, running, "although the list does not name it")
	w.wantMachine(sandbox.GetMachineId(), true, "although the list does not name it")
}

func TestAMachineThatComesBackAfterItsDestroyIsDestroyedAgain(t *testing.T) {
	w := newWorld(t)
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallCreate, Kind: fake.Twice, Times: 1, DelayMillis: 1000}))
	sandbox := w.sandbox()
	if _, err := w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId()); err != nil {
		t.Fatal(err)
	}
	w.wantMachine(sandbox.GetMachineId(), false, "after its destroy")
	w.wait("its return", func() bool {
		boots, err := w.fake.World().Boots(sandbox.GetMachineId())
		return err == nil && boots == 1
	})
	w.sweep(w.ctx)
	w.later(orphanGrace)
	w.sweep(w.ctx)
	w.wantMachine(sandbox.GetMachineId(), false, "after two sweeps")
}

func TestStartGoesOnWithWhatWasBegun(t *testing.T) {
	w := newWorld(t)
	must(t, w.fake.World().Script(fake.Fault{Call: fake.CallCreate, Kind: fake.HangAfter}))
	go func() { _, _ = w.sandboxes.Create(w.ctx, call("create", "c"), &berthv1.SandboxSpec{}) }()
	w.wait("the boot", func() bool {
		machines, err := w.fake.World().Machines()
		return err == nil && len(machines) == 1 && machines[0] != ""
	})
	w.stop()
	must(t, w.fake.World().Script())
	w.start()
	must(t, w.Start())
	sandbox, err := w.sandboxes.Create(w.ctx, call("create", "c"), &berthv1.SandboxSpec{})
	must(t, err)
	w.wantState(sandbox, running, "after the restart")
	if boots, err := w.fake.World().Boots(sandbox.GetMachineId()); err != nil || boots > 1 {
		t.Errorf("its machine was booted %d times (%v)", boots, err)
	}
}

func TestWhatWasKeptLongEnoughIsDropped(t *testing.T) {
	w := newWorld(t)
	sandbox, young := w.sandbox(), w.sandbox()
	job, err := w.jobs.Start(w.ctx, call("start", "r"), sandbox.GetId(), &berthv1.JobSpec{Shell: "echo some"})
	must(t, err)
	if _, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), soon); err != nil {
		t.Fatal(err)
	}
	_, err = w.sandboxes.Destroy(w.ctx, call("destroy", ""), sandbox.GetId())
	must(t, err)
	w.later(retention - time.Hour)
	w.trim(w.ctx)
	if _, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), 0); err != nil {
		t.Errorf("before its time: %v", err)
	}
	w.later(2 * time.Hour)
	w.trim(w.ctx)
	if _, err := w.jobs.Poll(w.ctx, namespace, job.GetId(), 0); !fault.Is(err, fault.JobNotFound) {
		t.Errorf("the receipt after its time: %v", err)
	}
	if _, _, err := w.sandboxes.Get(namespace, sandbox.GetId()); !fault.Is(err, fault.SandboxNotFound) {
		t.Errorf("the sandbox after its time: %v", err)
	}
	w.wantState(young, running, "always")
	must(t, w.ledger.View(func(tx *store.Tx) error {
		request, err := tx.Request(namespace, "r")
		if request != nil {
			t.Errorf("the request id is still remembered: %v", request)
		}
		return err
	}))
}

func TestRunEndsWithItsContextAndHearsKicks(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Run(ctx)
	}()
	must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
	w.Kick()
	w.Kick()
	w.wait("the sandbox to be stopped", func() bool {
		now, _, err := w.sandboxes.Get(namespace, sandbox.GetId())
		return err == nil && now.GetState() == stopped
	})
	cancel()
	<-done
}

func TestATrimThatTakesLongHoldsUpNoLook(t *testing.T) {
	w := newWorld(t)
	sandbox := w.sandbox()
	must(t, w.fake.World().Kill(w.ctx, sandbox.GetMachineId()))
	w.silent(sandbox)
	written, held := make(chan error, 1), make(chan struct{})
	letGo := sync.OnceFunc(func() { close(held) })
	go func() {
		written <- w.ledger.Update(w.ctx, func(*store.Tx) error { // a trim waits behind it
			<-held
			return nil
		})
	}()
	w.trims = 10 * time.Millisecond // before the first look
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	defer letGo() // before the others: the world's end waits for the ledger
	running.Go(func() { w.Run(ctx) })
	w.wait("a look while a trim is at work", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.seen[sandbox.GetMachineId()].verdict == lifecycle.Stopped
	})
	letGo()
	must(t, <-written)
}
