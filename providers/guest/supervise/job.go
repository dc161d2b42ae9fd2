package supervise

import (
	"container/list"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/clock"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/launch"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/spool"
	"github.com/berth-sandbox/berth/providers/guest/stdio"
)

// streamNames are the two outputs, in the order of job.streams.
var streamNames = [2]string{"stdout", "stderr"}

// job is one job. It needs no goroutine of its own: the last event (the leader's exit, the end of a stream,
// the end of a kill, silence) completes it.
type job struct {
	supervisor       *Supervisor
	id               string
	ulid             record.ULID
	generation       uint64 // in which it was begun
	durable          bool
	killGrace        time.Duration
	killOnDisconnect bool
	disconnectGrace  time.Duration
	startTime        time.Time
	streams          [2]*spool.Stream
	past             *guestv1.Status // of a job of an earlier boot, for which nothing below is set

	begun   chan struct{} // closed when the call that starts it is done
	refused error         // set before begun is closed, when it was refused
	done    chan struct{} // closed when its outcome is known, and on disk if it is durable
	sealed  chan struct{} // closed when both streams have ended
	exiting chan struct{} // of a job with a terminal: closed when its leader has ended

	element  *list.Element // table.mu
	cursor   atomic.Uint64
	grown    atomic.Bool  // its growth is to be announced
	dropped  atomic.Bool  // it was forgotten
	inMemory atomic.Int64 // bytes of its output, counted in Supervisor.memory
	input    stdio.Stdin

	mu           sync.Mutex
	pid          int
	group        contain.ProcessGroup
	shell        string
	tty          bool
	pipes        [2]stdio.Outlet
	open         int // pipes that have not ended
	exit         *reap.Exit
	timeout      *clock.Countdown
	draining     *clock.Timer
	drained      bool
	stop         *stop // the last one
	ending       *stop // the one that started before the leader's exit
	abandoned    bool  // the leader could not be killed
	completing   bool
	outcome      *berthv1.Outcome
	endTime      time.Time
	readers      int
	disconnected *clock.Countdown
	forgetSealed bool // forget it once its output is sealed
}

// startReaders takes our ends of the pipes. The job's lock is held.
func (j *job) startReaders(ends *stdio.Ends) {
	for i, stream := range j.streams {
		if !j.pipes[i].Open(ends, i) {
			stream.Seal()
			continue
		}
		j.open++
		j.supervisor.work.Go(func() {
			j.pipes[i].ReadInto(stream, j.exiting, func() { j.supervisor.grew(j) })
			stream.Seal()
			j.streamEnded()
		})
	}
}

func (j *job) streamEnded() {
	j.mu.Lock()
	j.open--
	if j.open == 0 {
		close(j.sealed)
	}
	late := j.open == 0 && j.outcome != nil
	j.mu.Unlock()
	j.finalize()
	if late {
		j.sealedLate()
	}
}

// sealedLate is called when the output of a finished job ends.
func (j *job) sealedLate() {
	j.supervisor.table.announce(j)
	j.mu.Lock()
	forget := j.forgetSealed
	j.mu.Unlock()
	if forget {
		j.forgetQuietly()
	}
}

func (j *job) forgetQuietly() {
	if err := j.supervisor.forget(j); err != nil {
		j.supervisor.Log.Warn("a job stays", "job", j.id, "error", err)
	}
}

// exited is called by the reaper.
func (j *job) exited(exit reap.Exit) {
	j.mu.Lock()
	j.exit = &exit
	j.endTime = exit.Time
	j.group.LeaderReaped()
	j.timeout.Stop()
	if j.tty {
		close(j.exiting)
	}
	slow := j.durable
	j.mu.Unlock()
	if slow {
		// The reaper must not wait for the outcome to be written to disk.
		j.supervisor.work.Go(j.finalize)
		return
	}
	j.finalize()
}

// finalize completes the job if everything that its outcome depends on has happened.
func (j *job) finalize() {
	j.mu.Lock()
	if !j.readyToFinalize() {
		j.mu.Unlock()
		return
	}
	j.completing = true
	j.draining.Stop()
	j.mu.Unlock()
	j.complete()
}

func (j *job) readyToFinalize() bool {
	switch {
	case j.completing:
		return false
	case j.exit == nil && !j.abandoned:
		return false
	case j.stop != nil && !j.stop.finished:
		return false // the survivors of the kill are part of the outcome
	case j.open > 0 && !j.drained:
		if j.draining == nil {
			deadline := time.Now().Add(maxDrain)
			j.draining = j.supervisor.work.After(drainSilence, func() { j.drain(deadline) })
		}
		return false
	}
	return true
}

// complete sets the job's outcome, on disk first if it is durable, and announces it.
func (j *job) complete() {
	for _, stream := range j.streams {
		stream.MarkExit()
	}
	j.mu.Lock()
	outcome := j.decideOutcome()
	killed := j.stop != nil
	j.mu.Unlock()
	j.input.Abandon()
	if killed {
		j.closePipes() // output of processes that escaped the kill is not read
	}
	j.finish(outcome)
	if j.group != nil {
		j.group.Release()
	}
}

