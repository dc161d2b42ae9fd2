package request

import "testing"

func TestSetupJobsKeepTheirNames(t *testing.T) {
	t.Parallel()
	sandbox := NewID("sb")
	seen := map[string]bool{}
	for attempt := 1; attempt <= SetupAttempts; attempt++ {
		id := SetupJobID(sandbox, attempt)
		if seen[id] || id != SetupJobID(sandbox, attempt) || !IsSetupJob(sandbox, id) || IsSetupJob(NewID("sb"), id) {
			t.Errorf("attempt %d is named %s", attempt, id)
		}
		seen[id] = true
	}
}
