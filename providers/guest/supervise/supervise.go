// Package supervise runs jobs: it begins each at most once, keeps its output, ends it with its whole
// tree, knows how it ended, and tells who waits. It speaks in messages of berth.guest.v1, but knows
// nothing of gRPC or of connections, and never invents an outcome.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

const (
	// defaultKillGrace is between TERM and KILL where a command names none.
	defaultKillGrace = 5 * time.Second
	// closeGrace is the same when the guest itself is asked to end.
	closeGrace = 2 * time.Second
	// closePatience bounds the wait for jobs to end then; a kill alone may take 10 s.
	closePatience = 15 * time.Second
	// drainSilence ends the wait for more output after the leader's exit; drainMost bounds it.
	drainSilence = 50 * time.Millisecond
	drainMost    = 2 * time.Second
	// growthEvery is how often growth of output wakes List.
	growthEvery = time.Second
	// smallRead and largeRead are what one read of a pipe takes, in bytes: the size of a pipe, and
	// the best chunk once a pipe was enlarged to pipeSize because its command filled it.
	smallRead = 64 << 10
	largeRead = 256 << 10
	pipeSize  = 1 << 20
	// reopenLook is between looks at a terminal that no process has open while its leader runs.
	reopenLook = 50 * time.Millisecond
	// memoryBudget bounds the output of finished jobs that is in memory, in bytes. Beyond it, new
	// jobs spool to disk.
	memoryBudget = 8 << 20
	// persistRetry and persistRetryMax bound the pauses between attempts to write an outcome.
	persistRetry    = 10 * time.Millisecond
	persistRetryMax = 2 * time.Second
	// removalsQueued are forgotten jobs whose files wait to be removed; a burst beyond it removes its
	// own.
	removalsQueued = 1024
	// listLimit is a List's limit where none is asked, and the greatest.
	listLimit = 1000
	// readDefault and readMost bound the bytes of one Read, runOutputMost those of each stream in
	// one answer of Run: two of them fit a message of 4 MiB.
	readDefault   = 256 << 10
	readMost      = 1 << 20
	runOutputMost = 1 << 20
	// forgetMost bounds the ids of one Forget.
	forgetMost = 1000
	// firstLeftLook and lastLeftLook bound the pauses between looks whether something of the forgotten
	// jobs still runs; a look may read all of /proc.
	firstLeftLook = 250 * time.Millisecond
	lastLeftLook  = 30 * time.Second
	// quiesceMost is for how much of its own running time a guest that was quiesced and never told to
	// go on counts no time: a freeze comes within seconds of the quiesce, or not at all.
	quiesceMost = 60 * time.Second
	// wipePatience bounds the wait for one job of another generation to be gone; a kill alone may take
	// 10 s.
	wipePatience = 15 * time.Second
	// jobOOMScore makes the kernel take a job before the guest.
	jobOOMScore = "500"
)

// Config is what a supervisor works with. It owns none of it.
type Config struct {
	MachineID   string // until Resumed says otherwise
	Generation  uint64 // likewise
	BootID      string
	Workspace   string            // absolute
	User        string            // of commands that name none; empty: the guest's own
	Env         map[string]string // beneath every command's own
	QuiesceMost time.Duration     // of running time that does not count after Quiesce; default 60 s
	Records     *record.Directory
	Means       contain.Means
	Reaper      *reap.Reaper
	Log         *slog.Logger
}

// Supervisor runs the jobs of one machine.
type Supervisor struct {
	Config
	clock *clock
	era   era
	null  *os.File       // /dev/null, for commands without stdin
	work  sync.WaitGroup // every goroutine and timer but the one below
	ended chan struct{}  // closed when what is left undone is given up

	removals chan *job
	removing sync.WaitGroup

	memory atomic.Int64 // bytes of finished jobs' output in memory

	table table

	mu      sync.Mutex
	closing bool
}

// New returns a supervisor that knows the jobs which earlier boots left. Close ends it.
func New(config Config) (*Supervisor, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, fmt.Errorf("open the null device: %w", err)
	}
	s := &Supervisor{
		Config:   config,
		null:     null,
		ended:    make(chan struct{}),
		removals: make(chan *job, removalsQueued),
	}
	if s.QuiesceMost <= 0 {
		s.QuiesceMost = quiesceMost
	}
	s.clock = newClock(s, s.QuiesceMost)
	s.era.begin(s, config.MachineID, config.Generation)
	s.table.jobs = make(map[string]*job)
	if err := s.load(); err != nil {
		_ = null.Close()
		return nil, err
	}
	s.removing.Go(s.removeForgotten)
	return s, nil
}

