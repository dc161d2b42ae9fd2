package present

import (
	"fmt"
	"slices"
	"strings"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// stepWords are the steps of an operation, as they are said to people.
var stepWords = map[string]string{
	"boot": "booting", "connect": "connecting", "clone": "cloning", "workspace": "setting up the workspace",
	"ready": "finishing", "roll_back": "undoing", "fail": "undoing",
}

// DoingWords is what a sandbox's operation is doing.
func DoingWords(sandbox *berthv1.Sandbox) string {
	progress := sandbox.GetProgress()
	step := progress.GetStep()
	if step == "" {
		return "creating"
	}
	if step == "workspace" && sandbox.GetSpec().GetWorkspace().GetRepo() != nil {
		step = "clone" // it is what takes long there
	}
	if words, known := stepWords[step]; known {
		step = words
	}
	if progress.GetAttempts() > 1 && progress.GetLastError() != "" {
		step = fmt.Sprintf("%s (try %d: %s)", step, progress.GetAttempts(), Plain(progress.GetLastError()))
	}
	return strings.TrimSpace(Plain(step))
}

// SandboxState is a sandbox's state as people write it.
func SandboxState(sandbox *berthv1.Sandbox) string {
	return strings.TrimPrefix(sandbox.GetState().String(), SandboxStatePrefix)
}

// DescribeSandbox is a sandbox in a few words.
func DescribeSandbox(sandbox *berthv1.Sandbox) string {
	words := []string{SandboxState(sandbox), sandbox.GetSpec().GetProvider(), sandbox.GetSpec().GetImage(), sandbox.GetSpec().GetSessionKey()}
	return Plain(strings.Join(slices.DeleteFunc(words, func(word string) bool { return word == "" }), " "))
}

// IsolationWords is how a machine is isolated; empty where it is not known.
func IsolationWords(isolation berthv1.Isolation) string {
	words := strings.TrimPrefix(isolation.String(), "ISOLATION_")
	if isolation == berthv1.Isolation_ISOLATION_UNSPECIFIED {
		return ""
	}
	return strings.ToLower(words)
}

// ResourcesWords are the limits of a sandbox; empty without any.
func ResourcesWords(resources *berthv1.Resources) string {
	var words []string
	if resources.GetCpus() > 0 {
		words = append(words, fmt.Sprintf("%g CPUs", resources.GetCpus()))
	}
	if resources.GetMemoryBytes() > 0 {
		words = append(words, BytesWords(resources.GetMemoryBytes())+" memory")
	}
	if resources.GetDiskBytes() > 0 {
		words = append(words, BytesWords(resources.GetDiskBytes())+" disk")
	}
	if resources.GetPids() > 0 {
		words = append(words, fmt.Sprintf("%d pids", resources.GetPids()))
	}
	return strings.Join(words, ", ")
}

// EgressWords is what a sandbox may reach.
func EgressWords(egress *berthv1.Egress) string {
	switch egress.GetMode() {
	case berthv1.Egress_MODE_NONE:
		return "none"
	case berthv1.Egress_MODE_ALLOW_LIST:
		return "only " + strings.Join(egress.GetAllowHosts(), ", ")
	}
	return "open"
}

// KeysOf are the names of secrets, sorted.
func KeysOf(secrets map[string]string) string {
	keys := make([]string, 0, len(secrets))
	for key := range secrets {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return strings.Join(keys, ",")
}

// The prefixes of states in the API, which are left out for people.
const (
	SandboxStatePrefix = "SANDBOX_STATE_"
	JobStatePrefix     = "JOB_STATE_"
)
