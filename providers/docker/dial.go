package docker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/bridge"
	"github.com/berth-sandbox/berth/providers/reverse"
)

// Dialer returns a dialer for the machine's guest: it listens where the guest dials out, which is where
// its container was made to, and falls back on the bridge. Errors: ErrNotFound; ErrRefused for a machine
// that is being removed, and as reverse.Listen has it.
func (p *Provider) Dialer(ctx context.Context, machine providers.Machine) (providers.Dialer, error) {
	found, err := p.seek(ctx, machine.ID)
	if err != nil {
		return nil, err
	}
	if goingAway(found) {
		return nil, fmt.Errorf("machine %s: its container is %s: %w", machine.ID, found.State.Status, providers.ErrRefused)
	}
	d := &dialer{provider: p, container: found.ID, machine: machine.ID}
	if dir := listenDirOf(found.Mounts); dir != "" && !p.bridge {
		if d.out, err = reverse.Listen(dir, d.guestHostProcess); err != nil {
			return nil, fmt.Errorf("listening for machine %s: %w", machine.ID, err)
		}
	}
	return d, nil
}

// dialer dials one machine's guest.
type dialer struct {
	provider  *Provider
	container string
	machine   string
	out       *reverse.Dialer // nil where no file system is shared
	unseen    atomic.Bool     // its guest's process cannot be seen from here
	bridged   atomic.Bool     // the last stream went through the bridge though the guest may dial out
}

// Dial waits for the guest to dial out. Where it cannot, or does not in time, the bridge is asked: an
// engine that shows our files need not let a socket through, as one in a virtual machine does not.
func (d *dialer) Dial(ctx context.Context) (net.Conn, error) {
	if d.out == nil {
		return d.provider.dialBridge(ctx, d.container)
	}
	timeout := dialOutTime
	if d.bridged.Load() {
		timeout = dialOutAgain
	}
	conn, err := d.dialOut(ctx, timeout)
	if err == nil || ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
		d.bridged.Store(d.bridged.Load() && err != nil)
		return conn, err
	}
	conn, bridgeErr := d.provider.dialBridge(ctx, d.container)
	if bridgeErr != nil {
		return nil, fmt.Errorf("%w; %w", err, bridgeErr)
	}
	if !d.bridged.Swap(true) {
		d.provider.log.Warn("a guest does not dial out, its streams go through the engine", "machine", d.machine)
	}
	return conn, nil
}

// guestHostProcess returns the container's first process, which is the guest; 0 where the engine's process ids
// are not ours, as with a runtime that has a kernel of its own: what bears that id here is no guest then.
func (d *dialer) guestHostProcess() (int, error) {
	found, err := d.provider.inspect(context.Background(), d.container) // bounded by the provider's own timeout
	if err != nil {
		return 0, err
	}
	pid := found.State.Pid
	if pid == 0 {
		return 0, fmt.Errorf("machine %s: its container does not run", d.machine)
	}
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.HasPrefix(command, []byte(guestProgram+"\x00")) {
		if !d.unseen.Swap(true) {
			d.provider.log.Warn("the engine's processes cannot be seen from here, so a guest is known by its proofs alone", "machine", d.machine)
		}
		return 0, nil
	}
	return pid, nil
}

func (d *dialer) dialOut(ctx context.Context, timeout time.Duration) (net.Conn, error) {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return d.out.Dial(limited)
}

// Close ends the dialer, not the streams that it opened.
func (d *dialer) Close() error {
	if d.out == nil {
		return nil
	}
	return d.out.Close()
}

// dialBridge runs the bridge in the container and returns its stream.
func (p *Provider) dialBridge(ctx context.Context, container string) (net.Conn, error) {
	nonce, err := bridge.Nonce()
	if err != nil {
		return nil, err
	}
	var attached client.ExecAttachResult
	err = p.change(ctx, readTimeout, fmt.Sprintf("running the bridge in container %.12s", container), func(ctx context.Context) error {
		made, err := p.engine.ExecCreate(ctx, container, client.ExecCreateOptions{
			User: "0", AttachStdin: true, AttachStdout: true, AttachStderr: true, WorkingDir: "/",
			Cmd: bridge.Command(guestProgram, guestSocket, guestProcess, nonce),
		})
		if err != nil {
			return err
		}
		attached, err = p.engine.ExecAttach(ctx, made.ID, client.ExecAttachOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	from := &output{from: attached.Reader}
	return bridge.Open(ctx, bridge.Stream{
		Output: from, Input: attached.Conn, Said: from.said, Close: attached.Conn.Close,
	}, nonce)
}

// The engine sends a process's two streams in frames: the stream, three zeros, the length, the bytes.
const (
	frameHeader   = 8
	frameOutput   = 1
	frameErrors   = 2
	maxErrorBytes = 2 << 10 // kept of standard error, in bytes
)

// output reads a process's standard output out of the engine's frames and keeps the beginning of its
// standard error.
type output struct {
	from   *bufio.Reader
	left   uint32 // of the frame of standard output that is being read
	mu     sync.Mutex
	errors []byte
}

// Read returns bytes of standard output.
func (o *output) Read(p []byte) (int, error) {
	for o.left == 0 {
		if err := o.next(); err != nil {
			return 0, err
		}
	}
	n, err := o.from.Read(p[:min(len(p), int(o.left))])
	o.left -= uint32(n)
	return n, err
}

// next reads a frame's header, and a frame that is not standard output's whole.
func (o *output) next() error {
	var header [frameHeader]byte
	if _, err := io.ReadFull(o.from, header[:]); err != nil {
		return err
	}
	length := binary.BigEndian.Uint32(header[4:])
	if header[0] == frameOutput {
		o.left = length
		return nil
	}
	if header[0] > frameErrors+1 || header[1] != 0 || header[2] != 0 || header[3] != 0 {
		return errors.New("the engine sent what is no frame")
	}
	text, err := io.ReadAll(io.LimitReader(o.from, int64(min(length, maxErrorBytes))))
	o.mu.Lock()
	o.errors = append(o.errors, text[:min(len(text), maxErrorBytes-len(o.errors))]...)
	o.mu.Unlock()
	if err == nil {
		_, err = o.from.Discard(int(length) - len(text))
	}
	return err
}

// said returns the beginning of standard error.
func (o *output) said() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.errors)
}
