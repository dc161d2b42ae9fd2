// Package guest is the program that runs in every machine: it serves berth.guest.v1 to the broker,
// on connections that it dials out and on a socket of its own. It wires the packages below it together
// and translates between gRPC and them. It never trusts a connection before both sides have proved
// that they know the machine's token, and never logs a command, its environment or its output.
//
//	reap       owns every exit status
//	launch     turns a command into a process
//	contain    tracks the processes of a job
//	stdio      pipes, terminals and stdin
//	spool      keeps output
//	record     the guest's directory on disk
//	clock      timers and deadlines
//	signals    which signals the guest obeys
//	refusal    errors with a kind
//	supervise  runs jobs on top of these
package guest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	"github.com/berth-sandbox/berth/providers/guest/contain"
	"github.com/berth-sandbox/berth/providers/guest/reap"
	"github.com/berth-sandbox/berth/providers/guest/record"
	"github.com/berth-sandbox/berth/providers/guest/signals"
	"github.com/berth-sandbox/berth/providers/guest/supervise"
)

const (
	// keepaliveTime and keepaliveTimeout detect an unresponsive broker within 15 s; nothing else does.
	keepaliveTime    = 10 * time.Second
	keepaliveTimeout = 5 * time.Second
	// keepaliveMin is how often the broker may ping.
	keepaliveMin = 5 * time.Second
	// maxMessageBytes bounds a message, in bytes: 4 MiB of data and some overhead.
	maxMessageBytes = 4<<20 + 64<<10
	// memoryLimit is the Go runtime's soft limit, in bytes: beyond it garbage is collected at once, and not
	// only when it is as much as what is in use.
	memoryLimit = 14 << 20
	// partingTime bounds how long the last responses may take to be sent when the guest ends.
	partingTime = 250 * time.Millisecond
)

// Options change how a guest is served. The zero value is right.
type Options struct {
	Build            string        // what this build is called; default: "unknown"
	Log              *slog.Logger  // default: slog.Default
	KeepaliveTime    time.Duration // default 10 s
	KeepaliveTimeout time.Duration // default 5 s
	MaxQuiesce       time.Duration // of running time for which deadlines may be paused; default 60 s
}

// Serve runs a guest until ctx ends; then it ends every job with its whole tree and returns nil.
// An error says why it cannot run. Nothing else in its process may start or wait for children.
func Serve(ctx context.Context, config *guestv1.BootConfig, options Options) error {
	options = options.withDefaults()
	if err := validate(config); err != nil {
		return err
	}
	if err := prepareProcess(config); err != nil {
		return err
	}
	debug.SetMemoryLimit(memoryLimit)
	reserveThreads()
	resetInherited(config, options.Log)
	//mutation:signals-of-jobs if false {
	if os.Getpid() == 1 {
		// A job must not end its machine by mistake, with `kill $PPID` or `pkill`.
		if err := signals.ObeyOutside(); err != nil {
			return fmt.Errorf("keep signals of jobs from the guest: %w", err)
		}
	}
	if err := makeWorkspace(config.GetWorkspace(), config.GetDefaultUser()); err != nil {
		// Commands that need it report that it is missing, and others can repair it.
		options.Log.Warn("the workspace is not usable", "workspace", config.GetWorkspace(), "error", err)
	}
	bootID, err := newBootID()
	if err != nil {
		return err
	}
	records, err := record.Open(config.GetSpoolDir(), config.GetMachineId(), config.GetGeneration(), bootID)
	if err != nil {
		return err
	}
	// The probe waits for a child itself, so it comes before the reaper.
	tracker := contain.Probe(config.GetCgroupDir(), config.GetMachineId(), options.Log)
	// A job of an earlier boot is lost, so none of its processes may keep running.
	if left := tracker.Clear(ctx); len(left) > 0 {
		options.Log.Warn("processes of an earlier boot cannot be killed", "pids", left)
	}
	reaper := reap.Start()
	defer func() {
		tracker.Close()
		reaper.Close()
		if err := records.Close(); err != nil {
			options.Log.Warn("the spool did not close", "error", err)
		}
	}()
	supervisor, err := supervise.New(supervise.Config{
		MachineID: config.GetMachineId(), Generation: config.GetGeneration(), BootID: bootID,
		Workspace: config.GetWorkspace(), User: config.GetDefaultUser(), Env: config.GetEnv(), MaxQuiesce: options.MaxQuiesce,
		Records: records, Tracker: tracker, Reaper: reaper, Log: options.Log,
	})
	if err != nil {
		return err
	}
	options.Log.Info("the guest is up", "machine", config.GetMachineId(), "boot", bootID, "build", options.Build, "containment", tracker.Kind().String())
	s := &service{supervisor: supervisor}
	s.identity.Store(&identity{
		machineID: config.GetMachineId(), token: config.GetToken(), generation: config.GetGeneration(),
		bootID: bootID, workspace: config.GetWorkspace(), containment: tracker.Kind(), build: options.Build,
	})
	err = s.serve(ctx, config, options)
	return errors.Join(err, supervisor.Close())
}

