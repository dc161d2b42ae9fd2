package command

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRemediesFitWhyTheBrokerCannotBeReached(t *testing.T) {
	for want, cause := range map[string]error{
		"you may not use that socket: run this as its owner": &os.SyscallError{Syscall: "connect", Err: syscall.EACCES},
		"to your broker's own address":                       fmt.Errorf("/tmp/berth-1: %w", client.ErrOthersSocket),
		"start it with `berthd`":                             &os.SyscallError{Syscall: "connect", Err: syscall.ECONNREFUSED},
	} {
		said := (&Program{}).Explain(&client.UnreachableError{Address: "unix:///d.sock", Cause: cause})
		if !strings.Contains(said, want) || strings.Count(said, "(") != 1 {
			t.Errorf("said %q, want %q", said, want)
		}
	}
}
