package api

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ending is how a command must end and what it must have written.
type ending struct {
	cause          berthv1.Cause
	code           int32
	status         *berthv1.WaitStatus // nil: none
	reason         string              // how it begins
	stdout, stderr string
}

// anything is whatever a command complains of.
const anything = "\x00anything"

func exited(code int32) ending {
	return ending{cause: berthv1.Cause_CAUSE_EXITED, code: code, status: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: uint32(code)}}}
}

func killedBy(signal uint32) ending {
	return ending{cause: berthv1.Cause_CAUSE_SIGNALED, code: 128 + int32(signal), status: bySignal(signal), reason: "signaled: "}
}

func timedOut(signal uint32) ending {
	return ending{cause: berthv1.Cause_CAUSE_TIMED_OUT, code: 124, status: bySignal(signal), reason: "timed_out: "}
}

func bySignal(signal uint32) *berthv1.WaitStatus {
	return &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Signal{Signal: signal}, SignalName: unix.SignalName(unix.Signal(signal))}
}

func failed(code int32, reason string) ending {
	return ending{cause: berthv1.Cause_CAUSE_FAILED_TO_START, code: code, reason: reason}
}

func (e ending) writing(stdout string) ending {
	e.stdout = stdout
	return e
}

func (e ending) complaining(stderr string) ending {
	e.stderr = stderr
	return e
}

// check compares what came with what must.
func (e ending) check(t *testing.T, how string, job *berthv1.Job, stdout, stderr string) {
	t.Helper()
	outcome := job.GetOutcome()
	status := outcome.GetWaitStatus()
	if status != nil {
		status = proto.CloneOf(status)
		status.CoreDumped = false // as the host is set up
	}
	if job.GetState() != berthv1.JobState_JOB_STATE_DONE || outcome.GetCause() != e.cause || outcome.Exit == nil ||
		outcome.GetExitCode() != e.code || !proto.Equal(status, e.status) || !strings.HasPrefix(outcome.GetReason(), e.reason) {
		t.Errorf("%s: it is %s and ended as %v, want %s, code %d, status %v, reason %q", how, job.GetState(), outcome, e.cause, e.code, e.status, e.reason)
	}
	if len(outcome.GetSurvivors()) > 0 || outcome.GetOutputStillOpen() {
		t.Errorf("%s: it left something: %v", how, outcome)
	}
	if stdout != e.stdout {
		t.Errorf("%s: stdout is %s, want %s", how, brief(stdout), brief(e.stdout))
	}
	if stderr != e.stderr && e.stderr != anything {
		t.Errorf("%s: stderr is %s, want %s", how, brief(stderr), brief(e.stderr))
	}
}

func brief(text string) string {
	if len(text) > 200 {
		return fmt.Sprintf("%q… of %d bytes", text[:200], len(text))
	}
	return fmt.Sprintf("%q", text)
}

// ends runs the command in each of the three ways and wants the same ending of all.
func ends(spec *berthv1.JobSpec, want ending) func(*testing.T, *ground) {
	return func(t *testing.T, g *ground) {
		ran, err := g.Jobs().RunCommand(g.ctx, &berthv1.RunCommandRequest{SandboxId: g.sandbox, Spec: spec})
		if err != nil {
			t.Fatal(err)
		}
		want.check(t, "run", ran.GetJob(), string(ran.GetStdout().GetHead()), string(ran.GetStderr().GetHead()))

		started, err := g.Jobs().StartJob(g.ctx, &berthv1.StartJobRequest{SandboxId: g.sandbox, Spec: spec})
		if err != nil {
			t.Fatal(err)
		}
		job := started.GetJob().GetId()
		done := g.wait(t, job)
		want.check(t, "detached", done, g.read(t, job, berthv1.Stream_STREAM_STDOUT), g.read(t, job, berthv1.Stream_STREAM_STDERR))

		attached, stdout, stderr := g.attached(t, g.sandbox, spec, nil)
		want.check(t, "attached", attached, stdout, stderr)
	}
}

// refused wants the command refused by its field in each of the three ways.
func refused(spec *berthv1.JobSpec, field string) func(*testing.T, *ground) {
	return func(t *testing.T, g *ground) {
		_, ran := g.Jobs().RunCommand(g.ctx, &berthv1.RunCommandRequest{SandboxId: g.sandbox, Spec: spec})
		_, started := g.Jobs().StartJob(g.ctx, &berthv1.StartJobRequest{SandboxId: g.sandbox, Spec: spec})
		_, attached := g.Exec(g.ctx, g.sandbox, spec, client.ExecIO{})
		for how, err := range map[string]error{"run": ran, "detached": started, "attached": attached} {
			wantReason(t, err, berthv1.Reason_REASON_INVALID_FIELD)
			want := field
			if how == "attached" {
				want = "start." + field
			}
			if violations := client.Violations(err); len(violations) != 1 || violations[0].GetField() != want {
				t.Errorf("%s: it is refused for %v, want %s: %v", how, violations, want, err)
			}
		}
	}
}

// read reads all of a job's stream.
func (w *harness) read(t *testing.T, job string, stream berthv1.Stream) string {
	t.Helper()
	data, gaps, err := w.ReadAllOutput(w.ctx, job, stream)
	if err != nil || len(gaps) > 0 {
		t.Fatalf("read %s of job %s: gaps %v, %v", stream, job, gaps, err)
	}
	return string(data)
}

// The commands of the table.

func shell(script string) *berthv1.JobSpec { return &berthv1.JobSpec{Shell: script} }

func argv(args ...string) *berthv1.JobSpec { return &berthv1.JobSpec{Argv: args} }

func in(dir string, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.Cwd = dir
	return spec
}

func as(user string, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.User = user
	return spec
}

func with(name, value string, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.Env = map[string]string{name: value}
	return spec
}

func variables(count int, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.Env = map[string]string{}
	for i := range count {
		spec.Env[fmt.Sprintf("VARIABLE_%d", i)] = "x"
	}
	return spec
}

func given(stdin string, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte(stdin)}}
	return spec
}

func merged(spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.MergeStderr = true
	return spec
}

// limited is a command that may take three seconds, and a little more to end itself: a machine under load
// must have come as far as the command's first words.
func limited(spec *berthv1.JobSpec, killGrace time.Duration) *berthv1.JobSpec {
	spec.Timeout, spec.KillGrace = durationpb.New(3*time.Second), durationpb.New(killGrace)
	return spec
}

func spooling(most uint64, spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.OutputLimitBytes = most
	return spec
}

func long(size int) string { return strings.Repeat("x", size) }

func many(count int, text string) []string {
	all := make([]string, count)
	for i := range all {
		all[i] = text
	}
	return all
}

// everyByte is every byte there is, over and over.
func everyByte(times int) string {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	return string(bytes.Repeat(every, times))
}

// inTurn writes a line to each stream, 2,000 times; numbered is what that comes to.
const inTurn = "i=0; while [ $i -lt 2000 ]; do echo o$i; echo e$i >&2; i=$((i+1)); done"

func numbered(prefixes ...string) string {
	var all strings.Builder
	for i := range 2000 {
		for _, prefix := range prefixes {
			fmt.Fprintf(&all, "%s%d\n", prefix, i)
		}
	}
	return all.String()
}
