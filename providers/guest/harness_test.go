package guest

import (
	"bufio"
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/conformance/testenv"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// serveVariable makes the test's own program a guest: its value is the config's file.
const serveVariable = "BERTH_TEST_SERVE"

// keepaliveVariable changes its keepalive times.
const keepaliveVariable = "BERTH_TEST_KEEPALIVE"

// quiesceVariable changes for how long it may be quiesced.
const quiesceVariable = "BERTH_TEST_QUIESCE"

// windowBytes is the broker's window of a stream.
const windowBytes = 8 << 20

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "version" {
		os.Exit(0) // the containment probe
	}
	if file := os.Getenv(serveVariable); file != "" {
		if err := serveForTest(file); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func serveForTest(file string) error {
	if err := UnblockSignals(); err != nil {
		return err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	config := &guestv1.BootConfig{}
	if err := protojson.Unmarshal(data, config); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	every, _ := time.ParseDuration(os.Getenv(keepaliveVariable))
	most, _ := time.ParseDuration(os.Getenv(quiesceVariable))
	return Serve(ctx, config, Options{Build: "test", Log: log, KeepaliveTime: every, KeepaliveTimeout: every, MaxQuiesce: most})
}

// machine is a guest in a process of its own, and the host that it dials.
type machine struct {
	t         testing.TB
	dir       string
	config    *guestv1.BootConfig
	listener  net.Listener
	process   *exec.Cmd
	how       manner
	calls     guestv1.GuestServiceClient
	conn      *grpc.ClientConn
	hello     *guestv1.HelloResponse
	challenge []byte // of the last helloRequest
}

// manner is how the guest's process is started.
type manner struct {
	credential *syscall.Credential // nil: as this process
	script     string              // bash's, which ends with exec "$0"; empty: none
	keepalive  time.Duration       // between pings, and for an answer; 0: the defaults
	quiesce    time.Duration       // at most; 0: the default
}

// boot starts a guest. change may alter its config.
func boot(t testing.TB, change ...func(*guestv1.BootConfig)) *machine {
	t.Helper()
	return bootAs(t, manner{}, change...)
}

func bootAs(t testing.TB, how manner, change ...func(*guestv1.BootConfig)) *machine {
	t.Helper()
	// Short, since a socket's path is.
	dir, err := os.MkdirTemp("", "guest")
	must(t, err)
	m := &machine{t: t, dir: dir, how: how, config: &guestv1.BootConfig{
		MachineId:  "m_01TEST" + strconv.Itoa(int(machineNumber.Add(1))),
		Token:      []byte("0123456789abcdef0123456789abcdef"),
		DialSocket: filepath.Join(dir, "host.sock"),
		SpoolDir:   filepath.Join(dir, "spool"),
		Workspace:  filepath.Join(dir, "work"),
		Generation: 3,
	}}
	for _, c := range change {
		c(m.config)
	}
	if how.credential != nil {
		must(t, os.Chown(dir, int(how.credential.Uid), int(how.credential.Gid)))
	}
	t.Cleanup(func() {
		m.end()
		_ = os.RemoveAll(dir)
	})
	m.start()
	return m
}

// withCgroups gives the guest a cgroup2 directory, or skips the test where none can be made.
func withCgroups(t testing.TB) func(*guestv1.BootConfig) {
	t.Helper()
	testenv.Cgroup2(t)
	dir := cgroupDir(t)
	if dir == "" {
		t.Skip("no cgroup2 directory can be made here")
	}
	return func(c *guestv1.BootConfig) { c.CgroupDir = dir }
}

var cgroupNumber, machineNumber atomic.Uint32

func cgroupDir(t testing.TB) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if !strings.Contains(line, " - cgroup2 ") || len(f) < 5 {
			continue
		}
		dir := filepath.Join(f[4], fmt.Sprintf("berth-test-%d-%d", os.Getpid(), cgroupNumber.Add(1)))
		if os.Mkdir(dir, 0o755) == nil {
			t.Cleanup(func() {
				for _, below := range []string{"guest", "jobs", ""} {
					path := filepath.Join(dir, below)
					eventually(t, "remove "+path, func() bool {
						err := os.Remove(path)
						return err == nil || os.IsNotExist(err)
					})
				}
			})
			return dir
		}
	}
	return ""
}

// start boots the guest process and says Hello.
func (m *machine) start() {
	m.t.Helper()
	if m.listener == nil {
		m.listen()
	}
	data, err := protojson.Marshal(m.config)
	must(m.t, err)
	file := filepath.Join(m.dir, "config.json")
	must(m.t, os.WriteFile(file, data, 0o600))
	m.process = exec.Command(m.program())
	if m.how.script != "" {
		m.process = exec.Command("bash", "-c", m.how.script, m.program())
	}
	m.process.Env = []string{serveVariable + "=" + file, "SECRET_OF_THE_GUEST=x", keepaliveVariable + "=" + m.how.keepalive.String(),
		quiesceVariable + "=" + m.how.quiesce.String()}
	m.process.Stderr = os.Stderr
	if m.config.GetMountProc() {
		m.process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	}
	if m.how.credential != nil {
		m.process.SysProcAttr = &syscall.SysProcAttr{Credential: m.how.credential}
		must(m.t, os.Chown(file, int(m.how.credential.Uid), int(m.how.credential.Gid)))
		must(m.t, os.Chmod(m.config.GetDialSocket(), 0o666))
	}
	must(m.t, m.process.Start())
	m.connect()
}

// program is the guest's: the test's own, where its user may run it.
func (m *machine) program() string {
	m.t.Helper()
	if m.how.credential == nil {
		return os.Args[0]
	}
	path := filepath.Join(m.dir, "program")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	data, err := os.ReadFile(os.Args[0])
	must(m.t, err)
	must(m.t, os.WriteFile(path, data, 0o755))
	return path
}

func (m *machine) listen() {
	m.t.Helper()
	listener, err := net.Listen("unix", m.config.GetDialSocket())
	must(m.t, err)
	m.listener = listener
}

// accept returns the guest's spare connection.
func (m *machine) accept() net.Conn {
	m.t.Helper()
	must(m.t, m.listener.(*net.UnixListener).SetDeadline(time.Now().Add(4*time.Minute)))
	conn, err := m.listener.Accept()
	must(m.t, err)
	return conn
}

func (m *machine) connect() {
	m.t.Helper()
	m.conn = clientOn(m.t, m.accept())
	m.calls = guestv1.NewGuestServiceClient(m.conn)
	var err error
	m.hello, err = m.calls.Hello(m.t.Context(), m.helloRequest(m.calls))
	must(m.t, err)
}

// helloRequest takes the guest's challenge on that connection.
func (m *machine) helloRequest(calls guestv1.GuestServiceClient) *guestv1.HelloRequest {
	m.t.Helper()
	challenge, err := calls.Challenge(context.Background(), &guestv1.ChallengeRequest{})
	must(m.t, err)
	m.challenge = challenge.GetNonce()
	nonce := make([]byte, nonceLength)
	_, _ = rand.Read(nonce)
	return &guestv1.HelloRequest{
		Protocol: protocol, MachineId: m.config.GetMachineId(), Nonce: nonce,
		Proof: prove(m.config.GetToken(), brokerContext, nonce, m.challenge),
	}
}

func clientOn(t testing.TB, conn net.Conn) *grpc.ClientConn {
	t.Helper()
	given := make(chan net.Conn, 1)
	given <- conn
	client, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(2*windowBytes),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case c := <-given:
				return c, nil
			default:
				return nil, net.ErrClosed
			}
		}))
	must(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// kill ends the guest as a crash does.
func (m *machine) kill() {
	m.t.Helper()
	_ = m.process.Process.Kill()
	_ = m.process.Wait()
	_ = m.conn.Close()
	m.process = nil
	// The dead guest's spare connection is still in the listener's queue.
	_ = m.listener.Close()
	m.listener = nil
}

// end ends the guest as it should be.
func (m *machine) end() {
	m.t.Helper()
	if m.process != nil {
		_ = m.process.Process.Signal(syscall.SIGTERM)
		if err := m.process.Wait(); err != nil {
			m.t.Errorf("the guest ended with %v", err)
		}
		m.process = nil
	}
	if m.conn != nil {
		_ = m.conn.Close()
	}
	if m.listener != nil {
		_ = m.listener.Close()
		m.listener = nil
	}
}

var idNumber atomic.Uint64

const crockfordDigits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// newID returns a job's id of now.
func newID() string { return idAt(time.Now()) }

func idAt(when time.Time) string {
	digits := make([]byte, 26)
	low := idNumber.Add(1)
	for i := 25; i >= 10; i-- {
		digits[i] = crockfordDigits[low&31]
		low >>= 5
	}
	ms := uint64(when.UnixMilli())
	for i := 9; i >= 0; i-- {
		digits[i] = crockfordDigits[ms&31]
		ms >>= 5
	}
	return "job_" + string(digits)
}

func shell(script string) *guestv1.StartRequest {
	return &guestv1.StartRequest{JobId: newID(), Command: &guestv1.Command{Shell: script}}
}

func argv(args ...string) *guestv1.StartRequest {
	return &guestv1.StartRequest{JobId: newID(), Command: &guestv1.Command{Argv: args}}
}

// run runs a command to its end, with up to 1 MiB of output.
func (m *machine) run(r *guestv1.StartRequest) *guestv1.RunResponse {
	m.t.Helper()
	response, err := m.calls.Run(m.t.Context(), &guestv1.RunRequest{Start: r, MaxOutputBytes: 1 << 20})
	must(m.t, err)
	return response
}

func (m *machine) begin(r *guestv1.StartRequest) *guestv1.Status {
	m.t.Helper()
	response, err := m.calls.Start(m.t.Context(), r)
	must(m.t, err)
	return response.GetStatus()
}

func (m *machine) wait(id string) *guestv1.Status {
	m.t.Helper()
	response, err := m.calls.Wait(m.t.Context(), &guestv1.WaitRequest{JobId: id, Wait: durationpb.New(3 * time.Minute)})
	must(m.t, err)
	if !response.GetStatus().GetDone() {
		m.t.Fatalf("job %s is not done", id)
	}
	return response.GetStatus()
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(4 * time.Minute); !check(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("never: %s", what)
			return
		}
	}
}

// processesWith returns the pids whose command line holds a text.
func processesWith(text string) (pids []string) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && strings.Contains(strings.ReplaceAll(string(line), "\x00", " "), text) {
			pids = append(pids, e.Name())
		}
	}
	return pids
}

func lines(t testing.TB, path string) (n int) {
	t.Helper()
	file, err := os.Open(path)
	if os.IsNotExist(err) {
		return 0
	}
	must(t, err)
	defer func() { _ = file.Close() }()
	for s := bufio.NewScanner(file); s.Scan(); {
		n++
	}
	return n
}
