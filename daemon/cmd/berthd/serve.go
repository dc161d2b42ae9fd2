package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/api"
	"github.com/berth-sandbox/berth/daemon/auth"
	"github.com/berth-sandbox/berth/daemon/backup"
	"github.com/berth-sandbox/berth/daemon/events"
	"github.com/berth-sandbox/berth/daemon/fsck"
	"github.com/berth-sandbox/berth/daemon/guestlink"
	"github.com/berth-sandbox/berth/daemon/jobs"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	"github.com/berth-sandbox/berth/daemon/machines"
	"github.com/berth-sandbox/berth/daemon/reconcile"
	"github.com/berth-sandbox/berth/daemon/store"
	"github.com/berth-sandbox/berth/daemon/vault"
	"github.com/berth-sandbox/berth/daemon/workspace"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Tuning.
const (
	drainTimeout     = 10 * time.Second // for calls in progress at SIGTERM
	keepaliveTime    = 30 * time.Second // a client that is gone without a word is noticed
	keepaliveTimeout = 10 * time.Second
	clientPingMin    = 5 * time.Second // a client may ping this often
	streamWindow     = 1 << 20         // bytes in flight a stream: output at full speed, and a bound on what a slow reader costs
)

// serve runs the daemon until the context ends.
func serve(ctx context.Context, c config, stdout, stderr io.Writer) error {
	log := newLog(c, stderr)
	guest, err := findGuest(c.Guest, runtime.GOARCH)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.State, 0o700); err != nil {
		return fmt.Errorf("--state: the state directory %s cannot be made: %w", c.State, err)
	}
	ledger, err := store.Open(filepath.Join(c.State, "ledger.db"), store.Options{Log: log})
	if err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	hub := events.New()
	ledger.OnCommit(hub.Publish)
	d := &daemon{config: c, log: log, ledger: ledger, events: hub, started: time.Now()}
	err = d.run(ctx, guest, stdout)
	return errors.Join(err, ledger.Close())
}

func newLog(c config, stderr io.Writer) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		level = slog.LevelInfo
	}
	options := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(stderr, options))
	}
	return slog.New(slog.NewTextHandler(stderr, options))
}

// daemon is the packages, wired.
type daemon struct {
	config  config
	log     *slog.Logger
	ledger  *store.Store
	events  *events.Hub
	started time.Time

	links     *guestlink.Links
	sandboxes *lifecycle.Service
	jobs      *jobs.Service
	reconcile *reconcile.Service
	fsck      *fsck.Service
	backup    *backup.Service
}

// longestSocket is the longest path of a socket below the directory for a broker's.
const longestSocket = "m_00000000000000000000000000/guest.sock"

// run wires the packages, serves, and takes everything down again in the order in which it depends on
// one another.
func (d *daemon) run(ctx context.Context, guest func(string) (string, error), stdout io.Writer) error {
	if err := d.keyIsThere(); err != nil {
		return err
	}
	keys, err := vault.Open(d.config.State)
	if err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	if err := d.sameKey(ctx, keys); err != nil {
		return err
	}
	sockets := filepath.Join(d.config.Run, d.ledger.Instance()[:8])
	if longest := len(filepath.Join(sockets, longestSocket)); longest > maxSocketPath {
		return fmt.Errorf("--run: machines' sockets in %s would have paths of %d bytes, and the kernel's limit is %d: choose a directory whose path is at most %d bytes long",
			d.config.Run, longest, maxSocketPath, len(d.config.Run)-(longest-maxSocketPath))
	}
	if err := os.MkdirAll(sockets, 0o700); err != nil {
		return fmt.Errorf("--run: the directory for sockets %s cannot be made: %w", sockets, err)
	}
	if err := onlyOurs(d.config.Run); err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	defer func() { _ = os.Remove(sockets) }() // goes when no machine has a socket in it
	listeners, err := listen(ctx, d.config.Listen, d.config.tls)
	if err != nil {
		return err
	}
	defer listeners.close()

	started := startProviders(d.config.Providers, machinery{
		state: d.config.State, brokerID: d.ledger.Instance(), guest: guest, log: d.log, isolation: d.config.Isolation, docker: d.config.Docker,
	})
	if err := d.wire(keys, started, sockets); err != nil {
		return err
	}
	serveErr := d.serve(ctx, keys, listeners, stdout)
	d.sandboxes.Close()
	d.jobs.Close()
	d.links.Close()
	return errors.Join(serveErr, closeProviders(started))
}

// keyIsThere refuses a ledger whose key is missing: a new one would be of no use to it.
func (d *daemon) keyIsThere() error {
	known, err := d.ledger.KeyFingerprint()
	if err != nil || known == "" {
		return err
	}
	path := filepath.Join(d.config.State, vault.KeyName)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("--state: the ledger's key %s is missing: restore the file that belongs to it", path)
	}
	return nil
}

