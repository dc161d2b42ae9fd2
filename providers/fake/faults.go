package fake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/providers"
)

// Call is a method of the provider, as a script names it.
type Call string

// The calls.
const (
	CallInfo    Call = "info"
	CallCreate  Call = "create"
	CallInspect Call = "inspect"
	CallList    Call = "list"
	CallDestroy Call = "destroy"
	CallDialer  Call = "dialer"
	CallSuspend Call = "suspend"
	CallResume  Call = "resume"
)

// Kind is how a call goes wrong.
type Kind string

// The kinds. "Acts" is what the call is there for.
const (
	Refuse       Kind = "refuse"       // ErrRefused, nothing was done
	Capacity     Kind = "capacity"     // ErrCapacity, nothing was done
	Unavailable  Kind = "unavailable"  // *UnavailableError, nothing was done
	Fail         Kind = "fail"         // an error of no kind, nothing was done
	Hang         Kind = "hang"         // nothing is done, and no answer comes before the context ends
	LoseReply    Kind = "lose_reply"   // acts, and answers ErrAmbiguous
	HangAfter    Kind = "hang_after"   // acts, and no answer comes before the context ends
	Late         Kind = "late"         // acts, and answers after the delay
	Twice        Kind = "twice"        // Create and Destroy only: acts, answers, and acts again after the delay
	Vanish       Kind = "vanish"       // the machine is killed and removed first; then it acts
	Kill         Kind = "kill"         // acts, and then the guest and all its processes are killed
	Unresponsive Kind = "unresponsive" // acts, and then the guest is stopped by a signal: it says nothing more
	Stale        Kind = "stale"        // List only: returns what the last list did
)

// Fault is a line of the script.
type Fault struct {
	ID          string `json:"id,omitempty"`       // names the fault's count; Script fills it in
	Call        Call   `json:"call"`               // of this method
	Machine     string `json:"machine,omitempty"`  // on this machine; empty: on any
	Kind        Kind   `json:"kind"`               // what goes wrong
	Times       int    `json:"times,omitempty"`    // this often; 0: always
	DelayMillis int64  `json:"delay_ms,omitempty"` // for Late and Twice
	Message     string `json:"message,omitempty"`  // in the error's text
}

const (
	scriptFile = "faults.json"
	callsFile  = "calls"     // a line for each call: its name and the machine
	usedPrefix = "used-"     // of files that hold a byte for each time a fault struck
	listFile   = "list.json" // what the last list that was not stale returned
)

// Harness is a fake provider's directory, seen from a test: also of a provider in another process.
type Harness struct{ dir string }

// At is the harness in a directory, that of Options.Dir.
func At(dir string) Harness { return Harness{dir} }

// Script makes these the faults from the next call on; none takes all away.
func (w Harness) Script(faults ...Fault) error {
	for i := range faults {
		if faults[i].ID == "" {
			faults[i].ID = strconv.FormatInt(time.Now().UnixNano(), 36) + "-" + strconv.Itoa(i)
		}
	}
	data, err := json.Marshal(faults)
	if err == nil {
		err = writeWhole(filepath.Join(w.dir, scriptFile), data)
	}
	if err != nil {
		return fmt.Errorf("writing the script of faults: %w", err)
	}
	return nil
}

// Calls returns how often a method was called, on one machine or, with an empty id, on all.
func (w Harness) Calls(call Call, machineID string) (int, error) {
	data, err := os.ReadFile(filepath.Join(w.dir, callsFile))
	if err != nil && !isAbsent(err) {
		return 0, fmt.Errorf("counting calls: %w", err)
	}
	calls := 0
	for line := range strings.Lines(string(data)) {
		made, on, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if made == string(call) && (machineID == "" || on == machineID) {
			calls++
		}
	}
	return calls, nil
}

// Boots returns how often a machine's guest was started.
func (w Harness) Boots(machineID string) (int, error) {
	data, err := os.ReadFile(filepath.Join(w.dir, machineID, bootsFile))
	if isAbsent(err) {
		return 0, nil
	}
	return bytes.Count(data, []byte("\n")), err
}

// Machines lists the machines that are there, whole or not, of any broker.
func (w Harness) Machines() ([]string, error) {
	entries, err := os.ReadDir(w.dir)
	var ids []string
	for _, entry := range entries {
		if entry.IsDir() {
			ids = append(ids, strings.TrimPrefix(strings.TrimPrefix(entry.Name(), gonePrefix), newPrefix))
		}
	}
	return ids, err
}

