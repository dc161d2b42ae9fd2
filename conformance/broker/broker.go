// Package broker runs a real berthd for a suite: it builds the programs of this tree, starts a broker
// with a state of its own, kills it as kill -9 does, starts it again on the same ledger, and tells
// what it left behind. It knows the broker only as a user does, by its programs and its API, and it
// never touches a broker that it did not start.
package broker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/client"
)

// Tuning.
const (
	readyMost = 30 * time.Second      // for the broker to say that it is ready; race builds are slow
	stopMost  = 30 * time.Second      // for it to stop after SIGTERM
	quietMost = 20 * time.Second      // for leftovers to be gone
	lookEvery = 50 * time.Millisecond // at something that is waited for
	logTail   = 16 << 10              // of the broker's log shown by a failed test
	destroyIn = 60 * time.Second      // for what a test has left running
)

// BuildTags are those of the programs, in every build of them: the Makefile's are the same.
const BuildTags = "grpcnotrace"

// Programs are the paths of the three programs.
type Programs struct{ Berthd, Berth, Guest string }

// Build builds the programs of this tree into dir, static as in a release.
func Build(ctx context.Context, dir string) (Programs, error) {
	root, err := ModuleRoot(ctx)
	if err != nil {
		return Programs{}, err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-tags", BuildTags, "-trimpath", "-o", dir+string(filepath.Separator),
		"./daemon/cmd/berthd", "./client/cmd/berth", "./providers/guest/cmd/berth-guest")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return Programs{}, fmt.Errorf("build the programs: %w: %s", err, out)
	}
	return Programs{
		Berthd: filepath.Join(dir, "berthd"), Berth: filepath.Join(dir, "berth"), Guest: filepath.Join(dir, "berth-guest"),
	}, nil
}

// ModuleRoot is the directory of the module that the working directory lies in. Errors: there is none.
func ModuleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	file := strings.TrimSpace(string(out))
	if filepath.Base(file) != "go.mod" { // the go command names the null device then
		return "", errors.New("find the module: no go.mod at or above the working directory")
	}
	return filepath.Dir(file), nil
}

// Broker is one broker with a state of its own.
type Broker struct {
	Programs Programs
	Dir      string // short, for sockets; everything of this broker lies below it
	Address  string

	mu       sync.Mutex
	process  *process
	args     []string
	instance string // of the ledger, once it is known
}

// process is one life of the broker.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it is gone
	code   int           // then its exit code, 137 for kill -9
}

// New makes a broker that is not yet started. When the test ends, what still runs of it is destroyed,
// and a test that left something behind fails.
func New(t testing.TB, programs Programs, args ...string) *Broker {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "berth-t-")
	if err != nil {
		t.Fatal(err)
	}
	b := &Broker{Programs: programs, Dir: dir, Address: "unix://" + filepath.Join(dir, "b.sock"), args: args}
	t.Cleanup(func() { b.strike(t) })
	return b
}

// State is the broker's state directory.
func (b *Broker) State() string { return filepath.Join(b.Dir, "state") }

// Command is a berthd with this broker's flags, not yet started.
func (b *Broker) Command(extra ...string) *exec.Cmd {
	args := append([]string{
		"--state", b.State(), "--run", filepath.Join(b.Dir, "run"), "--listen", b.Address, "--log-level", "debug",
	}, b.args...)
	return exec.Command(b.Programs.Berthd, append(args, extra...)...)
}

// Start starts the broker and waits until it says that it is ready. With a failpoint that it reaches
// before, it is gone instead: see Exited.
func (b *Broker) Start(t testing.TB, env ...string) {
	t.Helper()
	if err := b.TryStart(env...); err != nil {
		t.Fatalf("%v\n%s", err, b.Log())
	}
}

