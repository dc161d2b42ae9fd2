package local_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/conformance/failpoint"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

const brokerID = provider.BrokerID

// programs are what the tests run, built once: the guest, a broker that makes or destroys one machine, and
// the same with its failpoints armed.
var programs struct {
	guest, creator, crasher string
	failpoints              []string
}

func TestMain(m *testing.M) { fixture.Main(m, removeProbe) }

// build builds the programs.
func build(t testing.TB) {
	t.Helper()
	programs.guest = fixture.Guest(t)
	if programs.crasher != "" {
		return
	}
	programs.creator = filepath.Join(fixture.Dir(t), "creator")
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", programs.creator, "./testdata/creator")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	crasher := filepath.Join(fixture.Dir(t), "crasher")
	var err error
	if programs.failpoints, err = failpoint.BuildArmed(t.Context(), "./testdata/creator", crasher); err != nil {
		t.Fatal(err)
	}
	programs.crasher = crasher
}

// removeProbe removes the cgroup that a broker leaves for the next one that was killed while it probed the host.
func removeProbe() error {
	if programs.creator == "" {
		return nil
	}
	dir := filepath.Join(filepath.Dir(programs.creator), "local")
	return exec.Command(programs.creator, "info", dir, "", programs.guest, "", "auto").Run()
}

// modes are the ways in which machines are kept apart; the first is plain where the tests may do no
// better.
var modes = []local.IsolationMode{local.IsolationAuto, local.IsolationNone}

// yard is where a test's machines lie.
type yard struct {
	dir, sockets string
	mode         local.IsolationMode
	owner        int // of sockets
}

func newYard(t *testing.T, mode local.IsolationMode) yard {
	t.Helper()
	build(t)
	base, err := os.MkdirTemp("", "bl") // short, unlike t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	return yard{dir: filepath.Join(base, "local"), sockets: filepath.Join(base, "s"), mode: mode}
}

func (y yard) provider(t testing.TB) *local.Provider {
	t.Helper()
	p, err := local.New(local.Options{
		Dir:       y.dir,
		BrokerID:  brokerID,
		GuestPath: func(string) (string, error) { return programs.guest, nil },
		Isolation: y.mode,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func newID() string { return provider.NewID() }

var token = bytes.Repeat([]byte("t"), 32)

func (y yard) spec(id string) providers.MachineSpec {
	return providers.MachineSpec{
		MachineID: id, BrokerID: brokerID, Generation: 1, Token: token, ListenDir: filepath.Join(y.sockets, id),
	}
}

func (y yard) machine(id string) providers.Machine {
	return providers.Machine{ID: id, ListenDir: filepath.Join(y.sockets, id)}
}

func (y yard) create(t testing.TB, p *local.Provider, id string) {
	t.Helper()
	if _, err := p.Create(t.Context(), y.spec(id)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Destroy(context.Background(), y.machine(id)); err != nil {
			t.Error(err)
		}
	})
}

// destroy destroys and wants nothing left.
func (y yard) destroy(t testing.TB, p *local.Provider, id string) {
	t.Helper()
	if err := p.Destroy(t.Context(), y.machine(id)); err != nil {
		t.Fatal(err)
	}
	if left := y.traces(t, id); len(left) > 0 {
		t.Fatalf("left behind:\n%s", strings.Join(left, "\n"))
	}
	if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("Inspect after Destroy: %v, want ErrNotFound", err)
	}
}

func state(t testing.TB, p *local.Provider, id string) providers.MachineState {
	t.Helper()
	m, err := p.Inspect(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return m.State
}

// traces names everything in the system that bears the machine's id.
func (y yard) traces(t testing.TB, id string) []string {
	t.Helper()
	var left []string
	for _, pid := range pids(t) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if bytes.Contains(line, []byte(id)) || bytes.Contains(environment, []byte(id)) {
			left = append(left, fmt.Sprintf("process %d %q %s", pid, line, status))
		}
	}
	for _, root := range []string{y.dir, y.sockets, "/sys/fs/cgroup"} {
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.Contains(path, id) {
				return nil //nolint:nilerr // what goes meanwhile is not left
			}
			left = append(left, "file "+path)
			if entry.IsDir() {
				return filepath.SkipDir
			}
			return nil
		})
	}
	return left
}

