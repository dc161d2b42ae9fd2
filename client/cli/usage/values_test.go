package usage

import (
	"strings"
	"testing"
	"time"
)

func TestSizes(t *testing.T) {
	for text, want := range map[string]uint64{
		"0": 0, "1024": 1024, "1B": 1, "2KiB": 2048, "2k": 2048, "512MiB": 512 << 20, "512M": 512 << 20, "1.5GiB": 3 << 29, "2 G": 2 << 30, "1TiB": 1 << 40, "1t": 1 << 40,
	} {
		var size Size
		if err := size.Set(text); err != nil || uint64(size) != want {
			t.Errorf("%q: %d, %v", text, size, err)
		}
	}
	for _, text := range []string{"", "GiB", "-1", "1GB", "1 apple", "NaN", "1e30", "Inf"} {
		var size Size
		if err := size.Set(text); err == nil {
			t.Errorf("%q was taken as %d", text, size)
		}
	}
}

func TestDurations(t *testing.T) {
	for text, want := range map[string]time.Duration{"0": 0, "0s": 0, "90s": 90 * time.Second, "1h30m": 90 * time.Minute, "7d": 168 * time.Hour, "1.5d": 36 * time.Hour} {
		var span Duration
		if err := span.Set(text); err != nil || span.Value != want {
			t.Errorf("%q: %v, %v", text, span.Value, err)
		}
	}
	for text, want := range map[string]string{
		"-5s": "out of range", "99999999h": "out of range", "1e30d": "is a number with", "999999999d": "out of range", "": "is a number with",
		"soon": "is a number with", "5": "is a number with", "-1d": "out of range", "NaNd": "is a number with",
	} {
		var span Duration
		if err := span.Set(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
