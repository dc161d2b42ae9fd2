package docker

import (
	"archive/tar"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

const (
	volumePrefix = "berth-guest-"
	// volumeDigits is how many hexadecimal digits of the program's digest name its volume.
	volumeDigits = 12
	// helperPoll is between two looks at another broker's helper, and helperTimeout is how long it may be
	// there: a helper lives for a second, and for copyTimeout on the slowest of lines.
	helperPoll    = 100 * time.Millisecond
	helperTimeout = copyTimeout + changeTimeout
	probeDir      = "/.berth/probe"
	probeFile     = ".berth-probe"
	probeBytes    = 16
)

// supplied is what every machine of an engine shares.
type supplied struct {
	volume string // the guest's, filled and verified
	shared bool   // the engine sees this host's file system, so that a guest can dial out
}

// supply is what this process knows of its engine. Both are found by asking it, once in a
// process: with a container that is made from a machine's image, never started, and removed.
type supply struct {
	turn    keyedLock // one process prepares an engine once
	mu      sync.Mutex
	filled  map[string]bool // by digest
	shared  *bool           // nil: not known yet
	program program
	helper  observation
}

// observation is another broker's helper, and since when it is known.
type observation struct {
	id    string
	since time.Time
}

// program is a guest's program that was read; the file is read again only when it has changed.
type program struct {
	path    string
	size    int64
	changed time.Time
	digest  string
}

// doubt makes the next machine look at the guest's volume again.
func (s *supply) doubt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.filled = nil
}

func (s *supply) known(digest string) (filled bool, shared *bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.filled[digest], s.shared
}

func (s *supply) learnt(digest string, shared bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.filled == nil {
		s.filled = map[string]bool{}
	}
	s.filled[digest], s.shared = true, &shared
}

// provide makes sure that the engine has the guest for an image's architecture, and knows whether it
// sees our files.
func (p *Provider) provide(ctx context.Context, image imageInfo, listenDir string) (supplied, error) {
	unlock, err := p.supply.turn.lock(ctx, "engine")
	if err != nil {
		return supplied{}, err
	}
	defer unlock()
	file, digest, err := p.guestProgram(image.architecture)
	if err != nil {
		return supplied{}, err
	}
	volume := volumePrefix + digest[:volumeDigits]
	if filled, shared := p.supply.known(digest); filled && shared != nil {
		// Somebody may have pruned the volumes that nothing used.
		there, err := p.volumeExists(ctx, volume)
		if err != nil || there {
			return supplied{volume, *shared}, err
		}
	}
	shared, err := p.prepare(ctx, image, volume, file, digest, listenDir)
	if err != nil {
		return supplied{}, fmt.Errorf("preparing the engine for machines: %w", err)
	}
	p.supply.learnt(digest, shared)
	return supplied{volume, shared}, nil
}

// guestProgram returns the guest's program for an architecture and its SHA-256.
func (p *Provider) guestProgram(architecture string) (file, digest string, err error) {
	file, err = p.guest(architecture)
	if err != nil {
		return "", "", fmt.Errorf("finding berth-guest for %s: %w: %w", architecture, err, providers.ErrRefused)
	}
	info, err := os.Stat(file)
	if err != nil {
		return "", "", fmt.Errorf("the guest's program is missing: build it (make build) or say where it is: %w: %w", err, providers.ErrRefused)
	}
	read := program{path: file, size: info.Size(), changed: info.ModTime(), digest: p.supply.program.digest}
	if read != p.supply.program { // held by provide's turn
		content, err := os.ReadFile(file)
		if err != nil {
			return "", "", fmt.Errorf("reading the guest's program: %w: %w", err, providers.ErrRefused)
		}
		read.digest = digestOf(content)
		p.supply.program = read
	}
	return file, read.digest, nil
}

