// Package workspace sets up the directory that an agent works in: it clones a repository inside the
// machine, by the machine's own git. It never touches the host's files, and never sends a
// credential.
package workspace

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/request"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	recordv1 "github.com/berth-sandbox/berth/proto/berth/record/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	cloneTimeout = time.Hour       // the largest repositories over a slow line
	killGrace    = 5 * time.Second // git removes a half-made clone on TERM
	trustTimeout = time.Minute     // one line into a file
	wordsBytes   = 2 << 10         // of git's own words in an error
	outputBytes  = 64 << 10        // git's output kept in the machine
	// disconnectGrace is how long a clone goes on while the broker is away.
	disconnectGrace = 5 * time.Minute
)

// Exit codes of the script beside git's own.
const (
	exitNoGit    = 64
	exitNotEmpty = 65
	exitNoRef    = 66
	exitOwner    = 67
)

// script clones into the working directory, by git clone, whose semantics it has: into a directory of its
// own, from which what was cloned is taken. It can be run again after a crash: what a first run left is
// removed as long as that directory is there, and kept if it is marked as done. No object is shared with a
// repository on the same host. The arguments arrive by position, so that no word of a caller is ever read
// as shell.
const script = `set -eu
url=$1 ref=$2 depth=$3 name=$4 email=$5
command -v git >/dev/null 2>&1 || exit 64
mark=.git/berth-clone half=.berth-cloning
if [ -e "$mark" ] && [ ! -e "$half" ] && [ "$(cat "$mark")" = "$url $ref" ]; then exit 0; fi
if [ -e "$half" ]; then
  find . -mindepth 1 -maxdepth 1 ! -name "$half" -exec rm -rf {} +
  rm -rf "$half"
fi
if [ -n "$(find . -mindepth 1 -maxdepth 1 | head -n 1)" ]; then exit 65; fi
mkdir "$half"
export GIT_TERMINAL_PROMPT=0 GIT_ASKPASS=true GIT_CEILING_DIRECTORIES="${PWD%/*}"
# One question to the remote first: if it cannot be reached, git says so once.
if ! said=$(git ls-remote "$url" HEAD 2>&1); then
  printf '%s\n' "$said"
  case $said in *"dubious ownership"*) exit 67 ;; esac
  exit 128
fi
has() { git ls-remote --exit-code "$url" "$1" >/dev/null 2>&1; }
deep=
[ "$depth" = 0 ] || deep="--depth=$depth"
branch=${ref#refs/heads/} tag=${ref#refs/tags/} at=
set -- $deep
if [ -z "$ref" ]; then :
elif has "refs/heads/$branch"; then set -- "$@" --branch="$branch"
elif has "refs/tags/$tag"; then
  at=refs/tags/$tag
  has "refs/heads/$tag" || set -- "$@" --branch="$tag"
else at=$ref
fi
git clone -q --no-checkout --no-local "$@" -- "$url" "$half/clone"
mv "$half/clone/.git" .git
[ -z "$name" ] || git config user.name "$name"
[ -z "$email" ] || git config user.email "$email"
commit() { git rev-parse -q --verify "$1^{commit}"; }
if [ -z "$at" ]; then
  if git rev-parse -q --verify HEAD >/dev/null; then git reset -q --hard; fi # else it is empty
else
  if ! found=$(commit "$at"); then
    git fetch -q --update-shallow $deep origin "$at" 2>/dev/null || {
      [ -z "$deep" ] || git fetch -q --unshallow --tags origin '+refs/heads/*:refs/remotes/origin/*'
      commit "$at" >/dev/null || exit 66
    }
    found=$(commit "$at" || commit FETCH_HEAD)
  fi
  git checkout -q --detach "$found"
fi
printf '%s' "$url $ref" > "$mark"
rm -rf "$half"
`

// trustScript has every user of a machine's git work in its workspace, whoever owns that. Where git's
// configuration cannot be written it changes nothing, and git says itself what it does not trust.
const trustScript = `path=$(pwd -P)
git config --system --get-all safe.directory 2>/dev/null | grep -qxF -- "$path" || git config --system --add safe.directory "$path"
`

