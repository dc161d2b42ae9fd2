package connection

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// NewRequestID returns a fresh request_id.
func NewRequestID() string { return "rq_" + ulid.Make().String() }

// repeat is the unary interceptor: it gives mutating calls a request_id and repeats repeatable ones
// while the broker is away or not ready. A call that can't be repeated is sent as soon as there is a
// connection, and again only where the broker says that nothing was done.
func (c *Conn) repeat(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	request = withRequestID(request)
	try := func() error { return c.explain(invoke(ctx, method, request, reply, conn, opts...)) }
	again := WorthRepeating
	if !repeatable(request) {
		try = func() error {
			c.connect(ctx, conn)
			return c.explain(invoke(ctx, method, request, reply, conn, opts...))
		}
		again = nothingDone
	}
	var outage time.Time // when the first try failed
	for attempt := 0; ; attempt++ {
		err := try()
		if err == nil || !again(ctx, err) {
			return err
		}
		if outage.IsZero() {
			outage = time.Now()
		}
		wait := BackoffFor(attempt, err)
		if time.Since(outage)+wait > c.RetryTimeout() {
			return err
		}
		if !Pause(ctx, wait) {
			return endedWhileRetrying(ctx, err)
		}
	}
}

// openStream is the stream interceptor. Streams are not repeated: what they resume from is known to
// their reader only.
func (c *Conn) openStream(ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	c.connect(ctx, conn)
	stream, err := open(ctx, description, conn, method, opts...)
	if err != nil {
		return nil, c.explain(err)
	}
	return &explainedStream{ClientStream: stream, conn: c}, nil
}

// explainedStream gives a stream's errors the same form as a call's.
type explainedStream struct {
	grpc.ClientStream
	conn *Conn
}

// RecvMsg receives the next message.
func (s *explainedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if _, ok := status.FromError(err); !ok {
		return err // io.EOF is the end, not a failure
	}
	return s.conn.explain(err)
}

// RetryTimeout is for how long an outage is retried now.
func (c *Conn) RetryTimeout() time.Duration {
	if c.contact.lastAnswer().IsZero() {
		return c.options.initialTimeout
	}
	return c.options.retryTimeout
}

// connect waits until there is a connection, the retry timeout is over, or ctx ends; the call that
// follows says what is wrong.
func (c *Conn) connect(ctx context.Context, conn *grpc.ClientConn) {
	ctx, cancel := context.WithTimeout(ctx, c.RetryTimeout())
	defer cancel()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		conn.Connect()
		if !conn.WaitForStateChange(ctx, state) {
			return
		}
	}
}

// explain notes that the broker answered, and turns an UNAVAILABLE that no broker sent into an
// UnreachableError.
func (c *Conn) explain(err error) error {
	if err == nil {
		c.contact.answered()
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	switch {
	case Info(err) != nil:
		c.contact.answered()
	case st.Code() == codes.Unavailable:
		return c.contact.unreachable(st.Message())
	}
	return err
}

// withRequestID returns the request with a request_id if it mutates and has none. The caller's own
// message stays as it is.
func withRequestID(request any) any {
	switch mutating := request.(type) {
	case *berthv1.RunCommandRequest: // it would outlive its caller
		return request
	case *berthv1.WriteJobInputRequest:
		if !appends(mutating) { // its offset makes it repeatable
			return request
		}
	}
	message, ok := request.(proto.Message)
	if !ok {
		return request
	}
	original := message.ProtoReflect()
	field := requestIDField(original)
	if field == nil || original.Get(field).String() != "" {
		return request
	}
	numbered := original.New() // shares its fields with the original; both are only read from here on
	original.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		numbered.Set(field, value)
		return true
	})
	numbered.SetUnknown(original.GetUnknown())
	numbered.Set(field, protoreflect.ValueOfString(NewRequestID()))
	return numbered.Interface()
}

