// Package arrows is the table of which package may import which. The lint rule in .golangci.yml and the
// table in ARCHITECTURE.md are written from it by `make generate`, and conformance/archtest holds every file
// to it. It never reads the tree itself.
package arrows

import (
	"path"
	"slices"
	"strings"
)

// Module is the product's module path.
const Module = "github.com/berth-sandbox/berth"

// Row says what a package, with the packages inside it, may import of the module beside itself and proto.
// In Package and in MayImport a * stands for one path element.
type Row struct {
	Package   string
	Holds     string // for ARCHITECTURE.md
	MayImport []string
}

// layers are the daemon's packages with durable work, from the top down. Each may import those below it.
var layers = []string{
	"daemon/fsck", "daemon/reconcile", "daemon/backup", "daemon/pool", "daemon/checkpoint", "daemon/files", "daemon/workspace",
	"daemon/jobs", "daemon/output", "daemon/lifecycle", "daemon/sandbox", "daemon/machines", "daemon/operation", "daemon/lease", "daemon/events", "daemon/request",
}

// foundations are below all layers.
var foundations = []string{"daemon/guestlink", "daemon/store", "daemon/vault", "daemon/fault", "providers"}

// Table is every row. The first one that matches a package is the package's; one that none matches is
// refused. A row may be there before its package is.
var Table = []Row{
	{"daemon/cmd/berthd", "the wiring: flags, listeners; the only package that knows a concrete provider", []string{"daemon/*", "daemon/jobs/*", "providers", "providers/*"}},
	{"daemon/api", "gRPC services: authentication, validation, mapping, errors", slices.Concat(layers, []string{"daemon/auth", "daemon/vault", "daemon/fault"})},
	{"daemon/auth", "credentials and the principals they stand for", []string{"daemon/request", "daemon/vault", "daemon/fault"}},
	{"daemon/harness", "real services over machines that fail as a test has it; for tests of what stands on jobs", []string{"daemon/*", "providers", "providers/fake", "conformance/fixture"}},
	{"daemon/reconcile", "recovery at boot, silent machines, machines without a record, trimming", below("daemon/reconcile")},
	{"daemon/fsck", "compares the ledger with the machines, and repairs", below("daemon/fsck")},
	{"daemon/backup", "copies of the ledger and the kept output while the broker runs", below("daemon/backup")},
	{"daemon/pool", "warm machines and claims", below("daemon/pool")},
	{"daemon/checkpoint", "checkpoints, restore, fork", below("daemon/checkpoint")},
	{"daemon/files", "file calls", below("daemon/files")},
	{"daemon/workspace", "git in a machine", below("daemon/workspace")},
	{"daemon/jobs/*", "inner packages of the job ledger", slices.Concat([]string{"daemon/jobs/*"}, below("daemon/jobs"))},
	{"daemon/jobs", "the job ledger: reserve, begin, follow, receipt", below("daemon/jobs")},
	{"daemon/output", "output that receipts keep: copy in, read, bound, expire", below("daemon/output")},
	{"daemon/lifecycle", "sandboxes as durable operations made of idempotent steps", below("daemon/lifecycle")},
	{"daemon/sandbox", "reads sandboxes' records; their secrets and session keys", below("daemon/sandbox")},
	{"daemon/machines", "machines at their providers: what one can do, boot, find, freeze, destroy; the link to a guest", below("daemon/machines")},
	{"daemon/operation", "durable operations: write down, probe, act, record, undo; knows no sandbox", []string{"daemon/events", "daemon/request", "daemon/store", "daemon/fault", "providers"}},
	{"daemon/lease", "holders, epochs, fencing, expiry", []string{"daemon/events", "daemon/request", "daemon/store", "daemon/fault"}},
	{"daemon/events", "notifies subscribers and waiters of what a commit changed, after it", []string{"daemon/store"}},
	{"daemon/request", "what every call has in common: namespace, request-id records, ids, label match", []string{"daemon/store", "daemon/fault"}},
	{"daemon/guestlink", "one live connection to each guest: dial, hello, redial", []string{"providers", "daemon/fault"}},
	{"daemon/store", "bbolt and nothing else: keys, indexes, group commit, migrations", []string{"daemon/fault"}},
	{"daemon/vault", "the broker's key: seals secrets, hashes request bodies", []string{"daemon/fault"}},
	{"daemon/fault", "the broker's error kinds and reasons", nil},
	{"providers/guest", "the program in the machine", nil},
	{"providers/reverse", "a dialer for machines that dial out", []string{"providers"}},
	{"providers/bridge", "a stream over the stdio of `berth-guest bridge`", nil},
	{"providers/guestlog", "why a guest ended, as the end of its log has it, in words", nil},
	{"providers/*", "one provider each: local (process trees on this host), docker (containers of an engine), fake (fails on purpose, for tests)", []string{"providers", "providers/reverse", "providers/bridge", "providers/guestlog"}},
	{"providers", "the contract of a provider", nil},
	{"client", "the Go client, and the command line on it", nil},
	{"engine", "agents' threads, on the client", []string{"client"}},
	{"conformance/provider", "the contract of a provider as one exported suite", []string{"client", "providers", "conformance/*"}},
	{"conformance/cmd", "programs for developers; the bench measures the ledger's commits too", []string{"client", "conformance/*", "daemon/store"}},
	{"conformance", "the promises, as suites (below)", []string{"client"}},
	{"examples", "programs on the client", []string{"client"}},
}

