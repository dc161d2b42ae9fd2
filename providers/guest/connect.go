package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// firstRedial and lastRedial bound the pauses between attempts to reach the host: short enough
	// for a restarted broker, long enough to cost nothing.
	firstRedial = 10 * time.Millisecond
	lastRedial  = 250 * time.Millisecond
	// firstBytes is the most that is read from a spare connection before Accept returns it, in bytes.
	firstBytes = 512
)

// listen opens the guest's own socket, with mode 0600 from the start.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := os.RemoveAll(path); err != nil {
		return nil, fmt.Errorf("remove the socket of an earlier guest: %w", err)
	}
	// On Linux a socket's file gets the mode that the socket has when it is bound.
	config := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var chmod error
		err := conn.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen for the bridge: %w", err)
	}
	return listener, nil
}

// reverseListener accepts connections that it has dialled itself. Exactly one spare is kept waiting for
// the broker; it is accepted when its first byte arrives.
type reverseListener struct {
	path   string
	log    *slog.Logger
	taken  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newReverseListener(path string, log *slog.Logger) *reverseListener {
	return &reverseListener{path: path, log: log, taken: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept returns the next connection that the broker has taken.
func (l *reverseListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.taken:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (l *reverseListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr is where the listener dials to.
func (l *reverseListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// dial keeps a spare connection waiting until ctx ends.
func (l *reverseListener) dial(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	wait, reached := firstRedial, true
	for ctx.Err() == nil {
		conn, err := l.spare(ctx)
		if err == nil {
			wait, reached = firstRedial, true
			select {
			case l.taken <- conn:
			case <-l.closed:
				_ = conn.Close()
				return
			case <-ctx.Done():
				_ = conn.Close()
			}
			continue
		}
		if reached && ctx.Err() == nil {
			l.log.Info("the host does not answer, redialling", "socket", l.path, "error", err)
			reached = false
		}
		pause.Reset(wait/2 + rand.N(wait)) //nolint:gosec // jitter needs no secret
		wait = min(2*wait, lastRedial)
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
	}
}

// spare dials a connection and waits until the broker speaks on it.
func (l *reverseListener) spare(ctx context.Context) (net.Conn, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", l.path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	first := make([]byte, firstBytes)
	n, err := conn.Read(first)
	if !stop() || err != nil {
		_ = conn.Close()
		return nil, errors.Join(err, ctx.Err())
	}
	return &begunConn{Conn: conn, first: first[:n]}, nil
}

// begunConn is a connection whose first bytes were already read.
type begunConn struct {
	net.Conn
	first []byte
}

// Read returns the first bytes first.
func (c *begunConn) Read(p []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Read(p)
	}
	n := copy(p, c.first)
	if c.first = c.first[n:]; len(c.first) == 0 {
		c.first = nil
	}
	return n, nil
}