// TryStart is Start with an error instead of a failed test.
func (b *Broker) TryStart(env ...string) error {
	log, err := os.OpenFile(filepath.Join(b.Dir, "berthd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	cmd := b.Command()
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{cmd: cmd, exited: make(chan struct{})}
	ready := make(chan bool, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- strings.HasPrefix(line, "berthd: ready on ")
		_ = cmd.Wait() // its exit code is what is asked for
		p.code = exitCode(cmd.ProcessState)
		close(p.exited)
	}()
	b.mu.Lock()
	b.process = p
	b.mu.Unlock()
	timer := time.NewTimer(readyMost)
	defer timer.Stop()
	select {
	case ok := <-ready:
		if !ok {
			<-p.exited
			return fmt.Errorf("berthd exited with %d before it was ready", p.code)
		}
		return b.learnInstance()
	case <-timer.C:
		return fmt.Errorf("berthd is not ready after %s", readyMost)
	}
}

func exitCode(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}

func (b *Broker) current() *process {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.process
}

// Pid is the running broker's process id.
func (b *Broker) Pid() int { return b.current().cmd.Process.Pid }

// Exited is closed when the broker that was last started is gone.
func (b *Broker) Exited() <-chan struct{} { return b.current().exited }

// ExitCode is what the broker that is gone exited with; 137 for kill -9 and for a failpoint.
func (b *Broker) ExitCode() int {
	p := b.current()
	<-p.exited
	return p.code
}

// Kill ends the broker as kill -9 does, and waits until it is gone.
func (b *Broker) Kill(t testing.TB) {
	t.Helper()
	if err := b.current().cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatalf("kill -9 the broker: %v", err)
	}
	<-b.Exited()
}

// Stop ends the broker with SIGTERM and fails the test if it does not exit with 0 in time.
func (b *Broker) Stop(t testing.TB) {
	t.Helper()
	if err := b.current().cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("stop the broker: %v", err)
	}
	timer := time.NewTimer(stopMost)
	defer timer.Stop()
	select {
	case <-b.Exited():
		if code := b.ExitCode(); code != 0 {
			t.Fatalf("the broker exited with %d after SIGTERM\n%s", code, b.Log())
		}
	case <-timer.C:
		t.Fatalf("the broker has not stopped %s after SIGTERM\n%s", stopMost, b.Log())
	}
}

// Client is a new client of the broker, closed when the test ends. It waits for a broker that is
// being started again.
func (b *Broker) Client(t testing.TB) *client.Client {
	t.Helper()
	c, err := client.Dial(b.Address, client.WithPatience(readyMost, readyMost))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Log is the end of the broker's log.
func (b *Broker) Log() string {
	text, err := os.ReadFile(filepath.Join(b.Dir, "berthd.log"))
	if err != nil {
		return err.Error()
	}
	if len(text) > logTail {
		text = text[len(text)-logTail:]
	}
	return string(text)
}

// Processes lists the processes that were started with a path of this broker, berthd itself left
// out, by pid.
func (b *Broker) Processes() map[int]string {
	found := map[int]string{}
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		text, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(text, []byte(b.Dir)) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if p := b.current(); err == nil && (p == nil || p.cmd.Process.Pid != pid) {
			found[pid] = string(bytes.ReplaceAll(text, []byte{0}, []byte{' '}))
		}
	}
	return found
}

// Leftovers lists what is there of machines: processes, sockets, directories and cgroups.
func (b *Broker) Leftovers() []string {
	var left []string
	for pid, command := range b.Processes() {
		left = append(left, fmt.Sprintf("process %d: %s", pid, command))
	}
	for _, provider := range []string{"local", "fake"} {
		machines, _ := os.ReadDir(filepath.Join(b.State(), provider))
		for _, machine := range machines {
			if machine.IsDir() { // the fake one has files of its own there
				left = append(left, "machine directory "+machine.Name())
			}
		}
	}
	_ = filepath.WalkDir(filepath.Join(b.Dir, "run"), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type()&fs.ModeSocket != 0 {
			left = append(left, "socket "+path)
		}
		return nil
	})
	return append(left, b.containers()...)
}

// containers says what containers of this broker are there; none where it has no docker machines.
func (b *Broker) containers() []string {
	ids, err := b.Containers()
	if err != nil {
		return []string{err.Error()}
	}
	var left []string
	for _, id := range ids {
		left = append(left, "container "+id)
	}
	return left
}

