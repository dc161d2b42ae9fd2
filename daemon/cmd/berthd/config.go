package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// version is set by the linker; without it the module's own is used.
var version string

// What is kept by default: receipts and ended sandboxes for a week, and of receipts no more than their
// records and output may take: some 350 MB of ledger, and this much beside it.
const (
	defaultRetention = 7 * 24 * time.Hour
	defaultReceipts  = 100_000
	defaultOutput    = size(10 << 30)
	minReceipts      = 1000
	minOutput        = size(64 << 20)
)

// size is a number of bytes, written with a unit: 10GiB.
type size int64

func (s *size) String() string { return units.BytesSize(float64(*s)) }

func (s *size) Type() string { return "size" }

// Set parses it.
func (s *size) Set(text string) error {
	n, err := units.RAMInBytes(text)
	if err != nil {
		return fmt.Errorf("%q is no size: write it as 10GiB", text)
	}
	// What the library cannot hold it turns into the least number, or on some processors into the greatest.
	if n < 0 || n == math.MaxInt64 {
		return fmt.Errorf("%q is too much: a size is less than 8EiB, 8388608TiB; write it as 10GiB", text)
	}
	*s = size(n)
	return nil
}

// UnmarshalYAML parses it in a file.
func (s *size) UnmarshalYAML(node *yaml.Node) error {
	if err := s.Set(node.Value); err != nil {
		return fmt.Errorf("line %d: %w", node.Line, err)
	}
	return nil
}

// maxSocketPath is the kernel's limit (sizeof sockaddr_un.sun_path, less the closing NUL).
const maxSocketPath = 107

// config is what the daemon may be told, by flags or by a file in YAML with the same names.
type config struct {
	State     string        `yaml:"state"`
	Run       string        `yaml:"run"`
	Listen    []string      `yaml:"listen"`
	TokenFile string        `yaml:"token-file"`
	TLS       tlsConfig     `yaml:",inline"`
	Providers []string      `yaml:"provider"`
	Guest     string        `yaml:"guest"`
	Isolation string        `yaml:"local-isolation"`
	Docker    dockerConfig  `yaml:",inline"`
	LogFormat string        `yaml:"log-format"`
	LogLevel  string        `yaml:"log-level"`
	Retention time.Duration `yaml:"retention"`
	Receipts  int           `yaml:"retention-jobs"`
	Output    size          `yaml:"retention-output"`
	file      string

	token string      // what is in TokenFile
	tls   *tls.Config // what the files of TLS make; nil without them
}

// tlsConfig names the files, in PEM, that TCP listeners identify themselves and their clients with.
type tlsConfig struct {
	Cert     string `yaml:"tls-cert"`
	Key      string `yaml:"tls-key"`
	ClientCA string `yaml:"tls-client-ca"`
}

// dockerConfig is what the docker provider may be told.
type dockerConfig struct {
	Host    string `yaml:"docker-host"`
	Image   string `yaml:"docker-image"`
	Bridge  bool   `yaml:"docker-bridge"`
	Network string `yaml:"docker-network"`
	Memory  size   `yaml:"docker-memory"`
	PIDs    uint64 `yaml:"docker-pids"`
}

