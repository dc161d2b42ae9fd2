package api

import (
	"errors"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// fits are the fields that take the extreme value of their type, with what it means there.
var fits = map[string]string{
	"page_size":          "more than 1000 is 1000",
	"spec.argv[0]":       "an argument may have 2 MiB; what the kernel does not take fails to start",
	"start.spec.argv[0]": "as spec.argv[0]",
}

// others are the fields whose extreme value is well formed, and refused for what it names.
var others = map[string]berthv1.Reason{
	"if_generation":       berthv1.Reason_REASON_OTHER_GENERATION,
	"start.if_generation": berthv1.Reason_REASON_OTHER_GENERATION,
	"lease.epoch":         berthv1.Reason_REASON_LEASE_LOST,
	"start.lease.epoch":   berthv1.Reason_REASON_LEASE_LOST,
}

// badValue is a request with one bad value.
type badValue struct {
	path    string // of the field
	what    string
	request protoreflect.Message
}

// badValues makes a request for each bad value of each of its fields.
func badValues(base proto.Message) []badValue {
	var all []badValue
	root := proto.Clone(base).ProtoReflect()
	walkFields(root, "", map[protoreflect.FullName]bool{}, func(in protoreflect.Message, field protoreflect.FieldDescriptor, path string) {
		for what, value := range extremes(field) {
			before := proto.Clone(in.Interface())
			at := path
			switch {
			case field.IsMap():
				in.Mutable(field).Map().Set(protoreflect.ValueOfString(what).MapKey(), value)
			case field.IsList():
				list := in.NewField(field)
				list.List().Append(value)
				in.Set(field, list)
				at += "[0]"
			default:
				in.Set(field, value)
			}
			all = append(all, badValue{at, what, proto.Clone(root.Interface()).ProtoReflect()})
			proto.Reset(in.Interface())
			proto.Merge(in.Interface(), before)
		}
	})
	return all
}

// walkFields visits the fields of a message and of those in it, which are made where they are missing.
func walkFields(in protoreflect.Message, prefix string, seen map[protoreflect.FullName]bool, visit func(protoreflect.Message, protoreflect.FieldDescriptor, string)) {
	fields := in.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		path := prefix + string(field.Name())
		if oneof := field.ContainingOneof(); oneof != nil && prefix == "" && field.Message() != nil && in.WhichOneof(oneof) != field {
			continue // another message of a stream
		}
		if field.IsMap() || field.IsList() || field.Message() == nil || isScalar(field.Message()) {
			visit(in, field, path)
			continue
		}
		if seen[field.FullName()] {
			continue
		}
		was := in.Has(field)
		if size, ok := in.Mutable(field).Message().Interface().(*berthv1.TerminalSize); ok {
			size.Cols, size.Rows = 80, 24
		}
		walkFields(in.Mutable(field).Message(), path+".", seen, visit)
		if !was {
			in.Clear(field)
		}
	}
}

// isScalar says of a message that it is one value.
func isScalar(message protoreflect.MessageDescriptor) bool {
	return message.FullName() == "google.protobuf.Duration" || message.FullName() == "google.protobuf.Timestamp"
}

