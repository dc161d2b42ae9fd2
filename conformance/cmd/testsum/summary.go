package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// event is one line of `go test -json`; `go doc test2json` describes it.
type event struct {
	Action, Package, Test, Output, FailedBuild string
}

// testName names a test in all packages. An empty test is the package itself.
type testName struct{ pkg, test string }

// summary prints what matters of go test's events as they come and counts them.
type summary struct {
	out                     io.Writer
	passed, failed, skipped int
	output                  map[testName][]string // of tests that have not ended, line by line
	failedIn                map[string]bool       // packages in which a test failed
	skips                   map[string][]testName // by reason
}

func newSummary(out io.Writer) *summary {
	return &summary{
		out:      out,
		output:   map[testName][]string{},
		failedIn: map[string]bool{},
		skips:    map[string][]testName{},
	}
}

// read takes events until there are no more. A line that is no event is printed as it is.
func (s *summary) read(events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				s.take(e)
			} else {
				s.print(line)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) take(e event) {
	name := testName{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		s.print(e.Output)
	case "output":
		s.takeOutput(name, e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.endTest(name, e.Action)
		}
	}
}

// takeOutput prints what a package says and keeps what a test says until it is known whether the test
// fails.
func (s *summary) takeOutput(name testName, line string) {
	switch {
	case name.test != "":
		if !strings.HasPrefix(line, "=== ") {
			s.output[name] = append(s.output[name], line)
		}
	case line == "PASS\n" || line == "FAIL\n":
		// The package's own line says it too.
	default:
		s.print(line)
	}
}

func (s *summary) endTest(name testName, action string) {
	output := s.output[name]
	delete(s.output, name)
	switch action {
	case "pass":
		s.passed++
	case "skip":
		s.skipped++
		reason := skipReason(output)
		s.skips[reason] = append(s.skips[reason], name)
	case "fail":
		s.failed++
		s.failedIn[name.pkg] = true
		s.print(output...)
	}
}

// endPackage counts a package that failed without a failed test, such as one that does not compile or
// died, as one failure, and prints what its unfinished tests had said.
func (s *summary) endPackage(e event) {
	for name, output := range s.output {
		if name.pkg == e.Package {
			if e.Action == "fail" {
				s.print(output...)
			}
			delete(s.output, name)
		}
	}
	if e.Action == "fail" && !s.failedIn[e.Package] {
		s.failed++
	}
}

// logPlace is what precedes the words of t.Skip: the place of the call.
var logPlace = regexp.MustCompile(`^\s*[^\s:]+\.go:\d+: `)

// skipReason returns the last thing a skipped test logged, on one line.
func skipReason(output []string) string {
	var reason []string
	for _, line := range output {
		switch place := logPlace.FindString(line); {
		case place != "":
			reason = []string{strings.TrimSpace(line[len(place):])}
		case len(reason) > 0 && !strings.HasPrefix(strings.TrimSpace(line), "---"):
			reason = append(reason, strings.TrimSpace(line))
		}
	}
	if len(reason) == 0 {
		return "no reason given"
	}
	return strings.Join(reason, " ")
}

// close prints what was skipped and the counts.
func (s *summary) close() {
	if s.skipped > 0 {
		s.print("\nSkipped, and why:\n")
	}
	for _, reason := range slices.Sorted(maps.Keys(s.skips)) {
		s.print("  " + reason + "\n")
		for _, name := range s.skips[reason] {
			s.print("    " + name.pkg + " " + name.test + "\n")
		}
	}
	s.print(fmt.Sprintf("\n%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped))
}

func (s *summary) print(lines ...string) {
	for _, line := range lines {
		_, _ = io.WriteString(s.out, line) // nowhere is left to say that stdout is gone
	}
}
