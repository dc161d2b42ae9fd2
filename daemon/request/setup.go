package request

import (
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/oklog/ulid/v2"
)

// SetupAttempts is how often a sandbox's setup is begun when something interrupts it.
const SetupAttempts = 5

// SetupJobID names the guest's job that sets a sandbox up, for each attempt from 1 on, and with 0 what is done
// once that has succeeded. The name is the same after a crash, so that a setup which still runs is joined. It is no job of the ledger.
func SetupJobID(sandboxID string, attempt int) string {
	id := ulid.ULID{}
	if made, err := ulid.Parse(strings.TrimPrefix(sandboxID, "sb_")); err == nil {
		_ = id.SetTime(made.Time()) // a ULID's own time is in range
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "setup %s %d", sandboxID, attempt))
	_ = id.SetEntropy(sum[:10]) // ten bytes are what it takes
	return "job_" + id.String()
}

// IsSetupJob reports whether a job's id is one of a sandbox's setup.
func IsSetupJob(sandboxID, jobID string) bool {
	for attempt := range SetupAttempts + 1 {
		if SetupJobID(sandboxID, attempt) == jobID {
			return true
		}
	}
	return false
}