// Vanish kills and removes a machine, as somebody behind the broker's back does.
func (w Harness) Vanish(ctx context.Context, machineID string) error {
	m, err := w.machine(machineID)
	if errors.Is(err, providers.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.destroy(ctx, syscall.SIGKILL)
}

// Kill kills every process of a machine; its disk stays.
func (w Harness) Kill(ctx context.Context, machineID string) error {
	m, err := w.machine(machineID)
	if err != nil {
		return err
	}
	if err := m.signalGuest(syscall.SIGKILL); err != nil {
		return err
	}
	if err := m.killMembers(ctx); err != nil {
		return err
	}
	return await(ctx, killTimeout, "its lock", func() (bool, error) {
		running, err := m.running()
		return !running, err
	})
}

// Freeze stops a machine's guest by a signal, so that it says nothing more; its jobs go on.
func (w Harness) Freeze(machineID string) error { return w.signal(machineID, syscall.SIGSTOP) }

// Thaw undoes Freeze.
func (w Harness) Thaw(machineID string) error { return w.signal(machineID, syscall.SIGCONT) }

func (w Harness) signal(machineID string, signal syscall.Signal) error {
	m, err := w.machine(machineID)
	if err != nil {
		return err
	}
	return m.signalGuest(signal)
}

// Close removes every machine; for the end of a test.
func (w Harness) Close(ctx context.Context) error {
	ids, err := w.Machines()
	for _, id := range ids {
		err = errors.Join(err, w.Vanish(ctx, id))
	}
	return err
}

// faults reads the script.
func (w Harness) faults() ([]Fault, error) {
	data, err := os.ReadFile(filepath.Join(w.dir, scriptFile))
	if isAbsent(err) {
		return nil, nil
	}
	var faults []Fault
	if err == nil {
		err = json.Unmarshal(data, &faults)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the script of faults: %w", err)
	}
	return faults, nil
}

// strikes counts a fault and reports whether it strikes once more.
func (w Harness) strikes(fault Fault) (bool, error) {
	if fault.Times == 0 {
		return true, nil
	}
	path := filepath.Join(w.dir, usedPrefix+fault.ID)
	if info, err := os.Stat(path); err == nil && info.Size() >= int64(fault.Times) {
		return false, nil
	}
	return true, appendLine(path, "")
}

// fault notes a call and returns what is to go wrong with it, if anything.
func (p *Provider) fault(call Call, machineID string) (Fault, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := appendLine(filepath.Join(p.harness.dir, callsFile), string(call)+" "+machineID); err != nil {
		return Fault{}, err
	}
	faults, err := p.harness.faults()
	if err != nil {
		return Fault{}, err
	}
	for _, fault := range faults {
		if fault.Call != call || fault.Machine != "" && fault.Machine != machineID {
			continue
		}
		strikes, err := p.harness.strikes(fault)
		if err != nil {
			return Fault{}, err
		}
		if strikes {
			p.log.Info("a fault on purpose", "call", call, "machine", machineID, "kind", fault.Kind)
			return fault, nil
		}
	}
	return Fault{}, nil
}

// errStale tells List to answer as before.
var errStale = errors.New("stale")

// inject makes a call as the script has it.
func (p *Provider) inject(ctx context.Context, call Call, machineID string, act func(context.Context) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	fault, err := p.fault(call, machineID)
	if err != nil {
		return err
	}
	said := fmt.Errorf("%s %s, as the script has it %s", call, machineID, fault.Message)
	delay := time.Duration(fault.DelayMillis) * time.Millisecond
	switch fault.Kind {
	case "":
		return act(ctx)
	case Refuse:
		return fmt.Errorf("%w: %w", said, providers.ErrRefused)
	case Capacity:
		return fmt.Errorf("%w: %w", said, providers.ErrCapacity)
	case Unavailable:
		return &providers.UnavailableError{Cause: said}
	case Fail:
		return said
	case Stale:
		return errStale
	case Hang:
		<-ctx.Done()
		return ctx.Err()
	case Vanish:
		if err := p.harness.Vanish(ctx, machineID); err != nil {
			return err
		}
		return act(ctx)
	}
	if err := act(ctx); err != nil {
		return err
	}
	switch fault.Kind {
	case LoseReply:
		return fmt.Errorf("%w: %w", said, providers.ErrAmbiguous)
	case HangAfter:
		<-ctx.Done()
		return ctx.Err()
	case Late:
		return pause(ctx, delay)
	case Twice:
		if call == CallCreate || call == CallDestroy {
			p.again(delay, act)
		}
		return nil
	case Kill:
		return p.harness.Kill(ctx, machineID)
	case Unresponsive:
		return p.harness.Freeze(machineID)
	default:
		return fmt.Errorf("the script has a fault of no known kind %q", fault.Kind)
	}
}

// again does once more, after the reply and a delay, what a call did.
func (p *Provider) again(delay time.Duration, act func(context.Context) error) {
	p.work.Go(func() {
		if pause(p.ctx, delay) != nil {
			return
		}
		if err := act(p.ctx); err != nil {
			p.log.Info("what was done twice on purpose failed the second time", "error", err)
		}
	})
}

func pause(ctx context.Context, wait time.Duration) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w Harness) rememberList(machines []providers.Machine) error {
	data, err := json.Marshal(machines)
	if err == nil {
		err = writeWhole(filepath.Join(w.dir, listFile), data)
	}
	return err
}

func (w Harness) lastList() ([]providers.Machine, error) {
	data, err := os.ReadFile(filepath.Join(w.dir, listFile))
	if isAbsent(err) {
		return nil, nil
	}
	var machines []providers.Machine
	if err == nil {
		err = json.Unmarshal(data, &machines)
	}
	return machines, err
}
