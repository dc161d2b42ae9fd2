package jobs

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"math"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/output"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// scriptedProvider is a provider whose machines are guests that say what the test has them say.
type scriptedProvider struct {
	mu     sync.Mutex
	guests map[string]*scriptedGuest
}

func (d *scriptedProvider) Info(context.Context) (providers.Info, error) {
	return providers.Info{Name: "den", Isolation: providers.IsolationNone, Healthy: true}, nil
}

func (d *scriptedProvider) Create(_ context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.guests[spec.MachineID] == nil {
		l := &scriptedGuest{spec: spec, bootID: "boot of " + spec.MachineID, list: make(chan *guestv1.ListResponse, 16), ended: make(chan struct{})}
		l.server = grpc.NewServer(grpc.MaxRecvMsgSize(8<<20), grpc.MaxSendMsgSize(8<<20))
		guestv1.RegisterGuestServiceServer(l.server, l)
		l.list <- &guestv1.ListResponse{BootId: l.bootID}
		d.guests[spec.MachineID] = l
		l.serving.Go(func() {
			_ = l.server.Serve(&dialling{path: filepath.Join(spec.ListenDir, reverse.SocketName), ended: l.ended})
		})
	}
	return providers.Handle{}, nil
}

func (d *scriptedProvider) Inspect(_ context.Context, id string) (providers.Machine, error) {
	if d.guest(id) == nil {
		return providers.Machine{}, providers.ErrNotFound
	}
	return providers.Machine{ID: id, State: providers.MachineRunning}, nil
}

func (d *scriptedProvider) List(context.Context) ([]providers.Machine, error) { return nil, nil }

func (d *scriptedProvider) Destroy(_ context.Context, machine providers.Machine) error {
	d.mu.Lock()
	l := d.guests[machine.ID]
	delete(d.guests, machine.ID)
	d.mu.Unlock()
	if l != nil {
		close(l.ended)
		l.server.Stop()
		l.serving.Wait()
	}
	return nil
}

func (d *scriptedProvider) Dialer(_ context.Context, machine providers.Machine) (providers.Dialer, error) {
	return reverse.Listen(machine.ListenDir, nil)
}

func (d *scriptedProvider) guest(id string) *scriptedGuest {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.guests[id]
}

// dialling is a listener whose connections are dialled out, one at a time, as a guest does.
type dialling struct {
	path  string
	ended chan struct{}
	live  chan struct{} // closed when the last connection was
}

func (d *dialling) Accept() (net.Conn, error) {
	for {
		if d.live != nil {
			select {
			case <-d.live:
			case <-d.ended:
				return nil, net.ErrClosed
			}
		}
		if conn, err := net.Dial("unix", d.path); err == nil {
			closed := &closing{Conn: conn, gone: make(chan struct{})}
			d.live = closed.gone
			return closed, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-d.ended:
			return nil, net.ErrClosed
		}
	}
}

func (d *dialling) Close() error   { return nil }
func (d *dialling) Addr() net.Addr { return &net.UnixAddr{Name: d.path} }

type closing struct {
	net.Conn
	once sync.Once
	gone chan struct{}
}

func (c *closing) Close() error {
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}

// scriptedGuest is a guest that knows its token and tells no truth beyond it.
type scriptedGuest struct {
	guestv1.UnimplementedGuestServiceServer
	spec    providers.MachineSpec
	bootID  string
	server  *grpc.Server
	serving sync.WaitGroup
	ended   chan struct{}
	list    chan *guestv1.ListResponse // what List answers, in turn

	mu    sync.Mutex
	start func(*guestv1.StartRequest) (*guestv1.Status, error)
	run   func(*guestv1.RunRequest) *guestv1.RunResponse
	read  func(*guestv1.ReadRequest) (*guestv1.ReadResponse, error)
	wait  func(string) (*guestv1.Status, error)
	stop  func(string) (*guestv1.Status, error)
}

func (l *scriptedGuest) says(change func(*scriptedGuest)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
}

func (l *scriptedGuest) Challenge(context.Context, *guestv1.ChallengeRequest) (*guestv1.ChallengeResponse, error) {
	return &guestv1.ChallengeResponse{Nonce: make([]byte, sha256.Size)}, nil
}

