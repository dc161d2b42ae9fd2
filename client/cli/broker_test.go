package cli

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// now is when every test happens.
var now = time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

const (
	sbLive    = "sb_01KBA0Z6YR7Q5N3W8D4M1E7QK2"
	sbStopped = "sb_01KB9ZZZZZ7Q5N3W8D4M1EAB12"
	sbGone    = "sb_01KB9ZZZZZ7Q5N3W8D4M1ECD12"
	sbMissing = "sb_01KB9ZZZZZ7Q5N3W8D4M1EZZZZ"
	jobRuns   = "job_01KBA1AAAA7Q5N3W8D4M1E9XW4"
	jobDone   = "job_01KBA1BBBB7Q5N3W8D4M1E8AA1"
	jobLost   = "job_01KBA1CCCC7Q5N3W8D4M1E8BB1"
	jobBytes  = "job_01KBA1DDDD7Q5N3W8D4M1E8CC1"
)

// fakeBroker is a broker in memory with a fixed ledger. What a command does is chosen by its first word.
// It can be killed and started again on the same socket.
type fakeBroker struct {
	berthv1.UnimplementedSandboxServiceServer
	berthv1.UnimplementedJobServiceServer
	berthv1.UnimplementedProviderServiceServer
	berthv1.UnimplementedAdminServiceServer

	t      *testing.T
	socket string
	server *grpc.Server
	served sync.WaitGroup

	mu        sync.Mutex
	sandboxes []*berthv1.Sandbox
	jobs      []*berthv1.Job
	output    map[string][2][]byte // by job: stdout, stderr
	last      proto.Message        // the newest mutating request
	changed   chan struct{}
	entered   chan string  // a token for every call that waits
	live      *liveCommand // what Exec began last
	leftOut   uint32       // findings of a check
	spoil     string       // what becomes of backups: "" nothing, "cut off" or "changed"
}