// failToStart completes a job whose command never ran.
func (j *job) failToStart(failure *launch.Failure) {
	for _, stream := range j.streams {
		stream.Seal()
		stream.MarkExit()
	}
	j.input.End(0)
	close(j.sealed)
	j.mu.Lock()
	j.completing = true
	j.endTime = time.Now()
	j.mu.Unlock()
	j.finish(&berthv1.Outcome{
		Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: failure.Reason, Exit: &berthv1.Outcome_ExitCode{ExitCode: failure.ExitCode},
	})
}

func (j *job) finish(outcome *berthv1.Outcome) {
	s := j.supervisor
	if j.durable {
		status := j.status()
		status.Done, status.Outcome = true, outcome
		status.EndTime = timestamppb.New(j.endTime)
		//mutation:record-before-report if err := error(nil); err != nil {
		if err := s.persist(status); err != nil {
			s.Log.Error("an outcome was not written and stays unknown", "job", j.id, "error", err)
			return
		}
	}
	j.mu.Lock()
	j.outcome = outcome
	j.disconnected.Stop()
	j.mu.Unlock()
	bytes := int64(j.streams[0].MemoryBytes() + j.streams[1].MemoryBytes())
	j.inMemory.Store(bytes)
	s.memory.Add(bytes)
	close(j.done)
	s.table.announce(j)
}

// finished says whether the job can be forgotten: it is done and its output has ended.
func (j *job) finished() bool {
	select {
	case <-j.done:
	default:
		return false
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.open == 0
}

// hasBegun says whether the call that starts it is done; that call announces the job then.
func (j *job) hasBegun() bool {
	select {
	case <-j.begun:
		return true
	default:
		return false
	}
}

// onDisk says whether it may have spooled to files.
func (j *job) onDisk() bool { return j.streams[0].OnDisk() || j.streams[1].OnDisk() }

// idle returns a channel that is closed when the job is done and no kill is under way.
func (j *job) idle() <-chan struct{} {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.stop != nil && !j.stop.finished && j.outcome != nil {
		return j.stop.done
	}
	return j.done
}

// closePipes ends the pumps and, with the job's terminal, the feeding of its input.
func (j *job) closePipes() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := range j.pipes {
		if j.pipes[i].File != nil {
			_ = j.pipes[i].File.Close()
		}
	}
}

func (j *job) cancelTimers() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.timeout.Stop()
	j.draining.Stop()
	j.disconnected.Stop()
}

// decideOutcome returns how the job ended. The job's lock is held.
func (j *job) decideOutcome() *berthv1.Outcome {
	o := &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}
	if j.exit != nil {
		status, code := waitStatus(j.exit)
		o.WaitStatus, o.Exit = status, &berthv1.Outcome_ExitCode{ExitCode: code}
	}
	signaled := j.exit != nil && j.exit.Status.Signaled()
	switch {
	case j.ending != nil && j.ending.applied:
		o.Cause, o.Reason = j.ending.cause, j.ending.reason
		if o.Cause == berthv1.Cause_CAUSE_TIMED_OUT {
			o.Exit = &berthv1.Outcome_ExitCode{ExitCode: timedOutCode}
		}
	case o.GetExitCode() == signalCode+int32(unix.SIGKILL) && j.group.OOMKills() > 0:
		// Also when a shell exits with the status of its killed child.
		o.Cause, o.Reason = berthv1.Cause_CAUSE_OOM_KILLED, "oom_killed: the machine ran out of memory"
	case signaled:
		o.Cause, o.Reason = berthv1.Cause_CAUSE_SIGNALED, "signaled: "+unix.SignalName(j.exit.Status.Signal())
	}
	if j.ending != nil {
		o.Survivors = j.ending.survivors
	}
	o.OutputStillOpen = j.open > 0 && j.stop == nil
	return o
}

// The exit codes of shells where the kernel has none.
const (
	timedOutCode = 124
	signalCode   = 128
)

func waitStatus(exit *reap.Exit) (*berthv1.WaitStatus, int32) {
	if exit.Status.Signaled() {
		number := exit.Status.Signal()
		return &berthv1.WaitStatus{
			Status:     &berthv1.WaitStatus_Signal{Signal: uint32(number)},
			CoreDumped: exit.Status.CoreDump(),
		}, signalCode + int32(number)
	}
	code := exit.Status.ExitStatus()
	return &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: uint32(code)}}, int32(code)
}

// status returns the job's status.
func (j *job) status() *guestv1.Status {
	if j.past != nil {
		status := proto.CloneOf(j.past)
		status.Cursor = j.cursor.Load()
		status.Stdout, status.Stderr = j.streams[0].Stats(), j.streams[1].Stats()
		return status
	}
	taken, closed, _ := j.input.State()
	j.mu.Lock()
	defer j.mu.Unlock()
	status := &guestv1.Status{
		JobId:       j.id,
		Generation:  j.generation,
		BootId:      j.supervisor.BootID,
		Done:        j.outcome != nil,
		Outcome:     j.outcome,
		Stdout:      j.streams[0].Stats(),
		Stderr:      j.streams[1].Stats(),
		StartTime:   timestamppb.New(j.startTime),
		Shell:       j.shell,
		Durable:     j.durable,
		Cursor:      j.cursor.Load(),
		Pid:         uint32(j.pid),
		InputOffset: taken,
		InputClosed: closed,
	}
	if j.outcome != nil {
		status.EndTime = timestamppb.New(j.endTime)
	}
	if j.exit != nil {
		status.CpuTime = durationpb.New(j.exit.CPUTime)
	}
	return status
}
