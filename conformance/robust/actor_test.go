package robust

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	callTimeout   = 10 * time.Second // one try
	retryTimeout  = 8 * time.Second  // all tries of one request
	sandboxesMax  = 4                // at once; more are made only when some are gone
	copiesMax     = 3                // of one request, at the same time
	maxWaitMillis = 600              // milliseconds, of a long poll
)

// actor is one client with choices of its own.
type actor struct {
	s       *suite
	number  int
	random  *rand.Rand
	client  *client.Client // tries once, so that every try is in the history
	tokens  int
	feeding []*feed
}

// feed is a job whose input one actor writes.
type feed struct {
	job  known
	next uint64
}

func (s *suite) newActor(number int) *actor {
	c, err := client.Dial(s.broker.Address, client.WithRetryTimeout(0, 0))
	if err != nil {
		s.t.Fatal(err)
	}
	return &actor{s: s, number: number, random: s.random(fmt.Sprintf("actor %d of episode %d", number, s.episodes)), client: c}
}

// act makes calls until over is closed.
func (a *actor) act(ctx context.Context, over <-chan struct{}) {
	defer func() { _ = a.client.Close() }()
	for {
		select {
		case <-over:
			return
		case <-ctx.Done():
			return
		default:
			a.choose()(ctx)
		}
	}
}

// choose draws what to do next, by weight.
func (a *actor) choose() func(context.Context) {
	acts := []struct {
		weight int
		act    func(context.Context)
	}{
		{a.wantsSandboxes(), a.create}, {3, a.destroy}, {3, a.suspend}, {9, a.resume},
		{20, a.start}, {8, a.run}, {6, a.runRecorded}, {6, a.exec}, {6 + 30*min(len(a.feeding), 2), a.feedSome}, {6, a.signal}, {10, a.stop},
		{12, a.poll}, {10, a.read}, {8, a.follow}, {5, a.tail}, {5, a.get}, {4, a.list}, {3, a.listJobs}, {2, a.info}, {12, a.replay},
	}
	total := 0
	for _, option := range acts {
		total += option.weight
	}
	drawn := a.random.IntN(total)
	for _, option := range acts {
		if drawn -= option.weight; drawn < 0 {
			return option.act
		}
	}
	return a.info
}

func (a *actor) wantsSandboxes() int {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	if len(a.s.sandboxes) == 0 {
		return 200
	}
	if len(a.s.sandboxes) >= sandboxesMax {
		return 0
	}
	return 20
}

// token names a command, or a body, of this actor.
func (a *actor) token() string {
	a.tokens++
	token := fmt.Sprintf("t%d.%d.%d", a.s.episodes, a.number, a.tokens)
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.s.tokens = append(a.s.tokens, token)
	return token
}

func (a *actor) requestID() string {
	a.tokens++
	return fmt.Sprintf("r%d.%d.%d", a.s.episodes, a.number, a.tokens)
}

func (a *actor) sandbox() string {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	if len(a.s.sandboxes) == 0 {
		return ""
	}
	return a.s.sandboxes[a.random.IntN(len(a.s.sandboxes))]
}

// job draws one of the newest jobs of all actors that has one of the works, of any when none is named.
func (a *actor) job(works ...Work) (known, bool) {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	var fit []known
	for i := len(a.s.jobs) - 1; i >= 0 && len(fit) < 20; i-- {
		for _, work := range works {
			if a.s.jobs[i].plan.Work == work {
				fit = append(fit, a.s.jobs[i])
			}
		}
		if len(works) == 0 {
			fit = append(fit, a.s.jobs[i])
		}
	}
	if len(fit) == 0 {
		return known{}, false
	}
	return fit[a.random.IntN(len(fit))], true
}

// attempt makes one try of a call and writes it down.
func (s *suite) attempt(ctx context.Context, e Event, most time.Duration, call func(context.Context, *Event) error) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	e.Kind, e.Begin = KindCall, s.history.Now()
	err := call(ctx, &e)
	e.End, e.Result = s.history.Now(), ResultOK
	if err != nil {
		e.Error = err.Error()
		if e.Result = client.Reason(err); e.Result == "" {
			e.Result = ResultUnknown
		}
	}
	s.history.Add(e)
	return err
}