func newBroker(t *testing.T) *fakeBroker {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth") // t.TempDir is too long for a socket with a long test name
	if err != nil {
		t.Fatal(err)
	}
	b := &fakeBroker{
		t: t, socket: filepath.Join(dir, "d.sock"), changed: make(chan struct{}), entered: make(chan string, 1024),
		sandboxes: ledgerSandboxes(), jobs: ledgerJobs(),
		output: map[string][2][]byte{
			jobDone:  {[]byte("built\n"), []byte("warning: old\n")},
			jobRuns:  {[]byte("working\n"), nil},
			jobBytes: {exactBytes(), bytes.Repeat([]byte{0xff, 0, '\r'}, 1000)},
		},
	}
	b.start()
	t.Cleanup(func() {
		b.kill()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return b
}

// exactBytes is 3 MiB of every byte, invalid UTF-8 and NULs included.
func exactBytes() []byte {
	all := make([]byte, 3<<20)
	for i := range all {
		all[i] = byte(i ^ i>>8 ^ i>>16)
	}
	return all
}

func (b *fakeBroker) start() {
	b.t.Helper()
	listener, err := net.Listen("unix", b.socket)
	if err != nil {
		b.t.Fatal(err)
	}
	b.server = grpc.NewServer()
	berthv1.RegisterSandboxServiceServer(b.server, b)
	berthv1.RegisterJobServiceServer(b.server, b)
	berthv1.RegisterProviderServiceServer(b.server, b)
	berthv1.RegisterAdminServiceServer(b.server, b)
	b.served.Go(func() { _ = b.server.Serve(listener) })
}

func (b *fakeBroker) kill() {
	b.server.Stop()
	b.served.Wait()
}

// change changes the ledger and wakes the long polls.
func (b *fakeBroker) change(how func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	how()
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *fakeBroker) note(request proto.Message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = proto.Clone(request)
}

func ledgerSandboxes() []*berthv1.Sandbox {
	return []*berthv1.Sandbox{
		{
			Id: sbLive, Namespace: "default", State: berthv1.SandboxState_SANDBOX_STATE_RUNNING, Generation: 1, Revision: 12,
			Spec: &berthv1.SandboxSpec{
				Provider: "docker", Image: "golang:1.26", Env: map[string]string{"CI": "1"},
				SecretEnv:  map[string]string{"TOKEN": "", "KEY": ""},
				Workspace:  &berthv1.Workspace{Repo: &berthv1.Repo{Url: "https://example.org/app.git", Ref: "main"}},
				Resources:  &berthv1.Resources{Cpus: 1.5, MemoryBytes: 2 << 30, Pids: 512},
				Egress:     &berthv1.Egress{Mode: berthv1.Egress_MODE_NONE},
				SessionKey: "issue-42", Labels: map[string]string{"run": "42", "team": "a"},
			},
			MachineId: "m_01KBA0Z6YR7Q5N3W8D4M1E0000", WorkspacePath: "/workspace", Isolation: berthv1.Isolation_ISOLATION_CONTAINER,
			CreateTime: ago(3*time.Minute + 20*time.Second), ReadyTime: ago(3*time.Minute + 18*time.Second), LastActivityTime: ago(30 * time.Second),
			Capabilities: []string{"image", "restart"}, OpenJobs: 1, ExpireTime: timestamppb.New(now.Add(2 * time.Hour)),
		},
		{
			Id: sbStopped, State: berthv1.SandboxState_SANDBOX_STATE_STOPPED, Generation: 2,
			Spec: &berthv1.SandboxSpec{Provider: "local"}, Isolation: berthv1.Isolation_ISOLATION_NAMESPACE, CreateTime: ago(50 * time.Hour),
			LastError: &berthv1.Problem{Reason: "GUEST_UNREACHABLE", Message: "the guest of m_1 died", Time: ago(time.Hour)},
		},
		{
			Id: sbGone, State: berthv1.SandboxState_SANDBOX_STATE_DESTROYED,
			Spec: &berthv1.SandboxSpec{Provider: "local"}, CreateTime: ago(90 * time.Hour), DestroyTime: ago(80 * time.Hour),
		},
	}
}

func ledgerJobs() []*berthv1.Job {
	return []*berthv1.Job{
		{
			Id: jobRuns, SandboxId: sbLive, State: berthv1.JobState_JOB_STATE_RUNNING, Detached: true,
			Spec:       &berthv1.JobSpec{Shell: "make test\n| tee \x1b[31mlog"},
			CreateTime: ago(2 * time.Minute), StartTime: ago(2 * time.Minute), Stdout: &berthv1.OutputStats{TotalBytes: 8},
		},
		{
			Id: jobDone, SandboxId: sbLive, State: berthv1.JobState_JOB_STATE_DONE, Detached: true,
			Spec:    &berthv1.JobSpec{Argv: []string{"go", "build", "./x y"}},
			Outcome: exited(3), CreateTime: ago(time.Hour), StartTime: ago(time.Hour), EndTime: ago(time.Hour - 12300*time.Millisecond),
			Stdout: &berthv1.OutputStats{TotalBytes: 6, Sealed: true}, Stderr: &berthv1.OutputStats{TotalBytes: 13, Sealed: true},
		},
		{
			Id: jobLost, SandboxId: sbGone, State: berthv1.JobState_JOB_STATE_DONE, Detached: true, Spec: &berthv1.JobSpec{Argv: []string{"sleep", "1000"}},
			Outcome:    &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST, Reason: "machine_gone: the container was removed"},
			CreateTime: ago(85 * time.Hour), Stdout: &berthv1.OutputStats{}, Stderr: &berthv1.OutputStats{},
		},
		{
			Id: jobBytes, SandboxId: sbLive, State: berthv1.JobState_JOB_STATE_DONE, Spec: &berthv1.JobSpec{Argv: []string{"cat"}},
			Outcome: exited(0), CreateTime: ago(2 * time.Hour), StartTime: ago(2 * time.Hour), EndTime: ago(2 * time.Hour),
		},
	}
}

func exited(code int32) *berthv1.Outcome {
	return &berthv1.Outcome{
		Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: code},
		WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: uint32(code)}},
	}
}

// failure is an error as a broker sends it.
func failure(code codes.Code, reason, message string, metadata map[string]string, more ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Domain: "berth.v1", Reason: reason, Metadata: metadata}
	st, err := status.New(code, message).WithDetails(append([]protoadapt.MessageV1{info}, more...)...)
	if err != nil {
		panic(err)
	}
	return st.Err()
}

