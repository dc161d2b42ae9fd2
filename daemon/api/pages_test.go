package api

import (
	"context"
	"encoding/base64"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/daemon/fault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAPageTokenIsGoodForItsListOnly(t *testing.T) {
	a := &api{Options{Hasher: hasher{}}}
	ours := auth.NewContext(t.Context(), auth.Principal{Namespace: "ours"})
	list := func(change func(*berthv1.ListJobsRequest)) *berthv1.ListJobsRequest {
		request := &berthv1.ListJobsRequest{PageSize: 7, SandboxId: "sb_1", Labels: map[string]string{"a": "b"}}
		change(request)
		return request
	}
	token := a.tokenOf(ours, list(func(*berthv1.ListJobsRequest) {}), "job_1")
	for _, test := range []struct {
		name    string
		ctx     context.Context
		request listing
		good    bool
	}{
		{"the same list", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = token }), true},
		{"another size", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken, r.PageSize = token, 1 }), true},
		{"another filter", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken, r.SandboxId = token, "sb_2" }), false},
		{"other labels", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken, r.Labels = token, nil }), false},
		{"another view", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken, r.View = token, berthv1.View_VIEW_FULL }), false},
		{"another namespace", t.Context(), list(func(r *berthv1.ListJobsRequest) { r.PageToken = token }), false},
		{"a list of sandboxes", ours, &berthv1.ListSandboxesRequest{PageToken: token}, false},
		{"a token made up", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = base64.RawURLEncoding.EncodeToString([]byte("job_1")) }), false},
		{"a token with another id", ours, list(func(r *berthv1.ListJobsRequest) {
			decoded, _ := base64.RawURLEncoding.DecodeString(token)
			r.PageToken = base64.RawURLEncoding.EncodeToString(append(decoded[:len(decoded)-1], '2'))
		}), false},
		{"a token without an id", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = token[:22] }), false},
		{"a token with padding", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = token + "=" }), false},
		{"no base64", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = "%%%" }), false},
		{"a token without end", ours, list(func(r *berthv1.ListJobsRequest) { r.PageToken = strings.Repeat("A", maxToken+1) }), false},
	} {
		page, err := a.pageOf(test.ctx, test.request, map[string]bool{})
		var known *fault.Error
		switch {
		case test.good && (err != nil || page.After != "job_1"):
			t.Errorf("%s: after %q (%v)", test.name, page.After, err)
		case !test.good && (!errors.As(err, &known) || known.Fields[0].Path != "page_token"):
			t.Errorf("%s: after %q (%v)", test.name, page.After, err)
		}
	}
	if end := a.tokenOf(ours, list(func(*berthv1.ListJobsRequest) {}), ""); end != "" {
		t.Errorf("the last page has the token %q", end)
	}
}

func TestAPageIsAsLongAsAskedWithinItsBounds(t *testing.T) {
	a := &api{Options{Hasher: hasher{}}}
	ctx, cancel := context.WithCancel(t.Context())
	for asked, want := range map[uint32]int{0: defaultPage, 1: 1, maxPage: maxPage, maxPage + 1: maxPage, math.MaxUint32: maxPage} {
		page, err := a.pageOf(ctx, &berthv1.ListSandboxesRequest{PageSize: asked}, map[string]bool{})
		if err != nil || page.Size != want || page.Bytes != maxPageBytes || page.After != "" || page.Canceled() != nil {
			t.Errorf("asked for %d: %+v (%v)", asked, page, err)
		}
	}
	page, err := a.pageOf(ctx, &berthv1.ListSandboxesRequest{}, map[string]bool{})
	cancel()
	if err != nil || !errors.Is(page.Canceled(), context.Canceled) {
		t.Errorf("a caller that went away: %v", err)
	}
}