// Stop ends every job with its tree and refuses new ones. It returns when all that can end has
// ended, so that those who wait for a job are answered.
func (s *Supervisor) Stop(ctx context.Context) {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.clock.end()
	patience, cancel := context.WithTimeout(ctx, closePatience)
	defer cancel()
	all := s.table.all()
	for _, j := range all {
		select {
		case <-j.begun:
			j.end(berthv1.Cause_CAUSE_STOPPED, "machine_stopping: the guest was asked to end", closeGrace)
		case <-patience.Done():
		}
	}
	for _, j := range all {
		select {
		case <-j.idle():
		case <-patience.Done():
			s.Log.Warn("a job did not end in time", "job", j.id)
		}
	}
	if left := s.Means.Clear(patience); len(left) > 0 {
		s.Log.Warn("processes outlive the guest", "pids", left)
	}
}

// Close waits for all that the supervisor began. It comes after Stop, and after the last call.
func (s *Supervisor) Close() error {
	close(s.ended)
	s.table.cancelTimers()
	for _, j := range s.table.all() {
		j.closePipes()
		j.input.abandon()
		j.cancelTimers()
	}
	s.work.Wait()
	close(s.removals)
	s.removing.Wait()
	return s.null.Close()
}

// after calls f once d is over, unless the timer is stopped before; Close waits for it.
func (s *Supervisor) after(d time.Duration, f func()) *timer {
	s.work.Add(1)
	return &timer{supervisor: s, timer: time.AfterFunc(d, func() {
		defer s.work.Done()
		f()
	})}
}

// timer is one that the supervisor waits for.
type timer struct {
	supervisor *Supervisor
	timer      *time.Timer
}

// stop is right on a nil timer, too.
func (t *timer) stop() {
	if t != nil && t.timer.Stop() {
		t.supervisor.work.Done()
	}
}

// load takes over the jobs of earlier boots: they are done, with the outcome that was recorded, or
// lost.
func (s *Supervisor) load() error {
	found, err := s.Records.Load()
	if err != nil {
		return err
	}
	for _, f := range found {
		j, err := s.reopen(f)
		if err != nil {
			return err
		}
		s.table.add(j)
	}
	return nil
}

func (s *Supervisor) reopen(f record.Found) (*job, error) {
	ulid, err := record.ParseID(f.Record.GetJobId())
	if err != nil {
		return nil, err
	}
	status := f.Status
	if status == nil {
		status = &guestv1.Status{
			JobId: f.Record.GetJobId(), Generation: f.Record.GetGeneration(), BootId: f.Record.GetBootId(),
			Done: true, Durable: f.Record.GetDurable(), StartTime: f.Record.GetAcceptTime(), InputClosed: true,
			Outcome: &berthv1.Outcome{
				Cause:  berthv1.Cause_CAUSE_LOST,
				Reason: "guest_restarted: the guest ended before it knew how the job ended",
			},
		}
	}
	j := &job{supervisor: s, id: status.GetJobId(), ulid: ulid, past: status, durable: status.GetDurable(), begun: closed, done: closed, sealed: closed}
	j.input.none(int(status.GetInputOffset()))
	dir := s.Records.OutputDir(j.id, j.durable)
	facts := []*berthv1.OutputFacts{status.GetStdout(), status.GetStderr()}
	for i, name := range streamNames {
		options := spool.Options{Dir: dir, Name: name, Limit: f.Record.GetOutputLimitBytes()}
		if j.streams[i], err = spool.Reopen(options, facts[i]); err != nil {
			return nil, err
		}
	}
	return j, nil
}

// closed is a channel of what has happened long ago.
var closed = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// persist puts a durable job's outcome on disk, trying until it is there: an outcome that was told
// and then forgotten could change. It fails only when the guest ends.
func (s *Supervisor) persist(status *guestv1.Status) error {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for wait := persistRetry; ; wait = min(2*wait, persistRetryMax) {
		err := s.Records.WriteStatus(status)
		if err == nil {
			return nil
		}
		s.Log.Error("an outcome cannot be written yet", "job", status.GetJobId(), "error", err)
		pause.Reset(wait)
		select {
		case <-pause.C:
		case <-s.ended:
			return errors.Join(errors.New("the guest ends"), err)
		}
	}
}

func (s *Supervisor) removeForgotten() {
	for j := range s.removals {
		s.remove(j)
	}
}

// remove removes what a forgotten job has on disk and in memory. Its entry goes last.
func (s *Supervisor) remove(j *job) {
	var err error
	onDisk := j.onDisk()
	for _, stream := range j.streams {
		stream.Discard()
	}
	if !j.durable && onDisk {
		err = s.Records.RemoveOutput(j.id)
	}
	if err = errors.Join(err, s.Records.Remove(j.id)); err != nil {
		s.Log.Warn("something of a forgotten job stays", "job", j.id, "error", err)
	}
}
