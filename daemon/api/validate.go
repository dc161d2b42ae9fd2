package api

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Bounds that the API documents.
const (
	maxRequestID   = 128
	maxSessionKey  = 256
	maxLabels      = 64
	maxLabelValue  = 256
	maxEnvBytes    = 1 << 20
	maxArgvBytes   = 2 << 20
	maxStdinBytes  = 1 << 20
	maxKillGrace   = time.Hour
	maxWait        = 10 * time.Minute
	maxStartWindow = 24 * time.Hour
	maxOutputLimit = 4 << 30
	maxURLBytes    = 4 << 10
	maxRefBytes    = 1 << 10
	maxCells       = 65535 // of a terminal, each way: what the kernel's winsize holds
	maxSignal      = 64
)

var (
	envKey   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	labelKey = regexp.MustCompile(`^[A-Za-z0-9._/-]{1,63}$`)
	scpLike  = regexp.MustCompile(`^[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[^:]`)
	// withSecret is user info that is, or holds, a password or a token: a URL is in argvs and in the
	// ledger. A plain user name is right for ssh only.
	withSecret = regexp.MustCompile(`^([a-z+]+://[^/@]*:[^/@]*@|https?://[^/]*@)`)
)

func validRequestID(id string) error {
	if len(id) > maxRequestID || !printableASCII(id) {
		return fault.Invalid("request_id", "must be 1 to %d printable ASCII bytes", maxRequestID)
	}
	return nil
}

func printableASCII(text string) bool {
	for i := range len(text) {
		if text[i] < 0x21 || text[i] > 0x7e {
			return false
		}
	}
	return true
}

// validSandboxSpec refuses a spec that no provider could honour.
func validSandboxSpec(spec *berthv1.SandboxSpec) error {
	if key := spec.GetSessionKey(); len(key) > maxSessionKey || !printable(key) {
		return fault.Invalid("spec.session_key", "must be 1 to %d printable bytes", maxSessionKey)
	}
	if err := validEnv("spec", spec.GetEnv(), spec.GetSecretEnv()); err != nil {
		return err
	}
	if err := validLabels("spec.labels", spec.GetLabels()); err != nil {
		return err
	}
	if err := validResources(spec.GetResources()); err != nil {
		return err
	}
	if err := validEgress(spec.GetEgress()); err != nil {
		return err
	}
	return validWorkspace(spec.GetWorkspace())
}

func validResources(resources *berthv1.Resources) error {
	cpus := resources.GetCpus()
	if math.IsNaN(cpus) || math.IsInf(cpus, 0) || cpus < 0 || cpus > 4096 {
		return fault.Invalid("spec.resources.cpus", "must be between 0 (the provider's default) and 4096")
	}
	if m := resources.GetMemoryBytes(); m != 0 && m < 4<<20 {
		return fault.Invalid("spec.resources.memory_bytes", "%d is below 4 MiB, in which nothing runs: is a unit missing?", m)
	}
	return nil
}

func validEgress(egress *berthv1.Egress) error {
	switch {
	case berthv1.Egress_Mode_name[int32(egress.GetMode())] == "":
		return fault.Invalid("spec.egress.mode", "is not one of MODE_NONE, MODE_ALLOW_LIST, MODE_OPEN")
	case egress.GetMode() != berthv1.Egress_MODE_ALLOW_LIST && len(egress.GetAllowHosts()) > 0:
		return fault.Invalid("spec.egress.allow_hosts", "goes with MODE_ALLOW_LIST only")
	case len(egress.GetAllowHosts()) > 256:
		return fault.Invalid("spec.egress.allow_hosts", "at most 256 hosts")
	}
	return nil
}

