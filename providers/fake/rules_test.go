package fake

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"net"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

const theJob = "job_00000000000000000000000001"

// proxiedGuest boots a machine and connects to its guest, as a broker does, with the fault proxy in the middle.
func proxiedGuest(t *testing.T, rules ...faultproxy.Rule) (p *Provider, id string, guest guestv1.GuestServiceClient) {
	t.Helper()
	p, dir := open(t)
	must(t, p.Harness().SetRules(rules...))
	id = "m_" + filepath.Base(dir) // a guest that boots clears away what bears its machine's id
	_, err := p.Create(t.Context(), spec(dir, id))
	must(t, err)
	dialer, err := p.Dialer(t.Context(), providers.Machine{ID: id})
	must(t, err)
	t.Cleanup(func() { _ = dialer.Close() })
	stream, err := dialer.Dial(t.Context())
	must(t, err)
	conn, err := grpc.NewClient("passthrough:///m", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return stream, nil }))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	guest = guestv1.NewGuestServiceClient(conn)
	hello(t, guest, id)
	return p, id, guest
}

func hello(t *testing.T, guest guestv1.GuestServiceClient, id string) {
	t.Helper()
	challenge, err := guest.Challenge(t.Context(), &guestv1.ChallengeRequest{})
	must(t, err)
	nonce := make([]byte, 32)
	proof := func(who string) []byte {
		mac := hmac.New(sha256.New, make([]byte, 32))
		mac.Write([]byte(who))
		mac.Write(nonce)
		mac.Write(challenge.GetNonce())
		return mac.Sum(nil)
	}
	said, err := guest.Hello(t.Context(), &guestv1.HelloRequest{Protocol: 1, MachineId: id, Nonce: nonce, Proof: proof("berth broker")})
	must(t, err)
	if !hmac.Equal(said.GetProof(), proof("berth guest")) || said.GetMachineId() != id {
		t.Fatalf("the guest of machine %s proves nothing: %v", id, said)
	}
}

func began(t *testing.T, guest guestv1.GuestServiceClient, script string) {
	t.Helper()
	_, err := guest.Start(t.Context(), &guestv1.StartRequest{JobId: theJob, Durable: true, Command: &guestv1.Command{
		Shell: script, KillGrace: durationpb.New(time.Second), OutputLimitBytes: 1 << 20,
	}})
	must(t, err)
}

func ended(t *testing.T, guest guestv1.GuestServiceClient) *guestv1.Status {
	t.Helper()
	response, err := guest.Wait(t.Context(), &guestv1.WaitRequest{JobId: theJob, Wait: durationpb.New(20 * time.Second)})
	must(t, err)
	return response.GetStatus()
}

func TestWhoHasNoLiesPassesEverythingOn(t *testing.T) {
	_, _, guest := proxiedGuest(t)
	began(t, guest, "printf hello; exit 7")
	if status := ended(t, guest); status.GetOutcome().GetExitCode() != 7 || status.GetStdout().GetTotalBytes() != 5 {
		t.Fatalf("it ended as %v", status)
	}
	attached, err := guest.Attach(t.Context())
	must(t, err)
	must(t, attached.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: theJob}}}))
	var said []byte
	for {
		message, err := attached.Recv()
		must(t, err)
		said = append(said, message.GetChunk().GetData()...)
		if message.GetDone() != nil {
			break
		}
	}
	if string(said) != "hello" {
		t.Fatalf("it said %q", said)
	}
	if _, err := guest.Wait(t.Context(), &guestv1.WaitRequest{JobId: "job_none"}); status.Code(err) != codes.NotFound {
		t.Fatalf("a job that is not there: %v", err)
	}
}