func (b *fakeBroker) sandbox(id string) (*berthv1.Sandbox, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, sandbox := range b.sandboxes {
		if sandbox.GetId() == id {
			return sandbox, nil
		}
	}
	return nil, failure(codes.NotFound, "SANDBOX_NOT_FOUND", "no sandbox "+id, map[string]string{"sandbox_id": id})
}

func (b *fakeBroker) job(id string) (*berthv1.Job, chan struct{}, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, job := range b.jobs {
		if job.GetId() == id {
			return job, b.changed, nil
		}
	}
	return nil, nil, failure(codes.NotFound, "JOB_NOT_FOUND", "there is no "+id, map[string]string{"job_id": id})
}

func (b *fakeBroker) ListSandboxes(_ context.Context, r *berthv1.ListSandboxesRequest) (*berthv1.ListSandboxesResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []*berthv1.Sandbox
	for _, sandbox := range b.sandboxes {
		hidden := sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED || sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_FAILED
		wanted := len(r.GetStates()) == 0 && !hidden || slices.Contains(r.GetStates(), sandbox.GetState())
		if r.GetSessionKey() != "" && r.GetSessionKey() != sandbox.GetSpec().GetSessionKey() {
			wanted = false
		}
		for key, value := range r.GetLabels() {
			if got, has := sandbox.GetSpec().GetLabels()[key]; !has || value != "" && value != got {
				wanted = false
			}
		}
		if wanted {
			found = append(found, sandbox)
		}
	}
	// One a page, so that paging is always seen.
	var at int
	if _, err := fmt.Sscan("0"+r.GetPageToken(), &at); err != nil {
		return nil, err
	}
	page := &berthv1.ListSandboxesResponse{}
	if at < len(found) {
		page.Sandboxes = found[at : at+1]
	}
	if at+1 < len(found) {
		page.NextPageToken = fmt.Sprint(at + 1)
	}
	return page, nil
}

func (b *fakeBroker) GetSandbox(_ context.Context, r *berthv1.GetSandboxRequest) (*berthv1.GetSandboxResponse, error) {
	sandbox, err := b.sandbox(r.GetSandboxId())
	return &berthv1.GetSandboxResponse{Sandbox: sandbox}, err
}

func (b *fakeBroker) CreateSandbox(ctx context.Context, r *berthv1.CreateSandboxRequest) (*berthv1.CreateSandboxResponse, error) {
	b.note(r)
	spec := r.GetSpec()
	switch spec.GetProvider() {
	case "nowhere":
		return nil, failure(codes.NotFound, "PROVIDER_NOT_FOUND", `no provider "nowhere"; this broker has docker, local`, nil)
	case "invalid":
		return nil, failure(codes.InvalidArgument, "INVALID_FIELD", "2 fields are not as they must be", nil, &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{
				{Field: "spec.workspace.path", Description: "must be absolute"},
				{Field: "spec.image", Description: "is too long"},
			},
		})
	case "full":
		return nil, failure(codes.ResourceExhausted, "QUOTA_EXCEEDED", "10 sandboxes are there, 10 are allowed", nil,
			&errdetails.RetryInfo{RetryDelay: durationpb.New(30 * time.Second)})
	case "imageless":
		return nil, failure(codes.FailedPrecondition, "IMAGE_NOT_FOUND", "image debian:stable-slim is not on the engine, and could not be pulled", nil)
	case "slow":
		return nil, b.createSlowly(ctx, spec)
	}
	if spec.GetSessionKey() == "issue-42" {
		return nil, failure(codes.AlreadyExists, "SESSION_KEY_IN_USE", `session key "issue-42" is in use by another sandbox`, map[string]string{"sandbox_id": sbLive})
	}
	sandbox, err := b.sandbox(sbLive)
	return &berthv1.CreateSandboxResponse{Sandbox: sandbox}, err
}