func validWorkspace(workspace *berthv1.Workspace) error {
	if p := workspace.GetPath(); p != "" && (!path.IsAbs(p) || strings.ContainsRune(p, 0)) {
		return fault.Invalid("spec.workspace.path", "must be an absolute path")
	}
	for field, text := range map[string]string{"name": workspace.GetGitIdentity().GetName(), "email": workspace.GetGitIdentity().GetEmail()} {
		if len(text) > 256 || strings.ContainsAny(text, "\x00\n<>") {
			return fault.Invalid("spec.workspace.git_identity."+field, "must be at most 256 bytes without NUL, newline, < or >")
		}
	}
	repo := workspace.GetRepo()
	if repo == nil {
		if workspace.GetGitIdentity() != nil {
			return fault.Invalid("spec.workspace.git_identity", "goes with spec.workspace.repo only")
		}
		return nil
	}
	return validRepo(repo)
}

func validRepo(repo *berthv1.Repo) error {
	url, ref := repo.GetUrl(), repo.GetRef()
	switch {
	case url == "":
		return fault.Invalid("spec.workspace.repo.url", "is required with spec.workspace.repo")
	case len(url) > maxURLBytes || strings.ContainsAny(url, "\x00\n\r") || strings.HasPrefix(url, "-"):
		return fault.Invalid("spec.workspace.repo.url", "must be at most %d bytes on one line, and not begin with a dash", maxURLBytes)
	case withSecret.MatchString(url):
		return fault.Invalid("spec.workspace.repo.url", "holds a user or a password: URLs are kept in the clear, so leave it out")
	case !knownScheme(url):
		return fault.Invalid("spec.workspace.repo.url", "must be an https, http, ssh, git or file URL, user@host:path, or an absolute path in the machine")
	case len(ref) > maxRefBytes || strings.ContainsAny(ref, "\x00\n\r ~^:?*[\\") || strings.HasPrefix(ref, "-") || strings.Contains(ref, ".."):
		return fault.Invalid("spec.workspace.repo.ref", "%q is not a branch, tag or commit id", ref)
	}
	return nil
}

func knownScheme(url string) bool {
	for _, scheme := range []string{"https://", "http://", "ssh://", "git://", "file:///"} {
		if strings.HasPrefix(url, scheme) {
			return true
		}
	}
	return path.IsAbs(url) || scpLike.MatchString(url)
}

// validJobSpec refuses a command that no guest could run.
func validJobSpec(spec *berthv1.JobSpec) error {
	if spec == nil {
		return fault.Invalid("spec", "is required: give spec.argv or spec.shell")
	}
	if err := validCommand(spec); err != nil {
		return err
	}
	if err := validEnv("spec", spec.GetEnv(), spec.GetSecretEnv()); err != nil {
		return err
	}
	if err := validLabels("spec.labels", spec.GetLabels()); err != nil {
		return err
	}
	if err := validDurations(spec); err != nil {
		return err
	}
	switch {
	case spec.GetOutputLimitBytes() > maxOutputLimit:
		return fault.Invalid("spec.output_limit_bytes", "must be at most 4 GiB")
	case len(spec.GetStdin().GetData()) > maxStdinBytes:
		return fault.Invalid("spec.stdin.data", "must be at most 1 MiB")
	case berthv1.OnDisconnect_name[int32(spec.GetOnDisconnect())] == "":
		return fault.Invalid("spec.on_disconnect", "is not one of ON_DISCONNECT_KILL, ON_DISCONNECT_KEEP")
	}
	return validTerminal(spec.GetTty())
}

// validTerminal refuses a terminal without a size: programs misbehave in one of 0 by 0.
func validTerminal(size *berthv1.TerminalSize) error {
	if size == nil {
		return nil
	}
	if size.GetCols() < 1 || size.GetCols() > maxCells || size.GetRows() < 1 || size.GetRows() > maxCells {
		return fault.Invalid("spec.tty", "cols and rows must be between 1 and %d", maxCells)
	}
	return nil
}