// comeBack are the reasons that ask for another try.
var comeBack = map[string]bool{"": true, "RECOVERING": true, "STOPPING": true, "GUEST_UNREACHABLE": true, "PROVIDER_UNAVAILABLE": true}

// insist tries until there is an answer that a further try would not change, or it has taken too long.
// Some first tries are given up very soon, as by a caller that goes away.
func (a *actor) insist(ctx context.Context, random *rand.Rand, e Event, call func(context.Context, *Event) error) error {
	most := callTimeout
	if random.IntN(6) == 0 {
		most = time.Duration(1+random.IntN(60)) * time.Millisecond
	}
	for begun := time.Now(); ; most = callTimeout {
		err := a.s.attempt(ctx, e, most, call)
		if err == nil || !comeBack[client.Reason(err)] || time.Since(begun) > retryTimeout || ctx.Err() != nil {
			return err
		}
		fixture.Pause(time.Duration(20+random.IntN(280)) * time.Millisecond)
	}
}

// variant is one body under a request id.
type variant struct {
	body string
	plan *Plan
	call func(context.Context, *Event) error
}

// replay is a request that was made, to be made again.
type replay struct {
	event    Event
	variants []variant
}

// request makes a call under a request id: once or several times at the same moment, and now and then
// with another body among them. The first variant is the one that is meant.
func (a *actor) request(ctx context.Context, e Event, variants ...variant) {
	copies := []variant{variants[0]}
	if a.random.IntN(3) == 0 {
		for range 1 + a.random.IntN(copiesMax-1) {
			copies = append(copies, variants[a.random.IntN(len(variants))])
		}
	}
	var group sync.WaitGroup
	for i, v := range copies {
		random := rand.New(rand.NewPCG(a.random.Uint64(), uint64(i)))
		group.Go(func() { _ = a.insist(ctx, random, with(e, v), v.call) })
	}
	group.Wait()
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	a.s.replays = append(a.s.replays, replay{e, variants})
}

func with(e Event, v variant) Event {
	e.Client, e.Body, e.Plan = max(e.Client, 1), v.body, v.plan
	if v.plan != nil {
		e.Token = v.plan.Token
	}
	return e
}

// replay makes an old request again, with the body that it had or with another one.
func (a *actor) replay(ctx context.Context) {
	a.s.mu.Lock()
	if len(a.s.replays) == 0 {
		a.s.mu.Unlock()
		return
	}
	old := a.s.replays[a.random.IntN(len(a.s.replays))]
	a.s.mu.Unlock()
	old.event.Client = a.number
	v := old.variants[a.random.IntN(len(old.variants))]
	_ = a.insist(ctx, a.random, with(old.event, v), v.call)
}

// event is a call of this actor's.
func (a *actor) event(op string) Event { return Event{Op: op, Client: a.number} }

func (a *actor) create(ctx context.Context) {
	e := a.event("CreateSandbox")
	e.RequestID = a.requestID()
	cloned := a.random.IntN(4) == 0
	make := func(body string) variant {
		spec := &berthv1.SandboxSpec{Labels: map[string]string{"body": body}}
		if cloned {
			spec.Workspace = &berthv1.Workspace{Repo: &berthv1.Repo{Url: a.s.repo}}
		}
		return variant{body: body, call: func(ctx context.Context, e *Event) error {
			reply, err := a.client.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{RequestId: e.RequestID, Spec: spec})
			if err == nil {
				showSandbox(e, reply.GetSandbox())
				a.s.noteSandbox(reply.GetSandbox())
			}
			return err
		}}
	}
	a.request(ctx, e, make("a"), make("b"))
}

func showSandbox(e *Event, sandbox *berthv1.Sandbox) {
	e.ID, e.Sandbox, e.Machine, e.State = sandbox.GetId(), sandbox.GetId(), sandbox.GetMachineId(), strings.TrimPrefix(sandbox.GetState().String(), "SANDBOX_STATE_")
}

func (s *suite) noteSandbox(sandbox *berthv1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.machines[sandbox.GetId()]; !known {
		s.sandboxes = append(s.sandboxes, sandbox.GetId())
	}
	s.machines[sandbox.GetId()] = sandbox.GetMachineId()
}

