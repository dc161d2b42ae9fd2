package operation

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/providers"
)

func TestAKeptProblemSaysWhatItsErrorSaid(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{
		"a field":                  fault.Invalid("spec.workspace.path", "no command: can run: there"),
		"no field":                 fault.New(fault.WorkspaceFailed, "spec.workspace.path: git failed"),
		"a field's reason without": fault.New(fault.InvalidField, "wrong"),
	} {
		var known, kept *fault.Error
		errors.As(err, &known)
		if !errors.As(Error(Problem(err, time.Now())), &kept) || kept.Reason != known.Reason || kept.Error() != known.Error() || !slices.Equal(kept.Fields, known.Fields) {
			t.Errorf("%s: %+v became %+v", name, known, kept)
		}
	}
}

func TestEveryErrorHasItsReasonAndItsPlace(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		err      error
		reason   fault.Reason
		definite bool
	}{
		{"refused", providers.ErrRefused, fault.ProviderRefused, true},
		{"no image", providers.ErrNoImage, fault.ImageNotFound, true},
		{"no tool", providers.ErrNoTool, fault.ToolMissing, true},
		{"no capacity", providers.ErrCapacity, fault.QuotaExceeded, true},
		{"ambiguous", providers.ErrAmbiguous, fault.ProviderUnavailable, false},
		{"refused or not", errors.Join(providers.ErrRefused, providers.ErrAmbiguous), fault.ProviderRefused, false},
		{"unavailable", &providers.UnavailableError{Cause: providers.ErrRefused}, fault.ProviderRefused, false},
		{"away", &providers.UnavailableError{Cause: errors.New("away")}, fault.ProviderUnavailable, false},
		{"a deadline", context.DeadlineExceeded, fault.ProviderUnavailable, false},
		{"unknown", errors.New("what?"), fault.Internal, false},
		{"a full disk of ours", fault.New(fault.StoreFull, "full"), fault.StoreFull, false},
		{"a workspace", fault.New(fault.WorkspaceFailed, "git"), fault.WorkspaceFailed, true},
		{"an unreachable guest", fault.New(fault.GuestUnreachable, "silent"), fault.GuestUnreachable, false},
	} {
		if got := reasonOf(test.err); got != test.reason {
			t.Errorf("%s: its reason is %s, want %s", test.name, got, test.reason)
		}
		if got := definite(test.err); got != test.definite {
			t.Errorf("%s: definite is %v", test.name, got)
		}
	}
}