// repeatable says whether sending the request twice does the same as sending it once: it only reads
// (every mutating request has a request_id field), it bears a request_id, or it converges anyway.
func repeatable(request any) bool {
	switch mutating := request.(type) {
	case *berthv1.DestroySandboxRequest, *berthv1.StopJobRequest:
		return true
	case *berthv1.WriteJobInputRequest:
		return !appends(mutating) || mutating.GetRequestId() != ""
	}
	message, ok := request.(proto.Message)
	if !ok {
		return false
	}
	reflected := message.ProtoReflect()
	field := requestIDField(reflected)
	return field == nil || reflected.Get(field).String() != ""
}

// appends says whether a request writes behind what was written before, so that a second one would again.
func appends(request *berthv1.WriteJobInputRequest) bool {
	return request.GetPosition() == nil && (len(request.GetData()) > 0 || request.GetEof())
}

func requestIDField(message protoreflect.Message) protoreflect.FieldDescriptor {
	return message.Descriptor().Fields().ByName("request_id")
}

// WorthRepeating says whether another try can help: the broker is away or asks to come back. A
// CANCELED that ctx did not cause comes from a broker that is being stopped.
func WorthRepeating(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.Canceled
}

// nothingDone says whether another try can help a call that must not be done twice.
func nothingDone(ctx context.Context, err error) bool {
	return ctx.Err() == nil && Is(err, berthv1.Reason_REASON_RECOVERING)
}

// BackoffFor is how long to wait before the next try: what the broker asks for, else doubling, and
// spread so that many callers do not come back as one.
func BackoffFor(attempt int, err error) time.Duration {
	wait := maxBackoff
	if attempt < 16 {
		wait = min(minBackoff<<attempt, maxBackoff)
	}
	if asked, ok := RetryAfter(err); ok && asked > 0 {
		return asked + rand.N(asked/10+1) //nolint:gosec // spreads load, hides nothing
	}
	return wait/2 + rand.N(wait) //nolint:gosec // spreads load, hides nothing
}

// endedError is the error of a call or a wait whose context ended between two tries. Its code is
// that of the context's end.
type endedError struct {
	status *status.Status
	cause  error
}

func (e *endedError) Error() string              { return e.status.Message() }
func (e *endedError) Unwrap() error              { return e.cause }
func (e *endedError) GRPCStatus() *status.Status { return e.status }

// endedWhileRetrying keeps the last try's words.
func endedWhileRetrying(ctx context.Context, last error) error {
	st := status.FromContextError(ctx.Err())
	return &endedError{status: status.New(st.Code(), fmt.Sprintf("%s; the last try failed: %v", st.Message(), last)), cause: last}
}

// EndedWhile says what was being done when the context ended.
func EndedWhile(ctx context.Context, doing string) error {
	st := status.FromContextError(ctx.Err())
	return &endedError{status: status.New(st.Code(), doing+": "+st.Message()), cause: ctx.Err()}
}

// KeepWaiting says whether a waiting helper continues after err: the broker answers but is not ready,
// or it has been away for no longer than the retry timeout.
func (c *Conn) KeepWaiting(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	code := status.Code(err)
	switch {
	case code == codes.Unavailable && Info(err) != nil:
		return true
	case code == codes.Unavailable, code == codes.Canceled, code == codes.DeadlineExceeded:
		last := c.contact.lastAnswer()
		return !last.IsZero() && time.Since(last) < c.options.retryTimeout
	}
	return false
}

// Unanswered turns a long poll's own deadline into what it means: the broker did not answer.
func (c *Conn) Unanswered(ctx context.Context, err error) error {
	if ctx.Err() != nil || status.Code(err) != codes.DeadlineExceeded {
		return err
	}
	if gone := (*UnreachableError)(nil); errors.As(err, &gone) {
		return gone
	}
	return &UnreachableError{Address: c.address, Cause: fmt.Errorf("no answer within %v", PollWait+AnswerSlack)}
}
