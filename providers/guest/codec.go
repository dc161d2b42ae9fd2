package guest

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// The numbers of the fields that lead to a chunk's bytes: AttachResponse.chunk and OutputChunk.data.
const (
	chunkField protowire.Number = 2
	dataField  protowire.Number = 3
)

// minReturned is the capacity of the smallest buffer that gRPC gives back, in bytes: it forgets smaller ones,
// and whoever waits for them would wait for ever.
var minReturned = func() int {
	capacity := 1
	for mem.IsBelowBufferPoolingThreshold(capacity) {
		capacity *= 2
	}
	return capacity
}()

// outgoingChunk is an AttachResponse with output whose bytes are sent without a copy.
type outgoingChunk struct {
	chunk *berthv1.OutputChunk
	done  func() // called when the bytes are no longer needed
}

// codec is gRPC's own for protobuf, except that it does not copy output: the copy would cost more than
// everything else.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(encodingproto.Name)} }

// Marshal encodes a message.
func (c codec) Marshal(message any) (mem.BufferSlice, error) {
	out, ours := message.(*outgoingChunk)
	if !ours {
		return c.CodecV2.Marshal(message)
	}
	data := out.chunk.GetData()
	head, err := chunkHead(out.chunk)
	if err != nil {
		out.done()
		return nil, err
	}
	if mem.IsBelowBufferPoolingThreshold(cap(data)) {
		data = append(make([]byte, 0, minReturned), data...)
	}
	return mem.BufferSlice{mem.SliceBuffer(head), mem.NewBuffer(&data, returning(out.done))}, nil
}

// chunkHead encodes all of an AttachResponse with a chunk but the chunk's bytes, which come last.
func chunkHead(chunk *berthv1.OutputChunk) ([]byte, error) {
	rest, err := proto.Marshal(&berthv1.OutputChunk{Stream: chunk.GetStream(), Offset: chunk.GetOffset(), Time: chunk.GetTime()})
	if err != nil {
		return nil, fmt.Errorf("encode a chunk: %w", err)
	}
	length := uint64(len(chunk.GetData()))
	rest = protowire.AppendTag(rest, dataField, protowire.BytesType)
	rest = protowire.AppendVarint(rest, length)
	head := make([]byte, 0, len(rest)+16)
	head = protowire.AppendTag(head, chunkField, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(len(rest))+length)
	return append(head, rest...), nil
}

// returning is a pool of one buffer that calls a function when the buffer is returned.
type returning func()

// Get is never used: the buffer is there already.
func (returning) Get(length int) *[]byte {
	b := make([]byte, length)
	return &b
}

// Put gives the buffer back.
func (r returning) Put(*[]byte) { r() }

// attachStream is supervise's view of an Attach.
type attachStream struct {
	guestv1.GuestService_AttachServer
}

// SendChunk sends output; done is called when the chunk's bytes may change.
func (s attachStream) SendChunk(chunk *berthv1.OutputChunk, done func()) error {
	return s.SendMsg(&outgoingChunk{chunk, done})
}
