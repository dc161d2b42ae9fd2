package house

import (
	"path"
	"slices"
	"strings"
	"testing"
)

// arrow says what a room may import of the module, beside itself and proto. In room and in mayImport a
// * stands for one path element.
type arrow struct {
	room      string
	mayImport []string
}

// below are the rooms that every room with durable work in the daemon stands on.
var below = []string{"daemon/store", "daemon/guestlink", "daemon/fault", "providers"}

// arrows is the whole table; the first row that a package lies in is its room's. A package that lies in
// none fails. The arrows among the daemon's rooms run downwards: reconcile, pool, workspace, jobs,
// lifecycle, lease.
var arrows = []arrow{
	{"daemon/cmd/berthd", []string{"daemon/*", "providers", "providers/*"}},
	{"daemon/api", []string{"daemon/lifecycle", "daemon/jobs", "daemon/workspace", "daemon/lease", "daemon/pool", "daemon/reconcile", "daemon/fault", "daemon/vault"}},
	{"daemon/reconcile", on(below, "daemon/pool", "daemon/workspace", "daemon/jobs", "daemon/lifecycle", "daemon/lease")},
	{"daemon/pool", on(below, "daemon/workspace", "daemon/jobs", "daemon/lifecycle", "daemon/lease")},
	{"daemon/workspace", on(below, "daemon/jobs", "daemon/lifecycle", "daemon/lease")},
	{"daemon/jobs", on(below, "daemon/lifecycle", "daemon/lease", "daemon/vault")},
	{"daemon/lifecycle", on(below, "daemon/lease", "daemon/vault")},
	{"daemon/lease", below},
	{"daemon/guestlink", []string{"providers", "daemon/fault"}},
	{"daemon/vault", []string{"daemon/fault"}},
	{"daemon/store", []string{"daemon/fault"}},
	{"daemon/fault", nil},
	{"providers/guest", nil},
	{"providers/reverse", []string{"providers"}},
	{"providers/bridge", nil},
	{"providers/*", []string{"providers", "providers/reverse", "providers/bridge"}},
	{"providers", nil},
	{"client", nil},
	{"engine", []string{"client"}},
	{"conformance/provider", []string{"client", "providers"}},
	{"conformance/cmd", []string{"client", "conformance/*", "daemon/store"}}, // the bench measures commits
	{"conformance", []string{"client"}},
	{"examples", []string{"client"}},
}

// testArrows is what test files may import in addition: the exported suites and what says that a
// facility is missing; in the daemon also real providers, and the vault that services are made with.
// Tests in conformance may import everything.
var testArrows = []arrow{
	{"daemon/*", []string{"conformance/*", "providers/*", "providers/fake/liar", "daemon/vault"}},
	{"providers/*", []string{"conformance/*"}},
	{"client", []string{"conformance/*"}},
	{"engine", []string{"conformance/*"}},
	{"conformance", []string{"*", "*/*", "*/*/*"}},
}

func on(rooms []string, more ...string) []string { return slices.Concat(rooms, more) }

// roomOf returns the row of the package's room and the room's own directory.
func roomOf(pkg string, table []arrow) (row arrow, dir string, found bool) {
	for _, row := range table {
		if dir, found := within(pkg, row.room); found {
			return row, dir, true
		}
	}
	return arrow{}, "", false
}

// within returns the part of pkg that matches the pattern, if pkg is that or lies below it.
func within(pkg, pattern string) (dir string, found bool) {
	elements := strings.Split(pkg, "/")
	depth := strings.Count(pattern, "/") + 1
	if len(elements) < depth {
		return "", false
	}
	dir = path.Join(elements[:depth]...)
	matched, err := path.Match(pattern, dir)
	return dir, matched && err == nil
}

// mayImport reports whether code of package from may import package to, both of the module.
func mayImport(from, to string) bool {
	row, room, found := roomOf(from, arrows)
	if !found {
		return false
	}
	if _, own := within(to, room); own {
		return true
	}
	return matches(to, row.mayImport) || strings.HasPrefix(to, "proto/")
}

// mayImportInTests is mayImport for its test files.
func mayImportInTests(from, to string) bool {
	more, _, _ := roomOf(from, testArrows)
	return mayImport(from, to) || matches(to, more.mayImport)
}

func matches(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		matched, err := path.Match(pattern, pkg)
		return matched && err == nil
	})
}

