package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// pages reads a list to its end and returns the ids of each page.
func pages(t *testing.T, s *Store, size int, list func(tx *Tx, q Page) (ids []string, next string, err error)) [][]string {
	t.Helper()
	var all [][]string
	q := Page{Size: size}
	for range 100 {
		var next string
		view(t, s, func(tx *Tx) error {
			ids, after, err := list(tx, q)
			all, next = append(all, ids), after
			return err
		})
		if next == "" {
			return all
		}
		q.After = next
	}
	t.Fatal("the list does not end")
	return nil
}

func listSandboxes(namespace string, keep func(*recordv1.SandboxRecord) bool) func(*Tx, Page) ([]string, string, error) {
	return func(tx *Tx, q Page) ([]string, string, error) {
		page, next, err := tx.ListSandboxes(namespace, q, keep)
		var ids []string
		for _, rec := range page {
			ids = append(ids, rec.Id)
		}
		return ids, next, err
	}
}

func TestSandboxesAreListedNewestFirstByPage(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		for _, at := range []struct{ namespace, id string }{
			{"a", "sb_9"}, {"aa", "sb_3"}, {"a", "sb_1"}, {"b", "sb_2"}, {"a", "sb_5"}, {"a", "sb_7"}, {"aa", "sb_6"}, {"a-", "sb_8"},
		} {
			rec := sandbox(at.id, running)
			rec.Namespace = at.namespace
			if at.id == "sb_5" {
				rec.State = destroyed
			}
			if err := tx.PutSandbox(rec, "", ""); err != nil {
				return err
			}
		}
		return nil
	})
	alive := func(rec *recordv1.SandboxRecord) bool { return rec.State != destroyed }
	cases := []struct {
		name      string
		namespace string
		size      int
		keep      func(*recordv1.SandboxRecord) bool
		want      [][]string
	}{
		{"all on one page", "a", 0, nil, [][]string{{"sb_9", "sb_7", "sb_5", "sb_1"}}},
		{"two a page", "a", 2, nil, [][]string{{"sb_9", "sb_7"}, {"sb_5", "sb_1"}}},
		{"three a page", "a", 3, nil, [][]string{{"sb_9", "sb_7", "sb_5"}, {"sb_1"}}},
		{"filtered, two a page", "a", 2, alive, [][]string{{"sb_9", "sb_7"}, {"sb_1"}}},
		{"filtered to one exact page", "a", 3, alive, [][]string{{"sb_9", "sb_7", "sb_1"}}},
		{"a namespace that begins like another", "aa", 1, nil, [][]string{{"sb_6"}, {"sb_3"}}},
		{"a namespace that sorts between", "a-", 1, nil, [][]string{{"sb_8"}}},
		{"the last namespace", "b", 1, nil, [][]string{{"sb_2"}}},
		{"an unknown namespace", "zz", 1, nil, [][]string{nil}},
		{"an empty namespace", "", 1, nil, [][]string{nil}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := pages(t, s, c.size, listSandboxes(c.namespace, c.keep))
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
	update(t, s, func(tx *Tx) error { return tx.DeleteSandbox("sb_7") })
	view(t, s, func(tx *Tx) error { // the last id of a page may be gone by the next
		got, _, err := listSandboxes("a", nil)(tx, Page{After: "sb_7"})
		if !slices.Equal(got, []string{"sb_5", "sb_1"}) {
			t.Errorf("after a removed one: %v", got)
		}
		return err
	})
}

func TestJobsAreListedAndCountedBySandboxNamespaceAndMachine(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		for i, at := range []struct{ sandbox, machine string }{
			{"sb_1", "m_2"}, {"sb_2", "m_1"}, {"sb_1", "m_2"}, {"sb_10", "m_10"}, {"sb_1", "m_1"}, {"sb_1", ""},
		} {
			rec := job(fmt.Sprintf("job_%d", i), at.sandbox, berthv1.JobState_JOB_STATE_RUNNING)
			rec.MachineId, rec.Detached = at.machine, i == 0
			if i == 2 {
				rec.State, rec.DoneTime = berthv1.JobState_JOB_STATE_DONE, timestamppb.New(epoch)
			}
			if err := tx.PutJob(rec, "", ""); err != nil {
				return err
			}
		}
		return nil
	})
	list := func(namespace, sandboxID string) func(*Tx, Page) ([]string, string, error) {
		return func(tx *Tx, q Page) ([]string, string, error) {
			page, next, err := tx.ListJobs(namespace, sandboxID, q, nil)
			return jobIDs(page), next, err
		}
	}
	for _, c := range []struct {
		namespace, sandbox string
		want               string
	}{
		{"default", "sb_1", "[[job_5 job_4] [job_2 job_0]]"},
		{"default", "sb_10", "[[job_3]]"},
		{"default", "", "[[job_5 job_4] [job_3 job_2] [job_1 job_0]]"},
		{"other", "sb_1", "[[]]"},
		{"other", "", "[[]]"},
	} {
		if got := fmt.Sprint(pages(t, s, 2, list(c.namespace, c.sandbox))); got != c.want {
			t.Errorf("jobs of %q in %q: %s, want %s", c.sandbox, c.namespace, got, c.want)
		}
	}
	view(t, s, func(tx *Tx) error {
		for machine, want := range map[string][]string{
			"":     {"job_0", "job_1", "job_3", "job_4", "job_5"},
			"m_1":  {"job_1", "job_4"},
			"m_2":  {"job_0"},
			"m_10": {"job_3"},
			"m_3":  nil,
		} {
			open, err := tx.OpenJobs(machine)
			if err != nil || !slices.Equal(jobIDs(open), want) {
				t.Errorf("open jobs of %q: %v, %v, want %v", machine, jobIDs(open), err, want)
			}
		}
		for id, want := range map[string][2]int{"sb_1": {3, 1}, "sb_10": {1, 0}, "sb_3": {0, 0}} {
			all, err := tx.CountOpenJobs(id)
			detached, err2 := tx.CountOpenDetachedJobs(id)
			if [2]int{all, detached} != want || err != nil || err2 != nil {
				t.Errorf("open jobs of %s: %d, %d detached, want %v", id, all, detached, want)
			}
		}
		return nil
	})
}

