// Package defect holds what the tests are worth: a table of defects, each of which takes one guard out of
// the product, and the test that must fail then. The product's own source never holds one: a defect lives
// in a copy of one file that a build is given in the place of the file, and nowhere else.
package defect

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Defect takes one guard out.
type Defect struct {
	Name  string // a sentence: what goes wrong
	Guard string // what it takes out
	File  string // relative to the module's root
	Old   string // in the file, exactly once
	New   string // in its place; the file must still compile
	// Room and Test are the test that must fail: a package relative to the root, and the test's name.
	Room, Test string
	// Robust says that the robust suite must find it too.
	Robust bool
}

// Overlay writes a copy of the defect's file with the defect in it into dir, and beside it what
// `go build -overlay` reads. It returns the path of that. root is the module's.
func (d Defect) Overlay(root, dir string) (string, error) {
	path := filepath.Join(root, filepath.FromSlash(d.File))
	source, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read the source of defect %q: %w", d.Name, err)
	}
	if n := strings.Count(string(source), d.Old); n != 1 {
		return "", fmt.Errorf("defect %q: %s holds its old text %d times, want once: mend the table", d.Name, d.File, n)
	}
	if d.Old == d.New {
		return "", fmt.Errorf("defect %q changes nothing in %s", d.Name, d.File)
	}
	copied := filepath.Join(dir, filepath.Base(d.File))
	if err := os.WriteFile(copied, []byte(strings.Replace(string(source), d.Old, d.New, 1)), 0o600); err != nil {
		return "", fmt.Errorf("write defect %q: %w", d.Name, err)
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: copied}})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, overlay, 0o600); err != nil {
		return "", fmt.Errorf("write defect %q: %w", d.Name, err)
	}
	return file, nil
}
