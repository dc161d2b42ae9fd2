package guest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// disturbed puts things that are not expected into a path's place.
var disturbed = map[string]func(path string) error{
	"a file":          func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) },
	"a pipe":          func(path string) error { return unix.Mkfifo(path, 0o600) },
	"a directory":     func(path string) error { return os.MkdirAll(filepath.Join(path, "below"), 0o700) },
	"a dangling link": func(path string) error { return os.Symlink("/no/such/file", path) },
	"a looping link":  func(path string) error { return os.Symlink(path, path) },
	"an endless file": func(path string) error { return os.Symlink("/dev/zero", path) },
}

func TestAWrongWorkspaceIsReportedByCommandsAndOthersRun(t *testing.T) {
	t.Parallel()
	for name, put := range disturbed {
		t.Run(name, func(t *testing.T) {
			m := boot(t)
			m.end()
			must(t, os.RemoveAll(m.config.GetWorkspace()))
			must(t, put(m.config.GetWorkspace()))
			m.start()
			o, problem := m.run(argv("true")).GetStatus().GetOutcome(), m.hello.GetWorkspaceError()
			if usable := name == "a directory"; usable != (problem == "") || len(problem) > 100 || strings.Contains(problem, m.config.GetWorkspace()) {
				t.Errorf("the broker is told %q", problem)
			}
			if name == "a directory" {
				if o.GetCause() != berthv1.Cause_CAUSE_EXITED {
					t.Errorf("in a directory that is not empty: %v", o)
				}
			} else if o.GetCause() != berthv1.Cause_CAUSE_FAILED_TO_START || !strings.HasPrefix(o.GetReason(), "cwd_missing: ") {
				t.Errorf("in the workspace: %v", o)
			}
			repair := shell("rm -rf " + m.config.GetWorkspace() + " && mkdir " + m.config.GetWorkspace())
			repair.Command.Cwd = "/"
			if o := m.run(repair).GetStatus().GetOutcome(); o.GetExitCode() != 0 || o.GetCause() != berthv1.Cause_CAUSE_EXITED {
				t.Errorf("in another directory: %v", o)
			}
			if o := m.run(argv("true")).GetStatus().GetOutcome(); o.GetCause() != berthv1.Cause_CAUSE_EXITED {
				t.Errorf("in the repaired workspace: %v", o)
			}
		})
	}
}

func TestAGuestStartsWhateverAJobPutIntoItsSpool(t *testing.T) {
	t.Parallel()
	const jobID = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	for name, put := range disturbed {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := boot(t)
			for _, place := range []string{"lock", "machine", "machine.new", "forgotten", "forgotten.new", "boot.1", "jobs", "output", "jobs/" + jobID,
				"jobs/" + jobID + "/job", "jobs/" + jobID + "/status", "jobs/" + jobID + "/stdout.head", "output/" + jobID} {
				m.end()
				path := filepath.Join(m.config.GetSpoolDir(), place)
				must(t, os.RemoveAll(path))
				must(t, os.MkdirAll(filepath.Dir(path), 0o700))
				must(t, put(path))
				m.start()
				for _, durable := range []bool{false, true} {
					r := shell("head -c 100000 /dev/zero; exit 3")
					r.Durable = durable
					if o := m.run(r).GetStatus().GetOutcome(); o.GetExitCode() != 3 || o.GetCause() != berthv1.Cause_CAUSE_EXITED {
						t.Errorf("with %s as %s, a job: %v", name, place, o)
					}
				}
				must(t, os.RemoveAll(filepath.Join(m.config.GetSpoolDir(), "jobs", jobID)))
			}
		})
	}
}
