package supervise

import (
	"container/list"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/launch"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

// streamNames are the two outputs, in the order of job.streams.
var streamNames = [2]string{"stdout", "stderr"}

// job is one job. It needs no goroutine of its own: whatever happens last (the leader's exit, the
// end of a stream, the end of a kill, silence) completes it.
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
	past             *guestv1.Status // of a job that an earlier boot left, and nothing else then

	begun   chan struct{} // closed when the call that begins it is through
	refused error         // set before begun is closed, when it did not begin
	done    chan struct{} // closed when its outcome is known, and on disk if it is durable
	sealed  chan struct{} // closed when both streams have ended
	exiting chan struct{} // of a job with a terminal: closed when its leader has ended

	element  *list.Element // table.mu
	cursor   atomic.Uint64
	grown    atomic.Bool  // its growth will be announced
	dropped  atomic.Bool  // it was forgotten
	inMemory atomic.Int64 // bytes of its output, counted in Supervisor.memory
	input    input

	mu           sync.Mutex
	pid          int
	tree         contain.Tree
	shell        string
	tty          bool
	pipes        [2]outlet
	open         int // pipes that have not ended
	exit         *reap.Exit
	timeout      *countdown
	draining     *timer
	drained      bool
	stop         *stop // the last one
	ending       *stop // the one that was there before the leader's exit
	abandoned    bool  // the leader could not be killed
	completing   bool
	outcome      *berthv1.Outcome
	endTime      time.Time
	readers      int
	disconnected *countdown
	forgetSealed bool // forget it once its output is sealed
}

// outlet is our end of one output pipe.
type outlet struct {
	file *os.File
	last atomic.Int64 // when bytes came, in nanoseconds since 1970
	busy atomic.Bool  // bytes are being read and spooled
}

// startPumps takes our ends of the pipes. The job's lock is held.
func (j *job) startPumps(p *plumbing) {
	for i, fd := range p.outputs {
		if fd == noFile {
			j.streams[i].Seal()
			continue
		}
		j.pipes[i].file = os.NewFile(uintptr(fd), streamNames[i])
		j.open++
		j.supervisor.work.Add(1)
		go j.pump(i)
	}
}

var (
	smallBuffers = sync.Pool{New: func() any { b := make([]byte, smallRead); return &b }}
	largeBuffers = sync.Pool{New: func() any { b := make([]byte, largeRead); return &b }}
)

// pump spools one stream until its end. It holds a buffer only while there is something in the pipe.
func (j *job) pump(i int) {
	defer j.supervisor.work.Done()
	outlet, stream, buffers := &j.pipes[i], j.streams[i], &smallBuffers
	conn, err := outlet.file.SyscallConn()
	ended := err != nil
	unused := false // a terminal that no process has open
	take := func(fd uintptr) bool {
		buffer := buffers.Get().(*[]byte)
		defer buffers.Put(buffer)
		// From before the bytes leave the pipe until they are spooled: see quiet.
		outlet.busy.Store(true)
		defer outlet.busy.Store(false)
		for {
			n, err := unix.Read(int(fd), *buffer)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				return false
			case errors.Is(err, unix.EIO) && j.tty:
				unused = true
				return true
			case err != nil || n == 0:
				ended = true
				return true
			}
			stream.Pace(n)
			now := time.Now()
			stream.Append((*buffer)[:n], now)
			outlet.last.Store(now.UnixNano())
			j.supervisor.grew(j)
			if n == smallRead && buffers == &smallBuffers {
				// A command that fills its pipe gets a larger one; most never do.
				_, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize)
				buffers = &largeBuffers
				return true
			}
		}
	}
	for !ended {
		if err := conn.Read(take); err != nil {
			ended = true // closed under us: the job was killed
		}
		if unused {
			unused = false
			ended = ended || !j.mayReopen()
		}
	}
	_ = outlet.file.Close()
	stream.Seal()
	j.streamEnded()
}

// mayReopen waits a moment and says whether a terminal that no process has open may come into use
// again: for as long as the leader runs, which may open it by name. To close our end before would hang
// up on a leader that closes its files and then exits.
func (j *job) mayReopen() bool {
	select {
	case <-j.exiting:
		return false
	default:
	}
	pause := time.NewTimer(reopenLook)
	defer pause.Stop()
	select {
	case <-j.exiting: // what it wrote last is still to be read
	case <-pause.C:
	}
	return true
}

func (j *job) streamEnded() {
	j.mu.Lock()
	j.open--
	if j.open == 0 {
		close(j.sealed)
	}
	late := j.open == 0 && j.outcome != nil
	j.mu.Unlock()
	j.settle()
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
	j.tree.LeaderReaped()
	j.timeout.stop()
	if j.tty {
		close(j.exiting)
	}
	slow := j.durable
	j.mu.Unlock()
	if slow {
		// Its outcome is written to disk, which the reaper must not wait for.
		j.supervisor.work.Go(j.settle)
		return
	}
	j.settle()
}

