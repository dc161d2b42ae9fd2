// Package launch turns a command as the broker sent it into a program as the kernel wants it, and
// forks it: lookup in PATH, working directory, environment, user. Every reason why a
// command cannot start becomes a Failure. It never waits for what it started and never reads the guest's
// own environment.
package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

const (
	// defaultPath is the PATH of a machine without one.
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// defaultTerm is TERM in a terminal where none is set.
	defaultTerm = "xterm-256color"
	// busyTries and busyPause bound how long a program that is open for writing is tried again. A
	// concurrent fork keeps a just written program open until its own exec, well under a millisecond: 10
	// tries at 2 ms are plenty.
	busyTries = 10
	busyPause = 2 * time.Millisecond
	// scriptStart is how much of a file is examined for whether it is a script, in bytes.
	scriptStart = 256
	// pagesOfAString bounds one argument or variable with its NUL on Linux (MAX_ARG_STRLEN): 128 KiB with
	// pages of 4 KiB.
	pagesOfAString = 32
)

// The exit codes of shells for a command that never ran.
const (
	codeNotExecutable = 126
	codeNotFound      = 127
)

// Failure says why a command did not start.
type Failure struct {
	Reason   string // its first word, before a colon, is meant for programs
	ExitCode int32
}

// Error returns the reason.
func (f *Failure) Error() string { return f.Reason }

// Machine is what all commands of a machine share.
type Machine struct {
	id        string
	workspace string
	user      string
	env       map[string]string
	ownHome   bool     // env has a HOME of its own, which is every user's
	plain     []string // env as a list, complete but for the job's id
}

// NewMachine returns a machine: its id, its default working directory (absolute), the user of
// commands that name none (empty: the guest's own) and the environment beneath every command's own.
func NewMachine(id, workspace, user string, env map[string]string) *Machine {
	m := &Machine{id: id, workspace: workspace, user: user, env: maps.Clone(env)}
	if m.env == nil {
		m.env = make(map[string]string)
	}
	setDefault(m.env, "PATH", defaultPath)
	m.ownHome = m.env["HOME"] != ""
	if !m.ownHome {
		m.env["HOME"] = ownHome()
	}
	m.env["BERTH_MACHINE_ID"] = id
	delete(m.env, "BERTH_JOB_ID")
	m.plain = list(m.env)
	return m
}

// Program is ready to be forked.
type Program struct {
	Path       string
	Argv       []string
	Env        []string
	Dir        string
	Shell      string // the shell, when the command is a script
	Credential *syscall.Credential
}

// Resolve prepares a command. The error is a *Failure.
func (m *Machine) Resolve(command *guestv1.Command, jobID string) (*Program, error) {
	account, err := m.account(command.GetUser())
	if err != nil {
		return nil, err
	}
	dir, err := m.directory(command.GetCwd(), account)
	if err != nil {
		return nil, err
	}
	p := &Program{Argv: command.GetArgv(), Dir: dir}
	if account != nil {
		p.Credential = account.credential()
	}
	var search string
	p.Env, search = m.environment(command, account, jobID)
	if command.GetShell() != "" {
		p.Shell = Shell()
		if p.Shell == "" {
			return nil, &Failure{"shell_missing: neither /bin/bash nor /bin/sh is in this machine", codeNotFound}
		}
		p.Path = p.Shell
		p.Argv = []string{p.Shell, "-c", command.GetShell()}
		return p, nil
	}
	p.Path, err = lookup(p.Argv[0], search, dir)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Fork starts the program with the given stdin, stdout and stderr. attr is the caller's; its
// Credential is set here. The error is a *Failure.
func (p *Program) Fork(files []uintptr, attr *syscall.SysProcAttr) (int, error) {
	attr.Credential = p.Credential
	sys := &syscall.ProcAttr{Dir: p.Dir, Env: p.Env, Files: files, Sys: attr}
	path, argv := p.Path, p.Argv
	for try := 1; ; try++ {
		pid, err := syscall.ForkExec(path, argv, sys)
		switch {
		case err == nil:
			return pid, nil
		case errors.Is(err, syscall.ENOEXEC) && path == p.Path && !isBinary(absolute(path, p.Dir)):
			// A script without #!: shells run it themselves, so do we.
			path, argv = "/bin/sh", append([]string{"sh", p.Path}, p.Argv[1:]...)
		case errors.Is(err, syscall.ETXTBSY) && try < busyTries:
			time.Sleep(busyPause)
		default:
			return 0, p.failure(err)
		}
	}
}

// isBinary says, as shells do, whether a file is no script: its first line has a NUL byte, or it cannot be
// read.
func isBinary(path string) bool {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return true
	}
	defer func() { _ = file.Close() }()
	start := make([]byte, scriptStart)
	n, err := io.ReadFull(file, start)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return true
	}
	line, _, _ := bytes.Cut(start[:n], []byte("\n"))
	return bytes.IndexByte(line, 0) >= 0
}

