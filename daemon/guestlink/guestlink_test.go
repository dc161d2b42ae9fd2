package guestlink

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	machineID = "m_1"
	token     = "a token of thirty-two bytes, so."
	soon      = 10 * time.Second
)

// guest serves the handshake, as the test has it, on connections that it dials out.
type guest struct {
	guestv1.UnimplementedGuestServiceServer
	challenge func(*guestv1.ChallengeResponse)                    // changes the honest answer
	hello     func(*guestv1.HelloRequest, *guestv1.HelloResponse) // changes the honest answer
	wait      func() error                                        // what Wait answers
	start     func() *guestv1.Status
	waits     atomic.Int32
}

// theChallenge is what the test's guest always asks.
var theChallenge = bytes.Repeat([]byte{7}, sha256.Size)

func (g *guest) Challenge(context.Context, *guestv1.ChallengeRequest) (*guestv1.ChallengeResponse, error) {
	response := &guestv1.ChallengeResponse{Nonce: theChallenge}
	if g.challenge != nil {
		g.challenge(response)
	}
	return response, nil
}

func (g *guest) Hello(_ context.Context, request *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	if string(request.GetProof()) != string(proof([]byte(token), "berth broker", request.GetNonce(), theChallenge)) {
		return nil, status.Error(codes.Unauthenticated, "the broker does not know the token")
	}
	response := &guestv1.HelloResponse{
		Protocol: Protocol, MachineId: machineID, BootId: "boot", Proof: proof([]byte(token), "berth guest", request.GetNonce(), theChallenge),
	}
	if g.hello != nil {
		g.hello(request, response)
	}
	return response, nil
}

func (g *guest) Start(context.Context, *guestv1.StartRequest) (*guestv1.StartResponse, error) {
	return &guestv1.StartResponse{Status: g.start()}, nil
}

func (g *guest) Wait(context.Context, *guestv1.WaitRequest) (*guestv1.WaitResponse, error) {
	g.waits.Add(1)
	if g.wait != nil {
		if err := g.wait(); err != nil {
			return nil, err
		}
	}
	return &guestv1.WaitResponse{}, nil
}

// once is a listener with one connection.
type onceListener struct {
	conn   chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *onceListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.conn:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *onceListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *onceListener) Addr() net.Addr { return &net.UnixAddr{} }

// harness is links over a real dialer, and guests that dial it.
type harness struct {
	*Links
	t     *testing.T
	ctx   context.Context
	dir   string
	ups   atomic.Int32
	downs atomic.Int32
	why   atomic.Value // the last reason of a Down
}

// machines is a provider as far as links need one.
type machines struct {
	providers.Provider
	dir   string
	fails atomic.Int32 // Dialer fails this often
}

func (m *machines) Dialer(context.Context, providers.Machine) (providers.Dialer, error) {
	if m.fails.Add(-1) >= 0 {
		return nil, errors.New("not yet")
	}
	return reverse.Listen(m.dir, nil)
}

func newHarness(t *testing.T) *harness {
	t.Helper()
	dir, err := os.MkdirTemp("", "gl-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	w := &harness{t: t, ctx: ctx, dir: dir}
	w.Links = New(Options{Build: "test", Log: slog.New(slog.DiscardHandler), Events: Events{
		Up:   func(string, *guestv1.HelloResponse) { w.ups.Add(1) },
		Down: func(_ string, cause error) { w.why.Store(cause.Error()); w.downs.Add(1) },
	}})
	t.Cleanup(func() {
		w.Close()
		cancel()
		_ = os.RemoveAll(dir)
	})
	return w
}

func (w *harness) open() *machines {
	m := &machines{dir: w.dir}
	w.Open(Target{MachineID: machineID, Token: []byte(token), Provider: m, Machine: providers.Machine{ID: machineID}})
	return m
}

// dial connects to the machine's socket as a guest does.
func (w *harness) dial() net.Conn {
	w.t.Helper()
	var conn net.Conn
	w.wait("the socket", func() bool {
		dialled, err := net.Dial("unix", filepath.Join(w.dir, reverse.SocketName))
		conn = dialled
		return err == nil
	})
	return conn
}

// serve serves a guest on a connection that it dials; stop breaks it.
func (w *harness) serve(g *guest) (stop func()) {
	w.t.Helper()
	server := grpc.NewServer()
	guestv1.RegisterGuestServiceServer(server, g)
	listener := &onceListener{conn: make(chan net.Conn, 1), closed: make(chan struct{})}
	conn := w.dial()
	listener.conn <- conn
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			server.Stop()
			_ = conn.Close()
			<-served
		})
	}
	w.t.Cleanup(stop)
	return stop
}

