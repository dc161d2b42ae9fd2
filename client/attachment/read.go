package attachment

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/client/follow"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// read follows a job that others may be attached to, and takes nothing from them.
func (a *attachment) read(ctx context.Context) (*berthv1.Job, error) {
	reply, err := a.conn.Jobs().PollJob(ctx, &berthv1.PollJobRequest{JobId: a.jobID})
	if err != nil {
		return nil, err
	}
	a.started(&berthv1.ExecStarted{Job: reply.GetJob()})
	defer a.forwardSignals(ctx)()
	var writing sync.Mutex
	group, reading := errgroup.WithContext(ctx)
	for _, output := range []*outputEnd{&a.stdout, &a.stderr} {
		group.Go(func() error {
			_, err := follow.Output(reading, a.conn, a.jobID, output.stream, output.offset, follow.UntilDone, &sink{attachment: a, output: output, writing: &writing})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return a.job, err
	}
	job, err := follow.Wait(ctx, a.conn, a.jobID)
	if job == nil {
		job = a.job
	}
	return job, err
}

// sink writes what is read of one stream, and both streams one after the other.
type sink struct {
	attachment *attachment
	output     *outputEnd
	writing    *sync.Mutex
}

// Data writes bytes.
func (s *sink) Data(offset uint64, data []byte) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	return s.output.data(s.attachment.io.Gap, offset, data)
}

// Gap reports bytes that are missing.
func (s *sink) Gap(_, to uint64) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	s.output.gap(s.attachment.io.Gap, to)
	return nil
}
