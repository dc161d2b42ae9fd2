package api

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/auth"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// served serves an API without anything below it, and returns a connection to it.
func served(t *testing.T, register func(*Server)) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	server := NewServer(auth.New(""), slog.New(slog.DiscardHandler))
	register(server)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("unix://"+listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func everything(server *Server) {
	Register(server, Options{Hasher: hasher{}})
	healthv1.RegisterHealthServer(server, health.NewServer())
}

// raw sends bytes as they are.
type raw struct{ encoding.CodecV2 }

func (raw) Name() string { return "raw" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

func within30s(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestEveryErrorOfTheServerHasAReason(t *testing.T) {
	conn := served(t, everything)
	ctx := within30s(t)
	invoke := func(method string, request, response any, options ...grpc.CallOption) error {
		return conn.Invoke(ctx, method, request, response, options...)
	}
	stream := func(method string, request any, options ...grpc.CallOption) error {
		s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, options...)
		if err != nil {
			return err
		}
		_ = s.SendMsg(request) // its error is io.EOF when the server has answered: RecvMsg tells
		_ = s.CloseSend()
		return s.RecvMsg(&berthv1.ExecResponse{})
	}
	bytes := grpc.ForceCodecV2(raw{encoding.GetCodecV2("proto")})
	const run, exec, start = "/berth.v1.JobService/RunCommand", "/berth.v1.JobService/Exec", "/berth.v1.JobService/StartJob"
	large := &berthv1.RunCommandRequest{Spec: &berthv1.JobSpec{Argv: []string{strings.Repeat("x", maxRequest)}}}
	for _, test := range []struct {
		name   string
		err    error
		code   codes.Code
		reason string
		field  string
	}{
		{"a message that is none", invoke(run, []byte("\xff\xff\xff"), &berthv1.RunCommandResponse{}, bytes), codes.InvalidArgument, "MALFORMED", ""},
		{"a text that is no UTF-8", invoke(run, []byte("\x0a\x01\xff"), &berthv1.RunCommandResponse{}, bytes), codes.InvalidArgument, "MALFORMED", ""},
		{"a message that is none, in a stream", stream(exec, []byte("\xff\xff\xff"), bytes), codes.InvalidArgument, "MALFORMED", ""},
		{"too large a message", invoke(run, large, &berthv1.RunCommandResponse{}), codes.ResourceExhausted, "TOO_LARGE", ""},
		{"too large a message in a stream", stream(exec, &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: &berthv1.ExecInput{Data: make([]byte, maxRequest)}}}), codes.ResourceExhausted, "TOO_LARGE", ""},
		{"a call that is not built yet", invoke("/berth.v1.SandboxService/ForkSandbox", &berthv1.ForkSandboxRequest{}, &berthv1.ForkSandboxResponse{}), codes.Unimplemented, "UNIMPLEMENTED", ""},
		{"a stream that is not built yet", stream("/berth.v1.JobService/WatchJobs", &berthv1.WatchJobsRequest{}), codes.Unimplemented, "UNIMPLEMENTED", ""},
		{"a service that is not built yet", invoke("/berth.v1.PoolService/GetPool", &berthv1.GetPoolRequest{}, &berthv1.GetPoolResponse{}), codes.Unimplemented, "UNIMPLEMENTED", ""},
		{"a call of no name", invoke("/berth.v1.JobService/None", &berthv1.GetPoolRequest{}, &berthv1.GetPoolResponse{}), codes.Unimplemented, "UNIMPLEMENTED", ""},
		{"a service of no name", invoke("/none.v1.None/None", &berthv1.GetPoolRequest{}, &berthv1.GetPoolResponse{}), codes.Unimplemented, "UNIMPLEMENTED", ""},
		{"the health of no service", invoke("/grpc.health.v1.Health/Check", &healthv1.HealthCheckRequest{Service: "none"}, &healthv1.HealthCheckResponse{}), codes.NotFound, "SERVICE_NOT_FOUND", ""},
		{"a bad field", invoke(run, &berthv1.RunCommandRequest{}, &berthv1.RunCommandResponse{}), codes.InvalidArgument, "INVALID_FIELD", "sandbox_id"},
		{"an enum's value without a name", invoke(start, &berthv1.StartJobRequest{Spec: &berthv1.JobSpec{OnDisconnect: 99}}, &berthv1.StartJobResponse{}), codes.InvalidArgument, "INVALID_FIELD", "spec.on_disconnect"},
		{"one of a list", invoke("/berth.v1.JobService/ListJobs", &berthv1.ListJobsRequest{States: []berthv1.JobState{3, 77}}, &berthv1.ListJobsResponse{}), codes.InvalidArgument, "INVALID_FIELD", "states[1]"},
		{"a duration of no length", invoke(start, &berthv1.StartJobRequest{Spec: &berthv1.JobSpec{Timeout: &durationpb.Duration{Seconds: 1, Nanos: -1}}}, &berthv1.StartJobResponse{}), codes.InvalidArgument, "INVALID_FIELD", "spec.timeout"},
		{"a duration of no length, in a stream", stream(exec, &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{Spec: &berthv1.JobSpec{KillGrace: &durationpb.Duration{Nanos: 1e9}}}}}), codes.InvalidArgument, "INVALID_FIELD", "start.spec.kill_grace"},
		{"a field of an attached command", stream(exec, &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: "sb_1"}}}), codes.InvalidArgument, "INVALID_FIELD", "start.spec"},
	} {
		got := status.Convert(test.err)
		info, field := &errdetails.ErrorInfo{}, ""
		for _, detail := range got.Details() {
			switch detail := detail.(type) {
			case *errdetails.ErrorInfo:
				info = detail
			case *errdetails.BadRequest:
				field = detail.GetFieldViolations()[0].GetField()
			}
		}
		if got.Code() != test.code || info.GetReason() != test.reason || info.GetDomain() != Domain || field != test.field {
			t.Errorf("%s: %v, reason %s, field %q", test.name, got, info.GetReason(), field)
		}
	}
}

