package api

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// wellFormed refuses what protobuf lets through and no field of the API can mean: an enum's value without a
// name, and a duration or a time out of range. It names the field by its path.
func wellFormed(message protoreflect.Message) error { return wellFormedAt("", message) }

func wellFormedAt(prefix string, message protoreflect.Message) (err error) {
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		if field.IsMap() || field.Enum() == nil && field.Message() == nil {
			return true // no map of the API has messages or enums
		}
		path := prefix + string(field.Name())
		if !field.IsList() {
			err = wellFormedValue(path, field, value)
			return err == nil
		}
		for i := range value.List().Len() {
			if err = wellFormedValue(fmt.Sprintf("%s[%d]", path, i), field, value.List().Get(i)); err != nil {
				return false
			}
		}
		return true
	})
	return err
}

func wellFormedValue(path string, field protoreflect.FieldDescriptor, value protoreflect.Value) error {
	if enum := field.Enum(); enum != nil {
		if enum.Values().ByNumber(value.Enum()) != nil {
			return nil
		}
		var names []string
		for i := range enum.Values().Len() {
			if known := enum.Values().Get(i); known.Number() != 0 {
				names = append(names, string(known.Name()))
			}
		}
		return fault.Invalid(path, "%d is not one of %s", value.Enum(), strings.Join(names, ", "))
	}
	return wellFormedMessage(path, value.Message())
}

func wellFormedMessage(path string, message protoreflect.Message) error {
	var invalid error
	switch m := message.Interface().(type) {
	case *durationpb.Duration:
		invalid = m.CheckValid()
	case *timestamppb.Timestamp:
		invalid = m.CheckValid()
	case proto.Message:
		return wellFormedAt(path+".", message)
	}
	if invalid != nil {
		return fault.Invalid(path, "%v", invalid)
	}
	return nil
}
