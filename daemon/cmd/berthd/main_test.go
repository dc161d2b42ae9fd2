package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/providers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// resolved is what the command line makes of these arguments.
func resolved(t *testing.T, args ...string) (config, error) {
	t.Helper()
	flags := config{}
	cmd := &cobra.Command{Use: "berthd"}
	cmd.SetContext(t.Context())
	bind(cmd, &flags)
	if err := cmd.ParseFlags(args); err != nil {
		return config{}, err
	}
	return resolve(cmd, flags)
}

func file(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "berthd.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestASettingComesFromItsFlagThenTheFileThenTheDefault(t *testing.T) {
	t.Setenv("BERTH_STATE", "/from/environment")
	path := file(t, "state: /from/file\nlisten: [unix:///from/file]\nprovider: [local]\nlog-format: json\nretention: 2h\n")
	for _, test := range []struct {
		name string
		args []string
		want func(config) bool
	}{
		{"the default", []string{"--provider", "local"}, func(c config) bool {
			return c.State == "/from/environment" && c.LogFormat == "text" && c.LogLevel == "info" && c.Retention == defaultRetention &&
				slices.Equal(c.Listen, []string{"unix://" + filepath.Join(defaultRun(), "berthd.sock")})
		}},
		{"the file", []string{"--config", path}, func(c config) bool {
			return c.State == "/from/file" && slices.Equal(c.Listen, []string{"unix:///from/file"}) && c.LogFormat == "json" &&
				c.LogLevel == "info" && c.Retention == 2*time.Hour && slices.Equal(c.Providers, []string{"local"})
		}},
		{"the flag", []string{"--config", path, "--state", "/from/flag", "--listen", "unix:///a", "--listen", "tcp://127.0.0.1:0", "--token-file", file(t, "0123456789abcdef\n"), "--retention", "3h", "--provider", "docker"},
			func(c config) bool {
				return c.State == "/from/flag" && slices.Equal(c.Listen, []string{"unix:///a", "tcp://127.0.0.1:0"}) &&
					c.LogFormat == "json" && c.Retention == 3*time.Hour && slices.Equal(c.Providers, []string{"docker"})
			}},
		{"the flag, also where it says the default", []string{"--config", path, "--log-format", "text", "--retention", defaultRetention.String()},
			func(c config) bool { return c.LogFormat == "text" && c.Retention == defaultRetention }},
		{"docker machines by default", []string{"--provider", "local"}, func(c config) bool {
			return c.Docker.Network == "" && c.Docker.Memory == 4<<30 && c.Docker.PIDs == 4096
		}},
		{"docker machines as the file has them, and where both say it as the flag does",
			[]string{"--provider", "local", "--config", file(t, "docker-network: bridge\ndocker-memory: 8GiB\ndocker-pids: 100\n"), "--docker-pids", "0"},
			func(c config) bool {
				return c.Docker.Network == "bridge" && c.Docker.Memory == 8<<30 && c.Docker.PIDs == 0
			}},
		{"an empty file", []string{"--config", file(t, ""), "--provider", "local"}, func(c config) bool { return c.LogLevel == "info" }},
		{"another run directory", []string{"--run", "/r", "--provider", "local"}, func(c config) bool {
			return slices.Equal(c.Listen, []string{"unix:///r/berthd.sock"})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := resolved(t, test.args...)
			if err != nil || !test.want(c) {
				t.Errorf("it is %+v (%v)", c, err)
			}
		})
	}
	c, err := resolved(t, "--state", "here", "--provider", "local")
	if err != nil || !filepath.IsAbs(c.State) || filepath.Base(c.State) != "here" {
		t.Errorf("a relative directory is %q (%v)", c.State, err)
	}
}

