package client

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

// contact remembers when the broker was last heard of and why it could not be dialled.
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

func (c *contact) dialer(where place) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, _ string) (net.Conn, error) {
		conn, err := dial(ctx, where)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dialError = err
		if err == nil {
			c.last = time.Now()
		}
		return conn, err
	}
}

func dial(ctx context.Context, where place) (net.Conn, error) {
	if dir := filepath.Dir(where.address); where.network == "unix" && dir == sharedDir(os.Getuid()) {
		if err := checkOwner(dir); err != nil {
			return nil, err
		}
	}
	var dialer net.Dialer
	return dialer.DialContext(ctx, where.network, where.address)
}

// heard notes that the broker answered.
func (c *contact) heard() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = time.Now()
}

// lastHeard is when the broker was last heard of; zero: never.
func (c *contact) lastHeard() time.Time {
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
