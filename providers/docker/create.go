package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
	"google.golang.org/protobuf/encoding/protojson"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// Where things are in a machine.
const (
	guestsDir        = "/.berth"
	binDir           = guestsDir + "/bin"
	stateDir         = guestsDir + "/state"
	runDir           = guestsDir + "/run"
	hostDir          = guestsDir + "/host"
	bootFile         = "boot.json" // in hostDir where that is there, else in stateDir
	guestFile        = "berth-guest"
	guestProgram     = binDir + "/" + guestFile
	guestProcess     = 1 // in its container
	guestSocket      = runDir + "/" + reverse.SocketName
	defaultWorkspace = "/workspace"
	// defaultPath is PATH in a machine whose image names none, that of a login on most systems.
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// The provider_options.
const (
	optionRuntime   = "runtime"
	optionSuspend   = "suspend"
	optionReadOnly  = "read_only"
	optionHardening = "hardening"

	suspendPause = "pause"
	suspendStop  = "stop"

	hardeningDefault = "default"
	hardeningStrict  = "strict"
)

// Create makes the container, gives it its BootConfig and starts it. A crash between any two of these
// leaves what a later Create completes.
//
// Errors: ErrNoImage; ErrRefused for a spec that cannot be had, a stranger's container under the
// machine's name, and whatever the engine refuses; ErrCapacity; *UnavailableError, also while an image
// is still being pulled when the context ends; ErrAmbiguous when the engine did not answer in time.
func (p *Provider) Create(ctx context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	if err := p.check(spec); err != nil {
		return providers.Handle{}, err
	}
	unlock, err := p.machines.lock(ctx, spec.MachineID)
	if err != nil {
		return providers.Handle{}, err
	}
	defer unlock()
	found, err := p.find(ctx, spec.MachineID)
	if errors.Is(err, providers.ErrNotFound) {
		return p.createNew(ctx, spec)
	}
	if err != nil {
		return providers.Handle{}, err
	}
	return p.createAgain(ctx, found, spec)
}

// check refuses what a container cannot be.
func (p *Provider) check(spec providers.MachineSpec) error {
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("machine %s: %w: %w", spec.MachineID, fmt.Errorf(format, args...), providers.ErrRefused)
	}
	switch {
	case !name.MatchString(spec.MachineID) || !strings.HasPrefix(spec.MachineID, "m_"):
		return refuse("its id must be m_ and letters, digits, _ or -")
	case spec.BrokerID != p.broker:
		return refuse("it is for broker %q and this provider serves %q", spec.BrokerID, p.broker)
	case len(spec.Token) != tokenBytes:
		return refuse("its token has %d bytes, want %d", len(spec.Token), tokenBytes)
	case !filepath.IsAbs(spec.ListenDir):
		return refuse("its socket directory %q must be an absolute path", spec.ListenDir)
	case spec.Workspace != "" && (!path.IsAbs(spec.Workspace) || path.Clean(spec.Workspace) == "/"):
		return refuse("its workspace %q must be an absolute path below /", spec.Workspace)
	case inGuestsDir(spec.Workspace):
		return refuse("its workspace %q lies in the guest's own directory", spec.Workspace)
	case spec.Resources.DiskBytes != 0:
		return refuse("a container's disk cannot be limited")
	case spec.Resources.CPUs < 0:
		return refuse("%g CPUs are none", spec.Resources.CPUs)
	case spec.Egress.Mode == providers.EgressAllowList:
		return refuse("a container cannot be held to a list of hosts")
	case spec.FromSnapshot != "" && spec.Image != "":
		return refuse("it is made from an image or from a snapshot, not from both")
	case spec.FromSnapshot != "" && !name.MatchString(spec.FromSnapshot):
		return refuse("%q cannot be a snapshot", spec.FromSnapshot)
	}
	for option, value := range spec.Options {
		switch option {
		case optionRuntime:
		case optionSuspend:
			if value != suspendPause && value != suspendStop {
				return refuse("provider_options.suspend is %q: want %s or %s", value, suspendPause, suspendStop)
			}
		case optionReadOnly:
			if value != "true" && value != "false" {
				return refuse("provider_options.read_only is %q: want true or false", value)
			}
		case optionHardening:
			if value != hardeningDefault && value != hardeningStrict {
				return refuse("provider_options.hardening is %q: want %s or %s", value, hardeningDefault, hardeningStrict)
			}
			if value == hardeningStrict && spec.Options[optionReadOnly] == "false" {
				return refuse("provider_options.read_only is false, and hardening=strict makes the image read-only: leave one of them out")
			}
		default:
			return refuse("there is no provider_options.%s: want %s, %s, %s or %s", option, optionHardening, optionRuntime, optionSuspend, optionReadOnly)
		}
	}
	if _, err := reverse.SocketPath(spec.ListenDir); err != nil {
		return refuse("%w", err)
	}
	return nil
}

