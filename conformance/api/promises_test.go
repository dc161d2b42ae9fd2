package api

import (
	"errors"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func openStdin(spec *berthv1.JobSpec) *berthv1.JobSpec {
	spec.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	return spec
}

func TestInputWithoutAnOffsetIsAppendedAndAHalfCloseEndsIt(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	stream, err := w.Jobs().Exec(w.ctx)
	if err != nil {
		t.Fatal(err)
	}
	send := func(request *berthv1.ExecRequest) {
		t.Helper()
		if err := stream.Send(request); err != nil {
			t.Fatal(err)
		}
	}
	send(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Start{Start: &berthv1.ExecStart{SandboxId: sandbox, Spec: openStdin(argv("cat"))}}})
	for _, text := range []string{"one ", "two ", "three"} {
		send(&berthv1.ExecRequest{Message: &berthv1.ExecRequest_Input{Input: &berthv1.ExecInput{Data: []byte(text)}}})
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	var out []byte
	var done *berthv1.Job
	for {
		reply, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, reply.GetChunk().GetData()...)
		if reply.GetDone() != nil {
			done = reply.GetDone()
		}
	}
	wantExit(t, done, 0)
	if string(out) != "one two three" {
		t.Errorf("attached, it gave back %q", out)
	}

	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: openStdin(argv("cat"))})
	if err != nil {
		t.Fatal(err)
	}
	id := reply.GetJob().GetId()
	for i, text := range []string{"one ", "two ", "three", ""} {
		if _, err := w.Jobs().WriteJobInput(w.ctx, &berthv1.WriteJobInputRequest{JobId: id, Data: []byte(text), Eof: i == 3}); err != nil {
			t.Fatal(err)
		}
	}
	wantExit(t, w.wait(t, id), 0)
	if out := w.read(t, id, berthv1.Stream_STREAM_STDOUT); out != "one two three" {
		t.Errorf("detached, it gave back %q", out)
	}

	for name, offset := range map[string]uint64{"at the end": 13, "beyond it": 14} {
		follow, err := w.Jobs().FollowJob(w.ctx, &berthv1.FollowJobRequest{JobId: id, StdoutOffset: offset})
		if err != nil {
			t.Fatal(err)
		}
		first, err := follow.Recv()
		switch violations := client.Violations(err); {
		case offset == 13 && first.GetDone() == nil:
			t.Errorf("followed from %s: %v (%v)", name, first, err)
		case offset == 14 && (len(violations) != 1 || violations[0].GetField() != "stdout_offset"):
			t.Errorf("followed from %s: %v (%v)", name, first, err)
		}
	}
	w.destroy(t, sandbox)
}

func TestAHundredLongCommandsFitIntoPages(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	const jobs = 30
	script := ": " + strings.Repeat("x", 100<<10)
	for range jobs {
		if _, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: shell(script)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, view := range []berthv1.View{berthv1.View_VIEW_BASIC, berthv1.View_VIEW_FULL} {
		seen, pages := 0, 0
		for token := ""; seen == 0 || token != ""; pages++ {
			page, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{SandboxId: sandbox, PageToken: token, View: view})
			if err != nil || len(page.GetJobs()) == 0 {
				t.Fatalf("%s: page %d has %d jobs (%v)", view, pages, len(page.GetJobs()), err)
			}
			if size := proto.Size(page); size > 3<<19 {
				t.Errorf("%s: page %d has %d bytes", view, pages, size)
			}
			for _, job := range page.GetJobs() {
				whole := job.GetSpec().GetShell() == script
				if full := view == berthv1.View_VIEW_FULL; whole != full || job.GetSpecCut() == full {
					t.Fatalf("%s: whole: %v, cut: %v", view, whole, job.GetSpecCut())
				}
			}
			seen, token = seen+len(page.GetJobs()), page.GetNextPageToken()
		}
		if wantMore := view == berthv1.View_VIEW_FULL; seen != jobs || (pages > 1) != wantMore {
			t.Errorf("%s: %d jobs on %d pages", view, seen, pages)
		}
	}
	if _, err := w.Jobs().ListJobs(w.ctx, &berthv1.ListJobsRequest{PageToken: "am9iXzAx"}); len(client.Violations(err)) != 1 {
		t.Errorf("a token made up: %v", err)
	}
	w.destroy(t, sandbox)
}

func TestARepeatedCreateOfADestroyedSandboxIsAnErrorThatNamesIt(t *testing.T) {
	t.Parallel()
	w := start(t)
	request := &berthv1.CreateSandboxRequest{RequestId: "once", Spec: &berthv1.SandboxSpec{}}
	made, err := w.Sandboxes().CreateSandbox(w.ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	w.destroy(t, made.GetSandbox().GetId())
	again, err := w.Sandboxes().CreateSandbox(w.ctx, request)
	if status.Code(err) != codes.FailedPrecondition || client.Metadata(err)["sandbox_id"] != made.GetSandbox().GetId() || !strings.Contains(err.Error(), made.GetSandbox().GetId()) {
		t.Errorf("it answers with %v (%v)", again, err)
	}
}
