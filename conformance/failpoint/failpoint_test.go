package failpoint

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
)

// program is a module of two packages: a package with one failpoint and the main package that calls it.
var program = map[string]string{
	"go.mod": "module example.test/program\n\ngo 1.26\n",
	"room/room.go": `// Package room has a failpoint and no other use for os.
package room // where it works

import "fmt"

// Work prints before and after its failpoint.
func Work() {
	fmt.Println("before")
	// gofail: var roomBetween struct{}
	// os.Exit(137)
	fmt.Println("after")
}
`,
	"cmd/program/main.go": `package main

import "example.test/program/room"

func main() { room.Work() }
`,
}

func TestAProgramDiesAtTheFailpointThatItsEnvironmentNames(t *testing.T) {
	root := writeModule(t, program)
	out := t.TempDir()
	points, err := buildModule(t.Context(), root, toolsDir(t), out, "./cmd/program")
	if err != nil {
		t.Fatal(err)
	}
	if want := (Failpoint{Name: "roomBetween", Package: "room", File: "room/room.go", Line: 9}); len(points) != 1 || points[0] != want {
		t.Errorf("failpoints are %+v, want only %+v", points, want)
	}
	for _, test := range []struct {
		name        string
		environment string
		wantOutput  string
		wantCode    int
	}{
		{"named, it ends there as if killed", "roomBetween=return", "before\n", ExitCode},
		{"not named, it runs to its end", "", "before\nafter\n", 0},
		{"a name of another program is ignored", "otherRoom=return", "before\nafter\n", 0},
		{"at its second passage, it lives through a single one", "roomBetween=1*off->return", "before\nafter\n", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			command := exec.CommandContext(t.Context(), filepath.Join(out, "program"))
			command.Env = []string{EnvironmentVariable + "=" + test.environment}
			output, err := command.Output()
			if string(output) != test.wantOutput || exitCode(t, err) != test.wantCode {
				t.Errorf("printed %q and exited with %d, want %q and %d", output, exitCode(t, err), test.wantOutput, test.wantCode)
			}
		})
	}
	if status := git(t, root, "status", "--porcelain", "--ignored"); !strings.HasPrefix(status, "??") || strings.Contains(status, "fail.go") {
		t.Errorf("the build left traces in the tree:\n%s", status)
	}
}

func TestAFailpointCostsNothingInANormalBuild(t *testing.T) {
	without := map[string]string{}
	for name, content := range program {
		content = strings.ReplaceAll(content, "// gofail: var roomBetween struct{}", "//")
		without[name] = strings.ReplaceAll(content, "// os.Exit(137)", "//")
	}
	if without["room/room.go"] == program["room/room.go"] {
		t.Fatal("the program to compare with still has the failpoint")
	}
	if !bytes.Equal(plainBuild(t, program), plainBuild(t, without)) {
		t.Error("a program with a failpoint differs from the same one with empty comments in its place")
	}
}

func TestAMalformedFailpointIsRefusedWithItsPlace(t *testing.T) {
	const body = "\t// os.Exit(137)\n"
	for _, test := range []struct {
		name    string
		content string
		want    string
	}{
		{"another type", "package room\n\t// gofail: var roomX string\n" + body, "room/room.go:2: malformed failpoint: its first line"},
		{"another indentation of the comment", "package room\n\t//gofail: var roomX struct{}\n" + body, "room/room.go:2: malformed failpoint: its first line"},
		{"another body", "package room\n\t// gofail: var roomX struct{}\n\t// panic(1)\n", "room/room.go:2: malformed failpoint: its second line"},
		{"no body", "package room\n\t// gofail: var roomX struct{}", "room/room.go:2: malformed failpoint: its second line"},
		{"a comment right after it", "package room\n\t// gofail: var roomX struct{}\n" + body + "\t// Now.\n", "room/room.go:2: malformed failpoint: no comment"},
		{"in a package main", "package main\n\t// gofail: var roomX struct{}\n" + body, "room/room.go:2: malformed failpoint: gofail knows none"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := writeModule(t, map[string]string{"room/room.go": test.content})
			if _, err := Find(root); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Find said %v, want %q", err, test.want)
			}
		})
	}
}

func TestFailpointsOfTestsAndTestdataAreNotThePrograms(t *testing.T) {
	const point = "package room\n\t// gofail: var roomX struct{}\n\t// os.Exit(137)\n"
	root := writeModule(t, map[string]string{
		"room/room_test.go":     point,
		"room/testdata/room.go": point,
		"bin/room.go":           point,
	})
	if points, err := Find(root); err != nil || len(points) != 0 {
		t.Errorf("Find returned %+v, %v, want none", points, err)
	}
}

func TestAModuleWithoutFailpointsIsNotBuilt(t *testing.T) {
	root := writeModule(t, map[string]string{"go.mod": program["go.mod"], "main.go": "package main\n\nfunc main() {}\n"})
	if _, err := buildModule(t.Context(), root, toolsDir(t), t.TempDir(), "."); err == nil {
		t.Error("a build without failpoints was taken for one with")
	}
}

func TestEveryFailpointOfTheTreeIsInAProgram(t *testing.T) {
	testenv.Asked(t, "crash")
	binaries, points, err := Build(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	var programs []byte
	for _, path := range []string{binaries.Berthd, binaries.Guest, binaries.Berth} {
		program, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		programs = append(programs, program...)
	}
	for _, point := range points {
		if !bytes.Contains(programs, []byte(point.Name)) {
			t.Errorf("%s:%d: no program has the failpoint %s", point.File, point.Line, point.Name)
		}
	}
}

// plainBuild builds the module's program as it is, without a build id, which would differ by the
// source, and returns the program.
func plainBuild(t *testing.T, files map[string]string) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "program")
	if err := run(t.Context(), writeModule(t, files), "go", "build", "-trimpath", "-ldflags=-s -w -buildid=", "-o", out, "./cmd/program"); err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func writeModule(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git(t, root, "init", "--quiet")
	return root
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	stdout, err := output(t.Context(), dir, "git", args...)
	if err != nil {
		t.Fatal(err)
	}
	return stdout
}

func toolsDir(t *testing.T) string {
	t.Helper()
	root, err := fixture.ModuleRoot(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "tools")
}

func exitCode(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit == nil {
		return 0
	}
	return exit.ExitCode()
}
