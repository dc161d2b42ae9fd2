package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzBootConfig reads any file as a boot config, and never quotes it: it may contain a token.
func FuzzBootConfig(f *testing.F) {
	f.Add(`{"machineId": "m_1", "token": "c2VjcmV0c2VjcmV0", "env": {"A": "b"}, "generation": "3"}`)
	f.Add(`{"token": "c2VjcmV0c2VjcmV0", "unknown": 1}`)
	f.Add(`[`)
	f.Fuzz(func(t *testing.T, text string) {
		path := filepath.Join(t.TempDir(), "config.json")
		must(t, os.WriteFile(path, []byte(text), 0o600))
		config, err := readConfig(path)
		if (config == nil) != (err != nil) {
			t.Errorf("%v, %v", config, err)
		}
		if err != nil && len(text) > 8 && strings.Contains(err.Error(), text) && !strings.Contains(path, text) {
			t.Errorf("the error quotes the file: %v", err)
		}
	})
}
