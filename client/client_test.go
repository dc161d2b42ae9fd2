package client_test

import (
	"context"
	"io"
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
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// broker is a broker in memory whose process can be killed and started again on the same socket;
// what it knows outlives that, as a ledger does.
type broker struct {
	berthv1.UnimplementedSandboxServiceServer
	berthv1.UnimplementedJobServiceServer
	berthv1.UnimplementedAdminServiceServer

	t      *testing.T
	socket string
	server *grpc.Server
	served sync.WaitGroup

	mu      sync.Mutex
	calls   []string // request_ids of mutating calls, in order
	refuse  []error  // answered first, one a call
	job     *berthv1.Job
	output  []byte
	dropped [2]uint64 // [from, to) of output is gone
	changed chan struct{}
	entered chan struct{} // a token for every call that has begun

	commands []*command                      // what runs in the machine, which no kill of the broker ends
	listen   func(net.Listener) net.Listener // nil: connections hold
	attaches atomic.Int32                    // calls of Exec
}

func newBroker(t *testing.T) *broker {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth") // t.TempDir is too long for a socket with a long test name
	if err != nil {
		t.Fatal(err)
	}
	b := &broker{
		t: t, socket: filepath.Join(dir, "d.sock"), changed: make(chan struct{}), entered: make(chan struct{}, 1024),
		job: &berthv1.Job{Id: "job_1", SandboxId: "sb_1", State: berthv1.JobState_JOB_STATE_RUNNING},
	}
	b.start()
	t.Cleanup(func() {
		b.kill()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *broker) start() {
	b.t.Helper()
	listener, err := net.Listen("unix", b.socket)
	if err != nil {
		b.t.Fatal(err)
	}
	if b.listen != nil {
		listener = b.listen(listener)
	}
	b.server = grpc.NewServer()
	berthv1.RegisterSandboxServiceServer(b.server, b)
	berthv1.RegisterJobServiceServer(b.server, b)
	berthv1.RegisterAdminServiceServer(b.server, b)
	b.served.Go(func() { _ = b.server.Serve(listener) })
}

// kill cuts every call off, as a kill -9 does.
func (b *broker) kill() {
	b.server.Stop()
	b.served.Wait()
}

func (b *broker) dial(opts ...client.Option) *client.Client {
	b.t.Helper()
	c, err := client.Dial("unix://"+b.socket, opts...)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			b.t.Error(err)
		}
	})
	return c
}

// change changes what the broker knows and wakes the long polls.
func (b *broker) change(how func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	how()
	close(b.changed)
	b.changed = make(chan struct{})
}

// begin notes a call and returns the error that it is to be refused with.
func (b *broker) begin(requestID string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.entered <- struct{}{}
	b.calls = append(b.calls, requestID)
	if len(b.refuse) == 0 {
		return nil
	}
	err := b.refuse[0]
	b.refuse = b.refuse[1:]
	return err
}

func (b *broker) ids() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string{}, b.calls...)
}

func (b *broker) CreateSandbox(_ context.Context, r *berthv1.CreateSandboxRequest) (*berthv1.CreateSandboxResponse, error) {
	return &berthv1.CreateSandboxResponse{Sandbox: &berthv1.Sandbox{Id: "sb_1", Spec: r.GetSpec()}}, b.begin(r.GetRequestId())
}

func (b *broker) DestroySandbox(_ context.Context, r *berthv1.DestroySandboxRequest) (*berthv1.DestroySandboxResponse, error) {
	return &berthv1.DestroySandboxResponse{Sandbox: &berthv1.Sandbox{Id: r.GetSandboxId()}}, b.begin(r.GetRequestId())
}

