package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client/cli/broker"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func (b *fakeBroker) Fsck(_ context.Context, r *berthv1.FsckRequest) (*berthv1.FsckResponse, error) {
	b.mu.Lock()
	leftOut := b.leftOut
	b.mu.Unlock()
	return &berthv1.FsckResponse{
		LeftOut:   leftOut,
		Sandboxes: 3, Machines: 4, Jobs: 120, Requests: 7,
		Findings: []*berthv1.FsckFinding{
			{
				Kind: "machine_gone", Subject: "m_01KBA0Z6YR7Q5N3W8D4M1E7QK2", Provider: "docker", Age: durationpb.New(3 * time.Second),
				Message: "sandbox " + sbLive + " is RUNNING, and the provider no longer has its machine", Action: "mark the sandbox LOST, and its 2 open jobs as lost",
				Repaired: r.GetRepair(), Repairable: !r.GetRepair(),
			},
			{
				Kind: "orphan_machine", Subject: "m_01KBA0Z6YR7Q5N3W8D4M1EAAAA", Provider: "local", Age: durationpb.New(20 * time.Second),
				Message: "no record names it; it is running", Action: "destroy it with all that runs in it", WhyNot: "it is known for 20s\x1b[2J, and destroyed when that is 1m0s",
			},
			{Kind: "provider_unusable", Subject: "docker", Provider: "docker", Message: "it is not well: no engine", Action: "none", WhyNot: "nothing is concluded about its machines until it is well"},
		},
	}, nil
}

// backup is what the broker's backups hold: more than one message.
func backup(compact bool) []byte {
	if compact {
		return exactBytes()[:1<<20]
	}
	return exactBytes()
}

func (b *fakeBroker) Backup(r *berthv1.BackupRequest, stream grpc.ServerStreamingServer[berthv1.BackupResponse]) error {
	b.mu.Lock()
	spoil := b.spoil
	b.mu.Unlock()
	all := backup(r.GetCompact())
	sum := sha256.Sum256(all)
	if spoil == "changed" {
		all = bytes.Clone(all)
		all[len(all)/2] ^= 1
	}
	for from := 0; from < len(all); from += 256 << 10 {
		if spoil == "cut off" && from > 0 {
			return nil
		}
		err := stream.Send(&berthv1.BackupResponse{Data: all[from:min(from+256<<10, len(all))], TotalBytes: uint64(len(all))})
		if err != nil {
			return err
		}
	}
	return stream.Send(&berthv1.BackupResponse{Sha256: sum[:], TotalBytes: uint64(len(all))})
}

func TestABackupIsTheLedgersBytesInAFileOfItsOwn(t *testing.T) {
	b := newBroker(t)
	path := filepath.Join(t.TempDir(), "ledger.backup")
	if err := os.WriteFile(path+broker.PartialSuffix, []byte("of an earlier one"), 0o644); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(backup(false))
	s := b.shell()
	if code := s.run(t, "backup", path); code != 0 || s.stdout.String() != path+": 3MiB, sha256 "+hex.EncodeToString(sum[:])+"\n" {
		t.Fatalf("exit %d, it says %q, %q", code, s.stdout.String(), s.stderr.String())
	}
	wantBackup(t, path, backup(false))
	for _, again := range []struct {
		name string
		args []string
		code int
		want []byte
	}{
		{"a file that is there stays", []string{"backup", "--compact", path}, usage.ExitUsage, backup(false)},
		{"unless it is to be replaced", []string{"backup", "--compact", "--force", path}, 0, backup(true)},
	} {
		s := b.shell()
		if code := s.run(t, again.args...); code != again.code {
			t.Errorf("%s: exit %d: %s", again.name, code, s.stderr.String())
		}
		wantBackup(t, path, again.want)
	}
	s = b.shell()
	if code := s.run(t, "backup", "-"); code != 0 || s.stdout.String() != string(backup(false)) {
		t.Errorf("to stdout: exit %d, %d bytes: %s", code, len(s.stdout.String()), s.stderr.String())
	}
	s = b.shell()
	if code := s.run(t, "backup", "--force", "-o", "json", path); code != 0 || !strings.Contains(s.stdout.String(), `"bytes":3145728,"sha256":"`+hex.EncodeToString(sum[:])) {
		t.Errorf("as JSON: exit %d, %s", code, s.stdout.String())
	}
}

func wantBackup(t *testing.T, path string, want []byte) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file has %d bytes (%v), want %d", len(got), err, len(want))
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("its mode is %v (%v)", info.Mode(), err)
	}
	if _, err := os.Stat(path + broker.PartialSuffix); !os.IsNotExist(err) {
		t.Errorf("a part of it is left (%v)", err)
	}
}

