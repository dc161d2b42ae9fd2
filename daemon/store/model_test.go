package store

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// model is what the ledger should hold, in maps.
type model struct {
	sandboxes map[string]*recordv1.SandboxRecord
	machines  map[string]*recordv1.MachineRecord
	jobs      map[string]*recordv1.JobRecord
	revision  uint64
}

func (m *model) clone() *model {
	return &model{maps.Clone(m.sandboxes), maps.Clone(m.machines), maps.Clone(m.jobs), m.revision}
}

// step does one random change to ledger and model alike; records that reach the model are copies.
func (m *model) step(r *rand.Rand, tx *Tx) error {
	id := func(kind string) string { return fmt.Sprintf("%s_%02d", kind, r.IntN(30)) }
	at := timestamppb.New(epoch.Add(time.Duration(r.IntN(1000)) * time.Second))
	switch r.IntN(12) {
	case 0, 1, 2:
		rec := &recordv1.SandboxRecord{
			Id: id("sb"), Namespace: fmt.Sprintf("n%d", r.IntN(3)), State: berthv1.SandboxState(1 + r.IntN(10)), DestroyTime: at,
		}
		if old := m.sandboxes[rec.Id]; old != nil && old.State == destroyed {
			rec.State = destroyed
		}
		m.revision++
		err := tx.PutSandbox(rec, "sandbox.changed", "")
		m.sandboxes[rec.Id] = proto.CloneOf(rec)
		return err
	case 3, 4:
		rec := &recordv1.MachineRecord{Id: id("m"), State: recordv1.MachineState(1 + r.IntN(4)), Generation: r.Uint64()}
		if old := m.machines[rec.Id]; old.GetState() >= recordv1.MachineState_MACHINE_STATE_TERMINATING {
			rec.State = max(rec.State, old.State)
		}
		m.revision++
		m.machines[rec.Id] = proto.CloneOf(rec)
		return tx.PutMachine(rec, "", "")
	case 5, 6, 7:
		rec := &recordv1.JobRecord{
			Id: id("job"), Namespace: fmt.Sprintf("n%d", r.IntN(3)), SandboxId: id("sb"), MachineId: fmt.Sprintf("m_%d", r.IntN(3)),
			State: berthv1.JobState(1 + r.IntN(3)), Detached: r.IntN(2) == 0, DoneTime: at,
		}
		if jobDone(m.jobs[rec.Id]) {
			rec.State = berthv1.JobState_JOB_STATE_DONE
		}
		m.revision++
		err := tx.PutJob(rec, "job.changed", "")
		m.jobs[rec.Id] = proto.CloneOf(rec)
		return err
	case 8:
		gone := id("sb")
		delete(m.sandboxes, gone)
		return tx.DeleteSandbox(gone)
	case 9:
		gone := id("m")
		delete(m.machines, gone)
		return tx.DeleteMachine(gone)
	case 10:
		gone := id("job")
		delete(m.jobs, gone)
		return tx.DeleteJob(gone)
	default:
		_, err := tx.TrimEvents(epoch, 50, 5)
		return err
	}
}