func digestOf(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

func (p *Provider) volumeExists(ctx context.Context, volume string) (bool, error) {
	err := p.read(ctx, "looking at volume "+volume, func(ctx context.Context) error {
		_, err := p.engine.VolumeInspect(ctx, volume, client.VolumeInspectOptions{})
		return err
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// prepare fills the guest's volume and probes for a shared file system, through one helper container.
func (p *Provider) prepare(ctx context.Context, image imageInfo, volume, file, digest, listenDir string) (shared bool, err error) {
	err = p.change(ctx, changeTimeout, "making volume "+volume, func(ctx context.Context) error {
		_, err := p.engine.VolumeCreate(ctx, client.VolumeCreateOptions{Name: volume, Labels: map[string]string{labelGuest: digest}})
		return err
	})
	if err != nil {
		return false, err
	}
	nonce, err := p.leaveProbe(ctx, listenDir)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, removeFile(filepath.Join(listenDir, probeFile))) }()
	helper, bound, err := p.makeHelper(ctx, image, volume, listenDir, nonce != "")
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, p.remove(context.WithoutCancel(ctx), helper)) }()
	if err := p.fill(ctx, helper, file, digest); err != nil {
		return false, err
	}
	// gofail: var dockerAfterVolume struct{}
	// os.Exit(137)

	if !bound {
		return false, nil
	}
	seen, err := p.copyOut(ctx, helper, path.Join(probeDir, probeFile))
	if err != nil && !errdefs.IsNotFound(err) {
		return false, err
	}
	return err == nil && string(seen) == nonce, nil
}

// leaveProbe leaves a file for the engine to be seen; none where the bridge is the only way anyhow.
func (p *Provider) leaveProbe(ctx context.Context, listenDir string) (nonce string, err error) {
	if p.bridge || !strings.HasPrefix(p.engine.DaemonHost(), "unix://") {
		return "", nil
	}
	if confined, err := p.confines(ctx); err != nil || confined {
		return "", err
	}
	random := make([]byte, probeBytes)
	if _, err := rand.Read(random); err != nil {
		return "", fmt.Errorf("probing for a shared file system: %w", err)
	}
	nonce = hex.EncodeToString(random)
	if err := os.WriteFile(filepath.Join(listenDir, probeFile), []byte(nonce), 0o600); err != nil {
		return "", fmt.Errorf("probing for a shared file system: %w", err)
	}
	return nonce, nil
}

// confines reports whether the engine's containers cannot read what is this process's alone, although
// the engine can: their root is another user, or their label another one.
func (p *Provider) confines(ctx context.Context) (confined bool, err error) {
	err = p.read(ctx, "asking the engine how it confines containers", func(ctx context.Context) error {
		answer, err := p.engine.Info(ctx, client.InfoOptions{})
		for _, option := range answer.Info.SecurityOptions {
			confined = confined || strings.HasPrefix(option, "name=userns") || strings.HasPrefix(option, "name=selinux")
		}
		return err
	})
	return confined, err
}

func removeFile(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// makeHelper makes the helper, with the socket directory mounted where the engine finds it.
func (p *Provider) makeHelper(ctx context.Context, image imageInfo, volume, listenDir string, bind bool) (id string, bound bool, err error) {
	mounts := []mount.Mount{{Type: mount.TypeVolume, Source: volume, Target: binDir, VolumeOptions: &mount.VolumeOptions{NoCopy: true}}}
	if bind {
		id, err = p.createHelper(ctx, image, volume, append(mounts,
			mount.Mount{Type: mount.TypeBind, Source: listenDir, Target: probeDir, ReadOnly: true}))
		if err == nil || !errdefs.IsInvalidArgument(err) {
			return id, true, err
		}
	}
	id, err = p.createHelper(ctx, image, volume, mounts)
	return id, false, err
}

func (p *Provider) createHelper(ctx context.Context, image imageInfo, volume string, mounts []mount.Mount) (id string, err error) {
	options := client.ContainerCreateOptions{
		Name: helperName(volume),
		Config: &container.Config{
			Image: image.reference, Entrypoint: []string{guestProgram}, Cmd: []string{"version"},
			Labels: map[string]string{labelBroker: p.broker, labelHelper: "true", labelMachine: "", labelSnapshot: ""},
		},
		HostConfig: &container.HostConfig{Mounts: mounts, NetworkMode: "none"},
	}
	create := func(ctx context.Context) error {
		made, err := p.engine.ContainerCreate(ctx, options)
		id = made.ID
		return err
	}
	for {
		err := p.change(ctx, changeTimeout, "making container "+options.Name, create)
		if !errdefs.IsConflict(err) {
			return id, err
		}
		if err := p.clearHelper(ctx, options.Name); err != nil {
			return "", err
		}
		timer := time.NewTimer(helperPoll)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			// It may also be what a broker of before had asked for, which the engine still works on.
			return "", fmt.Errorf("%w: %w", err, providers.ErrAmbiguous)
		}
	}
}