// bind declares the flags.
func bind(cmd *cobra.Command, c *config) {
	flags := cmd.Flags()
	flags.StringVar(&c.State, "state", "", "directory of the ledger, the key and kept output (default $BERTH_STATE, else "+defaultState()+")")
	flags.StringVar(&c.Run, "run", "", "directory for sockets, with a short path: machines' sockets lie 49 bytes deeper, and 107 is the limit (default "+defaultRun()+")")
	flags.StringArrayVar(&c.Listen, "listen", nil, "address to serve, unix:///path or tcp://host:port; may be repeated; tcp needs --token-file, and beyond loopback --tls-cert (default unix://"+filepath.Join(defaultRun(), "berthd.sock")+")")
	flags.StringVar(&c.TokenFile, "token-file", "", "file with the bearer token that clients of tcp listeners must give: at least 16 bytes, not readable by everybody")
	flags.StringVar(&c.TLS.Cert, "tls-cert", "", "certificate of tcp listeners, and what it was signed with, in PEM")
	flags.StringVar(&c.TLS.Key, "tls-key", "", "its key, in PEM")
	flags.StringVar(&c.TLS.ClientCA, "tls-client-ca", "", "clients of tcp listeners must also have a certificate that one of these, in PEM, has signed")
	flags.StringArrayVar(&c.Providers, "provider", nil, "provider to start, may be repeated, the first is the default: "+strings.Join(providerNames(), ", ")+" (default local, and docker where an engine answers)")
	flags.StringVar(&c.Guest, "guest", "", "the berth-guest program (default: next to berthd)")
	flags.StringVar(&c.Isolation, "local-isolation", "auto", "what local machines get: auto is the most that this host lets them have, none is plain processes")
	flags.StringVar(&c.Docker.Host, "docker-host", "", "address of the Docker Engine, unix:///path or tcp://host:port (default $DOCKER_HOST, else the local engine)")
	flags.StringVar(&c.Docker.Image, "docker-image", docker.DefaultImage, "image of docker machines that name none")
	flags.BoolVar(&c.Docker.Bridge, "docker-bridge", false, "reach docker machines through the engine also where they could dial out")
	flags.StringVar(&c.Docker.Network, "docker-network", "", "the engine's network that docker machines are put on, as bridge (default a bridge of this broker's own, on which machines cannot reach one another)")
	c.Docker.Memory = size(docker.DefaultMemoryBytes)
	flags.Var(&c.Docker.Memory, "docker-memory", "memory of docker machines that ask for no limit, at least 32MiB; 0 is no limit")
	flags.Uint64Var(&c.Docker.PIDs, "docker-pids", docker.DefaultPIDs, "processes and threads of docker machines that ask for no limit, at least 32; 0 is no limit")
	flags.StringVar(&c.file, "config", "", "YAML file with these same names; flags win over it")
	flags.StringVar(&c.LogFormat, "log-format", "text", "text or json")
	flags.StringVar(&c.LogLevel, "log-level", "info", "debug, info, warn or error")
	flags.DurationVar(&c.Retention, "retention", defaultRetention, "how long receipts and ended sandboxes are kept, at least 1h")
	flags.IntVar(&c.Receipts, "retention-jobs", defaultReceipts, "how many receipts are kept at most, at least 1000; beyond it the oldest are dropped")
	c.Output = defaultOutput
	flags.Var(&c.Output, "retention-output", "how much output receipts keep in all, at least 64MiB; beyond it the oldest receipts lose theirs")
	complete := func(values ...string) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	for name, values := range map[string][]string{
		"provider": providerNames(), "log-format": {"text", "json"}, "local-isolation": {"auto", "none"}, "log-level": {"debug", "info", "warn", "error"},
	} {
		if err := cmd.RegisterFlagCompletionFunc(name, complete(values...)); err != nil {
			panic(err) // a flag of another name: a defect that the first start shows
		}
	}
}

// resolve joins flags, file and defaults, and refuses what makes no sense.
func resolve(cmd *cobra.Command, flags config) (config, error) {
	c := flags
	if flags.file != "" {
		fromFile := flags
		if err := readConfig(flags.file, &fromFile); err != nil {
			return c, err
		}
		c = override(cmd, fromFile, flags)
	}
	if c.State == "" {
		c.State = defaultState()
		if fromEnv := os.Getenv("BERTH_STATE"); fromEnv != "" {
			c.State = fromEnv
		}
	}
	if c.Run == "" {
		c.Run = defaultRun()
	}
	for _, dir := range []*string{&c.State, &c.Run} {
		absolute, err := filepath.Abs(*dir)
		if err != nil {
			return c, fmt.Errorf("find the directory %s: %w", *dir, err)
		}
		*dir = absolute
	}
	if len(c.Listen) == 0 {
		c.Listen = []string{"unix://" + filepath.Join(c.Run, "berthd.sock")}
	}
	if len(c.Providers) == 0 {
		c.Providers = defaultProviders(cmd.Context(), c)
	}
	if err := c.check(); err != nil {
		return c, err
	}
	return c, c.readCredentials()
}

