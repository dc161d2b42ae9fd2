package command

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ulidLength is the length of an id after its prefix, and ulidAlphabet what it is made of.
const (
	ulidLength   = 26
	ulidAlphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
)

// pageSize is asked for where a whole list is read: the most that the API gives.
const pageSize = 1000

// shownCandidates bounds how many ids an error names.
const shownCandidates = 8

// kind is a kind of resource that arguments name by id.
type kind struct {
	name, plural, prefix, list string
}

var (
	sandboxes = kind{name: "sandbox", plural: "sandboxes", prefix: "sb_", list: "berth ls --all"}
	jobs      = kind{name: "job", plural: "jobs", prefix: "job_", list: "berth jobs"}
)

// candidate is a resource that a shortened id may mean.
type candidate struct{ id, description string }

// SandboxID returns the full id for one that may be shortened to a unique suffix.
func SandboxID(ctx context.Context, c *client.Client, given string) (string, error) {
	return sandboxes.resolve(given, func() ([]candidate, error) { return sandboxCandidates(ctx, c) })
}

// JobID is sandboxID for jobs.
func JobID(ctx context.Context, c *client.Client, given string) (string, error) {
	return jobs.resolve(given, func() ([]candidate, error) { return jobCandidates(ctx, c) })
}

func (k kind) resolve(given string, list func() ([]candidate, error)) (string, error) {
	if k.isFull(given) {
		return given, nil
	}
	for _, other := range []kind{sandboxes, jobs} {
		if strings.HasPrefix(given, other.prefix) && other.prefix != k.prefix {
			return "", usage.Errorf("%s is a %s's id, and a %s's is wanted: those begin with %s", given, other.name, k.name, k.prefix)
		}
	}
	if prefix, rest, found := strings.Cut(given, "_"); found && prefix+"_" != k.prefix && len(rest) == ulidLength {
		return "", usage.Errorf("%s is not a %s's id: those begin with %s", given, k.name, k.prefix)
	}
	suffix := strings.ToUpper(strings.TrimPrefix(given, k.prefix))
	if suffix == "" {
		return "", usage.Errorf("the %s's id is empty", k.name)
	}
	all, err := list()
	if err != nil {
		return "", fmt.Errorf("finding the %s whose id ends in %s: %w", k.name, suffix, err)
	}
	matches := slices.DeleteFunc(all, func(one candidate) bool { return !strings.HasSuffix(one.id, suffix) })
	switch len(matches) {
	case 0:
		return "", fmt.Errorf("no %s's id ends in %s (see `%s`)", k.name, suffix, k.list)
	case 1:
		return matches[0].id, nil
	}
	return "", ambiguous(k, suffix, matches)
}

func (k kind) isFull(id string) bool {
	rest, found := strings.CutPrefix(id, k.prefix)
	return found && len(rest) == ulidLength && strings.Trim(rest, ulidAlphabet) == ""
}

func ambiguous(k kind, suffix string, matches []candidate) error {
	var lines strings.Builder
	for i, match := range matches {
		if i == shownCandidates {
			fmt.Fprintf(&lines, "\n  … and %d more", len(matches)-i)
			break
		}
		fmt.Fprintf(&lines, "\n  %s  %s", match.id, match.description)
	}
	return fmt.Errorf("%d ids of %s end in %s, give more of it:%s", len(matches), k.plural, suffix, lines.String())
}

func sandboxCandidates(ctx context.Context, c *client.Client) ([]candidate, error) {
	all, err := ListSandboxes(ctx, c, &berthv1.ListSandboxesRequest{States: AllSandboxStates()})
	found := make([]candidate, 0, len(all))
	for _, sandbox := range all {
		found = append(found, candidate{id: sandbox.GetId(), description: present.DescribeSandbox(sandbox)})
	}
	return found, err
}

func jobCandidates(ctx context.Context, c *client.Client) ([]candidate, error) {
	all, err := ListJobs(ctx, c, &berthv1.ListJobsRequest{})
	found := make([]candidate, 0, len(all))
	for _, job := range all {
		found = append(found, candidate{id: job.GetId(), description: present.DescribeJob(job)})
	}
	return found, err
}

// ListSandboxes reads every page.
func ListSandboxes(ctx context.Context, c *client.Client, request *berthv1.ListSandboxesRequest) ([]*berthv1.Sandbox, error) {
	request.PageSize = pageSize
	var all []*berthv1.Sandbox
	for {
		page, err := c.Sandboxes().ListSandboxes(ctx, request)
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetSandboxes()...)
		if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
			return all, nil
		}
	}
}

// ListJobs reads every page.
func ListJobs(ctx context.Context, c *client.Client, request *berthv1.ListJobsRequest) ([]*berthv1.Job, error) {
	request.PageSize = pageSize
	var all []*berthv1.Job
	for {
		page, err := c.Jobs().ListJobs(ctx, request)
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetJobs()...)
		if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
			return all, nil
		}
	}
}

// OpenJobStates are the states of a job that is not done.
func OpenJobStates() []berthv1.JobState {
	return []berthv1.JobState{berthv1.JobState_JOB_STATE_RESERVED, berthv1.JobState_JOB_STATE_RUNNING, berthv1.JobState_JOB_STATE_UNKNOWN}
}

// CountOpenJobs counts what `jobs --open` lists, by sandbox; of one sandbox, or of all when it is empty.
// A sandbox's own count has only the detached ones.
func CountOpenJobs(ctx context.Context, c *client.Client, sandboxID string) (map[string]int, error) {
	open, err := ListJobs(ctx, c, &berthv1.ListJobsRequest{SandboxId: sandboxID, States: OpenJobStates()})
	counts := map[string]int{}
	for _, job := range open {
		counts[job.GetSandboxId()]++
	}
	return counts, err
}

// AllSandboxStates are all states of a sandbox, in their order.
func AllSandboxStates() []berthv1.SandboxState {
	var all []berthv1.SandboxState
	for number := range berthv1.SandboxState_name {
		if number != int32(berthv1.SandboxState_SANDBOX_STATE_UNSPECIFIED) {
			all = append(all, berthv1.SandboxState(number))
		}
	}
	slices.Sort(all)
	return all
}
