package api

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Bounds of what one reply returns, as the API documents.
const (
	defaultRunOutput = 256 << 10
	maxRunOutput     = 512 << 10 // a stream, so that both are at most 1 MiB
	maxMergedOutput  = 1 << 20
	defaultTail      = 8 << 10
	maxTail          = 256 << 10
	defaultRead      = 256 << 10
	maxRead          = 1 << 20
)

// jobService serves berth.v1.JobService.
type jobService struct {
	berthv1.UnimplementedJobServiceServer
	*api
}

func (j *jobService) RunCommand(ctx context.Context, request *berthv1.RunCommandRequest) (*berthv1.RunCommandResponse, error) {
	call, err := j.call(ctx, "berth.v1.JobService/RunCommand", request)
	if err != nil {
		return nil, err
	}
	if err := validJobRequest(request.GetSandboxId(), request.GetSpec()); err != nil {
		return nil, err
	}
	if err := validRun(request.GetSpec()); err != nil {
		return nil, err
	}
	limit, err := runOutput(request)
	if err != nil {
		return nil, err
	}
	ran, err := j.Jobs.Run(ctx, call, request.GetSandboxId(), request.GetSpec(), limit)
	if err != nil {
		return nil, err
	}
	return &berthv1.RunCommandResponse{
		Job:    jobToProto(ran.Job, basicSpec),
		Stdout: bounded(ran.Stdout, ran.Job.GetStdout(), request.GetTextOutput()),
		Stderr: bounded(ran.Stderr, ran.Job.GetStderr(), request.GetTextOutput()),
	}, nil
}

// runOutput is how much a RunCommand returns of each stream.
func runOutput(request *berthv1.RunCommandRequest) (uint64, error) {
	limit := uint64(maxRunOutput)
	if request.GetSpec().GetMergeStderr() {
		limit = maxMergedOutput
	}
	if request.GetTextOutput() {
		limit /= 2 // text is up to twice as long as what it is made of
	}
	switch asked := request.GetMaxOutputBytes(); {
	case asked == 0:
		return defaultRunOutput, nil
	case asked > limit:
		return 0, fault.Invalid("max_output_bytes", "must be at most %d here: start the command with StartJob and read all of it with ReadJobOutput", limit)
	default:
		return asked, nil
	}
}

func (j *jobService) StartJob(ctx context.Context, request *berthv1.StartJobRequest) (*berthv1.StartJobResponse, error) {
	call, err := j.call(ctx, "berth.v1.JobService/StartJob", request)
	if err != nil {
		return nil, err
	}
	if err := validJobRequest(request.GetSandboxId(), request.GetSpec()); err != nil {
		return nil, err
	}
	job, err := j.Jobs.Start(ctx, call, request.GetSandboxId(), request.GetSpec())
	if err != nil {
		return nil, err
	}
	return &berthv1.StartJobResponse{Job: jobToProto(job, basicSpec)}, nil
}

func validJobRequest(sandboxID string, spec *berthv1.JobSpec) error {
	if err := required("sandbox_id", sandboxID); err != nil {
		return err
	}
	return validJobSpec(spec)
}

func (j *jobService) PollJob(ctx context.Context, request *berthv1.PollJobRequest) (*berthv1.PollJobResponse, error) {
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	wait, err := waitOf(request.GetWait())
	if err != nil {
		return nil, err
	}
	if request.GetTailBytes() > maxTail {
		return nil, fault.Invalid("tail_bytes", "must be at most %d: read the whole with ReadJobOutput", maxTail)
	}
	job, err := j.Jobs.Poll(ctx, namespace(ctx), request.GetJobId(), wait)
	if err != nil {
		return nil, err
	}
	if !request.GetTails() && request.GetTailBytes() == 0 {
		return &berthv1.PollJobResponse{Job: jobToProto(job, fullSpec)}, nil
	}
	response := &berthv1.PollJobResponse{Job: jobToProto(job, basicSpec)}
	limit := request.GetTailBytes()
	if limit == 0 {
		limit = defaultTail
	}
	tails, err := j.Jobs.Tails(ctx, job, limit)
	if err != nil {
		return nil, err
	}
	response.Stdout = bounded(tails.Stdout, job.GetStdout(), request.GetTextOutput())
	response.Stderr = bounded(tails.Stderr, job.GetStderr(), request.GetTextOutput())
	return response, nil
}

