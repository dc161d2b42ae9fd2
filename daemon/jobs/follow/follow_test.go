package follow

import (
	"log/slog"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAGuestThatNamesEndlessJobsIsNotListenedToForEver(t *testing.T) {
	f := New(Options{Log: slog.New(slog.DiscardHandler)})
	f.machines["m_1"] = &machine{recovered: maxRecovered - 1}
	for i, want := range []bool{true, false, false} {
		if got := f.mayRecover("m_1"); got != want {
			t.Errorf("job %d may be recovered: %v", i, got)
		}
	}
	if f.mayRecover("m_2") {
		t.Error("a job of a machine that is not followed may be recovered")
	}
}