// createNew makes and boots a machine. When that fails before anything runs, nothing of it is left, so
// that the error is definite.
func (p *Provider) createNew(ctx context.Context, spec providers.MachineSpec) (providers.Handle, error) {
	image, err := p.findImage(ctx, spec)
	if err != nil {
		return providers.Handle{}, fmt.Errorf("machine %s: %w", spec.MachineID, err)
	}
	if err := makeListenDir(spec.ListenDir); err != nil {
		return providers.Handle{}, fmt.Errorf("machine %s: %w", spec.MachineID, err)
	}
	supplied, err := p.provide(ctx, image, spec.ListenDir)
	if err != nil {
		return providers.Handle{}, p.undo(ctx, spec, "", fmt.Errorf("machine %s: %w", spec.MachineID, err))
	}
	id, err := p.makeOnNetwork(ctx, spec, image, supplied)
	if err != nil {
		return providers.Handle{}, p.undo(ctx, spec, "", err)
	}
	made, err := p.inspect(ctx, id)
	if err != nil {
		return providers.Handle{}, err
	}
	if err := p.boot(ctx, made, image, spec); err != nil {
		return providers.Handle{}, p.undo(ctx, spec, id, err)
	}
	return handleOf(made), nil
}

// undo removes a machine that did not come up for a definite reason. One that may have come up is left
// to be found.
func (p *Provider) undo(ctx context.Context, spec providers.MachineSpec, id string, cause error) error {
	cause = definite(cause)
	if !errors.Is(cause, providers.ErrRefused) && !errors.Is(cause, providers.ErrCapacity) {
		return cause
	}
	ctx = context.WithoutCancel(ctx)
	if id != "" {
		if err := p.remove(ctx, id); err != nil {
			return fmt.Errorf("%w: %s (and undoing it: %w)", providers.ErrAmbiguous, cause.Error(), err)
		}
	}
	if err := removeListenDir(spec.ListenDir, spec.MachineID); err != nil {
		return fmt.Errorf("%w: %s (and undoing it: %w)", providers.ErrAmbiguous, cause.Error(), err)
	}
	p.removeUnusedNetwork(ctx)
	return cause
}

// createAgain completes, boots again, or finds running what an earlier Create made.
func (p *Provider) createAgain(ctx context.Context, found container.InspectResponse, spec providers.MachineSpec) (providers.Handle, error) {
	switch {
	case goingAway(found):
		return providers.Handle{}, fmt.Errorf("machine %s: its container is %s: destroy it: %w", spec.MachineID, found.State.Status, providers.ErrRefused)
	case found.State.Paused:
		return handleOf(found), p.unpause(ctx, found)
	case found.State.Running:
		return handleOf(found), nil
	}
	image, err := p.imageOf(ctx, found)
	if err != nil {
		return providers.Handle{}, fmt.Errorf("machine %s: %w", spec.MachineID, err)
	}
	// A bind mount's source must be there, and a reboot of the host may have emptied where it was.
	if dir := listenDirOf(found.Mounts); dir != "" {
		if err := makeListenDir(dir); err != nil {
			return providers.Handle{}, fmt.Errorf("machine %s: %w", spec.MachineID, err)
		}
	}
	if err := p.reconnect(ctx, found); err != nil {
		return providers.Handle{}, fmt.Errorf("machine %s: %w", spec.MachineID, err)
	}
	// The machine's own guest is in the volume that it was made with.
	if err := p.boot(ctx, found, image, spec); err != nil {
		return providers.Handle{}, definite(err)
	}
	return handleOf(found), nil
}

