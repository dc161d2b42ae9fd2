package cli

import (
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
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
	value, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(value) || value < 0 || value*factor >= math.MaxInt64 {
		return usagef("a size is a number with B, KiB, MiB, GiB, TiB or K, M, G, T, as in 2GiB")
	}
	*v = sizeValue(value * factor)
	return nil
}

// spanValue is a flag's duration; beside Go's units it takes days, as in 7d.
type spanValue struct {
	span time.Duration
	set  bool
}

func (v *spanValue) String() string {
	if !v.set {
		return ""
	}
	return v.span.String()
}

func (v *spanValue) Type() string { return "duration" }

func (v *spanValue) Set(text string) error {
	span, err := time.ParseDuration(text)
	if days, found := strings.CutSuffix(text, "d"); found {
		var number float64
		number, err = strconv.ParseFloat(days, 64)
		span = time.Duration(number * float64(24*time.Hour))
	}
	if err != nil || span < 0 {
		return usagef("a duration is a number with ms, s, m, h or d, as in 90s or 7d")
	}
	v.span, v.set = span, true
	return nil
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
