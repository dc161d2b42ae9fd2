package robust

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// nothingLeft wants the broker, the provider and the host to be as before.
func (s *suite) nothingLeft(ctx context.Context) {
	s.until(ctx, "the broker", orphanTimeout, func() (bool, string) {
		info, err := s.patient.Admin().GetInfo(ctx, &berthv1.GetInfoRequest{})
		quiet := err == nil && info.GetOpenOperations() == 0 && info.GetOpenJobs() == 0 && len(info.GetSandboxes()) == 0 &&
			info.GetRecoveringMachines() == 0 && info.GetOrphanMachines() == 0
		return quiet, fmt.Sprint(info, err)
	})
	s.until(ctx, "what machines had", restTimeout, func() (bool, string) {
		left := append(s.broker.Leftovers(), s.strays()...)
		return len(left) == 0, strings.Join(left, "; ")
	})
}

// strays lists processes that bear the mark of one of our machines, and mounts and cgroups of them.
func (s *suite) strays() []string {
	s.mu.Lock()
	machines := make([]string, 0, len(s.machines))
	for _, machine := range s.machines {
		machines = append(machines, machine)
	}
	s.mu.Unlock()
	names := func(text []byte) bool {
		return slices.ContainsFunc(machines, func(machine string) bool { return bytes.Contains(text, []byte(machine)) })
	}
	var strays []string
	processes, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range processes {
		if environment, err := os.ReadFile(path); err == nil && names(environment) {
			strays = append(strays, "process "+filepath.Base(filepath.Dir(path)))
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mounts")
	for line := range bytes.Lines(mounts) {
		if names(line) || bytes.Contains(line, []byte(s.broker.Dir)) {
			strays = append(strays, "mount "+strings.TrimSpace(string(line)))
		}
	}
	return strays
}

// footprint is what a broker at rest holds.
type footprint struct {
	descriptors int
	bytes       int64 // resident, without what is mapped from files
}

func (f *footprint) String() string {
	return fmt.Sprintf("%d descriptors and %.1f MiB", f.descriptors, float64(f.bytes)/(1<<20))
}

// beyond says by what a broker has grown too much.
func (f *footprint) beyond(first *footprint) string {
	switch {
	case first == nil:
		return ""
	case f.descriptors > first.descriptors+fdSlack, f.bytes > first.bytes+rssSlack:
		return fmt.Sprintf("from %v to %v", first, f)
	}
	return ""
}

func (s *suite) footprint() *footprint {
	pid := strconv.Itoa(s.broker.Pid())
	descriptors, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		s.t.Fatal(err)
	}
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		s.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "RssAnon:")
	kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		s.t.Fatalf("read the broker's memory: %v", err)
	}
	return &footprint{len(descriptors), kib << 10}
}