func TestAListCutsSpecsAndSaysSo(t *testing.T) {
	a := &api{Options{Hasher: hasher{}}}
	for _, test := range []struct {
		name  string
		spec  *berthv1.JobSpec
		view  berthv1.View
		limit int // zero: it is not cut
	}{
		{"a small one", &berthv1.JobSpec{Argv: []string{"true"}, Env: map[string]string{"A": "b"}}, berthv1.View_VIEW_BASIC, 0},
		{"a long script", &berthv1.JobSpec{Shell: strings.Repeat("ü", 1<<20)}, berthv1.View_VIEW_UNSPECIFIED, basicSpec},
		{"a long script in full", &berthv1.JobSpec{Shell: strings.Repeat("ü", 1<<20)}, berthv1.View_VIEW_FULL, fullSpec},
		{"one that is whole in full", &berthv1.JobSpec{Shell: strings.Repeat("x", basicSpec)}, berthv1.View_VIEW_FULL, 0},
		{"a long argument behind a short one", &berthv1.JobSpec{Argv: []string{"echo", strings.Repeat("x", 1<<20)}}, berthv1.View_VIEW_BASIC, basicSpec},
		{"a million empty arguments", &berthv1.JobSpec{Argv: make([]string, 1<<20)}, berthv1.View_VIEW_BASIC, basicSpec},
		{"a long environment", &berthv1.JobSpec{Argv: []string{"true"}, Env: map[string]string{"A": strings.Repeat("x", 1<<20)}}, berthv1.View_VIEW_BASIC, basicSpec},
	} {
		cut := map[string]bool{}
		page, err := a.pageOf(t.Context(), &berthv1.ListJobsRequest{View: test.view}, cut)
		if err != nil {
			t.Fatal(err)
		}
		record := &recordv1.JobRecord{Id: "job_1", Spec: proto.CloneOf(test.spec)}
		page.Cut(record)
		same := proto.Equal(record.GetSpec(), test.spec)
		if cut["job_1"] != (test.limit != 0) || same != (test.limit == 0) {
			t.Errorf("%s: cut: %v, the same: %v", test.name, cut["job_1"], same)
		}
		if size := proto.Size(record); test.limit != 0 && size > test.limit+64 {
			t.Errorf("%s: it has %d bytes, want %d", test.name, size, test.limit)
		}
		if len(test.spec.GetArgv()) > 0 && (len(record.GetSpec().GetArgv()) == 0 || record.GetSpec().GetArgv()[0] != test.spec.GetArgv()[0]) {
			t.Errorf("%s: its program is gone", test.name)
		}
		if shown := jobToProto(&recordv1.JobRecord{Spec: test.spec}, fullSpec); proto.Size(shown) > fullSpec+64 {
			t.Errorf("%s: alone it has %d bytes", test.name, proto.Size(shown))
		}
	}
	cut := map[string]bool{}
	page, err := a.pageOf(t.Context(), &berthv1.ListSandboxesRequest{}, cut)
	if err != nil {
		t.Fatal(err)
	}
	hosts := slices.Repeat([]string{strings.Repeat("h", maxHostBytes)}, maxHosts)
	record := &recordv1.SandboxRecord{Id: "sb_1", Spec: &berthv1.SandboxSpec{
		Image: "i", Env: map[string]string{"A": strings.Repeat("x", 1<<20)}, Egress: &berthv1.Egress{Mode: berthv1.Egress_MODE_ALLOW_LIST, AllowHosts: hosts},
	}}
	page.Cut(record)
	if spec := record.GetSpec(); !cut["sb_1"] || proto.Size(record) > basicSpec || spec.GetImage() != "i" || spec.GetEgress().GetMode() != berthv1.Egress_MODE_ALLOW_LIST {
		t.Errorf("a sandbox's spec: %v, %d bytes", cut, proto.Size(record))
	}
}

// The longest reply of each call that returns output or a spec.
func TestNoReplyPassesTwoMebibytes(t *testing.T) {
	const limit = 2 << 20
	worst := func(n int) []byte { return []byte(strings.Repeat("a\xff", n/2)) } // as text it is twice as long
	spec := &berthv1.JobSpec{
		Argv: []string{strings.Repeat("x", maxArgvBytes)}, Env: map[string]string{"A": strings.Repeat("x", maxEnvBytes)}, Labels: map[string]string{},
	}
	job := &recordv1.JobRecord{Spec: spec}
	run := func(asText bool, size int) *berthv1.RunCommandResponse {
		output := &berthv1.BoundedOutput{Head: worst(size)}
		if asText {
			output.Text, _ = text(output.GetHead())
		}
		return &berthv1.RunCommandResponse{Job: jobToProto(job, basicSpec), Stdout: output, Stderr: output}
	}
	tail := &berthv1.BoundedOutput{Tail: worst(maxTail)}
	tail.Text, _ = text(tail.GetTail())
	read := &berthv1.ReadJobOutputResponse{Data: worst(maxRead / 2)}
	read.Text, _ = text(read.GetData())
	for name, reply := range map[string]proto.Message{
		"a run":                   run(false, maxRunOutput),
		"a run as text":           run(true, maxRunOutput/2),
		"a poll":                  &berthv1.PollJobResponse{Job: jobToProto(job, fullSpec)},
		"a poll with tails":       &berthv1.PollJobResponse{Job: jobToProto(job, basicSpec), Stdout: tail, Stderr: tail},
		"a read":                  &berthv1.ReadJobOutputResponse{Data: worst(maxRead)},
		"a read as text":          read,
		"the end of an Exec":      &berthv1.ExecResponse{Message: &berthv1.ExecResponse_Done{Done: jobToProto(job, basicSpec)}},
		"a page and a last of it": &berthv1.ListJobsResponse{Jobs: []*berthv1.Job{{Shell: strings.Repeat("x", maxPageBytes)}, jobToProto(job, basicSpec)}},
	} {
		if size := proto.Size(reply); size > limit {
			t.Errorf("%s has %d bytes", name, size)
		}
	}
}
