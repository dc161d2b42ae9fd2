package guest

import (
	"testing"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// A caller that reads nothing has, until the windows of its connection are full, all that is sent to it in
// memory: here and in the guest.
func TestReadersThatReadNothingCostTheGuestLittle(t *testing.T) {
	t.Parallel()
	m := boot(t)
	for name, script := range map[string]string{
		"writes of one byte": "dd if=/dev/zero bs=1 count=1000000 status=none",
		"large writes":       "dd if=/dev/zero bs=1M count=100 status=none",
	} {
		t.Run(name, func(t *testing.T) {
			r := shell(script)
			m.begin(r)
			for range 12 {
				stream, err := m.calls.Attach(t.Context())
				must(t, err)
				open := &guestv1.AttachOpen{JobId: r.GetJobId()}
				must(t, stream.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: open}}))
			}
			m.wait(r.GetJobId())
			mib := m.memoryMiB()
			t.Logf("the guest took %d MiB", mib)
			if mib > maxGuestMiB {
				t.Errorf("the guest took %d MiB, want at most %d", mib, maxGuestMiB)
			}
		})
	}
}
