package docker_test

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

var failpoint = regexp.MustCompile(`// gofail: var (\w+) struct\{\}\n\s*// os.Exit\(137\)\n`)

// crasher builds the creator with each failpoint of this room an exit that CRASH_AT chooses, and
// returns it with the failpoints' names.
func crasher(t *testing.T) (program string, points []string) {
	t.Helper()
	dir := t.TempDir()
	here, err := os.Getwd()
	must(t, err)
	sources, err := filepath.Glob("*.go")
	must(t, err)
	replace := map[string]string{}
	for _, source := range sources {
		content, err := os.ReadFile(source)
		must(t, err)
		if strings.HasSuffix(source, "_test.go") || !failpoint.Match(content) {
			continue
		}
		for _, found := range failpoint.FindAllSubmatch(content, -1) {
			points = append(points, string(found[1]))
		}
		armed := failpoint.ReplaceAll(content, []byte("if os.Getenv(\"CRASH_AT\") == \"$1\" {\n os.Exit(137)\n}\n"))
		if !strings.Contains(string(content), "\n\t\"os\"\n") {
			armed = []byte(strings.Replace(string(armed), "import (\n", "import (\n\t\"os\"\n", 1))
		}
		to := filepath.Join(dir, source)
		must(t, os.WriteFile(to, armed, 0o600))
		replace[filepath.Join(here, source)] = to
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	program = filepath.Join(dir, "crasher")
	if out, err := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, "./testdata/creator").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return program, points
}

func TestACrashAnywhereIsCompletedOrDestroyedByTheNextBroker(t *testing.T) {
	image := imported(t, "ordinary", ordinary)
	engine := onEngine(t)
	program, points := crasher(t)
	if len(points) < 8 {
		t.Fatalf("saw only the failpoints %v", points)
	}
	reached := map[string]bool{}
	for _, point := range points {
		for _, order := range []string{"create", "destroy"} {
			for _, then := range []string{"completed", "destroyed"} {
				if order == "destroy" && then == "completed" {
					continue // what is to be destroyed is never completed
				}
				t.Run(point+" in a "+order+" and "+then, func(t *testing.T) {
					at, p, id := newPlace(t), provider(t), newID()
					spec := at.spec(id, image)
					if order == "destroy" {
						at.create(t, p, spec)
					}
					crashed := crash(t, program, order, point, spec)
					reached[point] = reached[point] || crashed
					if !crashed {
						at.destroy(t, p, id)
						return
					}
					if then == "completed" {
						at.create(t, p, spec)
						if got := at.reach(t, p, id).run(t, "true"); got != (result{}) {
							t.Errorf("true: %+v", got)
						}
					}
					if _, err := p.List(t.Context()); err != nil { // as a broker does at its start
						t.Error(err)
					}
					at.destroy(t, p, id)
					left, err := engine.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: client.Filters{}.Add("label", "dev.berth.broker="+brokerID)})
					must(t, err)
					for _, c := range left.Items {
						t.Errorf("left behind: %v", c.Names)
					}
				})
			}
		}
		if !reached[point] {
			t.Errorf("nothing comes to %s", point)
		}
	}
}

// crash lets a broker of its own do one thing and reports whether it died at the failpoint.
func crash(t *testing.T, program, order, point string, spec providers.MachineSpec) bool {
	t.Helper()
	cmd := exec.Command(program, order, brokerID, guestProgram, spec.MachineID, spec.ListenDir, spec.Image)
	cmd.Env = append(os.Environ(), "CRASH_AT="+point)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 137 {
		return true
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", order, err, out)
	}
	return false
}