func jobIDs(jobs []*recordv1.JobRecord) []string {
	var ids []string
	for _, rec := range jobs {
		ids = append(ids, rec.Id)
	}
	return ids
}

func TestWhatEndedIsFoundByItsEnd(t *testing.T) {
	s := newTest(t)
	at := func(minutes int) *timestamppb.Timestamp {
		return timestamppb.New(epoch.Add(time.Duration(minutes) * time.Minute))
	}
	update(t, s, func(tx *Tx) error {
		return errors.Join(
			tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_1", Namespace: "n", State: destroyed, DestroyTime: at(3)}, "", ""),
			tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_2", Namespace: "n", State: failed, LastError: &berthv1.Problem{Time: at(1)}}, "", ""),
			tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_3", Namespace: "n", State: failed, CreateTime: at(2)}, "", ""),
			tx.PutSandbox(&recordv1.SandboxRecord{Id: "sb_4", Namespace: "n", State: running, CreateTime: at(0)}, "", ""),
			tx.PutJob(&recordv1.JobRecord{Id: "job_1", Namespace: "n", SandboxId: "sb_1", State: berthv1.JobState_JOB_STATE_DONE, DoneTime: at(5)}, "", ""),
			tx.PutJob(&recordv1.JobRecord{Id: "job_2", Namespace: "n", SandboxId: "sb_1", State: berthv1.JobState_JOB_STATE_DONE, DoneTime: at(4)}, "", ""),
			tx.PutJob(&recordv1.JobRecord{Id: "job_3", Namespace: "n", SandboxId: "sb_1"}, "", ""),
		)
	})
	cases := []struct {
		minutes, max  int
		sandboxes     []string
		jobs          []string
		whatItIsAbout string
	}{
		{1, 10, []string{}, []string{}, "the time itself does not count"},
		{2, 10, []string{"sb_2"}, []string{}, "one has ended"},
		{5, 10, []string{"sb_2", "sb_3", "sb_1"}, []string{"job_2"}, "the longest ended first"},
		{60, 1, []string{"sb_2"}, []string{"job_2"}, "at most one"},
		{60, 0, []string{}, []string{}, "none"},
		{-1 << 40, 10, []string{}, []string{}, "long before the beginning of time"},
	}
	for _, c := range cases {
		view(t, s, func(tx *Tx) error {
			before := at(c.minutes).AsTime()
			sandboxes, err := tx.EndedSandboxes(before, c.max)
			jobs, err2 := tx.EndedJobs(before, c.max)
			if !slices.Equal(sandboxes, c.sandboxes) || !slices.Equal(jobs, c.jobs) {
				t.Errorf("%s: %v and %v, want %v and %v", c.whatItIsAbout, sandboxes, jobs, c.sandboxes, c.jobs)
			}
			return errors.Join(err, err2)
		})
	}
}

