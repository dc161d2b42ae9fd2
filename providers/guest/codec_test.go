package guest

import (
	"fmt"
	"testing"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Whoever sends output waits for its memory to come back: a chunk that is forgotten would stop its stream.
func TestTheBufferOfAChunkOfAnySizeComesBackOnce(t *testing.T) {
	for _, size := range []int{0, 1, 1023, 1024, 1025, 2048, 4096, 256 << 10} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			returned := 0
			encoded, err := newCodec().Marshal(&outgoingChunk{&berthv1.OutputChunk{Data: make([]byte, size)}, func() { returned++ }})
			must(t, err)
			if returned != 0 {
				t.Error("it came back before it was sent")
			}
			encoded.Free()
			if returned != 1 {
				t.Errorf("it came back %d times", returned)
			}
		})
	}
}
