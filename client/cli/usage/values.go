package usage

import (
	"errors"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
)

// What flags take at most. The first two are the API's own limits, said here before a call is made.
const (
	MaxPoll  = 10 * time.Minute
	MaxGrace = time.Hour
	maxCPUs  = 4096
	// maxDuration is a little less than a duration can hold, 292 years, to be a round number.
	maxDuration = 100_000 * 24 * time.Hour
)

// sizeUnits are the units of a size, longest first; a bare K, M, G or T is binary, as everywhere
// here.
var sizeUnits = []struct {
	name  string
	bytes float64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1},
}

// Size is a flag's number of bytes, written with a unit: 512MiB, 2G, 1.5GiB, 4096.
type Size uint64

func (v *Size) String() string {
	if *v == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(*v), 10)
}

// Type names the value in help texts.
func (v *Size) Type() string { return "size" }

// Set takes a flag's text, and refuses one that is out of bounds.
func (v *Size) Set(text string) error {
	number, factor := strings.ToLower(strings.TrimSpace(text)), 1.0
	for _, unit := range sizeUnits {
		if trimmed, found := strings.CutSuffix(number, unit.name); found {
			number, factor = strings.TrimSpace(trimmed), unit.bytes
			break
		}
	}
	value, isNumber := parseNumber(number)
	switch {
	case !isNumber:
		return Errorf("a size is a number with B, KiB, MiB, GiB, TiB or K, M, G, T, as in 2GiB")
	case value < 0 || value*factor >= math.MaxInt64:
		return Errorf("it is out of range: a size is from 0 to less than 8388608TiB")
	}
	*v = Size(value * factor)
	return nil
}

// parseNumber is a number as people write it; one that is too large is an infinity.
func parseNumber(text string) (value float64, isNumber bool) {
	value, err := strconv.ParseFloat(text, 64)
	written := strings.Trim(text, "+-.0123456789eE") == ""
	return value, written && (err == nil || errors.Is(err, strconv.ErrRange))
}

// Count is a flag's whole number, at most Max.
type Count struct {
	N, Max uint64
	What   string // of what, as a sentence's subject
}

func (v *Count) String() string {
	if v.N == 0 {
		return ""
	}
	return strconv.FormatUint(v.N, 10)
}

// Type names the value in help texts.
func (v *Count) Type() string { return "number" }

// Set takes a flag's text, and refuses one that is out of bounds.
func (v *Count) Set(text string) error {
	n, err := strconv.ParseUint(text, 10, 64)
	digits, isNegative := strings.CutPrefix(text, "-")
	isNegative = isNegative && digits != "" && strings.Trim(digits, "0123456789") == ""
	switch {
	case errors.Is(err, strconv.ErrRange), isNegative, err == nil && n > v.Max:
		return Errorf("it is out of range: %s is a whole number from 0 to %d", v.What, v.Max)
	case err != nil:
		return Errorf("%s is a whole number", v.What)
	}
	v.N = n
	return nil
}

// CPUs is a flag's number of CPUs, fractions allowed.
type CPUs float64

func (v *CPUs) String() string {
	if *v == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(*v), 'g', -1, 64)
}

// Type names the value in help texts.
func (v *CPUs) Type() string { return "number" }

// Set takes a flag's text, and refuses one that is out of bounds.
func (v *CPUs) Set(text string) error {
	value, isNumber := parseNumber(text)
	switch {
	case !isNumber:
		return Errorf("CPUs are a number, as in 2 or 0.5")
	case value < 0 || value > maxCPUs:
		return Errorf("it is out of range: CPUs are a number from 0 to %d", maxCPUs)
	}
	*v = CPUs(value)
	return nil
}

// Duration is a flag's duration; beside Go's units it takes days, as in 7d.
type Duration struct {
	Value time.Duration
	Given bool
	Max   time.Duration // zero: what a duration can hold
}

func (v *Duration) String() string {
	if !v.Given {
		return ""
	}
	return v.Value.String()
}

// Type names the value in help texts.
func (v *Duration) Type() string { return "duration" }

// Set takes a flag's text, and refuses one that is out of bounds.
func (v *Duration) Set(text string) error {
	span, ok := parseDuration(text)
	limit, words := v.Max, shortly(v.Max)
	if limit == 0 {
		limit, words = maxDuration, "100000d"
	}
	switch {
	case !ok && !durationForm.MatchString(text):
		return Errorf("a duration is a number with ms, s, m, h or d, as in 90s or 7d")
	case !ok || span < 0 || span > limit:
		return Errorf("it is out of range: a duration here is from 0s to %s", words)
	}
	v.Value, v.Given = span, true
	return nil
}

// durationForm is the form of a duration, however long.
var durationForm = regexp.MustCompile(`^[-+]?((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h|d))+$`)

// parseDuration is a duration, and whether there is one that long.
func parseDuration(text string) (time.Duration, bool) {
	days, found := strings.CutSuffix(text, "d")
	if !found {
		span, err := time.ParseDuration(text)
		return span, err == nil
	}
	number, isNumber := parseNumber(days)
	if !isNumber || math.Abs(number) > maxDuration.Hours()/24 {
		return 0, false
	}
	return time.Duration(number * float64(24*time.Hour)), true
}

// shortly is a duration of whole minutes or hours without the units that are zero.
func shortly(d time.Duration) string {
	if d%time.Hour == 0 {
		return strconv.FormatInt(int64(d/time.Hour), 10) + "h"
	}
	return strconv.FormatInt(int64(d/time.Minute), 10) + "m"
}

// Proto is the duration for a request; nil when the flag was not given.
func (v *Duration) Proto() *durationpb.Duration {
	if !v.Given {
		return nil
	}
	return durationpb.New(v.Value)
}

// KeyValues parses k=v flags.
func KeyValues(flag string, given []string) (map[string]string, error) {
	return ParsePairs(flag, given, func(key string) (string, error) {
		return "", Errorf("--%s %s: it must be key=value", flag, key)
	})
}

// LabelFilter parses k=v flags where k alone matches any value.
func LabelFilter(flag string, given []string) (map[string]string, error) {
	return ParsePairs(flag, given, func(string) (string, error) { return "", nil })
}

// ParsePairs splits k=v; alone gives the value of a key without one. Its errors never hold a value:
// it may be a secret.
func ParsePairs(flag string, given []string, alone func(key string) (string, error)) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	parsed := make(map[string]string, len(given))
	for _, pair := range given {
		key, value, found := strings.Cut(pair, "=")
		if key == "" {
			return nil, Errorf("--%s: the key before = is empty", flag)
		}
		if !found {
			var err error
			if value, err = alone(key); err != nil {
				return nil, err
			}
		}
		parsed[key] = value
	}
	return parsed, nil
}
