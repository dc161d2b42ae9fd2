package mutation

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"
)

func TestEveryMarkHasARowAndEveryRowAMark(t *testing.T) {
	root := moduleRoot(t)
	marks, err := Marks(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for _, guard := range Guards {
		if guard.Is == "" || guard.Package == "" || guard.Test == "" || rows[guard.Mark] {
			t.Errorf("the row of %s lacks something, or is there twice: %+v", guard.Mark, guard)
		}
		rows[guard.Mark] = true
		mark, found := marks[guard.Mark]
		if !found {
			t.Errorf("no code bears the mark %s", guard.Mark)
			continue
		}
		if _, err := mark.Overlay(root, t.TempDir()); err != nil {
			t.Error(err)
		}
	}
	for name, mark := range marks {
		if !rows[name] {
			t.Errorf("%s:%d: the mark %s has no row in conformance/mutation/guards.go", mark.File, mark.Line, name)
		}
	}
}

func TestMarksAreReadAndWrongOnesRefused(t *testing.T) {
	const code = "package p\n\nfunc f(a bool) {\n\tif a {\n\t\tpanic(a)\n\t}\n}\n"
	marked := func(mark string) string { return strings.Replace(code, "\tif a {", mark+"\n\tif a {", 1) }
	for _, test := range []struct {
		name, file, text string
		want             Mark
		refused          string
	}{
		{name: "another line", text: marked("\t//mutation:guard if false {"), want: Mark{Name: "guard", File: "p.go", Line: 5, Code: "if false {"}},
		{name: "no line", text: marked("//mutation:guard-2"), want: Mark{Name: "guard-2", File: "p.go", Line: 5}},
		{name: "a space", text: marked("\t// mutation:guard"), refused: "p.go:4: a mark is"},
		{name: "no name", text: marked("\t//mutation: if false {"), refused: "p.go:4: a mark is"},
		{name: "behind code", text: strings.Replace(code, "if a {", "if a { //mutation:guard", 1), refused: "p.go:4: a mark is"},
		{name: "in a test", file: "p_test.go", text: marked("\t//mutation:guard"), refused: "in no test"},
		{name: "above a comment", text: marked("\t//mutation:guard\n\t// so"), refused: "no code below"},
		{name: "above nothing", text: "//mutation:guard", refused: "no code below"},
		{name: "a mutant that is none", text: marked("\t//mutation:guard if a {"), refused: "no other than the code"},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := test.file
			if file == "" {
				file = "p.go"
			}
			marks, err := marksIn(file, test.text)
			switch {
			case test.refused != "":
				if err == nil || !strings.Contains(err.Error(), test.refused) {
					t.Errorf("read %v (%v), want an error with %q", marks, err, test.refused)
				}
			case err != nil || len(marks) != 1 || marks[0] != test.want:
				t.Errorf("read %v (%v), want %v", marks, err, test.want)
			}
		})
	}
}

func TestAMutantHasItsLineInThePlaceOfTheGuardedOne(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "p.go"), []byte("package p\n\n//mutation:guard const a = 2\nconst a = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if _, err := (Mark{Name: "guard", File: "p.go", Line: 4, Code: "const a = 2"}).Overlay(root, dir); err != nil {
		t.Fatal(err)
	}
	mutant, err := os.ReadFile(filepath.Join(dir, "p.go"))
	if want := "package p\n\n//mutation:guard const a = 2\nconst a = 2\n"; err != nil || string(mutant) != want {
		t.Errorf("the mutant is %q (%v), want %q", mutant, err, want)
	}
	if _, err := (Mark{Name: "guard", File: "p.go", Line: 4, Code: "const a = {"}).Overlay(root, dir); err == nil {
		t.Error("a mutant that is no Go was written")
	}
}

func moduleRoot(t *testing.T) string {
	t.Helper()
	root, err := fixture.ModuleRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return root
}
