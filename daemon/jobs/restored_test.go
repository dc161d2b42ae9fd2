package jobs

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// unfence does to a reserved job what opening a backup does.
func (w *harness) unfence(job *recordv1.JobRecord) {
	w.t.Helper()
	must(w.t, w.ledger.Update(w.ctx, func(tx *store.Tx) error {
		job.BootId = ""
		return tx.PutJob(job, "", "")
	}))
}

func TestAJobThatWasReservedInABackupIsNeverStartedAndIsNotSaidNotToHaveRun(t *testing.T) {
	for name, deadline := range map[string]time.Duration{"before its deadline": time.Hour, "after its deadline": time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			sandbox := w.sandbox()
			job := w.reserved(sandbox, &berthv1.JobSpec{Shell: "echo ran >> ran", StartDeadline: durationpb.New(deadline)})
			w.unfence(job)
			background.Pause(w.ctx, 10*time.Millisecond)
			w.restart()
			w.wantCause(w.done(job.GetId()), berthv1.Cause_CAUSE_LOST, "")
			if _, err := os.Stat(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err == nil {
				t.Error("it ran")
			}
		})
	}
}

func TestAJobThatWasReservedInABackupAndRunsIsFound(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	sandbox := w.sandbox()
	job := w.reserved(sandbox, shell("echo ran >> ran; sleep 0.3; exit 3"))
	w.begin(sandbox, job)
	w.unfence(job)
	w.restart()
	w.wantExit(w.done(job.GetId()), 3)
	if ran, err := os.ReadFile(filepath.Join(sandbox.GetWorkspacePath(), "ran")); err != nil || string(ran) != "ran\n" {
		t.Errorf("it ran as often as %q says (%v)", ran, err)
	}
}