// sameKey refuses a key that is not the one the ledger was made with: its secrets could not be opened.
func (d *daemon) sameKey(ctx context.Context, keys *vault.Vault) error {
	known, err := d.ledger.KeyFingerprint()
	if err != nil {
		return err
	}
	switch known {
	case keys.Fingerprint():
		return nil
	case "":
		return d.ledger.SetKeyFingerprint(ctx, keys.Fingerprint())
	default:
		return fmt.Errorf("--state: the key in %s is not the one that its ledger was made with: restore the file `key` that belongs to it", d.config.State)
	}
}

func (d *daemon) wire(keys *vault.Vault, started []machines.Named, sockets string) error {
	d.links = guestlink.New(guestlink.Options{Build: buildVersion(), Log: d.log, Events: guestlink.Events{
		Up:      func(machineID string, hello *guestv1.HelloResponse) { d.jobs.Follow(machineID, hello) },
		Down:    func(machineID string, _ error) { d.jobs.Unfollow(machineID); d.reconcile.Kick() },
		Dropped: func(machineID string) { d.jobs.Remove(machineID) },
	}})
	d.sandboxes = lifecycle.New(lifecycle.Options{
		Store: d.ledger, Events: d.events, Vault: keys, Links: d.links, Providers: started, SocketDir: sockets, Log: d.log,
	})
	var err error
	d.jobs, err = jobs.New(jobs.Options{
		Store: d.ledger, Events: d.events, Vault: keys, Links: d.links, Sandboxes: d.sandboxes,
		OutputDir: filepath.Join(d.config.State, "output"), Log: d.log, Retention: d.config.Retention,
	})
	if err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	d.sandboxes.SetHooks(lifecycle.Hooks{
		PrepareWorkspace: workspace.Preparer{Links: d.links, Environment: d.jobs.Environment}.Prepare,
		TerminateJobs:    d.jobs.TerminateJobs, LoseJobs: d.jobs.LoseJobs,
	})
	d.reconcile = reconcile.New(reconcile.Options{
		Store: d.ledger, Links: d.links, Sandboxes: d.sandboxes, Jobs: d.jobs, Log: d.log,
		Now: time.Now, Retention: d.config.Retention, MaxReceipts: d.config.Receipts, MaxOutput: uint64(d.config.Output),
	})
	if d.backup, err = backup.New(d.ledger, filepath.Join(d.config.State, "scratch")); err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	d.fsck = fsck.New(fsck.Options{
		Store: d.ledger, Links: d.links, Sandboxes: d.sandboxes, Reconcile: d.reconcile, Jobs: d.jobs, Backup: d.backup,
		Now: time.Now, Retention: d.config.Retention,
	})
	return nil
}

// serve recovers, answers calls until the context ends, and drains.
func (d *daemon) serve(ctx context.Context, keys *vault.Vault, listeners *listeners, stdout io.Writer) error {
	server := api.NewServer(auth.New(d.config.token), d.log,
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: clientPingMin, PermitWithoutStream: true}),
		grpc.InitialWindowSize(streamWindow), grpc.InitialConnWindowSize(2*streamWindow),
	)
	api.Register(server, api.Options{
		Sandboxes: d.sandboxes, Jobs: d.jobs, Reconcile: d.reconcile, Checker: d.fsck, Backups: d.backup, Hasher: keys, HashVersion: vault.HashVersion,
		Info: d.info,
	})
	reflection.Register(server)
	healthy := health.NewServer()
	healthv1.RegisterHealthServer(server, healthy)

	if err := d.reconcile.Start(); err != nil {
		return err
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var working sync.WaitGroup
	defer working.Wait()
	defer stop()
	working.Go(func() { d.reconcile.Run(background) })

	failed := listeners.serve(server.Server)
	if _, err := fmt.Fprintf(stdout, "berthd: ready on %s\n", listeners); err != nil {
		d.log.Warn("cannot say that it is ready", "error", err)
	}
	d.log.Info("serving", "version", buildVersion(), "listen", listeners, "state", d.config.State, "providers", strings.Join(d.config.Providers, ","))
	notify(d.log, "READY=1")
	var err error
	select {
	case <-ctx.Done():
		d.log.Info("stopping: machines and jobs go on")
	case err = <-failed:
	}
	notify(d.log, "STOPPING=1")
	healthy.Shutdown()
	d.jobs.Drain()
	d.sandboxes.Drain()
	stopServer(server.Server)
	return err
}

// stopServer lets calls in progress end, up to a point.
func stopServer(server *grpc.Server) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.GracefulStop()
	}()
	timer := time.NewTimer(drainTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		server.Stop()
		<-done
	}
}

// info is what this process knows of itself.
func (d *daemon) info() *berthv1.GetInfoResponse {
	return &berthv1.GetInfoResponse{
		Version: buildVersion(), InstanceId: d.ledger.Instance(), StartTime: timestamppb.New(d.started),
		Revision: d.ledger.Revision(), SchemaVersion: d.ledger.Schema(), LedgerBytes: uint64(max(d.ledger.SizeBytes(), 0)),
		StateDir: d.config.State, Platform: platform(), RecoveringMachines: uint32(d.links.Silent()),
		ResidentBytes: resident(),
	}
}
