package lifecycle

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
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
	if record.GetMethod() != c.Method || record.GetHashVersion() != c.HashVersion || !bytes.Equal(record.GetBodyHash(), c.BodyHash) {
		return "", fault.New(fault.RequestIDReused,
			"request_id %q was used before by another %s: give each request an id of its own, and repeat one only with the same body",
			c.RequestID, record.GetMethod()).With("request_id", c.RequestID)
	}
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

// problem is how an error is kept in a record.
func problem(err error, now time.Time) *berthv1.Problem {
	return &berthv1.Problem{Reason: string(reasonOf(err)), Message: err.Error(), Time: timestamppb.New(now)}
}

// refusal is the error that a kept problem stands for.
func refusal(p *berthv1.Problem) error {
	reason := fault.Reason(p.GetReason())
	if _, known := fault.Reasons()[reason]; !known {
		reason = fault.Internal
	}
	return fault.New(reason, "%s", p.GetMessage())
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}

func describe(kind recordv1.OperationKind, step string) string {
	return fmt.Sprintf("%s/%s", kindName(kind), step)
}

// kindName is an operation's kind in short; a number for one that only a newer build knows.
func kindName(kind recordv1.OperationKind) string {
	return strings.TrimPrefix(kind.String(), "OPERATION_KIND_")
}

// OperationName says for people what an operation does, such as "create".
func OperationName(operation *recordv1.OperationRecord) string {
	return strings.ToLower(kindName(operation.GetKind()))
}
