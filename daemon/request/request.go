// Package request is what every call on a resource has in common: who makes it, under which request id,
// for which generation and lease. It decides whether the call may touch a sandbox, remembers what its
// request id made, and makes ids. It changes no resource.
package request

import (
	"bytes"
	"strconv"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/store"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// requestLife is how long a request id is remembered; the API promises at least 24 h.
const requestLife = 25 * time.Hour

// Call is what every mutating request says beside its body.
type Call struct {
	Namespace    string
	RequestID    string // empty: the call cannot be repeated
	Method       string // as "berth.v1.SandboxService/CreateSandbox"
	BodyHash     []byte
	HashVersion  uint32
	IfGeneration uint64 // zero: any
	Lease        *berthv1.LeaseRef
}

// Prior returns the id of what the same request made or acted on before; empty when it is new.
// Another body under the same id is refused.
func (c Call) Prior(tx *store.Tx) (string, error) {
	if c.RequestID == "" {
		return "", nil
	}
	record, err := tx.Request(c.Namespace, c.RequestID)
	if err != nil || record == nil {
		return "", err
	}
	//mutation:body-hash if record.GetMethod() != c.Method || record.GetHashVersion() != c.HashVersion || bytes.Equal(record.GetBodyHash(), []byte{0}) {
	if record.GetMethod() != c.Method || record.GetHashVersion() != c.HashVersion || !bytes.Equal(record.GetBodyHash(), c.BodyHash) {
		return "", fault.New(fault.RequestIDReused,
			"request_id %q was used before by another %s: give each request an id of its own, and repeat one only with the same body",
			c.RequestID, record.GetMethod()).With("request_id", c.RequestID)
	}
	//mutation:request-id return "", nil
	return record.GetResultId(), nil
}

// Remember writes down, in the transaction that does it, what the request made or acted on.
func (c Call) Remember(tx *store.Tx, resultID string, now time.Time) error {
	if c.RequestID == "" {
		return nil
	}
	return tx.PutRequest(c.Namespace, c.RequestID, &recordv1.RequestRecord{
		BodyHash: c.BodyHash, HashVersion: c.HashVersion, Method: c.Method, ResultId: resultID,
		ExpireTime: timestamppb.New(now.Add(requestLife)),
	})
}

// Sandbox returns the sandbox that the call is about, or why the call may not touch it: it belongs
// to another namespace, another generation runs, or the caller's lease is no longer held.
func (c Call) Sandbox(tx *store.Tx, sandboxID string) (*recordv1.SandboxRecord, error) {
	record, err := tx.Sandbox(sandboxID)
	if err != nil {
		return nil, err
	}
	if record == nil || record.GetNamespace() != c.Namespace {
		return nil, NoSandbox(sandboxID)
	}
	if c.Lease != nil {
		// No lease can be granted yet, so whoever names one no longer holds it.
		return nil, fault.New(fault.LeaseLost, "lease %s is not held on sandbox %s: acquire it again", c.Lease.GetId(), sandboxID).
			With("lease_id", c.Lease.GetId()).With("epoch", strconv.FormatUint(c.Lease.GetEpoch(), 10))
	}
	if c.IfGeneration == 0 {
		return record, nil
	}
	if record.GetState() != berthv1.SandboxState_SANDBOX_STATE_RUNNING {
		return nil, fault.New(fault.NotRunning, "sandbox %s is %s, and the call asks for generation %d of its machine",
			sandboxID, StateName(record.GetState()), c.IfGeneration).With("state", StateName(record.GetState()))
	}
	if record.GetGeneration() != c.IfGeneration {
		return nil, fault.New(fault.OtherGeneration, "sandbox %s runs generation %d, and the call asks for %d: its processes were replaced",
			sandboxID, record.GetGeneration(), c.IfGeneration).
			With("generation", strconv.FormatUint(record.GetGeneration(), 10)).
			With("wanted", strconv.FormatUint(c.IfGeneration, 10))
	}
	return record, nil
}

// NoSandbox says that there is no such sandbox, as to everybody in another namespace.
func NoSandbox(id string) error {
	return fault.New(fault.SandboxNotFound, "no sandbox %s: `berth ls` shows those there are", id).With("sandbox_id", id)
}

// StateName returns a state's name without its prefix.
func StateName(state berthv1.SandboxState) string {
	const prefix = len("SANDBOX_STATE_")
	return state.String()[min(prefix, len(state.String())):]
}

// WantRunning says that a sandbox is not in the state that a command needs.
func WantRunning(record *recordv1.SandboxRecord) error {
	state, remedy := record.GetState(), "wait for it, or see `berth get`"
	switch state {
	case berthv1.SandboxState_SANDBOX_STATE_RUNNING:
		return nil
	case berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_SUSPENDED:
		remedy = "resume it first"
	case berthv1.SandboxState_SANDBOX_STATE_DESTROYED, berthv1.SandboxState_SANDBOX_STATE_DESTROYING,
		berthv1.SandboxState_SANDBOX_STATE_FAILED:
		remedy = "create another"
	case berthv1.SandboxState_SANDBOX_STATE_LOST:
		return fault.New(fault.MachineGone, "the machine of sandbox %s is gone: destroy the sandbox and create another", record.GetId()).
			With("state", StateName(state))
	}
	return fault.New(fault.WrongState, "sandbox %s is %s, not RUNNING: %s", record.GetId(), StateName(state), remedy).
		With("state", StateName(state)).With("wanted", "RUNNING")
}

// MatchesLabels reports whether a resource bears all the wanted labels; an empty value matches any.
func MatchesLabels(labels, wanted map[string]string) bool {
	for key, value := range wanted {
		if have, found := labels[key]; !found || value != "" && have != value {
			return false
		}
	}
	return true
}
