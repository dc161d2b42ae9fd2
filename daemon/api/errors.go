package api

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/daemon/fault"
)

// Domain is the ErrorInfo domain of every error of this API.
const Domain = "berth.v1"

// No detail passes 4 KiB, however long the words are that an error repeats.
const (
	maxMessage  = 2 << 10 // bytes of an error's message, and of a description
	maxMetadata = 512     // bytes of a metadata value, and of a field's path
)

// code maps each kind to one gRPC code.
var code = map[fault.Kind]codes.Code{
	fault.KindInternal:         codes.Internal,
	fault.KindInvalid:          codes.InvalidArgument,
	fault.KindNotFound:         codes.NotFound,
	fault.KindAlreadyExists:    codes.AlreadyExists,
	fault.KindPrecondition:     codes.FailedPrecondition,
	fault.KindAborted:          codes.Aborted,
	fault.KindUnavailable:      codes.Unavailable,
	fault.KindExhausted:        codes.ResourceExhausted,
	fault.KindOutOfRange:       codes.OutOfRange,
	fault.KindUnauthenticated:  codes.Unauthenticated,
	fault.KindPermissionDenied: codes.PermissionDenied,
	fault.KindUnimplemented:    codes.Unimplemented,
	fault.KindCanceled:         codes.Canceled,
	fault.KindDeadline:         codes.DeadlineExceeded,
}

// toStatus says in gRPC's words what went wrong.
func toStatus(err error) *status.Status {
	var known *fault.Error
	switch {
	case errors.As(err, &known):
		return detailed(known, err)
	case errors.Is(err, context.Canceled):
		return detailed(fault.New(fault.Canceled, "%w", err), err)
	case errors.Is(err, context.DeadlineExceeded):
		return detailed(fault.New(fault.DeadlineExceeded, "%w", err), err)
	}
	// gRPC's own errors, and those of generated code.
	reason, found := reasons[status.Code(err)]
	if !found {
		return detailed(fault.New(fault.Internal, "%w", err), err)
	}
	words := errors.New(status.Convert(err).Message())
	return detailed(fault.New(reason, "%w", words), words)
}

// reasons of statuses that no package of ours made.
var reasons = map[codes.Code]fault.Reason{
	codes.Canceled:          fault.Canceled,
	codes.DeadlineExceeded:  fault.DeadlineExceeded,
	codes.Unimplemented:     fault.Unimplemented,
	codes.ResourceExhausted: fault.TooLarge,
	codes.NotFound:          fault.ServiceNotFound,
}

func detailed(known *fault.Error, err error) *status.Status {
	metadata := map[string]string{}
	for key, value := range known.Metadata {
		metadata[key] = cutTo(value, maxMetadata)
	}
	details := []protoadapt.MessageV1{
		protoadapt.MessageV1Of(&errdetails.ErrorInfo{Domain: Domain, Reason: string(known.Reason), Metadata: metadata}),
	}
	if len(known.Fields) > 0 {
		bad := &errdetails.BadRequest{}
		for _, field := range known.Fields {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: cutTo(field.Path, maxMetadata), Description: cut(field.Description), Reason: string(known.Reason),
			})
		}
		details = append(details, protoadapt.MessageV1Of(bad))
	}
	switch {
	case known.RetryAfter > 0:
		details = append(details, protoadapt.MessageV1Of(&errdetails.RetryInfo{RetryDelay: durationpb.New(known.RetryAfter)}))
	case known.Kind() == fault.KindPrecondition:
		details = append(details, protoadapt.MessageV1Of(&errdetails.PreconditionFailure{
			Violations: []*errdetails.PreconditionFailure_Violation{{
				Type: string(known.Reason), Subject: subject(metadata), Description: cut(known.Message),
			}},
		}))
	}
	plain := status.New(code[known.Kind()], cut(err.Error()))
	if full, err := plain.WithDetails(details...); err == nil {
		return full
	}
	return plain
}

// subject names what a precondition is about.
func subject(metadata map[string]string) string {
	for _, key := range []string{"sandbox_id", "job_id", "provider", "tool"} {
		if metadata[key] != "" {
			return key + "/" + metadata[key]
		}
	}
	return ""
}

func cut(text string) string { return cutTo(text, maxMessage) }

// cutTo bounds a text, and makes it one that a proto string can hold: with any other, all details
// would be lost.
func cutTo(text string, most int) string {
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// logFailure logs the broker's own failures as such, and everybody else's quietly.
func (s *Server) logFailure(ctx context.Context, method string, principal auth.Principal, mapped *status.Status, err error, took time.Duration) {
	level := slog.LevelDebug
	if mapped.Code() == codes.Internal {
		level = slog.LevelError
	}
	s.log.Log(ctx, level, "call failed", "method", cutTo(method, maxMetadata), "principal", principal.Name, "code", mapped.Code(), "error", cut(err.Error()), "took", took)
}