// Preparer sets up workspaces.
type Preparer struct {
	Links *guestlink.Links
	// Environment returns a sandbox's environment, its secrets included: a proxy set there is git's.
	Environment func(*recordv1.SandboxRecord) (map[string]string, error)
}

// Prepare clones the sandbox's repository, if it asks for one. It may be run again after a crash at
// any instruction. Errors: TOOL_MISSING, WORKSPACE_FAILED with git's own words, and what the link to
// the guest gives.
func (p Preparer) Prepare(ctx context.Context, sandbox *recordv1.SandboxRecord) error {
	repo := sandbox.GetSpec().GetWorkspace().GetRepo()
	if repo == nil {
		return nil
	}
	env, err := p.Environment(sandbox)
	if err != nil {
		return err
	}
	for attempt := 1; ; attempt++ {
		response, err := p.run(ctx, sandbox.GetMachineId(), cloneRequest(sandbox, env, attempt))
		if err != nil {
			return fmt.Errorf("clone %s: %w", repo.GetUrl(), err)
		}
		if !interrupted(response) || attempt == request.SetupAttempts {
			if err := verdict(repo, response); err != nil {
				return err
			}
			return p.trust(ctx, sandbox, env)
		}
	}
}

// trust lets git work in the clone for root and for the users that jobs run as, where the machine's
// configuration of git is its own. How it ends does not matter: the clone is there.
func (p Preparer) trust(ctx context.Context, sandbox *recordv1.SandboxRecord, env map[string]string) error {
	switch sandbox.GetIsolation() {
	case berthv1.Isolation_ISOLATION_CONTAINER, berthv1.Isolation_ISOLATION_USER_KERNEL, berthv1.Isolation_ISOLATION_MICROVM:
	default:
		return nil // it is the host's
	}
	_, err := p.run(ctx, sandbox.GetMachineId(), &guestv1.RunRequest{Start: &guestv1.StartRequest{
		JobId: request.SetupJobID(sandbox.GetId(), 0),
		Command: &guestv1.Command{
			Argv: []string{"/bin/sh", "-c", trustScript}, User: "0", Env: env, MergeStderr: true, OutputLimitBytes: outputBytes,
			Timeout: durationpb.New(trustTimeout), KillGrace: durationpb.New(killGrace),
		},
		KillOnDisconnect: true, DisconnectGrace: durationpb.New(disconnectGrace),
	}})
	if err != nil {
		return fmt.Errorf("have git trust the clone: %w", err)
	}
	return nil
}

func (p Preparer) run(ctx context.Context, machineID string, request *guestv1.RunRequest) (*guestv1.RunResponse, error) {
	var response *guestv1.RunResponse
	err := p.Links.Call(ctx, machineID, func(ctx context.Context, guest guestv1.GuestServiceClient) (err error) {
		response, err = guest.Run(ctx, request)
		return err
	})
	if status := response.GetStatus(); err == nil && (status.GetJobId() != request.GetStart().GetJobId() || !status.GetDone()) {
		return nil, fault.New(fault.Internal, "the guest of machine %s was to say how %s ended, and did not", machineID, request.GetStart().GetJobId())
	}
	return response, err
}

// cloneRequest is one attempt. Its job's name is the same after a crash of the broker, so that a
// clone which still runs, or has run, is joined, and two never write into one directory.
func cloneRequest(sandbox *recordv1.SandboxRecord, env map[string]string, attempt int) *guestv1.RunRequest {
	repo, identity := sandbox.GetSpec().GetWorkspace().GetRepo(), sandbox.GetSpec().GetWorkspace().GetGitIdentity()
	return &guestv1.RunRequest{
		Start: &guestv1.StartRequest{
			JobId: request.SetupJobID(sandbox.GetId(), attempt),
			Command: &guestv1.Command{
				Argv: []string{"/bin/sh", "-c", script, "berth-clone", repo.GetUrl(), repo.GetRef(),
					strconv.FormatUint(uint64(repo.GetDepth()), 10), identity.GetName(), identity.GetEmail()},
				Env: env, MergeStderr: true, OutputLimitBytes: outputBytes,
				Timeout: durationpb.New(cloneTimeout), KillGrace: durationpb.New(killGrace),
			},
			KillOnDisconnect: true, DisconnectGrace: durationpb.New(disconnectGrace),
		},
		MaxOutputBytes: 2 * wordsBytes,
	}
}