func validCommand(spec *berthv1.JobSpec) error {
	switch {
	case len(spec.GetArgv()) == 0 && spec.GetShell() == "":
		return fault.Invalid("spec.argv", "one of spec.argv and spec.shell is required")
	case len(spec.GetArgv()) > 0 && spec.GetShell() != "":
		return fault.Invalid("spec.shell", "goes without spec.argv: give one of the two")
	case len(spec.GetArgv()) > 0 && spec.GetArgv()[0] == "":
		return fault.Invalid("spec.argv[0]", "must name a program")
	}
	size := len(spec.GetShell())
	for i, arg := range spec.GetArgv() {
		if strings.ContainsRune(arg, 0) {
			return fault.Invalid(fmt.Sprintf("spec.argv[%d]", i), "holds a NUL byte, which no argument can")
		}
		size += len(arg) + 1
	}
	for field, text := range map[string]string{"shell": spec.GetShell(), "cwd": spec.GetCwd(), "user": spec.GetUser()} {
		if strings.ContainsRune(text, 0) {
			return fault.Invalid("spec."+field, "holds a NUL byte")
		}
	}
	if size > maxArgvBytes {
		return fault.Invalid("spec.argv", "%d bytes are over the limit of 2 MiB: put large data into a file or stdin", size)
	}
	return nil
}

func validDurations(spec *berthv1.JobSpec) error {
	for _, field := range []struct {
		name string
		d    *durationpb.Duration
		most time.Duration
	}{
		{"spec.timeout", spec.GetTimeout(), math.MaxInt64},
		{"spec.kill_grace", spec.GetKillGrace(), maxKillGrace},
		{"spec.disconnect_grace", spec.GetDisconnectGrace(), maxStartWindow},
		{"spec.start_deadline", spec.GetStartDeadline(), maxStartWindow},
	} {
		if err := validDuration(field.name, field.d, field.most); err != nil {
			return err
		}
	}
	return nil
}

func validDuration(field string, d *durationpb.Duration, most time.Duration) error {
	if d == nil {
		return nil
	}
	if d.CheckValid() != nil || d.AsDuration() < 0 || d.AsDuration() > most {
		if most == math.MaxInt64 {
			return fault.Invalid(field, "must be a duration that is not negative")
		}
		return fault.Invalid(field, "must be between 0 and %s", most)
	}
	return nil
}

func validEnv(field string, env, secret map[string]string) error {
	size := 0
	for _, vars := range []struct {
		name string
		vars map[string]string
	}{{field + ".env", env}, {field + ".secret_env", secret}} {
		for key, value := range vars.vars {
			if !envKey.MatchString(key) {
				return fault.Invalid(vars.name, "%q is not a variable's name ([A-Za-z_][A-Za-z0-9_]*)", key)
			}
			if strings.ContainsRune(value, 0) {
				return fault.Invalid(vars.name, "the value of %s holds a NUL byte", key)
			}
			size += len(key) + len(value) + 2
		}
	}
	for key := range secret {
		if _, twice := env[key]; twice {
			return fault.Invalid(field+".secret_env", "%s is in env too: give it once", key)
		}
	}
	if size > maxEnvBytes {
		return fault.Invalid(field+".env", "%d bytes are over the limit of 1 MiB", size)
	}
	return nil
}

func validLabels(field string, labels map[string]string) error {
	if len(labels) > maxLabels {
		return fault.Invalid(field, "at most %d labels", maxLabels)
	}
	for key, value := range labels {
		if !labelKey.MatchString(key) {
			return fault.Invalid(field, "%q is not a label's key (1 to 63 of A-Z a-z 0-9 . _ / -)", key)
		}
		if len(value) > maxLabelValue || !printable(value) {
			return fault.Invalid(field, "the value of %s must be at most %d printable bytes", key, maxLabelValue)
		}
	}
	return nil
}

func printable(text string) bool {
	if !utf8.ValidString(text) {
		return false
	}
	return !strings.ContainsFunc(text, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

// validRun refuses what a command without an attached caller cannot have.
func validRun(spec *berthv1.JobSpec) error {
	switch {
	case spec.GetTty() != nil:
		return fault.Invalid("spec.tty", "nobody is attached to a RunCommand: use Exec, or leave it out")
	case spec.GetStdin().GetOpen():
		return fault.Invalid("spec.stdin.open", "nobody can feed a RunCommand: use Exec or StartJob, or give spec.stdin.data")
	}
	return nil
}

// required refuses an empty id before anything is looked up.
func required(field, id string) error {
	if id == "" {
		return fault.Invalid(field, "is required")
	}
	return nil
}
