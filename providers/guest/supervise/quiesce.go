package supervise

import (
	"cmp"
	"context"
	"sync"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/launch"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

// identity is the machine's id and generation, until it is restored or forked. Calls that start a job hold
// its lock shared.
type identity struct {
	sync.RWMutex
	machineID  string
	generation uint64
	machine    *launch.Machine
}

// begin changes the identity. Its lock is held, or it is not shared yet.
func (e *identity) begin(s *Supervisor, machineID string, generation uint64) {
	e.machineID, e.generation = machineID, generation
	e.machine = launch.NewMachine(machineID, s.Workspace, s.User, s.Env)
}

// after returns the identity after a request. Its lock is held.
func (e *identity) after(r *guestv1.ResumedRequest) (machineID string, generation uint64, same bool) {
	machineID, generation = cmp.Or(r.GetMachineId(), e.machineID), cmp.Or(r.GetGeneration(), e.generation)
	return machineID, generation, machineID == e.machineID && generation == e.generation
}

// Quiesce prepares the machine for a freeze: deadlines are paused, and the output of durable jobs is on disk.
// Deadlines count again after Resumed, or when the guest ran for too long without.
func (s *Supervisor) Quiesce(r *guestv1.QuiesceRequest) *guestv1.QuiesceResponse {
	s.clock.Pause()
	s.Log.Info("the guest is being quiesced", "reason", r.GetReason())
	for _, j := range s.table.all() {
		if !j.durable {
			continue
		}
		for _, stream := range j.streams {
			if err := stream.Sync(); err != nil {
				s.Log.Warn("output is not on disk", "job", j.id, "error", err)
			}
		}
	}
	return &guestv1.QuiesceResponse{}
}

// Resumed resumes deadlines. In another generation than before, the machine is a copy: its jobs belong to
// the original, so they are killed and forgotten before this returns. When that fails, or ctx ends, the
// generation does not change and the next call does the rest. A generation of zero and an empty machine id
// mean no change.
func (s *Supervisor) Resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedResponse, error) {
	if err := s.enter(ctx, r); err != nil {
		return nil, err
	}
	s.clock.Resume()
	// The clock is never stepped: it may be the host's.
	return &guestv1.ResumedResponse{}, nil
}

// enter changes the machine's identity, if the request does.
func (s *Supervisor) enter(ctx context.Context, r *guestv1.ResumedRequest) error {
	// The usual case does not wait for calls that start a job.
	s.identity.RLock()
	_, _, same := s.identity.after(r)
	s.identity.RUnlock()
	if same {
		return nil
	}
	s.identity.Lock()
	defer s.identity.Unlock()
	machineID, generation, same := s.identity.after(r)
	if same {
		return nil
	}
	if generation != s.identity.generation {
		if err := s.wipe(ctx); err != nil {
			return err
		}
	}
	if err := s.Records.SetIdentity(machineID, generation, s.BootID); err != nil {
		return refusal.New(refusal.Failed, "", "enter generation %d: %v", generation, err)
	}
	s.Tracker.Rename(machineID)
	s.identity.begin(s, machineID, generation)
	s.Log.Info("the machine was restored or forked", "machine", machineID, "generation", generation)
	return nil
}

// wipe kills every job with its tree and forgets it. The identity's lock is held, so none starts meanwhile.
func (s *Supervisor) wipe(ctx context.Context) error {
	jobs := s.table.all()
	for _, j := range jobs {
		j.end(berthv1.Cause_CAUSE_STOPPED, "generation_ended: the machine is a copy in another generation", 0)
	}
	bounded, cancel := context.WithTimeout(ctx, wipeTimeout)
	defer cancel()
	// Including processes of forgotten jobs.
	if left := s.Tracker.Clear(bounded); len(left) > 0 {
		return refusal.New(refusal.Failed, "", "%d processes of the previous generation cannot be killed", len(left))
	}
	for _, j := range jobs {
		for _, event := range []<-chan struct{}{j.idle(), j.sealed} {
			select {
			case <-event:
			case <-bounded.Done():
				return refusal.New(refusal.Failed, "", "%s of the previous generation does not end", j.id)
			}
			j.closePipes() // output of processes outside of the tree belongs to no job
		}
	}
	return s.forget(jobs...)
}
