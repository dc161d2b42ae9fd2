package vault

import (
	"cmp"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"math"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// HashVersion is the version of the walk that BodyHash makes; it is hashed too, and stored beside
// the hash. A change of a single byte of the walk is a new version.
const HashVersion uint32 = 1

// requestIDField is the field of a body that names the request and so is not part of it.
const requestIDField protoreflect.Name = "request_id"

// BodyHash returns 32 bytes that are equal for equal calls: an HMAC-SHA256 over HashVersion, the
// method (as "berth.v1.JobService/StartJob") and the body without its own field request_id. A nil
// body hashes like an empty one.
//
// The walk is our own, so that the hash does not depend on the library's version. Numbers are 8
// bytes, big-endian; lengths and field numbers are varints.
//
//	message   each populated field in the order of its number: number, value; then 0, and the
//	          length and bytes of the unknown fields as they came
//	list      length, then each element
//	map       length, then each key and value, in the order of the keys
//	string    length, bytes; bytes likewise
//	number    integer, enum and bool: the value; float and double: its bits as a double, one NaN
//
// A caller's terminal is no part of the work: of a TerminalSize only its presence and its unknown fields
// are hashed, and where there is one beside an environment, the entry TERM is not. So a command in a
// terminal is joined from another window too.
//
// Populated is what protobuf says: a field with presence that was set, even to its default, and any
// other that differs from its default. So what is set is told from what is not, exactly.
func (v *Vault) BodyHash(method string, body proto.Message) []byte {
	w := walker{mac: hmac.New(sha256.New, v.hashKey)}
	w.number(uint64(HashVersion))
	w.text([]byte(method))
	if body == nil {
		w.end(nil)
	} else {
		w.message(body.ProtoReflect(), true)
	}
	w.flush()
	return w.mac.Sum(nil)
}

// walker feeds a message to a hash, through a small buffer.
type walker struct {
	mac hash.Hash
	buf []byte
}

// flushBytes is how much is gathered before it is hashed.
const flushBytes = 4096

func (w *walker) flush() {
	_, _ = w.mac.Write(w.buf) // a hash never fails
	w.buf = w.buf[:0]
}

func (w *walker) varint(n uint64) {
	w.buf = binary.AppendUvarint(w.buf, n)
	if len(w.buf) >= flushBytes {
		w.flush()
	}
}

func (w *walker) number(n uint64) {
	w.buf = binary.BigEndian.AppendUint64(w.buf, n)
	if len(w.buf) >= flushBytes {
		w.flush()
	}
}

func (w *walker) text(text []byte) {
	w.varint(uint64(len(text)))
	w.buf = append(w.buf, text...)
	if len(w.buf) >= flushBytes {
		w.flush()
	}
}

// end closes a message.
func (w *walker) end(unknown []byte) {
	w.varint(0)
	w.text(unknown)
}

func (w *walker) message(m protoreflect.Message, top bool) {
	var fields []protoreflect.FieldDescriptor
	m.Range(func(field protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if isWork(m, field) && (!top || field.Name() != requestIDField) {
			fields = append(fields, field)
		}
		return true
	})
	slices.SortFunc(fields, func(a, b protoreflect.FieldDescriptor) int {
		return cmp.Compare(a.Number(), b.Number())
	})
	for _, field := range fields {
		w.varint(uint64(field.Number())) // #nosec G115 -- field numbers are positive
		switch value := m.Get(field); {
		case field.IsMap():
			w.dictionary(field, value.Map(), workKeys(m, field))
		case field.IsList():
			w.list(field, value.List())
		default:
			w.value(field, value)
		}
	}
	w.end(m.GetUnknown())
}

func (w *walker) list(field protoreflect.FieldDescriptor, list protoreflect.List) {
	w.varint(uint64(list.Len())) // #nosec G115 -- a length
	for i := range list.Len() {
		w.value(field, list.Get(i))
	}
}

// The names by which a caller's terminal is known in a body.
const (
	terminalSize  protoreflect.FullName = "berth.v1.TerminalSize"
	terminalField protoreflect.Name     = "tty"
	envField      protoreflect.Name     = "env"
	terminalKind                        = "TERM"
)

// isWork reports whether a populated field of m is part of the work.
func isWork(m protoreflect.Message, field protoreflect.FieldDescriptor) bool {
	if m.Descriptor().FullName() == terminalSize {
		return false
	}
	return !field.IsMap() || len(workKeys(m, field)) > 0
}

// workKeys returns the keys of m's map whose entries are part of the work.
func workKeys(m protoreflect.Message, field protoreflect.FieldDescriptor) []protoreflect.MapKey {
	tty := m.Descriptor().Fields().ByName(terminalField)
	inTerminal := field.Name() == envField && tty != nil && m.Has(tty)
	var keys []protoreflect.MapKey
	m.Get(field).Map().Range(func(key protoreflect.MapKey, _ protoreflect.Value) bool {
		if !inTerminal || key.String() != terminalKind {
			keys = append(keys, key)
		}
		return true
	})
	return keys
}

func (w *walker) dictionary(field protoreflect.FieldDescriptor, entries protoreflect.Map, keys []protoreflect.MapKey) {
	slices.SortFunc(keys, compareKeys(field.MapKey().Kind()))
	w.varint(uint64(len(keys)))
	for _, key := range keys {
		w.value(field.MapKey(), key.Value())
		w.value(field.MapValue(), entries.Get(key))
	}
}

// compareKeys returns the order of keys of a kind: of numbers, of bytes, false before true.
func compareKeys(kind protoreflect.Kind) func(a, b protoreflect.MapKey) int {
	switch kind {
	case protoreflect.StringKind:
		return func(a, b protoreflect.MapKey) int { return cmp.Compare(a.String(), b.String()) }
	case protoreflect.BoolKind:
		return func(a, b protoreflect.MapKey) int { return cmp.Compare(truth(a.Bool()), truth(b.Bool())) }
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind:
		return func(a, b protoreflect.MapKey) int { return cmp.Compare(a.Uint(), b.Uint()) }
	default:
		return func(a, b protoreflect.MapKey) int { return cmp.Compare(a.Int(), b.Int()) }
	}
}

func (w *walker) value(field protoreflect.FieldDescriptor, value protoreflect.Value) {
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		w.message(value.Message(), false)
	case protoreflect.StringKind:
		w.text([]byte(value.String()))
	case protoreflect.BytesKind:
		w.text(value.Bytes())
	case protoreflect.BoolKind:
		w.number(truth(value.Bool()))
	case protoreflect.EnumKind:
		w.number(uint64(int64(value.Enum()))) // #nosec G115 -- its bits
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		w.number(floatBits(value.Float()))
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind:
		w.number(value.Uint())
	default:
		w.number(uint64(value.Int())) // #nosec G115 -- its bits
	}
}

// floatBits are the bits of f, with one NaN for all.
func floatBits(f float64) uint64 {
	if math.IsNaN(f) {
		f = math.NaN()
	}
	return math.Float64bits(f)
}

func truth(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
