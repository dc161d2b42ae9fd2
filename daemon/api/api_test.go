package api

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// documented reads the gRPC code and the metadata that the comment of each reason promises.
func documented(t *testing.T) map[fault.Reason]string {
	t.Helper()
	source, err := os.ReadFile("../../proto/berth/v1/common.proto")
	if err != nil {
		t.Fatal(err)
	}
	found := map[fault.Reason]string{}
	for _, match := range regexp.MustCompile(`(?m)^  // ([A-Z_]+):[^\n]*\n(?:  // [^\n]*\n)*  REASON_([A-Z_]+) = \d+;`).FindAllStringSubmatch(string(source), -1) {
		found[fault.Reason(match[2])] = match[1]
	}
	return found
}

func TestEveryReasonHasTheCodeThatItsCommentSays(t *testing.T) {
	promised := documented(t)
	for reason := range fault.Reasons() {
		var code codes.Code
		if err := code.UnmarshalJSON([]byte(`"` + promised[reason] + `"`)); err != nil {
			t.Errorf("%s: its comment begins with %q, which is no code", reason, promised[reason])
			continue
		}
		got := toStatus(fmt.Errorf("wrapped: %w", fault.New(reason, "words")))
		if got.Code() != code {
			t.Errorf("%s: its code is %s, its comment says %s", reason, got.Code(), code)
		}
		if info := infoOf(t, got); info.GetReason() != string(reason) || info.GetDomain() != "berth.v1" {
			t.Errorf("%s: its info is %v", reason, info)
		}
		if _, known := berthv1.Reason_value["REASON_"+string(reason)]; !known {
			t.Errorf("%s is not in the proto", reason)
		}
	}
	if len(promised) != len(fault.Reasons()) {
		t.Errorf("%d reasons in the proto, %d in the broker", len(promised), len(fault.Reasons()))
	}
}

func infoOf(t *testing.T, s *status.Status) *errdetails.ErrorInfo {
	t.Helper()
	for _, detail := range s.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	t.Errorf("%v has no ErrorInfo", s)
	return nil
}

func TestOtherErrorsAreWhatTheyAre(t *testing.T) {
	for _, test := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"a caller that went away", fmt.Errorf("waiting: %w", context.Canceled), codes.Canceled},
		{"a deadline", fmt.Errorf("waiting: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{"a call that generated code does not have", status.Error(codes.Unimplemented, "not here"), codes.Unimplemented},
		{"a status of no known reason", status.Error(codes.DataLoss, "lost"), codes.Internal},
		{"a defect", errors.New("oops"), codes.Internal},
		{"a reason that nobody knows", fault.New("WHO_KNOWS", "oops"), codes.Internal},
	} {
		got := toStatus(test.err)
		if got.Code() != test.want {
			t.Errorf("%s: %v", test.name, got)
		}
		if infoOf(t, got).GetReason() == "" {
			t.Errorf("%s: it has no reason", test.name)
		}
	}
	if info := infoOf(t, toStatus(errors.New("oops"))); info.GetReason() != string(fault.Internal) {
		t.Errorf("a defect has the reason %q", info.GetReason())
	}
	for code, reason := range reasons {
		got := toStatus(status.Error(code, "words"))
		if info := infoOf(t, got); got.Code() != code || info.GetReason() != string(reason) || got.Message() != "words" {
			t.Errorf("a status %s is %v with the reason %q", code, got, info.GetReason())
		}
	}
}

