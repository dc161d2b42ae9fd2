// Package reverse is a dialer for machines that dial out. Each machine has a directory of its own
// with one unix socket in it; the guest connects to that socket again and again, and a dial hands
// out a connection that waits there. Listening again after a crash of the broker is all that
// recovery takes, because guests redial. The package never speaks on a connection, never starts a
// guest and knows nothing of what a machine is.
package reverse

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers"
)

// SocketName is the name of the socket in a machine's directory.
const SocketName = "guest.sock"

const (
	// maxSocketPath is what a unix socket's address holds, in bytes, without its closing zero.
	maxSocketPath = 107
	// maxWaiting is how many connections are kept for dials to come. A guest keeps one spare; the
	// rest is for one that redials before its dead ones were noticed.
	maxWaiting = 4
	// acceptBackoffMin and acceptBackoffMax bound the pause after a failed accept: it fails when
	// descriptors run out, which passes.
	acceptBackoffMin = 5 * time.Millisecond
	acceptBackoffMax = time.Second
	// askInterval is how often a connection from an unknown process makes us ask which process the guest is:
	// whoever is root in a machine can dial as often as it likes.
	askInterval = time.Second
)

// Guest returns the process that a machine's guest is now, as this process sees it; 0 where nobody can say,
// as across unrelated PID namespaces. Then whoever dials is let through to the proofs of Hello. While it
// fails, nobody is.
type Guest func() (pid int, err error)

// Dialer hands out the connections that one machine's guest opens. It satisfies providers.Dialer.
type Dialer struct {
	listener *net.UnixListener
	path     string
	inode    os.FileInfo   // of the socket that we bound, so that Close removes no other
	closing  chan struct{} // closed by Close
	accepted chan struct{} // closed when the accept loop has ended
	guest    Guest         // nil: 0
	known    atomic.Int64  // what guest said last; unknownGuest until it says something
	asked    time.Time     // the accept loop's: when it was asked last
	asking   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	waiting []*net.UnixConn      // oldest first
	dials   []chan *net.UnixConn // oldest first, each with a buffer of one
}

var _ providers.Dialer = (*Dialer)(nil)

// SocketPath returns the path of the socket in dir, or an error for people when it does not fit into
// a unix socket's address.
func SocketPath(dir string) (string, error) {
	path := filepath.Join(dir, SocketName)
	if len(path) > maxSocketPath {
		return "", fmt.Errorf("the socket path %s is %d bytes long and a unix socket's address holds %d: "+
			"give the broker a shorter runtime directory", path, len(path), maxSocketPath)
	}
	return path, nil
}

// Listen makes dir (mode 0700) where it is missing, removes a socket that an earlier listener left
// there, and listens on dir/guest.sock (mode 0600). The directory is one machine's alone; when it is
// listened in twice, the later listener gets the connections to come. Refused, with
// providers.ErrRefused, when the path is longer than a socket's address holds. A connection from another
// process than the guest is closed: a machine's root can dial too, and would pass on what it hears.
func Listen(dir string, guest Guest) (*Dialer, error) {
	path, err := SocketPath(dir)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, providers.ErrRefused)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the socket directory %s: %w", dir, err)
	}
	if err := removeSocket(path); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	listener.SetUnlinkOnClose(false) // by then the path may be another listener's
	inode, err := restrict(path)
	if err != nil {
		return nil, errors.Join(err, listener.Close(), removeSocket(path))
	}
	d := &Dialer{
		listener: listener,
		path:     path,
		inode:    inode,
		closing:  make(chan struct{}),
		accepted: make(chan struct{}),
		guest:    guest,
	}
	d.known.Store(unknownGuest)
	go d.accept()
	return d, nil
}

// removeSocket removes a socket, and refuses to remove anything else.
func removeSocket(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for a stale socket: %w", err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("%s is in the way of a socket and is none: remove it", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing a stale socket: %w", err)
	}
	return nil
}

// restrict keeps the socket to its owner and returns its identity.
func restrict(path string) (os.FileInfo, error) {
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, fmt.Errorf("restricting the socket %s: %w", path, err)
	}
	inode, err := os.Lstat(path)
	if err != nil {
		return nil, fmt.Errorf("looking at the socket %s: %w", path, err)
	}
	return inode, nil
}

// Dial hands out the newest waiting connection that is alive, or waits for the guest's next one.
// The context bounds the waiting only. After Close it fails with net.ErrClosed.
func (d *Dialer) Dial(ctx context.Context) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("dialling through %s: %w", d.path, err)
	}
	conn, arrival, err := d.take()
	if err != nil {
		return nil, err
	}
	if conn != nil {
		return conn, nil
	}
	select {
	case conn := <-arrival:
		if conn == nil {
			return nil, d.closedError()
		}
		return conn, nil
	case <-ctx.Done():
		d.giveUp(arrival)
		return nil, fmt.Errorf("waiting for the guest to dial %s: %w", d.path, ctx.Err())
	}
}

