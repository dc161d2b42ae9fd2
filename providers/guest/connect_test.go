package guest

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
)

// smallDisk mounts 8 MiB of memory.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("no small disk can be mounted here: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func TestNothingIsAnsweredBeforeHello(t *testing.T) {
	m := boot(t)
	calls := guestv1.NewGuestServiceClient(clientOn(t, m.accept()))
	refused := func(when string) {
		t.Helper()
		if _, err := calls.Start(t.Context(), argv("true")); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s, Start: %v", when, err)
		}
		stream, err := calls.Attach(t.Context())
		must(t, err)
		if _, err := stream.Recv(); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s, Attach: %v", when, err)
		}
	}
	refused("at first")
	for name, test := range map[string]struct {
		change func(*guestv1.HelloRequest)
		code   codes.Code
	}{
		"a wrong proof": {func(r *guestv1.HelloRequest) { r.Proof[0] ^= 1 }, codes.Unauthenticated},
		"no proof":      {func(r *guestv1.HelloRequest) { r.Proof = nil }, codes.Unauthenticated},
		"the guest's proof": {func(r *guestv1.HelloRequest) {
			r.Proof = prove(m.config.GetToken(), guestContext, r.GetNonce(), m.challenge)
		}, codes.Unauthenticated},
		"another machine":      {func(r *guestv1.HelloRequest) { r.MachineId = "m_other" }, codes.FailedPrecondition},
		"another protocol":     {func(r *guestv1.HelloRequest) { r.Protocol = 2 }, codes.FailedPrecondition},
		"a nonce of few bytes": {func(r *guestv1.HelloRequest) { r.Nonce = r.GetNonce()[:31] }, codes.InvalidArgument},
	} {
		r := m.helloRequest(calls)
		test.change(r)
		if _, err := calls.Hello(t.Context(), r); status.Code(err) != test.code {
			t.Errorf("%s: %v", name, err)
		}
		refused("after " + name)
	}
	r := m.helloRequest(calls)
	if _, err := guestv1.NewGuestServiceClient(clientOn(t, m.accept())).Hello(t.Context(), r); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("what was said on one connection, on another one without a challenge: %v", err)
	}
	other := guestv1.NewGuestServiceClient(clientOn(t, m.accept()))
	_ = m.helloRequest(other)
	if _, err := other.Hello(t.Context(), r); status.Code(err) != codes.Unauthenticated {
		t.Errorf("what was said on one connection, on another one with its own challenge: %v", err)
	}
	r = m.helloRequest(calls)
	hello, err := calls.Hello(t.Context(), r)
	must(t, err)
	if string(hello.GetProof()) != string(prove(m.config.GetToken(), guestContext, r.GetNonce(), m.challenge)) {
		t.Error("the guest's proof is wrong")
	}
	if hello.GetBootId() != m.hello.GetBootId() || hello.GetShell() != "/bin/bash" && hello.GetShell() != "/bin/sh" || hello.GetGeneration() != 3 {
		t.Errorf("hello %v", hello)
	}
	if _, err := calls.Start(t.Context(), argv("true")); err != nil {
		t.Errorf("after Hello: %v", err)
	}
}

func TestExactlyOneSpareConnectionWaits(t *testing.T) {
	m := boot(t)
	for range 3 {
		spare := m.accept()
		must(t, m.listener.(*net.UnixListener).SetDeadline(time.Now().Add(100*time.Millisecond)))
		if second, err := m.listener.Accept(); err == nil {
			t.Fatalf("a second spare: %v", second)
		}
		// Taking it makes the guest dial the next one.
		calls := guestv1.NewGuestServiceClient(clientOn(t, spare))
		_, err := calls.Hello(t.Context(), m.helloRequest(calls))
		must(t, err)
	}
	// A spare that dies is replaced.
	must(t, m.accept().Close())
	must(t, m.accept().Close())
	m.connect()
}

func TestTheGuestDialsAgainWhenTheHostComesBack(t *testing.T) {
	m := boot(t)
	r := argv("sleep", "60")
	m.begin(r)
	spare := m.accept()
	must(t, m.listener.Close())
	must(t, spare.Close())
	must(t, m.conn.Close())
	time.Sleep(300 * time.Millisecond)
	m.listen()
	m.connect()
	response, err := m.calls.Wait(t.Context(), &guestv1.WaitRequest{JobId: r.GetJobId()})
	must(t, err)
	if response.GetStatus().GetDone() {
		t.Errorf("the job ended: %v", response)
	}
}

func TestTheGuestsOwnSocketIsPrivateAndReplacesAStaleOne(t *testing.T) {
	var path string
	m := boot(t, func(c *guestv1.BootConfig) {
		path = filepath.Join(filepath.Dir(c.GetSpoolDir()), "own.sock")
		c.ListenSocket = path
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		must(t, err)
		stale.SetUnlinkOnClose(false)
		must(t, stale.Close())
	})
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	conn, err := net.Dial("unix", path)
	must(t, err)
	calls := guestv1.NewGuestServiceClient(clientOn(t, conn))
	_, err = calls.Hello(t.Context(), m.helloRequest(calls))
	must(t, err)
}

func TestABootConfigThatCannotServeIsRefused(t *testing.T) {
	good := func() *guestv1.BootConfig {
		return &guestv1.BootConfig{MachineId: "m_1", Token: []byte("x"), DialSocket: "/x", SpoolDir: "/x", Workspace: "/x"}
	}
	for name, change := range map[string]func(*guestv1.BootConfig){
		"no machine":           func(c *guestv1.BootConfig) { c.MachineId = "" },
		"no token":             func(c *guestv1.BootConfig) { c.Token = nil },
		"no socket":            func(c *guestv1.BootConfig) { c.DialSocket = "" },
		"a relative spool":     func(c *guestv1.BootConfig) { c.SpoolDir = "x" },
		"a relative workspace": func(c *guestv1.BootConfig) { c.Workspace = "" },
	} {
		c := good()
		change(c)
		if err := validate(c); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	must(t, validate(good()))
}