func TestDetailsAreThereAndSmallHoweverMuchIsSaid(t *testing.T) {
	const limit = 4 << 10
	for name, words := range map[string]string{
		"letters of one byte": strings.Repeat("x", 1<<20), "letters of two bytes": "x" + strings.Repeat("ü", 1<<19),
		"letters of two bytes, shifted": strings.Repeat("ü", 1<<19), "letters of four bytes": "xyz" + strings.Repeat("😀", 1<<18),
		"no letters": strings.Repeat("\xff\xfe", 1<<19), "one that is no letter": "a\xffb", "nothing": "",
	} {
		for kind, err := range map[string]*fault.Error{
			"a precondition":  fault.New(fault.CapabilityMissing, "%s", words).With("provider", words).With("capability", words),
			"a bad field":     fault.Invalid(words, "%s", words),
			"one to retry":    fault.New(fault.Recovering, "%s", words).Retry(time.Second),
			"with a subject":  fault.New(fault.WrongState, "%s", words).With("sandbox_id", words).With("state", words).With("wanted", words),
			"what is missing": fault.New(fault.SandboxNotFound, "%s", words).With("sandbox_id", words),
		} {
			got := toStatus(err)
			if len(got.Details()) < 1 {
				t.Errorf("%s, %s: no details", name, kind)
			}
			if len(got.Message()) > limit {
				t.Errorf("%s, %s: a message of %d bytes", name, kind, len(got.Message()))
			}
			for _, detail := range got.Proto().GetDetails() {
				if size := proto.Size(detail); size > limit {
					t.Errorf("%s, %s: a detail %s of %d bytes", name, kind, detail.GetTypeUrl(), size)
				}
			}
		}
	}
}

func TestARetryIsSaidInRetryInfoAndAStateInPreconditionFailure(t *testing.T) {
	var retry *errdetails.RetryInfo
	for _, detail := range toStatus(fault.New(fault.Recovering, "soon").Retry(1500 * time.Millisecond)).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			retry = info
		}
	}
	if retry.GetRetryDelay().AsDuration() != 1500*time.Millisecond {
		t.Errorf("retry is %v", retry)
	}
	var failure *errdetails.PreconditionFailure
	for _, detail := range toStatus(fault.New(fault.WrongState, "stopped").With("sandbox_id", "sb_1")).Details() {
		if info, ok := detail.(*errdetails.PreconditionFailure); ok {
			failure = info
		}
	}
	if v := failure.GetViolations(); len(v) != 1 || v[0].GetType() != "WRONG_STATE" || v[0].GetSubject() != "sandbox_id/sb_1" || v[0].GetDescription() != "stopped" {
		t.Errorf("the failure is %v", failure)
	}
}

// hasher stands where the vault does in the broker.
type hasher struct{}

func (hasher) BodyHash(method string, body proto.Message) []byte {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(body)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(append([]byte(method), data...))
	return sum[:]
}

func services() (*sandboxes, *jobService) {
	a := &api{Options{Hasher: hasher{}}}
	return &sandboxes{api: a}, &jobService{api: a}
}

// refused is a call that must be refused for one field before any package below is asked: there is none
// here, so that asking one would be a panic.
type refused struct {
	name  string
	call  func(*sandboxes, *jobService) error
	field string
}

func createSandbox(change func(*berthv1.CreateSandboxRequest)) func(*sandboxes, *jobService) error {
	return func(s *sandboxes, _ *jobService) error {
		request := &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{}}
		change(request)
		_, err := s.CreateSandbox(context.Background(), request)
		return err
	}
}

func spec(change func(*berthv1.SandboxSpec)) func(*sandboxes, *jobService) error {
	return createSandbox(func(r *berthv1.CreateSandboxRequest) { change(r.GetSpec()) })
}

func repo(change func(*berthv1.Repo)) func(*sandboxes, *jobService) error {
	return spec(func(s *berthv1.SandboxSpec) {
		s.Workspace = &berthv1.Workspace{Repo: &berthv1.Repo{Url: "https://example.com/r.git"}}
		change(s.GetWorkspace().GetRepo())
	})
}

// job gives the same spec to each call that takes one.
func job(change func(*berthv1.JobSpec)) []func(*sandboxes, *jobService) error {
	made := func() *berthv1.JobSpec {
		s := &berthv1.JobSpec{Argv: []string{"true"}}
		change(s)
		return s
	}
	return []func(*sandboxes, *jobService) error{
		func(_ *sandboxes, j *jobService) error {
			_, err := j.RunCommand(context.Background(), &berthv1.RunCommandRequest{SandboxId: "sb_1", Spec: made()})
			return err
		},
		func(_ *sandboxes, j *jobService) error {
			_, err := j.StartJob(context.Background(), &berthv1.StartJobRequest{SandboxId: "sb_1", Spec: made()})
			return err
		},
		execs(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: "sb_1", Spec: made()}}}),
	}
}