// compare holds every list of the ledger against the model.
func (m *model) compare(tx *Tx) error {
	var different error
	same := func(what string, got, want []string) {
		if !slices.Equal(got, want) {
			different = errors.Join(different, fmt.Errorf("%s: %v, want %v", what, got, want))
		}
	}
	live, err := tx.LiveSandboxes()
	if err != nil {
		return err
	}
	same("live sandboxes", sandboxIDs(live), m.pickSandboxes(func(rec *recordv1.SandboxRecord) bool { return !sandboxEnded(rec.State) }))
	for _, rec := range live {
		if !proto.Equal(rec, m.sandboxes[rec.Id]) {
			return fmt.Errorf("sandbox %v, want %v", rec, m.sandboxes[rec.Id])
		}
	}
	ended, err := tx.EndedSandboxes(epoch.Add(500*time.Second), 1000)
	if err != nil {
		return err
	}
	slices.Sort(ended)
	same("ended sandboxes", ended, m.pickSandboxes(func(rec *recordv1.SandboxRecord) bool {
		return sandboxEnded(rec.State) && rec.DestroyTime.AsTime().Before(epoch.Add(500*time.Second))
	}))
	for n := range 3 {
		namespace := fmt.Sprintf("n%d", n)
		listed, _, err := tx.ListSandboxes(namespace, Page{}, nil)
		if err != nil {
			return err
		}
		want := m.pickSandboxes(func(rec *recordv1.SandboxRecord) bool { return rec.Namespace == namespace })
		slices.Reverse(want)
		same("sandboxes of "+namespace, sandboxIDs(listed), want)
		jobs, _, err := tx.ListJobs(namespace, "", Page{}, nil)
		if err != nil {
			return err
		}
		want = m.pickJobs(func(rec *recordv1.JobRecord) bool { return rec.Namespace == namespace })
		slices.Reverse(want)
		same("jobs of "+namespace, jobIDs(jobs), want)
		machine := fmt.Sprintf("m_%d", n)
		open, err := tx.OpenJobs(machine)
		if err != nil {
			return err
		}
		same("open jobs of "+machine, jobIDs(open), m.pickJobs(func(rec *recordv1.JobRecord) bool { return rec.MachineId == machine && !jobDone(rec) }))
	}
	for n := range 30 {
		id := fmt.Sprintf("sb_%02d", n)
		open, err := tx.CountOpenJobs(id)
		detached, err2 := tx.CountOpenDetachedJobs(id)
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		of := m.pickJobs(func(rec *recordv1.JobRecord) bool { return rec.SandboxId == id && !jobDone(rec) })
		ofDetached := m.pickJobs(func(rec *recordv1.JobRecord) bool { return rec.SandboxId == id && !jobDone(rec) && rec.Detached })
		if open != len(of) || detached != len(ofDetached) {
			return fmt.Errorf("open jobs of %s: %d, %d detached, want %d and %d", id, open, detached, len(of), len(ofDetached))
		}
	}
	machines, err := tx.LiveMachines()
	if err != nil {
		return err
	}
	alive := 0
	for _, rec := range m.machines {
		if rec.State != recordv1.MachineState_MACHINE_STATE_GONE {
			alive++
		}
	}
	if len(machines) != alive || tx.Revision() != m.revision {
		return fmt.Errorf("%d live machines at revision %d, want %d at %d", len(machines), tx.Revision(), alive, m.revision)
	}
	return different
}

func (m *model) pickSandboxes(keep func(*recordv1.SandboxRecord) bool) []string {
	ids := []string{}
	for id, rec := range m.sandboxes {
		if keep(rec) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (m *model) pickJobs(keep func(*recordv1.JobRecord) bool) []string {
	ids := []string{}
	for id, rec := range m.jobs {
		if keep(rec) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func sandboxIDs(sandboxes []*recordv1.SandboxRecord) []string {
	var ids []string
	for _, rec := range sandboxes {
		ids = append(ids, rec.Id)
	}
	return ids
}

func TestListsAgreeWithAModelUnderRandomChanges(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0)) // #nosec G404 -- replayable by its seed
	s := newTest(t)
	right := &model{map[string]*recordv1.SandboxRecord{}, map[string]*recordv1.MachineRecord{}, map[string]*recordv1.JobRecord{}, 0}
	for round := range 300 {
		fails := r.IntN(5) == 0
		steps := 1 + r.IntN(6)
		var tried *model
		err := s.Update(t.Context(), func(tx *Tx) error {
			tried = right.clone()
			for range steps {
				if err := tried.step(r, tx); err != nil {
					return err
				}
			}
			if err := tried.compare(tx); err != nil {
				return err
			}
			if fails {
				return errOwn
			}
			return nil
		})
		switch {
		case fails && errors.Is(err, errOwn):
		case err != nil:
			t.Fatalf("round %d: %v", round, err)
		default:
			right = tried
		}
		view(t, s, right.compare)
		if round%50 == 0 {
			if findings, err := check(t, s); len(findings) > 0 || err != nil {
				t.Fatalf("round %d: check: %v, %v", round, findings, err)
			}
		}
	}
}