// createSlowly is a create that never ends, with progress to be seen.
func (b *fakeBroker) createSlowly(ctx context.Context, spec *berthv1.SandboxSpec) error {
	b.change(func() {
		b.sandboxes = append(b.sandboxes, &berthv1.Sandbox{
			Id: "sb_01KBA9ZZZZ7Q5N3W8D4M1E7NEW", Spec: spec, State: berthv1.SandboxState_SANDBOX_STATE_CREATING,
			Progress: &berthv1.Progress{OperationId: "op_1", Step: "clone", Attempts: 1},
		})
	})
	b.entered <- "create"
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

func (b *fakeBroker) ResumeSandbox(_ context.Context, r *berthv1.ResumeSandboxRequest) (*berthv1.ResumeSandboxResponse, error) {
	b.note(r)
	sandbox, err := b.sandbox(r.GetSandboxId())
	if err == nil && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		err = failure(codes.FailedPrecondition, "WRONG_STATE", "sandbox "+sandbox.GetId()+" is DESTROYED", map[string]string{"state": "DESTROYED"})
	}
	return &berthv1.ResumeSandboxResponse{Sandbox: sandbox}, err
}

func (b *fakeBroker) SuspendSandbox(_ context.Context, r *berthv1.SuspendSandboxRequest) (*berthv1.SuspendSandboxResponse, error) {
	b.note(r)
	sandbox, err := b.sandbox(r.GetSandboxId())
	if err == nil && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_DESTROYED {
		err = failure(codes.FailedPrecondition, "WRONG_STATE", "sandbox "+sandbox.GetId()+" is DESTROYED", map[string]string{"state": "DESTROYED"})
	}
	return &berthv1.SuspendSandboxResponse{Sandbox: sandbox}, err
}

func (b *fakeBroker) DestroySandbox(_ context.Context, r *berthv1.DestroySandboxRequest) (*berthv1.DestroySandboxResponse, error) {
	b.note(r)
	sandbox, err := b.sandbox(r.GetSandboxId())
	return &berthv1.DestroySandboxResponse{Sandbox: sandbox}, err
}

func (b *fakeBroker) runnable(id string) error {
	sandbox, err := b.sandbox(id)
	if err == nil && sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		state := strings.TrimPrefix(sandbox.GetState().String(), "SANDBOX_STATE_")
		err = failure(codes.FailedPrecondition, "WRONG_STATE", "sandbox "+id+" is "+state+", not RUNNING: resume it first",
			map[string]string{"state": state, "sandbox_id": id})
	}
	return err
}

// outcomes are how commands end, by their first word.
var outcomes = map[string]*berthv1.Outcome{
	"true": exited(0), "fail": exited(42), "big": exited(0), "cat": exited(0), "bytes": exited(0),
	"crash": {
		Cause: berthv1.Cause_CAUSE_SIGNALED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 139},
		WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Signal{Signal: 11}},
	},
	"slow": {Cause: berthv1.Cause_CAUSE_TIMED_OUT, Exit: &berthv1.Outcome_ExitCode{ExitCode: 124}},
	"oom":  {Cause: berthv1.Cause_CAUSE_OOM_KILLED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 137}, Reason: "the machine's limit is 64 MiB"},
	"nosuch": {
		Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Exit: &berthv1.Outcome_ExitCode{ExitCode: 127}, Reason: `not_found: no program "nosuch" in PATH`,
	},
	"expired": {Cause: berthv1.Cause_CAUSE_FAILED_TO_START, Reason: "expired: the broker was away for 2m"},
	"lost":    {Cause: berthv1.Cause_CAUSE_LOST, Reason: "machine_gone: the container was removed"},
	"killed":  {Cause: berthv1.Cause_CAUSE_STOPPED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 143}, Reason: "stop_requested: by StopJob"},
	"daemon":  {Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 0}, Survivors: []uint32{17, 19}, OutputStillOpen: true},
}

func (b *fakeBroker) newJob(sandboxID string, spec *berthv1.JobSpec) *berthv1.Job {
	first, _, _ := strings.Cut(spec.GetShell(), " ")
	if len(spec.GetArgv()) > 0 {
		first = spec.GetArgv()[0]
	}
	job := &berthv1.Job{
		Id: "job_01KBA2EEEE7Q5N3W8D4M1E0NEW", SandboxId: sandboxID, State: berthv1.JobState_JOB_STATE_DONE,
		Spec: &berthv1.JobSpec{Argv: spec.GetArgv(), Shell: spec.GetShell(), Timeout: spec.GetTimeout(), Tty: spec.GetTty()}, Outcome: outcomes[first],
	}
	if job.GetOutcome() == nil {
		job.State = berthv1.JobState_JOB_STATE_RUNNING
	}
	return job
}