// execs makes an Exec whose caller sends these messages.
func execs(messages ...*berthv1.ExecRequest) func(*sandboxes, *jobService) error {
	return func(_ *sandboxes, j *jobService) error {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		return j.Exec(&caller{ctx: ctx, messages: messages})
	}
}

// caller is the other end of an Exec.
type caller struct {
	grpc.ServerStream
	ctx      context.Context
	messages []*berthv1.ExecRequest
}

func (c *caller) Context() context.Context         { return c.ctx }
func (c *caller) Send(*berthv1.ExecResponse) error { return nil }
func (c *caller) SetHeader(metadata.MD) error      { return nil }

func (c *caller) Recv() (*berthv1.ExecRequest, error) {
	if len(c.messages) == 0 {
		return nil, io.EOF
	}
	first := c.messages[0]
	c.messages = c.messages[1:]
	return first, nil
}

func poll(change func(*berthv1.PollJobRequest)) func(*sandboxes, *jobService) error {
	return func(_ *sandboxes, j *jobService) error {
		request := &berthv1.PollJobRequest{JobId: "job_1"}
		change(request)
		_, err := j.PollJob(context.Background(), request)
		return err
	}
}

func read(change func(*berthv1.ReadJobOutputRequest)) func(*sandboxes, *jobService) error {
	return func(_ *sandboxes, j *jobService) error {
		request := &berthv1.ReadJobOutputRequest{JobId: "job_1"}
		change(request)
		_, err := j.ReadJobOutput(context.Background(), request)
		return err
	}
}

func stop(change func(*berthv1.StopJobRequest)) func(*sandboxes, *jobService) error {
	return func(_ *sandboxes, j *jobService) error {
		request := &berthv1.StopJobRequest{JobId: "job_1"}
		change(request)
		_, err := j.StopJob(context.Background(), request)
		return err
	}
}

func manyLabels() map[string]string {
	labels := map[string]string{}
	for i := range maxLabels + 1 {
		labels[fmt.Sprint("l", i)] = ""
	}
	return labels
}

