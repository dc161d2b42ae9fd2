package bridge_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/providers/bridge"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// carrier is a stream over a pipe, and the machine's end of it.
func carrier(t *testing.T, said string) (bridge.Stream, net.Conn) {
	t.Helper()
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return bridge.Stream{Output: near, Input: near, Close: near.Close, Said: func() string { return said }}, far
}

func open(t *testing.T, before string) (net.Conn, net.Conn) {
	t.Helper()
	stream, far := carrier(t, "")
	go func() { _, _ = io.WriteString(far, before+"\x1eREADY:N\x1e") }()
	conn, err := bridge.Open(t.Context(), stream, "N")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, far
}

func TestWhatComesBeforeTheSentinelIsNotTheGuests(t *testing.T) {
	for name, chatter := range map[string]string{
		"nothing":                    "",
		"a greeting":                 "Welcome!\r\n$ ",
		"a sentinel of another":      "\x1eREADY:other\x1e",
		"half a sentinel":            "\x1eREADY:\x1eREA",
		"the command line as echoed": "berth-guest bridge --nonce N\r\n",
		"separators":                 "\x1e\x1e\x1e",
	} {
		t.Run(name, func(t *testing.T) {
			conn, far := open(t, chatter)
			go func() { _, _ = io.WriteString(far, "hello") }()
			got := make([]byte, 5)
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != "hello" {
				t.Errorf("read %q, %v", got, err)
			}
		})
	}
}

func TestABridgeThatDoesNotComeUpSaysWhy(t *testing.T) {
	for name, test := range map[string]struct {
		far  func(net.Conn)
		want string
	}{
		"it ends":             {func(c net.Conn) { _ = c.Close() }, "reach the guest: no such file"},
		"it says other stuff": {func(c net.Conn) { _, _ = io.WriteString(c, strings.Repeat("x", 100<<10)) }, "no sentinel"},
	} {
		t.Run(name, func(t *testing.T) {
			stream, far := carrier(t, "berth-guest: reach the guest: no such file\n")
			go test.far(far)
			conn, err := bridge.Open(t.Context(), stream, "N")
			if err == nil {
				_ = conn.Close()
				t.Fatal("it opened")
			}
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v does not say %q", err, test.want)
			}
			if _, err := stream.Input.Write([]byte("x")); err == nil {
				t.Error("the stream was not closed")
			}
		})
	}
}

func TestTheContextBoundsTheWaitingAndNothingElse(t *testing.T) {
	stream, _ := carrier(t, "")
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := bridge.Open(short, stream, "N"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("waiting for a silent bridge: %v", err)
	}

	stream, far := carrier(t, "")
	go func() { _, _ = io.WriteString(far, "\x1eREADY:N\x1e") }()
	dialling, end := context.WithCancel(t.Context())
	conn, err := bridge.Open(dialling, stream, "N")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	end()
	go func() { _, _ = io.WriteString(far, "still here") }()
	got := make([]byte, 10)
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Errorf("after the dial's context ended: %v", err)
	}
}

func TestAConnectionHasDeadlines(t *testing.T) {
	conn, _ := open(t, "")
	if err := conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v", err)
	}
	// Nobody reads at the other end, so that writes must block in the end.
	if err := conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(make([]byte, 8<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("write: %v", err)
	}
}

func TestWhatWasWrittenBeforeTheEndIsRead(t *testing.T) {
	conn, far := open(t, "")
	go func() {
		_, _ = far.Write(bytes.Repeat([]byte("x"), 100<<10))
		_ = far.Close()
	}()
	if got, err := io.ReadAll(conn); err != nil || len(got) != 100<<10 {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
}

func TestCloseEndsTheStream(t *testing.T) {
	conn, far := open(t, "")
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the other end reads %v", err)
	}
}

func TestBytesSurviveBothWays(t *testing.T) {
	conn, far := open(t, "")
	go func() { _, _ = io.Copy(far, far) }() // an echo
	sent := make([]byte, 4<<20)
	_, _ = rand.New(rand.NewSource(1)).Read(sent)
	go func() { _, _ = conn.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil {
		t.Fatal(err)
	}
	if sha256.Sum256(got) != sha256.Sum256(sent) {
		t.Error("other bytes came back")
	}
}

func TestANonceIsNeverTheSame(t *testing.T) {
	one, err := bridge.Nonce()
	if err != nil {
		t.Fatal(err)
	}
	if two, _ := bridge.Nonce(); one == two || len(one) < 16 {
		t.Errorf("%q and %q", one, two)
	}
}
