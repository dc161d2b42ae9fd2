//go:build mutation

package mutation

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
	testTimeout   = 15 * time.Minute
	robustTimeout = 30 * time.Minute
	// robustKills and robustTries are of one run of the suite and of runs with other seeds: a mutant that
	// needs a kill at the right moment may survive the first.
	robustKills = "10"
	robustTries = 3
)

// Each test passes with its guard and fails without it: a test that passes without it is worth nothing.
func TestWithoutAGuardItsTestFails(t *testing.T) {
	root := moduleRoot(t)
	sound := map[string]bool{}
	for _, m := range mutants(t, root) {
		t.Run(m.name, func(t *testing.T) {
			if what := m.pkg + "." + m.test; !sound[what] {
				if out, failed := run(t, root, "", m.pkg, m.test); failed {
					t.Fatalf("%s fails although every guard is there:\n%s", what, tail(out))
				}
				sound[what] = true
			}
			overlay, err := m.overlay(root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			if out, failed := run(t, root, overlay, m.pkg, m.test); !failed {
				t.Errorf("%s passes although this guard is gone: %s\n%s", m.test, m.guard, tail(out))
			}
		})
	}
}

func TestWithoutAGuardTheRobustSuiteFails(t *testing.T) {
	root := moduleRoot(t)
	if out, failed := robust(t, root, "", 1); failed {
		t.Fatalf("the suite fails although every guard is there:\n%s", tail(out))
	}
	for _, m := range mutants(t, root) {
		if !m.robust {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			overlay, err := m.overlay(root, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			for seed := 1; seed <= robustTries; seed++ {
				out, failed := robust(t, root, overlay, seed)
				if strings.Contains(out, "\npanic: ") {
					t.Fatalf("the suite itself broke with seed %d:\n%s", seed, tail(out))
				}
				if failed {
					t.Logf("found with seed %d: %s", seed, firstProblem(out))
					return
				}
			}
			t.Errorf("%d runs of the robust suite found nothing although this guard is gone: %s", robustTries, m.guard)
		})
	}
}

// mutant is the product without one guard.
type mutant struct {
	name, guard, pkg, test string
	robust                 bool
	overlay                func(root, dir string) (string, error)
}

func mutants(t *testing.T, root string) []mutant {
	t.Helper()
	marks, err := Marks(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	var all []mutant
	for _, guard := range Guards {
		all = append(all, mutant{guard.Mark, guard.Is, guard.Package, guard.Test, guard.Robust, marks[guard.Mark].Overlay})
	}
	return all
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

// run runs one test, on a mutant if there is an overlay, also in what the test itself builds. It says
// whether the test failed; anything else that goes wrong, such as a build, fails the caller.
func run(t *testing.T, root, overlay, pkg, test string) (out string, failed bool) {
	t.Helper()
	timeout := testTimeout
	if pkg == "conformance/robust" {
		timeout = robustTimeout
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	command := exec.CommandContext(ctx, "go", "test", "-count=1", "-vet=off", "-v", "-timeout", timeout.String(), "-run", "^"+test+"$", "./"+pkg)
	command.Dir = root
	command.Env = os.Environ()
	if overlay != "" {
		command.Env = append(command.Env, "GOFLAGS="+os.Getenv("GOFLAGS")+" -overlay="+overlay)
	}
	output, err := command.CombinedOutput()
	out = string(output)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("go test %s: %v (%v)\n%s", pkg, err, ctx.Err(), tail(out))
	}
	// Subtests are indented, and may come to other ends than the whole.
	ended := func(how string) bool { return strings.Contains("\n"+out, "\n--- "+how+": "+test+" (") }
	failed = ended("FAIL")
	if passed := ended("PASS"); passed == failed {
		t.Fatalf("%s in %s neither passed nor failed:\n%s", test, pkg, tail(out))
	}
	return out, failed
}

// firstProblem is the first problem that the suite reports.
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
