package record

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const fuzzedID = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"

// FuzzLoad loads a directory of arbitrary files: a job in it is found, or was forgotten, and
// can never begin again.
func FuzzLoad(f *testing.F) {
	good, err := proto.Marshal(&guestv1.JobRecord{JobId: fuzzedID, Generation: 3, OutputLimitBytes: 9})
	if err != nil {
		f.Fatal(err)
	}
	done, err := proto.Marshal(&guestv1.Status{JobId: fuzzedID, Done: true, Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}})
	if err != nil {
		f.Fatal(err)
	}
	ulid, err := ParseID(fuzzedID)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good, done, []byte{})
	f.Add(good, []byte(" 0"), []byte{}) // done, and of no job
	f.Add(good[:len(good)-1], done[1:], ulid[:])
	f.Add([]byte("\xff\xff"), []byte{}, append(ulid[:], 1, 2, 3))
	f.Fuzz(func(t *testing.T, job, status, forgotten []byte) {
		path := t.TempDir()
		dir := filepath.Join(path, "jobs", fuzzedID)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, data := range map[string][]byte{
			filepath.Join(path, "machine"): []byte("m_1"), filepath.Join(path, "forgotten"): forgotten,
			filepath.Join(dir, "job"): job, filepath.Join(dir, "status"): status,
		} {
			if err := os.WriteFile(name, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		d, err := Open(path, "m_1", 1, "boot")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = d.Close() }()
		found, err := d.Load()
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case len(found) == 0:
			if d.Check(ulid) == nil {
				t.Error("a job that was there may begin again")
			}
		case len(found) != 1 || found[0].Record.GetJobId() != fuzzedID || !found[0].Record.GetDurable():
			t.Errorf("found %v", found)
		case found[0].Status != nil && (found[0].Status.GetJobId() != fuzzedID || !found[0].Status.GetDone()):
			t.Errorf("found the status %v", found[0].Status)
		}
	})
}

// FuzzParseID takes nothing for an id that is a path, or that another text gives as well.
func FuzzParseID(f *testing.F) {
	f.Add(fuzzedID)
	f.Add("job_../../../../etc/passwd")
	f.Add("job_8ZZZZZZZZZZZZZZZZZZZZZZZZZ")
	f.Fuzz(func(t *testing.T, id string) {
		ulid, err := ParseID(id)
		if err != nil {
			return
		}
		if strings.ContainsAny(id, "/.\x00") || filepath.Base(id) != id {
			t.Errorf("%q is an id", id)
		}
		text, low := make([]byte, ulidDigits), 0
		for i, bit := ulidDigits-1, 0; i >= 0; i-- { // the digits again, five bits each
			for k := range 5 {
				if at := bit + k; at < 128 && ulid[15-at/8]>>(at%8)&1 == 1 {
					low |= 1 << k
				}
			}
			text[i], low, bit = crockford[low], 0, bit+5
		}
		if idPrefix+string(text) != id {
			t.Errorf("%q and %q are one id", id, text)
		}
	})
}
