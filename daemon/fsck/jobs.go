package fsck

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
)

// jobs looks at every job and at all kept output.
func (c *check) jobs(ctx context.Context) error {
	names, err := c.opts.Jobs.KeptOutput()
	if err != nil {
		return err
	}
	stray := make(map[string]bool, len(names))
	for _, name := range names {
		stray[name] = true
	}
	for after := ""; ; {
		var page, orphaned []*recordv1.JobRecord
		err := c.opts.Store.View(func(tx *store.Tx) (err error) {
			if page, after, err = tx.JobsAfter(after, maxPage); err != nil {
				return err
			}
			orphaned, err = orphanedOf(tx, page)
			return err
		})
		if err != nil {
			return err
		}
		c.report.Jobs += len(page)
		for _, job := range orphaned {
			c.jobOrphaned(ctx, job)
		}
		for _, job := range page {
			delete(stray, job.GetId())
			if err := c.lacking(ctx, job); err != nil {
				return err
			}
		}
		if after == "" || ctx.Err() != nil {
			break
		}
	}
	for _, name := range names {
		if !stray[name] || ctx.Err() != nil {
			continue
		}
		if err := c.orphanedOutput(name); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// orphanedOf returns those of a page of jobs that are open although their sandbox has ended.
func orphanedOf(tx *store.Tx, page []*recordv1.JobRecord) ([]*recordv1.JobRecord, error) {
	var orphaned []*recordv1.JobRecord
	for _, job := range page {
		if !jobs.IsOpen(job) {
			continue
		}
		sandbox, err := tx.Sandbox(job.GetSandboxId())
		if err != nil {
			return nil, err
		}
		if jobs.IsOrphaned(job, sandbox) {
			orphaned = append(orphaned, job)
		}
	}
	return orphaned, nil
}

func (c *check) jobOrphaned(ctx context.Context, job *recordv1.JobRecord) {
	c.fix(Finding{
		Kind: "job_orphaned", Subject: job.GetId(), Age: c.age(job.GetCreateTime()),
		Message: fmt.Sprintf("it is open, and its sandbox %s has ended", job.GetSandboxId()),
		Action:  "end it as lost",
	}, func() error {
		ended, err := c.opts.Jobs.EndOrphaned(ctx, job.GetId())
		if err == nil && !ended {
			err = errors.New("it has changed meanwhile: check again")
		}
		return err
	})
}

// lacking finds a receipt whose kept output is not there. It is looked at twice: one that is dropped names
// its output no more before that goes.
func (c *check) lacking(ctx context.Context, job *recordv1.JobRecord) error {
	if !c.opts.Jobs.LacksOutput(job) {
		return nil
	}
	var now *recordv1.JobRecord
	err := c.opts.Store.View(func(tx *store.Tx) (err error) {
		now, err = tx.Job(job.GetId())
		return err
	})
	if err != nil || now == nil || !c.opts.Jobs.LacksOutput(now) {
		return err
	}
	c.fix(Finding{
		Kind: "output_missing", Subject: job.GetId(), Age: c.age(job.GetDoneTime()),
		Message: "its receipt names kept output that is not there", Action: "count what is missing as dropped; the outcome stays as it is",
	}, func() error { return c.opts.Jobs.RestateOutput(ctx, job.GetId()) })
	return nil
}

// orphanedOutput finds kept output that no record names. It is removed when a receipt of that age would
// have been: until then its job may still be found, or somebody may want it.
func (c *check) orphanedOutput(name string) error {
	written, ofJob, there, err := c.opts.Jobs.StrayOutput(name)
	if err != nil || !there {
		return err
	}
	age := max(c.opts.Now().Sub(written), 0)
	finding := Finding{
		Kind: "output_orphaned", Subject: name, Age: age,
		Message: "it is kept output, and no record names its job", Action: "remove it",
	}
	switch {
	case !ofJob:
		finding.Message, finding.Action, finding.WhyNot = "it lies among the kept output, and is none", "none", "it is not the broker's: look at it, and move it away"
	case age < c.opts.Retention:
		finding.WhyNot = fmt.Sprintf("it is removed when it is as old as receipts get (%s): its job may still be found", c.opts.Retention)
	}
	c.fix(finding, func() error { return c.opts.Jobs.RemoveStrayOutput(name) })
	return nil
}

// requests looks for request ids whose result is not there, although it can't have been dropped yet.
func (c *check) requests(ctx context.Context) error {
	for after, more := (store.RequestKey{}), true; more && ctx.Err() == nil; {
		err := c.opts.Store.View(func(tx *store.Tx) (err error) {
			var page []store.Request
			if page, after, more, err = tx.RequestsAfter(after, maxPage); err != nil {
				return err
			}
			c.report.Requests += len(page)
			for _, request := range page {
				dangling, err := c.dangling(tx, request.Record.GetResultId())
				if err != nil {
					return err
				}
				if dangling {
					c.found(danglingRequest(request))
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

func danglingRequest(request store.Request) Finding {
	return Finding{
		Kind: "dangling_request", Subject: request.Namespace + "/" + request.RequestID, Action: "none",
		Message: fmt.Sprintf("the request id of a %s names %s, which is not there", request.Record.GetMethod(), request.Record.GetResultId()),
		WhyNot: "a repeated call is refused, and must be: forgetting it could have something done twice. It is forgotten by itself at " +
			request.Record.GetExpireTime().AsTime().Format(time.RFC3339),
	}
}

// dangling reports whether a request's result is missing although it was made too lately to have been
// dropped.
func (c *check) dangling(tx *store.Tx, id string) (bool, error) {
	prefix, made, found := strings.Cut(id, "_")
	parsed, err := ulid.Parse(made)
	at := ulid.Time(parsed.Time())
	if !found || err != nil || c.opts.Now().Sub(at) >= c.opts.Retention || prefix == "job" && !at.After(tx.DroppedThrough()) {
		return false, nil //nolint:nilerr // what is no id of ours names nothing that could be missing
	}
	switch prefix {
	case "sb":
		sandbox, err := tx.Sandbox(id)
		return sandbox == nil && err == nil, err
	case "job":
		job, err := tx.Job(id)
		return job == nil && err == nil, err
	}
	return false, nil
}