func pids(t testing.TB) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var found []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && pid != os.Getpid() {
			found = append(found, pid)
		}
	}
	return found
}

// processesNamed returns the processes with this text in their command line.
func processesNamed(t testing.TB, text string) []int {
	t.Helper()
	var found []int
	for _, pid := range pids(t) {
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && bytes.Contains(line, []byte(text)) {
			found = append(found, pid)
		}
	}
	return found
}

// guests returns the processes that are the machine's guest. A fork that has not executed anything
// yet looks like one, so a surplus is looked at again.
func (y yard) guests(t testing.TB, id string) []int {
	t.Helper()
	var found []int
	for range 20 {
		found = processesNamed(t, filepath.Join(id, "boot.json"))
		if len(found) <= 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return found
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(90 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatalf("never so: %s", what)
}

// guest is a connection to a machine's guest.
type guest struct{ *provider.Guest }

func (y yard) dial(t testing.TB, p *local.Provider, id string) guest {
	t.Helper()
	dialer, err := p.Dialer(t.Context(), y.machine(id))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dialer.Close() }() // the stream lives on
	if err := os.Chown(filepath.Join(y.sockets, id, "guest.sock"), y.owner, -1); err != nil && y.owner != 0 {
		t.Fatal(err)
	}
	g, err := provider.ConnectThrough(t, dialer, y.spec(id))
	if err != nil {
		t.Fatal(err)
	}
	return guest{g}
}

// run runs a script in the machine and returns its output.
func (g guest) run(script string) string { return g.Shell(script).Out }

// broker runs one of the programs as a broker of its own on this yard's machines.
func (y yard) broker(t testing.TB, program, verb, id string, environment ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program, verb, y.dir, filepath.Join(y.sockets, id), programs.guest, id, string(y.mode))
	cmd.Env = append(os.Environ(), environment...)
	return cmd
}

func untilDone(t testing.TB, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 5)
	if _, err := out.Read(said); err != nil || string(said) != "done\n" {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Fatalf("the broker said %q, %v", said, err)
	}
	return cmd
}

func kill(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
}

func eachMode(t *testing.T, test func(t *testing.T, y yard)) {
	for _, mode := range modes {
		t.Run("isolation "+string(mode), func(t *testing.T) { test(t, newYard(t, mode)) })
	}
}

func TestAMachinesFilesAreItsBrokersAlone(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		dialer, err := p.Dialer(t.Context(), y.machine(id))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dialer.Close() }()
		for path, want := range map[string]os.FileMode{
			filepath.Join(y.dir, id):                   0o700,
			filepath.Join(y.dir, id, "boot.json"):      0o600,
			filepath.Join(y.dir, id, "machine.json"):   0o600,
			filepath.Join(y.dir, id, "guest.log"):      0o600,
			filepath.Join(y.sockets, id):               0o700,
			filepath.Join(y.sockets, id, "guest.sock"): 0o600,
			filepath.Join(y.dir, id, "workspace"):      0o700,
			filepath.Join(y.dir, id, "spool"):          0o700,
		} {
			info, err := os.Stat(path)
			if err != nil {
				t.Error(err)
			} else if got := info.Mode().Perm(); got != want {
				t.Errorf("%s has mode %o, want %o", path, got, want)
			}
		}
	})
}

