package unrecorded

import (
	"strconv"
	"testing"

	"github.com/berth-sandbox/berth/daemon/fault"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestNoMoreCommandsAreTakenThanCanBeRecorded(t *testing.T) {
	c := New(Options{})
	for i := range maxUnwritten { // as with a full disk
		if err := c.admit(); err != nil {
			t.Fatalf("command %d is refused: %v", i, err)
		}
		c.ended[strconv.Itoa(i)] = true
	}
	if err := c.admit(); !fault.Is(err, fault.StoreFull) {
		t.Errorf("one more command: %v", err)
	}
	clear(c.ended)
	if err := c.admit(); err != nil {
		t.Errorf("with space again: %v", err)
	}
}

func TestACommandsEndIsAwaitedOnce(t *testing.T) {
	w := waits{jobs: map[string]bool{}}
	if !w.begin("job_1") || w.begin("job_1") || !w.begin("job_2") {
		t.Error("a second one waits, or another job's does not")
	}
	w.end("job_1")
	if !w.begin("job_1") {
		t.Error("nobody can wait again")
	}
}
