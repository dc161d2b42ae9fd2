package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
)

// probeTimeout bounds the look at who listens on a socket that is there already.
const probeTimeout = time.Second

// onlyOurs refuses a directory in which another user could put a socket of its own in a machine's
// place.
func onlyOurs(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	status, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case ok && int(status.Uid) != os.Geteuid():
		return fmt.Errorf("the directory for sockets %s belongs to another user (uid %d): choose another", dir, status.Uid)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("others may write to the directory for sockets %s: chmod go-w it, or choose another", dir)
	}
	return nil
}

// listeners are the addresses that are served.
type listeners struct {
	addresses []string
	open      []net.Listener
}

func (l *listeners) String() string { return strings.Join(l.addresses, ", ") }

// listen opens every address, or none. With a TLS configuration every TCP listener uses it.
func listen(ctx context.Context, addresses []string, secure *tls.Config) (*listeners, error) {
	l := &listeners{}
	for _, address := range addresses {
		opened, shown, err := listenOn(ctx, address, secure)
		if err != nil {
			l.close()
			return nil, err
		}
		l.open, l.addresses = append(l.open, opened), append(l.addresses, shown)
	}
	return l, nil
}

func listenOn(ctx context.Context, address string, secure *tls.Config) (net.Listener, string, error) {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		opened, err := listenUnix(ctx, path)
		return opened, address, err
	}
	var config net.ListenConfig
	opened, err := config.Listen(ctx, "tcp", strings.TrimPrefix(address, "tcp://"))
	if err != nil {
		return nil, "", inUse(address, err)
	}
	if secure != nil {
		opened = tls.NewListener(opened, secure)
	}
	return opened, "tcp://" + opened.Addr().String(), nil
}

// listenUnix opens a socket that only this user can connect to. One that a dead daemon left is
// replaced; one that somebody answers on is not.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("--listen: the directory of %s cannot be made: %w", path, err)
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("--listen: %w", err)
	case info.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("--listen: %s is there and is not a socket: choose another path", path)
	case answered(ctx, path):
		return nil, inUse("unix://"+path, syscall.EADDRINUSE)
	default:
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("--listen: replace the socket that a dead daemon left: %w", err)
		}
	}
	// Nobody may connect between bind and chmod.
	old := syscall.Umask(0o177)
	var config net.ListenConfig
	opened, err := config.Listen(ctx, "unix", path)
	syscall.Umask(old)
	if err != nil {
		return nil, inUse("unix://"+path, err)
	}
	return opened, nil
}

func answered(ctx context.Context, path string) bool {
	dialer := net.Dialer{Timeout: probeTimeout}
	conn, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return !errors.Is(err, syscall.ECONNREFUSED)
	}
	_ = conn.Close()
	return true
}

func inUse(address string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("--listen: %s is in use: is another berthd running? stop it, or choose another address", address)
	}
	return fmt.Errorf("--listen: %s cannot be served: %w", address, err)
}

// serve begins to serve on every address; the channel gets the first failure.
func (l *listeners) serve(server *grpc.Server) <-chan error {
	failed := make(chan error, len(l.open))
	for i, opened := range l.open {
		go func() {
			if err := server.Serve(opened); err != nil {
				failed <- fmt.Errorf("serve %s: %w", l.addresses[i], err)
			}
		}()
	}
	return failed
}

func (l *listeners) close() {
	for _, opened := range l.open {
		_ = opened.Close() // closed already by the server that was stopped
	}
}

// notify tells the service manager, if there is one (sd_notify(3)).
func notify(log *slog.Logger, state string) {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err == nil {
		_, err = conn.Write([]byte(state))
		err = errors.Join(err, conn.Close())
	}
	if err != nil {
		log.Warn("cannot tell the service manager", "state", state, "error", err)
	}
}

// resident is this process's resident memory, 0 where the system does not say.
func resident() uint64 {
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(data))
	if len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}
