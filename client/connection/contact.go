package connection

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// contact remembers when the broker last answered and why it could not be dialled.
type contact struct {
	address string

	mu        sync.Mutex
	last      time.Time // zero: never
	dialError error     // of the newest dial; nil when it got through
}

// ErrOthersSocket is why a socket is not dialled: its directory, which anybody may make, is another user's.
// Set AddressVariable to the broker's own address.
var ErrOthersSocket = errors.New("it belongs to another user")

// UnreachableError says that the broker did not answer: nobody listens at its address, or the
// connection broke. Its gRPC code is UNAVAILABLE.
type UnreachableError struct {
	Address string
	Cause   error
}

// Error names the address and the cause.
func (e *UnreachableError) Error() string {
	return fmt.Sprintf("cannot reach berthd at %s: %v", e.Address, e.Cause)
}

// Unwrap returns the cause.
func (e *UnreachableError) Unwrap() error { return e.Cause }

// GRPCStatus makes the error an UNAVAILABLE one for the status package.
func (e *UnreachableError) GRPCStatus() *status.Status {
	return status.New(codes.Unavailable, e.Error())
}

func (c *contact) dialer(to target, secured bool) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := dial(ctx, to, secured)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dialError = err
		if err == nil && !secured { // under TLS it is not known yet who that is
			c.last = time.Now()
		}
		return conn, err
	}
}

func dial(ctx context.Context, to target, secured bool) (net.Conn, error) {
	if dir := filepath.Dir(to.address); to.network == "unix" && dir == sharedDir(os.Getuid()) {
		if err := checkOwner(dir); err != nil {
			return nil, err
		}
	}
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, to.network, to.address)
	if err != nil || secured || to.network != "tcp" || isLoopback(conn.RemoteAddr()) {
		return conn, err
	}
	// A name that resolves elsewhere: no call, and no token, goes there in plain text.
	return nil, errors.Join(fmt.Errorf("%s is %s, which is beyond loopback, and the connection has no TLS", to.address, conn.RemoteAddr()), conn.Close())
}

func isLoopback(address net.Addr) bool {
	tcp, ok := address.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// answered notes that the broker answered.
func (c *contact) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = time.Now()
}

// lastAnswer is when the broker last answered; zero: never.
func (c *contact) lastAnswer() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// unreachable makes the error of a call that got no answer from a broker.
func (c *contact) unreachable(message string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	cause := c.dialError
	if op := (*net.OpError)(nil); errors.As(cause, &op) {
		cause = op.Err // the address is said already
	}
	if cause == nil {
		cause = errors.New(message)
	}
	return &UnreachableError{Address: c.address, Cause: cause}
}
