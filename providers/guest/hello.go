package guest

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"net"
	"os"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/launch"
)

const (
	protocol    = 1
	nonceLength = 32
	// brokerContext and guestContext keep one side's proof from being replayed as the other's.
	brokerContext = "berth broker"
	guestContext  = "berth guest"
)

// capabilities are what the broker may use; it gates on these names, never on versions.
var capabilities = []string{
	"run", "start", "attach", "read", "wait", "list.wait", "list.durable", "stop", "signal", "forget", "stdin.data", "stdin.open", "tty",
	"quiesce",
}

// identity is the machine as which the guest answers.
type identity struct {
	machineID   string
	token       []byte
	generation  uint64
	bootID      string
	workspace   string
	containment guestv1.Containment
	build       string
}

// connection is what the guest knows of one connection.
type connection struct {
	credentials.CommonAuthInfo
	challenge atomic.Pointer[[nonceLength]byte] // for the next Hello
	proved    atomic.Bool                       // Hello succeeded on it
}

// AuthType names the protocol.
func (*connection) AuthType() string { return "berth-hello" }

// connectionState is gRPC's hook for per-connection state: it leaves the bytes alone and gives each
// connection a state that its calls can find.
type connectionState struct{}

// ServerHandshake gives the connection its state.
func (connectionState) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, &connection{}, nil
}

// ClientHandshake is refused: the guest only serves.
func (connectionState) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("the guest only serves")
}

// Info describes it.
func (connectionState) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "berth-hello"}
}

// Clone returns itself, since it has no state.
func (s connectionState) Clone() credentials.TransportCredentials { return s }

// OverrideServerName is not used.
func (connectionState) OverrideServerName(string) error { return nil }

func connectionOf(ctx context.Context) *connection {
	if p, ok := peer.FromContext(ctx); ok {
		if c, ok := p.AuthInfo.(*connection); ok {
			return c
		}
	}
	return &connection{}
}

func authenticateUnary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	switch info.FullMethod {
	case guestv1.GuestService_Challenge_FullMethodName, guestv1.GuestService_Hello_FullMethodName:
	default:
		if !connectionOf(ctx).proved.Load() {
			return nil, errNoHello
		}
	}
	return handle(ctx, request)
}

func authenticateStream(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if !connectionOf(stream.Context()).proved.Load() {
		return errNoHello
	}
	return handle(server, stream)
}

var errNoHello = status.Error(codes.Unauthenticated, "the first call on a connection is Hello")

// Challenge gives the connection a nonce.
func (s *service) Challenge(ctx context.Context, _ *guestv1.ChallengeRequest) (*guestv1.ChallengeResponse, error) {
	nonce := new([nonceLength]byte)
	if _, err := rand.Read(nonce[:]); err != nil {
		return nil, status.Errorf(codes.Internal, "make a nonce: %v", err)
	}
	connectionOf(ctx).challenge.Store(nonce)
	return &guestv1.ChallengeResponse{Nonce: nonce[:]}, nil
}

// Hello opens a connection.
func (s *service) Hello(ctx context.Context, r *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	me, challenge := s.identity.Load(), connectionOf(ctx).challenge.Swap(nil)
	switch {
	case r.GetProtocol() != protocol:
		return nil, status.Errorf(codes.FailedPrecondition, "this guest speaks protocol %d, the broker %d: use builds that belong together", protocol, r.GetProtocol())
	case r.GetMachineId() != me.machineID:
		return nil, status.Errorf(codes.FailedPrecondition, "this is machine %s, not %s", me.machineID, r.GetMachineId())
	case len(r.GetNonce()) != nonceLength:
		return nil, status.Errorf(codes.InvalidArgument, "a nonce has %d bytes, not %d", nonceLength, len(r.GetNonce()))
	case challenge == nil:
		return nil, status.Error(codes.FailedPrecondition, "Hello needs a Challenge before it on the same connection")
	case !hmac.Equal(r.GetProof(), prove(me.token, brokerContext, r.GetNonce(), challenge[:])):
		return nil, status.Error(codes.Unauthenticated, "the proof is wrong: the broker does not know this machine's token")
	}
	connectionOf(ctx).proved.Store(true)
	return &guestv1.HelloResponse{
		Protocol:     protocol,
		Build:        me.build,
		Capabilities: capabilities,
		MachineId:    me.machineID,
		Proof:        prove(me.token, guestContext, r.GetNonce(), challenge[:]),
		BootId:       me.bootID,
		Containment:  me.containment,
		Workspace:    me.workspace,
		Shell:        launch.Shell(),
		Time:         timestamppb.Now(),
		Uid:          uint32(os.Getuid()),
		Platform:     platform,
		Generation:   me.generation,
	}, nil
}

// prove is one side's proof over both nonces, whose lengths are fixed.
func prove(token []byte, side string, broker, guest []byte) []byte {
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte(side))
	mac.Write(broker)
	mac.Write(guest)
	return mac.Sum(nil)
}