func (b *broker) RunCommand(ctx context.Context, r *berthv1.RunCommandRequest) (*berthv1.RunCommandResponse, error) {
	if err := b.begin(r.GetRequestId()); err != nil {
		return nil, err
	}
	if r.GetSpec().GetShell() == "hang" {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return &berthv1.RunCommandResponse{Job: b.job}, nil
}

func (b *broker) GetInfo(context.Context, *berthv1.GetInfoRequest) (*berthv1.GetInfoResponse, error) {
	return &berthv1.GetInfoResponse{Version: "test"}, b.begin("")
}

func (b *broker) WatchEvents(*berthv1.WatchEventsRequest, grpc.ServerStreamingServer[berthv1.WatchEventsResponse]) error {
	return b.begin("")
}

func (b *broker) PollJob(ctx context.Context, r *berthv1.PollJobRequest) (*berthv1.PollJobResponse, error) {
	if err := b.begin(""); err != nil {
		return nil, err
	}
	timer := time.NewTimer(r.GetWait().AsDuration())
	defer timer.Stop()
	for {
		b.mu.Lock()
		job, changed := b.job, b.changed
		b.mu.Unlock()
		if c := b.command(func(c *command) bool { return c.id == r.GetJobId() }); c != nil && job.GetState() == berthv1.JobState_JOB_STATE_RUNNING {
			c.mu.Lock()
			job, changed = c.job, c.changed
			c.mu.Unlock()
		}
		if job.GetState() != berthv1.JobState_JOB_STATE_RUNNING {
			return &berthv1.PollJobResponse{Job: job}, nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return &berthv1.PollJobResponse{Job: job}, nil
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

func (b *broker) ReadJobOutput(ctx context.Context, r *berthv1.ReadJobOutputRequest) (*berthv1.ReadJobOutputResponse, error) {
	if err := b.begin(""); err != nil {
		return nil, err
	}
	timer := time.NewTimer(r.GetWait().AsDuration())
	defer timer.Stop()
	for {
		b.mu.Lock()
		reply, changed, err := b.chunk(r.GetOffset()), b.changed, b.expired(r.GetOffset())
		b.mu.Unlock()
		if err != nil || len(reply.GetData()) > 0 || reply.GetEof() {
			return reply, err
		}
		select {
		case <-changed:
		case <-timer.C:
			return reply, nil
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// chunk is up to 5 bytes of output, so that every read of a test takes many calls.
func (b *broker) chunk(offset uint64) *berthv1.ReadJobOutputResponse {
	total := uint64(len(b.output))
	end := min(total, offset+5)
	if offset < b.dropped[0] {
		end = min(end, b.dropped[0])
	}
	done := b.job.GetState() == berthv1.JobState_JOB_STATE_DONE
	reply := &berthv1.ReadJobOutputResponse{
		Offset: offset, NextOffset: max(end, offset), Eof: done && end >= total,
		Stats: &berthv1.OutputStats{TotalBytes: total, Sealed: done},
	}
	if offset < end {
		reply.Data = b.output[offset:end]
	}
	return reply
}

func (b *broker) expired(offset uint64) error {
	if offset < b.dropped[0] || offset >= b.dropped[1] {
		return nil
	}
	return failure(codes.OutOfRange, "OUTPUT_EXPIRED", &errdetails.ErrorInfo{
		Metadata: map[string]string{"first_kept": itoa(b.dropped[1])},
	})
}

func itoa(n uint64) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + itoa(n%10)
}

// failure is an error as a broker sends it.
func failure(code codes.Code, reason string, info *errdetails.ErrorInfo, more ...protoadapt.MessageV1) error {
	if info == nil {
		info = &errdetails.ErrorInfo{}
	}
	info.Domain, info.Reason = client.ErrorDomain, reason
	st, err := status.New(code, "the words of "+reason).WithDetails(append([]protoadapt.MessageV1{info}, more...)...)
	if err != nil {
		panic(err)
	}
	return st.Err()
}

func recovering(after time.Duration) error {
	return failure(codes.Unavailable, "RECOVERING", nil, &errdetails.RetryInfo{RetryDelay: durationpb.New(after)})
}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestAMutatingCallGetsARequestIDAndKeepsItOverRetries(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{recovering(time.Millisecond), recovering(time.Millisecond)}
	request := &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{Provider: "local"}}
	reply, err := b.dial().Sandboxes().CreateSandbox(testContext(t), request)
	if err != nil {
		t.Fatal(err)
	}
	ids := b.ids()
	if len(ids) != 3 || ids[0] == "" || ids[0] != ids[1] || ids[1] != ids[2] {
		t.Errorf("request ids of the tries: %q, want the same one three times", ids)
	}
	if request.GetRequestId() != "" {
		t.Errorf("the caller's message was changed: request_id %q", request.GetRequestId())
	}
	if reply.GetSandbox().GetSpec().GetProvider() != "local" {
		t.Errorf("the body was not sent: %v", reply)
	}
}

func TestWhichCallsAreRepeated(t *testing.T) {
	unreachable := failure(codes.Unavailable, "GUEST_UNREACHABLE", nil, &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Millisecond)})
	for _, test := range []struct {
		name    string
		refusal error
		call    func(context.Context, *client.Client) error
		tries   int
		first   string // the request_id of the first try; "*" is any
	}{
		{"a read is", recovering(time.Millisecond), func(ctx context.Context, c *client.Client) error {
			_, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
			return err
		}, 2, ""},
		{"a destroy is", unreachable, func(ctx context.Context, c *client.Client) error {
			_, err := c.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: "sb_1"})
			return err
		}, 2, "*"},
		{"a create with the caller's own request_id is, with that id", unreachable, func(ctx context.Context, c *client.Client) error {
			_, err := c.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{RequestId: "mine"})
			return err
		}, 2, "mine"},
		{"a command without a request_id is not, and gets none", unreachable, func(ctx context.Context, c *client.Client) error {
			_, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: "sb_1"})
			return err
		}, 1, ""},
		{"a command without a request_id is where nothing was done", recovering(time.Millisecond), func(ctx context.Context, c *client.Client) error {
			_, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: "sb_1"})
			return err
		}, 2, ""},
		{"a command with a request_id is", unreachable, func(ctx context.Context, c *client.Client) error {
			_, err := c.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: "sb_1", RequestId: "mine"})
			return err
		}, 2, "mine"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			b.refuse = []error{test.refusal}
			err := test.call(testContext(t), b.dial())
			if failed := err != nil; failed != (test.tries == 1) {
				t.Errorf("error %v after %d tries", err, test.tries)
			}
			ids := b.ids()
			if len(ids) != test.tries {
				t.Fatalf("%d tries, want %d", len(ids), test.tries)
			}
			if test.first == "*" && ids[0] == "" || test.first != "*" && ids[0] != test.first {
				t.Errorf("request_id %q, want %q", ids[0], test.first)
			}
		})
	}
}

