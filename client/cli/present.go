package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// longestCell is where free text in a table is cut, in characters.
const longestCell = 48

// writeJSON writes one message as one line of protojson with the protos' field names.
func writeJSON(w io.Writer, message proto.Message) error {
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

// show writes one resource in the asked form; as is the table.
func (p *program) show(message proto.Message, id string, as func() error) error {
	switch p.output {
	case outputJSON:
		return writeJSON(p.Stdout, message)
	case outputID:
		return p.printLine(id)
	}
	return as()
}

func (p *program) printLine(line string) error {
	_, err := fmt.Fprintln(p.Stdout, line)
	return err
}

// table writes aligned columns; in a terminal the cells of one column are coloured by their text.
type table struct {
	writer *tabwriter.Writer
	paint  int // the coloured column; -1 is none
}

const noPaint = -1

func (p *program) newTable(paint int, header ...string) *table {
	if !p.colours() {
		paint = noPaint
	}
	t := &table{writer: tabwriter.NewWriter(p.Stdout, 0, 0, 3, ' ', 0), paint: paint}
	if len(header) > 0 {
		t.row(header...)
	}
	return t
}

func (p *program) colours() bool {
	noColour, _ := p.LookupEnv("NO_COLOR")
	term, _ := p.LookupEnv("TERM")
	return p.StdoutTerminal && noColour == "" && term != "dumb"
}

func (t *table) row(cells ...string) {
	shown := make([]string, len(cells))
	for i, cell := range cells {
		shown[i] = plain(cell)
		if shown[i] == "" {
			shown[i] = "-"
		}
		if i == t.paint {
			shown[i] = "\x1b[" + colourOf(cell) + "m" + shown[i] + "\x1b[0m"
		}
	}
	// The tabwriter keeps the first error for Flush.
	_, _ = fmt.Fprintln(t.writer, strings.Join(shown, "\t"))
}

func (t *table) flush() error { return t.writer.Flush() }

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

// block writes a resource's facts as aligned lines, the empty ones left out.
type block struct{ *table }

func (p *program) newBlock() block { return block{p.newTable(noPaint)} }

func (b block) fact(name, value string) {
	if value != "" {
		b.row(name+":", value)
	}
}

// plain replaces what would move a terminal's cursor or break a table.
func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, strings.NewReplacer("\n", " ", "\t", " ").Replace(text))
}

// plainLines is plain, but keeps lines.
func plainLines(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, line := range lines {
		lines[i] = plain(line)
	}
	return strings.Join(lines, "\n")
}

func cut(text string) string {
	runes := []rune(text)
	if len(runes) <= longestCell {
		return text
	}
	return string(runes[:longestCell-1]) + "…"
}

// age is how long ago a time was, in its largest unit.
func (p *program) age(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return roughly(p.Now().Sub(at.AsTime()))
}

// ahead is how far a time lies in the future.
func (p *program) ahead(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return "in " + roughly(at.AsTime().Sub(p.Now()))
}

func roughly(d time.Duration) string {
	switch {
	case d < time.Second:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// lasted is the time between two times, for people.
func lasted(from, to *timestamppb.Timestamp) string {
	if from == nil || to == nil {
		return ""
	}
	d := to.AsTime().Sub(from.AsTime())
	switch {
	case d < 0:
		return ""
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

func moment(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return at.AsTime().UTC().Format(time.RFC3339)
}

// bytesWords is a number of bytes in its largest binary unit.
func bytesWords(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	value, unit := float64(n), 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + units[unit]
}

// pairs is a map as k=v, sorted.
func pairs(m map[string]string) string {
	all := make([]string, 0, len(m))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		all = append(all, key+"="+m[key])
	}
	return strings.Join(all, ",")
}
