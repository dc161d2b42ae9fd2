// Package guestlink keeps one live connection to the guest of every machine: it dials through the
// provider's dialer, opens each connection with Challenge and Hello and their proofs, redials when a stream dies,
// and reports whether a machine has answered since the broker started. It never starts or
// stops a machine, knows nothing of sandboxes, and writes nothing down. What a guest replies is checked here:
// a reply that leaves this package is consistent in itself and within bounds.
package guestlink

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
)

// Protocol is the major version of berth.guest.v1 that this broker speaks.
const Protocol = 1

// Tuning.
const (
	helloTimeout     = 5 * time.Second        // one connection's Hello; an unresponsive peer costs no more
	dialTimeout      = 30 * time.Second       // one dial; a provider's stream can take seconds to open
	minRedialDelay   = 10 * time.Millisecond  // a guest that redials is back within this
	maxRedialDelay   = 2 * time.Second        // a machine that is down is dialled this often
	steadyAfter      = 2 * time.Second        // a connection that broke sooner counts as a failed dial: the next one backs off
	keepaliveTime    = 10 * time.Second       // with the timeout finds a black hole in 15 s
	keepaliveTimeout = 5 * time.Second        //
	linkTimeout      = 5 * time.Second        // how long a call waits for a link that is being redialled
	maxMessageBytes  = 4<<20 + 64<<10         // 1 MiB of payload four times over, and headers
	maxHelloBytes    = 64 << 10               // far above what a guest says of itself, part of which is written down
	retryHint        = 500 * time.Millisecond // RetryInfo of RECOVERING and GUEST_UNREACHABLE
	windowBytes      = 8 << 20                // HTTP/2 windows: larger ones let a bulk stream run at the pipe's speed
)

// Target is a machine to keep a link to.
type Target struct {
	MachineID string
	Token     []byte
	Provider  providers.Provider
	Machine   providers.Machine
}

// Events are called on a link's own goroutine, one at a time for a machine; they must be quick and
// must not call Drop for their own machine.
type Events struct {
	Up      func(machineID string, hello *guestv1.HelloResponse) // a connection was opened
	Down    func(machineID string, cause error)                  // the connection was lost, or could not be opened the first time
	Dropped func(machineID string)                               // the link is kept no more
}

// Options configure Links. All but Now and GuestTimeout are required.
type Options struct {
	Build  string // this broker's build, told to guests
	Log    *slog.Logger
	Events Events
	Now    func() time.Time
	// GuestTimeout is how long a connected guest may take to answer beyond what the call itself waits for.
	// Default: 30 s.
	GuestTimeout time.Duration
}

// Links holds a link to every machine.
type Links struct {
	opts   Options
	ctx    context.Context //nolint:containedctx // ends the link goroutines, which outlive every call
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	links map[string]*link
}

// New makes an empty set of links.
func New(opts Options) *Links {
	if opts.Events.Dropped == nil {
		opts.Events.Dropped = func(string) {}
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if opts.GuestTimeout == 0 {
		opts.GuestTimeout = guestTimeout
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Links{opts: opts, ctx: ctx, cancel: cancel, links: map[string]*link{}}
}

// Close ends every link and waits for their goroutines.
func (l *Links) Close() {
	l.cancel()
	l.wg.Wait()
}

// Open begins to keep a link to the machine; it is dialled in the background, again and again. A
// link that is already kept stays as it is.
func (l *Links) Open(target Target) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, kept := l.links[target.MachineID]; kept || l.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(l.ctx)
	k := &link{target: target, cancel: cancel, ended: make(chan struct{}), changed: make(chan struct{})}
	l.links[target.MachineID] = k
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		defer close(k.ended)
		k.keep(ctx, l.opts)
	}()
}

// Drop ends the link to a machine and waits until its connection is closed. Absent is success.
func (l *Links) Drop(machineID string) {
	l.mu.Lock()
	k := l.links[machineID]
	delete(l.links, machineID)
	l.mu.Unlock()
	if k != nil {
		k.cancel()
		<-k.ended
	}
}

// Hello returns what the machine's guest said when the current connection was opened, or nil while
// there is none.
func (l *Links) Hello(machineID string) *guestv1.HelloResponse {
	if k := l.find(machineID); k != nil {
		if live := k.live.Load(); live != nil {
			return live.hello
		}
	}
	return nil
}

// Awaited reports whether a link is kept to a machine, up or not.
func (l *Links) Awaited(machineID string) bool { return l.find(machineID) != nil }

// Silent returns how many machines have not answered since their link was opened.
func (l *Links) Silent() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, k := range l.links {
		if !k.answered.Load() {
			n++
		}
	}
	return n
}

// Wait returns the guest's Hello as soon as there is a connection. Its error is the context's, or a
// fault when the link is dropped meanwhile or was never opened.
func (l *Links) Wait(ctx context.Context, machineID string) (*guestv1.HelloResponse, error) {
	k := l.find(machineID)
	if k == nil {
		return nil, unreachable(machineID, errNoLink)
	}
	live, err := k.wait(ctx)
	if err != nil {
		return nil, err
	}
	return live.hello, nil
}

