package command

import (
	"fmt"
	"math"
	"sync"

	"golang.org/x/term"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// The size of a terminal that nobody sits at, in character cells: what programs expect of one.
const (
	defaultCols = 80
	defaultRows = 24
)

// rawTerminal remembers how the terminal was, to put it back on every way out.
type rawTerminal struct {
	mu  sync.Mutex
	was *term.State // nil: it is as it was
}

// MakeRaw gives every key to the command; without a terminal at standard input it does nothing.
func (p *Program) MakeRaw() error {
	if !p.StdinTerminal || p.Terminal == nil {
		return nil
	}
	p.raw.mu.Lock()
	defer p.raw.mu.Unlock()
	was, err := term.MakeRaw(int(p.Terminal.Fd()))
	if err != nil {
		return fmt.Errorf("making the terminal raw: %w", err)
	}
	p.raw.was = was
	return nil
}

// makeRawAgain is for a shell that took the terminal back while this process was stopped.
func (p *Program) makeRawAgain() {
	p.raw.mu.Lock()
	defer p.raw.mu.Unlock()
	if p.raw.was != nil {
		_, _ = term.MakeRaw(int(p.Terminal.Fd())) // a terminal that is gone ends the attachment by itself
	}
}

// RestoreTerminal puts the terminal back; a second time does nothing. Nothing can be done about a
// terminal that is gone.
func (p *Program) RestoreTerminal() {
	p.raw.mu.Lock()
	defer p.raw.mu.Unlock()
	if p.raw.was != nil {
		_ = term.Restore(int(p.Terminal.Fd()), p.raw.was)
		p.raw.was = nil
	}
}

// lineEnd is what begins a new line at its first column.
func (p *Program) lineEnd() string {
	p.raw.mu.Lock()
	defer p.raw.mu.Unlock()
	if p.raw.was != nil {
		return "\r\n"
	}
	return "\n"
}

// TerminalSize is the size of this process's terminal, else the usual one.
func (p *Program) TerminalSize() *berthv1.TerminalSize {
	if p.Terminal != nil {
		cols, rows, err := term.GetSize(int(p.Terminal.Fd()))
		if err == nil && cols > 0 && rows > 0 && cols <= math.MaxUint16 && rows <= math.MaxUint16 {
			return &berthv1.TerminalSize{Cols: uint32(cols), Rows: uint32(rows)}
		}
	}
	return &berthv1.TerminalSize{Cols: defaultCols, Rows: defaultRows}
}

// WatchResizes delivers the terminal's size now, and after each change. It returns how to end that.
func (p *Program) WatchResizes() (sizes <-chan *berthv1.TerminalSize, stop func()) {
	if p.Terminal == nil {
		return nil, func() {}
	}
	delivered, over := make(chan *berthv1.TerminalSize), make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		size, to := p.TerminalSize(), delivered
		for {
			select {
			case <-over:
				return
			case <-p.Resized:
				size, to = p.TerminalSize(), delivered
			case <-p.Continued:
				p.makeRawAgain()
				size, to = p.TerminalSize(), delivered
			case to <- size:
				to = nil // delivered; wait for the next
			}
		}
	})
	return delivered, func() {
		close(over)
		watching.Wait()
	}
}

// DescribeTerminal tells a command in a terminal which kind it is.
func (p *Program) DescribeTerminal(spec *berthv1.JobSpec) {
	if spec.GetEnv()["TERM"] != "" {
		return
	}
	kind, _ := p.LookupEnv("TERM")
	if kind == "" {
		kind = "xterm"
	}
	if spec.Env == nil {
		spec.Env = map[string]string{}
	}
	spec.Env["TERM"] = kind
}