func TestWhatMakesNoSenseIsRefusedByItsFlag(t *testing.T) {
	long, token := "unix:///"+strings.Repeat("s", maxSocketPath), file(t, "0123456789abcdef")
	for _, test := range []struct {
		name string
		args []string
		want string
	}{
		{"a format of no name", []string{"--log-format", "xml"}, "--log-format"},
		{"a level of no name", []string{"--log-level", "loud"}, "--log-level"},
		{"a retention of minutes", []string{"--retention", "59m"}, "--retention"},
		{"a retention of few jobs", []string{"--retention-jobs", "999"}, "--retention-jobs"},
		{"a retention of little output", []string{"--retention-output", "1MiB"}, "--retention-output"},
		{"a retention of more output than can be counted", []string{"--retention-output", "999999999999999999999GiB"}, "too much"},
		{"a retention of just more than can be counted", []string{"--retention-output", "8388608TiB"}, "too much"},
		{"a file with more output than can be counted", []string{"--config", file(t, "retention-output: 8388608TiB\n")}, "too much"},
		{"a file with no size", []string{"--config", file(t, "retention-output: much\n")}, "--config"},
		{"docker machines with too little memory for a guest", []string{"--docker-memory", "6MiB"}, "--docker-memory: 6MiB is too little for a machine and its guest: at least 32MiB"},
		{"docker machines with too few processes for a guest", []string{"--docker-pids", "1"}, "--docker-pids: 1 are too few for a machine and its guest: at least 32"},
		{"docker machines with more processes than an engine can count", []string{"--docker-pids", "18446744073709551615"}, "--docker-pids"},
		{"docker machines on the host's own network", []string{"--docker-network", "host"}, "--docker-network"},
		{"a provider of no name", []string{"--provider", "cloud"}, "--provider"},
		{"the provider for tests in a build that is not for tests", []string{"--provider", "fake"}, "go build -tags faults"},
		{"a provider twice", []string{"--provider", "local", "--provider", "local"}, "twice"},
		{"a scheme of no name", []string{"--listen", "http://127.0.0.1:1"}, "--listen"},
		{"a path that is relative", []string{"--listen", "unix://a/b"}, "absolute"},
		{"a path that is too long", []string{"--listen", long}, "107"},
		{"an address that all can reach", []string{"--listen", "tcp://0.0.0.0:1", "--token-file", token}, "loopback"},
		{"an address of no host", []string{"--listen", "tcp://:1", "--token-file", token}, "loopback"},
		{"a name that may be anybody's", []string{"--listen", "tcp://example.com:1", "--token-file", token}, "loopback"},
		{"a name that begins like the loopback's", []string{"--listen", "tcp://127.0.0.1.example.com:1", "--token-file", token}, "loopback"},
		{"an address of the loopback without a token", []string{"--listen", "tcp://127.0.0.1:1"}, "--token-file"},
		{"an address beyond loopback with a certificate and without a token", []string{"--listen", "tcp://0.0.0.0:1", "--tls-cert", token, "--tls-key", token}, "--token-file"},
		{"a token file that is not there", []string{"--token-file", "/no/such/file"}, "--token-file"},
		{"a token that is too short", []string{"--token-file", file(t, "short")}, "at least 16"},
		{"a certificate without its key", []string{"--tls-cert", token}, "--tls-key"},
		{"a key without its certificate", []string{"--tls-key", token}, "--tls-cert"},
		{"clients' certificates without one of its own", []string{"--tls-client-ca", token}, "--tls-cert"},
		{"a certificate that is none", []string{"--tls-cert", token, "--tls-key", token}, "--tls-cert"},
		{"an address without a port", []string{"--listen", "tcp://127.0.0.1"}, "--listen"},
		{"a port of no number", []string{"--listen", "tcp://127.0.0.1:http"}, "port"},
		{"a port beyond the last", []string{"--listen", "tcp://127.0.0.1:65536"}, "port"},
		{"a port below the first", []string{"--listen", "tcp://127.0.0.1:-1"}, "port"},
		{"a file that is not there", []string{"--config", "/no/such/file"}, "--config"},
		{"a file with a name that is not known", []string{"--config", file(t, "stat: /x\n")}, `"stat"`},
		{"a file that is no YAML", []string{"--config", file(t, "{")}, "--config"},
		{"a file with a number for a list", []string{"--config", file(t, "listen: {a: 1}\n")}, "--config"},
		{"a file with a duration of no unit", []string{"--config", file(t, "retention: x\n")}, "--config"},
		{"a file with a bad value", []string{"--config", file(t, "log-level: loud\n")}, "--log-level"},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := test.args
			if !slices.Contains(args, "--provider") {
				args = append(args, "--provider", "local")
			}
			_, err := resolved(t, args...)
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

func TestAddressesThatCanBeServed(t *testing.T) {
	unix, loopback, secured := config{}, config{TokenFile: "token"}, config{TokenFile: "token", TLS: tlsConfig{Cert: "cert"}}
	for address, c := range map[string]config{
		"unix:///run/b.sock": unix, "unix:///" + strings.Repeat("s", maxSocketPath-1): unix,
		"tcp://127.0.0.1:0": loopback, "tcp://127.9.9.9:80": loopback, "tcp://[::1]:65535": loopback, "tcp://localhost:7000": loopback,
		"tcp://0.0.0.0:7000": secured, "tcp://:7000": secured, "tcp://broker.example.com:443": secured, "tcp://localhost:1": secured,
	} {
		if err := c.checkAddress(address); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
}

func TestEveryFlagIsASettingOfTheFileAndIsOverridden(t *testing.T) {
	flags := config{}
	cmd := &cobra.Command{Use: "berthd"}
	bind(cmd, &flags)
	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "config" && !slices.Contains(configNames, flag.Name) {
			t.Errorf("--%s cannot be set in the file", flag.Name)
		}
	})
	for _, name := range configNames {
		if cmd.Flags().Lookup(name) == nil {
			t.Errorf("%s is no flag", name)
		}
	}
}

func TestASocketThatADeadDaemonLeftIsReplacedAndNoOtherFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", "b.sock")
	left, err := listen(t.Context(), []string{"unix://" + path}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("its mode is %v (%v)", info.Mode(), err)
	}
	if _, err := listen(t.Context(), []string{"tcp://127.0.0.1:0", "unix://" + path}, nil); !errors.Is(err, syscall.EADDRINUSE) && (err == nil || !strings.Contains(err.Error(), "in use")) {
		t.Errorf("a socket that somebody serves: %v", err)
	}
	left.open[0].(*net.UnixListener).SetUnlinkOnClose(false)
	left.close()
	again, err := listen(t.Context(), []string{"unix://" + path, "tcp://127.0.0.1:0"}, nil)
	if err != nil {
		t.Fatalf("a socket that nobody serves: %v", err)
	}
	if strings.HasSuffix(again.addresses[1], ":0") || !strings.HasPrefix(again.String(), "unix://"+path+", tcp://127.0.0.1:") {
		t.Errorf("it says that it serves %s", again)
	}
	again.close()
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(t.Context(), []string{"unix://" + plain}, nil); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file that is none: %v", err)
	}
	if text, err := os.ReadFile(plain); err != nil || string(text) != "mine" {
		t.Errorf("the file has become %q (%v)", text, err)
	}
}