func (o Options) withDefaults() Options {
	if o.Build == "" {
		o.Build = "unknown"
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.KeepaliveTime == 0 {
		o.KeepaliveTime = keepaliveTime
	}
	if o.KeepaliveTimeout == 0 {
		o.KeepaliveTimeout = keepaliveTimeout
	}
	return o
}

// serve answers calls until ctx ends, and then ends the jobs.
func (s *service) serve(ctx context.Context, config *guestv1.BootConfig, options Options) error {
	server := grpc.NewServer(
		grpc.Creds(connectionState{}),
		grpc.UnaryInterceptor(authenticateUnary),
		grpc.StreamInterceptor(authenticateStream),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepaliveMin, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: options.KeepaliveTime, Timeout: options.KeepaliveTimeout}),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxRecvMsgSize(maxMessageBytes),
		grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.WaitForHandlers(true),
	)
	guestv1.RegisterGuestServiceServer(server, s)

	var serving sync.WaitGroup
	dialling, stopDialling := context.WithCancel(ctx)
	defer serving.Wait()
	defer stopDialling()
	ended := make(chan error, 2)
	answer := func(l net.Listener) { serving.Go(func() { ended <- server.Serve(l) }) }
	if config.GetListenSocket() != "" {
		listener, err := listen(ctx, config.GetListenSocket())
		if err != nil {
			return err
		}
		answer(listener)
	}
	if config.GetDialSocket() != "" {
		reverse := newReverseListener(config.GetDialSocket(), options.Log)
		serving.Go(func() { reverse.dial(dialling) })
		answer(reverse)
	}
	trimProgram()
	var failure error
	select {
	case <-ctx.Done():
	case err := <-ended:
		failure = fmt.Errorf("serve the broker: %w", err)
	}
	stopDialling()
	options.Log.Info("the guest ends its jobs")
	s.supervisor.Stop(context.WithoutCancel(ctx))
	// Calls that wait for a job are being answered now; others are cut off.
	parting := time.AfterFunc(partingTime, server.Stop)
	defer parting.Stop()
	server.GracefulStop()
	return failure
}

func validate(c *guestv1.BootConfig) error {
	switch {
	case c.GetMachineId() == "":
		return errors.New("boot config: machine_id is missing")
	case len(c.GetToken()) == 0:
		return errors.New("boot config: token is missing; without one any process could send commands")
	case c.GetDialSocket() == "" && c.GetListenSocket() == "":
		return errors.New("boot config: neither dial_socket nor listen_socket is given, so this guest could not be reached")
	case !filepath.IsAbs(c.GetSpoolDir()):
		return fmt.Errorf("boot config: spool_dir %q is no absolute path", c.GetSpoolDir())
	case !filepath.IsAbs(c.GetWorkspace()):
		return fmt.Errorf("boot config: workspace %q is no absolute path", c.GetWorkspace())
	}
	return nil
}

// Probe tries what a guest does as PID 1 of fresh namespaces and returns why it cannot.
func Probe() error {
	if os.Getpid() != 1 {
		return errors.New("this is not the first process of its namespace, whose /proc must stay as it is")
	}
	return mountProc()
}

// mountProc mounts the machine's own /proc. The provider gives an unprivileged guest the capability for it
// as an ambient one, which every job would inherit; it is dropped afterwards.
func mountProc() error {
	// Unmounts on the host still propagate: a machine must not keep a disk of the host busy.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep mounts to this machine: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	return dropAmbient()
}

// dropAmbient keeps the guest's capabilities from its jobs, on every thread that may fork one.
func dropAmbient() error {
	_, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0)
	if errors.Is(errno, syscall.ENOTSUP) {
		// A cgo build, which only tests are, cannot reach every thread, so there must be nothing to drop.
		set, err := unix.PrctlRetInt(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_IS_SET, unix.CAP_SYS_ADMIN, 0, 0)
		if err == nil && set == 0 {
			return nil
		}
	}
	if errno != 0 && !errors.Is(errno, syscall.EINVAL) { // such a kernel has nothing to drop
		return fmt.Errorf("keep capabilities from jobs: %w", errno)
	}
	return nil
}

// prepareProcess sets up the guest's process.
func prepareProcess(c *guestv1.BootConfig) error {
	if c.GetMountProc() {
		if err := mountProc(); err != nil {
			return err
		}
	}
	if os.Getpid() != 1 {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become the parent of orphans: %w", err)
		}
	}
	return nil
}

func newBootID() (string, error) {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		return "", fmt.Errorf("make a boot id: %w", err)
	}
	return hex.EncodeToString(id[:]), nil
}

// platform is the operating system and architecture, as "linux/amd64".
const platform = runtime.GOOS + "/" + runtime.GOARCH
