package store

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// crashCallers is how many callers commit at once in the child.
const crashCallers = 16

// commitForEver commits from many callers and prints each id once it is acknowledged.
func commitForEver(path string) {
	s, err := Open(path, Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var out sync.Mutex
	var callers sync.WaitGroup
	for c := range crashCallers {
		callers.Go(func() {
			for i := 0; ; i++ {
				id := fmt.Sprintf("sb_%d_%d_%d", os.Getpid(), c, i)
				if err := s.Update(context.Background(), put(id)); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
				out.Lock()
				fmt.Println(id)
				out.Unlock()
			}
		})
	}
	callers.Wait()
}

func TestWhatWasAcknowledgedSurvivesKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	acknowledged := map[string]bool{}
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		for _, id := range commitUntilKilled(t, path, 20+rand.N(80)) {
			acknowledged[id] = true
		}
		s := openTest(t, path)
		held := map[string]bool{}
		for _, id := range ids(t, s) {
			held[id] = true
		}
		for id := range acknowledged {
			if !held[id] {
				t.Fatalf("%s was acknowledged and is gone", id)
			}
		}
		if unacknowledged := len(held) - len(acknowledged); unacknowledged > crashCallers*rounds {
			t.Errorf("%d are held that nobody was told of", unacknowledged)
		}
		if uint64(len(held)) != s.Revision() {
			t.Errorf("%d sandboxes at revision %d", len(held), s.Revision())
		}
		if findings, err := check(t, s); len(findings) > 0 || err != nil {
			t.Fatalf("check: %v, %v", findings, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d acknowledged in %d rounds", len(acknowledged), rounds)
}

// commitUntilKilled kills a child some milliseconds after its first acknowledgement and returns what
// it acknowledged.
func commitUntilKilled(t *testing.T, path string, milliseconds int) []string {
	t.Helper()
	child := exec.Command(os.Args[0]) // #nosec G204 -- this test program
	child.Env = append(os.Environ(), childVariable+"=commit:"+path)
	var stderr strings.Builder
	child.Stderr = &stderr
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	var told []string
	lines := bufio.NewReader(stdout)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			break // a line without its end was not told whole
		}
		if len(told) == 0 {
			kill := time.AfterFunc(time.Duration(milliseconds)*time.Millisecond, func() { _ = child.Process.Kill() })
			defer kill.Stop()
		}
		told = append(told, strings.TrimSuffix(line, "\n"))
	}
	if err := child.Wait(); err == nil || len(told) == 0 {
		t.Fatalf("the child ended by itself: %v: %s", err, stderr.String())
	}
	return told
}