// extremes are values of a field's type that no field can mean, or that are at its edge.
func extremes(field protoreflect.FieldDescriptor) map[string]protoreflect.Value {
	if field.IsMap() {
		if field.MapValue().Kind() != protoreflect.StringKind {
			return nil
		}
		return map[string]protoreflect.Value{strings.Repeat("k", 1<<20): protoreflect.ValueOfString("v"), "K": protoreflect.ValueOfString(strings.Repeat("v", 1<<20))}
	}
	number := func(n uint64) protoreflect.Value {
		if field.Kind() == protoreflect.Uint32Kind {
			return protoreflect.ValueOfUint32(uint32(n))
		}
		return protoreflect.ValueOfUint64(n)
	}
	duration := func(seconds int64, nanos int32) protoreflect.Value {
		return protoreflect.ValueOfMessage((&durationpb.Duration{Seconds: seconds, Nanos: nanos}).ProtoReflect())
	}
	switch field.Kind() {
	case protoreflect.EnumKind:
		return map[string]protoreflect.Value{"999": protoreflect.ValueOfEnum(999), "-1": protoreflect.ValueOfEnum(-1)}
	case protoreflect.StringKind:
		return map[string]protoreflect.Value{"1 MiB": protoreflect.ValueOfString(strings.Repeat("x", 1<<20))}
	case protoreflect.BytesKind:
		return map[string]protoreflect.Value{"over 1 MiB": protoreflect.ValueOfBytes(make([]byte, 1<<20+1))}
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		return map[string]protoreflect.Value{"the largest": number(math.MaxUint64)}
	case protoreflect.DoubleKind:
		return map[string]protoreflect.Value{
			"none": protoreflect.ValueOfFloat64(math.NaN()), "-1": protoreflect.ValueOfFloat64(-1), "endless": protoreflect.ValueOfFloat64(math.Inf(1)),
		}
	case protoreflect.MessageKind:
		if field.Message().FullName() == "google.protobuf.Timestamp" {
			return map[string]protoreflect.Value{"no time": protoreflect.ValueOfMessage((&timestamppb.Timestamp{Nanos: -1}).ProtoReflect())}
		}
		return map[string]protoreflect.Value{
			"negative": duration(-1, 0), "of two signs": duration(1, -1), "of too many nanoseconds": duration(0, 1e9), "longer than time": duration(1<<40, 0), "10,000 years": duration(315576000000, 0),
		}
	}
	return nil
}

// bases are valid requests of every call that is built and has fields; all others must be UNIMPLEMENTED.
func (w *harness) bases(sandbox, open, done string) map[string][]proto.Message {
	spec := func() *berthv1.JobSpec { return argv("true") }
	return map[string][]proto.Message{
		"SandboxService/CreateSandbox":  {&berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "https://example.com/r.git"}}}}},
		"SandboxService/GetSandbox":     {&berthv1.GetSandboxRequest{SandboxId: sandbox}},
		"SandboxService/ListSandboxes":  {&berthv1.ListSandboxesRequest{}},
		"SandboxService/SuspendSandbox": {&berthv1.SuspendSandboxRequest{SandboxId: sandbox}},
		"SandboxService/ResumeSandbox":  {&berthv1.ResumeSandboxRequest{SandboxId: sandbox}},
		"SandboxService/DestroySandbox": {&berthv1.DestroySandboxRequest{SandboxId: sandbox}},
		"JobService/RunCommand":         {&berthv1.RunCommandRequest{SandboxId: sandbox, Spec: spec()}},
		"JobService/StartJob":           {&berthv1.StartJobRequest{SandboxId: sandbox, Spec: spec()}},
		"JobService/Exec": {
			&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: sandbox, Spec: spec()}}},
			&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Reattach{Reattach: &berthv1.ExecReattach{JobId: done}}},
			&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: &berthv1.ExecInput{}}},
			&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Resize{Resize: &berthv1.TerminalSize{Cols: 80, Rows: 24}}},
		},
		"JobService/PollJob":            {&berthv1.PollJobRequest{JobId: done, Tails: true}},
		"JobService/ReadJobOutput":      {&berthv1.ReadJobOutputRequest{JobId: done}},
		"JobService/FollowJob":          {&berthv1.FollowJobRequest{JobId: done}},
		"JobService/WriteJobInput":      {&berthv1.WriteJobInputRequest{JobId: open, Data: []byte("x")}},
		"JobService/SignalJob":          {&berthv1.SignalJobRequest{JobId: open, Signal: 18}},
		"JobService/StopJob":            {&berthv1.StopJobRequest{JobId: open}},
		"JobService/ListJobs":           {&berthv1.ListJobsRequest{}},
		"ProviderService/ListProviders": {},
		"AdminService/GetInfo":          {},
		"AdminService/Fsck":             {},
		"AdminService/Backup":           {},
	}
}

