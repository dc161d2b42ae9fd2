package main

import (
	"bufio"
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Tuning.
const (
	deadFor      = 2 * time.Second  // how long the broker stays dead
	waitTimeout  = 90 * time.Second // the first go test on a new machine compiles the standard library
	readyTimeout = 20 * time.Second // for the broker to say that it is ready
	stopTimeout  = 20 * time.Second // for the broker to stop
)

// The repository's files bear a suffix here, so that they are no package of this module.
//
//go:embed repo/*.txt
var repository embed.FS

// stage is where the story is told: a directory of its own, and one broker.
type stage struct {
	dir     string
	repo    string
	bin     string
	begun   time.Time
	steps   int
	broker  *exec.Cmd
	spaces  map[string]string // workspaces by sandbox
	colours bool
}

func newStage(context.Context) (*stage, error) {
	bin, err := filepath.Abs("bin")
	if err != nil {
		return nil, err
	}
	for _, program := range []string{"berthd", "berth", "berth-guest"} {
		if _, err := os.Stat(filepath.Join(bin, program)); err != nil {
			return nil, fmt.Errorf("%w (run it as `make demo`, from the top of the repository)", err)
		}
	}
	for _, tool := range []string{"git", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, fmt.Errorf("%w: install it first", err)
		}
	}
	// A socket's path holds 107 bytes: the system's own directory is short.
	dir, err := os.MkdirTemp("/tmp", "berth-demo-")
	if err != nil {
		return nil, err
	}
	info, err := os.Stdout.Stat()
	return &stage{
		dir: dir, repo: filepath.Join(dir, "repo"), bin: bin, begun: time.Now(), spaces: map[string]string{},
		colours: err == nil && info.Mode()&fs.ModeCharDevice != 0 && os.Getenv("NO_COLOR") == "",
	}, nil
}

func (s *stage) step(title string) {
	s.steps++
	fmt.Printf("\n%s %s\n", s.paint("1;36", fmt.Sprintf("%d.", s.steps)), s.paint("1", title))
}

func (s *stage) say(text string) { fmt.Println("   " + text) }

// command shows a command line, without the values of the environment that it hands over.
func (s *stage) command(args []string) {
	shown := make([]string, 0, len(args))
	before := ""
	for _, arg := range args {
		flag := before
		before = arg
		switch {
		case flag == "--env":
			name, _, _ := strings.Cut(arg, "=")
			arg = name + "=…"
		case strings.ContainsAny(arg, " \n'|"):
			arg = "'" + strings.ReplaceAll(arg, "\n", "; ") + "'"
		}
		shown = append(shown, arg)
	}
	fmt.Println("   " + s.paint("2", "$ "+strings.Join(shown, " ")))
}

func (s *stage) output(text []byte) {
	scanner := bufio.NewScanner(bytes.NewReader(text))
	for scanner.Scan() {
		fmt.Println("   " + scanner.Text())
	}
}

func (s *stage) finish() {
	fmt.Printf("\n%s in %.1f s: the job outlived its broker, with its true exit code and its exact bytes.\n",
		s.paint("1;32", "Done"), time.Since(s.begun).Seconds())
}

func (s *stage) paint(code, text string) string {
	if !s.colours {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (s *stage) pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// makeRepository writes the files of repo/ and commits them.
func (s *stage) makeRepository(ctx context.Context) error {
	if err := os.Mkdir(s.repo, 0o700); err != nil {
		return err
	}
	err := fs.WalkDir(repository, "repo", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := repository.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(s.repo, strings.TrimSuffix(entry.Name(), ".txt")), text, 0o600)
	})
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"init", "-q", "-b", "main"},
		{"add", "."},
		{"-c", "user.name=Demo", "-c", "user.email=demo@example.invalid", "commit", "-q", "-m", "Statistics of small samples"},
	} {
		git := exec.CommandContext(ctx, "git", append([]string{"-C", s.repo}, args...)...)
		if out, err := git.CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", args[0], err, out)
		}
	}
	s.say(s.repo)
	return nil
}

// goEnvironment lets the sandbox's go find the compiler and what it has compiled already.
func (s *stage) goEnvironment() []string {
	args := []string{"--env", "PATH=" + os.Getenv("PATH"), "--env", "CGO_ENABLED=0", "--env", "GOFLAGS=-trimpath", "--env", "GOTOOLCHAIN=local"}
	for _, name := range []string{"GOCACHE", "GOROOT", "GOMODCACHE"} {
		value, err := exec.Command("go", "env", name).Output()
		if err == nil && len(bytes.TrimSpace(value)) > 0 {
			args = append(args, "--env", name+"="+string(bytes.TrimSpace(value)))
		}
	}
	return args
}

func (s *stage) address() string { return "unix://" + filepath.Join(s.dir, "run", "b.sock") }

