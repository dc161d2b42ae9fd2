package api

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/berth-sandbox/berth/client"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// shell is a line of sh in which berth is the command line, and $S and $J are a sandbox and a job.
func (w *harness) shell(line, sandbox, job string) *exec.Cmd {
	cmd := exec.CommandContext(w.ctx, "sh", "-c", `berth() { "$BERTH" "$@"; }`+"\n"+line)
	cmd.Env = append(os.Environ(), "BERTH="+w.Programs.Berth, "BERTH_ADDR="+w.Broker.Address, "S="+sandbox, "J="+job)
	return cmd
}

func TestAnOutputThatIsClosedOrFullIsAnErrorOfTheCommandLine(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	job := w.start(t, sandbox, "echo out; echo err >&2").GetId()
	w.wait(t, job)
	for _, test := range []struct {
		line   string
		code   int
		stderr string
	}{
		{"berth exec $S -- echo x >&-", 125, "bad file descriptor"},
		{"berth exec $S -c 'echo x >&2' 2>&-", 125, ""},
		{"berth exec $S -- echo x >/dev/full", 125, "no space left on device"},
		{"berth exec -i $S -- cat <&-", 125, "bad file descriptor"},
		{"berth exec -o json $S -- true >&-", 125, "bad file descriptor"},
		{"berth attach --from-start $J >&-", 125, "bad file descriptor"},
		{"berth wait $J >&-", 125, "bad file descriptor"},
		{"berth logs $J >&-", 1, "bad file descriptor"},
		{"berth logs $J 2>&-", 1, ""},
		{"berth logs -f $J >&-", 1, "bad file descriptor"},
		{"berth logs -f -o json $J >/dev/full", 1, "no space left on device"},
		{"berth ls >&-", 1, "bad file descriptor"},
		{"berth ls -o json >/dev/full", 1, "no space left on device"},
		{"berth jobs >&-", 1, "bad file descriptor"},
		{"berth help >&-", 1, "bad file descriptor"},
		{"berth rm job_none >&- 2>&- <&-", 2, ""},
		// What has nothing to say needs no output, and /dev/null is one.
		{"berth exec $S -- true >&- 2>&- <&-", 0, ""},
		{"berth exec $S -- echo x >/dev/null", 0, ""},
		{"berth exec $S -- echo x 1<>/dev/null", 0, ""},
	} {
		cmd := w.shell(test.line, sandbox, job)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Run(); cmd.ProcessState == nil {
			t.Fatal(err)
		}
		if code := cmd.ProcessState.ExitCode(); code != test.code || !strings.Contains(stderr.String(), test.stderr) {
			t.Errorf("%s: exit %d, stderr %q", test.line, code, stderr.String())
		}
	}
	w.destroy(t, sandbox)
}

func TestWhereBytesWereDroppedTheCommandLineSaysSoAndFails(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	const long = "head -c 3000000 /dev/zero; printf end"
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Shell: long, OutputLimitBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	job := reply.GetJob().GetId()
	w.wait(t, job)
	again := "berth exec --request-id again --output-limit 1MiB $S -c '" + long + "' >/dev/null"
	for _, test := range []struct {
		line    string
		code    int
		missing string
	}{
		{"berth logs $J >/dev/null", 1, "of stdout were"},
		{"berth logs -f $J >/dev/null", 1, "of stdout were"},
		{"berth logs -f -o json $J >/dev/null", 1, "of stdout were"},
		{"berth attach --from-start $J >/dev/null", 125, "of stdout were"},
		{"berth attach -i --from-start $J >/dev/null </dev/null", 125, "of stdout were"},
		{again + " 2>/dev/null; " + again, 125, "of stdout were"}, // the second joins it when it is over
		{"berth exec -o json $S -c '" + long + "' >/dev/null", 125, "of stdout were left out"},
		{"berth exec -o json $S -c '" + long + "; exit 3' >/dev/null", 3, "of stdout were left out"},
		{"berth logs --stream stderr $J", 0, ""},
		{"berth exec $S -c '" + long + "' >/dev/null", 0, ""},
	} {
		cmd := w.shell(test.line, sandbox, job)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Run(); cmd.ProcessState == nil {
			t.Fatal(err)
		}
		said := stderr.String()
		if code := cmd.ProcessState.ExitCode(); code != test.code || !strings.Contains(said, test.missing) || (said == "") != (test.missing == "") {
			t.Errorf("%s: exit %d, stderr %q", test.line, code, said)
		}
	}
	w.destroy(t, sandbox)
}