func (b *fakeBroker) RunCommand(ctx context.Context, r *berthv1.RunCommandRequest) (*berthv1.RunCommandResponse, error) {
	b.note(r)
	if err := b.runnable(r.GetSandboxId()); err != nil {
		return nil, err
	}
	reply := &berthv1.RunCommandResponse{Job: b.newJob(r.GetSandboxId(), r.GetSpec()), Stdout: &berthv1.BoundedOutput{}, Stderr: &berthv1.BoundedOutput{}}
	first := ""
	if len(r.GetSpec().GetArgv()) > 0 {
		first = r.GetSpec().GetArgv()[0]
	}
	switch first {
	case "true":
		reply.Stdout.Head, reply.Stderr.Head = []byte("out\n"), []byte("err\n")
	case "bytes":
		reply.Stdout.Head, reply.Stderr.Head = []byte("a\x00\xff\xfeb\r\n\x1b[0m"), []byte("\xc3(")
	case "cat":
		reply.Stdout.Head = r.GetSpec().GetStdin().GetData()
	case "big":
		reply.Stdout = &berthv1.BoundedOutput{Head: []byte("the head"), OmittedBytes: 1000, TailOffset: 1008, Tail: []byte("the tail\n")}
		reply.Stderr = &berthv1.BoundedOutput{Head: []byte("err head\n"), OmittedBytes: 5, TailOffset: 14, Tail: []byte("err tail\n")}
	case "hang":
		b.entered <- "hang"
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return reply, nil
}

// liveCommand is an attached command: it continues when the broker is killed.
type liveCommand struct {
	job     *berthv1.Job
	spec    *berthv1.JobSpec
	stdout  []byte
	taken   []byte
	closed  bool
	signals []uint32
	sizes   []*berthv1.TerminalSize
	grace   *durationpb.Duration // of the StopJob that it got
}

// Exec runs a command that is chosen by its first word: "cat" and "shell" live on their input, "hang"
// ends by a signal or a stop only, "deaf" by a stop only, "stream" writes without end; the others are over at once.
func (b *fakeBroker) Exec(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	offset := int(first.GetReattach().GetStdoutOffset())
	if start := first.GetStart(); start != nil {
		b.note(start)
		if err := b.runnable(start.GetSandboxId()); err != nil {
			return err
		}
		if start.GetSpec().GetShell() == "vanish" {
			return status.Error(codes.Unavailable, "the process was killed")
		}
		b.change(func() { b.live = b.beginLive(start) })
	} else if _, _, err := b.job(first.GetReattach().GetJobId()); err != nil {
		return err
	}
	b.mu.Lock()
	started := &berthv1.ExecStarted{Job: b.live.job, InputOffset: uint64(len(b.live.taken))}
	b.mu.Unlock()
	if err := stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Started{Started: started}}); err != nil {
		return err
	}
	if offset == 0 && first.GetStart() != nil {
		if err := b.sendFixed(stream); err != nil {
			return err
		}
	}
	received := make(chan struct{})
	go b.receiveLive(stream, received)
	b.entered <- "exec"
	acknowledged := 0
	for {
		b.mu.Lock()
		live, changed := *b.live, b.changed
		b.mu.Unlock()
		if acknowledged < len(live.taken) {
			acknowledged = len(live.taken)
			if err := stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_InputAcknowledged{InputAcknowledged: uint64(acknowledged)}}); err != nil {
				return err
			}
		}
		if offset < len(live.stdout) {
			chunk := &berthv1.OutputChunk{Stream: berthv1.Stream_STREAM_STDOUT, Offset: uint64(offset), Data: live.stdout[offset:]}
			offset = len(live.stdout)
			if err := stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Chunk{Chunk: chunk}}); err != nil {
				return err
			}
			continue
		}
		if live.job.GetState() == berthv1.JobState_JOB_STATE_DONE || commandOf(live.spec) == "mystery" {
			if err := stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Done{Done: live.job}}); err != nil {
				return err
			}
			<-received
			return nil
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-time.After(time.Millisecond):
			if commandOf(live.spec) == "stream" {
				b.change(func() { b.live.stdout = append(b.live.stdout, "line\n"...) })
			}
		}
	}
}