func (l *scriptedGuest) Hello(_ context.Context, request *guestv1.HelloRequest) (*guestv1.HelloResponse, error) {
	mac := hmac.New(sha256.New, l.spec.Token)
	mac.Write([]byte("berth guest"))
	mac.Write(request.GetNonce())
	mac.Write(make([]byte, sha256.Size)) // the challenge
	return &guestv1.HelloResponse{
		Protocol: 1, Build: "lies", MachineId: l.spec.MachineID, BootId: l.bootID, Proof: mac.Sum(nil), Workspace: "/", Shell: "/bin/sh",
	}, nil
}

func (l *scriptedGuest) List(ctx context.Context, _ *guestv1.ListRequest) (*guestv1.ListResponse, error) {
	select {
	case response := <-l.list:
		response.BootId = l.bootID
		return response, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.ended:
		return nil, status.Error(codes.Unavailable, "ended")
	}
}

func (l *scriptedGuest) Start(_ context.Context, request *guestv1.StartRequest) (*guestv1.StartResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.start == nil {
		return &guestv1.StartResponse{Status: &guestv1.Status{JobId: request.GetJobId(), Durable: true}}, nil
	}
	answer, err := l.start(request)
	return &guestv1.StartResponse{Status: answer}, err
}

func (l *scriptedGuest) Run(_ context.Context, request *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.run == nil {
		return nil, status.Error(codes.DeadlineExceeded, "the caller's time is over")
	}
	return l.run(request), nil
}

func (l *scriptedGuest) Read(_ context.Context, request *guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.read == nil {
		return &guestv1.ReadResponse{Data: make([]byte, request.GetMaxBytes())}, nil
	}
	return l.read(request)
}

func (l *scriptedGuest) Wait(_ context.Context, request *guestv1.WaitRequest) (*guestv1.WaitResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wait == nil {
		return nil, status.Error(codes.NotFound, "no job")
	}
	answer, err := l.wait(request.GetJobId())
	return &guestv1.WaitResponse{Status: answer}, err
}

func (l *scriptedGuest) Stop(_ context.Context, request *guestv1.StopRequest) (*guestv1.StopResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stop == nil {
		return nil, status.Error(codes.NotFound, "no job")
	}
	answer, err := l.stop(request.GetJobId())
	return &guestv1.StopResponse{Status: answer}, err
}

func (l *scriptedGuest) Forget(context.Context, *guestv1.ForgetRequest) (*guestv1.ForgetResponse, error) {
	return &guestv1.ForgetResponse{}, nil
}

// scripted makes a harness with a sandbox whose guest says what the test has it say.
func scripted(t *testing.T, options ...func(*harness)) (*harness, *scriptedProvider, *recordv1.SandboxRecord, *scriptedGuest) {
	t.Helper()
	w := bareHarness(t)
	d := &scriptedProvider{guests: map[string]*scriptedGuest{}}
	w.provider = d
	for _, option := range options {
		option(w)
	}
	w.start()
	t.Cleanup(func() {
		w.stop()
		for id := range d.guests {
			must(t, d.Destroy(context.Background(), providers.Machine{ID: id}))
		}
		must(t, w.ledger.Close())
	})
	sandbox := w.sandbox()
	// Its first list names no job: one that is started before that was read would be asked for, and lost.
	w.wait("the first list of the guest's jobs", func() bool { return !w.Syncing() })
	return w, d, sandbox, d.guest(sandbox.GetMachineId())
}

// refusal is a status as a guest marks it that refuses.
func refusal(code codes.Code) error {
	refused, err := status.New(code, "no").WithDetails(&errdetails.ErrorInfo{Reason: "REFUSED", Domain: "berth.guest.v1"})
	if err != nil {
		return err
	}
	return refused.Err()
}

func exited(code int32) *berthv1.Outcome {
	return &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: code}}
}

func sealedStats(total uint64, kept ...*berthv1.ByteRange) *berthv1.OutputStats {
	return &berthv1.OutputStats{TotalBytes: total, Kept: kept, Sealed: true}
}

func finished(id string, outcome *berthv1.Outcome) *guestv1.Status {
	return &guestv1.Status{JobId: id, Done: true, Durable: true, Outcome: outcome, Stdout: sealedStats(0), Stderr: sealedStats(0)}
}

