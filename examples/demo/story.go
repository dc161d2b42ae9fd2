package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// The job: the repository's own tests, whose output also goes to a file, so that there is a truth to
// compare with that never went through the broker.
const testScript = `set -o pipefail
go test -count=1 -v ./... 2>&1 | tee tests.log`

// wantExit is the tests' true exit code: one test of the repository fails, and go test says 1.
const wantExit = 1

// tell runs the story from its beginning to its end.
func tell(ctx context.Context) (err error) {
	s, err := newStage(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close(context.WithoutCancel(ctx))) }()
	if err := s.open(ctx); err != nil {
		return err
	}
	sandbox, err := s.create(ctx)
	if err != nil {
		return err
	}
	job, err := s.killInMidRun(ctx, sandbox)
	if err != nil {
		return err
	}
	if err := s.prove(ctx, sandbox, job); err != nil {
		return err
	}
	return s.leaveNothing(ctx, sandbox)
}

// open makes the repository and starts the broker.
func (s *stage) open(ctx context.Context) error {
	s.step("A small repository, with tests that take a while")
	if err := s.makeRepository(ctx); err != nil {
		return err
	}
	s.step("The broker")
	return s.startBroker(ctx)
}

func (s *stage) create(ctx context.Context) (string, error) {
	s.step("A sandbox from that repository")
	id, err := s.berth(ctx, append([]string{"create", "-o", "id", "--repo", s.repo}, s.goEnvironment()...)...)
	if err != nil {
		return "", err
	}
	if _, err := s.berth(ctx, "ls"); err != nil {
		return "", err
	}
	if _, err := s.berth(ctx, "exec", id, "-c", "git log --oneline && ls"); err != nil {
		return "", err
	}
	return id, nil
}

// killInMidRun starts the tests and kills the broker while they run.
func (s *stage) killInMidRun(ctx context.Context, sandbox string) (job string, err error) {
	s.step("Its tests, as a detached job")
	s.say("(one of them fails, and is right to: the true exit code is 1)")
	if job, err = s.berth(ctx, "start", "-o", "id", sandbox, "-c", testScript); err != nil {
		return "", err
	}
	if err := s.untilOutput(ctx, job); err != nil {
		return "", err
	}
	s.step("kill -9 the broker, while they run")
	if err := s.killBroker(); err != nil {
		return "", err
	}
	before := s.logSize(sandbox)
	s.say("the broker is dead; the tests are not:")
	if err := s.pause(ctx, deadFor); err != nil {
		return "", err
	}
	after := s.logSize(sandbox)
	s.say(fmt.Sprintf("their log grew from %d to %d bytes meanwhile", before, after))
	if after <= before {
		return "", fmt.Errorf("the tests made no progress while the broker was dead (%d, then %d bytes)", before, after)
	}
	return job, nil
}

// prove starts the broker again and compares what it says with what is true.
func (s *stage) prove(ctx context.Context, sandbox, job string) error {
	s.step("The broker again, on the same ledger")
	if err := s.startBroker(ctx); err != nil {
		return err
	}
	if _, err := s.berthExits(ctx, wantExit, "wait", job); err != nil {
		return err
	}
	s.step("The truth, and what the broker says")
	told, err := s.outcome(ctx, job)
	if err != nil {
		return err
	}
	read, err := s.quietly(ctx, "logs", job)
	if err != nil {
		return err
	}
	truth, err := s.quietly(ctx, "exec", sandbox, "-c", "sha256sum < tests.log | cut -d' ' -f1")
	if err != nil {
		return err
	}
	sum := sha256.Sum256(read)
	want, have := strings.TrimSpace(string(truth)), hex.EncodeToString(sum[:])
	s.say("last line      " + lastLine(read))
	s.say(fmt.Sprintf("exit code      %d, and the tests' own is %d", told, wantExit))
	s.say(fmt.Sprintf("output         %d bytes", len(read)))
	s.say("sha256 read    " + have)
	s.say("sha256 true    " + want)
	switch {
	case told != wantExit:
		return fmt.Errorf("the broker says exit code %d, and it was %d", told, wantExit)
	case want != have:
		return errors.New("the output that was read is not the output that was written")
	case !bytes.Contains(read, []byte("--- FAIL: TestMeanOfNothing")):
		return errors.New("the output is not that of the repository's tests")
	}
	return nil
}

// outcome returns the exit code that the broker gives, from its JSON.
func (s *stage) outcome(ctx context.Context, job string) (int, error) {
	answer, err := s.quietly(ctx, "poll", "-o", "json", job)
	if err != nil {
		return 0, err
	}
	var shown struct {
		Job *struct {
			Outcome *struct {
				ExitCode *int `json:"exit_code"`
			} `json:"outcome"`
		} `json:"job"`
		Outcome *struct {
			ExitCode *int `json:"exit_code"`
		} `json:"outcome"`
	}
	if err := json.Unmarshal(answer, &shown); err != nil {
		return 0, fmt.Errorf("read the answer of berth poll: %w", err)
	}
	switch {
	case shown.Job != nil && shown.Job.Outcome != nil && shown.Job.Outcome.ExitCode != nil:
		return *shown.Job.Outcome.ExitCode, nil
	case shown.Outcome != nil && shown.Outcome.ExitCode != nil:
		return *shown.Outcome.ExitCode, nil
	}
	return 0, fmt.Errorf("the broker gives no exit code: %s", answer)
}

// leaveNothing destroys the sandbox and looks for what is left.
func (s *stage) leaveNothing(ctx context.Context, sandbox string) error {
	s.step("Away with it")
	if _, err := s.berth(ctx, "rm", sandbox); err != nil {
		return err
	}
	if err := s.stopBroker(); err != nil {
		return err
	}
	left := s.leftovers()
	if len(left) > 0 {
		return fmt.Errorf("something was left behind:\n  %s", strings.Join(left, "\n  "))
	}
	s.say("no process, no socket, no machine directory is left")
	s.finish()
	return nil
}

// untilOutput waits until the job has printed something.
func (s *stage) untilOutput(ctx context.Context, job string) error {
	for deadline := time.Now().Add(waitTimeout); time.Now().Before(deadline); {
		read, err := s.quietly(ctx, "logs", job)
		if err != nil {
			return err
		}
		if bytes.Contains(read, []byte("=== RUN")) {
			s.say("first line     " + firstLine(read))
			return nil
		}
		if err := s.pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return errors.New("the tests printed nothing for a long time")
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return lines[len(lines)-1]
}

// logSize is the length of the tests' own log, read from the host's file system: on this provider a
// machine's workspace is a directory here.
func (s *stage) logSize(sandbox string) int64 {
	info, err := os.Stat(s.workspace(sandbox) + "/tests.log")
	if err != nil {
		return 0
	}
	return info.Size()
}
