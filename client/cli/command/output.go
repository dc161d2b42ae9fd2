package command

import (
	"cmp"
	"fmt"
	"io"
	"sync"
	"text/tabwriter"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
)

// output is one of the process's outputs, and remembers the first failure to write to it.
type output struct {
	to  io.Writer
	mu  sync.Mutex
	err error
}

// Write writes as the process's own output does.
func (o *output) Write(data []byte) (int, error) {
	n, err := o.to.Write(data)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
	return n, err
}

// close notes whether everything was written: some file systems say only now that they had no room.
func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if closer, ok := o.to.(io.Closer); ok && o.err == nil {
		o.err = closer.Close()
	}
}

// failed is the first failure to write.
func (o *output) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// unwritten is why something of what this program says is missing; nil when nothing is.
func (p *Program) unwritten() error {
	for _, output := range p.outputs {
		if err := output.failed(); err != nil {
			return &ExitError{Code: cmp.Or(p.failure, usage.ExitFailure), Err: fmt.Errorf("writing the output: %w", err)}
		}
	}
	return nil
}

// closeOutputs ends the output, and is unwritten then.
func (p *Program) closeOutputs() error {
	p.outputs[0].close()
	if err := p.unwritten(); err != nil {
		return err
	}
	p.outputs[1].close() // last: errors are said there
	return p.unwritten()
}

// Show writes one resource in the asked form; as is the table.
func (p *Program) Show(message proto.Message, id string, as func() error) error {
	switch p.Output {
	case OutputJSON:
		return present.WriteJSON(p.Stdout, message)
	case OutputID:
		return p.PrintLine(id)
	}
	return as()
}

// PrintLine writes one line to stdout.
func (p *Program) PrintLine(line string) error {
	_, err := fmt.Fprintln(p.Stdout, line)
	return err
}

// NewTable begins a table on stdout with a header, whose column paint is coloured in a terminal.
func (p *Program) NewTable(paint int, header ...string) *present.Table {
	if !p.colours() {
		paint = present.NoPaint
	}
	t := &present.Table{Writer: tabwriter.NewWriter(p.Stdout, 0, 0, 3, ' ', 0), Paint: paint}
	if len(header) > 0 {
		t.Row(header...)
	}
	return t
}

func (p *Program) colours() bool {
	noColour, _ := p.LookupEnv("NO_COLOR")
	term, _ := p.LookupEnv("TERM")
	return p.StdoutTerminal && noColour == "" && term != "dumb"
}

// NewBlock begins a block of fields on stdout.
func (p *Program) NewBlock() present.Block { return present.Block{Table: p.NewTable(present.NoPaint)} }

// Age is how long ago a time was, in its largest unit.
func (p *Program) Age(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return present.Roughly(p.Now().Sub(at.AsTime()))
}

// Ahead is how far a time lies in the future.
func (p *Program) Ahead(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return "in " + present.Roughly(at.AsTime().Sub(p.Now()))
}
