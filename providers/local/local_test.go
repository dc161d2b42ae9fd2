package local_test

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/local"
)

const brokerID = "testbroker"

// The programs that the tests run, built once: the guest, a broker that makes or destroys one
// machine, and the same with its failpoints armed by CRASH_AT.
var programs struct{ guest, creator, crasher string }

func TestMain(m *testing.M) {
	bin, err := os.MkdirTemp("", "berth-local-test")
	check(err)
	check(os.Chmod(bin, 0o755)) // for the tests that are not root
	programs.guest = filepath.Join(bin, "berth-guest")
	programs.creator = filepath.Join(bin, "creator")
	programs.crasher = filepath.Join(bin, "crasher")
	build("-o", programs.guest, "../guest/cmd/berth-guest")
	build("-o", programs.creator, "./testdata/creator")
	build("-overlay", armFailpoints(bin), "-o", programs.crasher, "./testdata/creator")
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		// A broker that was killed while it probed the host leaves the probe's cgroup for the next one.
		check(exec.Command(programs.creator, "info", filepath.Join(bin, "local"), "", programs.guest, "", "auto").Run())
		check(os.RemoveAll(bin))
		os.Exit(code)
	}))
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func build(arguments ...string) {
	cmd := exec.Command("go", append([]string{"build"}, arguments...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Printf("go build %v: %v\n%s", arguments, err, out)
		os.Exit(1)
	}
}

var failpoint = regexp.MustCompile(`// gofail: var (\w+) struct\{\}\n\s*// os.Exit\(137\)\n`)

// armFailpoints writes this room's sources anew with each failpoint an exit that CRASH_AT chooses,
// and returns the overlay that puts them in place of the real ones.
func armFailpoints(dir string) string {
	here, err := os.Getwd()
	check(err)
	sources, err := filepath.Glob("*.go")
	check(err)
	replace := map[string]string{}
	for _, source := range sources {
		content, err := os.ReadFile(source)
		check(err)
		armed := failpoint.ReplaceAll(content, []byte("if os.Getenv(\"CRASH_AT\") == \"$1\" {\n os.Exit(137)\n}\n"))
		to := filepath.Join(dir, source)
		check(os.WriteFile(to, armed, 0o600))
		replace[filepath.Join(here, source)] = to
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	check(err)
	path := filepath.Join(dir, "overlay.json")
	check(os.WriteFile(path, overlay, 0o600))
	return path
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

func newID() string { return "m_" + ulid.Make().String() }

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
		_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err == nil && strings.Contains(path, id) {
				left = append(left, "file "+path)
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
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if is() {
			return
		}
	}
	t.Fatalf("never so: %s", what)
}

// guest is a connection to a machine's guest, as the broker makes it.
type guest struct {
	guestv1.GuestServiceClient
	hello *guestv1.HelloResponse
	close func()
}

func (y yard) dial(t testing.TB, p *local.Provider, id string) guest {
	t.Helper()
	dialer, err := p.Dialer(t.Context(), y.machine(id))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(y.sockets, id, "guest.sock"), y.owner, -1); err != nil && y.owner != 0 {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///guest",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dialer.Dial(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	g := guest{GuestServiceClient: guestv1.NewGuestServiceClient(conn), close: func() {
		_ = conn.Close()
		_ = dialer.Close()
	}}
	nonce := bytes.Repeat([]byte("n"), 32)
	proof := hmac.New(sha256.New, token)
	proof.Write([]byte("berth broker"))
	proof.Write(nonce)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	g.hello, err = g.Hello(ctx, &guestv1.HelloRequest{
		Protocol: 1, Build: "test", MachineId: id, Nonce: nonce, Proof: proof.Sum(nil),
	}, grpc.WaitForReady(true))
	if err != nil {
		g.close()
		log, _ := os.ReadFile(filepath.Join(y.dir, id, "guest.log"))
		t.Fatalf("Hello: %v\nguest.log: %s", err, log)
	}
	return g
}

// run runs a script in the machine and returns its output.
func (g guest) run(t testing.TB, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	answer, err := g.Run(ctx, &guestv1.RunRequest{
		MaxOutputBytes: 1 << 16,
		Start: &guestv1.StartRequest{
			JobId: "job_" + ulid.Make().String(),
			Command: &guestv1.Command{
				Shell: script, KillGrace: durationpb.New(time.Second), OutputLimitBytes: 1 << 16,
			},
		},
	})
	if err != nil {
		t.Fatalf("running %q: %v", script, err)
	}
	return string(answer.GetStdout().GetHead())
}

// broker runs one of the programs as a broker of its own on this yard's machines.
func (y yard) broker(t testing.TB, program, verb, id string, environment ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program, verb, y.dir, filepath.Join(y.sockets, id), programs.guest, id, string(y.mode))
	cmd.Env = append(os.Environ(), environment...)
	return cmd
}