// readConfig reads a file over c. A name that is not known is an error: a typo must not be ignored.
func readConfig(path string, c *config) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var names map[string]yaml.Node
	if err := yaml.Unmarshal(data, &names); err != nil {
		return fmt.Errorf("--config %s: %s", path, oneLine(err))
	}
	for name, node := range names {
		if !slices.Contains(configNames, name) {
			return fmt.Errorf("--config %s, line %d: no setting is called %q (there are %s)", path, node.Line, name, strings.Join(configNames, ", "))
		}
	}
	if err := yaml.Unmarshal(data, c); err != nil {
		return fmt.Errorf("--config %s: %s (durations are written as in 12h)", path, oneLine(err))
	}
	return nil
}

// configNames are the settings of a file: the flags' own names.
var configNames = []string{
	"state", "run", "listen", "provider", "guest", "docker-host", "docker-image", "docker-bridge", "docker-network", "docker-memory", "docker-pids", "log-format", "log-level",
	"retention", "retention-jobs", "retention-output", "local-isolation", "token-file", "tls-cert", "tls-key", "tls-client-ca",
}

// oneLine is the library's error, which is several lines, as this daemon's, which is one.
func oneLine(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	return strings.TrimPrefix(text, "yaml: unmarshal errors: ")
}

// override lets the flags that were given win over the file.
func override(cmd *cobra.Command, c, flags config) config {
	given := cmd.Flags().Changed
	for name, take := range map[string]func(){
		"state": func() { c.State = flags.State }, "run": func() { c.Run = flags.Run },
		"listen": func() { c.Listen = flags.Listen }, "provider": func() { c.Providers = flags.Providers },
		"guest": func() { c.Guest = flags.Guest }, "log-format": func() { c.LogFormat = flags.LogFormat },
		"log-level": func() { c.LogLevel = flags.LogLevel }, "retention": func() { c.Retention = flags.Retention },
		"retention-jobs": func() { c.Receipts = flags.Receipts }, "retention-output": func() { c.Output = flags.Output },
		"local-isolation": func() { c.Isolation = flags.Isolation },
		"docker-host":     func() { c.Docker.Host = flags.Docker.Host }, "docker-image": func() { c.Docker.Image = flags.Docker.Image },
		"docker-bridge": func() { c.Docker.Bridge = flags.Docker.Bridge }, "docker-network": func() { c.Docker.Network = flags.Docker.Network },
		"docker-memory": func() { c.Docker.Memory = flags.Docker.Memory }, "docker-pids": func() { c.Docker.PIDs = flags.Docker.PIDs },
		"token-file": func() { c.TokenFile = flags.TokenFile }, "tls-cert": func() { c.TLS.Cert = flags.TLS.Cert },
		"tls-key": func() { c.TLS.Key = flags.TLS.Key }, "tls-client-ca": func() { c.TLS.ClientCA = flags.TLS.ClientCA },
	} {
		if given(name) {
			take()
		}
	}
	return c
}

func (c config) check() error {
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return fmt.Errorf("--log-format: %q is not text or json", c.LogFormat)
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return fmt.Errorf("--log-level: %q is not debug, info, warn or error", c.LogLevel)
	}
	if c.Isolation != "auto" && c.Isolation != "none" {
		return fmt.Errorf("--local-isolation: %q is not auto or none", c.Isolation)
	}
	if c.Retention < time.Hour {
		return fmt.Errorf("--retention: %s is too short: at least 1h, or a client may never see its receipt", c.Retention)
	}
	if c.Receipts < minReceipts {
		return fmt.Errorf("--retention-jobs: %d is too few: at least %d, or a client may never see its receipt", c.Receipts, minReceipts)
	}
	if least := minOutput; c.Output < least {
		return fmt.Errorf("--retention-output: %s is too little: at least %s, what one stream keeps by default", &c.Output, &least)
	}
	if err := c.Docker.check(); err != nil {
		return err
	}
	for i, name := range c.Providers {
		if !slices.Contains(providerNames(), name) {
			if name == fakeProvider {
				return errors.New("--provider: fake is for tests and not in this build: go build -tags faults ./daemon/cmd/berthd has it")
			}
			return fmt.Errorf("--provider: there is no provider %q (this build has %s)", name, strings.Join(providerNames(), ", "))
		}
		if slices.Contains(c.Providers[:i], name) {
			return fmt.Errorf("--provider: %q is named twice", name)
		}
	}
	for _, address := range c.Listen {
		if err := c.checkAddress(address); err != nil {
			return err
		}
	}
	return nil
}

