// Package client is the Go client of a Berth broker: it dials berthd, makes mutating calls
// repeatable, repeats what may be repeated while the broker restarts, stays attached to commands over
// broken connections, waits for jobs and reads their output to the last byte. It holds no state but its connection, never starts a broker, never makes
// up an answer, and imports nothing of the broker's.
package client

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
	// defaultPatience is how long a repeatable call outlasts a broker that was there and is gone: a
	// restart takes a second or two, a restart on a loaded host a good deal longer.
	defaultPatience = time.Minute
	// firstPatience is the same for a broker that was never reached: long enough for one that is just
	// being restarted, short enough for a person who forgot to start it.
	firstPatience = 2 * time.Second
	// Waits between tries double from the first to the longest; each is spread by half of itself.
	firstBackoff   = 50 * time.Millisecond
	longestBackoff = 2 * time.Second
	// connectTimeout bounds one attempt to connect; a broker is near.
	connectTimeout = 5 * time.Second
	// Pings on an idle TCP connection with a call in flight, so that a long poll notices a peer that
	// vanished. A unix socket needs none: the kernel tells.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 10 * time.Second
	// pollWait is one long poll; a longer one would only notice a silent connection later.
	pollWait = time.Minute
	// answerSlack is what an answer may take beyond the wait that was asked for.
	answerSlack = 30 * time.Second
	// readBytes is asked for in one read of output: the most that the API gives.
	readBytes = 1 << 20
	// inputWindowBytes is how far an attached command's standard input is read ahead of what its machine
	// has taken: what has to be sent again after the connection broke.
	inputWindowBytes = 1 << 20
	// inputPieceBytes is sent in one message of input: large enough to be cheap, small enough that a
	// terminal's new size does not wait behind it.
	inputPieceBytes = 64 << 10
	// thanksWait bounds how long the end of an attached command waits for the broker to see that it was
	// received. A broker hears the thanks without it, and answers at once; the bound is for one that does
	// not answer any more, which only keeps the job's end longer.
	thanksWait = 250 * time.Millisecond
	// maxSignal is the highest signal's number.
	maxSignal = 64
	// maxMessageBytes bounds one reply: the payload is at most 1 MiB, twice that with its text form.
	maxMessageBytes = 16 << 20
)

// Client talks to one broker. It is safe for concurrent use; Close it at the end.
type Client struct {
	address string
	conn    *grpc.ClientConn
	contact *contact
	options options
}

// Option changes how a client dials or repeats.
type Option func(*options)

type options struct {
	credentials   credentials.TransportCredentials
	patience      time.Duration
	firstPatience time.Duration
	dialOptions   []grpc.DialOption
}

// WithTransportCredentials secures the connection, and allows addresses beyond loopback.
func WithTransportCredentials(c credentials.TransportCredentials) Option {
	return func(o *options) { o.credentials = c }
}

// WithPatience sets how long a repeatable call goes on trying while the broker does not answer or
// says that it is not ready: once it was reached (default 1 min), and before (default 2 s). Zero is
// one try. The call's own context ends it earlier.
func WithPatience(reached, before time.Duration) Option {
	return func(o *options) { o.patience, o.firstPatience = reached, before }
}

// WithDialOptions adds gRPC dial options, for example interceptors for traces. They run inside the
// client's own retries, once a try.
func WithDialOptions(opts ...grpc.DialOption) Option {
	return func(o *options) { o.dialOptions = append(o.dialOptions, opts...) }
}

// Dial returns a client for the broker at an address: unix:///path, tcp://host:port, or empty for
// DefaultAddress. It only checks the address, whose error is an *AddressError; connecting is left to the
// first call. Without WithTransportCredentials a TCP host must be loopback.
func Dial(address string, opts ...Option) (*Client, error) {
	o := options{patience: defaultPatience, firstPatience: firstPatience}
	for _, opt := range opts {
		opt(&o)
	}
	if address == "" {
		address = DefaultAddress()
	}
	where, err := parseAddress(address, o.credentials != nil)
	if err != nil {
		return nil, err
	}

	c := &Client{address: address, contact: &contact{address: address}, options: o}
	creds := o.credentials
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	dialOptions := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(c.contact.dialer(where)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: firstBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestBackoff / 2,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		grpc.WithChainUnaryInterceptor(c.repeat),
		grpc.WithChainStreamInterceptor(c.openStream),
		grpc.WithDisableServiceConfig(),
	}
	if where.network == "tcp" {
		dialOptions = append(dialOptions, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout,
		}))
	}
	conn, err := grpc.NewClient("passthrough:///"+where.authority, append(dialOptions, o.dialOptions...)...)
	if err != nil {
		return nil, fmt.Errorf("preparing a connection to %s: %w", address, err)
	}
	c.conn = conn
	return c, nil
}

// Close ends the connection and the calls in flight.
func (c *Client) Close() error {
	if err := c.conn.Close(); err != nil {
		return fmt.Errorf("closing the connection to %s: %w", c.address, err)
	}
	return nil
}

// Address returns the broker's address as it was given or found.
func (c *Client) Address() string { return c.address }

// Conn returns the connection beneath the clients below, for services that they do not cover, such
// as health and reflection. Its unary calls are repeated as the others are.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// Sandboxes returns the client of SandboxService. As with all the clients below, mutating unary calls
// get a request_id when they have none (RunCommand excepted, whose meaning it would change), and
// repeatable ones are repeated while the broker is away.
func (c *Client) Sandboxes() berthv1.SandboxServiceClient {
	return berthv1.NewSandboxServiceClient(c.conn)
}

// Jobs returns the client of JobService.
func (c *Client) Jobs() berthv1.JobServiceClient { return berthv1.NewJobServiceClient(c.conn) }

// Files returns the client of FileService.
func (c *Client) Files() berthv1.FileServiceClient { return berthv1.NewFileServiceClient(c.conn) }

// Checkpoints returns the client of CheckpointService.
func (c *Client) Checkpoints() berthv1.CheckpointServiceClient {
	return berthv1.NewCheckpointServiceClient(c.conn)
}

// Leases returns the client of LeaseService.
func (c *Client) Leases() berthv1.LeaseServiceClient { return berthv1.NewLeaseServiceClient(c.conn) }

// Pools returns the client of PoolService.
func (c *Client) Pools() berthv1.PoolServiceClient { return berthv1.NewPoolServiceClient(c.conn) }

// Providers returns the client of ProviderService.
func (c *Client) Providers() berthv1.ProviderServiceClient {
	return berthv1.NewProviderServiceClient(c.conn)
}

// Admin returns the client of AdminService.
func (c *Client) Admin() berthv1.AdminServiceClient { return berthv1.NewAdminServiceClient(c.conn) }

// pause waits for d or until ctx ends, and says whether the time passed.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
