package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/client"
	"golang.org/x/sync/errgroup"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// How often the slow rows are run: an engine does some 30 execs and 9 starts a second.
const (
	engineRuns = 200
	// engineBlock and engineRest: after a docker exec the engine is busy for some 100 ms more, which is
	// no cost of what comes next.
	engineBlock         = 20
	engineRest          = 500 * time.Millisecond
	engineWarmUp        = 1
	idleMachines        = 200
	maxConcurrentStarts = 4
)

// engine is a Docker Engine beside the broker, and an image that is on it for this run.
type engine struct {
	client    *client.Client
	image     string
	container string
}

// openEngine makes the image, of a static busybox; nil where there is no engine or no busybox.
func openEngine(ctx context.Context) (*engine, error) {
	if err := exec.CommandContext(ctx, "docker", "version").Run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench: no Docker Engine answers here, so its rows are left out")
		return nil, nil
	}
	content, err := busybox(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench: docker's rows are left out:", err)
		return nil, nil
	}
	e := &engine{image: fmt.Sprintf("berth-bench:%d", os.Getpid())}
	if e.client, err = client.New(client.FromEnv); err != nil {
		return nil, err
	}
	load := exec.CommandContext(ctx, "docker", "import", "-", e.image)
	load.Stdin = bytes.NewReader(content)
	if out, err := load.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("docker import: %w: %s", err, out)
	}
	return e, nil
}

// busybox is a root file system of a static busybox, as a tar.
func busybox(ctx context.Context) ([]byte, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("there is no busybox to make an image of: %w", err)
	}
	if out, err := exec.CommandContext(ctx, "ldd", path).CombinedOutput(); err == nil && bytes.Contains(out, []byte("=>")) {
		return nil, fmt.Errorf("%s is not static (Debian's busybox-static is)", path)
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	archive := tar.NewWriter(&out)
	err = errors.Join(
		archive.WriteHeader(&tar.Header{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755}),
		archive.WriteHeader(&tar.Header{Name: "bin/busybox", Mode: 0o755, Size: int64(len(program))}),
	)
	if err == nil {
		_, err = archive.Write(program)
	}
	for _, applet := range []string{"sh", "true", "sleep", "head", "cat"} {
		err = errors.Join(err, archive.WriteHeader(&tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}))
	}
	return out.Bytes(), errors.Join(err, archive.Close())
}

func (e *engine) close(ctx context.Context) error {
	if e == nil {
		return nil
	}
	if e.container != "" {
		_ = exec.CommandContext(ctx, "docker", "rm", "-f", e.container).Run() // gone already is as good
	}
	out, err := exec.CommandContext(ctx, "docker", "image", "rm", "-f", e.image).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("docker image rm: %w: %s", err, out)
	}
	return errors.Join(err, e.client.Close())
}

// exec runs a command as docker exec does, by the Go client, and hands its output on.
func (e *engine) exec(ctx context.Context, out io.Writer, argv ...string) error {
	made, err := e.client.ExecCreate(ctx, e.container, client.ExecCreateOptions{AttachStdout: true, AttachStderr: true, Cmd: argv})
	if err != nil {
		return err
	}
	attached, err := e.client.ExecAttach(ctx, made.ID, client.ExecAttachOptions{})
	if err != nil {
		return err
	}
	defer attached.Close()
	if _, err := io.CopyBuffer(out, struct{ io.Reader }{attached.Reader}, make([]byte, 256<<10)); err != nil {
		return err
	}
	_, err = e.client.ExecInspect(ctx, made.ID, client.ExecInspectOptions{})
	return err
}

// docker measures machines that are containers against docker itself.
func (b *bench) docker(ctx context.Context) error {
	e := b.engine
	if e == nil {
		return nil
	}
	out, err := exec.CommandContext(ctx, "docker", "run", "-d", "--network", "none", e.image, "sleep", "100000").Output()
	if err != nil {
		return fmt.Errorf("docker run: %w", err)
	}
	e.container = strings.TrimSpace(string(out))
	id, err := b.createDocker(ctx, e)
	if err != nil {
		return err
	}
	local := b.sandbox
	b.sandbox = id
	defer func() { b.sandbox = local }()
	for _, row := range []func(context.Context, *engine) error{b.dockerExec, b.dockerMany, b.dockerStream, b.dockerBoot, b.dockerMemory} {
		if err := row(ctx, e); err != nil {
			return err
		}
	}
	return b.destroy(ctx, id)
}

