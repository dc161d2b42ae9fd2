package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"
)

// bridgeBuffer is the size of a piece, in bytes: what a WebSocket frame of a terminal takes.
const bridgeBuffer = 32 << 10

// bridge connects stdin and stdout with the guest's socket. Once it is connected it writes the
// sentinel, by which the other side knows where the terminal's own chatter ends. It ends when either
// side ends, or when nothing came from stdin for idle: the broker pings more often than that, and
// whoever runs the bridge may have forgotten it.
func bridge(arguments []string) error {
	flags := newFlags("bridge")
	socket := flags.String("socket", "", "")
	nonce := flags.String("nonce", "", "")
	idle := flags.Duration("idle", time.Minute, "")
	if err := parse(flags, arguments); err != nil {
		return err
	}
	switch {
	case *socket == "" || *nonce == "":
		return usageError{errors.New("bridge needs --socket PATH and --nonce N")}
	case strings.ContainsAny(*nonce, "\x1e\r\n"):
		return usageError{errors.New("a nonce has no control characters")}
	case *idle <= 0:
		return usageError{errors.New("--idle is a time above zero")}
	}
	conn, err := net.Dial("unix", *socket)
	if err != nil {
		return fmt.Errorf("reach the guest: %w", err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := fmt.Fprintf(os.Stdout, "\x1eREADY:%s\x1e", *nonce); err != nil {
		return fmt.Errorf("write the sentinel: %w", err)
	}
	watchdog := time.NewTimer(*idle)
	defer watchdog.Stop()
	heard := make(chan struct{}, 1)
	ended := make(chan error, 2)
	// The process ends with this function, and these two with it: a read of stdin cannot be undone.
	go func() { ended <- pass(conn, os.Stdin, heard) }()
	go func() { ended <- pass(os.Stdout, conn, nil) }()
	for {
		select {
		case err := <-ended:
			return err
		case <-heard:
			watchdog.Reset(*idle)
		case <-watchdog.C:
			return fmt.Errorf("nothing came for %v", *idle)
		}
	}
}

// pass copies until the end of from, and gives heard a token for each piece.
func pass(to io.Writer, from io.Reader, heard chan<- struct{}) error {
	buffer := make([]byte, bridgeBuffer)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			select {
			case heard <- struct{}{}: // never, when it is nil
			default:
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return fmt.Errorf("pass bytes on: %w", err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read bytes to pass on: %w", err)
		}
	}
}
