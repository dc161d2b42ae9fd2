// Package connection is a connection to one broker: its address, dialling it, repeating calls while it
// restarts, request ids that make that safe, and what its errors mean. It knows no sandbox and no job,
// and never starts a broker.
package connection

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// What tunes the connection and its calls.
const (
	// defaultRetryTimeout is how long a repeatable call is tried while a broker that was reached before is
	// away: a restart takes a second or two, on a loaded host a good deal longer.
	defaultRetryTimeout = time.Minute
	// defaultInitialTimeout is the same for a broker that was never reached: long enough for one that is
	// just being restarted, short enough for a person who forgot to start it.
	defaultInitialTimeout = 2 * time.Second
	// Waits between tries double from minBackoff to maxBackoff; each is spread by half of itself.
	minBackoff = 50 * time.Millisecond
	maxBackoff = 2 * time.Second
	// connectTimeout bounds one attempt to connect; a broker is near.
	connectTimeout = 5 * time.Second
	// Pings on an idle TCP connection with a call in flight, so that a long poll notices a peer that
	// vanished. A unix socket needs none: the kernel reports it.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	// PollWait is one long poll; a longer one would only notice a silent connection later.
	PollWait = time.Minute
	// AnswerSlack is what an answer may take beyond the wait that was asked for.
	AnswerSlack = 30 * time.Second
	// maxMessageBytes bounds one reply: the payload is at most 1 MiB, twice that with its text form.
	maxMessageBytes = 16 << 20
)

// Conn is a connection to one broker. It is safe for concurrent use; Close it at the end.
type Conn struct {
	address string
	conn    *grpc.ClientConn
	contact *contact
	options options
}

// Option changes how a client dials or repeats.
type Option func(*options)

type options struct {
	credentials    credentials.TransportCredentials
	retryTimeout   time.Duration
	initialTimeout time.Duration
	token          string
	dialOptions    []grpc.DialOption
}

// WithTransportCredentials secures the connection, and allows addresses beyond loopback.
func WithTransportCredentials(c credentials.TransportCredentials) Option {
	return func(o *options) { o.credentials = c }
}

// WithToken gives a bearer token with every call over TCP: under TLS, or to loopback only.
func WithToken(token string) Option {
	return func(o *options) { o.token = token }
}

// WithRetryTimeout sets how long a repeatable call is tried while the broker does not answer or says
// that it is not ready: once it was reached (default 1 min), and initially (default 2 s). Zero is one
// try. The call's own context ends it earlier.
func WithRetryTimeout(reached, initial time.Duration) Option {
	return func(o *options) { o.retryTimeout, o.initialTimeout = reached, initial }
}

// WithDialOptions adds gRPC dial options, for example interceptors for traces. They run inside the
// client's own retries, once a try.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(o *options) { o.dialOptions = append(o.dialOptions, opts...) }
}

// Dial returns a connection to the broker at an address: unix:///path, tcp://host:port, or empty for
// DefaultAddress. It only checks the address, whose error is an *AddressError; connecting is left to the
// first call. Without WithTransportCredentials a TCP host must be loopback.
func Dial(address string, opts ...Option) (*Conn, error) {
	o := options{retryTimeout: defaultRetryTimeout, initialTimeout: defaultInitialTimeout}
	for _, opt := range opts {
		opt(&o)
	}
	if address == "" {
		address = DefaultAddress()
	}
	to, err := parseAddress(address, o.credentials != nil)
	if err != nil {
		return nil, err
	}

	c := &Conn{address: address, contact: &contact{address: address}, options: o}
	creds := o.credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	dialOptions := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(c.contact.dialer(to, o.credentials != nil)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: minBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxBackoff / 2,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithChainUnaryInterceptor(c.repeat),
		grpc.WithChainStreamInterceptor(c.openStream),
		grpc.WithDisableServiceConfig(),
	}
	if to.network == "tcp" && o.token != "" {
		dialOptions = append(dialOptions, grpc.WithPerRPCCredentials(bearer(o.token)))
	}
	if to.network == "tcp" {
		dialOptions = append(dialOptions, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout,
		}))
	}
	conn, err := grpc.NewClient("passthrough:///"+to.authority, append(dialOptions, o.dialOptions...)...)
	if err != nil {
		return nil, fmt.Errorf("preparing a connection to %s: %w", address, err)
	}
	c.conn = conn
	return c, nil
}

// Close ends the connection and the calls in flight.
func (c *Conn) Close() error {
	if err := c.conn.Close(); err != nil {
		return fmt.Errorf("closing the connection to %s: %w", c.address, err)
	}
	return nil
}

// Address returns the broker's address as it was given or found.
func (c *Conn) Address() string { return c.address }

// GRPC returns the connection beneath. Its unary calls are repeated as the others are.
func (c *Conn) GRPC() grpc.ClientConnInterface { return c.conn }

// Jobs returns the client of JobService.
func (c *Conn) Jobs() berthv1.JobServiceClient { return berthv1.NewJobServiceClient(c.conn) }

// Pause waits for d or until ctx ends, and says whether the time passed.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
