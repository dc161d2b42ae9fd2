//go:build defects

package defect

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Tuning.
const (
	testMost   = 5 * time.Minute
	robustMost = 10 * time.Minute
	// robustKills and robustTries are of one run of the suite and of runs with other seeds: a defect that
	// needs a kill at the right moment may not be met at the first.
	robustKills = "10"
	robustTries = 3
)

// Each test passes without its defect and fails with it: a test that passes with it is worth nothing.
func TestEveryDefectIsFoundByItsTest(t *testing.T) {
	root := moduleRoot(t)
	sound := map[string]bool{}
	for _, d := range Table {
		t.Run(strings.ReplaceAll(d.Name, " ", "-"), func(t *testing.T) {
			if what := d.Room + "." + d.Test; !sound[what] {
				if out, failed := run(t, root, "", d.Room, d.Test); failed {
					t.Fatalf("%s fails without the defect:\n%s", what, tail(out))
				}
				sound[what] = true
			}
			overlay, err := d.Overlay(root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if out, failed := run(t, root, overlay, d.Room, d.Test); !failed {
				t.Errorf("%s passes although %s is gone:\n%s", d.Test, d.Guard, tail(out))
			}
		})
	}
}

func TestTheRobustSuiteFindsDefectsToo(t *testing.T) {
	root := moduleRoot(t)
	if out, failed := robust(t, root, "", 1); failed {
		t.Fatalf("the suite fails without any defect:\n%s", tail(out))
	}
	for _, d := range Table {
		if !d.Robust {
			continue
		}
		t.Run(strings.ReplaceAll(d.Name, " ", "-"), func(t *testing.T) {
			overlay, err := d.Overlay(root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			for seed := 1; seed <= robustTries; seed++ {
				if out, failed := robust(t, root, overlay, seed); failed {
					t.Logf("found with seed %d: %s", seed, firstProblem(out))
					return
				}
			}
			t.Errorf("%d runs of the robust suite found nothing although %s is gone", robustTries, d.Guard)
		})
	}
}

// robust runs the suite on the fake provider for a short while.
func robust(t *testing.T, root, overlay string, seed int) (out string, failed bool) {
	t.Helper()
	for variable, value := range map[string]string{
		"BERTH_RUN": "robust", "BERTH_PROVIDER": "fake", "BERTH_KILLS": robustKills, "BERTH_SEED": strconv.Itoa(seed),
		"BERTH_HISTORY": filepath.Join(t.TempDir(), "history.jsonl"),
	} {
		t.Setenv(variable, value)
	}
	return run(t, root, overlay, "conformance/robust", "TestRandomTrafficAndKillsBreakNoPromise")
}

// run runs one test, with a defect if there is an overlay, also in what the test itself builds. It says
// whether the test failed; anything else that goes wrong, such as a build, fails the caller.
func run(t *testing.T, root, overlay, room, test string) (out string, failed bool) {
	t.Helper()
	most := testMost
	if room == "conformance/robust" {
		most = robustMost
	}
	ctx, cancel := context.WithTimeout(t.Context(), most)
	defer cancel()
	command := exec.CommandContext(ctx, "go", "test", "-count=1", "-vet=off", "-v", "-timeout", most.String(), "-run", "^"+test+"$", "./"+room)
	command.Dir = root
	command.Env = os.Environ()
	if overlay != "" {
		command.Env = append(command.Env, "GOFLAGS="+os.Getenv("GOFLAGS")+" -overlay="+overlay)
	}
	output, err := command.CombinedOutput()
	out = string(output)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("go test %s: %v (%v)\n%s", room, err, ctx.Err(), tail(out))
	}
	// Subtests are indented, and may come to other ends than the whole.
	ended := func(how string) bool { return strings.Contains("\n"+out, "\n--- "+how+": "+test+" (") }
	failed = ended("FAIL")
	if passed := ended("PASS"); passed == failed {
		t.Fatalf("%s in %s neither passed nor failed:\n%s", test, room, tail(out))
	}
	return out, failed
}

// firstProblem is the first line that the suite complained with.
func firstProblem(out string) string {
	for line := range strings.Lines(out) {
		if strings.Contains(line, "_test.go:") && !strings.Contains(line, "provider fake") && !strings.Contains(line, "the broker at its first rest") {
			return strings.TrimSpace(line)
		}
	}
	return "(it says nothing)"
}

func tail(out string) string {
	const most = 4 << 10
	return out[max(0, len(out)-most):]
}