// interrupted reports whether a clone ended in a way that says nothing about the repository.
func interrupted(response *guestv1.RunResponse) bool {
	switch response.GetStatus().GetOutcome().GetCause() {
	case berthv1.Cause_CAUSE_EXITED, berthv1.Cause_CAUSE_TIMED_OUT, berthv1.Cause_CAUSE_FAILED_TO_START:
		return false
	default:
		return true
	}
}

func verdict(repo *berthv1.Repo, response *guestv1.RunResponse) error {
	outcome := response.GetStatus().GetOutcome()
	words := oneLine(response.GetStdout())
	switch {
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED && outcome.GetExitCode() == 0:
		return nil
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED && outcome.GetExitCode() == exitNoGit:
		return fault.New(fault.ToolMissing, "spec.workspace.repo: the machine has no git: use an image that has it").With("tool", "git")
	case outcome.GetCause() == berthv1.Cause_CAUSE_FAILED_TO_START:
		return fault.New(fault.ToolMissing, "spec.workspace.repo: the machine has no /bin/sh to run git with: %s", outcome.GetReason()).With("tool", "sh")
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED && outcome.GetExitCode() == exitNotEmpty:
		return fault.New(fault.WorkspaceFailed, "clone %s: the workspace is not empty", repo.GetUrl())
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED && outcome.GetExitCode() == exitNoRef:
		return fault.New(fault.WorkspaceFailed, "spec.workspace.repo.ref: %s has no branch, tag or commit %q", repo.GetUrl(), repo.GetRef())
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED && outcome.GetExitCode() == exitOwner:
		return fault.New(fault.WorkspaceFailed,
			"clone %s: it belongs to another user than the machine's git runs as, which does not trust it: say `git config --system --add safe.directory %s` "+
				"where that git is (in the image; with the provider local on this host), or give the repository to that user", repo.GetUrl(), distrusted(repo, words))
	case outcome.GetCause() == berthv1.Cause_CAUSE_EXITED, outcome.GetCause() == berthv1.Cause_CAUSE_TIMED_OUT:
		return fault.New(fault.WorkspaceFailed, "clone %s%s: git failed (%s, exit %d): %s: check the URL and the ref, and that the machine can reach it",
			repo.GetUrl(), atRef(repo), strings.ToLower(outcome.GetCause().String()[len("CAUSE_"):]), outcome.GetExitCode(), words)
	default: // killed or lost: it says nothing about the repository
		return fmt.Errorf("clone %s: the clone was interrupted: %s %s", repo.GetUrl(), outcome.GetCause(), outcome.GetReason())
	}
}

// distrusted is the directory that git names, which may be one within the repository.
func distrusted(repo *berthv1.Repo, words string) string {
	_, after, found := strings.Cut(words, "--add safe.directory ")
	if directory := strings.Fields(after); found && len(directory) > 0 {
		return directory[0]
	}
	return strings.TrimPrefix(repo.GetUrl(), "file://")
}

// oneLine is what git said, as one line.
func oneLine(output *guestv1.Output) string {
	text := strings.ToValidUTF8(string(output.GetHead())+string(output.GetTail()), "\uFFFD")
	return strings.TrimRight(strings.Join(strings.Fields(text), " "), ". ")
}

func atRef(repo *berthv1.Repo) string {
	if repo.GetRef() == "" {
		return ""
	}
	return " at " + repo.GetRef()
}