// TestWhatGRPCAnswersByItself is about answers that no code of ours sees, as docs/limits.md says: they have their
// code, and no details.
func TestWhatGRPCAnswersByItself(t *testing.T) {
	conn := served(t, everything)
	const run = "/berth.v1.JobService/RunCommand"
	over := conn.Invoke(within30s(t), run, make([]byte, maxReceived+1), &berthv1.RunCommandResponse{}, grpc.ForceCodecV2(raw{encoding.GetCodecV2("proto")}))
	nameless := conn.Invoke(within30s(t), "nothing", &berthv1.GetInfoRequest{}, &berthv1.GetInfoResponse{})
	for _, test := range []struct {
		name string
		err  error
		code codes.Code
	}{
		{"a message over 32 MiB", over, codes.ResourceExhausted},
		{"a call without a service", nameless, codes.Unimplemented},
	} {
		if got := status.Convert(test.err); got.Code() != test.code || len(got.Details()) > 0 {
			t.Errorf("%s: %v, %v", test.name, got, got.Details())
		}
	}
}

// rpcLine is a call in a .proto file, and serviceLine the beginning of a service.
var (
	rpcLine     = regexp.MustCompile(`^\s*rpc (\w+)\(`)
	serviceLine = regexp.MustCompile(`^service (\w+) \{`)
)

// unbuilt reads the .proto files: every call, and whether its comment, or its service's, says that it is not built yet.
func unbuilt(t *testing.T) map[string]bool {
	t.Helper()
	calls := map[string]bool{}
	files, err := filepath.Glob("../../proto/berth/v1/*.proto")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		service, serviceUnbuilt, marked := "", false, false
		for line := range strings.Lines(string(text)) {
			comment, isComment := strings.CutPrefix(strings.TrimSpace(line), "//")
			switch {
			case isComment:
				marked = marked || strings.HasPrefix(comment, " Not built yet.")
				continue
			case serviceLine.MatchString(line):
				service, serviceUnbuilt = serviceLine.FindStringSubmatch(line)[1], marked
			case rpcLine.MatchString(line):
				calls["/berth.v1."+service+"/"+rpcLine.FindStringSubmatch(line)[1]] = serviceUnbuilt || marked
			}
			marked = false
		}
	}
	return calls
}

