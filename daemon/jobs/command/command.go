// Package command makes what a guest is to run of a job's spec and its sandbox: the environment with its
// secrets, and every default filled in. It is where secrets of jobs are sealed and unsealed, and it keeps
// none of them.
package command

import (
	"fmt"
	"maps"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/jobs/record"
	"github.com/berth-sandbox/berth/daemon/request"
	"github.com/berth-sandbox/berth/daemon/sandbox"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Builder makes commands.
type Builder struct {
	Vault *vault.Vault
}

// Target returns the sandbox of a call and the machine in which its command would run.
func Target(tx *store.Tx, call request.Call, sandboxID string) (*recordv1.SandboxRecord, *recordv1.MachineRecord, error) {
	sandbox, err := call.Sandbox(tx, sandboxID)
	if err != nil {
		return nil, nil, err
	}
	if err := request.WantRunning(sandbox); err != nil {
		return nil, nil, err
	}
	machine, err := tx.Machine(sandbox.GetMachineId())
	if err == nil && machine == nil {
		err = fault.New(fault.Internal, "sandbox %s is RUNNING, and its machine %s has no record", sandboxID, sandbox.GetMachineId())
	}
	return sandbox, machine, err
}

// Build returns the command of a spec.
func (b Builder) Build(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec) (*guestv1.Command, error) {
	return b.build(sandbox, spec, secretsOf(spec))
}

// Sealed returns the command of a spec, and its secrets sealed for the job; nil where it has none.
func (b Builder) Sealed(sandbox *recordv1.SandboxRecord, jobID string, spec *berthv1.JobSpec) (command *guestv1.Command, sealed []byte, err error) {
	secrets := secretsOf(spec)
	if command, err = b.build(sandbox, spec, secrets); err != nil || len(secrets.GetEnv()) == 0 && len(secrets.GetStdin()) == 0 {
		return command, nil, err
	}
	plain, err := proto.Marshal(secrets)
	if err != nil {
		return nil, nil, fmt.Errorf("encode the job's secrets: %w", err)
	}
	sealed, err = b.Vault.Seal(jobID, plain)
	return command, sealed, err
}

// Unsealed returns the command of a job that was written down.
func (b Builder) Unsealed(sandbox *recordv1.SandboxRecord, job *recordv1.JobRecord) (*guestv1.Command, error) {
	secrets := &recordv1.JobSecrets{}
	if err := b.unseal(job.GetId(), job.GetSealedSecrets(), secrets); err != nil {
		return nil, fmt.Errorf("open the secrets of %s: %w", job.GetId(), err)
	}
	return b.build(sandbox, job.GetSpec(), secrets)
}

func secretsOf(spec *berthv1.JobSpec) *recordv1.JobSecrets {
	return &recordv1.JobSecrets{Env: spec.GetSecretEnv(), Stdin: spec.GetStdin().GetData()}
}

// Redacted is a copy of a spec without the values of its secrets, as a record holds it.
func Redacted(spec *berthv1.JobSpec) *berthv1.JobSpec {
	redacted := proto.CloneOf(spec)
	if len(spec.GetSecretEnv()) > 0 {
		redacted.SecretEnv = sandbox.Redacted(spec.GetSecretEnv())
	}
	if len(spec.GetStdin().GetData()) > 0 {
		redacted.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{}}
	}
	return redacted
}

// build joins the sandbox's environment and then the job's, secrets included, and fills in the defaults.
func (b Builder) build(sandbox *recordv1.SandboxRecord, spec *berthv1.JobSpec, secrets *recordv1.JobSecrets) (*guestv1.Command, error) {
	env, err := b.Environment(sandbox)
	if err != nil {
		return nil, err
	}
	maps.Copy(env, spec.GetEnv())
	maps.Copy(env, secrets.GetEnv())
	command := &guestv1.Command{
		Argv: spec.GetArgv(), Shell: spec.GetShell(), Cwd: spec.GetCwd(), Env: env, User: spec.GetUser(),
		Tty: spec.GetTty(), MergeStderr: spec.GetMergeStderr(), Timeout: spec.GetTimeout(),
		KillGrace: spec.GetKillGrace(), OutputLimitBytes: spec.GetOutputLimitBytes(),
	}
	if command.GetKillGrace() == nil {
		command.KillGrace = durationpb.New(record.DefaultKillGrace)
	}
	if command.GetOutputLimitBytes() == 0 {
		command.OutputLimitBytes = record.DefaultOutputLimit
	}
	switch {
	case spec.GetStdin().GetOpen():
		command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Open{Open: true}}
	case len(secrets.GetStdin()) > 0:
		command.Stdin = &berthv1.Stdin{Source: &berthv1.Stdin_Data{Data: secrets.GetStdin()}}
	}
	return command, nil
}

// Environment returns a sandbox's environment, its secrets included.
func (b Builder) Environment(sandbox *recordv1.SandboxRecord) (map[string]string, error) {
	env := maps.Clone(sandbox.GetSpec().GetEnv())
	if env == nil {
		env = map[string]string{}
	}
	secrets := &recordv1.SandboxSecrets{}
	if err := b.unseal(sandbox.GetId(), sandbox.GetSealedEnv(), secrets); err != nil {
		return nil, fmt.Errorf("open the secrets of sandbox %s: %w", sandbox.GetId(), err)
	}
	maps.Copy(env, secrets.GetEnv())
	return env, nil
}

func (b Builder) unseal(id string, sealed []byte, into proto.Message) error {
	if len(sealed) == 0 {
		return nil
	}
	plain, err := b.Vault.Unseal(id, sealed)
	if err != nil {
		return err
	}
	return proto.Unmarshal(plain, into)
}
