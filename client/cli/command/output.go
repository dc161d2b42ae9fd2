package command

import (
	"fmt"
	"text/tabwriter"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/client/cli/present"
)

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