func TestADirectoryForSocketsIsNobodyElses(t *testing.T) {
	dir := t.TempDir()
	for mode, ok := range map[os.FileMode]bool{0o700: true, 0o755: true, 0o777: false, 0o770: false} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		if err := onlyOurs(dir); (err == nil) != ok {
			t.Errorf("%o: %v", mode, err)
		}
	}
	if err := onlyOurs(filepath.Join(dir, "none")); err == nil {
		t.Error("one that is not there is accepted")
	}
}

func TestTheGuestIsFoundWhereItWasSaidToBeByItsArchitecture(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "berth-guest")
	if _, err := findGuest(base, "amd64"); err == nil {
		t.Error("a guest that is not there was found")
	}
	write := func(path string, mode os.FileMode) {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	write(base, 0o600)
	if _, err := findGuest(base, "amd64"); err == nil {
		t.Error("a guest that cannot be executed was found")
	}
	if err := os.Chmod(base, 0o700); err != nil {
		t.Fatal(err)
	}
	find, err := findGuest(base, "arm64")
	if err != nil {
		t.Fatal(err)
	}
	if path, err := find("arm64"); err != nil || path != base {
		t.Errorf("for the host: %s (%v)", path, err)
	}
	if path, err := find("amd64"); err == nil {
		t.Errorf("for another architecture: %s", path)
	}
	write(base+"-amd64", 0o700)
	if path, err := find("amd64"); err != nil || path != base+"-amd64" {
		t.Errorf("for another architecture that is there: %s (%v)", path, err)
	}
}

