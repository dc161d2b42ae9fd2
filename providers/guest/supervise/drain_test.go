package supervise

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/reap"
)

// Output of a child that lives on is waited for, but not for ever.
func TestAChildThatIsNeverSilentHoldsUpNoOutcome(t *testing.T) {
	s := supervisor(t)
	const id = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	let := filepath.Join(t.TempDir(), "let")
	_, err := s.Start(&guestv1.StartRequest{JobId: id, Command: &guestv1.Command{
		Shell: "while [ ! -e " + let + " ]; do sleep 0.01; done; sleep 1000 & exit 3", OutputLimitBytes: 1 << 10,
	}})
	if err != nil {
		t.Fatal(err)
	}
	j := s.table.find(id)
	if err := os.WriteFile(let, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// As with a child whose bytes were read just before each probe.
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for deadline, over := time.Now().Add(time.Minute), false; !over; {
		j.pipes[0].Touch(time.Now().Add(time.Hour))
		select {
		case <-j.done:
			over = true
		case <-again.C:
		}
		if time.Now().After(deadline) {
			t.Errorf("no outcome within a minute, and the wait for output is to take at most %s", maxDrain)
			break
		}
	}
	stopped, err := s.StopJob(t.Context(), &guestv1.StopRequest{JobId: id, Grace: durationpb.New(0)})
	if err != nil {
		t.Fatal(err)
	}
	o := stopped.GetStatus().GetOutcome()
	if o.GetCause() != berthv1.Cause_CAUSE_EXITED || o.GetExitCode() != 3 || !o.GetOutputStillOpen() {
		t.Errorf("the outcome is %v, want exit 3 with its output still open", o)
	}
}

func TestOutputIsHeldOpenByAProcessThatStaysOnly(t *testing.T) {
	for _, test := range []struct {
		name     string
		keepOpen func(t *testing.T, s *Supervisor, writeEnd int)
		open     bool
	}{
		{"no process has it, and its end was not read yet", func(t *testing.T, _ *Supervisor, writeEnd int) { closeEnd(t, writeEnd) }, false},
		{"a process has it", func(t *testing.T, _ *Supervisor, writeEnd int) { t.Cleanup(func() { closeEnd(t, writeEnd) }) }, true},
		{"a process that is being forked has it", func(t *testing.T, s *Supervisor, writeEnd int) {
			begun, over := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(over)
				_, _ = s.Reaper.Spawn(func() (int, error) {
					close(begun)
					time.Sleep(2 * drainSilence) // a fork on a busy machine
					closeEnd(t, writeEnd)        // as executing the program does
					return 0, errors.New("there is no program")
				}, nil)
			}()
			<-begun
			t.Cleanup(func() { <-over })
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := supervisor(t)
			var ends [2]int
			if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			file := os.NewFile(uintptr(ends[0]), "stdout")
			defer func() { _ = file.Close() }()
			// It has ended, and what would complete it is under way already.
			j := &job{supervisor: s, exit: &reap.Exit{}, open: 1, completing: true}
			j.pipes[0].File = file
			defer j.cancelTimers()
			test.keepOpen(t, s, ends[1])
			j.drain(time.Now().Add(maxDrain))
			j.mu.Lock()
			defer j.mu.Unlock()
			if j.drained != test.open {
				t.Errorf("the wait for output is over: %t, want %t", j.drained, test.open)
			}
		})
	}
}

func closeEnd(t *testing.T, fd int) {
	t.Helper()
	if err := unix.Close(fd); err != nil {
		t.Error(err)
	}
}