// failure explains an error of ForkExec, which does not tell which of its steps failed.
func (p *Program) failure(err error) *Failure {
	switch {
	case errors.Is(err, syscall.E2BIG):
		return &Failure{"too_long: " + p.tooLong(), codeNotExecutable}
	case errors.Is(err, syscall.ENOENT):
		return &Failure{fmt.Sprintf("not_executable: the interpreter of %q is not in this machine", p.Path), codeNotExecutable}
	case errors.Is(err, syscall.EACCES) && p.Credential != nil && !mayEnter(p.Dir, p.Credential):
		return &Failure{fmt.Sprintf("cwd_missing: user %d may not enter %q", p.Credential.Uid, p.Dir), codeNotExecutable}
	case errors.Is(err, syscall.EPERM) && p.Credential != nil:
		return &Failure{fmt.Sprintf("user_unknown: the guest may not run commands as user %d: %v", p.Credential.Uid, err), codeNotExecutable}
	case errors.Is(err, syscall.ENOEXEC):
		return &Failure{fmt.Sprintf("not_executable: %q is a binary file that this machine (%s) cannot run", p.Path, runtime.GOARCH), codeNotExecutable}
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return &Failure{fmt.Sprintf("no_resources: the machine cannot start another process: %v", err), codeNotExecutable}
	}
	return &Failure{fmt.Sprintf("not_executable: %q: %v", p.Path, err), codeNotExecutable}
}

// tooLong says which part of a program is too long for the kernel, and the remedy. It quotes no value, which
// may be secret.
func (p *Program) tooLong() string {
	most := pagesOfAString*os.Getpagesize() - 1
	total := 0
	for i, arg := range p.Argv {
		if total += len(arg) + 1; len(arg) <= most {
			continue
		}
		what := fmt.Sprintf("argument %d", i)
		if p.Shell != "" {
			what = "the script"
		}
		return fmt.Sprintf("%s has %d bytes, and the kernel allows %d: put it into a file or stdin", what, len(arg), most)
	}
	for _, variable := range p.Env {
		if total += len(variable) + 1; len(variable) <= most {
			continue
		}
		name, _, _ := strings.Cut(variable, "=")
		return fmt.Sprintf("variable %s has %d bytes with its name, and the kernel allows %d: put it into a file", name, len(variable), most)
	}
	return fmt.Sprintf("arguments and environment have %d bytes together, more than the kernel allows: put large data into a file or stdin", total)
}

// directory returns the absolute working directory, which exists.
func (m *Machine) directory(cwd string, a *account) (string, error) {
	dir := cwd
	if !filepath.IsAbs(dir) {
		dir = filepath.Join(m.workspace, dir)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		return "", &Failure{fmt.Sprintf("cwd_missing: working directory %q: %v", dir, err), codeNotExecutable}
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
		return "", &Failure{fmt.Sprintf("cwd_missing: working directory %q is not a directory", dir), codeNotExecutable}
	}
	if a != nil && !mayEnter(dir, a.credential()) {
		return "", &Failure{fmt.Sprintf("cwd_missing: user %d may not enter working directory %q", a.uid, dir), codeNotExecutable}
	}
	return dir, nil
}

// environment returns the command's environment and its PATH.
func (m *Machine) environment(command *guestv1.Command, a *account, jobID string) (env []string, path string) {
	own, terminal := command.GetEnv(), command.GetTty() != nil
	if len(own) == 0 && a == nil && !terminal {
		env = make([]string, len(m.plain), len(m.plain)+1)
		copy(env, m.plain)
		return append(env, "BERTH_JOB_ID="+jobID), m.env["PATH"]
	}
	all := maps.Clone(m.env)
	if a != nil && !m.ownHome {
		all["HOME"] = a.home
	}
	maps.Copy(all, own)
	if terminal {
		setDefault(all, "TERM", defaultTerm)
	}
	// A kill finds the processes of a job by these where there is no better way.
	all["BERTH_MACHINE_ID"] = m.id
	all["BERTH_JOB_ID"] = jobID
	return list(all), all["PATH"]
}

// Shell returns the machine's shell, or "".
func Shell() string {
	for _, shell := range []string{"/bin/bash", "/bin/sh"} {
		if runnable(shell) == nil {
			return shell
		}
	}
	return ""
}

// lookup finds a program as a shell does: a name with a slash as is, others in PATH, both relative to the
// job's working directory.
func lookup(name, path, dir string) (string, error) {
	if strings.Contains(name, "/") {
		switch err := runnable(absolute(name, dir)); {
		case err == nil:
			return name, nil
		case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
			return "", &Failure{fmt.Sprintf("not_found: no program %q", name), codeNotFound}
		default:
			return "", &Failure{fmt.Sprintf("not_executable: %q: %v", name, err), codeNotExecutable}
		}
	}
	var refused error
	if name != "" {
		for entry := range strings.SplitSeq(path, ":") {
			candidate := absolute(filepath.Join(entry, name), dir)
			err := runnable(candidate)
			if err == nil {
				return candidate, nil
			}
			if refused == nil && errors.Is(err, syscall.EACCES) {
				refused = &Failure{fmt.Sprintf("not_executable: %q: %v", candidate, err), codeNotExecutable}
			}
		}
	}
	if refused != nil {
		return "", refused
	}
	return "", &Failure{fmt.Sprintf("not_found: no program %q in PATH", name), codeNotFound}
}

func absolute(path, dir string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// runnable says why a path cannot be a program.
func runnable(path string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return err
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFREG || st.Mode&0o111 == 0 {
		return syscall.EACCES
	}
	return nil
}

func list(env map[string]string) []string {
	all := make([]string, 0, len(env)+1)
	for _, name := range slices.Sorted(maps.Keys(env)) {
		all = append(all, name+"="+env[name])
	}
	return all
}

func setDefault(env map[string]string, name, value string) {
	if env[name] == "" {
		env[name] = value
	}
}