// Call runs fn with the machine's guest. A call that fails because the connection broke is run
// again on the next one: every call of the protocol names its job and can be repeated. Errors are
// faults: RECOVERING while the machine has not answered since the broker started,
// GUEST_UNREACHABLE when it is not to be reached now, and what the guest itself answered.
func (l *Links) Call(ctx context.Context, machineID string, fn func(context.Context, guestv1.GuestServiceClient) error) error {
	k := l.find(machineID)
	if k == nil {
		return unreachable(machineID, errNoLink)
	}
	var failed *connection
	var since time.Time
	for {
		live, err := k.soon(ctx)
		if err != nil {
			return err
		}
		err = fn(ctx, live.client)
		if err == nil {
			return nil
		}
		if live != failed {
			failed, since = live, time.Now()
		}
		// A connection that its keeper has held to be good for so long is good: the guest itself says that.
		if !broke(ctx, err) || ctx.Err() != nil || time.Since(since) > linkTimeout {
			return fromGuest(ctx, machineID, err)
		}
		k.suspect(live)
	}
}

// Stream runs fn once with the machine's guest, for a call that streams: who made it knows how far it
// came, and so alone can go on after the connection broke. Errors are those of Call.
func (l *Links) Stream(ctx context.Context, machineID string, fn func(context.Context, guestv1.GuestServiceClient) error) error {
	k := l.find(machineID)
	if k == nil {
		return unreachable(machineID, errNoLink)
	}
	live, err := k.soon(ctx)
	if err != nil {
		return err
	}
	if err := fn(ctx, live.client); err != nil {
		return fromGuest(ctx, machineID, err)
	}
	return nil
}

func (l *Links) find(machineID string) *link {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.links[machineID]
}

var errNoLink = errors.New("no link is kept to it")

// link is one machine's.
type link struct {
	target   Target
	cancel   context.CancelFunc
	ended    chan struct{}
	live     atomic.Pointer[connection]
	answered atomic.Bool // since the link was opened

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change of live
}

// connection is one stream to the guest that Hello has opened.
type connection struct {
	conn   *grpc.ClientConn
	client guestv1.GuestServiceClient
	hello  *guestv1.HelloResponse
}

// keep dials, holds and redials until its context ends.
func (k *link) keep(ctx context.Context, opts Options) {
	defer opts.Events.Dropped(k.target.MachineID)
	dialer, err := k.dialer(ctx)
	if err != nil {
		return
	}
	defer func() { _ = dialer.Close() }()
	pause, reported := minRedialDelay, false
	for ctx.Err() == nil {
		live, err := k.connect(ctx, dialer, opts.Build)
		if err != nil {
			if !reported && ctx.Err() == nil {
				reported = true
				opts.Log.Warn("cannot reach guest", "machine", k.target.MachineID, "error", err)
				opts.Events.Down(k.target.MachineID, err)
			}
			sleep(ctx, pause)
			pause = min(2*pause, maxRedialDelay)
			continue
		}
		reported = false
		connected := time.Now()
		k.answered.Store(true)
		k.set(live)
		opts.Events.Up(k.target.MachineID, live.hello)
		untilBroken(ctx, live.conn)
		k.set(nil)
		_ = live.conn.Close()
		if ctx.Err() == nil {
			opts.Events.Down(k.target.MachineID, errors.New("the connection was lost"))
		}
		if time.Since(connected) >= steadyAfter {
			pause = minRedialDelay
			continue
		}
		sleep(ctx, pause)
		pause = min(2*pause, maxRedialDelay)
	}
}

// dialer asks the provider for one until it gives one; only the end of the context ends that.
func (k *link) dialer(ctx context.Context) (providers.Dialer, error) {
	for pause := minRedialDelay; ; pause = min(2*pause, maxRedialDelay) {
		dialer, err := k.target.Provider.Dialer(ctx, k.target.Machine)
		if err == nil {
			return dialer, nil
		}
		if !sleep(ctx, pause) {
			return nil, ctx.Err()
		}
	}
}

// connect opens one stream and says Hello on it.
func (k *link) connect(ctx context.Context, dialer providers.Dialer, build string) (*connection, error) {
	dialCtx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	stream, err := dialer.Dial(dialCtx)
	if err != nil {
		return nil, fmt.Errorf("dial the guest: %w", err)
	}
	conn, err := grpc.NewClient("passthrough:///"+k.target.MachineID,
		grpc.WithContextDialer(once(stream)),
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the stream is the provider's; Hello proves both sides
		grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveTime, Timeout: keepaliveTimeout, PermitWithoutStream: true}),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(2*windowBytes),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
	)
	if err != nil {
		_ = stream.Close()
		return nil, fmt.Errorf("prepare the connection: %w", err)
	}
	client := guestv1.NewGuestServiceClient(conn)
	hello, err := k.hello(ctx, client, build)
	if err != nil {
		_ = conn.Close()
		_ = stream.Close()
		return nil, err
	}
	return &connection{conn: conn, client: client, hello: hello}, nil
}