func commandOf(spec *berthv1.JobSpec) string {
	if len(spec.GetArgv()) > 0 {
		return spec.GetArgv()[0]
	}
	first, _, _ := strings.Cut(spec.GetShell(), " ")
	return first
}

func (b *fakeBroker) beginLive(start *berthv1.ExecStart) *liveCommand {
	live := &liveCommand{job: b.newJob(start.GetSandboxId(), start.GetSpec()), spec: start.GetSpec(), taken: start.GetSpec().GetStdin().GetData()}
	switch commandOf(live.spec) {
	case "hang", "deaf":
		live.stdout = []byte("ready\n")
	case "cat", "shell":
		if live.spec.GetStdin().GetOpen() {
			live.job.State, live.job.Outcome = berthv1.JobState_JOB_STATE_RUNNING, nil
		}
	}
	b.jobs = append(b.jobs, live.job)
	return live
}

// sendFixed sends what a command's first word says, in the same stream's order.
func (b *fakeBroker) sendFixed(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse]) error {
	out, err := "", ""
	b.mu.Lock()
	command := commandOf(b.live.spec)
	b.mu.Unlock()
	switch command {
	case "true":
		out, err = "out\n", "err\n"
	case "bytes":
		out, err = "a\x00\xff\xfeb\r\n\x1b[0m", "\xc3("
	case "big":
		out = "the head"
	}
	for _, chunk := range []*berthv1.ExecResponse{
		{Message: &berthv1.ExecResponse_Chunk{Chunk: &berthv1.OutputChunk{Stream: berthv1.Stream_STREAM_STDOUT, Data: []byte(out)}}},
		{Message: &berthv1.ExecResponse_Chunk{Chunk: &berthv1.OutputChunk{Stream: berthv1.Stream_STREAM_STDERR, Data: []byte(err)}}},
	} {
		if len(chunk.GetChunk().GetData()) == 0 {
			continue
		}
		if err := stream.Send(chunk); err != nil {
			return err
		}
	}
	if command != "big" {
		return nil
	}
	gap := &berthv1.OutputGap{Stream: berthv1.Stream_STREAM_STDOUT, Range: &berthv1.ByteRange{From: 8, To: 1008}}
	if err := stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Gap{Gap: gap}}); err != nil {
		return err
	}
	tail := &berthv1.OutputChunk{Stream: berthv1.Stream_STREAM_STDOUT, Offset: 1008, Data: []byte("the tail\n")}
	return stream.Send(&berthv1.ExecResponse{Message: &berthv1.ExecResponse_Chunk{Chunk: tail}})
}

// receiveLive takes input and sizes until the caller is gone or has acknowledged the end.
func (b *fakeBroker) receiveLive(stream grpc.BidiStreamingServer[berthv1.ExecRequest, berthv1.ExecResponse], over chan<- struct{}) {
	defer close(over)
	for {
		request, err := stream.Recv()
		if err != nil {
			return
		}
		b.change(func() {
			switch message := request.GetMessage().(type) {
			case *berthv1.ExecRequest_Resize:
				b.live.sizes = append(b.live.sizes, message.Resize)
			case *berthv1.ExecRequest_Input:
				b.takeLive(message.Input)
			}
		})
	}
}

// takeLive gives a command its input: cat says it again, and a shell does what it says.
func (b *fakeBroker) takeLive(input *berthv1.ExecInput) {
	live := b.live
	if at := uint64(len(live.taken)); input.GetOffset() <= at && input.GetOffset()+uint64(len(input.GetData())) >= at {
		fresh := input.GetData()[at-input.GetOffset():]
		live.taken = append(live.taken, fresh...)
		live.stdout = append(live.stdout, fresh...)
	}
	switch {
	case commandOf(live.spec) == "shell" && strings.Contains(string(live.taken), "exit"):
		b.endLive(exited(7))
	case input.GetEof():
		live.closed = true
		b.endLive(exited(0))
	}
}

