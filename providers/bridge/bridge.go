// Package bridge makes a guest's byte stream of what a provider has where no directory can be shared:
// the standard input and output of a `berth-guest bridge` that runs in the machine. It waits for the
// bridge's sentinel, so that whatever a shell or a terminal says before it is not taken for the
// guest's, and gives the stream deadlines and back-pressure. It never starts anything in a machine and
// never speaks to a guest.
package bridge

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// chunkBytes is how much is passed on at once: what one frame of the carriers tried holds, and a
	// multiple of gRPC's own frames.
	chunkBytes = 64 << 10
	// maxChatter is how much may come before the sentinel, in bytes: a login's greeting is a few
	// lines, and more than this is no bridge.
	maxChatter = 64 << 10
	// nonceBytes is how long a nonce is before it is written in hexadecimal.
	nonceBytes = 16
)

// Stream is what carries a bridge.
type Stream struct {
	Output io.Reader // what the bridge writes to its standard output
	Input  io.Writer // its standard input
	// Close ends the stream and the bridge with it; reads and writes in progress fail. It may be
	// called more than once.
	Close func() error
	// Said returns what the bridge wrote to its standard error so far, for people. Nil: nothing.
	Said func() string
}

// Nonce returns a fresh nonce for one bridge.
func Nonce() (string, error) {
	nonce := make([]byte, nonceBytes)
	if _, err := rand.Read(nonce); err != nil {
		return "", fmt.Errorf("making a bridge's nonce: %w", err)
	}
	return hex.EncodeToString(nonce), nil
}

// Command is what to run in the machine: the guest's program, its socket, the guest's process id in the
// machine (0: not known), and the nonce that Open is given.
func Command(program, socket string, guest int, nonce string) []string {
	return []string{program, "bridge", "--socket", socket, "--guest", strconv.Itoa(guest), "--nonce", nonce}
}

// Open waits for the sentinel with the nonce and returns the guest's stream. The context bounds the
// waiting only. Closing the connection closes the stream and waits until nothing of it runs here.
// After an error the stream is closed.
func Open(ctx context.Context, stream Stream, nonce string) (net.Conn, error) {
	output := bufio.NewReaderSize(stream.Output, chunkBytes)
	if err := await(ctx, stream, output, nonce); err != nil {
		return nil, err
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, errors.Join(err, stream.Close())
	}
	c := &conn{UnixConn: ours, far: theirs, stream: stream}
	c.pumps.Go(func() { c.pass(theirs, output) })
	c.pumps.Go(func() { c.pass(stream.Input, theirs) })
	return c, nil
}

// await reads up to and with the sentinel.
func await(ctx context.Context, stream Stream, output *bufio.Reader, nonce string) error {
	ended := make(chan error, 1)
	go func() { ended <- readSentinel(output, "\x1eREADY:"+nonce+"\x1e") }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = stream.Close() // which ends the read
		err = errors.Join(ctx.Err(), <-ended)
	}
	if err == nil {
		return nil
	}
	_ = stream.Close()
	if said := stream.said(); said != "" {
		return fmt.Errorf("waiting for the bridge: %w: %s", err, said)
	}
	return fmt.Errorf("waiting for the bridge: %w", err)
}

// readSentinel skips what comes before the sentinel. The sentinel begins with a byte that stands
// nowhere else in it but at its end, so a mismatch can only begin it anew.
func readSentinel(output *bufio.Reader, sentinel string) error {
	matched := 0
	for skipped := 0; skipped < maxChatter; skipped++ {
		b, err := output.ReadByte()
		if errors.Is(err, io.EOF) {
			return errors.New("it ended before it was ready")
		}
		if err != nil {
			return err
		}
		switch b {
		case sentinel[matched]:
			matched++
		case sentinel[0]:
			matched = 1
		default:
			matched = 0
		}
		if matched == len(sentinel) {
			return nil
		}
	}
	return fmt.Errorf("%d bytes came and no sentinel", maxChatter)
}

func (s Stream) said() string {
	if s.Said == nil {
		return ""
	}
	return strings.TrimSpace(s.Said())
}

// conn is the near end of a socket pair; two pumps pass bytes between the far end and the stream.
type conn struct {
	*net.UnixConn
	far    *net.UnixConn
	stream Stream
	pumps  sync.WaitGroup
}

// Close closes the stream too, and waits for the pumps.
func (c *conn) Close() error {
	err := c.UnixConn.Close()
	c.hangUp()
	c.pumps.Wait()
	return err
}

// hangUp ends both pumps. What the near end has not read yet stays there to be read.
func (c *conn) hangUp() {
	_ = c.stream.Close() // the carrier's own end of the affair; there is nobody to tell
	_ = c.far.Close()
}

// pass copies until either side fails, and then ends the other pump as well: half a stream is none.
func (c *conn) pass(to io.Writer, from io.Reader) {
	defer c.hangUp()
	chunk := make([]byte, chunkBytes)
	for {
		n, err := from.Read(chunk)
		if n > 0 {
			if _, err := to.Write(chunk[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func socketPair() (near, far *net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a bridge's socket pair: %w", err)
	}
	near, nearErr := connOf(fds[0])
	far, farErr := connOf(fds[1])
	if err := errors.Join(nearErr, farErr); err != nil {
		for _, c := range []*net.UnixConn{near, far} {
			if c != nil {
				_ = c.Close()
			}
		}
		return nil, nil, err
	}
	return near, far, nil
}

func connOf(fd int) (*net.UnixConn, error) {
	file := os.NewFile(uintptr(fd), "bridge")
	defer func() { _ = file.Close() }() // FileConn has its own
	made, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("making a bridge's connection: %w", err)
	}
	c, ok := made.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(errors.New("making a bridge's connection: it is no unix socket"), made.Close())
	}
	return c, nil
}