func TestRequestsAreForgottenAfterTheirTime(t *testing.T) {
	s := newTest(t)
	request := func(minutes int) *recordv1.RequestRecord {
		return &recordv1.RequestRecord{ResultId: strconv.Itoa(minutes), ExpireTime: timestamppb.New(epoch.Add(time.Duration(minutes) * time.Minute))}
	}
	update(t, s, func(tx *Tx) error {
		return errors.Join(
			tx.PutRequest("a", "r1", request(1)),
			tx.PutRequest("b", "r1", request(2)),
			tx.PutRequest("a", "r2", request(3)),
			tx.PutRequest("a", "r1", request(9)), // again: remembered for longer
			tx.PutRequest("b", "r0", request(2)),
		)
	})
	held := func() (held []string) {
		view(t, s, func(tx *Tx) error {
			for _, key := range [][2]string{{"a", "r1"}, {"a", "r2"}, {"b", "r0"}, {"b", "r1"}} {
				rec, err := tx.Request(key[0], key[1])
				if err != nil {
					return err
				}
				if rec != nil {
					held = append(held, key[0]+key[1])
				}
			}
			return nil
		})
		return held
	}
	for _, c := range []struct {
		minutes, max, trimmed int
		held                  string
	}{
		{2, 10, 0, "[ar1 ar2 br0 br1]"},
		{3, 1, 1, "[ar1 ar2 br1]"},
		{4, 10, 2, "[ar1]"},
		{4, 10, 0, "[ar1]"},
		{99, 10, 1, "[]"},
	} {
		update(t, s, func(tx *Tx) error {
			n, err := tx.TrimRequests(epoch.Add(time.Duration(c.minutes)*time.Minute), c.max)
			if n != c.trimmed {
				t.Errorf("at %d: trimmed %d, want %d", c.minutes, n, c.trimmed)
			}
			return err
		})
		if got := fmt.Sprint(held()); got != c.held {
			t.Errorf("at %d: held %s, want %s", c.minutes, got, c.held)
		}
	}
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Errorf("check: %v, %v", findings, err)
	}
}

func TestSessionsAreTakenAndFreed(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		return errors.Join(
			tx.PutSession("a", "line", &recordv1.SessionRecord{SandboxId: "sb_1"}),
			tx.PutSession("b", "line", &recordv1.SessionRecord{SandboxId: "sb_2"}),
			tx.PutSession("a", "line", &recordv1.SessionRecord{SandboxId: "sb_3"}),
		)
	})
	view(t, s, func(tx *Tx) error {
		a, err := tx.Session("a", "line")
		b, err2 := tx.Session("b", "line")
		if a.GetSandboxId() != "sb_3" || b.GetSandboxId() != "sb_2" {
			t.Errorf("held by %v and %v", a, b)
		}
		return errors.Join(err, err2)
	})
	update(t, s, func(tx *Tx) error { return errors.Join(tx.DeleteSession("a", "line"), tx.DeleteSession("c", "line")) })
	view(t, s, func(tx *Tx) error {
		a, err := tx.Session("a", "line")
		if a != nil {
			t.Errorf("still held by %v", a)
		}
		return err
	})
}

