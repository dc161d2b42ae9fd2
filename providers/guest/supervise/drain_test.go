package supervise

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers/guest/reap"
)

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