// once hands out the stream for the first dial and refuses every other: a connection is one stream,
// and the next stream needs a Hello of its own.
func once(stream net.Conn) func(context.Context, string) (net.Conn, error) {
	var used atomic.Bool
	return func(context.Context, string) (net.Conn, error) {
		if used.Swap(true) {
			return nil, errors.New("the stream has ended")
		}
		return stream, nil
	}
}

func (k *link) hello(ctx context.Context, client guestv1.GuestServiceClient, build string) (*guestv1.HelloResponse, error) {
	nonce := make([]byte, sha256.Size)
	if _, err := rand.Read(nonce); err != nil {
		return nil, fmt.Errorf("make a nonce: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	challenge, err := client.Challenge(ctx, &guestv1.ChallengeRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask the guest for its challenge: %w", err)
	}
	if got := len(challenge.GetNonce()); got != sha256.Size {
		return nil, fmt.Errorf("the guest's challenge has %d bytes, not %d", got, sha256.Size)
	}
	hello, err := client.Hello(ctx, &guestv1.HelloRequest{
		Protocol: Protocol, Build: build, MachineId: k.target.MachineID,
		Nonce: nonce, Proof: proof(k.target.Token, "berth broker", nonce, challenge.GetNonce()),
	})
	if err != nil {
		return nil, fmt.Errorf("say hello to the guest: %w", err)
	}
	switch {
	//mutation:hello-proof case hmac.Equal(hello.GetProof(), nil):
	case !hmac.Equal(hello.GetProof(), proof(k.target.Token, "berth guest", nonce, challenge.GetNonce())):
		return nil, errors.New("who answered as the guest does not know the machine's token")
	case hello.GetProtocol() != Protocol:
		return nil, fmt.Errorf("the guest speaks protocol %d, this broker %d: use a broker that speaks it", hello.GetProtocol(), Protocol)
	case hello.GetMachineId() != k.target.MachineID:
		return nil, fmt.Errorf("the guest says that it is in machine %q", cut(hello.GetMachineId()))
	case proto.Size(hello) > maxHelloBytes:
		return nil, fmt.Errorf("the guest says more of itself than %d bytes", maxHelloBytes)
	case len(hello.GetBootId()) == 0 || len(hello.GetBootId()) > 64:
		return nil, errors.New("the guest's boot id is not between 1 and 64 bytes")
	}
	return hello, nil
}

// proof is one side's proof over both nonces, whose lengths are fixed.
func proof(token []byte, who string, broker, guest []byte) []byte {
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte(who))
	mac.Write(broker)
	mac.Write(guest)
	return mac.Sum(nil)
}

// untilBroken returns when the connection has left READY or the context ends.
func untilBroken(ctx context.Context, conn *grpc.ClientConn) {
	for {
		state := conn.GetState()
		if state != connectivity.Ready {
			return
		}
		if !conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}

func (k *link) set(live *connection) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.live.Store(live)
	close(k.changed)
	k.changed = make(chan struct{})
}

// suspect waits, shortly, for a connection that failed a call to be seen as broken by its keeper.
func (k *link) suspect(failed *connection) {
	timer := time.NewTimer(minRedialDelay)
	defer timer.Stop()
	for k.live.Load() == failed {
		k.mu.Lock()
		changed := k.changed
		k.mu.Unlock()
		select {
		case <-changed:
		case <-timer.C:
			return
		}
	}
}

// soon returns the connection, or waits for it no longer than linkTimeout.
func (k *link) soon(ctx context.Context) (*connection, error) {
	if live := k.live.Load(); live != nil {
		return live, nil
	}
	limited, cancel := context.WithTimeout(ctx, linkTimeout)
	defer cancel()
	live, err := k.wait(limited)
	if err == nil || ctx.Err() != nil {
		return live, err
	}
	if !k.answered.Load() {
		return nil, fault.New(fault.Recovering,
			"the broker has just started and has not yet heard from machine %s: try again", k.target.MachineID).Retry(retryHint)
	}
	return nil, unreachable(k.target.MachineID, errors.New("the connection to its guest is down and is being redialled"))
}

func (k *link) wait(ctx context.Context) (*connection, error) {
	for {
		k.mu.Lock()
		live, changed := k.live.Load(), k.changed
		k.mu.Unlock()
		if live != nil {
			return live, nil
		}
		select {
		case <-changed:
		case <-k.ended:
			return nil, unreachable(k.target.MachineID, errNoLink)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// sleep waits, jittered, and reports whether the context still holds.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause/2 + mathrand.N(pause)) //nolint:gosec // jitter needs no secrecy
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
