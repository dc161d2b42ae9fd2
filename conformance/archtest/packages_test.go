package archtest

import (
	"encoding/json"
	"go/ast"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/berth-sandbox/berth/conformance/arrows"
	"github.com/berth-sandbox/berth/conformance/failpoint"
	"github.com/berth-sandbox/berth/conformance/fixture"
)

func TestEveryPackageSaysWhatItIsInTheFileThatBearsItsName(t *testing.T) {
	for dir, sources := range checkout(t).packages() {
		sources = comments(sources)
		name := sources[0].syntax.Name.Name
		first := slices.IndexFunc(sources, func(s source) bool { return slices.Contains(firstFiles(name), path.Base(s.file)) })
		if first < 0 {
			t.Errorf("%s has none of %s, where package %s would say what it is", dir, strings.Join(firstFiles(name), ", "), name)
			continue
		}
		for i, s := range sources {
			switch {
			case i == first && s.syntax.Doc == nil:
				t.Errorf("%s has no package comment", s.file)
			case i == first && sentences(s.syntax.Doc.Text()) < 2:
				t.Errorf("%s: the package comment says in fewer than two sentences what the package holds and what it never does", s.file)
			case i != first && s.syntax.Doc != nil && !isDirective(s.syntax.Doc):
				t.Errorf("%s has a package comment too; it belongs in %s alone", s.file, sources[first].file)
			}
		}
	}
}

// comments returns the files in which the package's comment may be: those that are no tests, or all
// where there is nothing but tests.
func comments(sources []source) []source {
	var code []source
	for _, s := range sources {
		if !s.test {
			code = append(code, s)
		}
	}
	if len(code) == 0 {
		return sources
	}
	return code
}

// firstFiles are the names that a package's first file may have: its own, in the singular where it is
// a plural, main.go for a program.
func firstFiles(name string) []string {
	if name == "main" {
		return []string{"main.go"}
	}
	return []string{name + ".go", strings.TrimSuffix(name, "s") + ".go", name + "_test.go"}
}

var sentenceEnd = regexp.MustCompile(`[.!?](\s|$)`)

func sentences(text string) int { return len(sentenceEnd.FindAllString(text, -1)) }

// isDirective reports whether a comment is for tools only.
func isDirective(doc *ast.CommentGroup) bool { return doc.Text() == "" }

func TestNoPackageIsNamedAfterNothing(t *testing.T) {
	forbidden := []string{"util", "utils", "common", "helper", "helpers", "manager", "managers", "impl", "misc", "shared", "base"}
	for dir, sources := range checkout(t).packages() {
		for _, word := range append(strings.Split(dir, "/"), sources[0].syntax.Name.Name) {
			if slices.Contains(forbidden, word) {
				t.Errorf("%s is named %q, which says nothing of what it holds", dir, word)
			}
		}
	}
}

func TestPackagesWithGoroutinesCheckThatNoneIsLeftBehind(t *testing.T) {
	seen := 0
	for dir, sources := range checkout(t).packages() {
		var starts, tested, checked bool
		for _, s := range sources {
			starts = starts || startsGoroutine(s.syntax)
			tested = tested || s.test
			checked = checked || s.test && (calls(s.syntax, "goleak", "VerifyTestMain") || calls(s.syntax, "fixture", "Main"))
		}
		if !starts || !tested {
			continue
		}
		seen++
		if !checked {
			t.Errorf("%s starts goroutines and has tests, but no TestMain with goleak.VerifyTestMain or fixture.Main", dir)
		}
	}
	if seen == 0 {
		t.Error("saw no package with goroutines and tests")
	}
}

// startsGoroutine reports whether the file has a go statement or calls a method Go, as those of
// errgroup.Group and sync.WaitGroup.
func startsGoroutine(file *ast.File) bool {
	found := false
	ast.Inspect(file, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.CallExpr:
			selector, ok := node.Fun.(*ast.SelectorExpr)
			found = found || ok && selector.Sel.Name == "Go"
		}
		return !found
	})
	return found
}

// calls reports whether the file names pkg.function.
func calls(file *ast.File, pkg, function string) bool { return find(file, pkg, function) != nil }

// find returns the first mention of pkg.function in the file.
func find(file *ast.File, pkg, function string) ast.Node {
	var found ast.Node
	ast.Inspect(file, func(node ast.Node) bool {
		if selector, ok := node.(*ast.SelectorExpr); ok && selector.Sel.Name == function {
			if x, ok := selector.X.(*ast.Ident); ok && x.Name == pkg {
				found = node
			}
		}
		return found == nil
	})
	return found
}

// backoffs are the files that may sleep, with the reason: a short, bounded wait before another try,
// where there is no context to end it.
var backoffs = map[string]string{
	"providers/guest/launch/launch.go": "a program that is still open for writing elsewhere (ETXTBSY) is tried again, a few times",
}

func TestNothingSleepsInProduction(t *testing.T) {
	seen := 0
	for _, s := range checkout(t).sources {
		if s.test {
			continue
		}
		seen++
		if node := find(s.syntax, "time", "Sleep"); node != nil && backoffs[s.file] == "" {
			t.Errorf("%s sleeps, which no context can end: select on a timer and the context", s.place(node))
		}
	}
	if seen < leastSources/2 {
		t.Errorf("saw only %d files", seen)
	}
}

