package guest

import (
	"os"
	"testing"

	"github.com/berth-sandbox/berth/conformance/testenv"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestACommandOfAnyUserCanReopenItsStreams(t *testing.T) {
	testenv.Root(t) // to run as others
	t.Parallel()
	m := boot(t)
	must(t, os.Chmod(m.dir, 0o755))
	for _, user := range []string{"", "root", "nobody", "4711"} {
		r := shell("cat /dev/stdin > /dev/stdout; cat /proc/self/fd/0; echo on > /proc/self/fd/1; echo error > /dev/stderr; echo again >> /dev/fd/1")
		r.Command.User = user
		r.Command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte("in\n")}}
		response := m.run(r)
		if out, errs := string(response.GetStdout().GetHead()), string(response.GetStderr().GetHead()); out != "in\non\nagain\n" || errs != "error\n" {
			t.Errorf("user %q: stdout %q, stderr %q, %v", user, out, errs, response.GetStatus().GetOutcome())
		}
	}
}