// Containers lists the ids of this broker's containers, by its label, also of those that have ended;
// none where it has no docker machines.
func (b *Broker) Containers() ([]string, error) {
	if !slices.Contains(b.args, "docker") {
		return nil, nil
	}
	out, err := exec.Command("docker", "ps", "-aq", "--no-trunc", "--filter", b.label()).Output()
	if err != nil {
		return nil, fmt.Errorf("list the containers: %w", err)
	}
	return strings.Fields(string(out)), nil
}

// label is the filter for this broker's containers.
func (b *Broker) label() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return "label=dev.berth.broker=" + b.instance
}

// ContainerDeaths is how often, since then, a container of this broker ended without the engine having
// killed it.
func (b *Broker) ContainerDeaths(since time.Time) (int, error) {
	out, err := exec.Command("docker", "events", "--filter", b.label(), "--filter", "event=die", "--filter", "event=kill",
		"--since", strconv.FormatInt(since.Unix(), 10), "--until", strconv.FormatInt(time.Now().Unix()+1, 10),
		"--format", "{{.Action}}").Output()
	if err != nil {
		return 0, fmt.Errorf("ask the engine what died: %w", err)
	}
	deaths, killed := 0, false
	for _, action := range strings.Fields(string(out)) {
		if action == "die" && !killed {
			deaths++
		}
		killed = action == "kill"
	}
	return deaths, nil
}

// learnInstance asks the broker, once, for the id that its machines bear, where their containers are found
// by that.
func (b *Broker) learnInstance() error {
	b.mu.Lock()
	known := b.instance != ""
	b.mu.Unlock()
	if known || !slices.Contains(b.args, "docker") {
		return nil
	}
	out, err := b.Berth(context.Background(), "info", "-o", "json")
	if err != nil {
		return err
	}
	var info struct {
		InstanceID string `json:"instance_id"`
	}
	if err := json.Unmarshal(out, &info); err != nil {
		return fmt.Errorf("read the broker's id: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.instance = info.InstanceID
	return nil
}

// WantNothingLeft fails the test if there are leftovers that do not go away by themselves.
func (b *Broker) WantNothingLeft(t testing.TB) {
	t.Helper()
	var left []string
	for deadline := time.Now().Add(quietMost); ; {
		if left = b.Leftovers(); len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			break
		}
		Pause(lookEvery)
	}
	t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
}

// strike takes everything down, whatever the test left.
func (b *Broker) strike(t testing.TB) {
	if p := b.current(); p != nil {
		_ = p.cmd.Process.Kill() // gone already is as good
		<-p.exited
	}
	if t.Failed() {
		t.Logf("the end of the broker's log:\n%s", b.Log())
	}
	if len(b.Leftovers()) > 0 {
		b.destroyAll(t)
	}
	for pid := range b.Processes() {
		t.Errorf("process %d was left behind: %s", pid, b.Processes()[pid])
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := os.RemoveAll(b.Dir); err != nil {
		t.Errorf("remove the broker's directory: %v", err)
	}
}

// destroyAll starts the broker once more and lets it destroy what the test had not.
func (b *Broker) destroyAll(t testing.TB) {
	if err := b.TryStart(); err != nil {
		t.Errorf("start the broker to clean up: %v", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyIn)
	defer cancel()
	out, err := b.Berth(ctx, "ls", "-o", "id")
	if err != nil {
		t.Errorf("list what is left: %v", err)
	}
	for _, id := range strings.Fields(string(out)) {
		if _, err := b.Berth(ctx, "rm", id); err != nil {
			t.Errorf("destroy what is left: %v", err)
		}
	}
	b.Stop(t)
}

// Berth runs the command line against the broker and returns its standard output.
func (b *Broker) Berth(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, b.Programs.Berth, args...)
	cmd.Env = append(os.Environ(), "BERTH_ADDR="+b.Address)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("berth %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
}

// Pause waits that long, where a suite has nothing to wait for but time.
func Pause(d time.Duration) {
	timer := time.NewTimer(d)
	<-timer.C
}
