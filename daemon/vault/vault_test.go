package vault

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixedKey is the key of the test vectors: the bytes 0 to 31.
func fixedKey() []byte {
	key := make([]byte, keyBytes)
	for i := range key {
		key[i] = byte(i)
	}
	return key
}

// openFixed opens a vault with fixedKey.
func openFixed(t testing.TB) *Vault {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, KeyName), fixedKey(), 0o600); err != nil {
		t.Fatal(err)
	}
	v, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestTheKeyIsMadeOncePrivateAndWhole(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, keyPart), []byte("left by a crash"), 0o600); err != nil {
		t.Fatal(err)
	}
	first, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(dir, KeyName))
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != keyBytes {
		t.Errorf("key file %v, %v", info, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	again, err := Open(dir)
	if err != nil || again.Fingerprint() != first.Fingerprint() {
		t.Errorf("opened again: %v", err)
	}
	other, err := Open(t.TempDir())
	if err != nil || other.Fingerprint() == first.Fingerprint() {
		t.Errorf("another key has the same fingerprint, or %v", err)
	}
}

func TestManyWhoMakeTheKeyAtOnceGetTheSame(t *testing.T) {
	dir := t.TempDir()
	prints := make([]string, 16)
	var group sync.WaitGroup
	for i := range prints {
		group.Go(func() {
			v, err := Open(dir)
			if err != nil {
				t.Error(err)
				return
			}
			prints[i] = v.Fingerprint()
		})
	}
	group.Wait()
	for _, print := range prints {
		if print != prints[0] {
			t.Errorf("fingerprints %v", prints)
		}
	}
}

func TestABadKeyFileIsRefusedWithTheRemedy(t *testing.T) {
	cases := []struct {
		name string
		make func(path string) error
		want string
	}{
		{"readable by the group", func(path string) error { return writeMode(path, fixedKey(), 0o640) }, "chmod 600"},
		{"readable by all", func(path string) error { return writeMode(path, fixedKey(), 0o604) }, "chmod 600"},
		{"executable", func(path string) error { return writeMode(path, fixedKey(), 0o700) }, "chmod 600"},
		{"too short", func(path string) error { return writeMode(path, fixedKey()[1:], 0o600) }, "31 bytes"},
		{"too long", func(path string) error { return writeMode(path, append(fixedKey(), 1), 0o600) }, "33 bytes"},
		{"empty", func(path string) error { return writeMode(path, nil, 0o600) }, "0 bytes"},
		{"a directory", func(path string) error { return os.Mkdir(path, 0o600) }, "not a file"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, KeyName)
			if err := c.make(path); err != nil {
				t.Fatal(err)
			}
			if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want %q and the path in it", err, c.want)
			}
		})
	}
	if _, err := Open(filepath.Join(t.TempDir(), "absent")); err == nil {
		t.Error("an absent directory was opened")
	}
}

func writeMode(path string, content []byte, mode os.FileMode) error {
	if err := os.WriteFile(path, content, mode); err != nil {
		return err
	}
	return os.Chmod(path, mode)
}

func TestWhatWasSealedOpensOnlyWithItsLabelAndKey(t *testing.T) {
	v := openFixed(t)
	other, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, plaintext := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte("secret"), 1000)} {
		sealed, err := v.Seal("sb_1", plaintext)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := v.Unseal("sb_1", sealed); err != nil || !bytes.Equal(got, plaintext) {
			t.Errorf("unsealed %q, %v", got, err)
		}
		if len(plaintext) > 1 && bytes.Contains(sealed, plaintext) {
			t.Error("the plaintext is in what was sealed")
		}
		again, err := v.Seal("sb_1", plaintext)
		if err != nil || bytes.Equal(again, sealed) {
			t.Errorf("sealed twice the same, or %v", err)
		}
		if _, err := v.Unseal("sb_2", sealed); err == nil {
			t.Error("it opened for another label")
		}
		if _, err := other.Unseal("sb_1", sealed); err == nil {
			t.Error("it opened with another key")
		}
		for i := 0; i < len(sealed); i += 1 + len(sealed)/50 {
			changed := bytes.Clone(sealed)
			changed[i] ^= 1
			if _, err := v.Unseal("sb_1", changed); err == nil {
				t.Errorf("it opened with byte %d changed", i)
			}
			if _, err := v.Unseal("sb_1", sealed[:i]); err == nil {
				t.Errorf("it opened when cut to %d bytes", i)
			}
		}
	}
	if _, err := v.Seal("", []byte("x")); err == nil {
		t.Error("something was sealed without a label")
	}
}

// TestTheFormatsStayWhatTheyAre opens what an earlier build sealed and derived with fixedKey.
func TestTheFormatsStayWhatTheyAre(t *testing.T) {
	v := openFixed(t)
	if got := v.Fingerprint(); got != goldenFingerprint {
		t.Errorf("fingerprint %s, want %s", got, goldenFingerprint)
	}
	if got, err := v.Unseal("sb_1", fromHex(t, goldenSealed)); err != nil || string(got) != "hello" {
		t.Errorf("unsealed %q, %v", got, err)
	}
}