func (j *jobService) ReadJobOutput(ctx context.Context, request *berthv1.ReadJobOutputRequest) (*berthv1.ReadJobOutputResponse, error) {
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	wait, err := waitOf(request.GetWait())
	if err != nil {
		return nil, err
	}
	stream := request.GetStream()
	switch {
	case stream == berthv1.Stream_STREAM_UNSPECIFIED:
		stream = berthv1.Stream_STREAM_STDOUT
	case stream != berthv1.Stream_STREAM_STDOUT && stream != berthv1.Stream_STREAM_STDERR:
		return nil, fault.Invalid("stream", "is not one of STREAM_STDOUT, STREAM_STDERR")
	}
	limit, largest := request.GetMaxBytes(), uint64(maxRead)
	if request.GetTextOutput() {
		largest /= 2
	}
	switch {
	case limit == 0:
		limit = defaultRead
	case limit > largest:
		return nil, fault.Invalid("max_bytes", "must be at most %d here: read on at next_offset", largest)
	}
	piece, err := j.Jobs.ReadOutput(ctx, namespace(ctx), request.GetJobId(), stream, request.GetOffset(), limit, wait)
	if err != nil {
		return nil, err
	}
	response := &berthv1.ReadJobOutputResponse{
		Offset: request.GetOffset(), Data: piece.Data, NextOffset: request.GetOffset() + uint64(len(piece.Data)),
		Eof: piece.EOF, Stats: piece.Stats,
	}
	if request.GetTextOutput() {
		response.Text, response.TextReplaced = text(piece.Data)
	}
	return response, nil
}

func (j *jobService) StopJob(ctx context.Context, request *berthv1.StopJobRequest) (*berthv1.StopJobResponse, error) {
	call, err := j.call(ctx, "berth.v1.JobService/StopJob", request)
	if err != nil {
		return nil, err
	}
	if err := required("job_id", request.GetJobId()); err != nil {
		return nil, err
	}
	if err := validDuration("grace", request.GetGrace(), maxKillGrace); err != nil {
		return nil, err
	}
	job, err := j.Jobs.Stop(ctx, call, request.GetJobId(), request.GetGrace())
	if err != nil {
		return nil, err
	}
	return &berthv1.StopJobResponse{Job: jobToProto(job, basicSpec)}, nil
}

func (j *jobService) ListJobs(ctx context.Context, request *berthv1.ListJobsRequest) (*berthv1.ListJobsResponse, error) {
	if err := validFilter(request.GetLabels(), len(request.GetStates())); err != nil {
		return nil, err
	}
	if err := validID("sandbox_id", request.GetSandboxId()); err != nil {
		return nil, err
	}
	cut := map[string]bool{}
	page, err := j.pageOf(ctx, request, cut)
	if err != nil {
		return nil, err
	}
	if request.GetSandboxId() != "" {
		if _, _, err := j.Sandboxes.Get(namespace(ctx), request.GetSandboxId()); err != nil {
			return nil, err
		}
	}
	records, next, revision, err := j.Jobs.List(namespace(ctx), jobs.Filter{
		SandboxID: request.GetSandboxId(), States: request.GetStates(), Labels: request.GetLabels(),
	}, page)
	if err != nil {
		return nil, err
	}
	response := &berthv1.ListJobsResponse{NextPageToken: j.tokenOf(ctx, request, next), Revision: revision}
	for _, record := range records {
		job := jobToProto(record, fullSpec)
		job.SpecCut = cut[record.GetId()]
		response.Jobs = append(response.Jobs, job)
	}
	return response, nil
}

// waitOf reads how long a call may wait.
func waitOf(wait *durationpb.Duration) (time.Duration, error) {
	return wait.AsDuration(), validDuration("wait", wait, maxWait)
}

// jobToProto is a job as the API shows it, with at most about limit bytes of its spec.
func jobToProto(record *recordv1.JobRecord, limit int) *berthv1.Job {
	job := &berthv1.Job{
		Id: record.GetId(), Namespace: record.GetNamespace(), SandboxId: record.GetSandboxId(), MachineId: record.GetMachineId(),
		Generation: record.GetGeneration(), Revision: record.GetRevision(), State: record.GetState(),
		Spec: proto.CloneOf(record.GetSpec()), Detached: record.GetDetached(), Outcome: record.GetOutcome(),
		Stdout: record.GetStdout(), Stderr: record.GetStderr(), CreateTime: record.GetCreateTime(),
		StartTime: record.GetStartTime(), EndTime: record.GetEndTime(), Shell: record.GetShell(), Holder: record.GetHolder(),
	}
	if record.GetCpuNanos() > 0 {
		job.CpuTime = durationpb.New(time.Duration(record.GetCpuNanos()))
	}
	job.SpecCut = cutJobSpec(job.GetSpec(), limit)
	if name := signalName(job.GetOutcome().GetWaitStatus().GetSignal()); name != "" {
		job.Outcome = proto.CloneOf(job.GetOutcome())
		job.Outcome.WaitStatus.SignalName = name
	}
	return job
}