// makeListenDir makes a machine's socket directory, which must be there before its container is.
func makeListenDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the socket directory: %w", err)
	}
	return nil
}

// makeOnNetwork makes the container on a network that stays until it is there.
func (p *Provider) makeOnNetwork(ctx context.Context, spec providers.MachineSpec, image imageInfo, supplied supplied) (id string, err error) {
	network, leave, err := p.joinNetwork(ctx)
	if err != nil {
		return "", fmt.Errorf("machine %s: %w", spec.MachineID, err)
	}
	defer leave()
	return p.make(ctx, spec, image, supplied, network)
}

// make makes the container.
func (p *Provider) make(ctx context.Context, spec providers.MachineSpec, image imageInfo, supplied supplied, network string) (id string, err error) {
	options := client.ContainerCreateOptions{
		Name: containerName(spec.MachineID), Config: p.config(spec, image, supplied), HostConfig: p.hostConfig(spec, image, supplied, network),
	}
	// gofail: var dockerBeforeCreate struct{}
	// os.Exit(137)

	release, err := p.turn(ctx)
	if err != nil {
		return "", err
	}
	defer release()
	err = p.change(ctx, changeTimeout, "making container "+options.Name, func(ctx context.Context) error {
		made, err := p.engine.ContainerCreate(ctx, options)
		id = made.ID
		p.warn(made.Warnings)
		return err
	})
	// gofail: var dockerAfterCreate struct{}
	// os.Exit(137)

	switch {
	case err == nil:
		return id, nil
	case errdefs.IsConflict(err): // since find looked: whose it is the next attempt finds
		return "", fmt.Errorf("%w: %w", errors.New(err.Error()), providers.ErrAmbiguous)
	case errdefs.IsNotFound(err):
		return "", fmt.Errorf("%w: %w", err, providers.ErrNoImage)
	}
	return "", err
}

// warn logs what an engine warns of, once: it says the same of every machine that asks for the same.
func (p *Provider) warn(warnings []string) {
	for _, warning := range warnings {
		if _, known := p.warned.LoadOrStore(warning, true); !known {
			p.log.Warn("the engine warns", "warning", warning)
		}
	}
}

// turn waits until few enough starts are in progress.
func (p *Provider) turn(ctx context.Context) (release func(), err error) {
	select {
	case p.starting <- struct{}{}:
		return func() { <-p.starting }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for other machines to start: %w", ctx.Err())
	}
}

func (p *Provider) config(spec providers.MachineSpec, image imageInfo, supplied supplied) *container.Config {
	configDir := stateDir
	if supplied.shared {
		configDir = hostDir
	}
	labels := map[string]string{
		labelBroker: p.broker, labelMachine: spec.MachineID, labelSuspend: spec.Options[optionSuspend],
		labelSnapshot: "", // one of the image's must not pass for the machine's
	}
	return &container.Config{
		Image: image.reference, Labels: labels,
		// Whatever the image is made to do, the machine's first process is the guest, as root, so that it
		// can run each job as its user.
		Entrypoint: []string{guestProgram},
		Cmd:        []string{"init", "--config", path.Join(configDir, bootFile)},
		User:       "0", WorkingDir: "/", StopSignal: "SIGTERM",
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}},
	}
}

func (p *Provider) hostConfig(spec providers.MachineSpec, image imageInfo, supplied supplied, network string) *container.HostConfig {
	notInit := false
	// Both labels: Destroy finds by them a volume whose container somebody removed by hand.
	own := map[string]string{labelBroker: spec.BrokerID, labelMachine: spec.MachineID}
	private := func(target string) mount.Mount {
		return mount.Mount{Type: mount.TypeVolume, Target: target, VolumeOptions: &mount.VolumeOptions{NoCopy: true, Labels: own}}
	}
	mounts := []mount.Mount{
		{Type: mount.TypeVolume, Source: supplied.volume, Target: binDir, ReadOnly: true, VolumeOptions: &mount.VolumeOptions{NoCopy: true}},
		private(stateDir),
		{Type: mount.TypeTmpfs, Target: runDir, TmpfsOptions: &mount.TmpfsOptions{SizeBytes: 1 << 20, Mode: 0o700}},
	}
	if supplied.shared {
		mounts = append(mounts, mount.Mount{Type: mount.TypeBind, Source: filepath.Clean(spec.ListenDir), Target: hostDir, ReadOnly: true})
	}
	if readOnly(spec) {
		mounts = append(append(mounts, private(workspaceOf(spec))), scratch(spec)...)
	}
	host := &container.HostConfig{
		Mounts: mounts, Init: &notInit, ReadonlyRootfs: readOnly(spec), Runtime: spec.Options[optionRuntime],
		NetworkMode:   container.NetworkMode(network),
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled},
		LogConfig:     container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": guestLogBytes, "max-file": "1"}},
		Resources:     p.limits(spec),
	}
	confine(host, spec, image)
	return host
}