func TestWhatIsNoMachineInTheDirectoryIsLeftAlone(t *testing.T) {
	y := newYard(t, local.IsolationAuto)
	p, id := y.provider(t), newID()
	y.create(t, p, id)
	for _, stranger := range []string{"lost+found", "m_no_record", ".cache"} {
		if err := os.Mkdir(filepath.Join(y.dir, stranger), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(y.dir, "m_file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if found, err := p.List(t.Context()); err != nil || len(found) != 1 || found[0].ID != id {
		t.Errorf("List: %+v, %v", found, err)
	}
}

func TestASocketDirectoryInUseIsRefusedAndLeftAlone(t *testing.T) {
	y := newYard(t, local.IsolationAuto)
	spec := y.spec(newID())
	spec.ListenDir = filepath.Join(filepath.Dir(y.dir), "full")
	precious := filepath.Join(spec.ListenDir, "precious")
	if err := os.MkdirAll(precious, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := y.provider(t).Create(t.Context(), spec)
	if !errors.Is(err, providers.ErrRefused) || !strings.Contains(err.Error(), "precious") {
		t.Errorf("Create: %v, want ErrRefused that names what is there", err)
	}
	if left := y.traces(t, spec.MachineID); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

// In place of the workspace a job may leave anything.
func TestAMachineBootsWhateverItsWorkspaceIs(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"a file":             func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"a dangling link":    func(path string) error { return os.Symlink("nowhere", path) },
		"a link in a circle": func(path string) error { return os.Symlink("workspace", path) },
		"nothing":            func(string) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			y := newYard(t, local.IsolationNone)
			p, id := y.provider(t), newID()
			y.create(t, p, id)
			for _, pid := range y.guests(t, id) {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "it is stopped", func() bool { return state(t, p, id) == providers.MachineStopped })
			workspace := filepath.Join(y.dir, id, "workspace")
			if err := os.RemoveAll(workspace); err != nil {
				t.Fatal(err)
			}
			if err := put(workspace); err != nil {
				t.Fatal(err)
			}
			if _, err := p.Create(t.Context(), y.spec(id)); err != nil {
				t.Errorf("it does not boot: %v", err)
			}
		})
	}
}

func TestInfoSaysWhatThisHostGives(t *testing.T) {
	for _, mode := range modes {
		info, err := newYard(t, mode).provider(t).Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %+v", mode, info)
		if !info.Healthy || info.Name != "local" {
			t.Errorf("%+v", info)
		}
		if mode == local.IsolationNone {
			if info.Isolation != providers.IsolationNone || !strings.Contains(info.Message, "trusted work only") {
				t.Errorf("%+v", info)
			}
		}
	}
	p, err := local.New(local.Options{
		Dir: newYard(t, "").dir, BrokerID: brokerID,
		GuestPath: func(string) (string, error) { return "/nowhere/berth-guest", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	info, err := p.Info(t.Context())
	if err != nil || info.Healthy || !strings.Contains(info.Message, "/nowhere/berth-guest") {
		t.Errorf("with no guest program: %+v, %v", info, err)
	}
}

func TestNothingOfTheBrokerReachesAMachine(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		id := newID()
		leak, err := os.CreateTemp(t.TempDir(), "leak")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = leak.Close() }()
		broker := y.broker(t, programs.creator, "create", id, "SECRET_OF_THE_BROKER=1")
		broker.ExtraFiles = []*os.File{leak} // a descriptor that the broker inherits
		if err := broker.Start(); err != nil {
			t.Fatal(err)
		}
		defer kill(t, broker)
		p := y.provider(t)
		eventually(t, "the machine runs", func() bool {
			m, err := p.Inspect(t.Context(), id)
			return err == nil && m.State == providers.MachineRunning && len(y.guests(t, id)) == 1
		})
		pid := y.guests(t, id)[0]
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for line := range strings.SplitSeq(strings.Trim(string(environment), "\x00"), "\x00") {
			key, value, _ := strings.Cut(line, "=")
			keys = append(keys, key)
			if strings.Contains(value, string(token)) {
				t.Errorf("%s holds the token", key)
			}
		}
		slices.Sort(keys)
		if want := []string{"BERTH_MACHINE_ID", "LANG", "PATH"}; !slices.Equal(keys, want) {
			t.Errorf("the guest's environment has %v, want %v", keys, want)
		}
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.Contains(line, token) {
			t.Error("the command line holds the token")
		}
		descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range descriptors {
			if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); to == leak.Name() {
				t.Errorf("descriptor %s is the broker's %s", fd.Name(), to)
			}
		}
		if session, _ := syscall.Getpgid(pid); session != pid {
			t.Errorf("the guest is in the process group %d", session)
		}
		kill(t, broker)
		y.destroy(t, p, id)
	})
}

