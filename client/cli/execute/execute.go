// Package execute holds the commands that begin work or stay attached to it: run, exec, attach and
// start. What a command does in its machine is the broker's business; this only carries its streams,
// signals and exit code.
package execute

import (
	"github.com/spf13/pflag"

	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// jobFlags say what to run and how.
type jobFlags struct {
	script, cwd, user    string
	env, secrets, labels []string
	timeout, killGrace   usage.Duration
	outputLimit          usage.Size
	mergeStderr          bool
}

func (f *jobFlags) bind(flags *pflag.FlagSet) {
	f.bindHow(flags)
	flags.StringArrayVarP(&f.env, "env", "e", nil, "K=V, or K to pass on this environment's value")
	flags.StringArrayVar(&f.secrets, "secret", nil, "like --env, but never shown again; K alone keeps the value out of this command line")
	flags.StringArrayVar(&f.labels, "label", nil, "k=v, for finding it")
}

// bindHow binds what says nothing of a sandbox's too.
func (f *jobFlags) bindHow(flags *pflag.FlagSet) {
	flags.StringVarP(&f.script, "shell", "c", "", "run this script with bash, or sh where there is no bash")
	flags.StringVarP(&f.cwd, "cwd", "w", "", "working directory (default the workspace)")
	flags.StringVarP(&f.user, "user", "u", "", "user name or uid, optionally with :group")
	f.killGrace.Max = usage.MaxGrace
	flags.Var(&f.timeout, "timeout", "kill the command after this long; it then counts as exit code 124")
	flags.Var(&f.killGrace, "kill-grace", "between TERM and KILL (default 5s)")
	flags.Var(&f.outputLimit, "output-limit", "kept of each stream, as 1GiB (default 64MiB)")
	flags.BoolVar(&f.mergeStderr, "merge-stderr", false, "send stderr into stdout, in the order written")
}

// spec makes the job of the flags and the arguments after the sandbox's id.
func (f *jobFlags) spec(p *command.Program, argv []string) (*berthv1.JobSpec, error) {
	env, err := p.Environment("env", f.env)
	if err != nil {
		return nil, err
	}
	secrets, err := p.Environment("secret", f.secrets)
	if err != nil {
		return nil, err
	}
	labels, err := usage.KeyValues("label", f.labels)
	if err != nil {
		return nil, err
	}
	return &berthv1.JobSpec{
		Argv:             argv,
		Shell:            f.script,
		Cwd:              f.cwd,
		Env:              env,
		SecretEnv:        secrets,
		User:             f.user,
		MergeStderr:      f.mergeStderr,
		Timeout:          f.timeout.Proto(),
		KillGrace:        f.killGrace.Proto(),
		OutputLimitBytes: uint64(f.outputLimit),
		Labels:           labels,
	}, nil
}
