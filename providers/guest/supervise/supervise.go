// Package supervise runs jobs: it starts each at most once, keeps its output, ends it with its whole
// tree, determines how it ended, and notifies callers that wait. It uses the messages of berth.guest.v1 but
// knows nothing of gRPC or connections, and never invents an outcome.
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
	"github.com/berth-sandbox/berth/providers/guest/buffer"
	"github.com/berth-sandbox/berth/providers/guest/clock"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/spool"
)

const (
	// defaultKillGrace is between TERM and KILL where a command sets none.
	defaultKillGrace = 5 * time.Second
	// closeGrace is the same when the guest itself is stopped.
	closeGrace = 2 * time.Second
	// closeTimeout bounds the wait for jobs to end then; a kill alone may take 10 s.
	closeTimeout = 15 * time.Second
	// drainSilence ends the wait for more output after the leader's exit; maxDrain bounds it.
	drainSilence = 50 * time.Millisecond
	maxDrain     = 2 * time.Second
	// growthInterval is how often growth of output is announced to List.
	growthInterval = time.Second
	// memoryBudget bounds the output of finished jobs that is in memory, in bytes. Beyond it, new
	// jobs spool to disk.
	memoryBudget = 4 << 20
	// sendBudget bounds the output in flight to all attached callers together, in bytes.
	sendBudget = 2 << 20
	// persistRetry and persistRetryMax bound the pauses between attempts to write an outcome.
	persistRetry    = 10 * time.Millisecond
	persistRetryMax = 2 * time.Second
	// removalsQueued bounds the queue of forgotten jobs whose files are to be removed; beyond it, callers remove
	// them themselves.
	removalsQueued = 1024
	// inputTimeout is how long an Input waits for space.
	inputTimeout = time.Second
	// listLimit is the default and the greatest limit of a List.
	listLimit = 1000
	// readDefault and maxRead bound the bytes of one Read, maxRunOutput those of each stream in
	// one answer of Run: two of them fit a message of 4 MiB.
	readDefault  = 256 << 10
	maxRead      = 1 << 20
	maxRunOutput = 1 << 20
	// maxForget bounds the ids of one Forget.
	maxForget = 1000
	// firstLeftoverPoll and lastLeftoverPoll bound the interval between probes for processes of forgotten jobs;
	// a probe may read all of /proc.
	firstLeftoverPoll = 250 * time.Millisecond
	lastLeftoverPoll  = 30 * time.Second
	// maxQuiesce bounds the running time for which a quiesced guest that is never resumed pauses deadlines: a
	// freeze follows within seconds of the quiesce, or not at all.
	maxQuiesce = 60 * time.Second
	// wipeTimeout bounds the wait for one job of another generation to be gone; a kill alone may take
	// 10 s.
	wipeTimeout = 15 * time.Second
)

// Config is what a supervisor works with. It owns none of it.
type Config struct {
	MachineID  string // until Resumed says otherwise
	Generation uint64 // likewise
	BootID     string
	Workspace  string            // absolute
	User       string            // of commands that name none; empty: the guest's own
	Env        map[string]string // beneath every command's own
	MaxQuiesce time.Duration     // of running time that does not count after Quiesce; default 60 s
	Records    *record.Directory
	Tracker    contain.Tracker
	Reaper     *reap.Reaper
	Log        *slog.Logger
}

// Supervisor runs the jobs of one machine.
type Supervisor struct {
	Config
	clock    *clock.Clock
	identity identity
	null     *os.File      // /dev/null, for commands without stdin
	work     clock.Work    // every goroutine and timer except the one below
	ended    chan struct{} // closed when retries are given up

	removals chan *job
	removing sync.WaitGroup

	memory atomic.Int64 // bytes of finished jobs' output in memory

	sending *buffer.Budget
	table   table

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
		sending:  buffer.NewBudget(sendBudget),
	}
	if s.MaxQuiesce <= 0 {
		s.MaxQuiesce = maxQuiesce
	}
	s.clock = clock.New(&s.work, s.MaxQuiesce, s.Log)
	s.identity.begin(s, config.MachineID, config.Generation)
	s.table.jobs = make(map[string]*job)
	if err := s.load(); err != nil {
		_ = null.Close()
		return nil, err
	}
	s.removing.Go(s.removeForgotten)
	return s, nil
}

// Stop ends every job with its tree and refuses new ones. It returns when all jobs that can end
// have ended, so that calls that wait for one are answered.
func (s *Supervisor) Stop(ctx context.Context) {
	s.mu.Lock()
	s.closing = true
	s.mu.Unlock()
	s.clock.End()
	bounded, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	all := s.table.all()
	for _, j := range all {
		select {
		case <-j.begun:
			j.end(berthv1.Cause_CAUSE_STOPPED, "machine_stopping: the guest is stopping", closeGrace)
		case <-bounded.Done():
		}
	}
	for _, j := range all {
		select {
		case <-j.idle():
		case <-bounded.Done():
			s.Log.Warn("a job did not end in time", "job", j.id)
		}
	}
	if left := s.Tracker.Clear(bounded); len(left) > 0 {
		s.Log.Warn("processes outlive the guest", "pids", left)
	}
}

// Close waits for everything that the supervisor started. It is called after Stop and after the last call.
func (s *Supervisor) Close() error {
	close(s.ended)
	s.table.cancelTimers()
	for _, j := range s.table.all() {
		j.closePipes()
		j.input.Abandon()
		j.cancelTimers()
	}
	s.work.Wait()
	close(s.removals)
	s.removing.Wait()
	return s.null.Close()
}

// load recovers the jobs of earlier boots: they are done, with the recorded outcome, or lost.
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
	j.input.End(int(status.GetInputOffset()))
	dir := s.Records.OutputDir(j.id, j.durable)
	stats := []*berthv1.OutputStats{status.GetStdout(), status.GetStderr()}
	for i, name := range streamNames {
		options := spool.Options{Dir: dir, Name: name, Limit: f.Record.GetOutputLimitBytes()}
		if j.streams[i], err = spool.Reopen(options, stats[i]); err != nil {
			return nil, err
		}
	}
	return j, nil
}

// closed is a closed channel.
var closed = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// persist writes a durable job's outcome to disk, retrying until it succeeds: an outcome that was reported
// but not written could change. It fails only when the guest ends.
func (s *Supervisor) persist(status *guestv1.Status) error {
	pause := time.NewTimer(0)
	defer pause.Stop()
	for wait := persistRetry; ; wait = min(2*wait, persistRetryMax) {
		err := s.Records.WriteStatus(status)
		if err == nil {
			return nil
		}
		s.Log.Error("cannot write an outcome, retrying", "job", status.GetJobId(), "error", err)
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
		s.Log.Warn("cannot remove the files of a forgotten job", "job", j.id, "error", err)
	}
}
