package cli

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
	longestPoll  = 10 * time.Minute
	longestGrace = time.Hour
	mostCPUs     = 4096
	// longestSpan is a little less than a duration can hold, 292 years, to be a round number.
	longestSpan = 100_000 * 24 * time.Hour
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

// sizeValue is a flag's number of bytes, written with a unit: 512MiB, 2G, 1.5GiB, 4096.
type sizeValue uint64

func (v *sizeValue) String() string {
	if *v == 0 {
		return ""
	}
	return bytesWords(uint64(*v))
}

func (v *sizeValue) Type() string { return "size" }

func (v *sizeValue) Set(text string) error {
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
		return usagef("a size is a number with B, KiB, MiB, GiB, TiB or K, M, G, T, as in 2GiB")
	case value < 0 || value*factor >= math.MaxInt64:
		return usagef("it is out of range: a size is from 0 to less than 8388608TiB")
	}
	*v = sizeValue(value * factor)
	return nil
}

// parseNumber is a number as people write it; one that is too large is an infinity.
func parseNumber(text string) (value float64, isNumber bool) {
	value, err := strconv.ParseFloat(text, 64)
	written := strings.Trim(text, "+-.0123456789eE") == ""
	return value, written && (err == nil || errors.Is(err, strconv.ErrRange))
}

// countValue is a flag's whole number, at most its most.
type countValue struct {
	n, most uint64
	what    string // of what, as a sentence's subject
}

func (v *countValue) String() string {
	if v.n == 0 {
		return ""
	}
	return strconv.FormatUint(v.n, 10)
}

func (v *countValue) Type() string { return "number" }

func (v *countValue) Set(text string) error {
	n, err := strconv.ParseUint(text, 10, 64)
	digits, isNegative := strings.CutPrefix(text, "-")
	isNegative = isNegative && digits != "" && strings.Trim(digits, "0123456789") == ""
	switch {
	case errors.Is(err, strconv.ErrRange), isNegative, err == nil && n > v.most:
		return usagef("it is out of range: %s is a whole number from 0 to %d", v.what, v.most)
	case err != nil:
		return usagef("%s is a whole number", v.what)
	}
	v.n = n
	return nil
}

// cpusValue is a flag's number of CPUs, fractions allowed.
type cpusValue float64

func (v *cpusValue) String() string {
	if *v == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(*v), 'g', -1, 64)
}

func (v *cpusValue) Type() string { return "number" }

func (v *cpusValue) Set(text string) error {
	value, isNumber := parseNumber(text)
	switch {
	case !isNumber:
		return usagef("CPUs are a number, as in 2 or 0.5")
	case value < 0 || value > mostCPUs:
		return usagef("it is out of range: CPUs are a number from 0 to %d", mostCPUs)
	}
	*v = cpusValue(value)
	return nil
}

// spanValue is a flag's duration; beside Go's units it takes days, as in 7d.
type spanValue struct {
	span time.Duration
	set  bool
	most time.Duration // zero: what a duration can hold
}

func (v *spanValue) String() string {
	if !v.set {
		return ""
	}
	return v.span.String()
}

func (v *spanValue) Type() string { return "duration" }

func (v *spanValue) Set(text string) error {
	span, ok := parseSpan(text)
	most, words := v.most, shortly(v.most)
	if most == 0 {
		most, words = longestSpan, "100000d"
	}
	switch {
	case !ok && !spanForm.MatchString(text):
		return usagef("a duration is a number with ms, s, m, h or d, as in 90s or 7d")
	case !ok || span < 0 || span > most:
		return usagef("it is out of range: a duration here is from 0s to %s", words)
	}
	v.span, v.set = span, true
	return nil
}

// spanForm is the form of a duration, however long.
var spanForm = regexp.MustCompile(`^[-+]?((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h|d))+$`)

// parseSpan is a duration, and whether there is one that long.
func parseSpan(text string) (time.Duration, bool) {
	days, found := strings.CutSuffix(text, "d")
	if !found {
		span, err := time.ParseDuration(text)
		return span, err == nil
	}
	number, isNumber := parseNumber(days)
	if !isNumber || math.Abs(number) > longestSpan.Hours()/24 {
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

// proto is the duration for a request; nil when the flag was not given.
func (v *spanValue) proto() *durationpb.Duration {
	if !v.set {
		return nil
	}
	return durationpb.New(v.span)
}

// keyValues parses k=v flags.
func keyValues(flag string, given []string) (map[string]string, error) {
	return parsePairs(flag, given, func(key string) (string, error) {
		return "", usagef("--%s %s: it must be key=value", flag, key)
	})
}

// labelFilter parses k=v flags where k alone matches any value.
func labelFilter(flag string, given []string) (map[string]string, error) {
	return parsePairs(flag, given, func(string) (string, error) { return "", nil })
}

// environment parses K=V flags where K alone takes its value from the environment.
func (p *program) environment(flag string, given []string) (map[string]string, error) {
	return parsePairs(flag, given, func(key string) (string, error) {
		value, found := p.LookupEnv(key)
		if !found {
			return "", usagef("--%s %s: it is not set in the environment; set it, or give %s=VALUE", flag, key, key)
		}
		return value, nil
	})
}

// parsePairs splits k=v; alone gives the value of a key without one. Its errors never hold a value:
// it may be a secret.
func parsePairs(flag string, given []string, alone func(key string) (string, error)) (map[string]string, error) {
	if len(given) == 0 {
		return nil, nil
	}
	parsed := make(map[string]string, len(given))
	for _, pair := range given {
		key, value, found := strings.Cut(pair, "=")
		if key == "" {
			return nil, usagef("--%s: the key before = is empty", flag)
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
