package vault

import (
	"bytes"
	"encoding/hex"
	"maps"
	"math"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func fromHex(t testing.TB, text string) []byte {
	t.Helper()
	raw, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

const (
	startJob      = "berth.v1.JobService/StartJob"
	createSandbox = "berth.v1.SandboxService/CreateSandbox"
)

// fullJob is a request with every shape of field: scalars, presence, lists, maps, oneofs, messages.
func fullJob() *berthv1.StartJobRequest {
	return &berthv1.StartJobRequest{
		RequestId: "r-1",
		SandboxId: "sb_1",
		Spec: &berthv1.JobSpec{
			Argv:      []string{"make", "", "test"},
			Env:       map[string]string{"A": "1", "B": "", "": "x", "AB": "2"},
			SecretEnv: map[string]string{"TOKEN": "s"},
			Stdin:     &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: []byte{0, 255}}},
			Tty:       &berthv1.TerminalSize{Cols: 80},
			Timeout:   durationpb.New(-1500),
			Keep:      &berthv1.JobSpec_KeepOutput{KeepOutput: false},
		},
	}
}

// withUnknown adds a field that this build does not know.
func withUnknown(request *berthv1.StartJobRequest) *berthv1.StartJobRequest {
	request.Spec.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 7))
	return request
}

// TestHashesStayWhatTheyAre holds the hash of version 1 forever, with the key of bytes 0 to 31. A
// vector that changes means that no request id in any ledger matches its body any more.
func TestHashesStayWhatTheyAre(t *testing.T) {
	v := openFixed(t)
	for _, c := range goldenHashes() {
		t.Run(c.name, func(t *testing.T) {
			if got := hex.EncodeToString(v.BodyHash(c.method, c.body)); got != c.want {
				t.Errorf("hash %s, want %s", got, c.want)
			}
		})
	}
}

type golden struct {
	name   string
	method string
	body   proto.Message
	want   string
}

func TestEqualBodiesHashTheSame(t *testing.T) {
	v := openFixed(t)
	other := fullJob()
	other.RequestId = "r-2"
	for name, body := range map[string]proto.Message{
		"the request id does not count": other,
		"a copy":                        proto.Clone(fullJob()),
		"marshalled and read again":     reread(t, fullJob()),
		"with its maps refilled":        refilled(fullJob()),
	} {
		if !bytes.Equal(v.BodyHash(startJob, body), v.BodyHash(startJob, fullJob())) {
			t.Error(name)
		}
	}
	onlyTerminal := func(env map[string]string, size *berthv1.TerminalSize) []byte {
		return v.BodyHash(startJob, &berthv1.StartJobRequest{Spec: &berthv1.JobSpec{Env: env, Tty: size}})
	}
	if !bytes.Equal(onlyTerminal(map[string]string{"TERM": "xterm"}, &berthv1.TerminalSize{Cols: 80, Rows: 24}), onlyTerminal(nil, &berthv1.TerminalSize{})) {
		t.Error("a caller's terminal counts")
	}
	if !bytes.Equal(v.BodyHash(startJob, nil), v.BodyHash(startJob, (*berthv1.StartJobRequest)(nil))) ||
		!bytes.Equal(v.BodyHash(startJob, nil), v.BodyHash(startJob, &berthv1.StartJobRequest{RequestId: "r"})) {
		t.Error("no body and an empty one differ")
	}
	if !bytes.Equal(v.BodyHash("m", wrapperspb.Double(math.NaN())), v.BodyHash("m", wrapperspb.Double(math.Float64frombits(math.Float64bits(math.NaN())|1<<40)))) {
		t.Error("two NaNs differ")
	}
}

func reread(t testing.TB, request *berthv1.StartJobRequest) *berthv1.StartJobRequest {
	t.Helper()
	raw, err := proto.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	again := &berthv1.StartJobRequest{}
	if err := proto.Unmarshal(raw, again); err != nil {
		t.Fatal(err)
	}
	return again
}

// refilled replaces the maps by ones that were filled in another order.
func refilled(request *berthv1.StartJobRequest) *berthv1.StartJobRequest {
	request.Spec.Env = maps.Collect(maps.All(request.Spec.Env))
	return request
}

