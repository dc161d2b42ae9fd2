// Package mutation holds what the tests are worth: the guards in the code that its promises rest on, and for each
// the test that must fail without it. The product's own source never lacks one: a mutant is a copy of one file
// that a build is given in the place of the file, and nowhere else.
package mutation

import (
	"context"
	"encoding/json"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Mark is a guard's place in the code. It is a comment on a line of its own, above the guarded line:
//
//	//mutation:boot-fence case false:
//	case r.GetBootId() != s.BootID:
//
// The mutant has the text behind the name in the place of the line below; without a text it has nothing there.
type Mark struct {
	Name string
	File string // relative to the module's root
	Line int    // of the guarded line, from 1
	Code string // what the mutant has there
}

var (
	markLine = regexp.MustCompile(`^\s*//mutation:([a-z][a-z0-9-]*)(?: (.+))?$`)
	// anyMark is what was meant for a mark.
	anyMark = regexp.MustCompile(`//\s*mutation:`)
	// noCode is a line that nothing can guard: an empty one or a comment.
	noCode = regexp.MustCompile(`^\s*(//.*)?$`)
)

// Marks returns the marks in the module's code, by name. Errors: a mark that is malformed, stands in a test, is
// there twice, or has no code below it.
func Marks(ctx context.Context, root string) (map[string]Mark, error) {
	list := exec.CommandContext(ctx, "git", "grep", "-z", "-l", "--untracked", "-E", `//[[:space:]]*mutation:`, "--", "*.go", ":!conformance")
	list.Dir = root
	files, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("search the marks: %w", err)
	}
	marks := map[string]Mark{}
	for file := range strings.SplitSeq(strings.TrimSuffix(string(files), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(file)))
		if err != nil {
			return nil, fmt.Errorf("read the marks: %w", err)
		}
		found, err := marksIn(file, string(text))
		if err != nil {
			return nil, err
		}
		for _, mark := range found {
			if other, twice := marks[mark.Name]; twice {
				return nil, fmt.Errorf("%s:%d and %s:%d both bear the mark %s", other.File, other.Line, mark.File, mark.Line, mark.Name)
			}
			marks[mark.Name] = mark
		}
	}
	return marks, nil
}

func marksIn(file, text string) ([]Mark, error) {
	var marks []Mark
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if !anyMark.MatchString(line) {
			continue
		}
		parts := markLine.FindStringSubmatch(line)
		switch {
		case parts == nil:
			return nil, fmt.Errorf("%s:%d: a mark is `//mutation:some-name` and what the mutant has in the place of the next line, alone on its line", file, i+1)
		case strings.HasSuffix(file, "_test.go"):
			return nil, fmt.Errorf("%s:%d: a guard is in no test", file, i+1)
		case i+1 == len(lines) || noCode.MatchString(lines[i+1]):
			return nil, fmt.Errorf("%s:%d: there is no code below the mark %s", file, i+1, parts[1])
		case strings.TrimSpace(lines[i+1]) == parts[2]:
			return nil, fmt.Errorf("%s:%d: the mutant %s is no other than the code", file, i+1, parts[1])
		}
		marks = append(marks, Mark{Name: parts[1], File: file, Line: i + 2, Code: parts[2]})
	}
	return marks, nil
}

// Overlay writes a copy of the mark's file without the guard into dir, and beside it what `go build -overlay`
// reads. It returns the path of that. root is the module's. Errors: the mutant is no Go.
func (m Mark) Overlay(root, dir string) (string, error) {
	path := filepath.Join(root, filepath.FromSlash(m.File))
	source, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the source of mutant %s: %w", m.Name, err)
	}
	lines := slices.Collect(strings.Lines(string(source)))
	lines[m.Line-1] = m.Code + "\n"
	mutant := []byte(strings.Join(lines, ""))
	if _, err := format.Source(mutant); err != nil {
		return "", fmt.Errorf("mutant %s is no Go: %w", m.Name, err)
	}
	copied := filepath.Join(dir, filepath.Base(m.File))
	if err := os.WriteFile(copied, mutant, 0o600); err != nil {
		return "", fmt.Errorf("write mutant %s: %w", m.Name, err)
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: copied}})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return "", fmt.Errorf("write mutant %s: %w", m.Name, err)
	}
	return file, nil
}
