// Command arrows writes the parts of .golangci.yml and ARCHITECTURE.md that follow from the table in
// conformance/arrows. It runs in the module's root, as part of `make generate`, and touches no other file.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/berth-sandbox/berth/conformance/arrows"
)

func main() {
	for file, part := range arrows.Generated {
		if err := write(file, part(dirs)); err != nil {
			fmt.Fprintf(os.Stderr, "arrows: %s: %v\n", file, err)
			os.Exit(1)
		}
	}
}

func write(file, part string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	replaced, err := arrows.Replace(string(text), part)
	if err != nil || replaced == string(text) {
		return err
	}
	return os.WriteFile(file, []byte(replaced), 0o644) //nolint:gosec // as git has it
}

// dirs returns the directories that match a pattern.
func dirs(pattern string) []string {
	found, err := filepath.Glob(pattern)
	if err != nil {
		panic(err) // a pattern of the table is malformed
	}
	return slices.DeleteFunc(found, func(path string) bool {
		info, err := os.Stat(path)
		return err != nil || !info.IsDir()
	})
}
