package archtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestARunOfTestsIsCountedAndARunOfNothingFails holds tools/verdict.sh, which ends every run of tests.
func TestARunOfTestsIsCountedAndARunOfNothingFails(t *testing.T) {
	const (
		pass    = `{"Time":"2026-01-01T00:00:00Z","Action":"pass","Package":"p","Test":"TestA","Elapsed":0}` + "\n"
		skip    = `{"Time":"2026-01-01T00:00:00Z","Action":"skip","Package":"p","Test":"TestB","Elapsed":0}` + "\n"
		pack    = `{"Time":"2026-01-01T00:00:00Z","Action":"pass","Package":"p","Elapsed":0}` + "\n"
		said    = `{"Action":"output","Package":"p","Test":"TestA","Output":"\"Action\":\"pass\",\"Test\":\"TestA\"\n"}` + "\n"
		noMatch = `{"Action":"output","Package":"q","Output":"testing: warning: no tests to run\n"}` + "\n"
		noFiles = `{"Action":"output","Package":"q","Output":"?   \tq\t[no test files]\n"}` + "\n"
	)
	for _, test := range []struct {
		name, events, failed, errors, suite, counts string
		refused                                     bool
	}{
		{name: "tests and packages are told apart", events: said + pass + pass + skip + pack, counts: "2 passed, 0 failed, 1 skipped"},
		{name: "what gotestsum calls failures and errors has failed", events: pass, failed: "2", errors: "1", counts: "1 passed, 3 failed, 0 skipped"},
		{name: "nothing ran", events: noMatch, counts: "0 passed, 0 failed, 0 skipped", refused: true},
		{name: "all was skipped", events: skip + pack, counts: "0 passed, 0 failed, 1 skipped", refused: true},
		{name: "a package without tests", events: pass + noFiles + noMatch, counts: "1 passed, 0 failed, 0 skipped"},
		{name: "a suite whose name matched nothing", events: pass + noMatch, suite: "crash", counts: "1 passed, 0 failed, 0 skipped", refused: true},
		{name: "a suite without tests", events: pass + noFiles, suite: "crash", counts: "1 passed, 0 failed, 0 skipped", refused: true},
		{name: "a suite that ran", events: pass + skip, suite: "crash", counts: "1 passed, 0 failed, 1 skipped"},
	} {
		t.Run(test.name, func(t *testing.T) {
			events := filepath.Join(t.TempDir(), "events.json")
			if err := os.WriteFile(events, []byte(test.events), 0o600); err != nil {
				t.Fatal(err)
			}
			verdict := exec.Command("sh", filepath.Join(checkout(t).root, "tools", "verdict.sh"))
			verdict.Env = append(os.Environ(), "GOTESTSUM_JSONFILE="+events, "TESTS_FAILED="+orZero(test.failed), "TESTS_ERRORS="+orZero(test.errors), "BERTH_RUN="+test.suite)
			out, err := verdict.Output()
			if refused := err != nil; refused != test.refused {
				t.Errorf("refused: %v (%v), want %v", refused, err, test.refused)
			}
			if got, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n"); got != test.counts {
				t.Errorf("counted %q, want %q", got, test.counts)
			}
		})
	}
}

func orZero(count string) string {
	if count == "" {
		return "0"
	}
	return count
}