func TestEventsAreFollowedListedAndTrimmed(t *testing.T) {
	clock := epoch
	s := newTest(t)
	s.now = func() time.Time { return clock }
	for i := 1; i <= 6; i++ {
		kind := "sandbox.running"
		if i == 3 {
			kind = "" // moves the revision, leaves no event
		}
		update(t, s, func(tx *Tx) error {
			return tx.PutSandbox(sandbox(fmt.Sprintf("sb_%d", i), running), kind, "it is number "+strconv.Itoa(i))
		})
		clock = clock.Add(time.Minute)
	}
	follow := func(after uint64, max int) (got []uint64, oldest uint64) {
		view(t, s, func(tx *Tx) error {
			revisions, events, err := tx.Events(after, max)
			for i, event := range events {
				n := strconv.FormatUint(revisions[i], 10)
				if event.SandboxId != "sb_"+n || event.Message != "it is number "+n || event.Namespace != "default" ||
					!event.Time.AsTime().Equal(epoch.Add(time.Duration(revisions[i]-1)*time.Minute)) {
					t.Errorf("revision %d: %v", revisions[i], event)
				}
			}
			got, oldest = revisions, tx.OldestRevision()
			return err
		})
		return got, oldest
	}
	for _, c := range []struct {
		after uint64
		max   int
		want  string
	}{{0, 10, "[1 2 4 5 6]"}, {2, 2, "[4 5]"}, {3, 10, "[4 5 6]"}, {6, 10, "[]"}, {^uint64(0), 10, "[]"}, {0, 0, "[]"}} {
		if got, _ := follow(c.after, c.max); fmt.Sprint(got) != c.want {
			t.Errorf("after %d, at most %d: %v, want %s", c.after, c.max, got, c.want)
		}
	}
	list := func(keep func(*recordv1.EventRecord) bool) func(*Tx, Page) ([]string, string, error) {
		return func(tx *Tx, q Page) ([]string, string, error) {
			revisions, _, next, err := tx.ListEvents(q, keep)
			var got []string
			for _, revision := range revisions {
				got = append(got, strconv.FormatUint(revision, 10))
			}
			return got, next, err
		}
	}
	if got := fmt.Sprint(pages(t, s, 2, list(nil))); got != "[[6 5] [4 2] [1]]" {
		t.Errorf("listed %s", got)
	}
	even := func(event *recordv1.EventRecord) bool { return (event.SandboxId[3]-'0')%2 == 0 }
	if got := fmt.Sprint(pages(t, s, 2, list(even))); got != "[[6 4] [2]]" {
		t.Errorf("listed %s", got)
	}
	if err := s.View(func(tx *Tx) error { _, _, _, err := tx.ListEvents(Page{After: "x"}, nil); return err }); !fault.Is(err, fault.InvalidField) {
		t.Errorf("with a made-up token: %v", err)
	}
	for _, c := range []struct {
		name      string
		before    time.Time
		keep, max int
		trimmed   int
		left      string
		oldest    uint64
	}{
		{"nothing is old", epoch, 0, 10, 0, "[1 2 4 5 6]", 1},
		{"one is old", epoch.Add(time.Minute), 0, 10, 1, "[2 4 5 6]", 2},
		{"too many, one at a time", epoch, 2, 1, 1, "[4 5 6]", 3},
		{"too many", epoch, 2, 10, 1, "[5 6]", 5},
		{"all are old", epoch.Add(time.Hour), 2, 10, 2, "[]", 7},
	} {
		update(t, s, func(tx *Tx) error {
			n, err := tx.TrimEvents(c.before, c.keep, c.max)
			if n != c.trimmed {
				t.Errorf("%s: trimmed %d, want %d", c.name, n, c.trimmed)
			}
			return err
		})
		if got, oldest := follow(0, 10); fmt.Sprint(got) != c.left || oldest != c.oldest {
			t.Errorf("%s: left %v from %d, want %s from %d", c.name, got, oldest, c.left, c.oldest)
		}
	}
	if findings, err := check(t, s); len(findings) > 0 || err != nil {
		t.Errorf("check: %v, %v", findings, err)
	}
	if err := s.Update(context.Background(), put("sb_7")); err != nil || s.Revision() != 7 {
		t.Errorf("after trimming: revision %d, %v", s.Revision(), err)
	}
}

