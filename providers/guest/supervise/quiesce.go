package supervise

import (
	"cmp"
	"context"
	"sync"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/launch"
)

// era is who the machine is and in which generation, until it is restored or forked. Its lock is held
// shared by what begins a job.
type era struct {
	sync.RWMutex
	machineID  string
	generation uint64
	machine    *launch.Machine
}

// begin makes it another. Its lock is held, or nobody knows it yet.
func (e *era) begin(s *Supervisor, machineID string, generation uint64) {
	e.machineID, e.generation = machineID, generation
	e.machine = launch.NewMachine(machineID, s.Workspace, s.User, s.Env)
}

// after returns what a request makes of it. Its lock is held.
func (e *era) after(r *guestv1.ResumedRequest) (machineID string, generation uint64, same bool) {
	machineID, generation = cmp.Or(r.GetMachineId(), e.machineID), cmp.Or(r.GetGeneration(), e.generation)
	return machineID, generation, machineID == e.machineID && generation == e.generation
}

// Quiesce makes the machine fit to be frozen: no timeout and no grace counts on, and what durable jobs
// have said is on disk. Time counts again after Resumed, or when the guest ran on for too long without.
func (s *Supervisor) Quiesce(r *guestv1.QuiesceRequest) *guestv1.QuiesceResponse {
	s.clock.halt()
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

// Resumed lets time count again. In another generation than before, the machine is a copy of what was:
// its jobs are the original's, so they are killed and forgotten before this returns. When that fails,
// or ctx ends, the generation stays what it was and the next call does the rest. A generation of zero,
// and an empty machine id, are the ones before.
func (s *Supervisor) Resumed(ctx context.Context, r *guestv1.ResumedRequest) (*guestv1.ResumedResponse, error) {
	if err := s.enter(ctx, r); err != nil {
		return nil, err
	}
	s.clock.proceed()
	// The clock is never stepped: nothing says that it is the machine's own and not the host's.
	return &guestv1.ResumedResponse{}, nil
}

// enter makes the machine what it is from now on, if that is something else.
func (s *Supervisor) enter(ctx context.Context, r *guestv1.ResumedRequest) error {
	// The usual case waits for nobody who begins a job.
	s.era.RLock()
	_, _, same := s.era.after(r)
	s.era.RUnlock()
	if same {
		return nil
	}
	s.era.Lock()
	defer s.era.Unlock()
	machineID, generation, same := s.era.after(r)
	if same {
		return nil
	}
	if generation != s.era.generation {
		if err := s.wipe(ctx); err != nil {
			return err
		}
	}
	if err := s.Records.Adopt(machineID, generation, s.BootID); err != nil {
		return refuse(Failed, "", "enter generation %d: %v", generation, err)
	}
	s.Means.Rename(machineID)
	s.era.begin(s, machineID, generation)
	s.Log.Info("the machine was restored or forked", "machine", machineID, "generation", generation)
	return nil
}

// wipe kills every job with its tree and forgets it. The era's lock is held, so none begins meanwhile.
func (s *Supervisor) wipe(ctx context.Context) error {
	jobs := s.table.all()
	for _, j := range jobs {
		j.end(berthv1.Cause_CAUSE_STOPPED, "generation_ended: the machine is a copy in another generation", 0)
	}
	patience, cancel := context.WithTimeout(ctx, wipePatience)
	defer cancel()
	// Also what forgotten jobs left.
	if left := s.Means.Clear(patience); len(left) > 0 {
		return refuse(Failed, "", "%d processes of the generation before will not go", len(left))
	}
	for _, j := range jobs {
		for _, event := range []<-chan struct{}{j.idle(), j.sealed} {
			select {
			case <-event:
			case <-patience.Done():
				return refuse(Failed, "", "job %s of the generation before does not end", j.id)
			}
			j.closePipes() // what somebody outside of the tree writes is nobody's any more
		}
	}
	return s.forget(jobs...)
}
