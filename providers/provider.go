// Package providers is the contract between the broker and whatever boots its machines. A provider
// makes machines with the guest in them, finds them again, destroys them, and hands back a byte
// stream to the guest; it never runs a command. The package holds no provider and no behaviour.
package providers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"
)

// Provider boots machines. Every method may be called concurrently, must honour its context, and
// must be right after a crash of the broker at any instruction: the machine's id, chosen by the
// broker beforehand, is all that a later call has.
type Provider interface {
	// Info says what this provider is and promises, measured afresh.
	Info(ctx context.Context) (Info, error)
	// Create makes the machine spec.MachineID run with the guest in it: absent, it is made and
	// booted; half-made or stopped, it is completed or booted again on its own disk; running, its
	// handle is returned; suspended, it goes on. A Create that fails or is killed leaves a stopped machine
	// stopped. Errors: ErrRefused, ErrCapacity, *UnavailableError, and ErrAmbiguous when
	// it may or may not have happened.
	Create(ctx context.Context, spec MachineSpec) (Handle, error)
	// Inspect finds a machine by its id, half-made ones included. ErrNotFound is a real answer: the
	// provider was asked and does not have it.
	Inspect(ctx context.Context, id string) (Machine, error)
	// List returns every machine that bears this broker's label, half-made ones included.
	List(ctx context.Context) ([]Machine, error)
	// Destroy removes the machine with all its processes and files. Absent is success. When it
	// returns nil, nothing of the machine is left.
	Destroy(ctx context.Context, machine Machine) error
	// Dialer returns a dialer for the machine's guest. The broker closes it.
	Dialer(ctx context.Context, machine Machine) (Dialer, error)
}

// Dialer opens byte streams to one machine's guest. Streams die and are dialled again; there is no
// resume of a stream.
type Dialer interface {
	// Dial opens a stream. The context bounds the dialling only. Concurrent dials are allowed.
	Dial(ctx context.Context) (net.Conn, error)
	// Close ends the dialer, not the streams that it opened.
	Close() error
}

// MachineSpec is what a machine is made from.
type MachineSpec struct {
	MachineID  string // m_…, unique for all time
	BrokerID   string // the label: the ledger's instance id
	Generation uint64 // told to the guest
	Token      []byte // told to the guest through its BootConfig, nowhere else
	Image      string // empty: the provider's default
	Workspace  string // absolute path in the machine; empty: the provider's default
	Resources  Resources
	Egress     Egress
	Options    map[string]string // those of Info.Options
	ListenDir  string            // a short directory for the machine's sockets, shared with the machine where it can be; the provider makes and removes it
	// FromSnapshot is a Snapshotter's snapshot to make the machine from, in the place of Image; empty:
	// none. One that is not there is ErrNoImage.
	FromSnapshot string
}

// The least that a machine may be limited to: its guest grows to 24 MiB with buffers that are full, and has some
// 17 threads. With less it dies, or there is no room for a command.
const (
	MinMemoryBytes = 32 << 20
	MinPIDs        = 32
)

// Resources are limits; zero is the provider's default.
type Resources struct {
	CPUs        float64
	MemoryBytes uint64
	DiskBytes   uint64
	PIDs        uint64
}

// Egress is what a machine may reach.
type Egress struct {
	Mode       EgressMode
	AllowHosts []string
}

// EgressMode is one of the three policies.
type EgressMode int

// The policies.
const (
	EgressOpen EgressMode = iota
	EgressNone
	EgressAllowList
)

// Handle is what a provider wants to remember of a machine: opaque to the broker, stored in its
// ledger. Version is the layout of Bytes.
type Handle struct {
	Version uint32
	Bytes   []byte
}

// Machine is a machine as a provider finds it.
type Machine struct {
	ID      string
	State   MachineState
	Handle  Handle
	Created time.Time // zero when not known
	Note    string    // what is known of why it does not run, one line for people; empty otherwise
	// ListenDir is MachineSpec.ListenDir; the broker fills it in before Dialer and Destroy.
	ListenDir string
}

// MachineState is what a provider finds a machine in.
type MachineState int

// The states of a machine.
const (
	MachinePartial   MachineState = iota // half-made: Create completes it, Destroy removes it
	MachineRunning                       // its guest runs
	MachineSuspended                     // frozen, its memory is kept
	MachineStopped                       // its processes are gone, its disk is there
)

// String returns the state's name.
func (s MachineState) String() string {
	return [...]string{"partial", "running", "suspended", "stopped"}[s]
}

// Isolation is what lies between a machine and the host.
type Isolation int

// The isolations, weakest first.
const (
	IsolationNone Isolation = iota + 1
	IsolationNamespace
	IsolationContainer
	IsolationUserKernel
	IsolationMicroVM
)

// Info is what a provider is and promises.
type Info struct {
	Name         string
	Isolation    Isolation
	Healthy      bool
	Message      string // why it is not healthy and what to do, or a remark about this host
	Capabilities []Capability
	Options      []Option // the provider_options it takes
}

