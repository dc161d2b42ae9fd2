package api

import (
	"errors"
	"io"
	"math"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func input(data string, offset ...uint64) *berthv1.ExecRequest {
	piece := &berthv1.ExecInput{Data: []byte(data)}
	if len(offset) > 0 {
		piece.Position = &berthv1.ExecInput_Offset{Offset: offset[0]}
	}
	return &berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: piece}}
}

// attached is an Exec whose caller sends these messages and half-closes.
func attached(t *testing.T, messages ...*berthv1.ExecRequest) *execPeer {
	t.Helper()
	peer := &execPeer{
		stream: &caller{ctx: t.Context(), messages: messages}, received: make(chan received), closed: make(chan struct{}),
		done: make(chan struct{}), over: make(chan struct{}),
	}
	var receiving sync.WaitGroup
	receiving.Go(peer.receive)
	t.Cleanup(func() {
		close(peer.over)
		receiving.Wait()
	})
	return peer
}

func pieces(t *testing.T, peer *execPeer) []*guestv1.AttachInput {
	t.Helper()
	var all []*guestv1.AttachInput
	for {
		message, err := peer.Receive()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, message.GetInput())
	}
}

func TestInputWithoutAnOffsetFollowsWhatCameBefore(t *testing.T) {
	open := &recordv1.JobRecord{Spec: &berthv1.JobSpec{Stdin: &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}}}
	for _, test := range []struct {
		name     string
		job      *recordv1.JobRecord
		taken    uint64
		messages []*berthv1.ExecRequest
		want     []uint64 // offsets; the last is where the half-close ends stdin, where it does
		ends     bool
	}{
		{"none names its offset", open, 0, []*berthv1.ExecRequest{input("abc"), input("de"), input("f")}, []uint64{0, 3, 5, 6}, true},
		{"after a reattach", open, 10, []*berthv1.ExecRequest{input("abc"), input("de")}, []uint64{10, 13, 15}, true},
		{"all name theirs", open, 0, []*berthv1.ExecRequest{input("abc", 0), input("de", 3)}, []uint64{0, 3, 5}, true},
		{"one is sent again", open, 0, []*berthv1.ExecRequest{input("abc", 0), input("abc", 0), input("d")}, []uint64{0, 0, 3, 4}, true},
		{"nothing but a half-close", open, 7, nil, []uint64{7}, true},
		{"a terminal", &recordv1.JobRecord{Spec: &berthv1.JobSpec{Tty: &berthv1.TerminalSize{Cols: 80, Rows: 24}}}, 0, []*berthv1.ExecRequest{input("x")}, []uint64{0, 1}, true},
		{"a command that takes no input", &recordv1.JobRecord{}, 0, nil, nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			peer := attached(t, test.messages...)
			if err := peer.Started(test.job, test.taken); err != nil {
				t.Fatal(err)
			}
			got := pieces(t, peer)
			if len(got) != len(test.want) {
				t.Fatalf("it passed on %v", got)
			}
			for i, piece := range got {
				last := test.ends && i == len(got)-1
				if piece.GetOffset() != test.want[i] || piece.GetEof() != last || last && len(piece.GetData()) > 0 {
					t.Errorf("piece %d is %v, want one at %d", i, piece, test.want[i])
				}
			}
			if peer.acknowledged(t.Context()) {
				t.Error("a half-close from before the end says that the end was received")
			}
		})
	}
}

func TestAHalfCloseAfterTheEndAcknowledgesItAndEndsNoInput(t *testing.T) {
	job := &recordv1.JobRecord{Spec: &berthv1.JobSpec{Tty: &berthv1.TerminalSize{Cols: 1, Rows: 1}}}
	peer := &execPeer{
		stream: &caller{ctx: t.Context()}, received: make(chan received), closed: make(chan struct{}), done: make(chan struct{}), over: make(chan struct{}),
	}
	if err := errors.Join(peer.Started(job, 0), peer.Done(job)); err != nil {
		t.Fatal(err)
	}
	var receiving sync.WaitGroup
	receiving.Go(peer.receive)
	if message, err := peer.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("it passed on %v (%v)", message, err)
	}
	if !peer.acknowledged(t.Context()) {
		t.Error("the end was not acknowledged")
	}
	close(peer.over)
	receiving.Wait()
}

