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

// Answers of a guest that the packages above act on; test with errors.Is.
var (
	ErrNoJob           = errors.New("the guest has no such job")
	ErrDropped         = errors.New("the guest no longer keeps that output")
	ErrOtherBoot       = errors.New("the guest was started again meanwhile")
	ErrOtherGeneration = errors.New("the guest is in another generation")
	ErrForgotten       = errors.New("the guest was told to forget the job")
	ErrExpired         = errors.New("the guest has seen much younger jobs")
	// ErrRefused is wrapped by what a guest itself refused for good: nothing was begun. An error that does
	// not wrap it leaves open what the guest did.
	ErrRefused = errors.New("refused by the guest")
	// ErrProtocol is wrapped by what a guest replied that cannot be.
	ErrProtocol = errors.New("guest protocol error")
)

const (
	// maxErrorText bounds what a guest's words may add to an error.
	maxErrorText = 1024
	// guestDomain is the domain of the ErrorInfo that a guest puts on what it refuses.
	guestDomain = "berth.guest.v1"
)

// broke reports whether a call failed because its connection broke, so that it can be run again on
// the next one. A call that is cancelled while its caller still waits was cancelled by a connection that
// is being closed.
func broke(ctx context.Context, err error) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.Canceled && ctx.Err() == nil
}

// fromGuest says in the broker's words what became of a call.
//
// A status is not always the peer's word: the gRPC library on this side makes one itself when a message is
// too large, cannot be decoded or the stream is malformed. Of the codes that libraries make only what
// bears the guest's own detail is its refusal. The others (INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION,
// OUT_OF_RANGE) no library makes (https://grpc.io/docs/guides/status-codes/).
func fromGuest(ctx context.Context, machineID string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	answer, ok := status.FromError(err)
	if !ok {
		return err
	}
	text, reason := cut(answer.Message()), reasonOf(answer)
	switch answer.Code() {
	case codes.Canceled:
		if ctx.Err() == nil {
			return unreachable(machineID, errors.New("the connection to its guest was closed"))
		}
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
		return precondition(reason, text)
	case codes.InvalidArgument:
		return invalid(text)
	case codes.Unimplemented:
		if reason == "" {
			return fault.New(fault.CapabilityMissing, "the guest of machine %s cannot do this: %s", machineID, text).With("capability", "guest")
		}
		return fault.New(fault.CapabilityMissing, "the guest of machine %s cannot do this: %s (%w)", machineID, text, ErrRefused).
			With("capability", "guest")
	case codes.ResourceExhausted:
		if reason != "" {
			return fault.New(fault.QuotaExceeded, "machine %s has no space left: %s (%w)", machineID, text, ErrRefused)
		}
	}
	return fault.New(fault.Internal, "a call to the guest of machine %s failed with %s: %s", machineID, answer.Code(), text)
}

// reasonOf is the reason that a guest gave for its refusal; empty where it gave none.
func reasonOf(answer *status.Status) string {
	for _, detail := range answer.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == guestDomain {
			return info.GetReason()
		}
	}
	return ""
}

func precondition(reason, text string) error {
	switch reason {
	case "OTHER_BOOT":
		return ErrOtherBoot
	case "OTHER_GENERATION":
		return ErrOtherGeneration
	case "FORGOTTEN":
		return ErrForgotten
	case "EXPIRED":
		return ErrExpired
	}
	return fault.New(fault.WrongState, "the guest refused: %s", text)
}

// invalid is a refusal of the request itself.
func invalid(text string) error {
	refused := fault.New(fault.InvalidField, "spec: %s (%w)", text, ErrRefused)
	refused.Fields = []fault.Field{{Path: "spec", Description: text}}
	return refused
}

// about names the field that a guest refused, where a call is not about a spec.
func about(field string, err error) error {
	var refused *fault.Error
	if !errors.As(err, &refused) || refused.Reason != fault.InvalidField || len(refused.Fields) != 1 {
		return err
	}
	return fault.Invalid(field, "%s", refused.Fields[0].Description)
}

func unreachable(machineID string, cause error) error {
	return fault.New(fault.GuestUnreachable, "the guest of machine %s cannot be reached: %w: try again, or destroy the sandbox", machineID, cause).Retry(retryHint)
}

func cut(text string) string {
	if len(text) > maxErrorText {
		text = strings.ToValidUTF8(text[:maxErrorText], "") + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