func TestAnOutcomeIsOnlyWhatAnOutcomeCanBe(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	huge := strings.Repeat("ü", 1<<19)
	survivors := make([]uint32, 100_000)
	for _, test := range []struct {
		name    string
		outcome *berthv1.Outcome
		cause   berthv1.Cause
		code    *int32
	}{
		{"none", nil, berthv1.Cause_CAUSE_LOST, nil},
		{"no cause", &berthv1.Outcome{Exit: &berthv1.Outcome_ExitCode{ExitCode: 0}}, berthv1.Cause_CAUSE_LOST, nil},
		{"a cause that nobody knows", &berthv1.Outcome{Cause: 99, Exit: &berthv1.Outcome_ExitCode{ExitCode: 0}}, berthv1.Cause_CAUSE_LOST, nil},
		{"a negative cause", &berthv1.Outcome{Cause: -1}, berthv1.Cause_CAUSE_LOST, nil},
		{"a code below 0", exited(-1), berthv1.Cause_CAUSE_EXITED, nil},
		{"a code above 255", exited(256), berthv1.Cause_CAUSE_EXITED, nil},
		{"the largest code", exited(255), berthv1.Cause_CAUSE_EXITED, proto.Int32(255)},
		{"lost with a code", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST, Exit: &berthv1.Outcome_ExitCode{ExitCode: 0}}, berthv1.Cause_CAUSE_LOST, nil},
		{"a novel for a reason", &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_SIGNALED, Reason: huge, Survivors: survivors}, berthv1.Cause_CAUSE_SIGNALED, nil},
	} {
		job := w.started(sandbox, shell("true"))
		lie := finished(job.GetId(), test.outcome)
		lie.StartTime, lie.EndTime = timestamppb.New(time.Now().Add(1e6*time.Hour)), &timestamppb.Timestamp{Seconds: math.MaxInt64}
		lie.Shell, lie.CpuTime = huge, &durationpb.Duration{Seconds: math.MinInt64}
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{lie}}
		done := w.done(job.GetId())
		outcome := done.GetOutcome()
		if outcome.GetCause() != test.cause || (outcome.Exit == nil) != (test.code == nil) || outcome.GetExitCode() != int32OrZero(test.code) {
			t.Errorf("%s: it ended as %v", test.name, outcome)
		}
		if done.GetStartTime() != nil || done.GetEndTime() != nil || proto.Size(done) > 64<<10 {
			t.Errorf("%s: the record is %d bytes, from %v to %v", test.name, proto.Size(done), done.GetStartTime(), done.GetEndTime())
		}
	}
}

func int32OrZero(n *int32) int32 {
	if n == nil {
		return 0
	}
	return *n
}

func TestOutputIsOnlyWhatCanBe(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	const limit = 1000
	for _, test := range []struct {
		name  string
		stats *berthv1.OutputStats
		read  func(*guestv1.ReadRequest) (*guestv1.ReadResponse, error)
		kept  uint64
	}{
		{"what is true", sealedStats(500, byteRange(0, 500)), nil, 500},
		{"more than the limit", sealedStats(1<<40, byteRange(0, 1<<40)), nil, limit},
		{"as much as there can be", sealedStats(math.MaxUint64, byteRange(0, 10), byteRange(math.MaxInt64-10, math.MaxInt64)), nil, 20},
		{"a range that ends before it begins", sealedStats(500, byteRange(400, 300)), nil, 0},
		{"a range beyond the end", sealedStats(10, byteRange(0, 11)), nil, 0},
		{"ranges that overlap", sealedStats(500, byteRange(0, 300), byteRange(200, 500)), nil, 300},
		{"ranges in no order", sealedStats(500, byteRange(400, 500), byteRange(0, 100)), nil, 200},
		{"a hundred thousand ranges", sealedStats(1<<30, manyRanges(100_000)...), nil, 2},
		{"bytes that never come", sealedStats(500, byteRange(0, 500)), func(*guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
			return &guestv1.ReadResponse{}, nil
		}, 0},
		{"more bytes than were asked for", sealedStats(500, byteRange(0, 500)), func(*guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
			return &guestv1.ReadResponse{Data: make([]byte, 1<<20)}, nil
		}, 500},
		{"bytes that are gone", sealedStats(500, byteRange(0, 500)), func(*guestv1.ReadRequest) (*guestv1.ReadResponse, error) {
			return nil, status.Error(codes.OutOfRange, "dropped")
		}, 0},
	} {
		job := w.started(sandbox, &berthv1.JobSpec{Shell: "true", OutputLimitBytes: limit})
		lie := finished(job.GetId(), exited(0))
		lie.Stdout = test.stats
		l.says(func(l *scriptedGuest) { l.read = test.read })
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{lie}}
		done := w.done(job.GetId())
		stats := done.GetStdout()
		if got := output.Length(stats.GetKept()); got != test.kept || len(stats.GetKept()) > 2 || stats.GetDroppedBytes() != stats.GetTotalBytes()-got {
			t.Errorf("%s: %d bytes are kept, want %d; the stats are %v", test.name, got, test.kept, stats)
		}
		if stored := w.output.Ranges(job.GetId(), stdout); output.Length(stored) != test.kept {
			t.Errorf("%s: %v is stored", test.name, stored)
		}
		if _, err := w.Tails(w.ctx, done, 100); err != nil {
			t.Errorf("%s: its tails: %v", test.name, err)
		}
		if _, err := w.fromReceipt(done, 100); err != nil {
			t.Errorf("%s: its head and tail: %v", test.name, err)
		}
	}
}