func TestRoomsImportOnlyWhatTheTableAllows(t *testing.T) {
	seen := 0
	for _, s := range house(t).sources {
		if _, _, found := roomOf(s.dir, arrows); !found && !strings.HasPrefix(s.dir, "proto/") {
			t.Errorf("%s lies in no room of the table", s.file)
		}
		for _, imported := range s.imports() {
			to, ours := strings.CutPrefix(imported, module+"/")
			if !ours {
				continue
			}
			seen++
			if s.test && mayImportInTests(s.dir, to) || mayImport(s.dir, to) {
				continue
			}
			t.Errorf("%s imports %s, which no arrow allows", s.file, to)
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
		{"a room may import what its row says", "daemon/jobs", "daemon/store", mayImport, true},
		{"a room may import its own inner packages", "providers/guest", "providers/guest/spool", mayImport, true},
		{"inner packages may import one another", "providers/guest/spool", "providers/guest/record", mayImport, true},
		{"another room's inner packages stay inner", "daemon/jobs", "daemon/store/buckets", mayImport, false},
		{"every room may import the generated code", "providers/guest", "proto/berth/v1", mayImport, true},
		{"downwards is allowed", "daemon/jobs", "daemon/lifecycle", mayImport, true},
		{"upwards is not", "daemon/lifecycle", "daemon/jobs", mayImport, false},
		{"upwards is not for a test either", "daemon/store", "daemon/jobs", mayImportInTests, false},
		{"the API never reads the ledger itself", "daemon/api", "daemon/store", mayImport, false},
		{"a provider may import the contract", "providers/local", "providers", mayImport, true},
		{"a provider never imports another one", "providers/local", "providers/docker", mayImport, false},
		{"a provider never imports the daemon", "providers/local", "daemon/fault", mayImport, false},
		{"the wiring imports every provider", "daemon/cmd/berthd", "providers/local", mayImport, true},
		{"only the wiring does", "daemon/lifecycle", "providers/local", mayImport, false},
		{"a test of the daemon may use a real one", "daemon/lifecycle", "providers/local", mayImportInTests, true},
		{"a test may say what it needs", "providers/local", "conformance/need", mayImportInTests, true},
		{"production code may not", "providers/local", "conformance/need", mayImport, false},
		{"the guest imports nothing of ours", "providers/guest", "providers", mayImport, false},
		{"the engine reaches machines through the client", "engine/cmd/berth-engine", "client", mayImport, true},
		{"and through nothing else", "engine", "daemon/api", mayImport, false},
		{"a test in conformance may import everything", "conformance/house", "daemon/fault", mayImportInTests, true},
		{"the rest of conformance may not", "conformance/crash", "daemon/fault", mayImport, false},
		{"a room that is not in the table imports nothing", "attic", "client", mayImport, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := test.rule(test.from, test.to); got != test.want {
				t.Errorf("%s may import %s: %v, want %v", test.from, test.to, got, test.want)
			}
		})
	}
}

// keptLibraries are libraries that only some rooms know, in code that is not a test's.
var keptLibraries = []struct {
	library string
	rooms   []string
	reason  string
}{
	{"go.etcd.io/bbolt", []string{"daemon/store", "engine"}, "the ledger is one room's business; the engine's threads are a file of their own"},
	{"google.golang.org/grpc/status", statusRooms, "rooms below the API say what went wrong in fault's words"},
	{"google.golang.org/grpc/codes", statusRooms, "rooms below the API say what went wrong in fault's words"},
	{"github.com/docker/docker", nil, "frozen and deprecated by its maintainers; github.com/moby/moby/client took its place"},
	{"go.etcd.io/gofail", nil, "failpoints are comments; conformance/failpoint switches them on in a copy"},
}

var statusRooms = []string{"daemon/api", "daemon/guestlink", "daemon/cmd/berthd", "client", "providers/guest", "providers/fake/liar"}

func TestSomeLibrariesAreKnownToSomeRoomsOnly(t *testing.T) {
	seen := 0
	for _, s := range house(t).sources {
		if s.test {
			continue
		}
		for _, imported := range s.imports() {
			for _, kept := range keptLibraries {
				if imported != kept.library && !strings.HasPrefix(imported, kept.library+"/") {
					continue
				}
				seen++
				if !slices.ContainsFunc(kept.rooms, func(room string) bool { _, in := within(s.dir, room); return in }) {
					t.Errorf("%s imports %s: %s", s.file, imported, kept.reason)
				}
			}
		}
	}
	if seen == 0 {
		t.Error("saw none of these libraries anywhere: the names must be wrong")
	}
}