func TestOtherErrorsAreNotRetried(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{failure(codes.ResourceExhausted, "QUOTA_EXCEEDED", nil,
		&errdetails.RetryInfo{RetryDelay: durationpb.New(3 * time.Second)})}
	_, err := b.dial().Admin().GetInfo(testContext(t), &berthv1.GetInfoRequest{})
	if client.Code(err) != codes.ResourceExhausted || len(b.ids()) != 1 {
		t.Errorf("%v after %d tries", err, len(b.ids()))
	}
	if after, ok := client.RetryAfter(err); !ok || after != 3*time.Second {
		t.Errorf("RetryAfter %v %v", after, ok)
	}
}

func TestRetryInfoIsHonoured(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{recovering(400 * time.Millisecond)}
	begun := time.Now()
	if _, err := b.dial().Admin().GetInfo(testContext(t), &berthv1.GetInfoRequest{}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took < 400*time.Millisecond {
		t.Errorf("came back after %v, asked for 400ms", took)
	}
}

func TestARetryBeyondTheRetryTimeoutIsNotWaitedFor(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{recovering(time.Hour)}
	_, err := b.dial().Admin().GetInfo(testContext(t), &berthv1.GetInfoRequest{})
	if !client.Is(err, berthv1.Reason_REASON_RECOVERING) {
		t.Errorf("got %v, want RECOVERING at once", err)
	}
}

func TestACallOutlastsARestart(t *testing.T) {
	b := newBroker(t)
	c := b.dial()
	ctx := testContext(t)
	if _, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{}); err != nil {
		t.Fatal(err)
	}
	b.kill()
	var restart sync.WaitGroup
	restart.Go(func() {
		time.Sleep(500 * time.Millisecond)
		b.start()
	})
	defer restart.Wait()
	if _, err := c.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{}); err != nil {
		t.Errorf("a read during the restart: %v", err)
	}
}

