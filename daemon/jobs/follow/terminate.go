package follow

import (
	"context"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/jobs/background"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// maxStopsConcurrent is how many of a terminating machine's jobs are stopped at once.
const maxStopsConcurrent = 16

// TerminateJobs kills everything that runs in a machine which is about to be destroyed, and imports the
// receipts, as far as that goes before the context ends.
func (f *Follower) TerminateJobs(ctx context.Context, machineID string) {
	request := &guestv1.ListRequest{Limit: listLimit}
	var pacer background.Pacer
	for {
		response, err := f.Links.ListJobs(ctx, machineID, request)
		if err != nil {
			return
		}
		var group errgroup.Group
		group.SetLimit(maxStopsConcurrent)
		for _, status := range response.GetStatuses() {
			group.Go(func() error {
				f.terminate(ctx, machineID, status)
				return nil
			})
		}
		_ = group.Wait()
		if !response.GetMore() {
			return
		}
		pacer.Await(ctx, response.GetNextCursor() > request.GetSinceCursor())
		request.SinceCursor = response.GetNextCursor()
	}
}

func (f *Follower) terminate(ctx context.Context, machineID string, status *guestv1.Status) {
	if !status.GetDone() || !record.Sealed(status) { // of one that is done, what it left running holds its output
		stopped, err := f.Links.StopJob(ctx, machineID, 0, &guestv1.StopRequest{
			JobId: status.GetJobId(), Grace: durationpb.New(0), Reason: "destroyed: its sandbox was destroyed",
		})
		if err != nil {
			return
		}
		status = stopped
	}
	if err := f.take(ctx, machineID, status); err != nil && ctx.Err() == nil {
		f.Log.Warn("a receipt was not imported before its machine was destroyed", "job", status.GetJobId(), "error", err)
	}
}