func workspaceOf(spec providers.MachineSpec) string {
	if spec.Workspace == "" {
		return defaultWorkspace
	}
	return path.Clean(spec.Workspace)
}

// boot gives a container that does not run its BootConfig and starts it.
func (p *Provider) boot(ctx context.Context, found container.InspectResponse, image imageInfo, spec providers.MachineSpec) error {
	if err := p.configure(ctx, found, image, spec); err != nil {
		return err
	}
	// gofail: var dockerAfterCopy struct{}
	// os.Exit(137)

	release, err := p.turn(ctx)
	if err != nil {
		return err
	}
	defer release()
	// gofail: var dockerBeforeStart struct{}
	// os.Exit(137)

	err = p.start(ctx, found)
	// gofail: var dockerAfterStart struct{}
	// os.Exit(137)

	return err
}

// configure puts the BootConfig where the guest looks for it: into the socket directory where the
// machine has that, which costs nothing, else through the engine, which takes it 60 ms and more.
func (p *Provider) configure(ctx context.Context, found container.InspectResponse, image imageInfo, spec providers.MachineSpec) error {
	shared := listenDirOf(found.Mounts)
	content, err := bootConfig(spec, image, shared != "")
	if err != nil {
		return err
	}
	if shared == "" {
		return p.copyInto(ctx, found.ID, stateDir, bootFile, 0o600, content)
	}
	file := filepath.Join(shared, bootFile)
	if err := os.WriteFile(file+".next", content, 0o600); err != nil {
		return fmt.Errorf("writing the BootConfig of machine %s: %w", spec.MachineID, err)
	}
	if err := os.Rename(file+".next", file); err != nil {
		return fmt.Errorf("writing the BootConfig of machine %s: %w", spec.MachineID, err)
	}
	return nil
}

func (p *Provider) start(ctx context.Context, found container.InspectResponse) error {
	err := p.change(ctx, changeTimeout, "starting container "+found.Name, func(ctx context.Context) error {
		_, err := p.engine.ContainerStart(ctx, found.ID, client.ContainerStartOptions{})
		return err
	})
	if err != nil && answered(err) && strings.Contains(err.Error(), guestFile) {
		p.supply.doubt() // the guest's volume may have been pruned since it was looked at
	}
	return err
}

func bootConfig(spec providers.MachineSpec, image imageInfo, shared bool) ([]byte, error) {
	config := &guestv1.BootConfig{
		MachineId: spec.MachineID, Token: spec.Token, Generation: spec.Generation,
		ListenSocket: guestSocket, SpoolDir: path.Join(stateDir, "spool"), Workspace: workspaceOf(spec),
		Env: image.env, DefaultUser: image.user,
	}
	if shared {
		config.DialSocket = path.Join(hostDir, reverse.SocketName)
	}
	content, err := protojson.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("writing the BootConfig of machine %s: %w", spec.MachineID, err)
	}
	return content, nil
}

// copyInto writes one file, root's, into a directory of a container.
func (p *Provider) copyInto(ctx context.Context, id, dir, file string, mode int64, content []byte) error {
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err := w.WriteHeader(&tar.Header{Name: file, Mode: mode, Size: int64(len(content)), Typeflag: tar.TypeReg})
	if err == nil {
		_, err = w.Write(content)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return fmt.Errorf("packing %s: %w", file, err)
	}
	return p.change(ctx, copyTimeout, fmt.Sprintf("copying %s into container %.12s", file, id), func(ctx context.Context) error {
		_, err := p.engine.CopyToContainer(ctx, id, client.CopyToContainerOptions{DestinationPath: dir, Content: &archive})
		return err
	})
}
