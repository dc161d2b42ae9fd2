package present

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"google.golang.org/protobuf/types/known/timestamppb"
)

// WithHint adds a hint in parentheses, unless the words name its command already.
func WithHint(words, hint string) string {
	_, command, hasCommand := strings.Cut(hint, "`")
	if hint == "" || hasCommand && strings.Contains(words, "`"+command) || saysAlready(words, hint) {
		return words
	}
	return words + " (" + hint + ")"
}

// maxCell is where free text in a table is cut, in characters.
const maxCell = 48

// Plain replaces what would move a terminal's cursor or break a table.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, strings.NewReplacer("\n", " ", "\t", " ").Replace(text))
}

// PlainLines is plain, but keeps lines.
func PlainLines(text string) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, line := range lines {
		lines[i] = Plain(line)
	}
	return strings.Join(lines, "\n")
}

// Cut shortens free text to the width of a table's cell.
func Cut(text string) string {
	runes := []rune(text)
	if len(runes) <= maxCell {
		return text
	}
	return string(runes[:maxCell-1]) + "…"
}

// Roughly is a duration in its largest unit.
func Roughly(d time.Duration) string {
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

// Lasted is the time between two times, for people.
func Lasted(from, to *timestamppb.Timestamp) string {
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

// Moment is a time in UTC.
func Moment(at *timestamppb.Timestamp) string {
	if at == nil {
		return ""
	}
	return at.AsTime().UTC().Format(time.RFC3339)
}

// BytesWords is a number of bytes in its largest binary unit.
func BytesWords(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	value, unit := float64(n), 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", value), ".0") + units[unit]
}

// Pairs is a map as k=v, sorted.
func Pairs(m map[string]string) string {
	all := make([]string, 0, len(m))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		all = append(all, key+"="+m[key])
	}
	return strings.Join(all, ",")
}

// AgoWords is an age as "3m ago"; empty without one.
func AgoWords(age string) string {
	if age == "" {
		return ""
	}
	return age + " ago"
}

func lastedWords(lasted string) string {
	if lasted == "" {
		return ""
	}
	return "after " + lasted
}

// adviceWords are how a hint begins, and the words of a broker that gives the same advice by itself.
var adviceWords = map[string]string{
	"try again":      "try again",
	"read on at":     "read on at",
	"choose another": "an id of its own",
}

// saysAlready reports whether the words give a hint's advice already.
func saysAlready(words, hint string) bool {
	for advice, given := range adviceWords {
		if strings.HasPrefix(hint, advice) && strings.Contains(words, given) {
			return true
		}
	}
	return false
}