func (w *harness) call() error {
	return w.Call(w.ctx, machineID, func(ctx context.Context, client guestv1.GuestServiceClient) error {
		_, err := client.Wait(ctx, &guestv1.WaitRequest{})
		return err
	})
}

func (w *harness) wait(what string, so func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(soon); !so(); {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not so after %s", what, soon)
		}
		sleep(w.ctx, 5*time.Millisecond)
	}
}

func (w *harness) up() { w.wait("the link", func() bool { return w.Hello(machineID) != nil }) }

func TestAPeerThatIsNotTheGuestIsNotSpokenTo(t *testing.T) {
	for _, test := range []struct {
		name      string
		hello     func(*guestv1.HelloRequest, *guestv1.HelloResponse)
		why       string
		challenge func(*guestv1.ChallengeResponse)
	}{
		{name: "no challenge", challenge: func(r *guestv1.ChallengeResponse) { r.Nonce = nil }, why: "challenge has 0 bytes"},
		{name: "an endless challenge", challenge: func(r *guestv1.ChallengeResponse) { r.Nonce = make([]byte, 1<<20) }, why: "challenge has 1048576 bytes"},
		{name: "a wrong proof", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.Proof[0]++ }, why: "does not know the machine's token"},
		{name: "no proof", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.Proof = nil }, why: "does not know the machine's token"},
		{name: "the broker's own proof", hello: func(q *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.Proof = q.GetProof() }, why: "does not know the machine's token"},
		{name: "another protocol", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.Protocol = 2 }, why: "speaks protocol 2"},
		{name: "another machine", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.MachineId = strings.Repeat("m", 1<<16) }, why: "in machine \"m"},
		{name: "no boot", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.BootId = "" }, why: "boot id"},
		{name: "a boot without end", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.BootId = strings.Repeat("b", 65) }, why: "boot id"},
		{name: "too many words", hello: func(_ *guestv1.HelloRequest, r *guestv1.HelloResponse) { r.Workspace = strings.Repeat("w", 1<<20) }, why: "more of itself"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newHarness(t)
			w.open()
			impostor := &guest{hello: test.hello, challenge: test.challenge}
			stop := w.serve(impostor)
			w.wait("word of it", func() bool { return w.downs.Load() == 1 })
			if why := w.why.Load().(string); !strings.Contains(why, test.why) || len(why) > 4<<10 {
				t.Errorf("it was told why: %.200s", why)
			}
			if w.Hello(machineID) != nil || w.ups.Load() > 0 || w.Silent() != 1 {
				t.Error("it was taken for the guest")
			}
			stop()
			w.serve(&guest{})
			w.up()
			if err := w.call(); err != nil || impostor.waits.Load() > 0 {
				t.Errorf("a call after the guest came: %v", err)
			}
		})
	}
}

func TestABrokerWithAnotherTokenIsRefused(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.Open(Target{MachineID: machineID, Token: []byte("another"), Provider: &machines{dir: w.dir}, Machine: providers.Machine{ID: machineID}})
	w.serve(&guest{})
	w.wait("word of it", func() bool { return w.downs.Load() == 1 })
	if w.Hello(machineID) != nil {
		t.Error("there is a link")
	}
}

func TestAnUnresponsivePeerCostsOneHelloAndNoMore(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	silent := w.dial()
	defer func() { _ = silent.Close() }()
	begin := time.Now()
	sleep(w.ctx, 50*time.Millisecond) // so that it is the first
	w.serve(&guest{})
	_, err := w.Wait(w.ctx, machineID)
	if err != nil || time.Since(begin) > 2*helloTimeout {
		t.Errorf("the guest was heard after %s (%v)", time.Since(begin), err)
	}
}