func TestASignalIsNamedOrNumbered(t *testing.T) {
	for _, test := range []struct {
		number uint32
		name   string
		want   uint32
		field  string
	}{
		{1, "", 1, ""}, {9, "", 9, ""}, {64, "", 64, ""}, {0, "TERM", 15, ""}, {0, "SIGTERM", 15, ""}, {0, "sigusr1", 10, ""}, {0, "Winch", 28, ""},
		{0, "", 0, "signal"}, {65, "", 0, "signal"}, {math.MaxUint32, "", 0, "signal"},
		{15, "TERM", 0, "signal_name"}, {0, "NONE", 0, "signal_name"}, {0, "SIG", 0, "signal_name"}, {0, "9", 0, "signal_name"}, {0, "SIGSIGTERM", 0, "signal_name"},
	} {
		got, err := signalOf(&berthv1.SignalJobRequest{Signal: test.number, SignalName: test.name})
		var known *fault.Error
		if got != test.want || (err == nil) != (test.field == "") || err != nil && (!errors.As(err, &known) || known.Fields[0].Path != test.field) {
			t.Errorf("%d %q: %d (%v)", test.number, test.name, got, err)
		}
	}
	killed := &recordv1.JobRecord{Outcome: &berthv1.Outcome{WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Signal{Signal: 9}}}}
	if name := jobToProto(killed, basicSpec).GetOutcome().GetWaitStatus().GetSignalName(); name != "SIGKILL" {
		t.Errorf("the signal of an outcome is called %q", name)
	}
	if killed.GetOutcome().GetWaitStatus().GetSignalName() != "" {
		t.Error("the record was changed")
	}
	for _, number := range []uint32{0, 64, math.MaxUint32} {
		if name := signalName(number); name != "" {
			t.Errorf("signal %d is called %q", number, name)
		}
	}
}