// settle completes the job if all that its outcome waits for has happened.
func (j *job) settle() {
	j.mu.Lock()
	if !j.ripe() {
		j.mu.Unlock()
		return
	}
	j.completing = true
	j.draining.stop()
	j.mu.Unlock()
	j.complete()
}

func (j *job) ripe() bool {
	switch {
	case j.completing:
		return false
	case j.exit == nil && !j.abandoned:
		return false
	case j.stop != nil && !j.stop.finished:
		return false // what survives the kill is part of the outcome
	case j.open > 0 && !j.drained:
		if j.draining == nil {
			deadline := time.Now().Add(drainMost)
			j.draining = j.supervisor.after(drainSilence, func() { j.drain(deadline) })
		}
		return false
	}
	return true
}

// complete gives the job its outcome, on disk first if it is durable, and tells everybody.
func (j *job) complete() {
	for _, stream := range j.streams {
		stream.MarkExit()
	}
	j.mu.Lock()
	outcome := j.judge()
	killed := j.stop != nil
	j.mu.Unlock()
	j.input.abandon()
	if killed {
		j.closePipes() // what escaped the kill is not listened to any more
	}
	j.finish(outcome)
	if j.tree != nil {
		j.tree.Release()
	}
}

// failToStart completes a job whose command never ran.
func (j *job) failToStart(failure *launch.Failure) {
	for _, stream := range j.streams {
		stream.Seal()
		stream.MarkExit()
	}
	j.input.none(0)
	close(j.sealed)
	j.mu.Lock()
	j.completing = true
	j.endTime = time.Now()
	j.mu.Unlock()
	j.finish(&berthv1.Outcome{
		Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: failure.Reason, ExitCode: proto.Int32(failure.ExitCode),
	})
}

func (j *job) finish(outcome *berthv1.Outcome) {
	s := j.supervisor
	if j.durable {
		status := j.status()
		status.Done, status.Outcome = true, outcome
		status.EndTime = timestamppb.New(j.endTime)
		if err := s.persist(status); err != nil {
			s.Log.Error("an outcome stays unknown", "job", j.id, "error", err)
			return
		}
	}
	j.mu.Lock()
	j.outcome = outcome
	j.disconnected.stop()
	j.mu.Unlock()
	bytes := int64(j.streams[0].MemoryBytes() + j.streams[1].MemoryBytes())
	j.inMemory.Store(bytes)
	s.memory.Add(bytes)
	close(j.done)
	s.table.announce(j)
}

// finished says whether the job can be forgotten: done, and nothing more to come.
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

// hasBegun says whether the call that begins it is through; that call announces the job then.
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
		if j.pipes[i].file != nil {
			_ = j.pipes[i].file.Close()
		}
	}
}

func (j *job) cancelTimers() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.timeout.stop()
	j.draining.stop()
	j.disconnected.stop()
}

// judge says how the job ended. The job's lock is held.
func (j *job) judge() *berthv1.Outcome {
	o := &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED}
	if j.exit != nil {
		o.WaitStatus, o.ExitCode = waitStatus(j.exit)
	}
	signaled := j.exit != nil && j.exit.Status.Signaled()
	switch {
	case j.ending != nil && j.ending.applied:
		o.Cause, o.Reason = j.ending.cause, j.ending.reason
		if o.Cause == berthv1.Cause_CAUSE_TIMED_OUT {
			o.ExitCode = proto.Int32(timedOutCode)
		}
	case o.GetExitCode() == signalCode+int32(unix.SIGKILL) && j.tree.OOMKills() > 0:
		// Also when a shell passes on that its child was killed.
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

// The exit codes that shells give where the kernel gives none.
const (
	timedOutCode = 124
	signalCode   = 128
)

func waitStatus(exit *reap.Exit) (*berthv1.WaitStatus, *int32) {
	if exit.Status.Signaled() {
		number := exit.Status.Signal()
		return &berthv1.WaitStatus{
			Status:     &berthv1.WaitStatus_Signal{Signal: uint32(number)},
			CoreDumped: exit.Status.CoreDump(),
		}, proto.Int32(signalCode + int32(number))
	}
	code := exit.Status.ExitStatus()
	return &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: uint32(code)}}, proto.Int32(int32(code))
}

// status returns what is known of the job.
func (j *job) status() *guestv1.Status {
	if j.past != nil {
		status := proto.CloneOf(j.past)
		status.Cursor = j.cursor.Load()
		status.Stdout, status.Stderr = j.streams[0].Facts(), j.streams[1].Facts()
		return status
	}
	taken, closed, _ := j.input.state()
	j.mu.Lock()
	defer j.mu.Unlock()
	status := &guestv1.Status{
		JobId:       j.id,
		Generation:  j.generation,
		BootId:      j.supervisor.BootID,
		Done:        j.outcome != nil,
		Outcome:     j.outcome,
		Stdout:      j.streams[0].Facts(),
		Stderr:      j.streams[1].Facts(),
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
