package faultproxy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// maxMessageBytes is what the link itself passes on, in bytes: far more than a broker takes.
	maxMessageBytes = 256 << 20
	// The broker asks as often whether the guest is there, and is to be applied the truth about that.
	pingInterval = 10 * time.Second
	pingTimeout  = 5 * time.Second
	// windowBytes are HTTP/2 windows as large as the broker's.
	windowBytes = 8 << 20
)

// Link is one connection of a broker to a guest with a fault proxy in its middle.
type Link struct {
	machine string
	script  *Script
	log     *slog.Logger
	guest   net.Conn
	broker  net.Conn
	tap     *tap
	work    sync.WaitGroup // what carries requests
}

// Between makes a link over a stream to a guest; Run carries it.
func Between(guest net.Conn, machine string, script *Script, log *slog.Logger) *Link {
	broker, own := net.Pipe()
	return &Link{machine: machine, script: script, log: log, guest: guest, broker: broker, tap: newTap(own)}
}

// Conn is the broker's end.
func (l *Link) Conn() net.Conn { return l.broker }

// Run carries calls until either side closes the connection or ctx ends; then both are closed.
func (l *Link) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	up, err := l.dial()
	if err != nil {
		l.log.Error("the fault proxy cannot reach the guest", "machine", l.machine, "error", err)
		_ = errors.Join(l.tap.Close(), l.guest.Close())
		return
	}
	server := grpc.NewServer(
		grpc.WaitForHandlers(true), // what carries a call ends with the link
		grpc.ForceServerCodecV2(asBytes{}), grpc.MaxRecvMsgSize(maxMessageBytes), grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.InitialWindowSize(windowBytes), grpc.InitialConnWindowSize(2*windowBytes),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
		grpc.UnknownServiceHandler(func(_ any, down grpc.ServerStream) error { return l.carry(down.Context(), up, down) }), //nolint:contextcheck // a call has a context of its own
	)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(&single{conn: l.tap, over: ctx.Done()}) })
	serving.Go(func() {
		defer cancel()
		up.Connect()
		for state := up.GetState(); state != connectivity.TransientFailure && state != connectivity.Shutdown; state = up.GetState() {
			if !up.WaitForStateChange(ctx, state) || state == connectivity.Ready {
				return
			}
		}
	})
	select {
	case <-l.tap.closed:
	case <-ctx.Done():
	}
	cancel()
	_ = l.tap.Close()
	server.Stop()
	_ = errors.Join(up.Close(), l.guest.Close())
	serving.Wait()
	l.work.Wait()
}

func (l *Link) dial() (*grpc.ClientConn, error) {
	stream := make(chan net.Conn, 1)
	stream <- l.guest
	return grpc.NewClient("passthrough:///"+l.machine,
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case conn := <-stream:
				return conn, nil
			default:
				return nil, net.ErrClosed // one stream, as the broker has
			}
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: pingTimeout, PermitWithoutStream: true}),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(2*windowBytes),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(asBytes{}), grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
	)
}

// carry carries one call.
func (l *Link) carry(ctx context.Context, up *grpc.ClientConn, down grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(down)
	call := path.Base(method)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := up.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	l.work.Go(func() { // ends with the call
		for {
			var request []byte
			if err := down.RecvMsg(&request); err != nil {
				if errors.Is(err, io.EOF) {
					_ = stream.CloseSend()
				}
				return
			}
			request = l.hurry(call, request)
			if err := stream.SendMsg(&request); err != nil {
				return // the guest has ended the call, and says why below
			}
		}
	})
	for {
		var reply []byte
		err := stream.RecvMsg(&reply)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := l.pass(ctx, call, reply, down); err != nil {
			return err
		}
	}
}