func TestAPageEndsWhenItsRecordsTakeTooMuchAndAScanWhenNobodyWantsIt(t *testing.T) {
	s := newTest(t)
	update(t, s, func(tx *Tx) error {
		for i := range 6 {
			rec := job(fmt.Sprintf("job_%d", i), "sb_1", berthv1.JobState_JOB_STATE_RUNNING)
			rec.Spec = &berthv1.JobSpec{Shell: strings.Repeat("x", 1000)}
			if err := tx.PutJob(rec, "job.running", strings.Repeat("x", 1000)); err != nil {
				return err
			}
		}
		return nil
	})
	shorten := func(message proto.Message) { message.(*recordv1.JobRecord).Spec = nil }
	even := func(rec *recordv1.JobRecord) bool { return (rec.Id[len(rec.Id)-1]-'0')%2 == 0 }
	for _, c := range []struct {
		name string
		page Page
		keep func(*recordv1.JobRecord) bool
		want [][]string
	}{
		{"two fit", Page{Bytes: 2500}, nil, [][]string{{"job_5", "job_4"}, {"job_3", "job_2"}, {"job_1", "job_0"}}},
		{"of those that are wanted two fit", Page{Bytes: 2500}, even, [][]string{{"job_4", "job_2"}, {"job_0"}}},
		{"not even one fits", Page{Bytes: 10}, even, [][]string{{"job_4"}, {"job_2"}, {"job_0"}}},
		{"all fit when they are cut", Page{Bytes: 2500, Cut: shorten}, nil, [][]string{{"job_5", "job_4", "job_3", "job_2", "job_1", "job_0"}}},
		{"the number ends it first", Page{Bytes: 2500, Size: 1}, even, [][]string{{"job_4"}, {"job_2"}, {"job_0"}}},
	} {
		var got [][]string
		for q := c.page; ; {
			var next string
			view(t, s, func(tx *Tx) error {
				page, after, err := tx.ListJobs("default", "", q, c.keep)
				got, next = append(got, jobIDs(page)), after
				return err
			})
			if q.After = next; next == "" {
				break
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	view(t, s, func(tx *Tx) error {
		revisions, _, next, err := tx.ListEvents(Page{Bytes: 2500}, nil)
		if len(revisions) != 2 || next == "" {
			t.Errorf("a page of events has %d, and %q follows", len(revisions), next)
		}
		return err
	})
	seen, gone := 0, errors.New("nobody wants it")
	q := Page{Canceled: func() error {
		if seen++; seen == 3 {
			return gone
		}
		return nil
	}}
	for name, list := range map[string]func(*Tx) error{
		"jobs":   func(tx *Tx) error { _, _, err := tx.ListJobs("default", "", q, nil); return err },
		"events": func(tx *Tx) error { _, _, _, err := tx.ListEvents(q, nil); return err },
		"unwanted": func(tx *Tx) error {
			_, _, err := tx.ListJobs("default", "", q, func(*recordv1.JobRecord) bool { return false })
			return err
		},
		"a sandbox": func(tx *Tx) error { _, _, err := tx.ListJobs("default", "sb_1", q, nil); return err },
	} {
		seen = 0
		if err := s.View(list); !errors.Is(err, gone) || seen != 3 {
			t.Errorf("%s: after %d records: %v", name, seen, err)
		}
	}
}
