package reconcile

import (
	"context"
	"errors"
	"time"

	"github.com/berth-sandbox/berth/daemon/store"
)

// runTrim trims until the context ends. It has a goroutine of its own: there may be much to drop, and no
// machine is to wait for that.
func (s *Service) runTrim(ctx context.Context) {
	ticker := time.NewTicker(s.trimInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			s.trim(ctx)
		}
	}
}

// trim drops what was kept long enough, or is more than may be kept: request ids, events, receipts and
// their output, ended sandboxes.
func (s *Service) trim(ctx context.Context) {
	now := s.opts.Now()
	before := now.Add(-s.opts.Retention)
	err := errors.Join(
		s.untilFew(ctx, func() (n int, err error) {
			err = s.opts.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
				n, err = tx.TrimRequests(now, maxTrim)
				return err
			})
			return n, err
		}),
		s.untilFew(ctx, func() (n int, err error) {
			err = s.opts.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
				n, err = tx.TrimEvents(now.Add(-eventRetention), maxEvents, maxTrim)
				return err
			})
			return n, err
		}),
		s.untilFew(ctx, func() (int, error) { return s.opts.Jobs.RemoveReceipts(ctx, before, maxTrim) }),
		s.untilFew(ctx, func() (int, error) { return s.opts.Jobs.RemoveExcess(ctx, s.opts.MaxReceipts, maxTrim) }),
		s.opts.Jobs.BoundOutput(ctx, s.opts.MaxOutput),
		s.trimSandboxes(ctx, before),
	)
	if err != nil && ctx.Err() == nil {
		s.opts.Log.Warn("cannot drop what was kept long enough", "error", err)
	}
}

// untilFew trims again and again, one short transaction at a time, until there is little left to trim.
func (s *Service) untilFew(ctx context.Context, trim func() (int, error)) error {
	for {
		n, err := trim()
		if err != nil || n < maxTrim || ctx.Err() != nil {
			return err
		}
	}
}

func (s *Service) trimSandboxes(ctx context.Context, before time.Time) error {
	return s.opts.Store.UpdateUrgent(ctx, func(tx *store.Tx) error {
		ids, err := tx.EndedSandboxes(before, maxTrim)
		if err != nil {
			return err
		}
		for _, id := range ids {
			sandbox, err := tx.Sandbox(id)
			if err != nil {
				return err
			}
			if sandbox == nil || sandbox.GetOperationId() != "" {
				continue
			}
			if err := errors.Join(tx.DeleteMachine(sandbox.GetMachineId()), tx.DeleteSandbox(id)); err != nil {
				return err
			}
		}
		return nil
	})
}
