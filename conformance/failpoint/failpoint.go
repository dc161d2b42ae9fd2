// Package failpoint finds the failpoints in the source and builds the programs with them switched on,
// so that a test can make the broker crash at a chosen instruction. It works on a copy: it never
// touches the tree, and the product itself never imports gofail or pays for a failpoint.
//
// A failpoint is two comment lines where a statement may stand:
//
//	// gofail: var storeBeforeCommit struct{}
//	// os.Exit(137)
//
// A program built here runs the second line when GOFAIL_FAILPOINTS="storeBeforeCommit=return" is in
// its environment when it starts. os.Exit(137) stands for kill -9: no deferred function runs. The file
// need not import os. In the daemon the second line may also be fault.Die().
package failpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/berth-sandbox/berth/conformance/fixture"
)

// ExitCode is what a program exits with at a failpoint: what a shell says of kill -9.
const ExitCode = 137

// EnvironmentVariable holds the failpoints to switch on in a program built here, as
// name=return;name=return. Names that the program does not have are ignored.
const EnvironmentVariable = "GOFAIL_FAILPOINTS"

// runtimeModule is what an enabled failpoint calls; its version is that of tools/go.mod.
const runtimeModule = "go.etcd.io/gofail"

// Failpoint is one place where a program can be made to crash.
type Failpoint struct {
	Name    string // unique in the module, prefixed with its package's name
	Package string // the directory of its package, as daemon/store
	File    string // relative to the module's root
	Line    int    // of the first of its two lines, from 1
}

// Build builds the programs of the module that the working directory lies in, with every failpoint
// switched on, into outDir, which must exist. It returns all failpoints by name. Errors: git or the
// go command failed, or a failpoint is malformed.
func Build(ctx context.Context, outDir string) (fixture.Programs, []Failpoint, error) {
	root, err := fixture.ModuleRoot(ctx)
	if err != nil {
		return fixture.Programs{}, nil, err
	}
	points, err := buildModule(ctx, root, filepath.Join(root, "tools"), outDir, fixture.BerthdPackage, fixture.GuestPackage, fixture.BerthPackage)
	if err != nil {
		return fixture.Programs{}, nil, fmt.Errorf("building the programs with failpoints: %w", err)
	}
	return fixture.ProgramsIn(outDir), points, nil
}