func TestADeadSpareCostsNothing(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	dialer, err := reverse.Listen(w.dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	k := &link{target: Target{MachineID: machineID, Token: []byte(token)}}
	dead := w.dial()
	w.serve(&guest{})
	_ = dead.Close()
	live, err := k.connect(w.ctx, dialer, "test")
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	_ = live.conn.Close()
	_ = dialer.Close()
}

func TestALinkIsRedialledAndItsCallsGoOn(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open().fails.Store(2)
	begun := make(chan struct{}, 1)
	hang := make(chan struct{})
	stop := w.serve(&guest{wait: func() error {
		begun <- struct{}{}
		<-hang
		return nil
	}})
	w.up()
	second := &guest{}
	done := make(chan error, 1)
	go func() { done <- w.call() }()
	<-begun
	close(hang) // the handler's, after the connection: stop waits for it
	stop()
	w.serve(second)
	if err := <-done; err != nil {
		t.Errorf("a call over two connections: %v", err)
	}
	w.up()
	if w.ups.Load() < 2 || w.downs.Load() < 1 {
		t.Errorf("%d times up, %d times down", w.ups.Load(), w.downs.Load())
	}
	if err := w.Stream(w.ctx, machineID, func(context.Context, guestv1.GuestServiceClient) error { return nil }); err != nil {
		t.Errorf("a stream: %v", err)
	}
}

func TestACallOnABrokenConnectionIsMadeAgainAndAStreamIsNot(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	var broken atomic.Bool
	w.serve(&guest{wait: func() error {
		if broken.CompareAndSwap(true, false) {
			return status.Error(codes.Unavailable, "the transport is closing")
		}
		return nil
	}})
	w.up()
	broken.Store(true)
	if err := w.call(); err != nil {
		t.Errorf("a call: %v", err)
	}
	broken.Store(true)
	err := w.Stream(w.ctx, machineID, func(ctx context.Context, client guestv1.GuestServiceClient) error {
		_, err := client.Wait(ctx, &guestv1.WaitRequest{})
		return err
	})
	if !fault.Is(err, fault.GuestUnreachable) {
		t.Errorf("a stream: %v", err)
	}
}

func TestAGuestThatSaysItIsUnavailableIsBelievedInTheEnd(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	w.serve(&guest{wait: func() error { return status.Error(codes.Unavailable, "never") }})
	w.up()
	begin := time.Now()
	if err := w.call(); !fault.Is(err, fault.GuestUnreachable) || time.Since(begin) < linkTimeout || time.Since(begin) > 3*linkTimeout {
		t.Errorf("after %s: %v", time.Since(begin), err)
	}
}

func TestAnErrorSaysWhetherTheMachineWasHeardFrom(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	if err := w.call(); !fault.Is(err, fault.GuestUnreachable) {
		t.Errorf("without a link: %v", err)
	}
	if _, err := w.Wait(w.ctx, machineID); !fault.Is(err, fault.GuestUnreachable) {
		t.Errorf("waiting without a link: %v", err)
	}
	w.open()
	if !w.Awaited(machineID) || w.Silent() != 1 {
		t.Error("the link is not kept")
	}
	short, cancel := context.WithTimeout(w.ctx, 10*time.Millisecond)
	defer cancel()
	if err := w.Call(short, machineID, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a caller with no time: %v", err)
	}
	stop := w.serve(&guest{})
	w.up()
	if w.Silent() != 0 {
		t.Error("it counts as silent")
	}
	stop()
	w.wait("the end of the link", func() bool { return w.Hello(machineID) == nil })
	if err := w.call(); !fault.Is(err, fault.GuestUnreachable) {
		t.Errorf("after the last word: %v", err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := w.Wait(w.ctx, machineID)
		waiting <- err
	}()
	sleep(w.ctx, 20*time.Millisecond)
	w.Drop(machineID)
	w.Drop(machineID)
	if err := <-waiting; !fault.Is(err, fault.GuestUnreachable) {
		t.Errorf("waiting when the link is dropped: %v", err)
	}
	if w.Awaited(machineID) {
		t.Error("a dropped link is kept")
	}
}

func TestAMachineThatWasNotYetHeardFromIsRecovering(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	if err := w.call(); !fault.Is(err, fault.Recovering) {
		t.Errorf("the error is %v", err)
	}
}

func TestCloseEndsEverythingInEveryState(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	w.serve(&guest{})
	w.up()
	for _, id := range []string{"m_2", "m_3"} {
		dir := filepath.Join(w.dir, id)
		unready := &machines{dir: dir}
		unready.fails.Store(1 << 30)
		w.Open(Target{MachineID: id, Token: []byte(token), Provider: unready})
	}
	w.Close()
	w.Open(Target{MachineID: "m_4", Provider: &machines{dir: w.dir}})
	if w.Awaited("m_4") {
		t.Error("a link is kept after Close")
	}
	// That no goroutine is left is what goleak looks for.
}

func TestAGuestsAnswersBecomeTheBrokersWords(t *testing.T) {
	t.Parallel()
	refusal := func(code codes.Code, reason string) error {
		s, err := status.New(code, "no").WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: guestDomain})
		if err != nil {
			t.Fatal(err)
		}
		return s.Err()
	}
	ended, end := context.WithCancel(context.Background())
	end()
	for _, test := range []struct {
		name   string
		ctx    context.Context
		answer error
		is     error        // or
		reason fault.Reason //
		final  bool         // it is the guest's own refusal
	}{
		{"a caller that left", ended, status.Error(codes.Canceled, ""), context.Canceled, "", false},
		{"a connection that is closed", t.Context(), status.Error(codes.Canceled, ""), nil, fault.GuestUnreachable, false},
		{"a deadline", t.Context(), status.Error(codes.DeadlineExceeded, ""), context.DeadlineExceeded, "", false},
		{"our own deadline", t.Context(), context.DeadlineExceeded, context.DeadlineExceeded, "", false},
		{"no job", t.Context(), status.Error(codes.NotFound, ""), ErrNoJob, "", false},
		{"dropped", t.Context(), status.Error(codes.OutOfRange, ""), ErrDropped, "", false},
		{"another boot", t.Context(), refusal(codes.FailedPrecondition, "OTHER_BOOT"), ErrOtherBoot, "", false},
		{"another generation", t.Context(), refusal(codes.FailedPrecondition, "OTHER_GENERATION"), ErrOtherGeneration, "", false},
		{"forgotten", t.Context(), refusal(codes.FailedPrecondition, "FORGOTTEN"), ErrForgotten, "", false},
		{"another precondition", t.Context(), refusal(codes.FailedPrecondition, "WHATEVER"), nil, fault.WrongState, false},
		{"unavailable", t.Context(), status.Error(codes.Unavailable, ""), nil, fault.GuestUnreachable, false},
		{"a bad argument", t.Context(), status.Error(codes.InvalidArgument, "spec"), nil, fault.InvalidField, true},
		{"what the guest cannot do", t.Context(), refusal(codes.Unimplemented, "REFUSED"), nil, fault.CapabilityMissing, true},
		{"a call that is not known", t.Context(), status.Error(codes.Unimplemented, ""), nil, fault.CapabilityMissing, false},
		{"no space left", t.Context(), refusal(codes.ResourceExhausted, "REFUSED"), nil, fault.QuotaExceeded, true},
		{"a message that is too large", t.Context(), status.Error(codes.ResourceExhausted, ""), nil, fault.Internal, false},
		{"a reply that cannot be decoded", t.Context(), status.Error(codes.Internal, ""), nil, fault.Internal, false},
		{"permission", t.Context(), status.Error(codes.PermissionDenied, ""), nil, fault.Internal, false},
		{"anything", t.Context(), status.Error(codes.Code(99), strings.Repeat("ü", 1<<20)), nil, fault.Internal, false},
	} {
		err := fromGuest(test.ctx, machineID, test.answer)
		if test.is != nil && !errors.Is(err, test.is) || test.reason != "" && !fault.Is(err, test.reason) || errors.Is(err, ErrRefused) != test.final {
			t.Errorf("%s: %v", test.name, err)
		}
		if len(err.Error()) > 2*maxErrorText {
			t.Errorf("%s: %d bytes of words", test.name, len(err.Error()))
		}
	}
	if err := errors.New("no status"); fromGuest(t.Context(), machineID, err) == nil {
		t.Error("an error became none")
	}
}

