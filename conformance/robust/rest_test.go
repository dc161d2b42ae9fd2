package robust

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	restTimeout = 4 * time.Minute // for operations, jobs and leftovers to come to their end
	// orphanTimeout is for a machine that came back after its destroy (a provider that does things twice):
	// the reconciler's grace, counted anew after each start, and two of its sweeps.
	orphanTimeout = 6 * time.Minute
	probeInterval = 100 * time.Millisecond
	// What a broker at rest may have grown by: descriptors and threads of idle connections, and a heap
	// that the garbage collector has not given back.
	fdSlack  = 8
	rssSlack = 32 << 20
)

// rest takes all harm away, waits until everything has come to its end, and looks at all there is.
func (s *suite) rest(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*restTimeout+orphanTimeout)
	defer cancel()
	s.wakeAll()
	// Whatever hangs in the provider ends with this life of the broker.
	s.broker.Kill(s.t)
	s.broker.Start(s.t)
	e := Event{Kind: KindQuiet, Begin: s.history.Now()}
	sandboxes := s.finalizeSandboxes(ctx)
	s.gatherFaults()
	s.finalizeJobs(ctx)
	s.compareMachines(ctx)
	s.destroyAll(ctx, sandboxes)
	s.countStarts()
	s.nothingLeft(ctx)
	s.history.Add(e)
	if s.first == nil {
		s.first = s.footprint()
	}
	s.mu.Lock()
	s.sandboxes, s.jobs, s.replays = nil, nil, nil
	s.mu.Unlock()
}

// learn asks what the provider can do.
func (s *suite) learn(ctx context.Context) {
	reply, err := s.patient.Providers().ListProviders(ctx, &berthv1.ListProvidersRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.able = map[string]bool{}
	for _, provider := range reply.GetProviders() {
		for _, capability := range provider.GetCapabilities() {
			s.able[capability.GetName()] = true
		}
	}
}

// until looks again and again until done says so.
func (s *suite) until(ctx context.Context, what string, most time.Duration, done func() (bool, string)) {
	most = s.timeout(most)
	deadline := time.Now().Add(most)
	for {
		ok, have := done()
		if ok {
			return
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			s.problem("rest", "%s has not come to its end after %s: %s", what, most, have)
			return
		}
		fixture.Pause(probeInterval)
	}
}

// finalizeSandboxes waits until no operation is under way, resumes what is stopped or parked, and returns
// the sandboxes that there are.
func (s *suite) finalizeSandboxes(ctx context.Context) []*berthv1.Sandbox {
	s.noOperations(ctx)
	for _, sandbox := range s.listSandboxes(ctx) {
		switch sandbox.GetState() {
		case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
			s.resume(ctx, sandbox.GetId())
		}
	}
	s.until(ctx, "what guests are heard from", restTimeout, func() (bool, string) {
		info, err := s.patient.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		return err == nil && info.GetRecoveringMachines() == 0, fmt.Sprint(info.GetRecoveringMachines(), " machines are silent ", err)
	})
	// A guest that was killed just now may be noticed only after its sandbox was resumed.
	for _, sandbox := range s.listSandboxes(ctx) {
		if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_STOPPED {
			s.resume(ctx, sandbox.GetId())
		}
	}
	s.noOperations(ctx)
	return s.listSandboxes(ctx)
}

func (s *suite) noOperations(ctx context.Context) {
	s.until(ctx, "the operations", restTimeout, func() (bool, string) {
		info, err := s.patient.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		return err == nil && info.GetOpenOperations() == 0, fmt.Sprint(info.GetOpenOperations(), " are open ", err)
	})
}

func (s *suite) resume(ctx context.Context, id string) {
	err := s.attempt(ctx, Event{Op: "ResumeSandbox", Sandbox: id}, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
		reply, err := s.patient.Sandboxes().ResumeSandbox(ctx, &berthv1.ResumeSandboxRequest{SandboxId: id})
		if err == nil {
			showSandbox(e, reply.GetSandbox())
		}
		return err
	})
	switch {
	case err == nil:
	case client.Is(err, berthv1.Reason_REASON_MACHINE_GONE):
		// The next look at all machines takes it for lost, and its jobs with it.
		s.until(ctx, "the sandbox of a machine that is gone", restTimeout, func() (bool, string) {
			reply, err := s.patient.Sandboxes().GetSandbox(ctx, &berthv1.GetSandboxRequest{SandboxId: id})
			state := reply.GetSandbox().GetState()
			return state == berthv1.SandboxState_SANDBOX_STATE_LOST, fmt.Sprintf("sandbox %s is %v (%v)", id, state, err)
		})
	default:
		s.problem("resume", "sandbox %s does not go on when all is quiet: %v", id, err)
	}
}

