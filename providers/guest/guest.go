// Package guest is the program that runs in every machine: it serves berth.guest.v1 to the broker,
// on connections that it dials out and on a socket of its own. It wires the rooms below it together
// and translates between gRPC and them. It never trusts a connection before both sides have proved
// that they know the machine's token, and never logs what a command is, says or is given.
//
//	reap       owns every exit status
//	launch     makes a command a process
//	contain    keeps the processes of a job together
//	spool      keeps output
//	record     the guest's directory on disk
//	supervise  runs jobs by means of these
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
	"github.com/berth-sandbox/berth/providers/guest/supervise"
)

const (
	// keepaliveTime and keepaliveTimeout find a black hole within 15 s; nothing else does.
	keepaliveTime    = 10 * time.Second
	keepaliveTimeout = 5 * time.Second
	// keepaliveMin is how often the broker may ping.
	keepaliveMin = 5 * time.Second
	// messageMost bounds a message, in bytes: 4 MiB of data, and what surrounds them.
	messageMost = 4<<20 + 64<<10
	// partingTime bounds how long the last answers may take to leave when the guest ends.
	partingTime = 250 * time.Millisecond
)

// Options change how a guest is served. The zero value is right.
type Options struct {
	Build            string        // what this build is called; default: "unknown"
	Log              *slog.Logger  // default: slog.Default
	KeepaliveTime    time.Duration // default 10 s
	KeepaliveTimeout time.Duration // default 5 s
	QuiesceMost      time.Duration // of running time without counting for jobs; default 60 s
}

// Serve runs a guest until ctx ends; then it ends every job with its whole tree and returns nil.
// An error says what keeps it from running. It must be the only part of its process that starts or
// waits for children.
func Serve(ctx context.Context, config *guestv1.BootConfig, options Options) error {
	options = options.withDefaults()
	if err := validate(config); err != nil {
		return err
	}
	if err := prepareProcess(config); err != nil {
		return err
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
	means := contain.Probe(config.GetCgroupDir(), config.GetMachineId(), options.Log)
	// A job of an earlier boot is lost, so nothing of it may run on.
	if left := means.Clear(ctx); len(left) > 0 {
		options.Log.Warn("processes of an earlier boot would not go", "pids", left)
	}
	reaper := reap.Start()
	defer func() {
		means.Close()
		reaper.Close()
		if err := records.Close(); err != nil {
			options.Log.Warn("the spool did not close", "error", err)
		}
	}()
	supervisor, err := supervise.New(supervise.Config{
		MachineID: config.GetMachineId(), Generation: config.GetGeneration(), BootID: bootID,
		Workspace: config.GetWorkspace(), User: config.GetDefaultUser(), Env: config.GetEnv(), QuiesceMost: options.QuiesceMost,
		Records: records, Means: means, Reaper: reaper, Log: options.Log,
	})
	if err != nil {
		return err
	}
	options.Log.Info("the guest is up", "machine", config.GetMachineId(), "boot", bootID, "build", options.Build, "containment", means.Kind().String())
	s := &service{supervisor: supervisor}
	s.identity.Store(&identity{
		machineID: config.GetMachineId(), token: config.GetToken(), generation: config.GetGeneration(),
		bootID: bootID, workspace: config.GetWorkspace(), containment: means.Kind(), build: options.Build,
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
		grpc.MaxRecvMsgSize(messageMost),
		grpc.MaxSendMsgSize(messageMost),
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
	// Whoever waited for a job is being answered now; who waits for other things is cut off.
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
		return errors.New("boot config: token is missing; without one anybody could give orders")
	case c.GetDialSocket() == "" && c.GetListenSocket() == "":
		return errors.New("boot config: neither dial_socket nor listen_socket is given, so nobody could reach this guest")
	case !filepath.IsAbs(c.GetSpoolDir()):
		return fmt.Errorf("boot config: spool_dir %q is no absolute path", c.GetSpoolDir())
	case !filepath.IsAbs(c.GetWorkspace()):
		return fmt.Errorf("boot config: workspace %q is no absolute path", c.GetWorkspace())
	}
	return nil
}

// Probe tries what a guest does that is PID 1 of fresh namespaces, and says why it cannot.
func Probe() error {
	if os.Getpid() != 1 {
		return errors.New("this is not the first process of its namespace, whose /proc must stay as it is")
	}
	return mountProc()
}

// mountProc mounts the machine's own /proc. A guest of an ordinary user has the capability for it from
// the provider, in a way that would give it to every job as well; after this none gets it.
func mountProc() error {
	// The host's unmounts still reach here: a machine must not keep a disk of the host's busy.
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
		// A build with C, which only tests are: there is no way to reach every thread, so there must be
		// nothing to drop.
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

// prepareProcess makes the guest what the machine needs it to be.
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
	return makeWorkspace(c.GetWorkspace(), c.GetDefaultUser())
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