// The library on this side makes the status of a reply that is too large, and the guest has done what it
// was asked for.
func TestAReplyThatIsTooLargeIsNoRefusal(t *testing.T) {
	t.Parallel()
	w := newHarness(t)
	w.open()
	w.serve(&guest{start: func() *guestv1.Status {
		return &guestv1.Status{JobId: "job_1", Shell: strings.Repeat("x", maxMessageBytes)}
	}})
	w.up()
	_, err := w.StartJob(t.Context(), machineID, &guestv1.StartRequest{JobId: "job_1"})
	if err == nil || errors.Is(err, ErrRefused) || !fault.Is(err, fault.Internal) {
		t.Errorf("the error is %v", err)
	}
}

func TestTimesAreHeldToWhatAClockCanBe(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, test := range map[string]struct {
		from *timestamppb.Timestamp
		want bool
	}{
		"none":            {nil, false},
		"now":             {timestamppb.New(now), true},
		"an hour ahead":   {timestamppb.New(now.Add(time.Hour)), true},
		"two days ahead":  {timestamppb.New(now.Add(48 * time.Hour)), false},
		"the epoch":       {timestamppb.New(time.Unix(0, 0)), true},
		"beyond all time": {&timestamppb.Timestamp{Seconds: 1 << 60}, false},
		"negative nanos":  {&timestamppb.Timestamp{Nanos: -1}, false},
	} {
		if got := boundTime(test.from, now); (got != nil) != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestAJobsIDIsOneThatTheBrokerWrites(t *testing.T) {
	for id, want := range map[string]bool{
		"job_01J00000000000000000000000":  true,
		"job_7ZZZZZZZZZZZZZZZZZZZZZZZZZ":  true,
		"job_8ZZZZZZZZZZZZZZZZZZZZZZZZZ":  false, // more than 128 bits
		"job_01j00000000000000000000000":  false, // the same number, and another file's name
		"job_01J0000000000000000000000U":  false,
		"job_01J0000000000000000000000":   false,
		"job_01J000000000000000000000000": false,
		"01J00000000000000000000000":      false,
		"job_../../../../etc/passwd-----": false,
		"":                                false,
	} {
		if got := ValidJobID(id); got != want {
			t.Errorf("%q: %v, want %v", id, got, want)
		}
	}
}