func TestACommandWaitsForTheConnectionButIsSentOnce(t *testing.T) {
	b := newBroker(t)
	b.kill()
	var restart sync.WaitGroup
	restart.Go(func() {
		time.Sleep(300 * time.Millisecond)
		b.start()
	})
	defer restart.Wait()
	c := b.dial()
	if _, err := c.Jobs().RunCommand(testContext(t), &berthv1.RunCommandRequest{SandboxId: "sb_1"}); err != nil {
		t.Errorf("a command before the broker is up: %v", err)
	}

	restart.Wait()
	failed := make(chan error, 1)
	<-b.entered
	go func() {
		_, err := c.Jobs().RunCommand(testContext(t), &berthv1.RunCommandRequest{Spec: &berthv1.JobSpec{Shell: "hang"}})
		failed <- err
	}()
	<-b.entered
	b.kill()
	err := <-failed
	b.start()
	if client.Code(err) != codes.Unavailable && client.Code(err) != codes.Canceled {
		t.Errorf("a command that was cut off: %v", err)
	}
	if calls := len(b.ids()); calls != 2 {
		t.Errorf("%d commands were sent, want 2", calls)
	}
}

func TestAnAbsentBrokerIsUnreachable(t *testing.T) {
	b := newBroker(t)
	b.kill()
	c := b.dial(client.WithRetryTimeout(time.Minute, 200*time.Millisecond))
	_, err := c.Admin().GetInfo(testContext(t), &berthv1.GetInfoRequest{})
	gone, ok := err.(*client.UnreachableError) //nolint:errorlint // the very type is promised
	if !ok || client.Code(err) != codes.Unavailable {
		t.Fatalf("got %v", err)
	}
	if want := "cannot reach berthd at unix://" + b.socket + ": connect: no such file or directory"; gone.Error() != want {
		t.Errorf("got %q, want %q", gone.Error(), want)
	}
	stream, err := c.Admin().WatchEvents(testContext(t), &berthv1.WatchEventsRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if client.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), b.socket) {
		t.Errorf("a stream: %v", err)
	}
	b.start()
}

func TestADeadlineBetweenTriesKeepsTheLastError(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{recovering(5 * time.Second)}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := b.dial().Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
	if client.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "the words of RECOVERING") {
		t.Errorf("got %v", err)
	}
}

func TestAStreamEndsAndFailsInTheSameWords(t *testing.T) {
	b := newBroker(t)
	b.refuse = []error{nil, failure(codes.OutOfRange, "REVISION_COMPACTED", nil)}
	c := b.dial()
	for _, want := range []string{"", "REVISION_COMPACTED"} {
		stream, err := c.Admin().WatchEvents(testContext(t), &berthv1.WatchEventsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = stream.Recv()
		if client.Reason(err) != want || want == "" && err != io.EOF { //nolint:errorlint // gRPC promises io.EOF itself
			t.Errorf("got %v, want reason %q", err, want)
		}
	}
}

func TestErrorHelpers(t *testing.T) {
	err := failure(codes.InvalidArgument, "INVALID_FIELD", &errdetails.ErrorInfo{Metadata: map[string]string{"k": "v"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "spec.image", Description: "too long"}}})
	if client.Reason(err) != "INVALID_FIELD" || client.Metadata(err)["k"] != "v" || !client.Is(err, berthv1.Reason_REASON_INVALID_FIELD) {
		t.Errorf("reason %q, metadata %v", client.Reason(err), client.Metadata(err))
	}
	if violations := client.Violations(err); len(violations) != 1 || violations[0].GetField() != "spec.image" {
		t.Errorf("violations %v", violations)
	}
	for _, other := range []error{nil, io.EOF, status.Error(codes.NotFound, "x")} {
		if client.Reason(other) != "" || client.Metadata(other) != nil || client.Violations(other) != nil ||
			client.Is(other, berthv1.Reason_REASON_UNSPECIFIED) {
			t.Errorf("%v has a reason", other)
		}
		if _, ok := client.RetryAfter(other); ok {
			t.Errorf("%v can be retried", other)
		}
	}
}