// clearHelper removes the helper of this name if it is nobody's any more. The name is how the brokers
// of one engine take turns: two that filled one volume would take each other's file away. A broker does
// this once at a time, so its own was left by a crash, and so was one that stays.
func (p *Provider) clearHelper(ctx context.Context, name string) error {
	found, err := p.inspect(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if last := &p.supply.helper; last.id != found.ID { // held by provide's turn
		last.id, last.since = found.ID, time.Now()
	}
	if found.Config.Labels[labelBroker] != p.broker && time.Since(p.supply.helper.since) < helperTimeout {
		return nil
	}
	return p.remove(ctx, found.ID)
}

func helperName(volume string) string {
	return "berth-prepare-" + strings.TrimPrefix(volume, volumePrefix)
}

// removeStaleHelper removes the helper that a crash left. Failing to is no reason to fail anything.
func (p *Provider) removeStaleHelper(ctx context.Context) {
	unlock, err := p.supply.turn.lock(ctx, "engine")
	if err != nil {
		return
	}
	defer unlock()
	stale, err := p.list(ctx, labelHelper)
	if err != nil {
		return
	}
	for _, c := range stale {
		if err := p.remove(ctx, c.ID); err != nil {
			p.log.Warn("a container that a crash left behind cannot be removed", "container", c.ID, "error", err)
		}
	}
}

// fill makes sure that the guest's program is in the volume, whole.
func (p *Provider) fill(ctx context.Context, helper, file, digest string) error {
	whole, err := p.holds(ctx, helper, digest)
	if err != nil || whole {
		return err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading the guest's program: %w", err)
	}
	if digestOf(content) != digest {
		return fmt.Errorf("the guest's program %s changed while it was read: %w", file, providers.ErrAmbiguous)
	}
	p.log.Info("copying the guest to the engine", "engine", p.engine.DaemonHost(), "bytes", len(content))
	if err := p.copyInto(ctx, helper, binDir, guestFile, 0o755, content); err != nil {
		return err
	}
	whole, err = p.holds(ctx, helper, digest)
	if err == nil && !whole {
		err = fmt.Errorf("the guest's program is not what was copied to the engine: %w", providers.ErrAmbiguous)
	}
	return err
}

func (p *Provider) holds(ctx context.Context, helper, digest string) (bool, error) {
	content, err := p.copyOut(ctx, helper, guestProgram)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil && digestOf(content) == digest, err
}

// copyOut reads one file of a container.
func (p *Provider) copyOut(ctx context.Context, id, file string) (content []byte, err error) {
	err = p.change(ctx, copyTimeout, fmt.Sprintf("reading %s of container %.12s", file, id), func(ctx context.Context) error {
		answer, err := p.engine.CopyFromContainer(ctx, id, client.CopyFromContainerOptions{SourcePath: file})
		if err != nil {
			return err
		}
		defer func() { _ = answer.Content.Close() }() // it was only read
		archive := tar.NewReader(answer.Content)
		if _, err := archive.Next(); err != nil {
			return fmt.Errorf("unpacking: %w", err)
		}
		content, err = io.ReadAll(archive)
		return err
	})
	return content, err
}
