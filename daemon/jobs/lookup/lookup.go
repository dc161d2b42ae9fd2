// Package lookup finds jobs and waits for them: in the ledger, or among the commands that are not written
// down yet. It changes nothing.
package lookup

import (
	"context"
	"time"

	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/jobs/unrecorded"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Jobs finds jobs.
type Jobs struct {
	Store      *store.Store
	Events     *events.Hub // fed by the store's commits
	Unrecorded *unrecorded.Commands
	Syncing    func() bool     // a machine has not listed its jobs since the broker's start
	Draining   <-chan struct{} // closed when calls that only wait are to end
}

// Find returns a job of a namespace. A job that the ledger does not have may be an attached command
// that only a guest knows which has not been heard from yet: that is RECOVERING, not NOT_FOUND.
func (j *Jobs) Find(namespace, id string) (*recordv1.JobRecord, error) {
	job, _, err := j.read(id)
	switch {
	case err != nil:
		return nil, err
	case job == nil && guestlink.ValidJobID(id) && j.Syncing():
		return nil, fault.New(fault.Recovering, "the broker has just started and does not know of %s yet: try again", id).Retry(time.Second)
	case job.GetNamespace() != namespace:
		return nil, record.NotFound(id)
	}
	return job, nil
}

// read returns a job, nil where there is none, and its sandbox.
func (j *Jobs) read(id string) (job *recordv1.JobRecord, sandbox *recordv1.SandboxRecord, err error) {
	held := j.Unrecorded.Find(id) // before the ledger: see there
	err = j.Store.View(func(tx *store.Tx) (err error) {
		if job, err = tx.Job(id); err != nil {
			return err
		}
		if job == nil {
			job = held
		}
		if job != nil {
			sandbox, err = tx.Sandbox(job.GetSandboxId())
		}
		return err
	})
	return job, sandbox, err
}

// Until waits until a job is as wanted and returns it. Its error is the context's, or WRONG_STATE
// when the job's machine is stopped: then nobody knows what became of it until that is resumed.
func (j *Jobs) Until(ctx context.Context, job *recordv1.JobRecord, wanted func(*recordv1.JobRecord) bool) (*recordv1.JobRecord, error) {
	id := job.GetId()
	waiter := j.Events.Wait(events.Job(id), events.Sandbox(job.GetSandboxId()))
	defer waiter.Close()
	for {
		job, sandbox, err := j.read(id)
		if err == nil && job == nil {
			err = record.NotFound(id)
		}
		if err != nil || wanted(job) {
			return job, err
		}
		if err := machineStopped(job, sandbox); err != nil {
			return job, err
		}
		//mutation:subscribe-before-read waiter.Close(); waiter = j.Events.Wait(events.Job(id)); select {
		select {
		case <-waiter.Changed():
		case <-ctx.Done():
			return job, ctx.Err()
		case <-j.Draining:
			return job, fault.New(fault.Stopping, "the broker is being stopped; %s continues, or is started when the broker is back", id).Retry(time.Second)
		}
	}
}

// Beyond waits for a job to go beyond what it was, where its guest does not know it.
func Beyond(was *recordv1.JobRecord) func(*recordv1.JobRecord) bool {
	begun := record.HasBegun(was)
	return func(job *recordv1.JobRecord) bool { return record.IsDone(job) || record.HasBegun(job) && !begun }
}

// UntilResumed waits while a job's sandbox is suspended, and reports whether it was and runs again.
func (j *Jobs) UntilResumed(ctx context.Context, job *recordv1.JobRecord) bool {
	waiter := j.Events.Wait(events.Sandbox(job.GetSandboxId()))
	defer waiter.Close()
	for suspended := false; ; suspended = true {
		sandbox, err := j.sandbox(job)
		if err != nil || !isSuspended(sandbox) {
			return suspended && sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_RUNNING
		}
		select {
		case <-waiter.Changed():
		case <-ctx.Done():
			return false
		case <-j.Draining:
			return false
		}
	}
}

func (j *Jobs) sandbox(job *recordv1.JobRecord) (sandbox *recordv1.SandboxRecord, err error) {
	err = j.Store.View(func(tx *store.Tx) error {
		sandbox, err = tx.Sandbox(job.GetSandboxId())
		return err
	})
	return sandbox, err
}

func isSuspended(sandbox *recordv1.SandboxRecord) bool {
	switch sandbox.GetState() {
	case berthv1.SandboxState_SANDBOX_STATE_SUSPENDING, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_RESUMING:
		return true
	}
	return false
}

// Suspended reports whether a job's machine is suspended, so that its guest can't be asked.
func (j *Jobs) Suspended(job *recordv1.JobRecord) bool {
	sandbox, err := j.sandbox(job)
	return err == nil && isSuspended(sandbox)
}

// Reachable returns an error when a job's machine is stopped, so that nobody can tell what became of the job
// until the sandbox is resumed; or suspended, so that nothing can be done to the job.
func (j *Jobs) Reachable(job *recordv1.JobRecord) error {
	sandbox, err := j.sandbox(job)
	if err != nil {
		return err
	}
	if err := machineStopped(job, sandbox); err != nil || !isSuspended(sandbox) {
		return err
	}
	return fault.New(fault.WrongState, "%s is suspended with its sandbox %s: resume it first", job.GetId(), job.GetSandboxId()).
		With("state", "SUSPENDED").With("wanted", "RUNNING")
}

// MachineStopped returns an error when a job's machine is stopped.
func (j *Jobs) MachineStopped(job *recordv1.JobRecord) error {
	sandbox, err := j.sandbox(job)
	if err != nil {
		return err
	}
	return machineStopped(job, sandbox)
}

func machineStopped(job *recordv1.JobRecord, sandbox *recordv1.SandboxRecord) error {
	if sandbox.GetState() != berthv1.SandboxState_SANDBOX_STATE_STOPPED {
		return nil
	}
	return fault.New(fault.WrongState, "what became of %s is not known, for its machine is STOPPED: resume sandbox %s to learn it, or destroy it",
		job.GetId(), sandbox.GetId()).With("state", "STOPPED").With("wanted", "RUNNING")
}

// MachineGone reports whether a job's machine is gone for good.
func (j *Jobs) MachineGone(job *recordv1.JobRecord) bool {
	gone := false
	err := j.Store.View(func(tx *store.Tx) error {
		machine, err := tx.Machine(job.GetMachineId())
		if err != nil {
			return err
		}
		sandbox, err := tx.Sandbox(job.GetSandboxId())
		gone = machine == nil || machine.GetState() == recordv1.MachineState_MACHINE_STATE_GONE ||
			sandbox.GetState() == berthv1.SandboxState_SANDBOX_STATE_LOST
		return err
	})
	return err == nil && gone
}
