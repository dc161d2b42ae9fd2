package robust

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/conformance/fixture"
	"github.com/berth-sandbox/berth/conformance/testenv"
	"github.com/berth-sandbox/berth/providers/fake"
)

func TestMain(m *testing.M) { fixture.Main(m) }

// The run is told by the environment, which `make robust` sets.
const (
	killsVariable   = "BERTH_KILLS"   // how often the broker is killed; default 20
	seedVariable    = "BERTH_SEED"    // what all random choices follow from; default: a new one
	historyVariable = "BERTH_HISTORY" // where the history is kept; default: below the temporary directory, and only when the run fails
	checkVariable   = "BERTH_CHECK"   // a history that was kept, to be checked once more
)

// Tuning.
const (
	killsDefault    = 20
	killsPerEpisode = 10 // in one episode, after which all is let come to rest and looked at
	problemsShown   = 20
	actors          = 4               // clients with traffic of their own
	failedTimeout   = 5 * time.Second // for what is waited for after a problem was seen
	runTimeout      = 15 * time.Minute
	timeoutPerKill  = time.Minute // that one kill may add to it, on a busy machine
)

func TestRandomTrafficAndKillsBreakNoPromise(t *testing.T) {
	testenv.Asked(t, "robust")
	kills := number(t, killsVariable, killsDefault)
	seed := number(t, seedVariable, uint64(time.Now().UnixNano()))
	s := newSuite(t, seed)
	t.Logf("provider %s, %d kills, %s=%d", fixture.ProviderName(), kills, seedVariable, seed)
	ctx, cancel := context.WithTimeout(context.Background(), runTimeout+time.Duration(kills)*timeoutPerKill)
	t.Cleanup(cancel)
	s.broker.Start(t)
	s.learn(ctx)
	for left := kills; left > 0 && !t.Failed() && !s.hopeless(); {
		now := min(left, killsPerEpisode)
		left -= now
		s.episode(ctx, int(now))
		s.progress(kills - left)
	}
	if !t.Failed() && !s.hopeless() {
		s.calm(ctx)
	}
	s.conclude()
}

func TestAKeptHistoryIsCheckedAgain(t *testing.T) {
	path := os.Getenv(checkVariable)
	if path == "" {
		t.Skipf("not asked for: %s names a history that was kept", checkVariable)
	}
	events, err := ReadHistory(path)
	if err != nil {
		t.Fatal(err)
	}
	report := Check(events)
	for _, problem := range report.Problems {
		t.Error(problem)
	}
	t.Log(summary(events, report))
}

func number(t *testing.T, variable string, otherwise uint64) uint64 {
	said := os.Getenv(variable)
	if said == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(said, 10, 64)
	if err != nil {
		t.Fatalf("%s is %q, want a number", variable, said)
	}
	return n
}

// suite is one run.
type suite struct {
	t       *testing.T
	broker  *fixture.Broker
	history *History
	seed    uint64
	began   time.Time
	counter string // the file on this host that counts starts; empty where machines cannot write there
	repo    string // that sandboxes may be cloned from
	harness *fake.Harness
	patient *client.Client
	able    map[string]bool // the provider's capabilities

	episodes int
	broken   bool       // a problem was seen at once: nothing is waited for in earnest any more
	first    *footprint // of the broker at its first rest
	log      int64      // bytes of the broker's log that were looked through

	mu        sync.Mutex
	sandboxes []string
	machines  map[string]string // by sandbox
	jobs      []known
	tokens    []string
	replays   []replay
}

// known is a job that somebody was told of.
type known struct {
	id      string
	sandbox string
	plan    Plan
}

func newSuite(t *testing.T, seed uint64) *suite {
	flags := fixture.ProviderFlags(t)
	s := &suite{t: t, seed: seed, began: time.Now(), machines: map[string]string{}}
	s.repo = fixture.Repository
	s.broker = fixture.NewBroker(t, fixture.Build(t), flags...)
	if !fixture.OnDocker() {
		s.repo = fixture.MakeRepository(t)
		s.counter = filepath.Join(s.broker.Dir, "starts")
	}
	if fixture.ProviderName() == "fake" {
		harness := fake.At(filepath.Join(s.broker.State(), "fake"))
		s.harness = &harness
	}
	path := os.Getenv(historyVariable)
	if path == "" {
		path = filepath.Join(os.TempDir(), fmt.Sprintf("berth-history-%d.jsonl", seed))
	}
	var err error
	if s.history, err = NewHistory(path); err != nil {
		t.Fatal(err)
	}
	s.history.Add(Event{Kind: KindSeed, Seed: seed, Provider: fixture.ProviderName()})
	s.patient = s.broker.Client(t)
	return s
}

