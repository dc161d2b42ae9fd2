package api

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that codec wraps
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/daemon/fault"
)

// Limits of one request.
const (
	maxRequest = 4<<20 + 64<<10 // 2 MiB of argv, 1 MiB of environment, 1 MiB of stdin
	// maxReceived is what gRPC reads of a message, so that one over maxRequest gets an error with details;
	// beyond this gRPC refuses it in its own words.
	maxReceived = 32 << 20
)

// Server is a gRPC server all of whose calls, unary and streaming, of this API, of health and of
// reflection, go through one place: it finds out who calls, checks what was received, and turns every
// error into a status with details.
type Server struct {
	*grpc.Server
	authenticator *auth.Authenticator
	log           *slog.Logger
}

// NewServer returns a server without services.
func NewServer(authenticator *auth.Authenticator, log *slog.Logger, options ...grpc.ServerOption) *Server {
	s := &Server{authenticator: authenticator, log: log}
	s.Server = grpc.NewServer(append(options,
		grpc.MaxRecvMsgSize(maxReceived), grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			method, _ := grpc.MethodFromServerStream(stream)
			return s.serve(method, stream, func(grpc.ServerStream) error {
				return fault.New(fault.Unimplemented, "there is no call %s here: `grpcurl list` shows the services", method)
			})
		}))...)
	return s
}

// RegisterService registers a service. Its unary calls become streams of one message, which is what they
// are on the wire: so all calls can be treated alike.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, implementation any) {
	registered := *desc
	registered.Methods, registered.Streams = nil, slices.Clone(desc.Streams)
	for _, unary := range desc.Methods {
		registered.Streams = append(registered.Streams, grpc.StreamDesc{StreamName: unary.MethodName, Handler: func(service any, stream grpc.ServerStream) error {
			response, err := unary.Handler(service, stream.Context(), stream.RecvMsg, nil)
			if err != nil {
				return err
			}
			return stream.SendMsg(response)
		}})
	}
	for i := range registered.Streams {
		stream := &registered.Streams[i]
		method, handle := "/"+desc.ServiceName+"/"+stream.StreamName, stream.Handler
		stream.Handler = func(service any, stream grpc.ServerStream) error {
			return s.serve(method, stream, func(stream grpc.ServerStream) error { return handle(service, stream) })
		}
	}
	s.Server.RegisterService(&registered, implementation)
}

// serve answers a call.
func (s *Server) serve(method string, stream grpc.ServerStream, handle func(grpc.ServerStream) error) error {
	begin := time.Now()
	principal, err := s.authenticator.Authenticate(credential(stream.Context()))
	if err == nil {
		err = handle(&checkedStream{stream, auth.NewContext(stream.Context(), principal)})
	}
	if err == nil {
		s.log.Debug("call", "method", method, "principal", principal.Name, "took", time.Since(begin))
		return nil
	}
	mapped := toStatus(err)
	s.logFailure(stream.Context(), method, principal, mapped, err, time.Since(begin))
	return mapped.Err()
}

func credential(ctx context.Context) auth.Credential {
	credential := auth.Credential{Authorization: metadata.ValueFromIncomingContext(ctx, "authorization")}
	if from, ok := peer.FromContext(ctx); ok {
		credential.Network = from.Addr.Network()
	}
	return credential
}

// checkedStream is a call whose caller is known and whose messages are checked as they come.
type checkedStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // what a stream is for
}

func (c *checkedStream) Context() context.Context { return c.ctx }

func (c *checkedStream) RecvMsg(message any) error {
	m, ok := message.(proto.Message)
	if !ok {
		return c.ServerStream.RecvMsg(message)
	}
	decoded := &decoded{message: m}
	if err := c.ServerStream.RecvMsg(decoded); err != nil {
		return err
	}
	if decoded.err != nil {
		return decoded.err
	}
	return wellFormed(m.ProtoReflect())
}

// decoded is a message with what was wrong with it: gRPC would answer an error of the codec itself,
// without details.
type decoded struct {
	message proto.Message
	err     error
}

// codec is protobuf's, which notes the error of a received message.
type codec struct{ encoding.CodecV2 }

func (c codec) Unmarshal(data mem.BufferSlice, target any) error {
	r, ok := target.(*decoded)
	if !ok {
		return c.CodecV2.Unmarshal(data, target)
	}
	if data.Len() > maxRequest {
		r.err = fault.New(fault.TooLarge, "the message has %d bytes, and the limit is %d: put large data into a file or stdin", data.Len(), maxRequest).
			With("limit", itoa(maxRequest))
	} else if err := c.CodecV2.Unmarshal(data, r.message); err != nil {
		r.err = fault.New(fault.Malformed, "the message is no %s: %w: was it built with other protos?", r.message.ProtoReflect().Descriptor().FullName(), err)
	}
	return nil
}