func manyRanges(n uint64) []*berthv1.ByteRange {
	ranges := make([]*berthv1.ByteRange, 0, n)
	for i := range n {
		ranges = append(ranges, byteRange(2*i, 2*i+1))
	}
	return ranges
}

func TestAnOutcomeNeverChangesOnceItWasGiven(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	job := w.started(sandbox, shell("true"))
	first := finished(job.GetId(), exited(3))
	first.Stdout = &berthv1.OutputStats{} // not sealed, so that there is more to come
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{first}}
	w.wantExit(w.done(job.GetId()), 3)
	other := finished(job.GetId(), exited(0))
	other.Stdout = sealedStats(100, byteRange(0, 100))
	l.says(func(l *scriptedGuest) { l.stop = func(string) (*guestv1.Status, error) { return other, nil } })
	running := &guestv1.Status{JobId: job.GetId(), Durable: true}
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{running}}
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{other}}
	w.wait("its output to be sealed", func() bool { return record.IsComplete(w.record(job.GetId())) })
	w.wantExit(w.record(job.GetId()), 3)
	complete := w.record(job.GetId())
	stopped, err := w.Stop(w.ctx, call("stop", ""), job.GetId(), nil)
	must(t, err)
	w.wantExit(stopped, 3)
	another := finished(job.GetId(), exited(7))
	another.Stdout = sealedStats(1000, byteRange(0, 1000))
	l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{another}}
	l.list <- &guestv1.ListResponse{}
	l.list <- &guestv1.ListResponse{}
	w.wait("the lies to be heard", func() bool { return len(l.list) == 0 })
	background.Pause(w.ctx, 50*time.Millisecond)
	if now := w.record(job.GetId()); !same(now, complete) {
		t.Errorf("the receipt was %v and is %v", complete, now)
	}
}

func TestAGuestHasNoSayInAnotherMachinesJobs(t *testing.T) {
	t.Parallel()
	w, d, sandbox, _ := scripted(t)
	other := w.sandbox()
	l := d.guest(other.GetMachineId())
	running := w.started(sandbox, shell("true"))
	reserved := w.reserved(sandbox, &berthv1.JobSpec{Shell: "true", SecretEnv: map[string]string{"KEY": "secret"}})
	w.wait("it to run", func() bool { return record.HasBegun(w.record(running.GetId())) })
	before := []*recordv1.JobRecord{w.record(running.GetId()), w.record(reserved.GetId())}

	for _, job := range before {
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{finished(job.GetId(), exited(0)), {JobId: job.GetId(), Durable: true}}}
		l.says(func(l *scriptedGuest) {
			lie := finished(job.GetId(), exited(0))
			l.start = func(*guestv1.StartRequest) (*guestv1.Status, error) {
				return &guestv1.Status{JobId: job.GetId(), Durable: true}, nil
			}
			l.stop = func(string) (*guestv1.Status, error) { return lie, nil }
			l.wait = func(string) (*guestv1.Status, error) { return lie, nil }
		})
		mine, err := w.Start(w.ctx, call("start", ""), other.GetId(), shell("true"))
		if !fault.Is(err, fault.Internal) {
			t.Errorf("a start that was answered with another job: %v (%v)", mine, err)
		}
		own := w.reserved(other, shell("true"))
		w.starter.Running(w.ctx, &guestv1.Status{JobId: own.GetId(), Durable: true})
		if polled, err := w.Poll(w.ctx, namespace, own.GetId(), 0); !fault.Is(err, fault.Internal) {
			t.Errorf("a poll that was answered with another job: %v (%v)", polled, err)
		}
		if stopped, err := w.Stop(w.ctx, call("stop", ""), own.GetId(), nil); !fault.Is(err, fault.Internal) {
			t.Errorf("a stop that was answered with another job: %v (%v)", stopped, err)
		}
		w.wait("the lies to be heard", func() bool { return len(l.list) == 0 })
		background.Pause(w.ctx, 20*time.Millisecond)
	}
	for _, job := range before {
		if now := w.record(job.GetId()); !same(now, job) {
			t.Errorf("job %s was %v and is %v", job.GetId(), job, now)
		}
	}
}

