package archtest

import (
	"go/ast"
	"go/token"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/berth-sandbox/berth/daemon/fault"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestTheBrokersReasonsAreTheAPIs(t *testing.T) {
	const prefix = "REASON_"
	reasons := fault.Reasons()
	if len(reasons) < 30 {
		t.Fatalf("saw only %d reasons", len(reasons))
	}
	for reason := range reasons {
		if berthv1.Reason_value[prefix+string(reason)] == 0 {
			t.Errorf("fault has the reason %s, berth.v1.Reason has not", reason)
		}
	}
	for number, name := range berthv1.Reason_name {
		if _, known := reasons[fault.Reason(strings.TrimPrefix(name, prefix))]; number != 0 && !known {
			t.Errorf("berth.v1.Reason has %s, fault has not", name)
		}
	}
}

// readingVerbs begin the names of calls that change nothing a lease, a generation or a request id
// could guard.
var readingVerbs = []string{"Get", "List", "Watch", "Read", "Poll", "Follow", "Diff", "Stat", "Download", "Glob", "Grep", "Backup"}

// unguarded are changing calls without the three fields, with the reason.
var unguarded = map[string]string{
	"berth.v1.AdminService.Fsck": "it repairs towards what the ledger says, and may always be repeated",
}

// guards are the fields that a changing request begins with: number by name.
var guards = map[protoreflect.Name]protoreflect.FieldNumber{"request_id": 1, "if_generation": 2, "lease": 3}

func TestNoMessageSaysOfAJobsIdTwiceThatItIsAJob(t *testing.T) {
	seen := 0
	for _, s := range checkout(t).sources {
		if s.test || !strings.HasPrefix(s.dir, "daemon/") && !strings.HasPrefix(s.dir, "client/") && !strings.HasPrefix(s.dir, "providers/guest") {
			continue
		}
		ast.Inspect(s.syntax, func(node ast.Node) bool {
			literal, ok := node.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			seen++
			if strings.Contains(" "+literal.Value, " job %s") || strings.HasPrefix(literal.Value, `"job %s`) {
				t.Errorf("%s: %s: the id begins with job_ already", s.place(node), literal.Value)
			}
			return true
		})
	}
	if seen < 1000 {
		t.Errorf("saw only %d texts", seen)
	}
}

func TestEveryChangingCallBeginsWithTheThreeGuards(t *testing.T) {
	seen := 0
	forEachMethod(func(method protoreflect.MethodDescriptor) {
		if unguarded[string(method.FullName())] != "" || slices.ContainsFunc(readingVerbs, func(verb string) bool {
			return strings.HasPrefix(string(method.Name()), verb)
		}) {
			return
		}
		seen++
		request := opening(method)
		for name, number := range guards {
			if field := request.Fields().ByName(name); field == nil || field.Number() != number {
				t.Errorf("%s changes something, and %s has no %s = %d", method.FullName(), request.FullName(), name, number)
			}
		}
	})
	if seen < 20 {
		t.Errorf("saw only %d changing calls", seen)
	}
}

func TestTheGuardsMeanTheSameWhereverTheyStand(t *testing.T) {
	seen := 0
	forEachMessage(func(message protoreflect.MessageDescriptor) {
		if !strings.HasSuffix(string(message.Name()), "Request") || message.Fields().ByName("request_id") == nil {
			return
		}
		seen++
		for name, number := range guards {
			if field := message.Fields().ByName(name); field == nil || field.Number() != number {
				t.Errorf("%s has a request_id, but no %s = %d", message.FullName(), name, number)
			}
		}
	})
	if seen < 20 {
		t.Errorf("saw only %d requests with a request_id", seen)
	}
}

// opening returns the message that opens a call: the request, or the first member of the oneof that a
// streamed request is.
func opening(method protoreflect.MethodDescriptor) protoreflect.MessageDescriptor {
	request := method.Input()
	if method.IsStreamingClient() && request.Oneofs().Len() > 0 {
		if first := request.Oneofs().Get(0).Fields().Get(0).Message(); first != nil {
			return first
		}
	}
	return request
}

func forEachFile(do func(protoreflect.FileDescriptor)) {
	protoregistry.GlobalFiles.RangeFilesByPackage("berth.v1", func(file protoreflect.FileDescriptor) bool {
		do(file)
		return true
	})
}

func forEachMethod(do func(protoreflect.MethodDescriptor)) {
	forEachFile(func(file protoreflect.FileDescriptor) {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				do(methods.Get(j))
			}
		}
	})
}

func forEachMessage(do func(protoreflect.MessageDescriptor)) {
	forEachFile(func(file protoreflect.FileDescriptor) {
		for i := range file.Messages().Len() {
			do(file.Messages().Get(i))
		}
	})
}