func TestTheEdgesOfEveryNumber(t *testing.T) {
	resources := func(change func(*berthv1.Resources)) error {
		r := &berthv1.Resources{}
		change(r)
		return validResources(r)
	}
	cpus := func(n float64) error { return resources(func(r *berthv1.Resources) { r.Cpus = n }) }
	memory := func(n uint64) error { return resources(func(r *berthv1.Resources) { r.MemoryBytes = n }) }
	disk := func(n uint64) error { return resources(func(r *berthv1.Resources) { r.DiskBytes = n }) }
	pids := func(n uint64) error { return resources(func(r *berthv1.Resources) { r.Pids = n }) }
	depth := func(n uint32) error { return validRepo(&berthv1.Repo{Url: "/r", Depth: n}) }
	timeout := func(d *durationpb.Duration) error {
		return validJobSpec(&berthv1.JobSpec{Argv: []string{"true"}, Timeout: d})
	}
	grace := func(d *durationpb.Duration) error {
		return validJobSpec(&berthv1.JobSpec{Argv: []string{"true"}, KillGrace: d})
	}
	limit := func(n uint64) error {
		return validJobSpec(&berthv1.JobSpec{Argv: []string{"true"}, OutputLimitBytes: n})
	}
	at := func(offset uint64, n int) error { return validInput("", offset, make([]byte, n)) }
	for name, err := range map[string]error{
		"the provider's CPUs": cpus(0), "the fewest CPUs": cpus(minCPUs), "the most CPUs": cpus(maxCPUs),
		"the provider's memory": memory(0), "the least memory": memory(minMemory), "the most memory": memory(maxSize),
		"the provider's disk": disk(0), "the least disk": disk(minDisk), "the most disk": disk(maxSize),
		"the provider's pids": pids(0), "the fewest pids": pids(minPids), "the most pids": pids(maxPids),
		"all of the history": depth(0), "the deepest history": depth(math.MaxInt32),
		"no timeout": timeout(nil), "a timeout of zero": timeout(durationpb.New(0)), "the shortest timeout": timeout(durationpb.New(1)), "the longest timeout": timeout(durationpb.New(maxTimeout)),
		"no grace": grace(durationpb.New(0)), "the longest grace": grace(durationpb.New(maxKillGrace)),
		"the most output": limit(maxOutputLimit), "the largest input": at(0, maxStdinBytes), "the last input": at(math.MaxInt64-maxStdinBytes, 1),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, test := range map[string]struct {
		err   error
		field string
	}{
		"CPUs that come out as none": {cpus(1e-12), "spec.resources.cpus"}, "less than the fewest CPUs": {cpus(0.009), "spec.resources.cpus"},
		"the least CPUs of all": {cpus(math.SmallestNonzeroFloat64), "spec.resources.cpus"}, "too many CPUs": {cpus(4096.1), "spec.resources.cpus"},
		"less than no CPUs": {cpus(-1), "spec.resources.cpus"}, "endless CPUs": {cpus(math.Inf(1)), "spec.resources.cpus"}, "CPUs that are no number": {cpus(math.NaN()), "spec.resources.cpus"},
		"too little memory": {memory(minMemory - 1), "spec.resources.memory_bytes"}, "too much memory": {memory(maxSize + 1), "spec.resources.memory_bytes"},
		"memory that is negative elsewhere": {memory(1 << 63), "spec.resources.memory_bytes"}, "all the memory there is": {memory(math.MaxUint64), "spec.resources.memory_bytes"},
		"too little disk": {disk(minDisk - 1), "spec.resources.disk_bytes"}, "too much disk": {disk(maxSize + 1), "spec.resources.disk_bytes"},
		"one pid": {pids(1), "spec.resources.pids"}, "too few pids": {pids(minPids - 1), "spec.resources.pids"}, "6 MiB of memory": {memory(6 << 20), "spec.resources.memory_bytes"},
		"too many pids": {pids(maxPids + 1), "spec.resources.pids"}, "pids that are negative elsewhere": {pids(1 << 63), "spec.resources.pids"},
		"too deep a history": {depth(math.MaxInt32 + 1), "spec.workspace.repo.depth"},
		"too long a timeout": {timeout(durationpb.New(maxTimeout + 1)), "spec.timeout"}, "a timeout without end": {timeout(&durationpb.Duration{Seconds: math.MaxInt64}), "spec.timeout"},
		"a timeout below zero":               {timeout(durationpb.New(-1)), "spec.timeout"},
		"nanoseconds of another sign":        {timeout(&durationpb.Duration{Seconds: 1, Nanos: -1}), "spec.timeout"},
		"nanoseconds that make a second":     {timeout(&durationpb.Duration{Nanos: 1e9}), "spec.timeout"},
		"too long a grace":                   {grace(durationpb.New(maxKillGrace + 1)), "spec.kill_grace"},
		"too much output":                    {limit(maxOutputLimit + 1), "spec.output_limit_bytes"},
		"too large an input":                 {at(0, maxStdinBytes+1), "data"},
		"input beyond the last offset":       {at(math.MaxInt64, 1), "offset"},
		"input that begins at its beginning": {at(math.MaxUint64, 1), "offset"},
	} {
		var known *fault.Error
		if !errors.As(test.err, &known) || len(known.Fields) != 1 || known.Fields[0].Path != test.field {
			t.Errorf("%s: %v, want %s", name, test.err, test.field)
		}
	}
}

func TestTheEdgesOfEveryText(t *testing.T) {
	x := func(n int) string { return strings.Repeat("x", n) }
	spec := func(n int) map[string]*berthv1.SandboxSpec {
		return map[string]*berthv1.SandboxSpec{
			"spec.provider":                    {Provider: x(maxName + n)},
			"spec.image":                       {Image: x(maxImageBytes + n)},
			"spec.from_checkpoint":             {FromCheckpoint: x(maxID + n)},
			"spec.session_key":                 {SessionKey: x(maxSessionKey + n)},
			"spec.provider_options":            {ProviderOptions: map[string]string{"a": x(maxOptionBytes - 1 + n)}},
			"spec.workspace.path":              {Workspace: &berthv1.Workspace{Path: "/" + x(maxPathBytes-1+n)}},
			"spec.egress.allow_hosts[0]":       {Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST, AllowHosts: []string{x(maxHostBytes + n)}}},
			"spec.workspace.repo.ref":          {Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/r", Ref: x(maxRefBytes + n)}}},
			"spec.workspace.repo.url":          {Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/" + x(maxURLBytes-1+n)}}},
			"spec.labels":                      {Labels: map[string]string{x(63 + n): ""}},
			"spec.env":                         {Env: map[string]string{"A": x(maxEnvBytes - 3 + n)}},
			"spec.workspace.git_identity.name": {Workspace: &berthv1.Workspace{Repo: &berthv1.Repo{Url: "/r"}, GitIdentity: &berthv1.GitIdentity{Name: x(256 + n)}}},
		}
	}
	job := func(n int) map[string]*berthv1.JobSpec {
		return map[string]*berthv1.JobSpec{
			"spec.cwd": {Argv: []string{"a"}, Cwd: x(maxPathBytes + n)}, "spec.user": {Argv: []string{"a"}, User: x(maxUserBytes + n)},
			"spec.shell": {Shell: x(maxArgvBytes + n)}, "spec.argv": {Argv: []string{x(maxArgvBytes - 1 + n)}},
		}
	}
	for n, refused := range []bool{false, true} {
		errs := map[string]error{}
		for field, spec := range spec(n) {
			errs[field] = validSandboxSpec(spec)
		}
		for field, spec := range job(n) {
			errs[field] = validJobSpec(spec)
		}
		errs["sandbox_id"] = required("sandbox_id", x(maxID+n))
		errs["labels"] = validFilter(map[string]string{x(63 + n): ""}, 0)
		errs["states"] = validFilter(nil, maxStates+n)
		for field, err := range errs {
			var known *fault.Error
			if (err != nil) != refused || err != nil && (!errors.As(err, &known) || known.Fields[0].Path != field) {
				t.Errorf("%s, %d beyond its limit: %v", field, n, err)
			}
		}
	}
}

func TestARepeatedCreateOfASandboxThatEndedIsAnErrorThatNamesIt(t *testing.T) {
	for number, name := range berthv1.SandboxState_name {
		state := berthv1.SandboxState(number)
		ended := state == berthv1.SandboxState_SANDBOX_STATE_DESTROYING || state == berthv1.SandboxState_SANDBOX_STATE_DESTROYED ||
			state == berthv1.SandboxState_SANDBOX_STATE_FAILED || state == berthv1.SandboxState_SANDBOX_STATE_LOST
		err := stillThere("run 7", &recordv1.SandboxRecord{Id: "sb_1", State: state})
		if (err != nil) != ended || ended && (!fault.Is(err, fault.WrongState) || !strings.Contains(err.Error(), "sb_1") || !strings.Contains(err.Error(), "run 7")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
