package connection

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ErrorDomain is ErrorInfo.domain of every error that a broker sends.
const ErrorDomain = "berth.v1"

// Code returns the gRPC code of err: OK for nil, UNKNOWN for an error that no call returned.
func Code(err error) codes.Code { return status.Code(err) }

// Reason returns why a call failed, a value of berth.v1.Reason without its prefix such as
// "SANDBOX_NOT_FOUND"; empty when err is not an error that a broker sent.
func Reason(err error) string { return Info(err).GetReason() }

// Is reports whether a broker sent err with this reason.
func Is(err error, reason berthv1.Reason) bool {
	const prefix = "REASON_"
	return reason != berthv1.Reason_REASON_UNSPECIFIED && Reason(err) == reason.String()[len(prefix):]
}

// Metadata returns what goes with the reason, as its comment in berth.v1.Reason says; nil when err is
// not an error that a broker sent.
func Metadata(err error) map[string]string { return Info(err).GetMetadata() }

// Info returns the ErrorInfo that a broker sent, nil when there is none.
func Info(err error) *errdetails.ErrorInfo {
	return detail(err, func(info *errdetails.ErrorInfo) bool { return info.GetDomain() == ErrorDomain })
}

// RetryAfter returns after how long the broker says that a retry can help, and whether it says so.
func RetryAfter(err error) (time.Duration, bool) {
	info := detail(err, func(*errdetails.RetryInfo) bool { return true })
	return info.GetRetryDelay().AsDuration(), info != nil
}

// Violations returns the fields of the request that were refused, by their proto paths.
func Violations(err error) []*errdetails.BadRequest_FieldViolation {
	return detail(err, func(*errdetails.BadRequest) bool { return true }).GetFieldViolations()
}

// detail returns the first accepted detail of type D that a status carries, else D's zero value.
func detail[D any](err error, accept func(D) bool) D {
	var none D
	st, ok := status.FromError(err)
	if !ok {
		return none
	}
	for _, candidate := range st.Details() {
		if d, ok := candidate.(D); ok && accept(d) {
			return d
		}
	}
	return none
}