func TestARunReturnsNoMoreThanWasAskedFor(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	for name, response := range map[string]*guestv1.RunResponse{
		"nothing at all": {},
		"too much": {
			Status: &guestv1.Status{Done: true, Outcome: exited(0), Stdout: sealedStats(1<<20, manyRanges(1000)...)},
			Stdout: &guestv1.Output{Head: make([]byte, 2<<20), Tail: make([]byte, 1<<20), TailOffset: math.MaxUint64},
		},
		"too much of an end": {
			Status: &guestv1.Status{Done: true, Outcome: exited(0)}, Stdout: &guestv1.Output{Head: make([]byte, 10), Tail: make([]byte, 2<<20)},
		},
	} {
		l.says(func(l *scriptedGuest) {
			l.run = func(request *guestv1.RunRequest) *guestv1.RunResponse {
				if response.GetStatus() != nil {
					response.Status.JobId = request.GetStart().GetJobId()
				}
				return response
			}
		})
		ran, err := w.Run(w.ctx, call("run", ""), sandbox.GetId(), shell("true"), 100)
		if err != nil || len(ran.Stdout.GetHead())+len(ran.Stdout.GetTail()) > 100 || proto.Size(ran.Job) > 4<<10 || !record.IsDone(ran.Job) {
			t.Errorf("%s: %d and %d bytes, %v (%v)", name, len(ran.Stdout.GetHead()), len(ran.Stdout.GetTail()), ran.Job, err)
		}
	}
}

func TestACommandWhoseGuestIsFirstToSayThatItsCallersTimeIsOverIsRecorded(t *testing.T) {
	t.Parallel()
	w, _, sandbox, _ := scripted(t)
	if _, err := w.Run(w.ctx, call("run", ""), sandbox.GetId(), shell("true"), 100); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the error is %v", err)
	}
	w.wait("its record", func() bool {
		jobs, _, _, err := w.List(namespace, Filter{SandboxID: sandbox.GetId()}, store.Page{Size: 10})
		return err == nil && len(jobs) == 1 && record.IsDone(jobs[0])
	})
}

func TestWhatIsNoJobOfTheLedgerIsNotRecovered(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	for _, id := range []string{"", "../../etc/passwd", request.SetupJobID(sandbox.GetId(), 1)} {
		l.list <- &guestv1.ListResponse{Statuses: []*guestv1.Status{finished(id, exited(0)), {JobId: id}}}
	}
	w.recovered(sandbox)
}

func TestAStartThatItsGuestRefusesForGoodEndsTheJob(t *testing.T) {
	t.Parallel()
	w, _, sandbox, l := scripted(t)
	for _, test := range []struct {
		name  string
		err   error
		cause berthv1.Cause // unspecified: it stays reserved
	}{
		{"a spec that makes no sense", status.Error(codes.InvalidArgument, "no"), berthv1.Cause_CAUSE_FAILED_TO_START},
		{"what it cannot do", refusal(codes.Unimplemented), berthv1.Cause_CAUSE_FAILED_TO_START},
		{"a call that it does not know", status.Error(codes.Unimplemented, "no"), 0},
		{"a defect", status.Error(codes.Internal, "oops"), 0},
		{"no space left", refusal(codes.ResourceExhausted), berthv1.Cause_CAUSE_FAILED_TO_START},
		{"a reply that is too large", status.Error(codes.ResourceExhausted, "received message larger than max"), 0},
	} {
		l.says(func(l *scriptedGuest) {
			l.start = func(*guestv1.StartRequest) (*guestv1.Status, error) { return nil, test.err }
		})
		job, err := w.Start(w.ctx, call("start", test.name), sandbox.GetId(), shell("true"))
		if test.cause != 0 {
			must(t, err)
			w.wantCause(job, test.cause, "refused:")
			continue
		}
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v (%v)", test.name, job, err)
		}
	}
}
