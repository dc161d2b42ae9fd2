package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheSummaryOfARun(t *testing.T) {
	for _, test := range []struct {
		name   string
		source string
		args   []string
		want   []string // in the output, in this order
		never  []string // in the output
		code   int
	}{
		{
			name:   "a passing test is counted and its output is not shown",
			source: `func TestA(t *testing.T) { t.Log("quiet") }`,
			want:   []string{"ok  \texample.test/p", "\n1 passed, 0 failed, 0 skipped\n"},
			never:  []string{"quiet", "=== RUN", "PASS", "Skipped"},
		},
		{
			name:   "a failing test shows its output and fails the run",
			source: `func TestA(t *testing.T) { t.Run("sub", func(t *testing.T) { t.Error("loud") }) }` + "\n" + `func TestB(t *testing.T) {}`,
			want:   []string{"loud", "--- FAIL: TestA", "FAIL\texample.test/p", "\n1 passed, 2 failed, 0 skipped\n"},
			code:   1,
		},
		{
			name:   "skipped tests are listed under their reason",
			source: `func TestA(t *testing.T) { t.Skip("needs a moon") }` + "\n" + `func TestB(t *testing.T) { t.Log("looking"); t.Skip("needs a moon") }` + "\n" + `func TestC(t *testing.T) {}`,
			want:   []string{"Skipped, and why:\n  needs a moon\n    example.test/p TestA\n    example.test/p TestB\n", "\n1 passed, 0 failed, 2 skipped\n"},
		},
		{
			name:   "a reason of two lines is one",
			source: `func TestA(t *testing.T) { t.Skip("needs\na moon") }` + "\n" + `func TestB(t *testing.T) {}`,
			want:   []string{"  needs a moon\n"},
		},
		{
			name:   "a test that does not compile is a failure",
			source: `func TestA(t *testing.T) { nonsense }`,
			want:   []string{"undefined: nonsense", "\n0 passed, 1 failed, 0 skipped\n"},
			code:   1,
		},
		{
			name:   "a test that ends the process is a failure that shows what it said",
			source: `func TestA(t *testing.T) { println("last words"); os.Exit(7) }`,
			want:   []string{"last words", "\n0 passed, 1 failed, 0 skipped\n"},
			code:   1,
		},
		{
			name:   "a panic is shown",
			source: `func TestA(t *testing.T) { panic("boom") }`,
			want:   []string{"boom", "\n0 passed, 1 failed, 0 skipped\n"},
			code:   1,
		},
		{
			name:   "a run without a test is a failure",
			source: `func TestA(t *testing.T) {}`,
			args:   []string{"-run=None"},
			want:   []string{"\n0 passed, 0 failed, 0 skipped\n"},
			code:   1,
		},
		{
			name:   "a run in which everything is skipped is a failure",
			source: `func TestA(t *testing.T) { t.Skip("needs a moon") }`,
			want:   []string{"\n0 passed, 0 failed, 1 skipped\n"},
			code:   1,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			write(t, "go.mod", "module example.test/p\n\ngo 1.26\n")
			write(t, "p_test.go", "package p\n\nimport (\n\t\"os\"\n\t\"testing\"\n)\n\nvar _ = os.Args\n\n"+test.source+"\n")
			var output strings.Builder
			code, _ := runTests(append(test.args, "-vet=off", "."), &output, &output)
			if code != test.code {
				t.Errorf("exit code is %d, want %d", code, test.code)
			}
			rest := output.String()
			for _, want := range test.want {
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Fatalf("%q is not in its place in:\n%s", want, output.String())
				}
				rest = after
			}
			for _, never := range test.never {
				if strings.Contains(output.String(), never) {
					t.Errorf("%q is in:\n%s", never, output.String())
				}
			}
		})
	}
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Clean(name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
