package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	first  = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	second = "job_01ARZ3NDEKTSV4RRFFQ69G5FAW"
)

func open(t *testing.T, path, machine, boot string) *Directory {
	t.Helper()
	d, err := Open(path, machine, 7, boot)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func reopen(t *testing.T, d *Directory, machine string) *Directory {
	t.Helper()
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	return open(t, d.path, machine, "later")
}

func TestIDsAreULIDsAndNothingElse(t *testing.T) {
	ulid, err := ParseID(first)
	if err != nil {
		t.Fatal(err)
	}
	if got := ulid.Time().UTC(); got != time.UnixMilli(1469922850259).UTC() {
		t.Errorf("its time is %v", got)
	}
	for _, wrong := range []string{
		"", "job_", first + "0", first[:29], "sb_" + first[4:], "job_8ZZZZZZZZZZZZZZZZZZZZZZZZZ",
		"job_01ARZ3NDEKTSV4RRFFQ69G5FAU", "job_01arz3ndektsv4rrffq69g5fav", "job_../../../../../../../../etc",
	} {
		if _, err := ParseID(wrong); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
	other, _ := ParseID(second)
	if other == ulid {
		t.Error("two ids are the same")
	}
}

func TestAJobIsCreatedOnce(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	for _, durable := range []bool{true, false} {
		id := map[bool]string{true: first, false: second}[durable]
		if err := d.Create(&guestv1.JobRecord{JobId: id, Durable: durable}); err != nil {
			t.Fatal(err)
		}
		if err := d.Create(&guestv1.JobRecord{JobId: id, Durable: durable}); !errors.Is(err, ErrExists) {
			t.Errorf("the second time: %v", err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestTheNextBootFindsWhatWasLeft(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "earlier")
	must(t, d.Create(&guestv1.JobRecord{JobId: first, Durable: true, Generation: 7, BootId: "earlier", OutputLimitBytes: 5}))
	must(t, d.WriteStatus(&guestv1.Status{JobId: first, Done: true, Outcome: &berthv1.Outcome{Reason: "because"}}))
	must(t, d.Create(&guestv1.JobRecord{JobId: second}))
	d = reopen(t, d, "m_1")
	found, err := d.Load()
	must(t, err)
	if len(found) != 2 {
		t.Fatalf("found %v", found)
	}
	if f := found[0]; f.Record.GetOutputLimitBytes() != 5 || f.Status.GetOutcome().GetReason() != "because" {
		t.Errorf("the durable one: %v", f)
	}
	if f := found[1]; f.Status != nil || f.Record.GetBootId() != "earlier" || f.Record.GetGeneration() != 7 {
		t.Errorf("the other: %v", f)
	}
	// A boot later it is still known which boot that was.
	d = reopen(t, d, "m_1")
	found, err = d.Load()
	must(t, err)
	if found[1].Record.GetBootId() != "earlier" {
		t.Errorf("two boots later: %v", found[1])
	}
	must(t, d.Close())
}

func TestMoreQuickJobsThanAFileHasLinks(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	const linksOfExt4 = 65000
	for i := range linksOfExt4 + 100 {
		id := fmt.Sprintf("job_01ARZ3NDEKTSV4RR%010d", i)
		must(t, d.Create(&guestv1.JobRecord{JobId: id}))
	}
	if err := d.Create(&guestv1.JobRecord{JobId: "job_01ARZ3NDEKTSV4RR0000000000"}); !errors.Is(err, ErrExists) {
		t.Errorf("the second time: %v", err)
	}
	must(t, d.Close())
}

func TestAFileSystemWithoutLinksWorks(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	path := filepath.Join(d.jobs, first)
	must(t, d.createCopy(path))
	if err := d.createCopy(path); !errors.Is(err, ErrExists) {
		t.Errorf("the second time: %v", err)
	}
	d = reopen(t, d, "m_1")
	found, err := d.Load()
	must(t, err)
	if len(found) != 1 || found[0].Record.GetBootId() != "boot" {
		t.Errorf("found %v", found)
	}
	must(t, d.Close())
}

func TestStrayOutputIsRemovedAndKnownOutputKept(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	must(t, d.Create(&guestv1.JobRecord{JobId: first}))
	for _, id := range []string{first, second} {
		must(t, os.Mkdir(d.OutputDir(id, false), 0o700))
	}
	_, err := d.Load()
	must(t, err)
	if _, err := os.Stat(d.OutputDir(first, false)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(d.OutputDir(second, false)); !os.IsNotExist(err) {
		t.Errorf("the stray: %v", err)
	}
	must(t, d.Remove(first))
	must(t, d.RemoveOutput(first))
	must(t, d.Close())
}

func TestADamagedRecordIsAJobThatMustNotBeginAgain(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	must(t, d.Create(&guestv1.JobRecord{JobId: first, Durable: true}))
	must(t, os.WriteFile(filepath.Join(d.OutputDir(first, true), "job"), []byte{0xFF}, 0o600))
	must(t, os.WriteFile(filepath.Join(d.OutputDir(first, true), "status"), []byte{0xFF}, 0o600))
	d = reopen(t, d, "m_1")
	found, err := d.Load()
	must(t, err)
	if len(found) != 1 || found[0].Status != nil || found[0].Record.GetJobId() != first {
		t.Errorf("found %v", found)
	}
	must(t, d.Close())
}

func TestAnotherMachinesDirectoryIsWiped(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	must(t, d.Create(&guestv1.JobRecord{JobId: first, Durable: true}))
	ulid, _ := ParseID(second)
	must(t, d.WriteTombstone([]ULID{ulid}, nil))
	d = reopen(t, d, "m_2")
	found, err := d.Load()
	must(t, err)
	if len(found) != 0 || d.Check(ulid) != nil {
		t.Errorf("found %v, %v", found, d.Check(ulid))
	}
	must(t, d.Close())
}

func TestOnlyOneGuestUsesADirectory(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	if _, err := Open(d.path, "m_1", 7, "other"); err == nil {
		t.Error("two guests have it")
	}
	must(t, d.Close())
}

func TestForgottenIDsAreRememberedAndVeryOldOnesRefused(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	durable, other := idAt(0, 1), idAt(0, 2)
	must(t, d.Check(durable))
	must(t, d.WriteTombstone([]ULID{durable}, []ULID{other}))
	must(t, d.WriteTombstone([]ULID{durable}, []ULID{other}))
	if d.size != 16 {
		t.Errorf("the file has %d bytes", d.size)
	}
	for _, id := range []ULID{durable, other} {
		if err := d.Check(id); !errors.Is(err, ErrForgotten) {
			t.Errorf("forgotten: %v", err)
		}
	}
	must(t, d.Check(idAt(-forgetAfter+time.Minute, 3)))
	if err := d.Check(idAt(-forgetAfter-time.Minute, 3)); !errors.Is(err, ErrExpired) {
		t.Errorf("very old: %v", err)
	}
	d = reopen(t, d, "m_1")
	if err := d.Check(durable); !errors.Is(err, ErrForgotten) {
		t.Errorf("after a restart: %v", err)
	}
	must(t, d.Close())
}

func TestAnIDFromTheFutureExpiresNobody(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	must(t, d.Check(idAt(1000*time.Hour, 1)))
	must(t, d.Check(idAt(0, 2)))
	must(t, d.Close())
}

func TestATornTombstoneIsCutOff(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	id := idAt(0, 1)
	must(t, d.WriteTombstone([]ULID{id}, nil))
	_, err := d.forgotten.Write([]byte("torn"))
	must(t, err)
	d = reopen(t, d, "m_1")
	must(t, d.WriteTombstone([]ULID{idAt(0, 2)}, nil))
	d = reopen(t, d, "m_1")
	if len(d.tombstones) != 2 || !errors.Is(d.Check(id), ErrForgotten) {
		t.Errorf("buried %v", d.tombstones)
	}
	must(t, d.Close())
}

func TestOldTombstonesAreDropped(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	must(t, d.WriteTombstone([]ULID{idAt(-forgetAfter-time.Hour, 1), idAt(0, 2)}, nil))
	must(t, d.Check(idAt(0, 3)))
	must(t, d.compact())
	if len(d.tombstones) != 1 || d.size != 16 {
		t.Errorf("%d tombstones, %d bytes", len(d.tombstones), d.size)
	}
	must(t, d.Close())
}

func TestTheMemoryOfForgottenIDsIsBounded(t *testing.T) {
	d := open(t, t.TempDir(), "m_1", "boot")
	var ids []ULID
	for i := range memoryTombstones + 10 {
		ids = append(ids, idAt(0, uint16(i)))
		must(t, d.WriteTombstone(nil, ids[i:]))
	}
	if len(d.recent) != memoryTombstones || d.Check(ids[9]) != nil || !errors.Is(d.Check(ids[10]), ErrForgotten) {
		t.Errorf("%d in memory", len(d.recent))
	}
	must(t, d.Close())
}

// idAt returns an id of a time relative to now.
func idAt(from time.Duration, number uint16) (u ULID) {
	ms := uint64(time.Now().Add(from).UnixMilli())
	for i := range 6 {
		u[i] = byte(ms >> (40 - 8*i))
	}
	u[14], u[15] = byte(number>>8), byte(number)
	return u
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
