package fault

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"testing"
	"time"
)

func TestEveryReasonHasAKindAndOnlyThose(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "fault.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	declared := 0
	ast.Inspect(file, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok {
			if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == "Reason" {
				declared++
			}
		}
		return true
	})
	if known := len(Reasons()); known != declared || known < 30 {
		t.Errorf("%d reasons are declared and %d have a kind", declared, known)
	}
	for reason, kind := range Reasons() {
		if kind < KindInternal || kind > KindDeadline {
			t.Errorf("%s has the kind %d", reason, kind)
		}
	}
}

func TestNobodyChangesTheListOfReasons(t *testing.T) {
	Reasons()[Internal] = KindInvalid
	if kinds[Internal] != KindInternal {
		t.Error("the list can be changed from outside")
	}
}

func TestAnErrorIsFoundThroughItsWrappings(t *testing.T) {
	cause := errors.New("the cause")
	err := New(QuotaExceeded, "make %s: %w", "it", cause)
	for name, wrapped := range map[string]error{
		"bare": err, "wrapped": fmt.Errorf("outer: %w", err), "joined": errors.Join(errors.New("other"), err),
	} {
		if !Is(wrapped, QuotaExceeded) || Is(wrapped, Internal) || KindOf(wrapped) != KindExhausted || !errors.Is(wrapped, cause) {
			t.Errorf("%s: %v", name, wrapped)
		}
	}
	if err.Error() != "make it: the cause" {
		t.Errorf("it says %q", err.Error())
	}
	for _, other := range []error{nil, cause} {
		if Is(other, Internal) || KindOf(other) != KindInternal {
			t.Errorf("%v has a reason", other)
		}
	}
}

func TestWhatIsAddedToAnError(t *testing.T) {
	err := New(PoolEmpty, "no machine").With("pool", "small").With("size", "0").Retry(time.Second)
	if err.Metadata["pool"] != "small" || err.Metadata["size"] != "0" || err.RetryAfter != time.Second {
		t.Errorf("it is %+v", err)
	}
	invalid := Invalid("spec.argv[0]", "must name %s", "a program")
	if invalid.Error() != "spec.argv[0]: must name a program" || invalid.Kind() != KindInvalid || len(invalid.Fields) != 1 ||
		invalid.Fields[0] != (Field{"spec.argv[0]", "must name a program"}) {
		t.Errorf("it is %+v", invalid)
	}
	if bare := New(Internal, "no cause"); bare.Unwrap() != nil {
		t.Errorf("it is caused by %v", bare.Unwrap())
	}
}
