package arrows

import (
	"fmt"
	"path"
	"strings"
)

// Generated are the files that hold a part written from the table, relative to the module's root, each with
// what writes the part. dirs returns the directories of the tree that match a pattern.
var Generated = map[string]func(dirs func(pattern string) []string) string{
	".golangci.yml":   LintRules,
	"ARCHITECTURE.md": Page,
}

// The marks around a generated part are on lines of their own, in a comment of the file's own syntax.
const (
	beginMark = "BEGIN: written by `make generate` from conformance/arrows"
	endMark   = "END: written by `make generate`"
)

// Replace returns a file's text with the part between the marks replaced.
func Replace(text, part string) (string, error) {
	before, rest, found := strings.Cut(text, beginMark)
	if !found {
		return "", fmt.Errorf("there is no line with %q", beginMark)
	}
	tail, _, _ := strings.Cut(rest, "\n")
	from := len(before) + len(beginMark) + len(tail) + 1
	end := strings.Index(text, endMark)
	if end < from {
		return "", fmt.Errorf("there is no line with %q after %q", endMark, beginMark)
	}
	to := strings.LastIndex(text[:end], "\n") + 1
	return text[:from] + part + text[to:], nil
}

// LintRules are the rules of golangci-lint's depguard: the table as an editor can show it, for code that is
// not a test's.
func LintRules(dirs func(pattern string) []string) string {
	var text strings.Builder
	for i, row := range Table {
		for _, pkg := range dirs(row.Package) {
			if first, _, _ := RowOf(pkg); first.Package != row.Package {
				continue
			}
			files := []string{`"!$test"`, glob("", pkg)}
			for _, earlier := range Table[:i] {
				if _, inside := Within(earlier.Package, pkg); inside {
					files = append(files, glob("!", earlier.Package))
				}
			}
			fmt.Fprintf(&text, "        %s:\n          list-mode: lax\n          files: [%s]\n          allow:\n", ruleName(pkg), strings.Join(files, ", "))
			allowed := []string{"proto/", pkg + "$", pkg + "/"}
			for _, pattern := range row.MayImport {
				for _, other := range dirs(pattern) {
					allowed = append(allowed, other+"$")
				}
			}
			for _, other := range allowed {
				fmt.Fprintf(&text, "            - %s/%s\n", Module, other)
			}
			fmt.Fprintf(&text, "          deny:\n            - {pkg: %s/, desc: the table in conformance/arrows does not allow it}\n", Module)
		}
	}
	for _, library := range Libraries {
		files := []string{`"!$test"`}
		for _, pkg := range library.Packages {
			files = append(files, glob("!", pkg))
		}
		fmt.Fprintf(&text, "        %s:\n          files: [%s]\n          deny:\n            - {pkg: %s, desc: %q}\n", ruleName(library.Path), strings.Join(files, ", "), library.Path, library.Reason)
	}
	return text.String()
}

// ruleName is the key of a rule: without dots, which are separators to golangci-lint.
func ruleName(pkg string) string { return strings.NewReplacer("/", "-", ".", "-").Replace(pkg) }

func glob(not, pkg string) string { return fmt.Sprintf(`"%s${config-path}/%s/**"`, not, pkg) }

// Page is the table for ARCHITECTURE.md, of the packages that there are.
func Page(dirs func(pattern string) []string) string {
	var text strings.Builder
	text.WriteString("\n| package | holds | may import |\n|---|---|---|\n")
	for _, row := range Table {
		if len(dirs(row.Package)) == 0 {
			continue
		}
		var may []string
		for _, allowed := range row.MayImport {
			if len(dirs(allowed)) > 0 {
				may = append(may, short(allowed, row.Package))
			}
		}
		cell := "nothing"
		if len(may) > 0 {
			cell = "`" + strings.Join(may, " ") + "`"
		}
		fmt.Fprintf(&text, "| `%s` | %s | %s |\n", row.Package, row.Holds, cell)
	}
	text.WriteString("\n")
	return text.String()
}

// short is a package's name beside its siblings': daemon/store is store to what lies in daemon.
func short(pkg, beside string) string {
	if top, _, _ := strings.Cut(beside, "/"); top == "daemon" && path.Dir(pkg) == "daemon" {
		return path.Base(pkg)
	}
	return pkg
}