// check refuses limits that no machine could live in, and what is no network.
func (d dockerConfig) check() error {
	if least := size(providers.MinMemoryBytes); d.Memory != 0 && d.Memory < least {
		return fmt.Errorf("--docker-memory: %s is too little for a machine and its guest: at least %s, or 0 for no limit", &d.Memory, &least)
	}
	if d.PIDs != 0 && d.PIDs < providers.MinPIDs {
		return fmt.Errorf("--docker-pids: %d are too few for a machine and its guest: at least %d, or 0 for no limit", d.PIDs, providers.MinPIDs)
	}
	if d.PIDs > math.MaxInt64 {
		return fmt.Errorf("--docker-pids: %d is more than there can be: 0 is no limit", d.PIDs)
	}
	if d.Network == "" {
		return nil
	}
	if err := docker.CheckNetwork(d.Network); err != nil {
		return fmt.Errorf("--docker-network: %w", err)
	}
	return nil
}

// checkAddress refuses an address that can't be served safely.
func (c config) checkAddress(address string) error {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		switch {
		case !filepath.IsAbs(path):
			return fmt.Errorf("--listen: %q is not an absolute path (write unix:///path)", address)
		case len(path) > maxSocketPath:
			return fmt.Errorf("--listen: the socket path %s has %d bytes, and the kernel's limit is %d: choose a shorter one", path, len(path), maxSocketPath)
		}
		return nil
	}
	hostPort, ok := strings.CutPrefix(address, "tcp://")
	if !ok {
		return fmt.Errorf("--listen: %q is neither unix:///path nor tcp://host:port", address)
	}
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return fmt.Errorf("--listen: %q: %w (write tcp://host:port)", address, err)
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("--listen: %q: %q is not a port", address, port)
	}
	ip := net.ParseIP(host)
	switch loopback := host == "localhost" || ip != nil && ip.IsLoopback(); {
	case c.TokenFile == "":
		return fmt.Errorf("--listen: %q could be used by every account of this host, as root, even on loopback: give --token-file (head -c 24 /dev/urandom | base64 makes a token), or serve a unix socket", address)
	case !loopback && c.TLS.Cert == "":
		return fmt.Errorf("--listen: %q is beyond loopback, where the token and all output could be read on the way: give --tls-cert and --tls-key, or use 127.0.0.1, [::1] or a unix socket, and a tunnel to reach it", address)
	}
	return nil
}

// readCredentials reads the token and the certificates.
func (c *config) readCredentials() (err error) {
	if c.TokenFile != "" {
		if c.token, err = auth.ReadToken(c.TokenFile); err != nil {
			return fmt.Errorf("--token-file: %w", err)
		}
	}
	if c.TLS == (tlsConfig{}) {
		return nil
	}
	if c.TLS.Cert == "" || c.TLS.Key == "" {
		return errors.New("--tls-cert, --tls-key: give both (--tls-client-ca alone secures nothing)")
	}
	pair, err := tls.LoadX509KeyPair(c.TLS.Cert, c.TLS.Key)
	if err != nil {
		return fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	c.tls = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	if c.TLS.ClientCA == "" {
		return nil
	}
	data, err := os.ReadFile(c.TLS.ClientCA)
	if err != nil {
		return fmt.Errorf("--tls-client-ca: %w", err)
	}
	c.tls.ClientCAs, c.tls.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
	if !c.tls.ClientCAs.AppendCertsFromPEM(data) {
		return fmt.Errorf("--tls-client-ca: %s holds no certificate in PEM", c.TLS.ClientCA)
	}
	return nil
}

func defaultState() string {
	if os.Geteuid() == 0 {
		return "/var/lib/berth"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "berth")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return filepath.Join(os.TempDir(), fmt.Sprintf("berth-%d", os.Geteuid()), "state")
	}
	return filepath.Join(home, ".local", "state", "berth")
}

// defaultRun must be the same as the client's default address.
func defaultRun() string {
	if os.Geteuid() == 0 {
		return "/run/berth"
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "berth")
	}
	return fmt.Sprintf("/tmp/berth-%d", os.Geteuid())
}

// buildVersion names this build.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

func platform() string { return runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH }
