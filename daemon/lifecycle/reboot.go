package lifecycle

import (
	"context"
	"errors"

	"github.com/berth-sandbox/berth/daemon/store"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// BootChanged writes down that the guest of a running machine was started again without the broker: no
// process of the old boot survived, so the sandbox is in a new generation. It reports whether it
// was so.
func (s *Service) BootChanged(ctx context.Context, machineID string, hello *guestv1.HelloResponse) (bool, error) {
	changed := false
	err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		changed = false
		machine, err := tx.Machine(machineID)
		if err != nil || machine == nil || machine.GetBootId() == "" || machine.GetBootId() == hello.GetBootId() {
			return err
		}
		sandbox, err := tx.Sandbox(machine.GetSandboxId())
		if err != nil || sandbox == nil || sandbox.GetOperationId() != "" {
			return err // an operation in progress records the boot itself
		}
		changed = true
		sandbox.Generation++
		sandbox.State = berthv1.SandboxState_SANDBOX_STATE_RUNNING
		machine.Generation, machine.BootId = sandbox.GetGeneration(), hello.GetBootId()
		return errors.Join(
			tx.PutSandbox(sandbox, "sandbox.rebooted", "the guest was started again"),
			tx.PutMachine(machine, "", ""),
		)
	})
	return changed, err
}