// startBroker starts berthd and waits until it says that it is ready.
func (s *stage) startBroker(ctx context.Context) error {
	args := []string{
		"--state", filepath.Join(s.dir, "state"), "--run", filepath.Join(s.dir, "run"),
		"--listen", s.address(), "--provider", "local",
	}
	s.command(append([]string{"berthd"}, args...))
	log, err := os.OpenFile(filepath.Join(s.dir, "berthd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	broker := exec.Command(filepath.Join(s.bin, "berthd"), args...)
	broker.Stderr = log
	broker.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is the story's to handle
	out, err := broker.StdoutPipe()
	if err != nil {
		return err
	}
	if err := broker.Start(); err != nil {
		return err
	}
	s.broker = broker
	ready := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- strings.TrimSpace(line)
	}()
	timer := time.NewTimer(readyTimeout)
	defer timer.Stop()
	select {
	case line := <-ready:
		if line == "" {
			return fmt.Errorf("berthd did not start: %s", s.lastLog())
		}
		s.say(fmt.Sprintf("%s (pid %d)", line, broker.Process.Pid))
		return nil
	case <-timer.C:
		return fmt.Errorf("berthd is not ready after %s: %s", readyTimeout, s.lastLog())
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *stage) lastLog() string {
	text, err := os.ReadFile(filepath.Join(s.dir, "berthd.log"))
	if err != nil {
		return err.Error()
	}
	return lastLine(text)
}

func (s *stage) killBroker() error {
	s.command([]string{"kill", "-9", fmt.Sprint(s.broker.Process.Pid)})
	if err := s.broker.Process.Kill(); err != nil {
		return err
	}
	_ = s.broker.Wait() // says that it was killed
	s.broker = nil
	return nil
}

func (s *stage) stopBroker() error {
	s.command([]string{"kill", "-TERM", fmt.Sprint(s.broker.Process.Pid)})
	if err := s.broker.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- s.broker.Wait() }()
	timer := time.NewTimer(stopTimeout)
	defer timer.Stop()
	select {
	case err := <-done:
		s.broker = nil
		return err
	case <-timer.C:
		return fmt.Errorf("berthd has not stopped after %s", stopTimeout)
	}
}

// berth runs the command line, shows the command and what it printed, and returns that.
func (s *stage) berth(ctx context.Context, args ...string) (string, error) {
	return s.berthExits(ctx, 0, args...)
}

func (s *stage) berthExits(ctx context.Context, want int, args ...string) (string, error) {
	s.command(append([]string{"berth"}, args...))
	out, err := s.run(ctx, want, args)
	s.output(out)
	return strings.TrimSpace(string(out)), err
}

// quietly runs the command line and returns its standard output, byte for byte.
func (s *stage) quietly(ctx context.Context, args ...string) ([]byte, error) {
	return s.run(ctx, 0, args)
}

func (s *stage) run(ctx context.Context, want int, args []string) ([]byte, error) {
	berth := exec.CommandContext(ctx, filepath.Join(s.bin, "berth"), args...)
	berth.Env = append(os.Environ(), "BERTH_ADDR="+s.address())
	var out, errs bytes.Buffer
	berth.Stdout, berth.Stderr = &out, &errs
	err := berth.Run()
	var exited *exec.ExitError
	if errors.As(err, &exited) && exited.ExitCode() == want {
		err = nil
	}
	if err != nil || want != 0 && berth.ProcessState.ExitCode() != want {
		return out.Bytes(), fmt.Errorf("berth %s: exit %d, want %d: %s", args[0], berth.ProcessState.ExitCode(), want, strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

// workspace is where a sandbox's workspace lies on this host.
func (s *stage) workspace(sandbox string) string {
	if known := s.spaces[sandbox]; known != "" {
		return known
	}
	matches, err := filepath.Glob(filepath.Join(s.dir, "state", "local", "*", "workspace"))
	if err != nil || len(matches) != 1 {
		return ""
	}
	s.spaces[sandbox] = matches[0]
	return matches[0]
}

// leftovers lists processes that were started with a path of the stage, sockets, and machines'
// directories.
func (s *stage) leftovers() []string {
	var left []string
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		if text, err := os.ReadFile(path); err == nil && bytes.Contains(text, []byte(s.dir)) {
			left = append(left, "process "+filepath.Base(filepath.Dir(path))+": "+string(bytes.ReplaceAll(text, []byte{0}, []byte{' '})))
		}
	}
	machines, _ := os.ReadDir(filepath.Join(s.dir, "state", "local"))
	for _, machine := range machines {
		left = append(left, "machine "+machine.Name())
	}
	_ = filepath.WalkDir(filepath.Join(s.dir, "run"), func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.Type()&fs.ModeSocket != 0 {
			left = append(left, "socket "+path)
		}
		return nil
	})
	return left
}

// close takes the stage down, however the story ended.
func (s *stage) close(ctx context.Context) error {
	if s.broker != nil {
		// The story broke off: destroy what it has made before the broker goes.
		ctx, cancel := context.WithTimeout(ctx, stopTimeout)
		defer cancel()
		if ids, err := s.run(ctx, 0, []string{"ls", "-o", "id"}); err == nil {
			for _, id := range strings.Fields(string(ids)) {
				_, _ = s.run(ctx, 0, []string{"rm", id})
			}
		}
		_ = s.broker.Process.Signal(syscall.SIGTERM)
		_ = s.broker.Wait()
	}
	return os.RemoveAll(s.dir)
}