// buildModule builds packages of the module at root, which git must know, with its failpoints
// switched on. The gofail that does it is the one of the module in toolsDir.
func buildModule(ctx context.Context, root, toolsDir, outDir string, packages ...string) ([]Failpoint, error) {
	outDir, err := filepath.Abs(outDir)
	if err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp("", "berth-failpoint-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(scratch) }()

	module := filepath.Join(scratch, "module")
	if err := copyModule(ctx, root, module); err != nil {
		return nil, err
	}
	points, err := Find(module)
	if err != nil {
		return nil, err
	}
	if len(points) == 0 {
		return nil, fmt.Errorf("%s has no failpoint", root)
	}
	if err := addImports(module, points); err != nil {
		return nil, err
	}
	gofail := filepath.Join(scratch, "gofail")
	if err := run(ctx, toolsDir, "go", "build", "-o", gofail, runtimeModule); err != nil {
		return nil, err
	}
	if err := run(ctx, module, gofail, append([]string{"enable"}, each(points, func(point Failpoint) string { return point.Package })...)...); err != nil {
		return nil, err
	}
	if err := requireRuntime(ctx, toolsDir, module); err != nil {
		return nil, err
	}
	// -trimpath keeps the copy's path out of the build's cache keys, so that a second build is quick.
	build := append([]string{"build", "-tags", fixture.TestTags, "-trimpath", "-mod=mod", "-ldflags=-s -w", "-o", outDir + string(filepath.Separator)}, packages...)
	return points, run(ctx, module, "go", build...)
}

// ArmVariable names the failpoint at which a program of BuildArmed dies.
const ArmVariable = "BERTH_CRASH_AT"

// BuildArmed builds a program, static, with the failpoints of one package alone, that in the working
// directory, in a fraction of the time that Build takes. It returns their names. Errors: as of Build.
func BuildArmed(ctx context.Context, program, out string) ([]string, error) {
	here, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	points, err := Find(here)
	if err != nil {
		return nil, err
	}
	scratch, err := os.MkdirTemp("", "berth-failpoint-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	replace := map[string]string{}
	for _, file := range each(points, func(point Failpoint) string { return point.File }) {
		content, err := os.ReadFile(filepath.Join(here, file))
		if err != nil {
			return nil, err
		}
		armed := armedPoint.ReplaceAll(content, []byte("if os.Getenv(\""+ArmVariable+"\") == \"$1\" {\nos.Exit("+strconv.Itoa(ExitCode)+")\n}\n"))
		to := filepath.Join(scratch, strings.ReplaceAll(file, "/", "+"))
		if err := os.WriteFile(to, armed, 0o600); err != nil {
			return nil, err
		}
		if err := importInto(to, "os"); err != nil {
			return nil, err
		}
		replace[filepath.Join(here, file)] = to
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err == nil {
		err = os.WriteFile(filepath.Join(scratch, "overlay.json"), overlay, 0o600)
	}
	if err != nil {
		return nil, err
	}
	names := each(points, func(point Failpoint) string { return point.Name })
	return names, run(ctx, here, "go", "build", "-overlay", filepath.Join(scratch, "overlay.json"), "-trimpath", "-buildvcs=false", "-o", out, program)
}

// copyModule copies what git knows, or would know, of the module at root.
func copyModule(ctx context.Context, root, target string) error {
	listing, err := output(ctx, root, "git", "ls-files", "-z", "-co", "--exclude-standard")
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(listing, "\x00"), "\x00") {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		content, err := os.ReadFile(filepath.Join(root, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed, and git has not been told yet
		}
		if err != nil {
			return err
		}
		path := filepath.Join(target, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// bodies are the second lines that a failpoint may have, each with the import that it needs.
var bodies = map[string]string{
	"// os.Exit(137)": "os",
	"// fault.Die()":  "github.com/berth-sandbox/berth/daemon/fault",
}

// addImports makes the files with failpoints import what those call, for which a normal build may have
// no use.
func addImports(module string, points []Failpoint) error {
	for _, file := range each(points, func(point Failpoint) string { return point.File }) {
		path := filepath.Join(module, file)
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for body, imported := range bodies {
			if !bytes.Contains(content, []byte(body+"\n")) {
				continue
			}
			if err := importInto(path, imported); err != nil {
				return err
			}
		}
	}
	return nil
}

// importInto makes a file import a package, on the line of its package clause, so that lines keep their
// numbers.
func importInto(path, imported string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	syntax, err := parser.ParseFile(token.NewFileSet(), path, content, parser.ImportsOnly)
	if err != nil || importsPackage(syntax, imported) {
		return err
	}
	clause := int(syntax.Name.End() - syntax.FileStart)
	return os.WriteFile(path, slices.Insert(content, clause, []byte("; import "+strconv.Quote(imported))...), 0o600)
}

func importsPackage(file *ast.File, path string) bool {
	return slices.ContainsFunc(file.Imports, func(spec *ast.ImportSpec) bool { return spec.Path.Value == strconv.Quote(path) })
}

// requireRuntime makes the copy's go.mod and go.sum name gofail's runtime.
func requireRuntime(ctx context.Context, toolsDir, module string) error {
	version, err := output(ctx, toolsDir, "go", "list", "-m", "-f", "{{.Version}}", runtimeModule)
	if err != nil {
		return err
	}
	if err := run(ctx, module, "go", "mod", "edit", "-require="+runtimeModule+"@"+strings.TrimSpace(version)); err != nil {
		return err
	}
	checksums, err := os.ReadFile(filepath.Join(toolsDir, "go.sum"))
	if err != nil {
		return err
	}
	sum, err := os.OpenFile(filepath.Join(module, "go.sum"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	for line := range bytes.Lines(checksums) {
		if bytes.HasPrefix(line, []byte(runtimeModule+" ")) {
			if _, err := sum.Write(line); err != nil {
				return errors.Join(err, sum.Close())
			}
		}
	}
	return sum.Close()
}

var (
	// gofailLine is what gofail would take for the head of a failpoint.
	gofailLine = regexp.MustCompile(`^\s*//\s*gofail:`)
	headLine   = regexp.MustCompile(`^\s*// gofail: var ([a-z][A-Za-z0-9]*) struct\{\}$`)
	// armedPoint is a whole failpoint of a program that BuildArmed builds.
	armedPoint = regexp.MustCompile(`// gofail: var (\w+) struct\{\}\n\s*// os\.Exit\(137\)\n`)
	// commentLine after a failpoint would be taken for more of its code.
	commentLine = regexp.MustCompile(`^\s*//`)
)

// Find returns the failpoints in the Go files below root, without tests and testdata, by name. Errors:
// a failpoint that is not exactly the two lines above, or is in a package main.
func Find(root string) ([]Failpoint, error) {
	var points []Failpoint
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if path != root && skippedDir(entry.Name()) {
				return filepath.SkipDir
			}
			return nil
		}
		if filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		found, err := findInFile(root, path)
		points = append(points, found...)
		return err
	})
	slices.SortFunc(points, func(a, b Failpoint) int { return strings.Compare(a.Name, b.Name) })
	return points, err
}

func skippedDir(name string) bool {
	return strings.HasPrefix(name, ".") || name == "testdata" || name == "bin"
}

func findInFile(root, path string) ([]Failpoint, error) {
	content, err := os.ReadFile(path) // #nosec G122 -- the tree is the developer's own
	if err != nil {
		return nil, err
	}
	file, err := filepath.Rel(root, path)
	if err != nil {
		return nil, err
	}
	lines := strings.Split(string(content), "\n")
	var points []Failpoint
	for i, line := range lines {
		if !gofailLine.MatchString(line) {
			continue
		}
		head := headLine.FindStringSubmatch(line)
		var wrong string
		switch {
		case head == nil:
			wrong = "its first line is `// gofail: var roomBeforeThing struct{}`"
		case i+1 == len(lines) || bodies[strings.TrimSpace(lines[i+1])] == "":
			wrong = "its second line is `// os.Exit(137)` or `// fault.Die()`"
		case i+2 < len(lines) && commentLine.MatchString(lines[i+2]):
			wrong = "no comment may follow it, as gofail takes that for code: put an empty line between"
		case slices.Contains(lines, "package main"):
			wrong = "gofail knows none in a package main"
		}
		if wrong != "" {
			return nil, fmt.Errorf("%s:%d: malformed failpoint: %s", file, i+1, wrong)
		}
		points = append(points, Failpoint{
			Name:    head[1],
			Package: filepath.ToSlash(filepath.Dir(file)),
			File:    filepath.ToSlash(file),
			Line:    i + 1,
		})
	}
	return points, nil
}

// each returns what the failpoints have of one kind, each once.
func each(points []Failpoint, of func(Failpoint) string) []string {
	var all []string
	for _, point := range points {
		all = append(all, of(point))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func run(ctx context.Context, dir, program string, args ...string) error {
	_, err := output(ctx, dir, program, args...)
	return err
}

// output runs a program in dir and returns what it wrote to stdout. The programs are static, as the
// released ones are.
func output(ctx context.Context, dir, program string, args ...string) (string, error) {
	command := exec.CommandContext(ctx, program, args...)
	command.Dir = dir
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	stdout, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(stdout), nil
}
