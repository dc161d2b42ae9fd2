package cli

import (
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// fullDisk is an output that has no room.
var fullDisk = writerFunc(func([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "/dev/stdout", Err: syscall.ENOSPC}
})

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(data []byte) (int, error) { return f(data) }

func TestOutputThatCannotBeWrittenIsAnErrorOfEveryCommand(t *testing.T) {
	for _, line := range []string{
		"create", "create -o json", "ls", "ls -o json", "ls -o id", "get " + sbLive, "get -o json " + sbLive, "suspend " + sbLive, "resume " + sbLive,
		"rm " + sbLive, "run -- stream", "exec " + sbLive + " -- stream", "exec -o json " + sbLive + " -- true", "exec -o id " + sbLive + " -- true",
		"start " + sbLive + " -- true", "start -o json " + sbLive + " -- true", "attach --from-start " + jobDone, "poll " + jobDone, "poll -o json " + jobDone,
		"wait " + jobDone, "wait -o json " + jobDone, "logs " + jobDone, "logs -f " + jobDone, "logs -o json " + jobDone, "logs -f -o json " + jobDone,
		"jobs", "jobs -o json", "stop " + jobRuns, "signal " + jobRuns + " HUP", "providers", "providers -o json", "info", "info -o json",
		"fsck", "fsck -o json", "backup -", "version", "version -o json", "--version", "--help", "help", "help create", "create --help", "completion bash",
	} {
		t.Run(line, func(t *testing.T) {
			b := newBroker(t)
			b.change(func() { b.output[jobRuns] = [2][]byte{} })
			s := b.shell()
			s.stdoutTo = fullDisk
			code := s.run(t, strings.Fields(line)...)
			if code != usage.ExitFailure && code != usage.ExitBroker || !strings.Contains(s.stderr.String(), "no space left on device") {
				t.Errorf("exit %d, stderr %q", code, s.stderr.String())
			}
		})
	}
}

func TestErrorsThatCannotBeWrittenAreNotLostInTheExitCode(t *testing.T) {
	for _, test := range []struct {
		line string
		code int
	}{
		{"exec " + sbLive + " -- daemon", usage.ExitBroker}, // which says what was left running
		{"run --keep -- true", usage.ExitBroker},            // which says what was kept
		{"logs " + jobDone, usage.ExitFailure},              // which had stderr
		{"exec " + sbLive + " -- fail", 42},                 // which says nothing
		{"ls", 0},
	} {
		b := newBroker(t)
		s := b.shell()
		s.stderrTo = fullDisk
		if code := s.run(t, strings.Fields(test.line)...); code != test.code {
			t.Errorf("%s: exit %d, stdout %q", test.line, code, s.stdout.String())
		}
	}
}

// lateDisk takes everything and says at the end that it had no room.
type lateDisk struct{ io.Writer }

func (lateDisk) Close() error {
	return &os.PathError{Op: "close", Path: "/dev/stdout", Err: syscall.EDQUOT}
}

func TestAnOutputThatFailsOnlyWhenItIsClosedIsAnError(t *testing.T) {
	b := newBroker(t)
	s := b.shell()
	s.stdoutTo = lateDisk{io.Discard}
	if code := s.run(t, "ls"); code != usage.ExitFailure || !strings.Contains(s.stderr.String(), "disk quota exceeded") {
		t.Errorf("exit %d, stderr %q", code, s.stderr.String())
	}
}

func TestAnInputThatCannotBeReadIsAnError(t *testing.T) {
	for _, args := range [][]string{
		{"exec", "-i", sbLive, "--", "hang"}, {"exec", "-i", "-o", "json", sbLive, "--", "true"}, {"input", "0NEW"}, {"attach", "-i", "0NEW"},
	} {
		b := newBroker(t)
		b.change(func() {
			b.live = b.beginLive(&berthv1.ExecStart{SandboxId: sbLive, Spec: &berthv1.JobSpec{
				Argv: []string{"deaf"}, Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}},
			}})
			if args[0] == "exec" {
				b.jobs = b.jobs[:len(b.jobs)-1]
			}
		})
		s := b.shell()
		s.stdin = brokenInput{}
		if code := s.run(t, args...); code == 0 || !strings.Contains(s.stderr.String(), "bad file descriptor") {
			t.Errorf("%v: exit %d, stderr %q", args, code, s.stderr.String())
		}
	}
}

// brokenInput is an input that was closed.
type brokenInput struct{}

func (brokenInput) Read([]byte) (int, error) { return 0, syscall.EBADF }
