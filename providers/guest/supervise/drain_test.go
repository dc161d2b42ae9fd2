package supervise

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers/guest/reap"
)

// What a child still writes is waited for, but not for ever.
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
	// As with a child of which bytes came just now whenever somebody looks.
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for deadline, over := time.Now().Add(5*drainMost), false; !over; {
		j.pipes[0].last.Store(time.Now().Add(time.Hour).UnixNano())
		select {
		case <-j.done:
			over = true
		case <-look.C:
		}
		if time.Now().After(deadline) {
			t.Errorf("no outcome after %s, and the wait for output is to take at most %s", 5*drainMost, drainMost)
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

// From the moment when a byte is in the pipe until it is spooled something is on its way, whoever has the
// byte meanwhile: a look in between that sees silence would end the output before it.
func TestAByteOnItsWayIsNoSilence(t *testing.T) {
	s := supervisor(t)
	const id = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	if _, err := s.Start(&guestv1.StartRequest{JobId: id, Command: &guestv1.Command{Argv: []string{"sleep", "1000"}, OutputLimitBytes: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	j := s.table.find(id)
	pipe, err := os.OpenFile(filepath.Join("/proc", strconv.Itoa(j.pid), "fd", "1"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	outlet, stream := &j.pipes[0], j.streams[0]
	silent := 0
	for written := uint64(1); written <= 30_000; written++ {
		outlet.last.Store(time.Now().Add(-time.Hour).UnixNano())
		if _, err := pipe.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		for {
			// Before the byte is spooled it is on its way, and after that it came just now.
			if outlet.quiet(time.Now()) >= time.Minute {
				silent++
			}
			if stream.Facts().GetTotalBytes() == written && !outlet.busy.Load() {
				break
			}
		}
	}
	if silent > 0 {
		t.Errorf("%d looks saw silence while a byte was on its way", silent)
	}
	if err := pipe.Close(); err != nil {
		t.Error(err)
	}
	if _, err := s.StopJob(t.Context(), &guestv1.StopRequest{JobId: id, Grace: durationpb.New(0)}); err != nil {
		t.Fatal(err)
	}
}

func TestOutputIsHeldOpenByAProcessThatStaysOnly(t *testing.T) {
	for _, test := range []struct {
		name string
		hold func(t *testing.T, s *Supervisor, writeEnd int)
		held bool
	}{
		{"nobody has it, and its end was not read yet", func(t *testing.T, _ *Supervisor, writeEnd int) { closeEnd(t, writeEnd) }, false},
		{"somebody has it", func(t *testing.T, _ *Supervisor, writeEnd int) { t.Cleanup(func() { closeEnd(t, writeEnd) }) }, true},
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
			read, write, err := pipe()
			if err != nil {
				t.Fatal(err)
			}
			file := os.NewFile(uintptr(read), "stdout")
			defer func() { _ = file.Close() }()
			// It has ended, and what would complete it is under way already.
			j := &job{supervisor: s, exit: &reap.Exit{}, open: 1, completing: true}
			j.pipes[0].file = file
			defer j.cancelTimers()
			test.hold(t, s, write)
			j.drain(time.Now().Add(drainMost))
			j.mu.Lock()
			defer j.mu.Unlock()
			if j.drained != test.held {
				t.Errorf("the wait for output is over: %t, want %t", j.drained, test.held)
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
