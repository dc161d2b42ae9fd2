package operation

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
)

// maxErrorText bounds the bytes that a provider's words may add to a record.
const maxErrorText = 2048

// definite reports whether an error says for sure that the step did not happen and won't: anything
// else, a deadline or a lost connection for example, is probed again.
func definite(err error) bool {
	var unavailable *providers.UnavailableError
	if errors.As(err, &unavailable) || errors.Is(err, providers.ErrAmbiguous) {
		//mutation:probe-after-ambiguity return true
		return false
	}
	if errors.Is(err, providers.ErrRefused) || errors.Is(err, providers.ErrCapacity) {
		return true
	}
	switch fault.KindOf(err) {
	case fault.KindInvalid, fault.KindNotFound, fault.KindPrecondition, fault.KindExhausted, fault.KindPermissionDenied:
		return !fault.Is(err, fault.StoreFull)
	default:
		return false
	}
}

// reasonOf names an error's reason, a provider's own kinds included.
func reasonOf(err error) fault.Reason {
	var known *fault.Error
	var unavailable *providers.UnavailableError
	switch {
	case errors.As(err, &known):
		return known.Reason
	case errors.Is(err, providers.ErrNoImage):
		return fault.ImageNotFound
	case errors.Is(err, providers.ErrNoTool):
		return fault.ToolMissing
	case errors.Is(err, providers.ErrCapacity):
		return fault.QuotaExceeded
	case errors.Is(err, providers.ErrRefused):
		return fault.ProviderRefused
	case errors.As(err, &unavailable), errors.Is(err, providers.ErrAmbiguous), errors.Is(err, context.DeadlineExceeded):
		return fault.ProviderUnavailable
	default:
		return fault.Internal
	}
}

// Problem is how an error is kept in a record.
func Problem(err error, now time.Time) *berthv1.Problem {
	return &berthv1.Problem{Reason: string(reasonOf(err)), Message: cutText(err.Error()), Time: timestamppb.New(now)}
}

// Error is the error that a kept problem stands for.
func Error(problem *berthv1.Problem) error {
	reason := fault.Reason(problem.GetReason())
	if field, description, found := strings.Cut(problem.GetMessage(), ": "); found && reason == fault.InvalidField {
		return fault.Invalid(field, "%s", description)
	}
	if _, known := fault.Reasons()[reason]; !known {
		reason = fault.Internal
	}
	return fault.New(reason, "%s", problem.GetMessage())
}

// cutText bounds a text, and makes it one that a record can hold: with any other, the failed step
// could not be recorded.
func cutText(text string) string {
	if len(text) > maxErrorText {
		text = fmt.Sprintf("%s… (%d bytes more)", strings.ToValidUTF8(text[:maxErrorText], ""), len(text)-maxErrorText)
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
