package arrows

import (
	"path"
	"strings"
	"testing"
)

// tree is a small tree's directories.
func tree(pattern string) []string {
	var found []string
	for _, dir := range []string{"daemon/jobs", "daemon/jobs/follow", "daemon/store", "daemon/fault", "providers", "providers/guest", "providers/local", "providers/docker"} {
		if matched, err := path.Match(pattern, dir); err == nil && matched {
			found = append(found, dir)
		}
	}
	return found
}

func TestALintRuleIsMadeForEachPackageThatThereIs(t *testing.T) {
	rules := LintRules(tree)
	for _, want := range []string{
		"        daemon-store:\n", "        providers-local:\n", "        providers-docker:\n",
		// Inner packages with a row of their own have a rule of their own.
		"files: [\"!$test\", \"${config-path}/daemon/jobs/**\", \"!${config-path}/daemon/jobs/*/**\"]",
		"            - " + Module + "/daemon/fault$\n",
		"deny:\n            - {pkg: go.etcd.io/bbolt,",
	} {
		if !strings.Contains(rules, want) {
			t.Errorf("the rules lack %q:\n%s", want, rules)
		}
	}
	if _, local, _ := strings.Cut(rules, "        providers-local:\n"); strings.Contains(local[:strings.Index(local, "deny:")], "providers/docker") {
		t.Error("one provider may import another")
	}
	if strings.Contains(rules, "daemon/pool") {
		t.Error("there is a rule for a package that is not there")
	}
}

func TestThePageHasARowForEachPackageThatThereIs(t *testing.T) {
	page := Page(tree)
	for _, want := range []string{"| `daemon/store` | bbolt", "| `fault` |\n", "| `daemon/fault` | the broker's error kinds and reasons | nothing |\n"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	if strings.Contains(page, "pool") {
		t.Error("the page names a package that is not there")
	}
}

func TestOnlyThePartBetweenTheMarksIsReplaced(t *testing.T) {
	const text = "head\n<!-- " + beginMark + " -->\nold\n<!-- " + endMark + " -->\ntail\n"
	replaced, err := Replace(text, "new\n")
	if want := strings.Replace(text, "old", "new", 1); err != nil || replaced != want {
		t.Errorf("replaced to %q (%v), want %q", replaced, err, want)
	}
	for _, wrong := range []string{"", "# " + beginMark + "\n", "# " + endMark + "\n# " + beginMark + "\n"} {
		if _, err := Replace(wrong, ""); err == nil {
			t.Errorf("%q was taken", wrong)
		}
	}
}
