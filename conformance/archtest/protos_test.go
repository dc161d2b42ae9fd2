package archtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/berth-sandbox/berth/conformance/testenv"
)

// TestTheProtosCompileWithAnOldCompiler uses the one in Debian 12's python3-grpc-tools, protoc 3.5, which
// knows less than any other that is still installed from a distribution.
func TestTheProtosCompileWithAnOldCompiler(t *testing.T) {
	python := testenv.GRPCTools(t)
	tree := checkout(t)
	files := protoFiles(t, tree)
	out := t.TempDir()
	set := filepath.Join(out, "set.binpb")
	run(t, tree.root, python, append([]string{
		"-m", "grpc_tools.protoc", "-Iproto", "--python_out=" + out, "--grpc_python_out=" + out,
		"--include_imports", "--descriptor_set_out=" + set,
	}, files...)...)

	t.Run("what it makes can be imported, and keeps what is absent apart from zero", func(t *testing.T) {
		run(t, out, python, "-c", `
from berth.v1 import job_pb2, job_pb2_grpc, sandbox_pb2_grpc, admin_pb2_grpc
from google.rpc import error_details_pb2, status_pb2
for message, oneof, field in (
    (job_pb2.JobSpec(), "keep", "keep_output"),
    (job_pb2.Outcome(), "exit", "exit_code"),
    (job_pb2.OutputStats(), "exit", "end_at_exit"),
):
    assert message.WhichOneof(oneof) is None, field
    setattr(message, field, 0)
    assert type(message).FromString(message.SerializeToString()).WhichOneof(oneof) == field, field`)
	})
	t.Run("google.rpc is the same on the wire as the one that the broker sends", func(t *testing.T) {
		data, err := os.ReadFile(set)
		if err != nil {
			t.Fatal(err)
		}
		var compiled descriptorpb.FileDescriptorSet
		if err := proto.Unmarshal(data, &compiled); err != nil {
			t.Fatal(err)
		}
		compareGoogleRPC(t, &compiled)
	})
}

// compareGoogleRPC compares the messages of proto/google/rpc with those that are linked into the broker.
func compareGoogleRPC(t *testing.T, compiled *descriptorpb.FileDescriptorSet) {
	t.Helper()
	linked := map[string]protoreflect.FileDescriptor{
		"google/rpc/status.proto":        rpcstatus.File_google_rpc_status_proto,
		"google/rpc/error_details.proto": errdetails.File_google_rpc_error_details_proto,
	}
	seen := 0
	for _, file := range compiled.GetFile() {
		of := linked[file.GetName()]
		if of == nil {
			continue
		}
		for _, message := range file.GetMessageType() {
			seen += compareMessages(t, message, of.Messages().ByName(protoreflect.Name(message.GetName())))
		}
	}
	if seen < 8 {
		t.Errorf("compared only %d messages", seen)
	}
}

// compareMessages compares the fields of a message, and of those in it, and returns how many messages that were.
func compareMessages(t *testing.T, shipped *descriptorpb.DescriptorProto, linked protoreflect.MessageDescriptor) int {
	t.Helper()
	if linked == nil {
		t.Errorf("google.rpc has no message %s", shipped.GetName())
		return 0
	}
	if have, want := len(shipped.GetField()), linked.Fields().Len(); have != want {
		t.Errorf("%s has %d fields, google.rpc's has %d", linked.FullName(), have, want)
	}
	for _, field := range shipped.GetField() {
		of := linked.Fields().ByNumber(protoreflect.FieldNumber(field.GetNumber()))
		switch {
		case of == nil:
			t.Errorf("%s has no field %d", linked.FullName(), field.GetNumber())
		case string(of.Name()) != field.GetName() || int(of.Kind()) != int(field.GetType()) || int(of.Cardinality()) != int(field.GetLabel()):
			t.Errorf("%s is %v %v %s, and shipped as %v", of.FullName(), of.Cardinality(), of.Kind(), of.Name(), field)
		}
	}
	seen := 1
	for _, inner := range shipped.GetNestedType() {
		seen += compareMessages(t, inner, linked.Messages().ByName(protoreflect.Name(inner.GetName())))
	}
	return seen
}

// protoFiles returns the paths, relative to proto/, of every .proto file.
func protoFiles(t *testing.T, tree tree) []string {
	t.Helper()
	var files []string
	for _, file := range tree.files {
		if inside, ok := strings.CutPrefix(file, "proto/"); ok && strings.HasSuffix(file, ".proto") {
			files = append(files, inside)
		}
	}
	if len(files) < 12 {
		t.Fatalf("saw only %d .proto files", len(files))
	}
	return files
}

func run(t *testing.T, dir, program string, args ...string) {
	t.Helper()
	command := exec.CommandContext(t.Context(), program, args...)
	command.Dir = dir
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
}