func (b *fakeBroker) endLive(outcome *berthv1.Outcome) {
	done := proto.Clone(b.live.job).(*berthv1.Job)
	done.State, done.Outcome = berthv1.JobState_JOB_STATE_DONE, outcome
	b.live.job = done
	b.jobs = slices.DeleteFunc(b.jobs, func(job *berthv1.Job) bool { return job.GetId() == done.GetId() })
	b.jobs = append(b.jobs, done)
}

func (b *fakeBroker) SignalJob(_ context.Context, r *berthv1.SignalJobRequest) (*berthv1.SignalJobResponse, error) {
	job, _, err := b.job(r.GetJobId())
	b.note(r)
	b.change(func() {
		if b.live == nil || b.live.job.GetId() != r.GetJobId() {
			return
		}
		b.live.signals = append(b.live.signals, r.GetSignal())
		if commandOf(b.live.spec) == "hang" {
			b.endLive(&berthv1.Outcome{
				Cause: berthv1.Cause_CAUSE_SIGNALED, Exit: &berthv1.Outcome_ExitCode{ExitCode: 128 + int32(r.GetSignal())},
				WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Signal{Signal: r.GetSignal()}},
			})
		}
	})
	return &berthv1.SignalJobResponse{Job: job}, err
}

func (b *fakeBroker) WriteJobInput(_ context.Context, r *berthv1.WriteJobInputRequest) (*berthv1.WriteJobInputResponse, error) {
	if _, _, err := b.job(r.GetJobId()); err != nil {
		return nil, err
	}
	offset, taken := r.GetOffset(), uint64(0)
	b.change(func() {
		if r.GetPosition() == nil {
			offset = uint64(len(b.live.taken))
		}
		if len(r.GetData()) > 0 || r.GetEof() {
			b.takeLive(&berthv1.ExecInput{Position: &berthv1.ExecInput_Offset{Offset: offset}, Data: r.GetData(), Eof: r.GetEof()})
		}
		taken = uint64(len(b.live.taken))
	})
	return &berthv1.WriteJobInputResponse{Offset: offset, NextOffset: taken}, nil
}

func (b *fakeBroker) StartJob(_ context.Context, r *berthv1.StartJobRequest) (*berthv1.StartJobResponse, error) {
	b.note(r)
	if err := b.runnable(r.GetSandboxId()); err != nil {
		return nil, err
	}
	return &berthv1.StartJobResponse{Job: b.newJob(r.GetSandboxId(), r.GetSpec())}, nil
}

func (b *fakeBroker) StopJob(_ context.Context, r *berthv1.StopJobRequest) (*berthv1.StopJobResponse, error) {
	b.note(r)
	job, _, err := b.job(r.GetJobId())
	b.change(func() {
		if b.live != nil && b.live.job.GetId() == r.GetJobId() {
			b.live.grace = r.GetGrace()
			b.endLive(outcomes["killed"])
		}
	})
	return &berthv1.StopJobResponse{Job: job}, err
}

func (b *fakeBroker) ListJobs(_ context.Context, r *berthv1.ListJobsRequest) (*berthv1.ListJobsResponse, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	page := &berthv1.ListJobsResponse{}
	for _, job := range b.jobs {
		if (r.GetSandboxId() == "" || r.GetSandboxId() == job.GetSandboxId()) &&
			(len(r.GetStates()) == 0 || slices.Contains(r.GetStates(), job.GetState())) {
			page.Jobs = append(page.Jobs, job)
		}
	}
	return page, nil
}