func TestWhatIsNotBuiltYetIsMarkedAndSaysSo(t *testing.T) {
	conn := served(t, everything)
	calls := unbuilt(t)
	built := 0
	for call, isUnbuilt := range calls {
		if !isUnbuilt {
			built++
			continue
		}
		t.Run(call, func(t *testing.T) {
			stream, err := conn.NewStream(within30s(t), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, call)
			if err != nil {
				t.Fatal(err)
			}
			_ = stream.SendMsg(&berthv1.GetInfoRequest{}) // an empty message is one of every kind
			_ = stream.CloseSend()
			got := status.Convert(stream.RecvMsg(&berthv1.GetInfoResponse{}))
			if info := infoOf(t, got); got.Code() != codes.Unimplemented || info.GetReason() != "UNIMPLEMENTED" || info.GetDomain() != Domain {
				t.Errorf("%v, %v", got, info)
			}
		})
	}
	if built < 20 || len(calls)-built < 10 {
		t.Errorf("saw %d calls, %d of them built", len(calls), built)
	}
}

// TestNothingThatIsBuiltIsMarkedAsNotBuilt reads the services' methods from the source: a promoted one of the generated
// Unimplemented…Server is not there.
func TestNothingThatIsBuiltIsMarkedAsNotBuilt(t *testing.T) {
	services := map[string]string{"sandboxes": "SandboxService", "jobService": "JobService", "providerService": "ProviderService", "admin": "AdminService"}
	method := regexp.MustCompile(`(?m)^func \(\w+ \*(\w+)\) ([A-Z]\w+)\(`)
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	built := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range method.FindAllStringSubmatch(string(text), -1) {
			built["/berth.v1."+services[found[1]]+"/"+found[2]] = true
		}
	}
	for call, isUnbuilt := range unbuilt(t) {
		if built[call] == isUnbuilt {
			t.Errorf("%s is built: %v; its comment says that it is not built yet: %v", call, built[call], isUnbuilt)
		}
	}
}

// fields calls visit with every field of a message and of those in it.
func fields(message protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool, visit func(protoreflect.FieldDescriptor)) {
	if seen[message.FullName()] {
		return
	}
	seen[message.FullName()] = true
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		visit(field)
		if field.Message() != nil {
			fields(field.Message(), seen, visit)
		}
	}
}

func TestNoMapOfARequestHoldsWhatWouldHaveToBeChecked(t *testing.T) {
	seen := map[protoreflect.FullName]bool{}
	for _, file := range []protoreflect.FileDescriptor{berthv1.File_berth_v1_job_proto, berthv1.File_berth_v1_sandbox_proto, berthv1.File_berth_v1_admin_proto} {
		for i := range file.Messages().Len() {
			if !strings.HasSuffix(string(file.Messages().Get(i).Name()), "Request") {
				continue
			}
			fields(file.Messages().Get(i), seen, func(field protoreflect.FieldDescriptor) {
				if field.IsMap() && (field.MapValue().Message() != nil || field.MapValue().Enum() != nil) {
					t.Errorf("wellFormed does not look into %s", field.FullName())
				}
			})
		}
	}
	if len(seen) < 30 {
		t.Errorf("saw %d messages", len(seen))
	}
}

func TestWhatIsWellFormedPasses(t *testing.T) {
	for _, message := range []proto.Message{
		&berthv1.StartJobRequest{Spec: &berthv1.JobSpec{Timeout: durationpb.New(time.Hour), OnDisconnect: berthv1.OnDisconnect_ON_DISCONNECT_KEEP, Env: map[string]string{"A": "b"}}},
		&berthv1.ListJobsRequest{States: []berthv1.JobState{0, 1, 2, 3, 4}}, &berthv1.GetInfoRequest{},
	} {
		if err := wellFormed(message.ProtoReflect()); err != nil {
			t.Errorf("%v: %v", message, err)
		}
	}
}
