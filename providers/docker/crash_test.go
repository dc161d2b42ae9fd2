package docker_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/berth-sandbox/berth/conformance/failpoint"
	"github.com/berth-sandbox/berth/conformance/fixture"
	contract "github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
)

// crasher is the creator with this package's failpoints, and points are their names.
var crasher struct {
	once    sync.Once
	program string
	points  []string
	err     error
}

func buildCrasher(t testing.TB) []string {
	t.Helper()
	crasher.once.Do(func() {
		crasher.program = filepath.Join(fixture.Dir(t), "crasher")
		crasher.points, crasher.err = failpoint.BuildArmed(t.Context(), "./testdata/creator", crasher.program)
	})
	must(t, crasher.err)
	return crasher.points
}

// crash lets a broker of its own do one thing and reports whether it died at the failpoint.
func crash(t testing.TB, call contract.Call, spec providers.MachineSpec, point string) bool {
	t.Helper()
	cmd := exec.Command(crasher.program, string(call), brokerID, guestProgram, spec.MachineID, spec.ListenDir, spec.Image,
		strconv.FormatUint(spec.Generation, 10))
	cmd.Env = append(os.Environ(), failpoint.ArmVariable+"="+point)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == failpoint.ExitCode {
		return true
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", call, err, out)
	}
	return false
}
