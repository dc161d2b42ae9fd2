package main

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// asProgram makes the test's own program berth-guest.
const asProgram = "BERTH_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func program(arguments ...string) *exec.Cmd {
	c := exec.Command(os.Args[0], arguments...)
	c.Env = []string{asProgram + "=1"}
	return c
}

func TestMistakesAreOneLineAndTheirOwnCode(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "config.json")
	must(t, os.WriteFile(bad, []byte(`{"token": 12, "secret`), 0o600))
	empty := filepath.Join(dir, "empty.json")
	must(t, os.WriteFile(empty, []byte(`{}`), 0o600))
	socket := filepath.Join(dir, "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	defer func() { _ = listener.Close() }()
	for _, test := range []struct {
		arguments []string
		code      int
		says      string
	}{
		{nil, 2, "usage: "},
		{[]string{"dance"}, 2, "unknown command"},
		{[]string{"init"}, 2, "--config"},
		{[]string{"init", "--colour"}, 2, "colour"},
		{[]string{"init", "--config", "/no/such"}, 1, "read the boot config"},
		{[]string{"init", "--config", bad}, 1, "no BootConfig"},
		{[]string{"init", "--config", empty}, 1, "machine_id is missing"},
		{[]string{"bridge", "--socket", "/no/such"}, 2, "--nonce"},
		{[]string{"bridge", "--socket", "/no/such", "--nonce", "n"}, 1, "reach the guest"},
		{[]string{"bridge", "--socket", "/no/such", "--nonce", "n", "--guest", "-1"}, 2, "--guest is a process id"},
		{[]string{"bridge", "--socket", socket, "--nonce", "n", "--guest", "1"}, 1, "and the guest is process 1"},
		{[]string{"bridge", "--socket", "/no/such", "--nonce", "n", "more"}, 2, "unexpected argument"},
		{[]string{"version"}, 0, "berth-guest "},
	} {
		out, err := program(test.arguments...).CombinedOutput()
		code := 0
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			code = exit.ExitCode()
		}
		if code != test.code || !strings.Contains(string(out), test.says) || strings.Contains(string(out), "secret") {
			t.Errorf("%v: exit %d, %s", test.arguments, code, out)
		}
	}
}

// bridged starts a bridge, and returns the guest's end of it.
func bridged(t *testing.T, arguments ...string) (c *exec.Cmd, in io.WriteCloser, out *bufio.Reader, guest net.Conn) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	c = program(append([]string{"bridge", "--socket", socket, "--nonce", "N1"}, arguments...)...)
	in, err = c.StdinPipe()
	must(t, err)
	pipe, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	guest, err = listener.Accept()
	must(t, err)
	t.Cleanup(func() { _ = guest.Close() })
	out = bufio.NewReader(pipe)
	sentinel := make([]byte, len("\x1eREADY:N1\x1e"))
	_, err = io.ReadFull(out, sentinel)
	must(t, err)
	if string(sentinel) != "\x1eREADY:N1\x1e" {
		t.Errorf("sentinel %q", sentinel)
	}
	return c, in, out, guest
}

func TestABridgePassesBytesBothWaysUntilStdinEnds(t *testing.T) {
	c, in, out, guest := bridged(t)
	_, err := io.WriteString(in, "to the guest\n")
	must(t, err)
	line, err := bufio.NewReader(guest).ReadString('\n')
	must(t, err)
	_, err = io.WriteString(guest, "back: "+line)
	must(t, err)
	if got, err := out.ReadString('\n'); err != nil || got != "back: to the guest\n" {
		t.Errorf("got %q, %v", got, err)
	}
	must(t, in.Close())
	must(t, c.Wait())
}

func TestABridgeSpeaksToTheGuestsProcess(t *testing.T) {
	c, in, _, _ := bridged(t, "--guest", strconv.Itoa(os.Getpid()))
	must(t, in.Close())
	must(t, c.Wait())
}

func TestABridgeEndsWhenTheGuestDoes(t *testing.T) {
	c, _, _, guest := bridged(t)
	must(t, guest.Close())
	must(t, c.Wait())
}

func TestABridgeThatHearsNothingEnds(t *testing.T) {
	c, in, _, guest := bridged(t, "--idle", "300ms")
	begun := time.Now()
	for range 4 { // what comes in time keeps it
		time.Sleep(150 * time.Millisecond)
		_, err := io.WriteString(in, "x")
		must(t, err)
		_, err = io.WriteString(guest, "what comes from the guest does not count")
		must(t, err)
	}
	err := c.Wait()
	if took := time.Since(begun); err == nil || took < 800*time.Millisecond {
		t.Errorf("ended with %v after %v", err, took)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// BenchmarkIdle reports what a guest takes that waits for a broker.
func BenchmarkIdle(b *testing.B) {
	dir := b.TempDir()
	config := filepath.Join(dir, "config.json")
	text := `{"machineId": "m_1", "token": "c2VjcmV0", "listenSocket": "` + dir + `/s", "spoolDir": "` + dir + `/spool", "workspace": "` + dir + `/work"}`
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
	c := program("init", "--config", config)
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	}()
	for b.Loop() {
		time.Sleep(time.Second)
	}
	rollup, err := os.ReadFile("/proc/" + strconv.Itoa(c.Process.Pid) + "/smaps_rollup")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(rollup)) {
		if f := strings.Fields(line); len(f) == 3 && (f[0] == "Rss:" || f[0] == "Pss:") {
			kib, _ := strconv.ParseFloat(f[1], 64)
			b.ReportMetric(kib, strings.ToLower(f[0][:3])+"-KiB")
		}
	}
}
