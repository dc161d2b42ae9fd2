package supervise

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/clock"
	"github.com/berth-sandbox/berth/providers/guest/refusal"
)

const (
	// firstStopPoll and lastStopPoll bound the poll interval for a tree to end after TERM.
	firstStopPoll = time.Millisecond
	lastStopPoll  = 50 * time.Millisecond
	// maxSignal is the greatest signal's number.
	maxSignal = 64
)

// stop is one kill of a job's tree, shared by all calls that ask for it meanwhile.
type stop struct {
	cause  berthv1.Cause
	reason string
	sooner chan struct{} // has a token when deadline was moved forward
	done   chan struct{}

	// The job's lock guards these.
	deadline  clock.Moment // for KILL
	applied   bool         // the leader was running when the first signal was sent
	finished  bool
	survivors []uint32
}

// end starts killing the job's tree, or moves the deadline of the kill in progress forward. Of a job that is
// done it kills what is left; its outcome does not change.
func (j *job) end(cause berthv1.Cause, reason string, grace time.Duration) *stop {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.endLocked(cause, reason, grace)
}

// endRunning does so only while the leader runs: daemons that it left may stay.
func (j *job) endRunning(cause berthv1.Cause, reason string, grace time.Duration) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.exit == nil {
		j.endLocked(cause, reason, grace)
	}
}

func (j *job) endLocked(cause berthv1.Cause, reason string, grace time.Duration) *stop {
	if j.group == nil {
		return nil // it never ran, or ran in an earlier boot
	}
	deadline := j.supervisor.clock.Now() + clock.Moment(grace)
	if st := j.stop; st != nil && !st.finished {
		if deadline < st.deadline {
			st.deadline = deadline
			select {
			case st.sooner <- struct{}{}:
			default:
			}
		}
		return st
	}
	st := &stop{cause: cause, reason: reason, deadline: deadline, sooner: make(chan struct{}, 1), done: make(chan struct{})}
	j.stop = st
	if j.exit == nil && j.ending == nil {
		j.ending = st
	}
	j.supervisor.work.Go(func() { j.carryOut(st) })
	return st
}

func (j *job) carryOut(st *stop) {
	defer close(st.done)
	j.terminate(st)
	survivors := j.kill(st)
	j.mu.Lock()
	st.survivors = survivors
	st.finished = true
	j.abandoned = j.exit == nil && slices.Contains(survivors, uint32(j.pid))
	over := j.outcome != nil || j.completing
	j.mu.Unlock()
	j.finalize()
	if over {
		j.sealSoon()
	}
}

// sealSoon ends the output of a killed job: what the killed processes wrote is still read, what processes
// outside of the tree write is not.
func (j *job) sealSoon() {
	silence := time.NewTimer(drainSilence)
	defer silence.Stop()
	select {
	case <-j.sealed:
	case <-silence.C:
		j.closePipes()
	}
}

// terminate sends TERM and waits until nothing is left or the grace is over.
func (j *job) terminate(st *stop) {
	if j.group.Empty() {
		return
	}
	if left, _ := j.supervisor.clock.Until(j.deadline(st)); left <= 0 {
		return
	}
	if running, _ := j.supervisor.Reaper.SignalGroup(j.pid, unix.SIGTERM); running {
		j.mu.Lock()
		st.applied = true
		j.mu.Unlock()
	} else {
		j.group.Terminate()
	}
	pause := time.NewTimer(0)
	defer pause.Stop()
	for interval := firstStopPoll; !j.group.Empty(); interval = min(2*interval, lastStopPoll) {
		left, counting := j.supervisor.clock.Until(j.deadline(st))
		if left <= 0 {
			return
		}
		if !counting {
			left = interval
		}
		pause.Reset(min(interval, left))
		select {
		case <-pause.C:
		case <-st.sooner:
		}
	}
}

func (j *job) deadline(st *stop) clock.Moment {
	j.mu.Lock()
	defer j.mu.Unlock()
	return st.deadline
}