func TestEachRuleIsAppliedToItsReply(t *testing.T) {
	wait := func(kind faultproxy.Kind, fields map[string]any) faultproxy.Rule {
		return faultproxy.Rule{ID: "x", Call: "Wait", Kind: kind, Fields: fields, Times: 1}
	}
	for _, test := range []struct {
		name string
		rule faultproxy.Rule
		want func(*guestv1.WaitResponse, error) bool
	}{
		{"set", wait(faultproxy.Set, map[string]any{"status.outcome.exit_code": 3, "status.job_id": "other", "status.stdout.kept.*.to": uint64(1 << 63)}),
			func(r *guestv1.WaitResponse, err error) bool {
				s := r.GetStatus()
				return s.GetOutcome().GetExitCode() == 3 && s.GetJobId() == "other" && s.GetStdout().GetKept()[0].GetTo() == 1<<63
			}},
		{"add", wait(faultproxy.Add, map[string]any{"status.stdout.total_bytes": -6}),
			func(r *guestv1.WaitResponse, err error) bool {
				return r.GetStatus().GetStdout().GetTotalBytes() == ^uint64(0)
			}},
		{"repeat", wait(faultproxy.Repeat, map[string]any{"status.stdout.kept": 50}),
			func(r *guestv1.WaitResponse, err error) bool { return len(r.GetStatus().GetStdout().GetKept()) == 50 }},
		{"pad", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Pad, Count: 1000},
			func(r *guestv1.WaitResponse, err error) bool { return proto.Size(r) > 1000 && r.GetStatus().GetDone() }},
		{"other", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Other, Text: "Start"},
			func(r *guestv1.WaitResponse, err error) bool { return err == nil && !r.GetStatus().GetDone() }},
		{"nonsense", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Nonsense, Count: 4000},
			func(r *guestv1.WaitResponse, err error) bool { return err != nil }},
		{"frames", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Frames, Count: 4000},
			func(r *guestv1.WaitResponse, err error) bool { return status.Code(err) == codes.Unavailable }},
		{"refuse", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Refuse, Count: int(codes.DataLoss), Text: "oops"},
			func(r *guestv1.WaitResponse, err error) bool { return status.Code(err) == codes.DataLoss }},
		{"silent", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Silent},
			func(r *guestv1.WaitResponse, err error) bool { return status.Code(err) == codes.DeadlineExceeded }},
		{"stall midway", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.StallMidway},
			func(r *guestv1.WaitResponse, err error) bool { return status.Code(err) == codes.DeadlineExceeded }},
		{"cut midway", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.CutMidway},
			func(r *guestv1.WaitResponse, err error) bool { return status.Code(err) == codes.Unavailable }},
		{"double", faultproxy.Rule{ID: "x", Call: "Wait", Kind: faultproxy.Double},
			func(r *guestv1.WaitResponse, err error) bool { return true }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			p, _, guest := proxiedGuest(t)
			began(t, guest, "printf hello; exit 7")
			ended(t, guest)
			must(t, p.Harness().SetRules(test.rule))
			limit := time.Minute
			if test.rule.Kind == faultproxy.Silent || test.rule.Kind == faultproxy.StallMidway {
				limit = time.Second // nothing comes
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			response, err := guest.Wait(ctx, &guestv1.WaitRequest{JobId: theJob})
			if !test.want(response, err) {
				t.Errorf("the call gave %v (%v)", response, err)
			}
			if times, err := p.Harness().Applied("x"); err != nil || times != 1 {
				t.Errorf("it was applied %d times (%v)", times, err)
			}
		})
	}
}

