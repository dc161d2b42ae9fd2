package guestlink

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// Answers of a guest that the rooms above act on; test with errors.Is.
var (
	ErrNoJob           = errors.New("the guest has no such job")
	ErrDropped         = errors.New("the guest no longer keeps that output")
	ErrOtherBoot       = errors.New("the guest was started again meanwhile")
	ErrOtherGeneration = errors.New("the guest is in another generation")
	ErrForgotten       = errors.New("the guest was told to forget the job")
	ErrExpired         = errors.New("the guest has seen much younger jobs")
)

// maxGuestText bounds what a guest's words may add to an error.
const maxGuestText = 1024

// broke reports whether a call failed because its connection broke, so that it can be run again on
// the next one.
func broke(err error) bool { return status.Code(err) == codes.Unavailable }

// fromGuest says in the broker's words what a guest answered.
func fromGuest(machineID string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	answer, ok := status.FromError(err)
	if !ok {
		return err
	}
	text := cut(answer.Message())
	switch answer.Code() {
	case codes.Canceled:
		return context.Canceled
	case codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case codes.Unavailable:
		return unreachable(machineID, errors.New(text))
	case codes.NotFound:
		return ErrNoJob
	case codes.OutOfRange:
		return ErrDropped
	case codes.FailedPrecondition:
		return precondition(answer, text)
	case codes.InvalidArgument:
		return fault.Invalid("spec", "%s", text)
	case codes.Unimplemented:
		return fault.New(fault.CapabilityMissing, "the guest of machine %s cannot do this: %s", machineID, text).
			With("capability", "guest")
	case codes.ResourceExhausted:
		return fault.New(fault.QuotaExceeded, "machine %s has no room: %s", machineID, text)
	default:
		return fault.New(fault.Internal, "the guest of machine %s answered %s: %s", machineID, answer.Code(), text)
	}
}

func precondition(answer *status.Status, text string) error {
	for _, detail := range answer.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			switch info.GetReason() {
			case "OTHER_BOOT":
				return ErrOtherBoot
			case "OTHER_GENERATION":
				return ErrOtherGeneration
			case "FORGOTTEN":
				return ErrForgotten
			case "EXPIRED":
				return ErrExpired
			}
		}
	}
	return fault.New(fault.WrongState, "the guest refused: %s", text)
}

func unreachable(machineID string, cause error) error {
	return fault.New(fault.GuestUnreachable, "the guest of machine %s cannot be reached: %w: try again, or destroy the sandbox", machineID, cause).Retry(retryHint)
}

func cut(text string) string {
	if len(text) > maxGuestText {
		text = strings.ToValidUTF8(text[:maxGuestText], "") + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
