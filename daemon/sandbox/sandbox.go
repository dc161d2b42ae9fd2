// Package sandbox reads the records of sandboxes, and keeps what belongs to one beside its state: its
// secrets and its session key. It never changes a sandbox's state.
package sandbox

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Records are the sandboxes of a ledger.
type Records struct {
	store *store.Store
	vault *vault.Vault
}

// New returns the sandboxes of a ledger whose secrets are sealed by the vault.
func New(ledger *store.Store, keys *vault.Vault) *Records { return &Records{ledger, keys} }

// Get returns a sandbox and its open operation, if it has one.
func (r *Records) Get(namespace, id string) (*recordv1.SandboxRecord, *recordv1.OperationRecord, error) {
	var sandbox *recordv1.SandboxRecord
	var op *recordv1.OperationRecord
	err := r.store.View(func(tx *store.Tx) (err error) {
		if sandbox, err = tx.Sandbox(id); err != nil {
			return err
		}
		if sandbox == nil || sandbox.GetNamespace() != namespace {
			return request.NoSandbox(id)
		}
		if sandbox.GetOperationId() != "" {
			op, err = tx.Operation(sandbox.GetOperationId())
		}
		return err
	})
	return sandbox, op, err
}

// Record returns a sandbox's record. Error: SANDBOX_NOT_FOUND.
func (r *Records) Record(id string) (*recordv1.SandboxRecord, error) {
	var sandbox *recordv1.SandboxRecord
	err := r.store.View(func(tx *store.Tx) (err error) {
		if sandbox, err = tx.Sandbox(id); err == nil && sandbox == nil {
			err = request.NoSandbox(id)
		}
		return err
	})
	return sandbox, err
}

// Page is a piece of a list: at most Size, after the resource named After.
type Page = store.Page

// Filter says which sandboxes a list shows.
type Filter struct {
	States     []berthv1.SandboxState // none: all but DESTROYED and FAILED
	Labels     map[string]string      // an empty value matches any
	SessionKey string
}

// List returns a page of sandboxes, newest first, and the ledger's revision that it shows.
func (r *Records) List(namespace string, filter Filter, page store.Page) (sandboxes []*recordv1.SandboxRecord, next string, revision uint64, err error) {
	err = r.store.View(func(tx *store.Tx) (err error) {
		revision = tx.Revision()
		sandboxes, next, err = tx.ListSandboxes(namespace, page, func(sandbox *recordv1.SandboxRecord) bool {
			return matchesState(sandbox.GetState(), filter.States) &&
				request.MatchesLabels(sandbox.GetSpec().GetLabels(), filter.Labels) &&
				(filter.SessionKey == "" || sandbox.GetSpec().GetSessionKey() == filter.SessionKey)
		})
		return err
	})
	return sandboxes, next, revision, err
}

func matchesState(state berthv1.SandboxState, wanted []berthv1.SandboxState) bool {
	if len(wanted) == 0 {
		return state != berthv1.SandboxState_SANDBOX_STATE_DESTROYED && state != berthv1.SandboxState_SANDBOX_STATE_FAILED
	}
	return slices.Contains(wanted, state)
}

// IsTransitional reports whether a sandbox in this state is on its way to another one.
func IsTransitional(state berthv1.SandboxState) bool {
	switch state {
	case berthv1.SandboxState_SANDBOX_STATE_CREATING, berthv1.SandboxState_SANDBOX_STATE_SUSPENDING,
		berthv1.SandboxState_SANDBOX_STATE_RESUMING, berthv1.SandboxState_SANDBOX_STATE_DESTROYING:
		return true
	}
	return false
}

// IsResting reports whether the guest of a sandbox in this state is not expected to answer.
func IsResting(state berthv1.SandboxState) bool {
	switch state {
	case berthv1.SandboxState_SANDBOX_STATE_SUSPENDED, berthv1.SandboxState_SANDBOX_STATE_STOPPED, berthv1.SandboxState_SANDBOX_STATE_LOST:
		return true
	}
	return false
}

// Counts is how much there is.
type Counts struct {
	ByState        map[string]uint32 // sandboxes that are not destroyed or failed, by their state's name
	OpenOperations uint32
}

// Counts counts sandboxes and operations.
func (r *Records) Counts() (Counts, error) {
	counts := Counts{ByState: map[string]uint32{}}
	err := r.store.View(func(tx *store.Tx) error {
		live, err := tx.LiveSandboxes()
		if err != nil {
			return err
		}
		for _, sandbox := range live {
			counts.ByState[request.StateName(sandbox.GetState())]++
		}
		open, err := tx.OpenOperations()
		counts.OpenOperations = uint32(len(open))
		return err
	})
	return counts, err
}

// SealEnv seals the spec's secrets and takes their values out of it.
func (r *Records) SealEnv(sandboxID string, spec *berthv1.SandboxSpec) ([]byte, error) {
	if len(spec.GetSecretEnv()) == 0 {
		return nil, nil
	}
	plain, err := proto.Marshal(&recordv1.SandboxSecrets{Env: spec.GetSecretEnv()})
	if err != nil {
		return nil, fmt.Errorf("encode the sandbox's secrets: %w", err)
	}
	spec.SecretEnv = Redacted(spec.GetSecretEnv())
	return r.vault.Seal(sandboxID, plain)
}

// Redacted returns the keys with empty values.
func Redacted(secrets map[string]string) map[string]string {
	redacted := make(map[string]string, len(secrets))
	for key := range secrets {
		redacted[key] = ""
	}
	return redacted
}

// ClaimSession gives a session key to a sandbox; refused while another one holds it.
func (*Records) ClaimSession(tx *store.Tx, namespace, key, sandboxID string) error {
	if key == "" {
		return nil
	}
	held, err := tx.Session(namespace, key)
	if err != nil {
		return err
	}
	if held != nil {
		return fault.New(fault.SessionKeyInUse, "session key %q is held by sandbox %s: use that one, or destroy it first", key, held.GetSandboxId()).
			With("session_key", key).With("sandbox_id", held.GetSandboxId())
	}
	return tx.PutSession(namespace, key, &recordv1.SessionRecord{SandboxId: sandboxID})
}

// ReleaseSession frees the session key that a sandbox holds.
func (*Records) ReleaseSession(tx *store.Tx, sandbox *recordv1.SandboxRecord) error {
	key := sandbox.GetSpec().GetSessionKey()
	if key == "" {
		return nil
	}
	held, err := tx.Session(sandbox.GetNamespace(), key)
	if err != nil || held.GetSandboxId() != sandbox.GetId() {
		return err
	}
	return tx.DeleteSession(sandbox.GetNamespace(), key)
}
