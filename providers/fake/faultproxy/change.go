package faultproxy

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// every stands in a path for each element of a list.
const every = "*"

// padField is the number of a field that no message has.
const padField = 9999

// idLetters are those of a job's id; the first of them can't be one of the larger ones.
const idLetters = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// change tells a lie in a reply and reports whether the reply gave occasion to it: it does not where a
// path leads into a part of a oneof that is not there, or through an empty list.
func (l Rule) change(reply []byte) (changed []byte, applies bool, err error) {
	kind, err := replyTo(l.Call)
	if err != nil {
		return nil, false, err
	}
	message := kind.New()
	if err := proto.Unmarshal(reply, message.Interface()); err != nil {
		return reply, false, nil //nolint:nilerr // an earlier rule has made nonsense of it
	}
	switch l.Kind {
	case Pad:
		return append(protowire.AppendTag(reply, padField, protowire.BytesType),
			protowire.AppendBytes(nil, make([]byte, l.Count))...), true, nil
	case Invent:
		list := message.Interface().(*guestv1.ListResponse)
		for range l.Count {
			list.Statuses = append(list.Statuses, &guestv1.Status{JobId: inventedID(), BootId: list.GetBootId(), StartTime: timestamppb.Now()})
		}
		applies = true
	default:
		for path, value := range l.Fields {
			did, err := l.reach(message, strings.Split(path, "."), value)
			if err != nil {
				return nil, false, fmt.Errorf("rule %q, %s: %w", l.ID, path, err)
			}
			applies = applies || did
		}
	}
	if !applies {
		return reply, false, nil
	}
	changed, err = proto.Marshal(message.Interface())
	return changed, true, err
}

// reach follows a path into a message and changes what it finds there.
func (l Rule) reach(message protoreflect.Message, path []string, value any) (bool, error) {
	field := message.Descriptor().Fields().ByName(protoreflect.Name(path[0]))
	rest := path[1:]
	if choice := field.ContainingOneof(); choice != nil && !choice.IsSynthetic() && !message.Has(field) {
		return false, nil
	}
	switch {
	case field.IsList() && l.Kind == Repeat && len(rest) == 0:
		return repeat(message.Mutable(field).List(), value)
	case field.IsList() && len(rest) > 0 && rest[0] == every:
		return l.reachElements(message.Mutable(field).List(), field, rest[1:], value)
	case len(rest) > 0:
		return l.reach(message.Mutable(field).Message(), rest, value)
	case l.Kind == Add:
		n, err := strconv.ParseInt(fmt.Sprint(value), 10, 64)
		if err != nil {
			return false, err
		}
		message.Set(field, added(field, message.Get(field), n))
		return true, nil
	default:
		made, err := valueOf(field, value)
		if err == nil {
			message.Set(field, made)
		}
		return err == nil, err
	}
}

func (l Rule) reachElements(list protoreflect.List, field protoreflect.FieldDescriptor, rest []string, value any) (applies bool, err error) {
	for i := range list.Len() {
		did := true
		if len(rest) > 0 {
			did, err = l.reach(list.Get(i).Message(), rest, value)
		} else {
			var made protoreflect.Value
			if made, err = valueOf(field, value); err == nil {
				list.Set(i, made)
			}
		}
		if err != nil {
			return false, err
		}
		applies = applies || did
	}
	return applies, nil
}

func repeat(list protoreflect.List, value any) (bool, error) {
	count, err := strconv.Atoi(fmt.Sprint(value))
	if err != nil {
		return false, err
	}
	if list.Len() == 0 {
		list.Append(list.NewElement())
	}
	for i := 0; list.Len() < count; i++ {
		list.Append(list.Get(i))
	}
	return true, nil
}

// added is a field's integer with another added, wrapped around as a careless guest's would be.
func added(field protoreflect.FieldDescriptor, now protoreflect.Value, n int64) protoreflect.Value {
	switch field.Kind() {
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(now.Uint() + uint64(n))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(now.Uint() + uint64(n)))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(now.Int() + n))
	default:
		return protoreflect.ValueOfInt64(now.Int() + n)
	}
}

// valueOf is a value of the script as one of a field.
func valueOf(field protoreflect.FieldDescriptor, value any) (protoreflect.Value, error) {
	switch v := value.(type) {
	case bool:
		return protoreflect.ValueOfBool(v), nil
	case string:
		if field.Kind() == protoreflect.BytesKind {
			return protoreflect.ValueOfBytes([]byte(v)), nil
		}
		return protoreflect.ValueOfString(v), nil
	case json.Number:
		return numberOf(field, v.String())
	default:
		return protoreflect.Value{}, fmt.Errorf("%v is no value of a field", value)
	}
}

func numberOf(field protoreflect.FieldDescriptor, text string) (protoreflect.Value, error) {
	switch field.Kind() {
	case protoreflect.Uint64Kind, protoreflect.Uint32Kind:
		n, err := strconv.ParseUint(text, 10, 64)
		if field.Kind() == protoreflect.Uint32Kind {
			return protoreflect.ValueOfUint32(uint32(n)), err
		}
		return protoreflect.ValueOfUint64(n), err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	switch field.Kind() {
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(n)), err
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(n)), err
	default:
		return protoreflect.ValueOfInt64(n), err
	}
}

// checkPath refuses a path that leads nowhere.
func checkPath(message protoreflect.MessageDescriptor, path string) error {
	parts := strings.Split(path, ".")
	for i := 0; i < len(parts); i++ {
		if message == nil {
			return fmt.Errorf("path %q: there is nothing in %q", path, parts[i-1])
		}
		field := message.Fields().ByName(protoreflect.Name(parts[i]))
		if field == nil {
			return fmt.Errorf("path %q: %s has no field %q", path, message.FullName(), parts[i])
		}
		if i+1 < len(parts) && field.IsList() {
			i++
			if parts[i] != every {
				return fmt.Errorf("path %q: want %q for the elements of %q", path, every, parts[i-1])
			}
		}
		message = field.Message()
	}
	return nil
}

func inventedID() string {
	random := make([]byte, 26)
	_, _ = rand.Read(random) // it never fails
	id := []byte("job_0")
	for _, b := range random[1:] {
		id = append(id, idLetters[int(b)%len(idLetters)])
	}
	return string(id)
}
