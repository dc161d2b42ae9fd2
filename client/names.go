package client

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"

	"github.com/berth-sandbox/berth/client/attachment"
	"github.com/berth-sandbox/berth/client/connection"
	"github.com/berth-sandbox/berth/client/follow"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// What the packages below define and a caller of this one needs.
type (
	// Option changes how a client dials or repeats.
	Option = connection.Option
	// AddressError says that an address is none of a broker's: nothing was dialled.
	AddressError = connection.AddressError
	// UnreachableError says that the broker did not answer.
	UnreachableError = connection.UnreachableError
	// UnknownStartError says that it is not known whether a command began.
	UnknownStartError = attachment.UnknownStartError
	// UnknownOutcomeError says that a job's machine is stopped.
	UnknownOutcomeError = follow.UnknownOutcomeError
	// ExecIO is what the caller of an attached command gives it and wants of it.
	ExecIO = attachment.IO
	// Extent is how far a read of output goes.
	Extent = follow.Extent
	// OutputSink receives what a read of output finds.
	OutputSink = follow.OutputSink
)

// The extents.
const (
	UntilDone   = follow.UntilDone
	UntilSealed = follow.UntilSealed
	SoFar       = follow.SoFar
)

// AddressVariable is the environment variable that names the broker.
const AddressVariable = connection.AddressVariable

// ErrorDomain is ErrorInfo.domain of every error that a broker sends.
const ErrorDomain = connection.ErrorDomain

// ErrOthersSocket is why a socket is not dialled: its directory is another user's.
var ErrOthersSocket = connection.ErrOthersSocket

// WithTransportCredentials secures the connection, and allows addresses beyond loopback.
func WithTransportCredentials(c credentials.TransportCredentials) Option {
	return connection.WithTransportCredentials(c)
}

// WithToken gives a bearer token with every call over TCP: under TLS, or to loopback only.
func WithToken(token string) Option { return connection.WithToken(token) }

// WithRetryTimeout sets how long a repeatable call is tried while the broker is away: once it was
// reached (default 1 min), and initially (default 2 s).
func WithRetryTimeout(reached, initial time.Duration) Option {
	return connection.WithRetryTimeout(reached, initial)
}

// WithDialOptions adds gRPC dial options. They run inside the client's own retries, once a try.
func WithDialOptions(opts ...grpc.DialOption) Option { return connection.WithDialOptions(opts...) }

// DefaultAddress returns where the broker is by this process's environment.
func DefaultAddress() string { return connection.DefaultAddress() }

// AddressFrom is DefaultAddress with another environment, looked up as by os.LookupEnv.
func AddressFrom(lookup func(string) (string, bool)) string { return connection.AddressFrom(lookup) }

// BeyondLoopback reports whether an address is one that is dialled under TLS only.
func BeyondLoopback(address string) bool { return connection.BeyondLoopback(address) }

// NewRequestID returns a fresh request_id.
func NewRequestID() string { return connection.NewRequestID() }

// Code returns the gRPC code of err: OK for nil, UNKNOWN for an error that no call returned.
func Code(err error) codes.Code { return connection.Code(err) }

// Reason returns why a call failed, a value of berth.v1.Reason without its prefix; empty when err is not
// an error that a broker sent.
func Reason(err error) string { return connection.Reason(err) }

// Is reports whether a broker sent err with this reason.
func Is(err error, reason berthv1.Reason) bool { return connection.Is(err, reason) }

// Metadata returns what goes with the reason, as its comment in berth.v1.Reason says.
func Metadata(err error) map[string]string { return connection.Metadata(err) }

// Info returns the ErrorInfo that a broker sent, nil when there is none.
func Info(err error) *errdetails.ErrorInfo { return connection.Info(err) }

// RetryAfter returns after how long the broker says that a retry can help, and whether it says so.
func RetryAfter(err error) (time.Duration, bool) { return connection.RetryAfter(err) }

// Violations returns the fields of the request that were refused, by their proto paths.
func Violations(err error) []*errdetails.BadRequest_FieldViolation { return connection.Violations(err) }