// listSandboxes returns those that are not destroyed or failed, and writes down how they were seen.
func (s *suite) listSandboxes(ctx context.Context) []*berthv1.Sandbox {
	var all []*berthv1.Sandbox
	for token := ""; ; {
		begin := s.history.Now()
		reply, err := s.patient.Sandboxes().ListSandboxes(ctx, &berthv1.ListSandboxesRequest{PageToken: token})
		if err != nil {
			s.problem("rest", "list the sandboxes: %v", err)
			return all
		}
		for _, sandbox := range reply.GetSandboxes() {
			e := Event{Kind: KindCall, Op: "ListSandboxes/each", Result: ResultOK, Begin: begin}
			showSandbox(&e, sandbox)
			s.history.Add(e)
		}
		all = append(all, reply.GetSandboxes()...)
		if token = reply.GetNextPageToken(); token == "" {
			return all
		}
	}
}

// finalizeJobs ends what does not end by itself, waits for every job, and reads all of its output.
func (s *suite) finalizeJobs(ctx context.Context) {
	plans := map[string]Plan{}
	s.mu.Lock()
	for _, job := range s.jobs {
		plans[job.id] = job.plan
	}
	s.mu.Unlock()
	// All that the ledger has, also what nobody was told of.
	for _, job := range s.listJobs(ctx) {
		if _, told := plans[job.GetId()]; !told {
			plans[job.GetId()] = Plan{}
		}
		work := plans[job.GetId()].Work
		if job.GetState() == berthv1.JobState_JOB_STATE_DONE {
			continue
		}
		switch work {
		case WorkCat:
			s.feedRest(ctx, job.GetId(), plans[job.GetId()].Input())
		case WorkEndless, "":
			s.stopJob(ctx, job.GetId())
		}
	}
	for id := range plans {
		s.finalizeJob(ctx, id)
	}
}

func (s *suite) listJobs(ctx context.Context) []*berthv1.Job {
	var all []*berthv1.Job
	for token := ""; ; {
		var next string
		err := s.attempt(ctx, Event{Op: "ListJobs"}, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
			reply, err := s.patient.Jobs().ListJobs(ctx, &berthv1.ListJobsRequest{PageToken: token})
			for _, job := range reply.GetJobs() {
				e.Jobs = append(e.Jobs, showJob(job))
			}
			all, next = append(all, reply.GetJobs()...), reply.GetNextPageToken()
			return err
		})
		if err != nil {
			s.problem("rest", "list the jobs: %v", err)
		}
		if token = next; token == "" {
			return all
		}
	}
}

// feedRest gives a job the rest of its input. One that was stopped meanwhile takes none.
func (s *suite) feedRest(ctx context.Context, id string, input []byte) {
	from, err := s.patient.InputOffset(ctx, id)
	if err == nil && from > uint64(len(input)) {
		s.problem("rest", "job %s has taken %d bytes of input, and there are %d", id, from, len(input))
		return
	}
	if err == nil {
		_, err = s.patient.Feed(ctx, id, from, bytes.NewReader(input[from:]), true)
	}
	if err != nil && !client.Is(err, berthv1.Reason_REASON_WRONG_STATE) && !client.Is(err, berthv1.Reason_REASON_MACHINE_GONE) {
		s.problem("rest", "feed job %s the rest of its input: %v", id, err)
	}
}

func (s *suite) stopJob(ctx context.Context, id string) {
	err := s.attempt(ctx, Event{Op: "StopJob", ID: id}, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
		reply, err := s.patient.Jobs().StopJob(ctx, &berthv1.StopJobRequest{JobId: id, Grace: milliseconds(stopGrace)})
		if err == nil {
			e.told(reply.GetJob())
		}
		return err
	})
	if err != nil {
		s.problem("rest", "stop job %s: %v", id, err)
	}
}

