package archtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/berth-sandbox/berth/conformance/arrows"
)

func TestPackagesImportOnlyWhatTheTableAllows(t *testing.T) {
	seen := 0
	for _, s := range checkout(t).sources {
		if _, _, found := arrows.RowOf(s.dir); !found && !strings.HasPrefix(s.dir, "proto/") {
			t.Errorf("%s lies in no row of the table in conformance/arrows", s.file)
		}
		for _, imported := range s.imports() {
			to, ours := strings.CutPrefix(imported, arrows.Module+"/")
			if !ours {
				continue
			}
			seen++
			if s.test && arrows.MayImportInTests(s.dir, to) || arrows.MayImport(s.dir, to) {
				continue
			}
			t.Errorf("%s imports %s, which the table in conformance/arrows does not allow", s.file, to)
		}
	}
	if seen < 30 {
		t.Errorf("saw %d imports of our own packages: too few to have looked", seen)
	}
}

func TestTheTableOfArrows(t *testing.T) {
	for _, test := range []struct {
		name     string
		from, to string
		rule     func(from, to string) bool
		want     bool
	}{
		{"a package may import what its row says", "daemon/jobs", "daemon/store", arrows.MayImport, true},
		{"a package may import its own inner packages", "providers/guest", "providers/guest/spool", arrows.MayImport, true},
		{"inner packages may import one another", "providers/guest/spool", "providers/guest/record", arrows.MayImport, true},
		{"another package's inner packages stay inner", "daemon/jobs", "daemon/store/buckets", arrows.MayImport, false},
		{"every package may import the generated code", "providers/guest", "proto/berth/v1", arrows.MayImport, true},
		{"downwards is allowed", "daemon/jobs", "daemon/lifecycle", arrows.MayImport, true},
		{"upwards is not", "daemon/lifecycle", "daemon/jobs", arrows.MayImport, false},
		{"upwards is not for a test either", "daemon/store", "daemon/jobs", arrows.MayImportInTests, false},
		{"inner packages of the job ledger may import one another", "daemon/jobs/follow", "daemon/jobs/attached", arrows.MayImport, true},
		{"but not the package around them", "daemon/jobs/follow", "daemon/jobs", arrows.MayImport, false},
		{"the package around them imports them", "daemon/jobs", "daemon/jobs/follow", arrows.MayImport, true},
		{"an operation knows no sandbox", "daemon/operation", "daemon/lifecycle", arrows.MayImport, false},
		{"nor a guest", "daemon/operation", "daemon/guestlink", arrows.MayImport, false},
		{"the API never reads the ledger itself", "daemon/api", "daemon/store", arrows.MayImport, false},
		{"a provider may import the contract", "providers/local", "providers", arrows.MayImport, true},
		{"a provider never imports another one", "providers/local", "providers/docker", arrows.MayImport, false},
		{"a provider never imports the daemon", "providers/local", "daemon/fault", arrows.MayImport, false},
		{"the wiring imports every provider", "daemon/cmd/berthd", "providers/local", arrows.MayImport, true},
		{"only the wiring does", "daemon/lifecycle", "providers/local", arrows.MayImport, false},
		{"a test of the daemon may use a real one", "daemon/lifecycle", "providers/local", arrows.MayImportInTests, true},
		{"a test may say what it needs", "providers/local", "conformance/testenv", arrows.MayImportInTests, true},
		{"production code may not", "providers/local", "conformance/testenv", arrows.MayImport, false},
		{"the guest imports nothing of ours", "providers/guest", "providers", arrows.MayImport, false},
		{"the engine reaches machines through the client", "engine/cmd/berth-engine", "client", arrows.MayImport, true},
		{"and through nothing else", "engine", "daemon/api", arrows.MayImport, false},
		{"a test in conformance may import everything", "conformance/archtest", "daemon/fault", arrows.MayImportInTests, true},
		{"the rest of conformance may not", "conformance/crash", "daemon/fault", arrows.MayImport, false},
		{"a package that is not in the table imports nothing", "attic", "client", arrows.MayImport, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.rule(test.from, test.to); got != test.want {
				t.Errorf("%s may import %s: %v, want %v", test.from, test.to, got, test.want)
			}
		})
	}
}

func TestSomeLibrariesAreKnownToSomePackagesOnly(t *testing.T) {
	seen := 0
	for _, s := range checkout(t).sources {
		if s.test {
			continue
		}
		for _, imported := range s.imports() {
			for _, kept := range arrows.Libraries {
				if imported != kept.Path && !strings.HasPrefix(imported, kept.Path+"/") {
					continue
				}
				seen++
				if !slices.ContainsFunc(kept.Packages, func(pkg string) bool { _, in := arrows.Within(s.dir, pkg); return in }) {
					t.Errorf("%s imports %s: %s", s.file, imported, kept.Reason)
				}
			}
		}
	}
	if seen == 0 {
		t.Error("saw none of these libraries anywhere: the names must be wrong")
	}
}

func TestTheGeneratedPartsAreWhereTheyBelong(t *testing.T) {
	for file := range arrows.Generated {
		text, err := os.ReadFile(filepath.Join(checkout(t).root, file))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := arrows.Replace(string(text), ""); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
