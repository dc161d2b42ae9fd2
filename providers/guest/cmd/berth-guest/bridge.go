package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers/guest"
)

// bridgeBuffer is the size of a read, in bytes: what a WebSocket frame of a terminal takes.
const bridgeBuffer = 32 << 10

// bridge connects stdin and stdout with the guest's socket. Once it is connected it writes the
// sentinel, which marks the end of the terminal's own output. It ends when either side ends, or when stdin
// was idle for too long: the broker pings more often than that, so it is gone.
func bridge(arguments []string) error {
	flags := newFlags("bridge")
	socket := flags.String("socket", "", "")
	nonce := flags.String("nonce", "", "")
	// Where the provider knows which process the guest is, nobody else who listens there is spoken to.
	pid := flags.Int("guest", 0, "")
	idle := flags.Duration("idle", time.Minute, "")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	switch {
	case *socket == "" || *nonce == "":
		return usageError{errors.New("bridge needs --socket PATH and --nonce N")}
	case strings.ContainsAny(*nonce, "\x1e\r\n"):
		return usageError{errors.New("a nonce has no control characters")}
	case *pid < 0:
		return usageError{errors.New("--guest is a process id")}
	case *idle <= 0:
		return usageError{errors.New("--idle is a time above zero")}
	}
	if err := guest.DenyInspection(); err != nil {
		return err
	}
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: *socket, Net: "unix"})
	if err != nil {
		return fmt.Errorf("reach the guest: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if err := listensAs(conn, *pid); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(os.Stdout, "\x1eREADY:%s\x1e", *nonce); err != nil {
		return fmt.Errorf("write the sentinel: %w", err)
	}
	watchdog := time.NewTimer(*idle)
	defer watchdog.Stop()
	activity := make(chan struct{}, 1)
	ended := make(chan error, 2)
	// The process ends with this function, and these two with it: a read of stdin cannot be interrupted.
	go func() { ended <- pass(conn, os.Stdin, activity) }()
	go func() { ended <- pass(os.Stdout, conn, nil) }()
	for {
		select {
		case err := <-ended:
			return err
		case <-activity:
			watchdog.Reset(*idle)
		case <-watchdog.C:
			return fmt.Errorf("nothing was received for %v", *idle)
		}
	}
}

// pass copies from until its end and puts a token into activity for each read.
func pass(to io.Writer, from io.Reader, activity chan<- struct{}) error {
	buffer := make([]byte, bridgeBuffer)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			select {
			case activity <- struct{}{}: // never, when it is nil
			default:
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return fmt.Errorf("forward bytes: %w", err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read bytes to forward: %w", err)
		}
	}
}

// listensAs checks that the process with this id listens at the other end. Any does for 0, and where the kernel
// does not say.
func listensAs(conn *net.UnixConn, pid int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("find out who listens: %w", err)
	}
	var who *unix.Ucred
	var asked error
	err = raw.Control(func(fd uintptr) { who, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, asked); err != nil {
		return fmt.Errorf("find out who listens: %w", err)
	}
	if pid != 0 && who.Pid != 0 && int(who.Pid) != pid {
		return fmt.Errorf("process %d listens there, and the guest is process %d", who.Pid, pid)
	}
	return nil
}