// TestTwoThatWriteToAJobAtOnceLoseNothing has callers append lines to one job while the broker is killed.
func TestTwoThatWriteToAJobAtOnceLoseNothing(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	reply, err := w.Jobs().StartJob(w.ctx, &berthv1.StartJobRequest{SandboxId: sandbox, Spec: openStdin(argv("cat"))})
	if err != nil {
		t.Fatal(err)
	}
	job := reply.GetJob().GetId()
	const each = 40
	begun := make(chan struct{})
	var writing sync.WaitGroup
	for _, who := range []string{"a", "b"} {
		read, write := io.Pipe()
		writing.Go(func() {
			for i := range each {
				if i == each/2 && who == "a" {
					close(begun)
				}
				if _, err := fmt.Fprintf(write, "%s %d\n", who, i); err != nil {
					t.Error(err)
				}
			}
			_ = write.Close()
		})
		writing.Go(func() {
			err := w.AppendInput(w.ctx, job, read, false)
			if err != nil {
				t.Errorf("append: %v", err)
			}
			_ = read.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		})
	}
	<-begun
	w.restart(t)
	cmd := w.shell(`for i in 0 1 2 3 4 5 6 7 8 9; do echo c $i; done | berth input $J & for i in 0 1 2 3 4 5 6 7 8 9; do echo d $i; done | berth input $J && wait $!`, sandbox, job)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("berth input: %v: %s", err, out)
	}
	writing.Wait()
	if out, err := w.shell("berth input --eof $J </dev/null", sandbox, job).CombinedOutput(); err != nil {
		t.Errorf("berth input --eof: %v: %s", err, out)
	}
	wantExit(t, w.wait(t, job), 0)
	seen := map[string]int{}
	for line := range strings.Lines(w.output(t, job)) {
		who, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		if number != fmt.Sprint(seen[who]) {
			t.Fatalf("after %v: %q", seen, line)
		}
		seen[who]++
	}
	if seen["a"] != each || seen["b"] != each || seen["c"] != 10 || seen["d"] != 10 {
		t.Errorf("%v", seen)
	}
	w.destroy(t, sandbox)
}

// TestWhoReadsAJobChangesNothingForWhoHasItsInput has readers beside an interactive caller, who come and go.
func TestWhoReadsAJobChangesNothingForWhoHasItsInput(t *testing.T) {
	t.Parallel()
	w := start(t)
	sandbox := w.create(t, nil).GetId()
	input, keys := io.Pipe()
	output, screen := io.Pipe()
	sizes, known := make(chan *berthv1.TerminalSize, 1), make(chan string, 1)
	spec := &berthv1.JobSpec{Shell: `stty -echo; echo ready; while read line; do echo "got $line in $(stty size)"; done; exit 7`, Tty: &berthv1.TerminalSize{Cols: 91, Rows: 33}}
	type end struct {
		job *berthv1.Job
		err error
	}
	ended := make(chan end, 1)
	go func() {
		job, err := w.Exec(w.ctx, sandbox, spec, client.ExecIO{
			Stdin: input, Stdout: screen, Resize: sizes, Started: func(job *berthv1.Job) { known <- job.GetId() },
		})
		_ = screen.Close()
		ended <- end{job, err}
	}()
	id := <-known
	shown := newLines(output)
	shown.want(t, "ready")

	say := func(text, want string) {
		t.Helper()
		if _, err := io.WriteString(keys, text+"\n"); err != nil {
			t.Fatal(err)
		}
		shown.want(t, want)
	}
	say("one", "got one in 33 91")
	reader := w.shell("exec \"$BERTH\" attach --from-start $J", sandbox, id)
	out, err := reader.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	follow, err := w.Jobs().FollowJob(w.ctx, &berthv1.FollowJobRequest{JobId: id})
	if err != nil {
		t.Fatal(err)
	}
	read := newLines(out)
	read.want(t, "ready")
	if first, err := follow.Recv(); err != nil || !bytes.HasPrefix(first.GetChunk().GetData(), []byte("ready")) {
		t.Errorf("followed: %v (%v)", first, err)
	}
	say("two", "got two in 33 91")
	read.want(t, "got two in 33 91")
	sizes <- &berthv1.TerminalSize{Cols: 92, Rows: 34}
	for said := false; !said; { // the size is not in line with the keys
		if _, err := io.WriteString(keys, "three\n"); err != nil {
			t.Fatal(err)
		}
		said = shown.next(t) == "got three in 34 92"
	}
	if err := reader.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = reader.Wait() // it was killed
	say("four", "got four in 34 92")
	if _, err := io.WriteString(keys, "\x04"); err != nil {
		t.Fatal(err)
	}
	if got := <-ended; got.err != nil || got.job.GetOutcome().GetExitCode() != 7 {
		t.Errorf("it ended as %v (%v)", got.job.GetOutcome(), got.err)
	}
	_ = keys.Close()
	w.destroy(t, sandbox)
}

// lines are the lines of a stream as they come.
type lines struct{ came chan string }

// newLines reads until the stream ends.
func newLines(from io.Reader) lines {
	l := lines{came: make(chan string, 1024)}
	go func() {
		defer close(l.came)
		scanner := bufio.NewScanner(from)
		for scanner.Scan() {
			l.came <- strings.TrimRight(scanner.Text(), "\r")
		}
	}()
	return l
}

func (l lines) next(t *testing.T) string {
	t.Helper()
	line, open := <-l.came
	if !open {
		t.Fatal("the stream ended")
	}
	return line
}

// want reads up to a line.
func (l lines) want(t *testing.T, line string) {
	t.Helper()
	for {
		if l.next(t) == line {
			return
		}
	}
}
