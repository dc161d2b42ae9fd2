package present

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

func TestAges(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0s": 10 * time.Millisecond, "59s": 59 * time.Second, "3m": 3*time.Minute + 59*time.Second, "47h": 47*time.Hour + time.Minute, "2d": 48 * time.Hour,
	} {
		if got := Roughly(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestHowJobsEndIsSaidOnce(t *testing.T) {
	seconds := func(s float64) *timestamppb.Timestamp {
		return timestamppb.New(time.Unix(0, 0).Add(time.Duration(s * float64(time.Second))))
	}
	for want, job := range map[string]*berthv1.Job{
		"timed out after 300ms": {
			Spec: &berthv1.JobSpec{Timeout: durationpb.New(300 * time.Millisecond)}, Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_TIMED_OUT},
		},
		"stopped on request after 303ms":                {Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_STOPPED, Reason: "stop_requested: by StopJob"}},
		"stopped after 303ms: the caller went away":     {Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_STOPPED, Reason: "disconnected: the caller went away"}},
		"stopped after 303ms":                           {Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_STOPPED}},
		"exited 3 after 303ms":                          {Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_EXITED, WaitStatus: &berthv1.WaitStatus{Status: &berthv1.WaitStatus_Code{Code: 3}}}},
		"killed for want of memory after 303ms: 64 MiB": {Outcome: &berthv1.Outcome{Cause: berthv1.Cause_CAUSE_OOM_KILLED, Reason: "64 MiB"}},
	} {
		job.StartTime, job.EndTime = seconds(0), seconds(0.303)
		if got := EndWords(job); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