// brokerUntilDone starts a broker, waits until it has done its one thing, and returns it alive.
func (y yard) brokerUntilDone(t testing.TB, verb, id string) *exec.Cmd {
	t.Helper()
	return untilDone(t, y.broker(t, programs.creator, verb, id))
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

func TestAMachineLivesFromCreateToDestroy(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		if _, err := p.Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
			t.Fatalf("before Create: %v", err)
		}
		y.create(t, p, id)
		if got := state(t, p, id); got != providers.MachineRunning {
			t.Fatalf("after Create it is %v", got)
		}
		g := y.dial(t, p, id)
		defer g.close()
		if got := g.hello.GetMachineId(); got != id {
			t.Errorf("the guest says it is in %s", got)
		}
		if got := g.run(t, "printf %s hello"); got != "hello" {
			t.Errorf("a job says %q", got)
		}
		for path, want := range map[string]os.FileMode{
			filepath.Join(y.dir, id):                          0o700,
			filepath.Join(y.dir, id, "boot.json"):             0o600,
			filepath.Join(y.dir, id, "machine.json"):          0o600,
			filepath.Join(y.dir, id, "guest.log"):             0o600,
			filepath.Join(y.sockets, id):                      0o700,
			filepath.Join(y.sockets, id) + "/" + "guest.sock": 0o600,
			filepath.Join(y.dir, id, "workspace"):             0o700,
			filepath.Join(y.dir, id, "spool"):                 0o700,
		} {
			info, err := os.Stat(path)
			if err != nil {
				t.Error(err)
				continue
			}
			if got := info.Mode().Perm(); got != want {
				t.Errorf("%s has mode %o, want %o", path, got, want)
			}
		}
		y.destroy(t, p, id)
		if err := p.Destroy(t.Context(), y.machine(id)); err != nil {
			t.Errorf("the second Destroy: %v", err)
		}
	})
}

func TestCreateIsTheSameOnARunningMachine(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		first := y.guests(t, id)
		y.create(t, p, id)
		if second := y.guests(t, id); len(first) != 1 || !slices.Equal(first, second) {
			t.Errorf("guests %v, then %v", first, second)
		}
	})
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
		if want := []string{"BERTH_MACHINE_ID", "HOME", "LANG", "PATH"}; !slices.Equal(keys, want) {
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

func TestAMachineSurvivesItsBroker(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		id := newID()
		kill(t, y.brokerUntilDone(t, "create", id))
		before := y.guests(t, id)
		p := y.provider(t)
		if got := state(t, p, id); got != providers.MachineRunning {
			t.Fatalf("it is %v", got)
		}
		y.create(t, p, id)
		if after := y.guests(t, id); len(before) != 1 || !slices.Equal(before, after) {
			t.Fatalf("guests %v before, %v after", before, after)
		}
		g := y.dial(t, p, id)
		if got := g.run(t, "printf %s hello"); got != "hello" {
			t.Errorf("a job says %q", got)
		}
		g.close()
		y.destroy(t, p, id)
	})
}

func TestDestroyTakesEveryProcess(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		g := y.dial(t, p, id)
		defer g.close()
		mark := strconv.FormatInt(time.Now().UnixNano(), 10) // seconds to sleep, and to be found by
		scripts := []string{
			"sleep " + mark + " >/dev/null 2>&1 &",
			"setsid sh -c 'sleep " + mark + " & sleep " + mark + " & exit' >/dev/null 2>&1 </dev/null &",
			"(setsid sh -c 'trap \"\" TERM HUP INT; sleep " + mark + "; sleep " + mark + "' >/dev/null 2>&1 &)",
		}
		count := 5
		if y.mode == local.IsolationAuto && os.Geteuid() == 0 {
			scripts = append(scripts, "env -i setsid /bin/sh -c '/bin/sleep "+mark+" & exit' >/dev/null 2>&1 &")
			count = 6
		}
		for _, script := range scripts {
			g.run(t, script)
		}
		eventually(t, "all of them run", func() bool { return len(processesNamed(t, "sleep\x00"+mark)) >= count-1 })
		start := time.Now()
		y.destroy(t, p, id)
		t.Logf("destroyed in %v", time.Since(start))
		if left := processesNamed(t, mark); len(left) > 0 {
			t.Errorf("processes %v are left", left)
		}
	})
}