func TestARuleIsAppliedInItsTurnAndWhereItApplies(t *testing.T) {
	p, id, guest := proxiedGuest(t)
	must(t, p.Harness().SetRules(
		faultproxy.Rule{ID: "code", Call: "Wait", Kind: faultproxy.Set, Fields: map[string]any{"status.pid": 4_000_000_000}, Skip: 1, Times: 1},
		faultproxy.Rule{ID: "data", Call: "Attach", Kind: faultproxy.Set, Fields: map[string]any{"chunk.data": "lies"}},
		faultproxy.Rule{ID: "jobs", Call: "List", Kind: faultproxy.Invent, Count: 3, Machine: id},
		faultproxy.Rule{ID: "none", Call: "List", Kind: faultproxy.Nonsense, Machine: "m_b"},
	))
	began(t, guest, "printf hello; exit 7")
	ended(t, guest)
	for i, want := range []bool{true, false} {
		if got := ended(t, guest).GetPid() == 4_000_000_000; got != want {
			t.Errorf("reply %d was changed: %v, want %v", i+1, got, want)
		}
	}
	attached, err := guest.Attach(t.Context())
	must(t, err)
	must(t, attached.Send(&guestv1.AttachRequest{Message: &guestv1.AttachRequest_Open{Open: &guestv1.AttachOpen{JobId: theJob}}}))
	kinds := 0
	for {
		message, err := attached.Recv()
		must(t, err)
		kinds++
		if chunk := message.GetChunk(); chunk != nil && !bytes.Equal(chunk.GetData(), []byte("lies")) {
			t.Errorf("the chunk is %v", chunk)
		}
		if message.GetDone() != nil {
			break
		}
	}
	list, err := guest.List(t.Context(), &guestv1.ListRequest{})
	must(t, err)
	if times, err := p.Harness().Applied("data"); err != nil || times != 1 || kinds != 3 {
		t.Errorf("a rule about chunks was applied in %d of %d messages (%v)", times, kinds, err)
	}
	if len(list.GetStatuses()) != 4 {
		t.Errorf("%d jobs are named, want 4", len(list.GetStatuses()))
	}
	if read, err := guest.Read(t.Context(), &guestv1.ReadRequest{JobId: theJob, Stream: berthv1.Stream_STREAM_STDOUT}); err != nil || string(read.GetData()) != "hello" {
		t.Errorf("its output is %v (%v)", read, err)
	}
}

func TestALieThatCouldNeverBeToldIsRefused(t *testing.T) {
	p, _ := open(t)
	for name, rule := range map[string]faultproxy.Rule{
		"no id":               {Call: "Wait", Kind: faultproxy.Pad},
		"no call":             {ID: "x", Call: "Sleep", Kind: faultproxy.Pad},
		"no kind":             {ID: "x", Call: "Wait", Kind: "fib"},
		"no field":            {ID: "x", Call: "Wait", Kind: faultproxy.Set},
		"a field of nobody":   {ID: "x", Call: "Wait", Kind: faultproxy.Set, Fields: map[string]any{"status.mood": 1}},
		"inside of a number":  {ID: "x", Call: "Wait", Kind: faultproxy.Set, Fields: map[string]any{"status.pid.x": 1}},
		"a list as one thing": {ID: "x", Call: "List", Kind: faultproxy.Set, Fields: map[string]any{"statuses.pid": 1}},
		"jobs in a Wait":      {ID: "x", Call: "Wait", Kind: faultproxy.Invent},
		"a reply of no call":  {ID: "x", Call: "Wait", Kind: faultproxy.Other, Text: "Sleep"},
	} {
		if err := p.Harness().SetRules(rule); err == nil {
			t.Errorf("%s: it is taken", name)
		}
	}
}

func TestTheFirstScriptOfLiesHasGuestsDialledAnew(t *testing.T) {
	p, dir := open(t)
	_, err := p.Create(t.Context(), spec(dir, "m_a"))
	must(t, err)
	dialer, err := p.Dialer(t.Context(), providers.Machine{ID: "m_a"})
	must(t, err)
	defer func() { _ = dialer.Close() }()
	conn, err := dialer.Dial(t.Context())
	must(t, err)
	must(t, p.Harness().SetRules())
	must(t, conn.SetReadDeadline(time.Now().Add(5*time.Second)))
	if _, err := conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Fatalf("the connection goes on: %v", err)
	}
	conn, err = dialer.Dial(t.Context())
	must(t, err)
	if _, honest := conn.(*honestConn); honest {
		t.Fatal("nobody is in the middle of the new connection")
	}
	_ = conn.Close()
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error) //nolint:errorlint // as the connection gave it
	return ok && timeout.Timeout()
}