func TestFailpointsHaveNamesOfTheirOwnThatBeginWithTheirRooms(t *testing.T) {
	points, err := failpoint.Find(checkout(t).root)
	if err != nil {
		t.Fatal(err)
	}
	if len(points) == 0 {
		t.Fatal("saw no failpoint")
	}
	places := map[string]string{}
	for _, point := range points {
		if other, taken := places[point.Name]; taken {
			t.Errorf("%s and %s both have a failpoint %s", other, point.File, point.Name)
		}
		places[point.Name] = point.File
		_, row, _ := arrows.RowOf(point.Package)
		_, outer, _ := arrows.RowOf(path.Dir(point.Package)) // of a package inside another one
		if !slices.ContainsFunc([]string{point.Package, row, outer}, func(dir string) bool { return hasPrefixWord(point.Name, path.Base(dir)) }) {
			t.Errorf("%s:%d: the failpoint %s does not begin with %q, its package's name", point.File, point.Line, point.Name, path.Base(row))
		}
	}
}

// hasPrefixWord reports whether a camelCase name begins with the word and has more.
func hasPrefixWord(name, word string) bool {
	rest, found := strings.CutPrefix(name, word)
	return found && rest != "" && unicode.IsUpper(rune(rest[0]))
}

// libraries are the modules that the product may import directly, with the reason for each. One that
// is not worth a line here is not worth having.
var libraries = map[string]string{
	"github.com/anishathalye/porcupine":         "conformance: whether some order of concurrent calls explains their answers",
	"github.com/containerd/errdefs":             "the classes of the Docker Engine's errors, as its client returns them",
	"github.com/docker/go-units":                "sizes with units, as 10GiB, as container tools write them",
	"github.com/moby/moby/api":                  "the Docker Engine's types, which its client speaks in",
	"github.com/moby/moby/client":               "Docker Engine: maintained, negotiates versions from 20.10 on",
	"github.com/oklog/ulid/v2":                  "ids that sort by time",
	"github.com/spf13/cobra":                    "the command line: help, completion and flags as people know them",
	"github.com/spf13/pflag":                    "cobra's flags, where a command defines a kind of its own",
	"go.etcd.io/bbolt":                          "the ledger: one file, transactions, no server",
	"go.uber.org/goleak":                        "tests: no goroutine is left behind",
	"go.yaml.in/yaml/v3":                        "the configuration file; the home of gopkg.in/yaml after its maintainer left",
	"golang.org/x/sync":                         "errgroup: goroutines that their owner waits for",
	"golang.org/x/sys":                          "system calls that the standard library has no name for",
	"golang.org/x/term":                         "raw terminals and their sizes",
	"google.golang.org/genproto/googleapis/rpc": "the standard error details",
	"google.golang.org/grpc":                    "the API",
	"google.golang.org/protobuf":                "the API's messages and the ledger's values",
}

// makefileTags is what the Makefile builds the programs with.
var makefileTags = regexp.MustCompile(`(?m)^BUILD_TAGS := (.*)$`)

func TestProgramsThatAreTestedAreBuiltWithTheTagsOfTheMakefile(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(checkout(t).root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	if tags := makefileTags.FindStringSubmatch(string(makefile)); tags == nil || tags[1] != fixture.BuildTags {
		t.Errorf("the Makefile has %q, and conformance/fixture has %q", tags, fixture.BuildTags)
	}
}

func TestTheReleasedBrokerHasNoFakeProvider(t *testing.T) {
	dependencies := func(tags string) string {
		command := exec.Command("go", "list", "-deps", "-tags", tags, fixture.BerthdPackage)
		command.Dir = checkout(t).root
		output, err := command.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(output)
	}
	for tags, want := range map[string]bool{fixture.BuildTags: false, fixture.TestTags: true} {
		if has := strings.Contains(dependencies(tags), arrows.Module+"/providers/fake\n"); has != want {
			t.Errorf("built with %s, berthd has the fake provider: %v, want %v", tags, has, want)
		}
	}
}

func TestEveryLibraryHasAReason(t *testing.T) {
	read := checkout(t)
	seen := map[string]bool{}
	for _, s := range read.sources {
		for _, imported := range s.imports() {
			first, _, _ := strings.Cut(imported, "/")
			if !strings.Contains(first, ".") || strings.HasPrefix(imported, arrows.Module+"/") {
				continue
			}
			library := libraryOf(imported)
			seen[library] = true
			if library == "" {
				t.Errorf("%s imports %s, which is on no list with a reason", s.file, imported)
			}
		}
	}
	if len(seen) < 4 {
		t.Errorf("saw only %d libraries", len(seen))
	}
	for _, required := range directRequires(t, read.root) {
		if libraries[required] == "" {
			t.Errorf("go.mod requires %s, which is on no list with a reason", required)
		}
	}
}

func libraryOf(imported string) string {
	for library := range libraries {
		if imported == library || strings.HasPrefix(imported, library+"/") {
			return library
		}
	}
	return ""
}

func directRequires(t *testing.T, root string) []string {
	t.Helper()
	command := exec.Command("go", "mod", "edit", "-json")
	command.Dir = root
	output, err := command.Output()
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	if err := json.Unmarshal(output, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Require) == 0 {
		t.Fatal("go.mod requires nothing")
	}
	var direct []string
	for _, require := range file.Require {
		if !require.Indirect {
			direct = append(direct, require.Path)
		}
	}
	return direct
}