func TestWhatMakesNoSenseIsRefusedByTheNameOfItsField(t *testing.T) {
	tests := []refused{
		{"a request id with a space", createSandbox(func(r *berthv1.CreateSandboxRequest) { r.RequestId = "a b" }), "request_id"},
		{"a request id that is too long", createSandbox(func(r *berthv1.CreateSandboxRequest) { r.RequestId = strings.Repeat("r", 129) }), "request_id"},
		{"a request id that is not ASCII", createSandbox(func(r *berthv1.CreateSandboxRequest) { r.RequestId = "ü" }), "request_id"},
		{"a generation of what is not there yet", createSandbox(func(r *berthv1.CreateSandboxRequest) { r.IfGeneration = 1 }), "if_generation"},
		{"a lease on what is not there yet", createSandbox(func(r *berthv1.CreateSandboxRequest) { r.Lease = &berthv1.LeaseRef{} }), "lease"},
		{"a session key that is too long", spec(func(s *berthv1.SandboxSpec) { s.SessionKey = strings.Repeat("k", 257) }), "spec.session_key"},
		{"a session key with a newline", spec(func(s *berthv1.SandboxSpec) { s.SessionKey = "a\nb" }), "spec.session_key"},
		{"a variable of no name", spec(func(s *berthv1.SandboxSpec) { s.Env = map[string]string{"": "v"} }), "spec.env"},
		{"a variable named with =", spec(func(s *berthv1.SandboxSpec) { s.Env = map[string]string{"A=B": "v"} }), "spec.env"},
		{"a variable with NUL", spec(func(s *berthv1.SandboxSpec) { s.SecretEnv = map[string]string{"A": "a\x00"} }), "spec.secret_env"},
		{"a variable twice", spec(func(s *berthv1.SandboxSpec) {
			s.Env, s.SecretEnv = map[string]string{"A": ""}, map[string]string{"A": ""}
		}), "spec.secret_env"},
		{"too much environment", spec(func(s *berthv1.SandboxSpec) { s.Env = map[string]string{"A": strings.Repeat("v", 1<<20)} }), "spec.env"},
		{"too many labels", spec(func(s *berthv1.SandboxSpec) { s.Labels = manyLabels() }), "spec.labels"},
		{"a label's key with a space", spec(func(s *berthv1.SandboxSpec) { s.Labels = map[string]string{"a b": ""} }), "spec.labels"},
		{"a label's value that is too long", spec(func(s *berthv1.SandboxSpec) { s.Labels = map[string]string{"a": strings.Repeat("v", 257)} }), "spec.labels"},
		{"no number of CPUs", spec(func(s *berthv1.SandboxSpec) { s.Resources = &berthv1.Resources{Cpus: math.NaN()} }), "spec.resources.cpus"},
		{"fewer than no CPUs", spec(func(s *berthv1.SandboxSpec) { s.Resources = &berthv1.Resources{Cpus: -1} }), "spec.resources.cpus"},
		{"endless CPUs", spec(func(s *berthv1.SandboxSpec) { s.Resources = &berthv1.Resources{Cpus: math.Inf(1)} }), "spec.resources.cpus"},
		{"memory without its unit", spec(func(s *berthv1.SandboxSpec) { s.Resources = &berthv1.Resources{MemoryBytes: 512} }), "spec.resources.memory_bytes"},
		{"hosts without a list's mode", spec(func(s *berthv1.SandboxSpec) { s.Egress = &berthv1.Egress{AllowHosts: []string{"a"}} }), "spec.egress.allow_hosts"},
		{"too many hosts", spec(func(s *berthv1.SandboxSpec) {
			s.Egress = &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST, AllowHosts: make([]string, 257)}
		}), "spec.egress.allow_hosts"},
		{"a workspace that is relative", spec(func(s *berthv1.SandboxSpec) { s.Workspace = &berthv1.Workspace{Path: "w"} }), "spec.workspace.path"},
		{"an identity without a repository", spec(func(s *berthv1.SandboxSpec) {
			s.Workspace = &berthv1.Workspace{GitIdentity: &berthv1.GitIdentity{Name: "n"}}
		}), "spec.workspace.git_identity"},
		{"a name with a newline", spec(func(s *berthv1.SandboxSpec) {
			s.Workspace = &berthv1.Workspace{GitIdentity: &berthv1.GitIdentity{Name: "a\nb"}}
		}), "spec.workspace.git_identity.name"},
		{"an address with >", spec(func(s *berthv1.SandboxSpec) {
			s.Workspace = &berthv1.Workspace{GitIdentity: &berthv1.GitIdentity{Email: "a>b"}}
		}), "spec.workspace.git_identity.email"},
		{"a repository of nowhere", repo(func(r *berthv1.Repo) { r.Url = "" }), "spec.workspace.repo.url"},
		{"a URL that is an option", repo(func(r *berthv1.Repo) { r.Url = "--upload-pack=x" }), "spec.workspace.repo.url"},
		{"a URL with a password", repo(func(r *berthv1.Repo) { r.Url = "https://u:p@example.com/r" }), "spec.workspace.repo.url"},
		{"a URL with a token", repo(func(r *berthv1.Repo) { r.Url = "https://token@example.com/r" }), "spec.workspace.repo.url"},
		{"a URL that runs a program", repo(func(r *berthv1.Repo) { r.Url = "ext::sh -c true" }), "spec.workspace.repo.url"},
		{"a URL that is too long", repo(func(r *berthv1.Repo) { r.Url = "https://e/" + strings.Repeat("r", 4<<10) }), "spec.workspace.repo.url"},
		{"a ref that is an option", repo(func(r *berthv1.Repo) { r.Ref = "-x" }), "spec.workspace.repo.ref"},
		{"a ref with a space", repo(func(r *berthv1.Repo) { r.Ref = "a b" }), "spec.workspace.repo.ref"},
		{"a ref that is a range", repo(func(r *berthv1.Repo) { r.Ref = "a..b" }), "spec.workspace.repo.ref"},

		{"nothing to get", func(s *sandboxes, _ *jobService) error {
			_, err := s.GetSandbox(context.Background(), &berthv1.GetSandboxRequest{})
			return err
		}, "sandbox_id"},
		{"nothing to resume", func(s *sandboxes, _ *jobService) error {
			_, err := s.ResumeSandbox(context.Background(), &berthv1.ResumeSandboxRequest{})
			return err
		}, "sandbox_id"},
		{"nothing to destroy", func(s *sandboxes, _ *jobService) error {
			_, err := s.DestroySandbox(context.Background(), &berthv1.DestroySandboxRequest{})
			return err
		}, "sandbox_id"},
		{"a destroy with a bad request id", func(s *sandboxes, _ *jobService) error {
			_, err := s.DestroySandbox(context.Background(), &berthv1.DestroySandboxRequest{RequestId: "\x01"})
			return err
		}, "request_id"},
		{"a page that nobody gave, of sandboxes", func(s *sandboxes, _ *jobService) error {
			_, err := s.ListSandboxes(context.Background(), &berthv1.ListSandboxesRequest{PageToken: "!"})
			return err
		}, "page_token"},
		{"a page that nobody gave, of jobs", func(_ *sandboxes, j *jobService) error {
			_, err := j.ListJobs(context.Background(), &berthv1.ListJobsRequest{PageToken: "="})
			return err
		}, "page_token"},

		{"a start in no sandbox", func(_ *sandboxes, j *jobService) error {
			_, err := j.StartJob(context.Background(), &berthv1.StartJobRequest{Spec: &berthv1.JobSpec{Shell: "true"}})
			return err
		}, "sandbox_id"},
		{"a run of nothing", func(_ *sandboxes, j *jobService) error {
			_, err := j.RunCommand(context.Background(), &berthv1.RunCommandRequest{SandboxId: "sb_1"})
			return err
		}, "spec"},
		{"too much of a run's output", func(_ *sandboxes, j *jobService) error {
			_, err := j.RunCommand(context.Background(), &berthv1.RunCommandRequest{SandboxId: "sb_1", Spec: &berthv1.JobSpec{Shell: "true"}, MaxOutputBytes: maxRunOutput + 1})
			return err
		}, "max_output_bytes"},
		{"a run that nobody can feed", func(_ *sandboxes, j *jobService) error {
			_, err := j.RunCommand(context.Background(), &berthv1.RunCommandRequest{SandboxId: "sb_1", Spec: &berthv1.JobSpec{
				Shell: "cat", Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}},
			}})
			return err
		}, "spec.stdin.open"},
		{"a run in a terminal", func(_ *sandboxes, j *jobService) error {
			_, err := j.RunCommand(context.Background(), &berthv1.RunCommandRequest{SandboxId: "sb_1", Spec: &berthv1.JobSpec{
				Shell: "cat", Tty: &berthv1.TerminalSize{Cols: 80, Rows: 24},
			}})
			return err
		}, "spec.tty"},
		{"an exec of nothing", execs(), "start"},
		{"an exec that begins with input", execs(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Signal{Signal: 9}}), "start"},
		{"a return to no job", execs(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Reattach{Reattach: &berthv1.ExecReattach{}}}), "reattach.job_id"},
		{"a follow of no job", func(_ *sandboxes, j *jobService) error { return j.FollowJob(&berthv1.FollowJobRequest{}, nil) }, "job_id"},
		{"a follow of no stream", func(_ *sandboxes, j *jobService) error {
			return j.FollowJob(&berthv1.FollowJobRequest{JobId: "job_1", Streams: []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, 7}}, nil)
		}, "streams[1]"},
		{"a poll of no job", poll(func(r *berthv1.PollJobRequest) { r.JobId = "" }), "job_id"},
		{"a poll that waits too long", poll(func(r *berthv1.PollJobRequest) { r.Wait = durationpb.New(maxWait + 1) }), "wait"},
		{"a poll that waits backwards", poll(func(r *berthv1.PollJobRequest) { r.Wait = durationpb.New(-1) }), "wait"},
		{"a poll that waits for no time", poll(func(r *berthv1.PollJobRequest) { r.Wait = &durationpb.Duration{Seconds: math.MaxInt64} }), "wait"},
		{"too long a tail", poll(func(r *berthv1.PollJobRequest) { r.TailBytes = maxTail + 1 }), "tail_bytes"},
		{"a read of no job", read(func(r *berthv1.ReadJobOutputRequest) { r.JobId = "" }), "job_id"},
		{"a read that waits too long", read(func(r *berthv1.ReadJobOutputRequest) { r.Wait = durationpb.New(maxWait + 1) }), "wait"},
		{"a read of no stream", read(func(r *berthv1.ReadJobOutputRequest) { r.Stream = 9 }), "stream"},
		{"too much to read", read(func(r *berthv1.ReadJobOutputRequest) { r.MaxBytes = maxRead + 1 }), "max_bytes"},
		{"a stop of no job", stop(func(r *berthv1.StopJobRequest) { r.JobId = "" }), "job_id"},
		{"a stop with a bad request id", stop(func(r *berthv1.StopJobRequest) { r.RequestId = " " }), "request_id"},
		{"a stop with too long a grace", stop(func(r *berthv1.StopJobRequest) { r.Grace = durationpb.New(maxKillGrace + 1) }), "grace"},
		{"input for no job", func(_ *sandboxes, j *jobService) error {
			_, err := j.WriteJobInput(context.Background(), &berthv1.WriteJobInputRequest{})
			return err
		}, "job_id"},
		{"too much input", func(_ *sandboxes, j *jobService) error {
			_, err := j.WriteJobInput(context.Background(), &berthv1.WriteJobInputRequest{JobId: "job_1", Data: make([]byte, maxStdinBytes+1)})
			return err
		}, "data"},
		{"a signal to no job", func(_ *sandboxes, j *jobService) error {
			_, err := j.SignalJob(context.Background(), &berthv1.SignalJobRequest{Signal: 9})
			return err
		}, "job_id"},
		{"no signal", func(_ *sandboxes, j *jobService) error {
			_, err := j.SignalJob(context.Background(), &berthv1.SignalJobRequest{JobId: "job_1"})
			return err
		}, "signal"},
		{"a signal that there is not", func(_ *sandboxes, j *jobService) error {
			_, err := j.SignalJob(context.Background(), &berthv1.SignalJobRequest{JobId: "job_1", Signal: 65})
			return err
		}, "signal"},
	}
	for name, test := range map[string]struct {
		change func(*berthv1.JobSpec)
		field  string
	}{
		"no command":                    {func(s *berthv1.JobSpec) { s.Argv = nil }, "spec.argv"},
		"two commands":                  {func(s *berthv1.JobSpec) { s.Shell = "true" }, "spec.shell"},
		"a program of no name":          {func(s *berthv1.JobSpec) { s.Argv = []string{""} }, "spec.argv[0]"},
		"an argument with NUL":          {func(s *berthv1.JobSpec) { s.Argv = []string{"a", "b\x00"} }, "spec.argv[1]"},
		"a script with NUL":             {func(s *berthv1.JobSpec) { s.Argv, s.Shell = nil, "a\x00" }, "spec.shell"},
		"a directory with NUL":          {func(s *berthv1.JobSpec) { s.Cwd = "a\x00" }, "spec.cwd"},
		"a user with NUL":               {func(s *berthv1.JobSpec) { s.User = "a\x00" }, "spec.user"},
		"too long a command":            {func(s *berthv1.JobSpec) { s.Argv = []string{"a", strings.Repeat("x", 2<<20)} }, "spec.argv"},
		"a job's variable of no name":   {func(s *berthv1.JobSpec) { s.Env = map[string]string{"1A": ""} }, "spec.env"},
		"a job's label of no key":       {func(s *berthv1.JobSpec) { s.Labels = map[string]string{"": ""} }, "spec.labels"},
		"a timeout below zero":          {func(s *berthv1.JobSpec) { s.Timeout = durationpb.New(-1) }, "spec.timeout"},
		"a kill grace that is too long": {func(s *berthv1.JobSpec) { s.KillGrace = durationpb.New(maxKillGrace + 1) }, "spec.kill_grace"},
		"a grace of two days":           {func(s *berthv1.JobSpec) { s.DisconnectGrace = durationpb.New(48 * time.Hour) }, "spec.disconnect_grace"},
		"a start deadline of two days":  {func(s *berthv1.JobSpec) { s.StartDeadline = durationpb.New(48 * time.Hour) }, "spec.start_deadline"},
		"too much output to keep":       {func(s *berthv1.JobSpec) { s.OutputLimitBytes = maxOutputLimit + 1 }, "spec.output_limit_bytes"},
		"too much stdin": {func(s *berthv1.JobSpec) {
			s.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: make([]byte, maxStdinBytes+1)}}
		}, "spec.stdin.data"},
		"a terminal of no size":          {func(s *berthv1.JobSpec) { s.Tty = &berthv1.TerminalSize{} }, "spec.tty.cols"},
		"a terminal that is too large":   {func(s *berthv1.JobSpec) { s.Tty = &berthv1.TerminalSize{Cols: 1 << 16, Rows: 1} }, "spec.tty.cols"},
		"a secret that is no secret too": {func(s *berthv1.JobSpec) { s.Env, s.SecretEnv = map[string]string{"A": ""}, map[string]string{"A": ""} }, "spec.secret_env"},
	} {
		for i, call := range job(test.change) {
			tests = append(tests, refused{name + []string{", run", ", started", ", attached"}[i], call, test.field})
		}
	}
	s, j := services()
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := test.call(s, j)
			var known *fault.Error
			if !errors.As(err, &known) || known.Reason != fault.InvalidField || len(known.Fields) != 1 {
				t.Fatalf("the error is %v", err)
			}
			if got := strings.TrimPrefix(known.Fields[0].Path, "start."); got != test.field {
				t.Errorf("it names %s (%s), want %s", got, known.Fields[0].Description, test.field)
			}
			for _, detail := range toStatus(err).Details() {
				if bad, ok := detail.(*errdetails.BadRequest); ok && bad.GetFieldViolations()[0].GetField() == known.Fields[0].Path {
					return
				}
			}
			t.Errorf("no BadRequest names %s", test.field)
		})
	}
}

