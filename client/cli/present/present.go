// Package present is how resources look: tables, blocks of fields, JSON lines, and the words for
// times, sizes, sandboxes and jobs. It only formats what it is given and never calls a broker.
package present

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// WriteJSON writes one message as one line of protojson with the protos' field names.
func WriteJSON(w io.Writer, message proto.Message) error {
	spaced, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(message)
	if err != nil {
		return fmt.Errorf("writing %s as JSON: %w", message.ProtoReflect().Descriptor().Name(), err)
	}
	var line bytes.Buffer // protojson varies its spaces on purpose
	if err := json.Compact(&line, spaced); err != nil {
		return fmt.Errorf("writing %s as JSON: %w", message.ProtoReflect().Descriptor().Name(), err)
	}
	line.WriteByte('\n')
	_, err = w.Write(line.Bytes())
	return err
}

// Table writes aligned columns; in a terminal the cells of one column are coloured by their text.
type Table struct {
	Writer *tabwriter.Writer
	Paint  int // the coloured column; -1 is none
}

// NoPaint is a table without a coloured column.
const NoPaint = -1

// Row writes one row; an empty cell becomes -.
func (t *Table) Row(cells ...string) {
	shown := make([]string, len(cells))
	for i, cell := range cells {
		shown[i] = Plain(cell)
		if shown[i] == "" {
			shown[i] = "-"
		}
		if i == t.Paint {
			shown[i] = "\x1b[" + colourOf(cell) + "m" + shown[i] + "\x1b[0m"
		}
	}
	// The tabwriter keeps the first error for Flush.
	_, _ = fmt.Fprintln(t.Writer, strings.Join(shown, "\t"))
}

// Flush aligns what was written, and returns the first error.
func (t *Table) Flush() error { return t.Writer.Flush() }

// colourOf is a state's colour. Every code has the same length, the header's too, so that the
// columns stay aligned.
func colourOf(cell string) string {
	switch cell {
	case "RUNNING", "yes":
		return "32"
	case "FAILED", "LOST", "no":
		return "31"
	case "CREATING", "SUSPENDING", "SUSPENDED", "RESUMING", "STOPPED", "DESTROYING", "RESERVED", "UNKNOWN":
		return "33"
	}
	return "39"
}

// Block writes a resource's stats as aligned lines, the empty ones left out.
type Block struct{ *Table }

// Field writes one line, unless its value is empty.
func (b Block) Field(name, value string) {
	if value != "" {
		b.Row(name+":", value)
	}
}