func TestABackupThatIsNotWholeIsNone(t *testing.T) {
	for _, spoil := range []string{"cut off", "changed"} {
		t.Run(spoil, func(t *testing.T) {
			b := newBroker(t)
			b.spoil = spoil
			path := filepath.Join(t.TempDir(), "ledger.backup")
			if err := os.WriteFile(path, []byte("the one before"), 0o600); err != nil {
				t.Fatal(err)
			}
			s := b.shell()
			if code := s.run(t, "backup", "--force", path); code != usage.ExitFailure || !strings.Contains(s.stderr.String(), "not whole") {
				t.Errorf("exit %d: %s", code, s.stderr.String())
			}
			wantBackup(t, path, []byte("the one before"))
			s = b.shell()
			if code := s.run(t, "backup", "-"); code != usage.ExitFailure {
				t.Errorf("to stdout: exit %d: %s", code, s.stderr.String())
			}
		})
	}
}

func TestACheckThatLeavesNothingExitsWithZero(t *testing.T) {
	repaired := &berthv1.FsckFinding{Kind: "k", Repaired: true}
	for _, test := range []struct {
		name   string
		reply  *berthv1.FsckResponse
		repair bool
		remain int
		words  string
	}{
		{"most were repaired, and some of both are not listed", &berthv1.FsckResponse{Findings: []*berthv1.FsckFinding{{Kind: "k"}, repaired}, LeftOut: 7, Repaired: 6, Remaining: 3}, true, 3,
			"9 findings, 7 of them not listed: 6 repaired, 3 remain; looked at "},
		{"a broker counts what it does not list", &berthv1.FsckResponse{Findings: []*berthv1.FsckFinding{{Kind: "k", Repairable: true}}, LeftOut: 3, Remaining: 4, Repairable: 2}, false, 4,
			"4 findings, 3 of them not listed: `berth fsck --repair` would repair 2; looked at "},
		{"an older broker counts only what it lists", &berthv1.FsckResponse{Findings: []*berthv1.FsckFinding{{Kind: "k"}, repaired}, LeftOut: 3}, true, 1,
			"5 findings, 3 of them not listed: at least 1 repaired, at least 1 remain; looked at "},
		{"nothing was wrong", &berthv1.FsckResponse{Jobs: 2}, false, 0, "nothing is wrong: looked at 0 sandboxes, 0 machines, 2 jobs, 0 request ids"},
		{"all was repaired", &berthv1.FsckResponse{Findings: []*berthv1.FsckFinding{repaired, repaired}}, true, 0, "2 findings: 2 repaired, 0 remain; looked at "},
		{"some are not listed", &berthv1.FsckResponse{Findings: []*berthv1.FsckFinding{{Kind: "k", Repairable: true}}, LeftOut: 3}, false, 1,
			"4 findings, 3 of them not listed: `berth fsck --repair` would repair at least 1; looked at "},
	} {
		if got := broker.TotalsOf(test.reply).Remain; got != test.remain {
			t.Errorf("%s: %d remain", test.name, got)
		}
		if got := broker.SummaryOf(proto.CloneOf(test.reply), test.repair); !strings.HasPrefix(got, test.words) {
			t.Errorf("%s: %q", test.name, got)
		}
	}
}

func TestFindingsThatAreNotListedAreSaidInEveryFormat(t *testing.T) {
	b := newBroker(t)
	b.leftOut = 5
	for _, test := range []struct{ format, stdout, stderr string }{
		{command.OutputTable, "8 findings, 5 of them not listed", ""},
		{command.OutputID, "docker\n", "berth: fsck: 5 findings are not listed"},
		{command.OutputJSON, `"subject":"docker"`, "berth: fsck: 5 findings are not listed"},
	} {
		s := b.shell()
		if code := s.run(t, "fsck", "-o", test.format); code != usage.ExitFailure {
			t.Errorf("-o %s: exit %d", test.format, code)
		}
		if !strings.Contains(s.stdout.String(), test.stdout) || !strings.HasPrefix(s.stderr.String(), test.stderr) || test.stderr == "" && s.stderr.String() != "" {
			t.Errorf("-o %s: it says %q and, on stderr, %q", test.format, s.stdout.String(), s.stderr.String())
		}
	}
}

func TestABackupThatCannotBeToldOfIsThere(t *testing.T) {
	b := newBroker(t)
	unwritable, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unwritable.Close() }()
	path := filepath.Join(t.TempDir(), "ledger.backup")
	s := b.shell()
	s.stdoutTo = unwritable
	if code := s.run(t, "backup", path); code != usage.ExitFailure || !strings.Contains(s.stderr.String(), "write ") || strings.Contains(s.stderr.String(), "no such file") {
		t.Errorf("exit %d: %s", code, s.stderr.String())
	}
	wantBackup(t, path, backup(false))
}