func TestDifferentBodiesHashDifferently(t *testing.T) {
	v := openFixed(t)
	other, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	add := func(name string, hash []byte) {
		if same, taken := seen[string(hash)]; taken {
			t.Errorf("%q hashes like %q", name, same)
		}
		seen[string(hash)] = name
	}
	add("the request", v.BodyHash(startJob, fullJob()))
	add("another key", other.BodyHash(startJob, fullJob()))
	add("another method", v.BodyHash(createSandbox, fullJob()))
	add("nothing", v.BodyHash(startJob, nil))
	add("nothing of another method", v.BodyHash(createSandbox, nil))
	changes := map[string]func(r *berthv1.StartJobRequest){
		"another sandbox":    func(r *berthv1.StartJobRequest) { r.SandboxId = "sb_2" },
		"no sandbox":         func(r *berthv1.StartJobRequest) { r.SandboxId = "" },
		"a generation":       func(r *berthv1.StartJobRequest) { r.IfGeneration = 1 },
		"an empty lease":     func(r *berthv1.StartJobRequest) { r.Lease = &berthv1.LeaseRef{} },
		"no spec":            func(r *berthv1.StartJobRequest) { r.Spec = nil },
		"an empty spec":      func(r *berthv1.StartJobRequest) { r.Spec = &berthv1.JobSpec{} },
		"one argument more":  func(r *berthv1.StartJobRequest) { r.Spec.Argv = append(r.Spec.Argv, "") },
		"arguments joined":   func(r *berthv1.StartJobRequest) { r.Spec.Argv = []string{"make", "test", ""} },
		"arguments as one":   func(r *berthv1.StartJobRequest) { r.Spec.Argv = []string{"maketest"} },
		"argument and shell": func(r *berthv1.StartJobRequest) { r.Spec.Argv, r.Spec.Shell = nil, "make" },
		"an environment key moved": func(r *berthv1.StartJobRequest) {
			r.Spec.Env = map[string]string{"A": "12", "B": "", "": "x", "AB": ""}
		},
		"an environment entry less": func(r *berthv1.StartJobRequest) { delete(r.Spec.Env, "B") },
		"another secret":            func(r *berthv1.StartJobRequest) { r.Spec.SecretEnv["TOKEN"] = "t" },
		"a secret that is none":     func(r *berthv1.StartJobRequest) { r.Spec.Env["TOKEN"], r.Spec.SecretEnv = "s", nil },
		"no stdin":                  func(r *berthv1.StartJobRequest) { r.Spec.Stdin = nil },
		"stdin of no source":        func(r *berthv1.StartJobRequest) { r.Spec.Stdin = &berthv1.Stdin{} },
		"stdin of no bytes":         func(r *berthv1.StartJobRequest) { r.Spec.Stdin.Source = &berthv1.Stdin_Data{} },
		"stdin not open":            func(r *berthv1.StartJobRequest) { r.Spec.Stdin.Source = &berthv1.Stdin_Open{} },
		"stdin open":                func(r *berthv1.StartJobRequest) { r.Spec.Stdin.Source = &berthv1.Stdin_Open{Open: true} },
		"keep_output true":          func(r *berthv1.StartJobRequest) { r.Spec.Keep = &berthv1.JobSpec_KeepOutput{KeepOutput: true} },
		"keep_output not said":      func(r *berthv1.StartJobRequest) { r.Spec.Keep = nil },
		"no terminal":               func(r *berthv1.StartJobRequest) { r.Spec.Tty = nil },
		"TERM of no terminal":       func(r *berthv1.StartJobRequest) { r.Spec.Tty, r.Spec.Env["TERM"] = nil, "xterm" },
		"TERM as a secret":          func(r *berthv1.StartJobRequest) { r.Spec.SecretEnv["TERM"] = "xterm" },
		"another timeout":           func(r *berthv1.StartJobRequest) { r.Spec.Timeout.Nanos++ },
		"a field from the future":   func(r *berthv1.StartJobRequest) { withUnknown(r) },
		"another field of the future": func(r *berthv1.StartJobRequest) {
			withUnknown(r).Spec.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 8))
		},
		"the future's field elsewhere": func(r *berthv1.StartJobRequest) {
			r.ProtoReflect().SetUnknown(withUnknown(fullJob()).Spec.ProtoReflect().GetUnknown())
		},
	}
	for name, change := range changes {
		request := fullJob()
		change(request)
		add(name, v.BodyHash(startJob, request))
	}
	for name, value := range map[string]float64{"zero": 0, "minus zero": math.Copysign(0, -1), "one": 1, "not a number": math.NaN(), "infinity": math.Inf(1)} {
		add(name, v.BodyHash("m", &structpb.Value{Kind: &structpb.Value_NumberValue{NumberValue: value}}))
	}
}

// FuzzBodyHash reads two requests from arbitrary bytes and holds that they hash the same exactly
// when they are the same but for their request id.
func FuzzBodyHash(f *testing.F) {
	v := openFixed(f)
	seed := func(request *berthv1.StartJobRequest) []byte {
		raw, err := proto.Marshal(request)
		if err != nil {
			f.Fatal(err)
		}
		return raw
	}
	f.Add(seed(fullJob()), seed(withUnknown(fullJob())))
	f.Add(seed(fullJob()), seed(fullJob()))
	f.Add([]byte{}, seed(&berthv1.StartJobRequest{RequestId: "r"}))
	f.Fuzz(func(t *testing.T, one, two []byte) {
		a, b := &berthv1.StartJobRequest{}, &berthv1.StartJobRequest{}
		if proto.Unmarshal(one, a) != nil || proto.Unmarshal(two, b) != nil {
			t.Skip()
		}
		hashA, hashB := v.BodyHash(startJob, a), v.BodyHash(startJob, b)
		if !bytes.Equal(hashA, v.BodyHash(startJob, reread(t, a))) {
			t.Fatal("marshalled and read again it hashes differently")
		}
		a.RequestId, b.RequestId = "x", "x"
		if !bytes.Equal(hashA, v.BodyHash(startJob, a)) {
			t.Fatal("the request id counts")
		}
		for _, request := range []*berthv1.StartJobRequest{a, b} {
			if spec := request.GetSpec(); spec.GetTty() != nil { // it is not part of the work
				spec.Tty.Cols, spec.Tty.Rows = 0, 0
				delete(spec.GetEnv(), "TERM")
			}
		}
		same, equal := bytes.Equal(hashA, hashB), proto.Equal(a, b)
		if same && !equal {
			t.Fatalf("different bodies hash the same:\n%v\n%v", a, b)
		}
		// Unknown fields are hashed as they came; protobuf calls them equal in another order too.
		if !same && equal && bytes.Equal(deterministic(t, a), deterministic(t, b)) {
			t.Fatalf("equal bodies hash differently:\n%v\n%v", a, b)
		}
	})
}

func deterministic(t testing.TB, request *berthv1.StartJobRequest) []byte {
	t.Helper()
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}
