package api

import (
	"errors"
	"fmt"
	"math"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/machines"
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
	maxTimeout     = 100 * 365 * 24 * time.Hour
	maxID          = 128
	maxName        = 63
	maxImageBytes  = 1 << 10
	maxPathBytes   = 4095 // PATH_MAX, less the closing NUL
	maxUserBytes   = 256
	maxOptionBytes = 64 << 10
	maxHosts       = 256
	maxHostBytes   = 255
	minCPUs        = 0.01 // less is nothing to a scheduler, and would come out as no limit
	maxCPUs        = 4096
	minMemory      = machines.MinMemoryBytes
	minDisk        = 1 << 20
	maxSize        = 1 << 50
	minPids        = machines.MinPIDs
	maxPids        = 1 << 22 // the kernel's PID_MAX_LIMIT
	maxStates      = 32      // in a filter
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
	if err := validSessionKey("spec.session_key", spec.GetSessionKey()); err != nil {
		return err
	}
	for _, text := range []struct {
		field, text string
		limit       int
	}{{"spec.provider", spec.GetProvider(), maxName}, {"spec.image", spec.GetImage(), maxImageBytes}, {"spec.from_checkpoint", spec.GetFromCheckpoint(), maxID}} {
		if len(text.text) > text.limit || !printable(text.text) {
			return fault.Invalid(text.field, "must be at most %d printable bytes", text.limit)
		}
	}
	if err := validOptions(spec.GetProviderOptions()); err != nil {
		return err
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
	if err := validDuration("spec.lifetime.max", spec.GetLifetime().GetMax(), maxTimeout); err != nil {
		return err
	}
	if err := validDuration("spec.lifetime.idle", spec.GetLifetime().GetIdle(), maxTimeout); err != nil {
		return err
	}
	return validWorkspace(spec.GetWorkspace())
}

func validSessionKey(field, key string) error {
	if len(key) > maxSessionKey || !printable(key) {
		return fault.Invalid(field, "must be 1 to %d printable bytes", maxSessionKey)
	}
	return nil
}

func validOptions(options map[string]string) error {
	size := 0
	for key, value := range options {
		size += len(key) + len(value)
	}
	if size > maxOptionBytes {
		return fault.Invalid("spec.provider_options", "%d bytes are over the limit of 64 KiB", size)
	}
	return nil
}

// validFilter bounds what a list is searched for.
func validFilter(labels map[string]string, states int) error {
	if states > maxStates {
		return fault.Invalid("states", "at most %d states", maxStates)
	}
	return validLabels("labels", labels)
}

// validResources refuses what would come out as no limit, or as another one. Zero is the provider's default.
func validResources(resources *berthv1.Resources) error {
	cpus, memory, disk := resources.GetCpus(), resources.GetMemoryBytes(), resources.GetDiskBytes()
	switch {
	case cpus != 0 && !(cpus >= minCPUs && cpus <= maxCPUs): // also where it is no number
		return fault.Invalid("spec.resources.cpus", "must be 0 (the provider's default) or between %g and %d", minCPUs, maxCPUs)
	case memory != 0 && memory < minMemory:
		return fault.Invalid("spec.resources.memory_bytes", "%d bytes are too little for a machine and its guest: give at least %d (%d MiB)", memory, minMemory, minMemory>>20)
	case memory > maxSize:
		return fault.Invalid("spec.resources.memory_bytes", "must be at most 1 PiB")
	case disk != 0 && disk < minDisk:
		return fault.Invalid("spec.resources.disk_bytes", "%d is below 1 MiB: is a unit missing?", disk)
	case disk > maxSize:
		return fault.Invalid("spec.resources.disk_bytes", "must be at most 1 PiB")
	case resources.GetPids() != 0 && resources.GetPids() < minPids:
		return fault.Invalid("spec.resources.pids", "%d are too few for a machine and its guest: give at least %d", resources.GetPids(), minPids)
	case resources.GetPids() > maxPids:
		return fault.Invalid("spec.resources.pids", "must be at most %d", maxPids)
	}
	return nil
}

func validEgress(egress *berthv1.Egress) error {
	switch {
	case egress.GetMode() != berthv1.Egress_MODE_ALLOW_LIST && len(egress.GetAllowHosts()) > 0:
		return fault.Invalid("spec.egress.allow_hosts", "goes with MODE_ALLOW_LIST only")
	case len(egress.GetAllowHosts()) > maxHosts:
		return fault.Invalid("spec.egress.allow_hosts", "at most %d hosts", maxHosts)
	}
	for i, host := range egress.GetAllowHosts() {
		if len(host) > maxHostBytes || !printableASCII(host) {
			return fault.Invalid(fmt.Sprintf("spec.egress.allow_hosts[%d]", i), "must be at most %d printable ASCII bytes", maxHostBytes)
		}
	}
	return nil
}

func validWorkspace(workspace *berthv1.Workspace) error {
	if p := workspace.GetPath(); p != "" && (!path.IsAbs(p) || strings.ContainsRune(p, 0) || len(p) > maxPathBytes) {
		return fault.Invalid("spec.workspace.path", "must be an absolute path of at most %d bytes", maxPathBytes)
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
	case repo.GetDepth() > math.MaxInt32:
		return fault.Invalid("spec.workspace.repo.depth", "must be at most %d, what git takes; 0 is all", math.MaxInt32)
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
	}
	return validTerminal("spec.tty", spec.GetTty())
}

// validTerminal refuses a terminal without a size: programs misbehave in one of 0 by 0.
func validTerminal(field string, size *berthv1.TerminalSize) error {
	switch {
	case size == nil:
		return nil
	case size.GetCols() < 1 || size.GetCols() > maxCells:
		return fault.Invalid(field+".cols", "must be between 1 and %d", maxCells)
	case size.GetRows() < 1 || size.GetRows() > maxCells:
		return fault.Invalid(field+".rows", "must be between 1 and %d", maxCells)
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
	for _, text := range []struct {
		field, text string
		limit       int
	}{{"spec.shell", spec.GetShell(), maxArgvBytes}, {"spec.cwd", spec.GetCwd(), maxPathBytes}, {"spec.user", spec.GetUser(), maxUserBytes}} {
		if strings.ContainsRune(text.text, 0) || len(text.text) > text.limit {
			return fault.Invalid(text.field, "must be at most %d bytes without NUL", text.limit)
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
		max  time.Duration
	}{
		{"spec.timeout", spec.GetTimeout(), maxTimeout},
		{"spec.kill_grace", spec.GetKillGrace(), maxKillGrace},
		{"spec.disconnect_grace", spec.GetDisconnectGrace(), maxStartWindow},
		{"spec.start_deadline", spec.GetStartDeadline(), maxStartWindow},
	} {
		if err := validDuration(field.name, field.d, field.max); err != nil {
			return err
		}
	}
	return nil
}

func validDuration(field string, d *durationpb.Duration, limit time.Duration) error {
	if d != nil && (d.CheckValid() != nil || d.AsDuration() < 0 || d.AsDuration() > limit) {
		return fault.Invalid(field, "must be between 0 and %s", limit)
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
		if size > maxEnvBytes {
			return fault.Invalid(vars.name, "%d bytes of environment are over the limit of 1 MiB", size)
		}
	}
	for key := range secret {
		if _, twice := env[key]; twice {
			return fault.Invalid(field+".secret_env", "%s is in env too: give it once", key)
		}
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

// under names the message of a request in which a bad field is.
func under(message string, err error) error {
	var known *fault.Error
	if !errors.As(err, &known) || len(known.Fields) != 1 {
		return err
	}
	return fault.Invalid(message+"."+known.Fields[0].Path, "%s", known.Fields[0].Description)
}

// required refuses an empty id, and one that is too long, before anything is looked up.
func required(field, id string) error {
	if id == "" {
		return fault.Invalid(field, "is required")
	}
	return validID(field, id)
}

// validID refuses an id that is too long.
func validID(field, id string) error {
	if len(id) > maxID {
		return fault.Invalid(field, "has %d bytes, and no id has more than %d", len(id), maxID)
	}
	return nil
}
