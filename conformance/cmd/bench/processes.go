package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/oklog/ulid/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// brokerProcess is a broker with a state of its own.
type brokerProcess struct {
	dir     string
	address string
	cmd     *exec.Cmd
}

// startBroker starts the berthd of a directory of programs, with docker machines if there is an engine.
func startBroker(ctx context.Context, programs string, engine *engine) (*brokerProcess, error) {
	dir, err := os.MkdirTemp("/tmp", "berth-bench-")
	if err != nil {
		return nil, err
	}
	b := &brokerProcess{dir: dir, address: "unix://" + filepath.Join(dir, "b.sock")}
	args := []string{"--state", filepath.Join(dir, "state"), "--run", filepath.Join(dir, "run"), "--listen", b.address, "--provider", "local", "--log-level", "error"}
	if engine != nil {
		args = append(args, "--provider", "docker")
	}
	b.cmd = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(programs, "berthd"), args...)
	b.cmd.Stderr = os.Stderr
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := b.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w (run it as `make bench`)", err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, "berthd: ready") {
		return nil, errors.Join(fmt.Errorf("berthd did not start"), b.stop())
	}
	return b, nil
}

func (b *brokerProcess) pid() int { return b.cmd.Process.Pid }

func (b *brokerProcess) stop() error {
	_ = b.cmd.Process.Signal(syscall.SIGTERM) // gone already is as good
	return errors.Join(b.cmd.Wait(), os.RemoveAll(b.dir))
}

// guests lists the pids of this broker's guests.
func (b *brokerProcess) guests() []int {
	var pids []int
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range commands {
		text, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(text, []byte("berth-guest\x00init")) || !bytes.Contains(text, []byte(b.dir)) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// directGuest is a guest of its own, called without a broker.
type directGuest struct {
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
	client guestv1.GuestServiceClient
}

func (b *brokerProcess) directGuest(ctx context.Context) (*directGuest, error) {
	dir := filepath.Join(b.dir, "guest")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	token := make([]byte, sha256.Size)
	if _, err := rand.Read(token); err != nil {
		return nil, err
	}
	machine := "m_" + ulid.Make().String()
	config, err := protojson.Marshal(&guestv1.BootConfig{
		MachineId: machine, Token: token, DialSocket: filepath.Join(dir, "s"),
		SpoolDir: filepath.Join(dir, "spool"), Workspace: filepath.Join(dir, "w"),
	})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "boot.json"), config, 0o600); err != nil {
		return nil, err
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = listener.Close() }()
	g := &directGuest{cmd: exec.CommandContext(context.WithoutCancel(ctx), "bin/berth-guest", "init", "--config", filepath.Join(dir, "boot.json"))}
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := g.cmd.Start(); err != nil {
		return nil, err
	}
	stream, err := listener.Accept()
	if err != nil {
		return nil, err
	}
	g.conn, err = grpc.NewClient("passthrough:///guest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return stream, nil }))
	if err != nil {
		return nil, err
	}
	g.client = guestv1.NewGuestServiceClient(g.conn)
	challenge, err := g.client.Challenge(ctx, &guestv1.ChallengeRequest{})
	if err != nil {
		return nil, err
	}
	nonce := make([]byte, sha256.Size)
	mac := hmac.New(sha256.New, token)
	mac.Write([]byte("berth broker"))
	mac.Write(nonce)
	mac.Write(challenge.GetNonce())
	_, err = g.client.Hello(ctx, &guestv1.HelloRequest{Protocol: 1, MachineId: machine, Nonce: nonce, Proof: mac.Sum(nil)})
	return g, err
}

func (g *directGuest) run(ctx context.Context, argv ...string) func() error {
	return func() error {
		_, err := g.client.Run(ctx, &guestv1.RunRequest{
			Start:          &guestv1.StartRequest{JobId: "job_" + ulid.Make().String(), Command: &guestv1.Command{Argv: argv}, KillOnDisconnect: true},
			MaxOutputBytes: 256 << 10, Forget: true,
		})
		return err
	}
}

func (g *directGuest) stop() {
	_ = g.conn.Close()
	_ = g.cmd.Process.Signal(syscall.SIGTERM)
	_ = g.cmd.Wait() // it says that it was told to end
}