func (b *bench) dockerExec(ctx context.Context, e *engine) error {
	samples, err := inBlocks(ctx, engineRuns, engineBlock, engineRest, b.run(ctx, "true"),
		func() error { return e.exec(ctx, io.Discard, "true") }, raw("docker", "exec", e.container, "true"))
	if err != nil {
		return err
	}
	b.plain("docker exec true, by the command line", samples[2])
	b.plain("docker exec true, by the Go client", samples[1])
	ratio := samples[1].percentile(0.5) / samples[0].percentile(0.5)
	b.judged("RunCommand true, docker, times faster than docker exec", samples[0], ratio, ">= 20", ratio >= 20)
	return nil
}

func (b *bench) dockerMany(ctx context.Context, e *engine) error {
	theirs, err := at(manyCallers, engineRuns+manyCallers, func() error { return e.exec(ctx, io.Discard, "true") })
	if err != nil {
		return err
	}
	ours, err := at(manyCallers, b.n*4, b.run(ctx, "true"))
	if err != nil {
		return err
	}
	b.plain("docker exec true, by the Go client, 64 callers", theirs)
	ratio := ours.perSecond() / theirs.perSecond()
	b.judged("RunCommand true, docker, 64 callers, a second over docker exec", ours, ratio, ">= 60", ratio >= 60)
	return nil
}

func (b *bench) dockerStream(ctx context.Context, e *engine) error {
	begin := time.Now()
	if err := e.exec(ctx, io.Discard, "head", "-c", strconv.Itoa(streamBytes), "/dev/zero"); err != nil {
		return err
	}
	theirs := float64(streamBytes) / time.Since(begin).Seconds()
	took, _, err := b.streamBeside(ctx, streamBytes, nil)
	if err != nil {
		return err
	}
	ours := float64(streamBytes) / took.Seconds()
	b.fact("1 GiB through Exec, docker, over docker exec's attach", ours/theirs, ">= 1.00", ours >= theirs, fmt.Sprintf("(%.0f and %.0f MB/s)", ours/1e6, theirs/1e6))
	return nil
}

// dockerBoot compares from nothing to the first command's end.
func (b *bench) dockerBoot(ctx context.Context, e *engine) error {
	var sandbox, container string
	samples, err := inTurn(engineRuns, engineWarmUp, []func() error{
		func() (err error) {
			if sandbox, err = b.createDocker(ctx, e); err != nil {
				return err
			}
			_, err = b.client.Jobs().RunCommand(ctx, &berthv1.RunCommandRequest{SandboxId: sandbox, Spec: &berthv1.JobSpec{Argv: []string{"true"}}})
			return err
		},
		func() error {
			out, err := exec.CommandContext(ctx, "docker", "run", "-d", e.image, "sleep", "100000").Output()
			container = strings.TrimSpace(string(out))
			return err
		},
	}, func() error {
		err := b.destroy(ctx, sandbox)
		if container != "" {
			err = errors.Join(err, exec.CommandContext(ctx, "docker", "rm", "-f", container).Run())
		}
		sandbox, container = "", ""
		return err
	})
	if err != nil {
		return err
	}
	b.plain("docker run -d", samples[1])
	ratio := samples[0].percentile(0.5) / samples[1].percentile(0.5)
	b.judged("create and first command, docker, over docker run -d", samples[0], ratio, "<= 1.15", ratio <= 1.15)
	return nil
}

// dockerMemory measures the daemon beside many machines that do nothing.
func (b *bench) dockerMemory(ctx context.Context, e *engine) error {
	ids := make([]string, idleMachines)
	var group errgroup.Group
	group.SetLimit(maxConcurrentStarts)
	for i := range ids {
		group.Go(func() (err error) {
			ids[i], err = b.createDocker(ctx, e)
			return err
		})
	}
	err := group.Wait()
	daemon, _ := memoryOf(b.broker.pid())
	for _, id := range ids {
		group.Go(func() error { return b.destroy(ctx, id) })
	}
	if err := errors.Join(err, group.Wait()); err != nil {
		return err
	}
	b.fact("daemon, MB resident, with 200 idle docker machines", daemon/1e6, "<= 60", daemon/1e6 <= 60, "(after this run)")
	return nil
}

func (b *bench) createDocker(ctx context.Context, e *engine) (string, error) {
	made, err := b.client.Sandboxes().CreateSandbox(ctx, &berthv1.CreateSandboxRequest{Spec: &berthv1.SandboxSpec{Provider: "docker", Image: e.image}})
	return made.GetSandbox().GetId(), err
}

// destroy destroys a sandbox, if it was made.
func (b *bench) destroy(ctx context.Context, id string) error {
	if id == "" {
		return nil
	}
	_, err := b.client.Sandboxes().DestroySandbox(ctx, &berthv1.DestroySandboxRequest{SandboxId: id})
	return err
}