// random is a source of choices of its own for each part of the run: what one part chooses does not
// depend on how fast the others are.
func (s *suite) random(part string) *rand.Rand {
	return rand.New(rand.NewPCG(s.seed, uint64(Sum([]byte(part)))))
}

// problem notes something that must not be.
func (s *suite) problem(op, format string, args ...any) {
	s.mu.Lock()
	s.broken = true
	s.mu.Unlock()
	s.history.Add(Event{Kind: KindProblem, Op: op, Error: fmt.Sprintf(format, args...)})
}

// hopeless says whether the run has failed already.
func (s *suite) hopeless() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken
}

// timeout is how long something is waited for: not for long in a run that has failed already.
func (s *suite) timeout(most time.Duration) time.Duration {
	if s.hopeless() {
		return min(most, failedTimeout)
	}
	return most
}

// episode is traffic under kills, and then a rest.
func (s *suite) episode(ctx context.Context, kills int) {
	s.episodes++
	s.traffic(ctx, func() { s.chaos(ctx, kills) })
	s.rest(ctx)
}

// traffic runs the actors for as long as meanwhile takes.
func (s *suite) traffic(ctx context.Context, meanwhile func()) {
	over := make(chan struct{})
	var group sync.WaitGroup
	for i := range actors {
		a := s.newActor(i + 1)
		group.Go(func() { a.act(ctx, over) })
	}
	meanwhile()
	close(over)
	group.Wait()
}

// calm is traffic without any kill: what one life of the broker gathers shows in the rest after it.
func (s *suite) calm(ctx context.Context) {
	s.episodes++
	before := s.footprint()
	s.traffic(ctx, func() { fixture.Pause(calmFor) })
	s.rest(ctx)
	after := s.footprint()
	s.t.Logf("the broker at its first rest: %v; in its last life: %v, and after %s of traffic %v", s.first, before, calmFor, after)
	for _, than := range []*footprint{s.first, before} {
		if grew := after.beyond(than); grew != "" {
			s.problem("footprint", "the broker has grown although all is quiet: %s", grew)
		}
	}
}

func (s *suite) progress(kills uint64) {
	calls := 0
	for _, e := range s.history.Events() {
		if e.Kind == KindCall {
			calls++
		}
	}
	fmt.Printf("%6.0fs  episode %d, %d kills, %d calls\n", time.Since(s.began).Seconds(), s.episodes, kills, calls)
}

// conclude checks the whole history and reports.
func (s *suite) conclude() {
	if err := s.history.Close(); err != nil {
		s.t.Error(err)
	}
	events := s.history.Events()
	report := Check(events)
	for i, problem := range report.Problems {
		if i == problemsShown {
			s.t.Errorf("and %d problems more", len(report.Problems)-i)
			break
		}
		s.t.Error(problem)
	}
	s.t.Log(summary(events, report))
	if s.t.Failed() {
		s.keepLog()
		s.t.Logf("the history is in %s, the broker's log beside it; %s=%d makes the same choices again", s.history.Path(), seedVariable, s.seed)
		return
	}
	if os.Getenv(historyVariable) == "" {
		_ = os.Remove(s.history.Path())
	}
}

// keepLog copies the broker's log, which goes with its directory, beside the history.
func (s *suite) keepLog() {
	log, err := os.ReadFile(filepath.Join(s.broker.Dir, "berthd.log"))
	if err == nil {
		err = os.WriteFile(s.history.Path()+".log", log, 0o600)
	}
	if err != nil {
		s.t.Error(err)
	}
}

// summary tells what a run did, one line for each kind of thing.
func summary(events []Event, report Report) string {
	var text strings.Builder
	calls, chaos := map[string]map[string]int{}, map[string]int{}
	for _, e := range events {
		if e.Kind != KindCall {
			chaos[strings.TrimSpace(string(e.Kind)+" "+e.Op)]++
			continue
		}
		if calls[e.Op] == nil {
			calls[e.Op] = map[string]int{}
		}
		calls[e.Op][e.Result]++
	}
	delete(chaos, string(KindStarts))
	line := func(name string, counts map[string]int) {
		fmt.Fprintf(&text, "\n  %-16s", name)
		for _, key := range slices.Sorted(maps.Keys(counts)) {
			fmt.Fprintf(&text, " %s %d,", key, counts[key])
		}
	}
	line("chaos", chaos)
	for _, op := range slices.Sorted(maps.Keys(calls)) {
		line(op, calls[op])
	}
	line("checks", report.Checks)
	fmt.Fprintf(&text, "\n  problems         %d", len(report.Problems))
	return text.String()
}
