package docker_test

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/client"

	contract "github.com/berth-sandbox/berth/conformance/provider"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/docker"
)

// hostileProgram is built once.
var hostileProgram = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "berth-hostile-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	built := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-o", filepath.Join(dir, "hostile"), "./testdata/hostile")
	built.Env = append(os.Environ(), "CGO_ENABLED=0")
	built.Stderr = os.Stderr
	if err := built.Run(); err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(dir, "hostile"))
})

// hostileMachine is one in which root has /hostile.
func hostileMachine(t *testing.T, at place, p *docker.Provider) (id string) {
	t.Helper()
	id = newID()
	at.create(t, p, at.spec(id, imported(t, "ordinary", ordinary)))
	program, err := hostileProgram()
	must(t, err)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	must(t, w.WriteHeader(&tar.Header{Name: "hostile", Mode: 0o755, Size: int64(len(program)), Typeflag: tar.TypeReg}))
	_, err = w.Write(program)
	must(t, err)
	must(t, w.Close())
	_, err = onEngine(t).CopyToContainer(t.Context(), "berth-"+id, client.CopyToContainerOptions{DestinationPath: "/", Content: &archive})
	must(t, err)
	return id
}

func TestRootInAMachineNeitherSpeaksForItsGuestNorHearsIt(t *testing.T) {
	onEngine(t)
	at, p := newPlace(t), provider(t)
	id := hostileMachine(t, at, p)
	dialer, err := p.Dialer(t.Context(), at.machine(id))
	must(t, err)
	defer func() { _ = dialer.Close() }()
	g, err := contract.ConnectThrough(t, dialer, at.spec(id, ""))
	must(t, err)

	for name, test := range map[string]struct{ argv, want string }{
		"it dials the broker":                  {"dial-the-broker 20", "0\n"},
		"it traces the guest":                  {"attach", "operation not permitted\n"},
		"it reads the guest's memory":          {"open /proc/1/mem", "true\n"},
		"it reads the guest's memory map":      {"open /proc/1/maps", "true\n"},
		"it reads the guest's environment":     {"open /proc/1/environ", "true\n"},
		"it takes over the guest's descriptor": {"open /proc/1/fd/0", "true\n"},
		"it reads the guest's program":         {"open /proc/1/exe", "true\n"},
	} {
		got := g.Run(&guestv1.Command{Argv: append([]string{"/hostile"}, strings.Fields(test.argv)...)})
		if got.Out != test.want || got.Code != 0 {
			t.Errorf("%s: %+v, want %q", name, got, test.want)
		}
	}

	// As many strangers as there is room for keep nobody out.
	crowd, err := g.Start(t.Context(), &guestv1.StartRequest{JobId: "job_" + newID()[2:], Command: &guestv1.Command{Argv: []string{"/hostile", "crowd"}, OutputLimitBytes: 1 << 10}})
	must(t, err)
	for range 5 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		stream, err := dialer.Dial(ctx)
		cancel()
		if err != nil {
			t.Fatalf("the guest is kept out: %v", err)
		}
		_ = stream.Close()
	}
	if again, err := contract.ConnectThrough(t, dialer, at.spec(id, "")); err != nil {
		t.Errorf("the guest is kept out: %v", err)
	} else {
		again.Close()
	}
	if crowd.GetStatus().GetDone() {
		t.Errorf("nobody crowded: %v", crowd)
	}
	at.destroy(t, p, id)
}

func TestABridgeSpeaksToTheGuestAlone(t *testing.T) {
	onEngine(t)
	at, p := newPlace(t), provider(t, overTheBridge)
	id := hostileMachine(t, at, p)
	dialer, err := p.Dialer(t.Context(), at.machine(id))
	must(t, err)
	defer func() { _ = dialer.Close() }()
	g, err := contract.ConnectThrough(t, dialer, at.spec(id, ""))
	must(t, err)
	job := "job_" + newID()[2:]
	_, err = g.Start(t.Context(), &guestv1.StartRequest{JobId: job, Command: &guestv1.Command{Argv: []string{"/hostile", "pose-as-the-guest"}, OutputLimitBytes: 1 << 10}})
	must(t, err)
	said := func() string {
		t.Helper()
		read, err := g.Read(t.Context(), &guestv1.ReadRequest{JobId: job, Stream: 1, MaxBytes: 1 << 10})
		must(t, err)
		return string(read.GetData())
	}
	for said() != "listening\n" {
		time.Sleep(10 * time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if stream, err := dialer.Dial(ctx); err == nil || !strings.Contains(err.Error(), "the guest is process 1") {
		t.Errorf("a bridge to an impostor: %v, %v", stream, err)
	}
	if got := said(); got != "listening\n" {
		t.Errorf("the impostor: %q", got)
	}
	at.destroy(t, p, id)
}