// take returns a live connection, or a channel on which the next one, or nil at Close, arrives.
func (d *Dialer) take() (*net.UnixConn, chan *net.UnixConn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, nil, d.closedError()
	}
	for len(d.waiting) > 0 {
		newest := d.waiting[len(d.waiting)-1]
		d.waiting = d.waiting[:len(d.waiting)-1]
		if alive(newest) {
			return newest, nil, nil
		}
		drop(newest)
	}
	arrival := make(chan *net.UnixConn, 1)
	d.dials = append(d.dials, arrival)
	return nil, arrival, nil
}

// giveUp takes a dial off the list; a connection that reached it meanwhile waits for the next dial.
func (d *Dialer) giveUp(arrival chan *net.UnixConn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.dials, arrival); i >= 0 {
		d.dials = slices.Delete(d.dials, i, i+1)
		return
	}
	if conn := <-arrival; conn != nil {
		d.place(conn)
	}
}

func (d *Dialer) closedError() error {
	return fmt.Errorf("dialling through %s: %w", d.path, net.ErrClosed)
}

// Close stops listening, removes the socket and closes the connections that wait. Those that were
// handed out live on. A second Close does nothing.
func (d *Dialer) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		<-d.accepted
		return nil
	}
	d.closed = true
	close(d.closing)
	d.mu.Unlock()

	err := d.listener.Close()
	<-d.accepted
	d.asking.Wait()

	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.waiting {
		drop(conn)
	}
	d.waiting = nil
	for _, arrival := range d.dials {
		arrival <- nil
	}
	d.dials = nil
	if now, statErr := os.Lstat(d.path); statErr == nil && os.SameFile(now, d.inode) {
		err = errors.Join(err, removeSocket(d.path))
	}
	if err != nil {
		return fmt.Errorf("closing the listener on %s: %w", d.path, err)
	}
	return nil
}

// accept takes the guest's connections until Close.
func (d *Dialer) accept() {
	defer close(d.accepted)
	pause := acceptBackoffMin
	for {
		conn, err := d.listener.AcceptUnix()
		if err == nil {
			pause = acceptBackoffMin
			if d.fromGuest(conn) {
				d.arrived(conn)
			} else {
				drop(conn)
			}
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-d.closing:
			return
		case <-time.After(pause):
			pause = min(2*pause, acceptBackoffMax)
		}
	}
}

// fromGuest reports whether the guest's process opened the connection, as far as anybody can say.
func (d *Dialer) fromGuest(conn *net.UnixConn) bool {
	pid, err := peer(conn)
	if err != nil {
		return false
	}
	if d.guest == nil || pid == 0 {
		return true
	}
	isGuest := func() bool {
		known := d.known.Load()
		return known == 0 || known == int64(pid)
	}
	if now := time.Now(); !isGuest() && now.Sub(d.asked) >= askInterval {
		d.asked = now
		if d.known.Load() == unknownGuest {
			d.ask()
		} else {
			// The guest is known, so its connections must not wait for this: if it is another one now, it
			// dials again.
			d.asking.Go(d.ask)
		}
	}
	return isGuest()
}

// ask finds out which process the guest is. Without an answer it stays who it was.
func (d *Dialer) ask() {
	if pid, err := d.guest(); err == nil {
		d.known.Store(int64(pid))
	}
}

// unknownGuest is no process's id.
const unknownGuest = -1

// peer returns the process that opened a connection, as it was when it did; 0 where this PID namespace does
// not show it.
func peer(conn *net.UnixConn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var credentials *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) {
		credentials, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, asked); err != nil {
		return 0, err
	}
	return int(credentials.Pid), nil
}

func (d *Dialer) arrived(conn *net.UnixConn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		drop(conn)
		return
	}
	d.place(conn)
}

// place gives a connection to the oldest dial that waits, else keeps it for one to come. d.mu is
// held.
func (d *Dialer) place(conn *net.UnixConn) {
	if d.closed || !alive(conn) {
		drop(conn)
		return
	}
	if len(d.dials) > 0 {
		d.dials[0] <- conn
		d.dials = slices.Delete(d.dials, 0, 1)
		return
	}
	d.waiting = slices.DeleteFunc(d.waiting, func(waiting *net.UnixConn) bool {
		if alive(waiting) {
			return false
		}
		drop(waiting)
		return true
	})
	d.waiting = append(d.waiting, conn)
	for len(d.waiting) > maxWaiting {
		drop(d.waiting[0])
		d.waiting = slices.Delete(d.waiting, 0, 1)
	}
}

// alive reports whether the other side still has the connection open. It asks for a hang-up instead
// of peeking at the next byte, because a guest that speaks first may have left bytes behind.
func alive(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return false
	}
	open := false
	err = raw.Control(func(fd uintptr) {
		ask := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		for {
			_, err := unix.Poll(ask, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			open = err == nil && ask[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) == 0
			return
		}
	})
	return err == nil && open
}

// drop closes a connection that nobody was given; that it could not be closed is no loss.
func drop(conn *net.UnixConn) { _ = conn.Close() }