func TestAMachineWhoseGuestDiedBootsAgainOnItsOwnDisk(t *testing.T) {
	eachMode(t, func(t *testing.T, y yard) {
		p, id := y.provider(t), newID()
		y.create(t, p, id)
		g := y.dial(t, p, id)
		mark := strconv.FormatInt(time.Now().UnixNano(), 10)
		g.run(t, "echo kept > file; setsid sleep "+mark+" >/dev/null 2>&1 &")
		eventually(t, "the job runs", func() bool { return len(processesNamed(t, "sleep\x00"+mark)) == 1 })
		g.close()
		died := y.guests(t, id)[0]
		if err := syscall.Kill(died, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		// Though its job may live on, the lock is free: it was the guest's alone.
		eventually(t, "it is stopped", func() bool { return state(t, p, id) == providers.MachineStopped })
		spec := y.spec(id)
		spec.Generation = 2
		if _, err := p.Create(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
		if left := processesNamed(t, "sleep\x00"+mark); len(left) > 0 {
			t.Errorf("a job of the old generation runs: %v", left)
		}
		g = y.dial(t, p, id)
		defer g.close()
		if got := g.hello.GetGeneration(); got != 2 {
			t.Errorf("the guest is in generation %d", got)
		}
		if got := g.run(t, "cat file"); got != "kept\n" {
			t.Errorf("the file says %q", got)
		}
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

func TestListShowsThisBrokersMachinesAlone(t *testing.T) {
	y := newYard(t, local.IsolationAuto)
	p := y.provider(t)
	mine := []string{newID(), newID()}
	for _, id := range mine {
		y.create(t, p, id)
	}
	for _, stranger := range []string{"lost+found", "m_no_record", ".cache"} {
		if err := os.Mkdir(filepath.Join(y.dir, stranger), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(y.dir, "m_file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	others, err := local.New(local.Options{
		Dir: y.dir, BrokerID: "other", GuestPath: func(string) (string, error) { return programs.guest, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = others.Close() }()
	theirs := newID()
	spec := y.spec(theirs)
	spec.BrokerID = "other"
	if _, err := others.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := others.Destroy(context.Background(), y.machine(theirs)); err != nil {
			t.Error(err)
		}
	}()
	machines, err := p.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, m := range machines {
		found = append(found, m.ID)
		if m.State != providers.MachineRunning || m.Created.IsZero() || m.ListenDir != filepath.Join(y.sockets, m.ID) {
			t.Errorf("%+v", m)
		}
	}
	slices.Sort(found)
	slices.Sort(mine)
	if !slices.Equal(found, mine) {
		t.Errorf("found %v, want %v", found, mine)
	}
	if _, err := p.Inspect(t.Context(), theirs); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("Inspect of another broker's machine: %v", err)
	}
	if err := p.Destroy(t.Context(), y.machine(theirs)); !errors.Is(err, providers.ErrRefused) {
		t.Errorf("Destroy of another broker's machine: %v", err)
	}
	if len(y.guests(t, theirs)) != 1 {
		t.Error("another broker's guest is gone")
	}
}

func TestWhatALocalMachineCannotBeIsRefusedAndLeavesNothing(t *testing.T) {
	y := newYard(t, local.IsolationAuto)
	p := y.provider(t)
	full := filepath.Join(filepath.Dir(y.dir), "full")
	if err := os.MkdirAll(filepath.Join(full, "precious"), 0o700); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		change func(*providers.MachineSpec)
		says   string
	}{
		"an image":                    {func(s *providers.MachineSpec) { s.Image = "debian" }, "image"},
		"a workspace":                 {func(s *providers.MachineSpec) { s.Workspace = "/w" }, "workspace"},
		"a limit":                     {func(s *providers.MachineSpec) { s.Resources.PIDs = 1 }, "limits"},
		"no egress":                   {func(s *providers.MachineSpec) { s.Egress.Mode = providers.EgressNone }, "egress"},
		"an option":                   {func(s *providers.MachineSpec) { s.Options = map[string]string{"a": "b"} }, "options"},
		"another broker":              {func(s *providers.MachineSpec) { s.BrokerID = "other" }, "other"},
		"no token":                    {func(s *providers.MachineSpec) { s.Token = nil }, "token"},
		"an id that is a path":        {func(s *providers.MachineSpec) { s.MachineID = "m_/../x" }, "id"},
		"a relative socket directory": {func(s *providers.MachineSpec) { s.ListenDir = "s" }, "absolute"},
		"a socket path too long": {
			func(s *providers.MachineSpec) { s.ListenDir = "/tmp/" + strings.Repeat("x", 120) }, "shorter runtime directory",
		},
		"a socket directory in use": {func(s *providers.MachineSpec) { s.ListenDir = full }, "precious"},
	} {
		t.Run(what, func(t *testing.T) {
			spec := y.spec(newID())
			c.change(&spec)
			_, err := p.Create(t.Context(), spec)
			if !errors.Is(err, providers.ErrRefused) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want ErrRefused that says %q", err, c.says)
			}
			if left := y.traces(t, spec.MachineID); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(full, "precious")); err != nil {
		t.Error(err)
	}
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
