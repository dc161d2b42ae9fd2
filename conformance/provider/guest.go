package provider

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
)

// attemptTimeout bounds one attempt to speak to a guest over a stream that may be a dead one's.
const attemptTimeout = 20 * time.Second

// Guest is a machine's guest after Hello, in which both sides proved that they know the token.
type Guest struct {
	guestv1.GuestServiceClient
	Hello *guestv1.HelloResponse
	conn  *grpc.ClientConn
	t     testing.TB
}

// Connect dials a machine's guest until one answers Hello, for the machine and token of the spec. The guest's
// connection is closed when the test ends.
func Connect(t testing.TB, p providers.Provider, spec providers.MachineSpec) *Guest {
	t.Helper()
	dialer, err := p.Dialer(t.Context(), providers.Machine{ID: spec.MachineID, ListenDir: spec.ListenDir})
	if err != nil {
		t.Fatalf("Dialer: %v", err)
	}
	defer func() { // the stream lives on
		if err := dialer.Close(); err != nil {
			t.Errorf("closing the dialer: %v", err)
		}
	}()
	g, err := ConnectThrough(t, dialer, spec)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// ConnectThrough is Connect with a dialer. It dials until a guest answers: a stream may be that of a guest
// that has just died.
func ConnectThrough(t testing.TB, dialer providers.Dialer, spec providers.MachineSpec) (*Guest, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	for {
		stream, err := dialer.Dial(ctx)
		if err == nil {
			var g *Guest
			if g, err = greet(ctx, t, stream, spec); err == nil {
				return g, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(pollInterval):
		}
	}
}

// greet says hello on a stream, which is closed unless a guest answers.
func greet(ctx context.Context, t testing.TB, stream net.Conn, spec providers.MachineSpec) (*Guest, error) {
	once := make(chan net.Conn, 1)
	once <- stream
	conn, err := grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			select {
			case stream := <-once:
				return stream, nil
			default:
				return nil, errors.New("the stream has ended")
			}
		}))
	if err != nil {
		return nil, errors.Join(err, stream.Close())
	}
	g := &Guest{GuestServiceClient: guestv1.NewGuestServiceClient(conn), conn: conn, t: t}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	nonce := bytes.Repeat([]byte("n"), 32)
	challenge, err := g.Challenge(ctx, &guestv1.ChallengeRequest{})
	if err != nil {
		_ = stream.Close() // also where the client never took it
		return nil, errors.Join(err, conn.Close())
	}
	g.Hello, err = g.GuestServiceClient.Hello(ctx, &guestv1.HelloRequest{
		Protocol: 1, Build: "test", MachineId: spec.MachineID, Nonce: nonce, Proof: proof(spec.Token, "berth broker", nonce, challenge.GetNonce()),
	})
	if err == nil && !hmac.Equal(g.Hello.GetProof(), proof(spec.Token, "berth guest", nonce, challenge.GetNonce())) {
		err = errors.New("who answered does not know the token")
	}
	if err != nil {
		_ = stream.Close() // also where the client never took it
		return nil, errors.Join(err, conn.Close())
	}
	t.Cleanup(g.Close)
	return g, nil
}

func proof(token []byte, who string, broker, guest []byte) []byte {
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte(who))
	mac.Write(broker)
	mac.Write(guest)
	return mac.Sum(nil)
}

// Close ends the connection.
func (g *Guest) Close() { _ = g.conn.Close() } // closed already is as good

// Result is how a command ended.
type Result struct {
	Code     int32
	Reason   string
	Out, Err string
}

// Run runs a command to its end.
func (g *Guest) Run(command *guestv1.Command) Result {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), waitTimeout)
	defer cancel()
	command.OutputLimitBytes, command.KillGrace = 1<<20, durationpb.New(time.Second)
	answer, err := g.GuestServiceClient.Run(ctx, &guestv1.RunRequest{
		Start:          &guestv1.StartRequest{JobId: "job_" + ulid.Make().String(), Command: command},
		MaxOutputBytes: 64 << 10, Forget: true,
	})
	if err != nil {
		g.t.Fatalf("running %v: %v", command, err)
	}
	outcome := answer.GetStatus().GetOutcome()
	return Result{
		Code: outcome.GetExitCode(), Reason: outcome.GetReason(),
		Out: string(answer.GetStdout().GetHead()), Err: string(answer.GetStderr().GetHead()),
	}
}

// Shell runs a script.
func (g *Guest) Shell(script string) Result {
	g.t.Helper()
	return g.Run(&guestv1.Command{Shell: script})
}

// shell runs a script and returns its output.
func (g *Guest) shell(script string) string {
	g.t.Helper()
	result := g.Shell(script)
	if result.Reason != "" {
		g.t.Errorf("running %q: %+v", script, result)
	}
	return result.Out
}

func (m *machine) connect(p providers.Provider) *Guest {
	m.Helper()
	return Connect(m, p, m.spec)
}