func TestAnotherProcessWithTheSamePidIsNotTheGuest(t *testing.T) {
	for _, wrong := range []string{"start_ticks", "kernel_boot_id"} {
		t.Run("its "+wrong+" differs", func(t *testing.T) {
			y := newYard(t, local.IsolationNone)
			p, id := y.provider(t), newID()
			y.create(t, p, id)
			if err := syscall.Kill(y.guests(t, id)[0], syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it is stopped", func() bool { return state(t, p, id) == providers.MachineStopped })
			other := exec.Command("sleep", "1000")
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			defer kill(t, other)
			path := filepath.Join(y.dir, id, "machine.json")
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			var record map[string]any
			if err := json.Unmarshal(content, &record); err != nil {
				t.Fatal(err)
			}
			guest := record["guest"].(map[string]any)
			guest["pid"] = other.Process.Pid
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", other.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			ticks, err := strconv.Atoi(strings.Fields(string(status))[21])
			if err != nil {
				t.Fatal(err)
			}
			guest["start_ticks"] = ticks
			if wrong == "start_ticks" {
				guest["start_ticks"] = ticks - 1
			} else {
				guest["kernel_boot_id"] = "another"
			}
			if content, err = json.Marshal(record); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			p = y.provider(t)
			if got := state(t, p, id); got != providers.MachineStopped {
				t.Errorf("it is %v", got)
			}
			y.destroy(t, p, id)
			if err := other.Process.Signal(syscall.Signal(0)); err != nil {
				t.Errorf("the other process was hit: %v", err)
			}
		})
	}
}

func TestTheSocketOfAMachineIsItsGuestsAlone(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		dialer, err := p.Dialer(t.Context(), y.machine(id))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dialer.Close() }()
		g, err := provider.ConnectThrough(t, dialer, y.spec(id))
		if err != nil {
			t.Fatal(err)
		}
		for range 3 { // this process is not the guest
			conn, err := net.Dial("unix", filepath.Join(y.sockets, id, "guest.sock"))
			if err != nil {
				t.Fatal(err)
			}
			if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil {
				t.Errorf("another process than the guest was spoken to: %d, %v", n, err)
			}
			_ = conn.Close()
		}
		again, err := provider.ConnectThrough(t, dialer, y.spec(id))
		if err != nil || again.Hello.GetBootId() != g.Hello.GetBootId() {
			t.Errorf("the guest: %v, %v", again, err)
		}
	})
}

func TestAMissingGuestProgramIsRefusedInWords(t *testing.T) {
	y := newYard(t, local.IsolationAuto)
	notExecutable := filepath.Join(t.TempDir(), "berth-guest")
	if err := os.WriteFile(notExecutable, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	noProgram := filepath.Join(t.TempDir(), "berth-guest")
	if err := os.WriteFile(noProgram, []byte("not a program"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/nowhere/berth-guest", notExecutable, noProgram} {
		p, err := local.New(local.Options{
			Dir: y.dir, BrokerID: brokerID, GuestPath: func(string) (string, error) { return path, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		id := newID()
		_, err = p.Create(t.Context(), y.spec(id))
		if !errors.Is(err, providers.ErrRefused) || !strings.Contains(err.Error(), path) {
			t.Errorf("got %v, want ErrRefused that names %s", err, path)
		}
		if left := y.traces(t, id); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
		_ = p.Close()
	}
}

// BenchmarkBoot measures from Create to the first connection that the guest opens.
func BenchmarkBoot(b *testing.B) {
	for _, mode := range modes {
		b.Run("isolation "+string(mode), func(b *testing.B) {
			base, err := os.MkdirTemp("", "bl")
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = os.RemoveAll(base) }()
			y := yard{dir: filepath.Join(base, "local"), sockets: filepath.Join(base, "s"), mode: mode}
			p := y.provider(b)
			var created time.Duration
			for b.Loop() {
				id := newID()
				start := time.Now()
				if _, err := p.Create(b.Context(), y.spec(id)); err != nil {
					b.Fatal(err)
				}
				created += time.Since(start)
				dialer, err := p.Dialer(b.Context(), y.machine(id))
				if err != nil {
					b.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(b.Context(), 10*time.Second)
				conn, err := dialer.Dial(ctx)
				cancel()
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				_ = conn.Close()
				_ = dialer.Close()
				if err := p.Destroy(b.Context(), y.machine(id)); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(created.Microseconds())/float64(b.N), "us-create/op")
		})
	}
}