func TestAProviderThatCannotBeStartedIsThereAndUnhealthy(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	noGuest := func(string) (string, error) { return "", errors.New("no guest") }
	// A file in the way of the provider's directory.
	state := t.TempDir()
	if err := os.WriteFile(filepath.Join(state, "local"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	started := startProviders([]string{"local", "docker"}, machinery{state: state, brokerID: "b", guest: noGuest, log: log})
	defer func() {
		if err := closeProviders(started); err != nil {
			t.Error(err)
		}
	}()
	if len(started) != 2 || started[0].Name != "local" || started[1].Name != "docker" {
		t.Fatalf("started are %v", started)
	}
	broken := started[0].Provider
	info, err := broken.Info(t.Context())
	if err != nil || info.Healthy || info.Name != "local" || info.Message == "" {
		t.Errorf("it says %+v (%v)", info, err)
	}
	var unavailable *providers.UnavailableError
	_, create := broken.Create(t.Context(), providers.MachineSpec{})
	_, inspect := broken.Inspect(t.Context(), "m_1")
	_, list := broken.List(t.Context())
	_, dialer := broken.Dialer(t.Context(), providers.Machine{})
	for name, err := range map[string]error{
		"create": create, "inspect": inspect, "list": list, "dialer": dialer, "destroy": broken.Destroy(t.Context(), providers.Machine{}),
	} {
		if !errors.As(err, &unavailable) || errors.Is(err, providers.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestADaemonServesAndStops(t *testing.T) {
	dir, err := os.MkdirTemp("", "bd-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	guest := filepath.Join(dir, "berth-guest")
	if err := os.WriteFile(guest, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	c, err := resolved(t, "--state", filepath.Join(dir, "state"), "--run", filepath.Join(dir, "run"), "--provider", "local", "--local-isolation", "none", "--guest", guest)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ready := make(chan string, 1)
	done := make(chan error, 1)
	go func() { done <- serve(ctx, c, told(ready), &strings.Builder{}) }()
	select {
	case line := <-ready:
		if !strings.HasPrefix(line, "berthd: ready on unix://"+dir) {
			t.Errorf("it says %q", line)
		}
	case err := <-done:
		t.Fatalf("it ended with %v", err)
	}
	second := c
	second.Listen = []string{"tcp://127.0.0.1:0"}
	if err := serve(t.Context(), second, told(ready), &strings.Builder{}); err == nil || !strings.Contains(err.Error(), "--state") {
		t.Errorf("a second daemon on its ledger: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("it ended with %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "run")); err != nil || len(left) > 0 {
		t.Errorf("it left %v (%v)", left, err)
	}
	if err := os.Remove(filepath.Join(dir, "state", "key")); err != nil {
		t.Fatal(err)
	}
	if err := serve(t.Context(), c, told(ready), &strings.Builder{}); err == nil || !strings.Contains(err.Error(), "key") {
		t.Errorf("with another key: %v", err)
	}
}

// told is a writer that tells what is written to it.
type told chan string

func (c told) Write(p []byte) (int, error) {
	c <- string(p)
	return len(p), nil
}

func TestAFlagSaysWhatItTakes(t *testing.T) {
	for _, test := range []struct{ flag, says string }{
		{"--docker-pids=-5", `--docker-pids "-5": it takes a whole number from 0 on (see berthd --help)`},
		{"--docker-bridge=maybe", `--docker-bridge "maybe": it takes true or false, or nothing (see berthd --help)`},
		{"--docker-memory=much", `--docker-memory "much": `},
		{"--no-such", "unknown flag: --no-such (see berthd --help)"},
	} {
		cmd := command()
		cmd.SetArgs([]string{test.flag})
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		err := cmd.ExecuteContext(t.Context())
		if err == nil || !strings.HasPrefix(err.Error(), test.says) || strings.Contains(err.Error(), "strconv") {
			t.Errorf("%s: %v, want %s", test.flag, err, test.says)
		}
	}
}