// kill sends KILL to all remaining processes and returns the survivors. It is bounded by the group's own
// timeout.
func (j *job) kill(st *stop) []uint32 {
	if running, _ := j.supervisor.Reaper.SignalGroup(j.pid, unix.SIGKILL); running {
		j.mu.Lock()
		st.applied = true
		j.mu.Unlock()
	}
	var survivors []uint32
	for _, pid := range j.group.Kill(context.Background()) {
		survivors = append(survivors, uint32(pid))
	}
	return survivors
}

// StopJob ends a job and returns when none of its processes is left or the survivors are known. It also finds
// a forgotten job that still has processes.
func (s *Supervisor) StopJob(ctx context.Context, r *guestv1.StopRequest) (*guestv1.StopResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		if j = s.table.findLeftover(r.GetJobId()); j == nil || j.group.Empty() {
			return nil, err
		}
	}
	grace := j.killGrace
	if r.GetGrace() != nil {
		grace = positive(r.GetGrace())
	}
	reason := r.GetReason()
	if reason == "" {
		reason = "stop_requested: by the broker"
	}
	if st := j.end(berthv1.Cause_CAUSE_STOPPED, reason, grace); st != nil {
		select {
		case <-st.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	select {
	case <-j.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return &guestv1.StopResponse{Status: j.status()}, nil
}

// Signal sends a signal to the process group of a job whose leader runs; otherwise it does nothing.
func (s *Supervisor) Signal(r *guestv1.SignalRequest) (*guestv1.SignalResponse, error) {
	j, err := s.find(r.GetJobId())
	if err != nil {
		return nil, err
	}
	if err := j.signal(r.GetSignal()); err != nil {
		return nil, err
	}
	return &guestv1.SignalResponse{Status: j.status()}, nil
}

func (j *job) signal(number uint32) error {
	if number < 1 || number > maxSignal {
		return refusal.New(refusal.Invalid, "", "%d is no signal: want 1 to %d", number, maxSignal)
	}
	j.mu.Lock()
	pid := j.pid
	j.mu.Unlock()
	if pid == 0 {
		return nil
	}
	if _, err := j.supervisor.Reaper.SignalGroup(pid, unix.Signal(number)); err != nil {
		return refusal.New(refusal.Failed, "", "signal %s: %v", j.id, err)
	}
	return nil
}

// find returns a job that has started.
func (s *Supervisor) find(id string) (*job, error) {
	j := s.table.find(id)
	if j == nil {
		return nil, unknownJob(id)
	}
	<-j.begun
	if j.refused != nil {
		return nil, unknownJob(id)
	}
	return j, nil
}

// attach counts a reader of the job; the returned function ends it.
func (j *job) attach() func() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.readers++
	j.disconnected.Stop()
	j.disconnected = nil
	return j.detach
}

func (j *job) detach() {
	j.mu.Lock()
	j.readers--
	j.mu.Unlock()
	j.watchReaders()
}

// watchReaders ends the job, after its grace, when it has no reader and must not run without one.
func (j *job) watchReaders() {
	j.mu.Lock()
	alone := j.killOnDisconnect && j.readers == 0 && j.outcome == nil && !j.completing && j.disconnected == nil
	if alone && j.disconnectGrace > 0 {
		j.disconnected = j.supervisor.clock.After(j.disconnectGrace, j.abandon)
		alone = false
	}
	j.mu.Unlock()
	if alone {
		j.abandon()
	}
}

func (j *job) abandon() {
	j.mu.Lock()
	alone := j.readers == 0
	j.mu.Unlock()
	if alone {
		j.endRunning(berthv1.Cause_CAUSE_STOPPED, fmt.Sprintf("disconnected: no reader for %v", j.disconnectGrace), j.killGrace)
	}
}

func unknownJob(id string) error {
	return refusal.New(refusal.Unknown, "", "no job %q in this machine", id)
}
