package guest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// FuzzSpareConnection sends any first bytes on a spare connection: the guest drops it, no caller gets in
// without Hello, and the next one serves.
func FuzzSpareConnection(f *testing.F) {
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	settings := "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	for _, seed := range []string{
		"", "GET / HTTP/1.1\r\n\r\n", preface, preface + settings, preface[:9], preface + settings + "\xff\xff\xff\x00\x00\x00\x00\x00\x01",
		preface + settings + "\x00\x00\x05\x01\x05\x00\x00\x00\x01\x82\x86\x84\x41\x8a", preface + settings + "\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678",
		preface + settings + "\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff", preface + "\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff",
	} {
		f.Add([]byte(seed))
	}
	path := filepath.Join(f.TempDir(), "s")
	host, err := net.Listen("unix", path)
	must(f, err)
	m := &machine{t: f, listener: host, config: &guestv1.BootConfig{MachineId: "m_01FUZZ", Token: []byte("token")}}
	reverse := newReverseListener(path, slog.New(slog.DiscardHandler))
	server := grpc.NewServer(grpc.Creds(connectionState{}), grpc.UnaryInterceptor(authenticateUnary),
		grpc.StreamInterceptor(authenticateStream), grpc.ForceServerCodecV2(newCodec()))
	// Without a supervisor a call that gets in has nothing to work with, and the guest would panic.
	s := &service{}
	s.identity.Store(&identity{machineID: m.config.GetMachineId(), token: m.config.GetToken()})
	guestv1.RegisterGuestServiceServer(server, s)
	var serving sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	serving.Go(func() { reverse.dial(ctx) })
	serving.Go(func() { _ = server.Serve(reverse) })
	f.Cleanup(func() {
		cancel()
		server.Stop()
		serving.Wait()
		_ = host.Close()
	})
	f.Fuzz(func(t *testing.T, first []byte) {
		m.t = t
		conn := m.accept().(*net.UnixConn)
		_, _ = conn.Write(first)
		_ = conn.CloseWrite()
		must(t, conn.SetReadDeadline(time.Now().Add(5*time.Second)))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a connection that said all it will is kept")
		}
		_ = conn.Close()
		m.connect()
		_ = m.conn.Close()
	})
}