func TestWhatMakesSenseIsNotRefused(t *testing.T) {
	for name, err := range map[string]error{
		"an empty spec":           validSandboxSpec(&berthv1.SandboxSpec{}),
		"an empty request id":     validRequestID(""),
		"the longest request id":  validRequestID(strings.Repeat("~", 128)),
		"a session key of words":  validSandboxSpec(&berthv1.SandboxSpec{SessionKey: "the Größte key"}),
		"an https URL":            validRepo(&berthv1.Repo{Url: "https://example.com/a/b.git", Ref: "feature/x-1"}),
		"an ssh URL with a user":  validRepo(&berthv1.Repo{Url: "ssh://git@example.com/r.git"}),
		"user@host:path":          validRepo(&berthv1.Repo{Url: "git@example.com:a/b.git"}),
		"a path":                  validRepo(&berthv1.Repo{Url: "/srv/r.git"}),
		"a URL with @ in a path":  validRepo(&berthv1.Repo{Url: "file:///srv/a@b"}),
		"all durations of a job":  validDurations(&berthv1.JobSpec{Timeout: durationpb.New(0), KillGrace: durationpb.New(maxKillGrace), StartDeadline: durationpb.New(maxStartWindow)}),
		"the largest terminal":    validTerminal("tty", &berthv1.TerminalSize{Cols: maxCells, Rows: maxCells}),
		"a job's largest timeout": validDurations(&berthv1.JobSpec{Timeout: durationpb.New(maxTimeout)}),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOfAnAttachedCallersMessagesTheFieldIsNamed(t *testing.T) {
	for name, test := range map[string]struct {
		message *berthv1.ExecRequest
		field   string
	}{
		"nothing":             {&berthv1.ExecRequest{}, "message"},
		"a second start":      {&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{}}, "message"},
		"too much input":      {&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: &berthv1.ExecInput{Data: make([]byte, maxRead+1)}}}, "input.data"},
		"no size":             {&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Resize{Resize: &berthv1.TerminalSize{Cols: 1}}}, "resize.rows"},
		"a signal of no kind": {&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Signal{Signal: 65}}, "signal"},
	} {
		_, err := (&execPeer{}).toGuest(test.message)
		var known *fault.Error
		if !errors.As(err, &known) || len(known.Fields) != 1 || known.Fields[0].Path != test.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBoundedOutputSaysWhatItLeavesOut(t *testing.T) {
	for _, test := range []struct {
		name     string
		output   *guestv1.Output
		total    uint64
		omitted  uint64
		text     string
		replaced bool
	}{
		{"nothing", nil, 0, 0, "", false},
		{"all of it", &guestv1.Output{Head: []byte("all")}, 3, 0, "all", false},
		{"a head and a tail", &guestv1.Output{Head: []byte("he"), Tail: []byte("il"), TailOffset: 98}, 100, 96, "he\n[… 96 bytes left out …]\nil", false},
		{"a tail that follows its head", &guestv1.Output{Head: []byte("he"), Tail: []byte("ad"), TailOffset: 2}, 4, 0, "head", false},
		{"a tail alone", &guestv1.Output{Tail: []byte("il"), TailOffset: 8}, 10, 8, "\n[… 8 bytes left out …]\nil", false},
		{"a head alone", &guestv1.Output{Head: []byte("he")}, 10, 8, "he", false},
		{"bytes that are no text", &guestv1.Output{Head: []byte("a\xff\xfeb")}, 4, 0, "a\uFFFDb", true},
		{"a tail that is no text", &guestv1.Output{Head: []byte("ok"), Tail: []byte("\xc3"), TailOffset: 2}, 3, 0, "ok\uFFFD", true},
		{"an offset that cannot be", &guestv1.Output{Head: []byte("head"), Tail: []byte("t"), TailOffset: 1}, 2, 0, "headt", false},
		{"more than there is", &guestv1.Output{Head: []byte("head")}, 1, 0, "head", false},
	} {
		shown := bounded(test.output, &berthv1.OutputStats{TotalBytes: test.total}, true)
		if shown.GetOmittedBytes() != test.omitted || shown.GetText() != test.text || shown.GetTextReplaced() != test.replaced {
			t.Errorf("%s: %d left out, %q, replaced: %v", test.name, shown.GetOmittedBytes(), shown.GetText(), shown.GetTextReplaced())
		}
		if bytes := bounded(test.output, nil, false); bytes.GetText() != "" || string(bytes.GetHead()) != string(test.output.GetHead()) {
			t.Errorf("%s: as bytes %v", test.name, bytes)
		}
		if _, err := proto.Marshal(shown); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func TestHowMuchARunReturns(t *testing.T) {
	for _, test := range []struct {
		merged, text bool
		asked        uint64
		want         uint64 // zero: it is refused
	}{
		{false, false, 0, defaultRunOutput}, {false, false, 1, 1}, {false, false, maxRunOutput, maxRunOutput}, {false, false, maxRunOutput + 1, 0},
		{true, false, maxMergedOutput, maxMergedOutput}, {true, false, maxMergedOutput + 1, 0}, {false, false, math.MaxUint64, 0},
		{false, true, 0, defaultRunOutput}, {false, true, maxRunOutput / 2, maxRunOutput / 2}, {false, true, maxRunOutput/2 + 1, 0},
		{true, true, maxMergedOutput / 2, maxMergedOutput / 2}, {true, true, maxMergedOutput/2 + 1, 0},
	} {
		got, err := runOutput(&berthv1.RunCommandRequest{Spec: &berthv1.JobSpec{MergeStderr: test.merged}, TextOutput: test.text, MaxOutputBytes: test.asked})
		if got != test.want || (err != nil) != (test.want == 0) {
			t.Errorf("%+v: %d (%v)", test, got, err)
		}
	}
}
