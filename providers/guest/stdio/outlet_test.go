package stdio

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/providers/guest/spool"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// From the moment when a byte is in the pipe until it is spooled something is on its way, wherever the byte
// is: a probe in between that sees silence would end the output before it.
func TestAByteOnItsWayIsNoSilence(t *testing.T) {
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(ends[0], true); err != nil {
		t.Fatal(err)
	}
	pipe := os.NewFile(uintptr(ends[1]), "command's end")
	stream := spool.New(spool.Options{Dir: t.TempDir(), Name: "stdout", Limit: 1 << 20})
	outlet := &Outlet{}
	outlet.Open(&Ends{outputs: [2]int{ends[0], noFile}}, 0)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		outlet.ReadInto(stream, nil, func() {})
	}()
	silent := 0
	for written := uint64(1); written <= 30_000; written++ {
		outlet.Touch(time.Now().Add(-time.Hour))
		if _, err := pipe.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		for {
			// Before the byte is spooled it is on its way, and after that it was read just now.
			if outlet.Quiet(time.Now()) >= time.Minute {
				silent++
			}
			if stream.Stats().GetTotalBytes() == written && !outlet.busy.Load() {
				break
			}
		}
	}
	if silent > 0 {
		t.Errorf("%d probes saw silence while a byte was on its way", silent)
	}
	if err := pipe.Close(); err != nil {
		t.Error(err)
	}
	<-ended
	stream.Seal()
}
