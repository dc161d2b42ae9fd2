// Package archtest holds the rules of the tree that a compiler and a linter do not: which package may import
// which, where a package says what it is, which libraries stay out, and that the public API
// and the broker speak of the same things. It is tests only and never changes a file; every test also
// counts what it looked at, so that none can pass by looking at nothing.
package archtest

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"
)

// What the tree has at the very least. A test that sees less does not see the tree.
const (
	leastFiles    = 75 // files that git knows
	leastSources  = 40 // Go files that are not generated
	leastPackages = 12 // of those, by directory
)

// tree is what git knows, or would know at the next `git add .`, of the module.
type tree struct {
	root    string
	files   []string // paths relative to root, with slashes
	sources []source // the Go files among them that are not generated
}

// source is one Go file.
type source struct {
	file   string // relative to the tree's root
	dir    string // the package's directory, which is its import path in the module
	test   bool
	syntax *ast.File
	fset   *token.FileSet
}

// place returns file:line of a node.
func (s source) place(node ast.Node) string {
	return s.file + ":" + strconv.Itoa(s.fset.Position(node.Pos()).Line)
}

// imports returns the paths that the file imports.
func (s source) imports() []string {
	var paths []string
	for _, spec := range s.syntax.Imports {
		if path, err := strconv.Unquote(spec.Path.Value); err == nil {
			paths = append(paths, path)
		}
	}
	return paths
}

// packages returns the tree's Go files by directory.
func (t tree) packages() map[string][]source {
	packages := map[string][]source{}
	for _, s := range t.sources {
		packages[s.dir] = append(packages[s.dir], s)
	}
	return packages
}

// checkout returns the tree, read once for all tests.
func checkout(t *testing.T) tree {
	t.Helper()
	read, err := readOnce()
	if err != nil {
		t.Fatal(err)
	}
	if len(read.files) < leastFiles || len(read.sources) < leastSources || len(read.packages()) < leastPackages {
		t.Fatalf("saw %d files, %d Go files and %d packages: that is not the tree", len(read.files), len(read.sources), len(read.packages()))
	}
	return read
}

var readOnce = sync.OnceValues(readTree)

func readTree() (tree, error) {
	root, err := fixture.ModuleRoot(context.Background())
	if err != nil {
		return tree{}, err
	}
	command := exec.Command("git", "ls-files", "-z", "-co", "--exclude-standard")
	command.Dir = root
	listing, err := command.Output()
	if err != nil {
		return tree{}, err
	}
	read := tree{root: root}
	for file := range strings.SplitSeq(strings.TrimSuffix(string(listing), "\x00"), "\x00") {
		if _, err := os.Lstat(filepath.Join(root, file)); errors.Is(err, fs.ErrNotExist) {
			continue // removed, and git has not been told yet
		}
		read.files = append(read.files, file)
		if path.Ext(file) != ".go" || strings.Contains(file, "testdata/") {
			continue
		}
		fset := token.NewFileSet()
		syntax, err := parser.ParseFile(fset, filepath.Join(root, file), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return tree{}, err
		}
		if ast.IsGenerated(syntax) {
			continue
		}
		read.sources = append(read.sources, source{
			file:   file,
			dir:    path.Dir(file),
			test:   strings.HasSuffix(file, "_test.go"),
			syntax: syntax,
			fset:   fset,
		})
	}
	if err := tellTestCache(root, read.files); err != nil {
		return tree{}, err
	}
	slices.SortFunc(read.sources, func(a, b source) int { return strings.Compare(a.file, b.file) })
	return read, nil
}

// tellTestCache reads every directory of the tree, so that `go test` sees a new file and does not
// answer from its cache.
func tellTestCache(root string, files []string) error {
	dirs := map[string]bool{}
	for _, file := range files {
		for dir := path.Dir(file); !dirs[dir]; dir = path.Dir(dir) {
			dirs[dir] = true
			if _, err := os.ReadDir(filepath.Join(root, dir)); err != nil {
				return err
			}
		}
	}
	return nil
}