// Capability is a promise: a declared one that fails is a defect, an undeclared one is refused
// before anything is created.
type Capability string

// The capabilities that a field of a sandbox's spec or a call asks for.
const (
	CapImage           Capability = "image"               // spec.image
	CapWorkspacePath   Capability = "workspace.path"      // spec.workspace.path
	CapCPUs            Capability = "resources.cpus"      // spec.resources.cpus
	CapMemory          Capability = "resources.memory"    // spec.resources.memory_bytes
	CapDisk            Capability = "resources.disk"      // spec.resources.disk_bytes
	CapPIDs            Capability = "resources.pids"      // spec.resources.pids
	CapEgressNone      Capability = "egress.none"         // spec.egress NONE
	CapEgressAllowList Capability = "egress.allow_list"   // spec.egress ALLOW_LIST
	CapRestart         Capability = "restart"             // Create boots a stopped machine again
	CapSuspend         Capability = "suspend"             // Suspender
	CapSnapshot        Capability = "snapshot.filesystem" // Snapshotter
	CapMemorySnapshot  Capability = "snapshot.memory"     // MemorySnapshotter
	CapFork            Capability = "fork"                // Forker
	CapNetworkIsolated Capability = "network.isolated"    // nothing asks for it: machines cannot reach one another
)

// Describe returns a line for people about each capability.
func (c Capability) Describe() string {
	return map[Capability]string{
		CapImage:           "machines are made from a named image",
		CapWorkspacePath:   "the workspace's path can be chosen",
		CapCPUs:            "CPUs can be limited",
		CapMemory:          "memory can be limited",
		CapDisk:            "disk can be limited",
		CapPIDs:            "processes can be limited",
		CapEgressNone:      "a machine can be cut off from the network",
		CapEgressAllowList: "a machine can be held to a list of hosts",
		CapRestart:         "a stopped machine can be booted again on its own disk",
		CapSuspend:         "a machine can be frozen and go on later",
		CapSnapshot:        "a machine's file system can be snapshotted",
		CapMemorySnapshot:  "a machine's memory can be snapshotted",
		CapFork:            "a machine can be forked",
		CapNetworkIsolated: "machines cannot reach one another over the network",
	}[c]
}

// Option is one provider_options key.
type Option struct {
	Name        string
	Description string
}

// Errors that the broker tells apart with errors.Is. Anything else counts as ErrAmbiguous.
var (
	ErrNotFound  = errors.New("no such machine")                      // the provider was asked and does not have it
	ErrRefused   = errors.New("refused by the provider")              // definite: nothing was made, a retry won't help
	ErrCapacity  = errors.New("the provider has no capacity left")    // definite: nothing was made, a retry may help later
	ErrAmbiguous = errors.New("may or may not have happened")         // probe before anything else
	ErrNoImage   = fmt.Errorf("no such image: %w", ErrRefused)        // a kind of ErrRefused
	ErrNoTool    = fmt.Errorf("a program is missing: %w", ErrRefused) // a kind of ErrRefused
)

// UnavailableError says that the provider does not answer now. Nothing was booted; what an earlier step made
// is found half-made, and a later Create completes it.
type UnavailableError struct {
	RetryAfter time.Duration // zero: not known
	Cause      error
}

// Error returns the cause's text.
func (e *UnavailableError) Error() string { return "the provider is unavailable: " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Cause }

// Suspender freezes machines; it goes with CapSuspend. Both calls are idempotent. Where a machine's
// options ask for it, suspending may mean stopping: Inspect then says MachineStopped, Resume refuses
// with ErrRefused, and Create boots the machine on its disk, in a new generation.
type Suspender interface {
	Suspend(ctx context.Context, machine Machine) error
	Resume(ctx context.Context, machine Machine) error
}

// EgressCutter cuts machines off from the network; it goes with CapEgressNone. A machine whose egress
// is EgressNone is created with the network that its setup needs (a clone), and is cut off before it
// is anybody else's.
type EgressCutter interface {
	// CutEgress takes every network from a running machine, for good: a machine that was cut off stays
	// so when it is booted again. Idempotent. When it fails, the machine must not be used.
	CutEgress(ctx context.Context, machine Machine) error
}

// Snapshotter copies machines' file systems; it goes with CapSnapshot. Both calls are idempotent. A
// snapshot holds neither the machine's token nor its spool, and outlives its machine.
type Snapshotter interface {
	// Snapshot makes a snapshot under an id that the broker chose, snap_… or the like, letters, digits,
	// _ and -. One that is there already is success.
	Snapshot(ctx context.Context, machine Machine, snapshotID string) error
	// RemoveSnapshot removes it. Absent is success. Machines that were made from it live on.
	RemoveSnapshot(ctx context.Context, snapshotID string) error
}