func (b *fakeBroker) PollJob(ctx context.Context, r *berthv1.PollJobRequest) (*berthv1.PollJobResponse, error) {
	timer := time.NewTimer(r.GetWait().AsDuration())
	defer timer.Stop()
	if r.GetWait().AsDuration() > time.Second {
		b.entered <- "poll"
	}
	for {
		job, changed, err := b.job(r.GetJobId())
		if err != nil {
			return nil, err
		}
		reply := &berthv1.PollJobResponse{Job: job}
		if r.GetTails() {
			b.mu.Lock()
			output := b.output[job.GetId()]
			b.mu.Unlock()
			reply.Stdout, reply.Stderr = tail(output[0]), tail(output[1])
		}
		if job.GetState() != berthv1.JobState_JOB_STATE_RUNNING {
			return reply, nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return reply, nil
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

func tail(output []byte) *berthv1.BoundedOutput {
	kept := output[max(0, len(output)-8):]
	return &berthv1.BoundedOutput{
		Tail: kept, TailOffset: uint64(len(output) - len(kept)), OmittedBytes: uint64(len(output) - len(kept)),
	}
}

// droppedBytes is the gap in every stream that is longer than itself.
var droppedBytes = [2]uint64{1 << 20, 1<<20 + 4096}

func (b *fakeBroker) ReadJobOutput(ctx context.Context, r *berthv1.ReadJobOutputRequest) (*berthv1.ReadJobOutputResponse, error) {
	timer := time.NewTimer(r.GetWait().AsDuration())
	defer timer.Stop()
	if r.GetWait() != nil {
		b.entered <- "read"
	}
	for {
		job, changed, err := b.job(r.GetJobId())
		if err != nil {
			return nil, err
		}
		if r.GetOffset() >= droppedBytes[0] && r.GetOffset() < droppedBytes[1] {
			return nil, failure(codes.OutOfRange, "OUTPUT_EXPIRED", "dropped", map[string]string{"first_kept": fmt.Sprint(droppedBytes[1])})
		}
		reply := b.chunk(job, r)
		if len(reply.GetData()) > 0 || reply.GetEof() {
			return reply, nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return reply, nil
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

func (b *fakeBroker) chunk(job *berthv1.Job, r *berthv1.ReadJobOutputRequest) *berthv1.ReadJobOutputResponse {
	b.mu.Lock()
	defer b.mu.Unlock()
	output := b.output[job.GetId()][0]
	if r.GetStream() == berthv1.Stream_STREAM_STDERR {
		output = b.output[job.GetId()][1]
	}
	total := uint64(len(output))
	end := min(total, r.GetOffset()+r.GetMaxBytes())
	if r.GetOffset() < droppedBytes[0] {
		end = min(end, droppedBytes[0])
	}
	done := job.GetState() == berthv1.JobState_JOB_STATE_DONE
	reply := &berthv1.ReadJobOutputResponse{
		Offset: r.GetOffset(), NextOffset: max(end, r.GetOffset()), Eof: done && end >= total,
		Stats: &berthv1.OutputStats{TotalBytes: total, Sealed: done},
	}
	if r.GetOffset() < end {
		reply.Data = output[r.GetOffset():end]
	}
	return reply
}

func (b *fakeBroker) ListProviders(context.Context, *berthv1.ListProvidersRequest) (*berthv1.ListProvidersResponse, error) {
	return &berthv1.ListProvidersResponse{Providers: []*berthv1.Provider{
		{
			Name: "local", Isolation: berthv1.Isolation_ISOLATION_NAMESPACE, Healthy: true, IsDefault: true,
			Capabilities: []*berthv1.Capability{{Name: "restart"}, {Name: "egress.none"}},
		},
		{Name: "docker", Isolation: berthv1.Isolation_ISOLATION_CONTAINER, Message: "no engine answers: start dockerd"},
	}}, nil
}

func (b *fakeBroker) GetInfo(context.Context, *berthv1.GetInfoRequest) (*berthv1.GetInfoResponse, error) {
	return &berthv1.GetInfoResponse{
		Version: "v0.1.0", InstanceId: "01KBA0Z6YR7Q5N3W8D4M1EINST", StartTime: ago(26 * time.Hour), Revision: 1234, SchemaVersion: 1,
		Sandboxes: map[string]uint32{"RUNNING": 1, "STOPPED": 1}, OpenJobs: 1, LedgerBytes: 64 << 10, OutputBytes: 3<<20 + 512<<10,
		StateDir: "/var/lib/berth", Platform: "go1.26 linux/amd64", ResidentBytes: 40 << 20, RecoveringMachines: 2,
		OrphanMachines: 1, OldestOrphan: durationpb.New(90 * time.Second),
	}, nil
}