func (s *suite) finalizeJob(ctx context.Context, id string) {
	err := s.attempt(ctx, Event{Op: "PollJob", ID: id}, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
		job, err := s.patient.WaitJob(ctx, id)
		if err == nil {
			e.told(job)
		}
		return err
	})
	var unknown *client.UnknownOutcomeError
	switch {
	case client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND):
		return // the check says whether that may be
	case errors.As(err, &unknown):
		s.problem("rest", "the outcome of job %s is unknown although every sandbox runs", id)
	case err != nil:
		s.problem("rest", "wait for job %s: %v", id, err)
		return
	}
	e := Event{Op: "ReadAllOutput", ID: id, Whole: true}
	err = s.attempt(ctx, e, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
		for _, stream := range []berthv1.Stream{berthv1.Stream_STREAM_STDOUT, berthv1.Stream_STREAM_STDERR} {
			sink := &chunks{stderr: stream == berthv1.Stream_STREAM_STDERR}
			if _, err := s.patient.FollowOutput(ctx, id, stream, 0, client.UntilSealed, sink); err != nil {
				return err
			}
			e.Chunks = append(e.Chunks, sink.all...)
		}
		return nil
	})
	if err != nil {
		s.problem("rest", "read the output of job %s: %v", id, err)
	}
}

// chunks is a sink of output.
type chunks struct {
	stderr bool
	all    []Chunk
}

func (p *chunks) Data(offset uint64, data []byte) error {
	p.all = append(p.all, Chunk{Stderr: p.stderr, Offset: offset, Bytes: uint64(len(data)), Sum: Sum(data)})
	return nil
}

func (p *chunks) Gap(from, to uint64) error {
	p.all = append(p.all, Chunk{Stderr: p.stderr, Offset: from, Bytes: to - from, Gap: true})
	return nil
}

// compareMachines wants the provider's machines to become the ledger's: none without a record, and none
// missing of a sandbox that runs. That a resting one is gone the broker sees at its second look only.
func (s *suite) compareMachines(ctx context.Context) {
	s.until(ctx, "the provider's machines", orphanTimeout, func() (bool, string) {
		var ours, lost []string // of what is lost, some may be left until it is destroyed
		for _, sandbox := range s.listSandboxes(ctx) {
			if sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_LOST {
				lost = append(lost, sandbox.GetMachineId())
				continue
			}
			ours = append(ours, sandbox.GetMachineId())
		}
		there, err := s.providersMachines(ctx)
		there = slices.DeleteFunc(there, func(machine string) bool { return slices.Contains(lost, machine) })
		slices.Sort(ours)
		slices.Sort(there)
		return err == nil && slices.Equal(there, ours), fmt.Sprintf("the provider has %v, the ledger %v (%v)", there, ours, err)
	})
}

// providersMachines lists the machines at the provider, past the broker.
func (s *suite) providersMachines(ctx context.Context) ([]string, error) {
	switch {
	case s.harness != nil:
		return s.harness.Machines()
	case fixture.OnDocker():
		info, err := s.patient.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		if err != nil {
			return nil, err
		}
		out, err := exec.CommandContext(ctx, "docker", "ps", "-a", "--filter", "label=dev.berth.broker="+info.GetInstanceId(),
			"--format", `{{.Label "dev.berth.machine"}}`).Output()
		return strings.Fields(string(out)), err
	}
	entries, err := os.ReadDir(filepath.Join(s.broker.State(), "local"))
	var there []string
	for _, entry := range entries {
		there = append(there, entry.Name())
	}
	return there, err
}

func (s *suite) destroyAll(ctx context.Context, sandboxes []*berthv1.Sandbox) {
	for _, sandbox := range sandboxes {
		id := sandbox.GetId()
		err := s.attempt(ctx, Event{Op: "DestroySandbox", Sandbox: id}, s.timeout(restTimeout), func(ctx context.Context, e *Event) error {
			reply, err := s.patient.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
			if err == nil {
				showSandbox(e, reply.GetSandbox())
			}
			return err
		})
		if err != nil {
			s.problem("rest", "destroy sandbox %s: %v", id, err)
		}
	}
}

// countStarts reads how often each command began, as the commands themselves wrote it down.
func (s *suite) countStarts() {
	if s.counter == "" {
		return
	}
	data, err := os.ReadFile(s.counter)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.t.Fatal(err)
	}
	starts := map[string]int{}
	for token := range strings.FieldsSeq(string(data)) {
		starts[token]++
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, token := range s.tokens {
		s.history.Add(Event{Kind: KindStarts, Token: token, Count: starts[token]})
		delete(starts, token)
	}
	for token := range starts {
		if strings.HasPrefix(token, fmt.Sprintf("t%d.", s.episodes)) {
			s.problem("starts", "a command that nobody asked for began: %q", token)
		}
	}
	s.tokens = nil
}