// inTests is what test files may import in addition: the exported suites and what says that a facility is
// missing; in the daemon also real providers, and the vault that services are made with. Tests in conformance
// may import everything.
var inTests = []Row{
	{Package: "daemon", MayImport: []string{"daemon/harness", "conformance/*", "providers/*", "providers/fake/faultproxy", "daemon/vault"}},
	{Package: "providers", MayImport: []string{"conformance/*"}},
	{Package: "client", MayImport: []string{"conformance/*"}},
	{Package: "engine", MayImport: []string{"conformance/*"}},
	{Package: "conformance", MayImport: []string{"*", "*/*", "*/*/*"}},
}

// Library is one that only some packages may import, in code that is not a test's.
type Library struct {
	Path     string
	Packages []string // which may, with the packages inside them
	Reason   string
}

var statusPackages = []string{"daemon/api", "daemon/guestlink", "daemon/cmd/berthd", "client", "providers/guest", "providers/fake/faultproxy"}

// Libraries are all of these.
var Libraries = []Library{
	{"go.etcd.io/bbolt", []string{"daemon/store", "engine"}, "the ledger is daemon/store's alone; the engine's threads are a file of their own"},
	{"google.golang.org/grpc/status", statusPackages, "below the API, errors are those of daemon/fault"},
	{"google.golang.org/grpc/codes", statusPackages, "below the API, errors are those of daemon/fault"},
	{"github.com/docker/docker", nil, "frozen and deprecated by its maintainers; use github.com/moby/moby/client"},
	{"go.etcd.io/gofail", nil, "failpoints are comments; conformance/failpoint switches them on in a copy"},
}

// below returns what a layer may import: the layers under it and the foundations.
func below(layer string) []string {
	return slices.Concat(layers[slices.Index(layers, layer)+1:], foundations)
}

// RowOf returns the row of a package, and the directory that the row's pattern matched.
func RowOf(pkg string) (row Row, dir string, found bool) { return rowOf(pkg, Table) }

func rowOf(pkg string, table []Row) (row Row, dir string, found bool) {
	for _, row := range table {
		if dir, found := Within(pkg, row.Package); found {
			return row, dir, true
		}
	}
	return Row{}, "", false
}

// Within reports whether pkg matches the pattern or lies below what does, and returns the part that matched.
func Within(pkg, pattern string) (dir string, found bool) {
	elements := strings.Split(pkg, "/")
	depth := strings.Count(pattern, "/") + 1
	if len(elements) < depth {
		return "", false
	}
	dir = path.Join(elements[:depth]...)
	matched, err := path.Match(pattern, dir)
	return dir, matched && err == nil
}

// MayImport reports whether code of package from may import package to, both relative to the module.
func MayImport(from, to string) bool {
	row, dir, found := RowOf(from)
	if !found {
		return false
	}
	if _, own := Within(to, dir); own {
		return true
	}
	return matches(to, row.MayImport) || strings.HasPrefix(to, "proto/")
}

// MayImportInTests is MayImport for the package's test files.
func MayImportInTests(from, to string) bool {
	more, _, _ := rowOf(from, inTests)
	return MayImport(from, to) || matches(to, more.MayImport)
}

func matches(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		matched, err := path.Match(pattern, pkg)
		return matched && err == nil
	})
}
