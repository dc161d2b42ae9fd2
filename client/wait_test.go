package client_test

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func done(code int32) *berthv1.Job {
	return &berthv1.Job{
		Id: "job_1", SandboxId: "sb_1", State: berthv1.JobState_JOB_STATE_DONE,
		Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, Exit: &berthv1.Outcome_ExitCode{ExitCode: code}},
	}
}

func TestWaitJobOutlastsRestartsInTheMiddle(t *testing.T) {
	b := newBroker(t)
	c := b.dial()
	ctx := testContext(t)
	var story sync.WaitGroup
	story.Go(func() {
		for range 3 {
			<-b.entered // a poll waits in the broker
			b.kill()
			time.Sleep(100 * time.Millisecond)
			b.start()
		}
		<-b.entered
		b.change(func() { b.job = done(7) })
	})
	job, err := c.WaitJob(ctx, "job_1")
	story.Wait()
	if err != nil || job.GetOutcome().GetExitCode() != 7 {
		t.Errorf("got %v, %v", job, err)
	}
}

func TestWaitJobGoesOnWhileTheBrokerRecovers(t *testing.T) {
	b := newBroker(t)
	b.job = done(0)
	for range 4 {
		b.refuse = append(b.refuse, recovering(10*time.Second)) // beyond the retry timeout of a single call
	}
	c := b.dial(client.WithRetryTimeout(time.Second, time.Second))
	if _, err := c.WaitJob(testContext(t), "job_1"); err != nil {
		t.Error(err)
	}
}

func TestWaitJobEnds(t *testing.T) {
	for _, test := range []struct {
		name    string
		prepare func(*broker)
		check   func(*berthv1.Job, error) bool
	}{
		{"with the job when it is lost", func(b *broker) {
			b.job = &berthv1.Job{State: berthv1.JobState_JOB_STATE_DONE, Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_LOST}}
		}, func(job *berthv1.Job, err error) bool {
			return err == nil && job.GetOutcome().GetCause() == berthv1.Cause_CAUSE_LOST
		}},
		{"with an error of its own when the machine is stopped", func(b *broker) {
			b.job = &berthv1.Job{Id: "job_1", State: berthv1.JobState_JOB_STATE_UNKNOWN}
		}, func(_ *berthv1.Job, err error) bool {
			var unknown *client.UnknownOutcomeError
			return errors.As(err, &unknown) && unknown.Job.GetId() == "job_1"
		}},
		{"with JOB_NOT_FOUND", func(b *broker) {
			b.refuse = []error{failure(codes.NotFound, "JOB_NOT_FOUND", nil)}
		}, func(_ *berthv1.Job, err error) bool { return client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND) }},
		{"with an unreachable broker that stays away", func(b *broker) { b.kill() },
			func(_ *berthv1.Job, err error) bool {
				var gone *client.UnreachableError
				return errors.As(err, &gone)
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			test.prepare(b)
			c := b.dial(client.WithRetryTimeout(300*time.Millisecond, 300*time.Millisecond))
			if job, err := c.WaitJob(testContext(t), "job_1"); !test.check(job, err) {
				t.Errorf("got %v, %v", job, err)
			}
		})
	}
}

func TestWaitJobEndsWithItsContext(t *testing.T) {
	b := newBroker(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := b.dial().WaitJob(ctx, "job_1"); client.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got %v", err)
	}
}

func TestCopyOutputIsExactOverRestarts(t *testing.T) {
	b := newBroker(t)
	c := b.dial()
	ctx := testContext(t)
	var want []byte
	for i := range 64 {
		want = append(want, byte(i*7), 0, 0xff, '\n')
	}
	var story sync.WaitGroup
	story.Go(func() {
		for i := 0; i < len(want); i += 16 {
			b.change(func() { b.output = want[:i+16] })
			if i%64 == 0 {
				b.kill()
				time.Sleep(20 * time.Millisecond)
				b.start()
			}
			time.Sleep(5 * time.Millisecond)
		}
		b.change(func() { b.job = done(0) })
	})
	var got bytes.Buffer
	next, gaps, err := c.CopyOutput(ctx, "job_1", berthv1.Stream_STREAM_STDOUT, 0, &got)
	story.Wait()
	if err != nil || next != uint64(len(want)) || len(gaps) != 0 || !bytes.Equal(got.Bytes(), want) {
		t.Errorf("next %d, gaps %v, err %v, equal %v", next, gaps, err, bytes.Equal(got.Bytes(), want))
	}
}

func TestOutputIsReadFromAnOffsetWithItsGapsTold(t *testing.T) {
	for _, test := range []struct {
		name    string
		offset  uint64
		dropped [2]uint64
		want    string
		gaps    [][2]uint64
		next    uint64
	}{
		{"from the beginning", 0, [2]uint64{}, "0123456789abcdef", nil, 16},
		{"from the middle", 9, [2]uint64{}, "9abcdef", nil, 16},
		{"from the end", 16, [2]uint64{}, "", nil, 16},
		{"over a gap", 0, [2]uint64{3, 12}, "012cdef", [][2]uint64{{3, 12}}, 16},
		{"from inside a gap", 5, [2]uint64{3, 12}, "cdef", [][2]uint64{{5, 12}}, 16},
		{"up to a gap that is the end", 0, [2]uint64{12, 16}, "0123456789ab", [][2]uint64{{12, 16}}, 16},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBroker(t)
			b.output, b.dropped, b.job = []byte("0123456789abcdef"), test.dropped, done(0)
			var got bytes.Buffer
			next, gaps, err := b.dial().CopyOutput(testContext(t), "job_1", berthv1.Stream_STREAM_STDOUT, test.offset, &got)
			if err != nil || got.String() != test.want || next != test.next || len(gaps) != len(test.gaps) {
				t.Fatalf("got %q, next %d, gaps %v, err %v", got.String(), next, gaps, err)
			}
			for i, gap := range gaps {
				if gap.GetFrom() != test.gaps[i][0] || gap.GetTo() != test.gaps[i][1] {
					t.Errorf("gap %v, want %v", gap, test.gaps[i])
				}
			}
		})
	}
}

func TestReadAllOutputOfARunningJobEndsWhereItIsNow(t *testing.T) {
	b := newBroker(t)
	b.output = []byte("so far, so good")
	got, gaps, err := b.dial().ReadAllOutput(testContext(t), "job_1", berthv1.Stream_STREAM_STDERR)
	if err != nil || string(got) != "so far, so good" || len(gaps) != 0 {
		t.Errorf("got %q, gaps %v, err %v", got, gaps, err)
	}
}

type failingWriter struct{ left int }

var errFull = errors.New("full")

func (w *failingWriter) Write(data []byte) (int, error) {
	if w.left -= len(data); w.left < 0 {
		return 0, errFull
	}
	return len(data), nil
}

func TestCopyOutputSaysHowFarItCameWhenTheWriterFails(t *testing.T) {
	b := newBroker(t)
	b.output, b.job = []byte("0123456789abcdef"), done(0)
	next, _, err := b.dial().CopyOutput(testContext(t), "job_1", berthv1.Stream_STREAM_STDOUT, 0, &failingWriter{left: 12})
	if !errors.Is(err, errFull) || next != 10 {
		t.Errorf("next %d, err %v", next, err)
	}
}