// ask makes a call with one message, behind another where the call needs one first, and returns its error.
func (w *harness) ask(t *testing.T, method protoreflect.MethodDescriptor, messages ...proto.Message) error {
	t.Helper()
	name := "/" + string(method.Parent().FullName()) + "/" + string(method.Name())
	stream, err := w.Client.Conn().NewStream(w.ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, name)
	if err != nil {
		return err
	}
	for _, message := range messages {
		if err := stream.SendMsg(message); err != nil && !errors.Is(err, io.EOF) { // RecvMsg says why it ended
			t.Fatal(err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	output, err := protoregistry.GlobalTypes.FindMessageByName(method.Output().FullName())
	if err != nil {
		t.Fatal(err)
	}
	for {
		if err := stream.RecvMsg(output.New().Interface()); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

var inList = regexp.MustCompile(`\[\d+\]`)

// hasField says whether a path leads to a field of a message.
func hasField(message protoreflect.MessageDescriptor, path string) bool {
	for _, name := range strings.Split(inList.ReplaceAllString(path, ""), ".") {
		if message == nil {
			return false
		}
		field := message.Fields().ByName(protoreflect.Name(name))
		if field == nil {
			return false
		}
		message = field.Message()
	}
	return true
}

func TestEveryFieldRefusesWhatItCannotMeanByItsName(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: openStdin(argv("cat"))})
	if err != nil {
		t.Fatal(err)
	}
	done := w.start(t, sandbox, "echo out")
	w.wait(t, done.GetId())
	bases := w.bases(sandbox, reply.GetJob().GetId(), done.GetId())
	tried := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("berth.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				method := service.Methods().Get(j)
				call := string(service.Name()) + "/" + string(method.Name())
				requests, built := bases[call]
				if !built {
					input, err := protoregistry.GlobalTypes.FindMessageByName(method.Input().FullName())
					if err != nil {
						t.Fatal(err)
					}
					wantError(t, call, w.ask(t, method, input.New().Interface()), codes.Unimplemented, "UNIMPLEMENTED")
					continue
				}
				for _, base := range requests {
					for _, bad := range badValues(base) {
						tried++
						w.checkBad(t, method, call, bad, sandbox)
					}
				}
			}
		}
		return true
	})
	if tried < 200 {
		t.Errorf("tried only %d values", tried)
	}
	w.destroy(t, sandbox)
}

// checkBad makes a call with a bad value and looks at how it is refused.
func (w *harness) checkBad(t *testing.T, method protoreflect.MethodDescriptor, call string, bad badValue, sandbox string) {
	t.Helper()
	messages := []proto.Message{bad.request.Interface()}
	if exec, ok := messages[0].(*berthv1.ExecRequest); ok && exec.GetStart() == nil && exec.GetReattach() == nil {
		first := &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: sandbox, Spec: &berthv1.JobSpec{
			Argv: []string{"sleep", "1000"}, Tty: &berthv1.TerminalSize{Cols: 80, Rows: 24}, OnDisconnect: berthv1.OnDisconnect_ON_DISCONNECT_KILL,
			DisconnectGrace: durationpb.New(0),
		}}}}
		messages = []proto.Message{first, messages[0]}
	}
	name := call + " " + bad.path
	if len(bad.what) < 100 {
		name += " " + bad.what
	}
	err := w.ask(t, method, messages...)
	if fits[bad.path] != "" {
		if err != nil {
			t.Errorf("%s: %v, and it fits", name, err)
		}
		return
	}
	if reason := others[bad.path]; reason != 0 && status.Code(err) != codes.InvalidArgument {
		wantReason(t, err, reason)
		return
	}
	fields := wantError(t, name, err, codes.InvalidArgument, "INVALID_FIELD")
	if len(fields) == 0 {
		t.Errorf("%s: no field is named: %v", name, err)
	}
	for _, field := range fields {
		if !hasField(method.Input(), field) {
			t.Errorf("%s: %s has no field %s", name, method.Input().FullName(), field)
		}
		if field != bad.path && field != inList.ReplaceAllString(bad.path, "") && !strings.HasPrefix(bad.path, field+".") {
			t.Errorf("%s: it is said of %s: %v", name, field, err)
		}
	}
}

// wantError checks an error's code and reason, and returns the fields that it names.
func wantError(t *testing.T, name string, err error, code codes.Code, reason string) (fields []string) {
	t.Helper()
	info := &errdetails.ErrorInfo{}
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			info = detail
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				fields = append(fields, violation.GetField())
			}
		}
	}
	if status.Code(err) != code || info.GetReason() != reason || info.GetDomain() != "berth.v1" {
		t.Errorf("%s: %v, reason %q", name, err, info.GetReason())
	}
	return fields
}
