// Package vault holds the broker's key: 32 random bytes in a file of their own beside the ledger. It
// seals secrets so that a restart can still start jobs with them, and hashes the bodies of requests
// so that a request id can be held to its body. The key never leaves the package, and nothing in it is
// ever logged; it stores nothing but that one file.
package vault

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// KeyName is the key's file in the state directory.
const KeyName = "key"

const (
	// keyBytes is the size of the key and of each key derived from it.
	keyBytes = 32
	// keyPart is the key's file before it is whole.
	keyPart = "key.part"
	// sealVersion is the first byte of what Seal returns: 1 is AES-256-GCM with a random nonce of 12
	// bytes in front of the ciphertext.
	sealVersion = 1
	// fingerprintBytes is how much of a derived value tells keys apart.
	fingerprintBytes = 4
)

// The names under which keys are derived, so that no two purposes share one. They never change.
const (
	purposeSeal        = "berth vault: seal"
	purposeHash        = "berth vault: body hash"
	purposeFingerprint = "berth vault: fingerprint"
)

// Vault is an open key. Its methods may be called concurrently; it needs no closing.
type Vault struct {
	aead        cipher.AEAD
	hashKey     []byte
	fingerprint string
}

// Open reads <dir>/key, or makes it with mode 0600 when it is absent; dir must exist. A key of
// another size, or one that others than its owner can reach, is refused.
func Open(dir string) (*Vault, error) {
	path := filepath.Join(dir, KeyName)
	key, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeKey(dir); err != nil {
			return nil, fmt.Errorf("make the broker's key %s: %w", path, err)
		}
		key, err = readKey(path)
	}
	if err != nil {
		return nil, fmt.Errorf("read the broker's key %s: %w", path, err)
	}
	return derive(key)
}

func readKey(path string) (key []byte, err error) {
	file, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, errors.New("it is not a file")
	}
	if mode := info.Mode().Perm(); mode&^0o600 != 0 {
		return nil, fmt.Errorf("its mode is %#o, so others than its owner may reach it: chmod 600 %s, and treat the secrets that it sealed as seen", mode, path)
	}
	if info.Size() != keyBytes {
		return nil, fmt.Errorf("it has %d bytes, a key has %d: restore it from the copy that belongs to the ledger", info.Size(), keyBytes)
	}
	key = make([]byte, keyBytes)
	if _, err := io.ReadFull(file, key); err != nil {
		return nil, err
	}
	return key, nil
}

// makeKey writes a new key unless another process is quicker: it is there whole and on disk, or not
// at all.
func makeKey(dir string) (err error) {
	lock, err := os.Open(filepath.Clean(dir))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // this also unlocks
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	path, part := filepath.Join(dir, KeyName), filepath.Join(dir, keyPart)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := writeKey(part); err != nil {
		return err
	}
	// gofail: var vaultBeforeRename struct{}
	// os.Exit(137)
	if err := os.Rename(part, path); err != nil {
		return err
	}
	// gofail: var vaultAfterRename struct{}
	// os.Exit(137)
	return lock.Sync()
}

// writeKey writes a new key to part, in place of what a crash may have left there.
func writeKey(part string) error {
	if err := os.Remove(part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	file, err := os.OpenFile(filepath.Clean(part), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	key := make([]byte, keyBytes)
	_, _ = rand.Read(key) // never fails: see its documentation
	_, err = file.Write(key)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

func derive(key []byte) (*Vault, error) {
	sealKey, err := hkdf.Key(sha256.New, key, nil, purposeSeal, keyBytes)
	if err != nil {
		return nil, fmt.Errorf("derive the sealing key: %w", err)
	}
	hashKey, err := hkdf.Key(sha256.New, key, nil, purposeHash, keyBytes)
	if err != nil {
		return nil, fmt.Errorf("derive the hashing key: %w", err)
	}
	print, err := hkdf.Key(sha256.New, key, nil, purposeFingerprint, fingerprintBytes)
	if err != nil {
		return nil, fmt.Errorf("derive the key's fingerprint: %w", err)
	}
	block, err := aes.NewCipher(sealKey)
	if err != nil {
		return nil, fmt.Errorf("make the cipher: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("make the cipher: %w", err)
	}
	return &Vault{aead: aead, hashKey: hashKey, fingerprint: hex.EncodeToString(print)}, nil
}

// Fingerprint returns 8 hexadecimal characters that tell this key from others and say nothing about
// it. A ledger is only of use with the key that it was written with.
func (v *Vault) Fingerprint() string { return v.fingerprint }

// Seal encrypts plaintext for label, for example the id of the record that will hold it. Only
// Unseal with the same key and label opens it. The same plaintext sealed twice differs.
func (v *Vault) Seal(label string, plaintext []byte) ([]byte, error) {
	if label == "" {
		return nil, errors.New("seal: a label is needed, so that nothing opens what was sealed for something else")
	}
	sealed := make([]byte, 1, 1+v.aead.Overhead()+len(plaintext))
	sealed[0] = sealVersion
	return v.aead.Seal(sealed, nil, plaintext, []byte(label)), nil
}

// Unseal decrypts what Seal made for label. It fails when the key or the label is another one, or
// when a byte was changed.
func (v *Vault) Unseal(label string, sealed []byte) ([]byte, error) {
	if len(sealed) == 0 {
		return nil, fmt.Errorf("unseal for %q: there is nothing sealed", label)
	}
	if sealed[0] != sealVersion {
		return nil, fmt.Errorf("unseal for %q: it was sealed in version %d, this berthd knows %d: use a newer berthd", label, sealed[0], sealVersion)
	}
	plaintext, err := v.aead.Open(nil, nil, sealed[1:], []byte(label))
	if err != nil {
		return nil, fmt.Errorf("unseal for %q with key %s: %w", label, v.fingerprint, err)
	}
	return plaintext, nil
}