func (a *actor) destroy(ctx context.Context) {
	id := a.sandbox()
	if id == "" {
		return
	}
	a.s.mu.Lock()
	for i, other := range a.s.sandboxes {
		if other == id {
			a.s.sandboxes = append(a.s.sandboxes[:i:i], a.s.sandboxes[i+1:]...)
			break
		}
	}
	a.s.mu.Unlock()
	a.change(ctx, "DestroySandbox", id, func(ctx context.Context, e *Event) (*berthv1.Sandbox, error) {
		reply, err := a.client.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{RequestId: e.RequestID, SandboxId: id})
		return reply.GetSandbox(), err
	})
}

func (a *actor) suspend(ctx context.Context) {
	if id := a.sandbox(); id != "" && a.s.able["suspend"] {
		a.change(ctx, "SuspendSandbox", id, func(ctx context.Context, e *Event) (*berthv1.Sandbox, error) {
			reply, err := a.client.Sandboxes().SuspendSandbox(ctx, &berthv1.SuspendSandboxRequest{RequestId: e.RequestID, SandboxId: id})
			return reply.GetSandbox(), err
		})
	}
}

func (a *actor) resume(ctx context.Context) {
	id := a.sandbox()
	if a.random.IntN(4) == 0 {
		id = a.anySandbox()
	}
	if id != "" {
		a.change(ctx, "ResumeSandbox", id, func(ctx context.Context, e *Event) (*berthv1.Sandbox, error) {
			reply, err := a.client.Sandboxes().ResumeSandbox(ctx, &berthv1.ResumeSandboxRequest{RequestId: e.RequestID, SandboxId: id})
			return reply.GetSandbox(), err
		})
	}
}

// change makes a call that changes a sandbox, under a request id or without.
func (a *actor) change(ctx context.Context, op, id string, call func(context.Context, *Event) (*berthv1.Sandbox, error)) {
	e := a.event(op)
	e.RequestID, e.Sandbox = a.requestID(), id
	a.request(ctx, e, variant{body: id, call: func(ctx context.Context, e *Event) error {
		sandbox, err := call(ctx, e)
		if err == nil {
			showSandbox(e, sandbox)
		}
		return err
	}})
}

// anySandbox draws from all that there ever were in this run, destroyed ones too, the newest first.
func (a *actor) anySandbox() string {
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	ids := slices.Sorted(maps.Keys(a.s.machines))
	if len(ids) == 0 {
		return ""
	}
	ids = ids[max(0, len(ids)-20):]
	return ids[a.random.IntN(len(ids))]
}

func (a *actor) get(ctx context.Context) {
	id := a.anySandbox()
	if id == "" {
		return
	}
	e := a.event("GetSandbox")
	e.Sandbox = id
	_ = a.s.attempt(ctx, e, callTimeout, func(ctx context.Context, e *Event) error {
		reply, err := a.client.Sandboxes().GetSandbox(ctx, &berthv1.GetSandboxRequest{SandboxId: e.Sandbox})
		if err == nil {
			showSandbox(e, reply.GetSandbox())
		}
		return err
	})
}

func (a *actor) list(ctx context.Context) {
	var shown []*berthv1.Sandbox
	begin := a.s.history.Now()
	err := a.s.attempt(ctx, a.event("ListSandboxes"), callTimeout, func(ctx context.Context, _ *Event) error {
		reply, err := a.client.Sandboxes().ListSandboxes(ctx, &berthv1.ListSandboxesRequest{})
		shown = reply.GetSandboxes()
		return err
	})
	end := a.s.history.Now()
	for _, sandbox := range shown {
		e := Event{Kind: KindCall, Op: "ListSandboxes/each", Client: a.number, Result: ResultOK, Begin: begin, End: end}
		showSandbox(&e, sandbox)
		if err == nil {
			a.s.history.Add(e)
		}
	}
}

func (a *actor) info(ctx context.Context) {
	_ = a.s.attempt(ctx, a.event("GetInfo"), callTimeout, func(ctx context.Context, _ *Event) error {
		_, err := a.client.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		return err
	})
}

func milliseconds(n int) *durationpb.Duration {
	return durationpb.New(time.Duration(n) * time.Millisecond)
}