// pass sends a reply on, with the rules that are due.
func (l *Link) pass(ctx context.Context, call string, reply []byte, down grpc.ServerStream) error {
	rules, err := l.script.due(l.machine, call)
	if err != nil {
		return err
	}
	l.script.remember(call, reply)
	times := 1
	for _, rule := range rules {
		changed, applies := reply, rule.Kind != AtOnce
		switch rule.Kind {
		case Set, Add, Repeat, Invent, Pad:
			if changed, applies, err = rule.change(reply); err != nil {
				return err
			}
		case Stale, Other:
			changed = l.script.remembered(rule)
			applies = changed != nil
		}
		if !applies {
			continue
		}
		due, err := l.script.count(rule)
		if err != nil {
			return err
		}
		if !due {
			continue
		}
		l.log.Info("apply a rule", "machine", l.machine, "call", call, "rule", rule.ID, "kind", rule.Kind)
		reply = changed
		switch rule.Kind {
		case Double:
			times = 2
		case Nonsense:
			reply = noise(rule.Count)
		case Frames:
			l.tap.inject(noise(rule.Count))
		case Refuse:
			return status.Error(codes.Code(rule.Count), rule.Text)
		case Silent:
			<-ctx.Done()
			return ctx.Err()
		case StallMidway, CutMidway:
			l.tap.stopAfter(len(reply)/2, rule.Kind == CutMidway)
		}
	}
	for range times {
		if err := down.SendMsg(&reply); err != nil {
			return err
		}
	}
	return nil
}

// hurry takes the wait out of a request where the script has it.
func (l *Link) hurry(call string, request []byte) []byte {
	rules, err := l.script.due(l.machine, call)
	if err != nil {
		return request
	}
	for _, rule := range rules {
		if rule.Kind != AtOnce || call != "List" && call != "Wait" {
			continue
		}
		if due, err := l.script.count(rule); err != nil || !due {
			continue
		}
		var message proto.Message = &guestv1.WaitRequest{}
		if call == "List" {
			message = &guestv1.ListRequest{}
		}
		if proto.Unmarshal(request, message) != nil {
			return request
		}
		switch message := message.(type) {
		case *guestv1.ListRequest:
			message.Wait = durationpb.New(0)
		case *guestv1.WaitRequest:
			message.Wait = durationpb.New(0)
		}
		if hurried, err := proto.Marshal(message); err == nil {
			request = hurried
		}
	}
	return request
}

func noise(length int) []byte {
	bytes := make([]byte, length)
	_, _ = rand.Read(bytes) // it never fails
	return bytes
}

// asBytes is a codec that leaves messages as they are: each is a *[]byte.
type asBytes struct{}

var _ encoding.CodecV2 = asBytes{}

func (asBytes) Name() string { return "proto" }

func (asBytes) Marshal(v any) (mem.BufferSlice, error) {
	message, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("a message is %T, not bytes", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(*message)}, nil
}

func (asBytes) Unmarshal(data mem.BufferSlice, v any) error {
	message, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("a message is %T, not bytes", v)
	}
	*message = data.Materialize()
	return nil
}

// single is a listener with one connection.
type single struct {
	conn net.Conn
	over <-chan struct{}
	once bool
}

func (s *single) Accept() (net.Conn, error) {
	if !s.once {
		s.once = true
		return s.conn, nil
	}
	<-s.over
	return nil, net.ErrClosed
}

func (s *single) Close() error   { return nil }
func (s *single) Addr() net.Addr { return s.conn.LocalAddr() }

// tap is the link's end of the stream to the broker, where a reply can be broken off.
type tap struct {
	net.Conn
	closed chan struct{}
	once   sync.Once

	mu    sync.Mutex
	limit int  // so many bytes pass; below zero: all
	cut   bool // and then the stream is closed; else nothing more passes
}

func newTap(conn net.Conn) *tap { return &tap{Conn: conn, closed: make(chan struct{}), limit: -1} }

// Write passes bytes on, as far as they may pass.
func (t *tap) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.limit < 0 || len(p) <= t.limit {
		if t.limit >= 0 {
			t.limit -= len(p)
		}
		return t.Conn.Write(p)
	}
	n, err := t.Conn.Write(p[:t.limit])
	t.limit = 0
	if err != nil || t.cut {
		return n, errors.Join(err, t.Close())
	}
	<-t.closed
	return n, net.ErrClosed
}

// inject puts bytes of its own into the stream.
func (t *tap) inject(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, _ = t.Conn.Write(p) // a broker that has had enough of it is what is tested
}

// stopAfter lets so many more bytes pass.
func (t *tap) stopAfter(bytes int, cut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.limit, t.cut = bytes, cut
}

// Close closes the stream.
func (t *tap) Close() error {
	t.once.Do(func() { close(t.closed) })
	return t.Conn.Close()
}
