package regular

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// others puts things that are no regular file into a file's place.
var others = map[string]func(path string) error{
	"a pipe":          func(path string) error { return unix.Mkfifo(path, 0o600) },
	"a directory":     func(path string) error { return os.MkdirAll(filepath.Join(path, "below"), 0o700) },
	"a link":          func(path string) error { return os.Symlink("/etc/passwd", path) },
	"a dangling link": func(path string) error { return os.Symlink("/no/such", path) },
	"a looping link":  func(path string) error { return os.Symlink(path, path) },
	"a device":        func(path string) error { return os.Symlink("/dev/zero", path) },
}

func TestOnlyARegularFileIsRead(t *testing.T) {
	for name, put := range others {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			if data, err := Read(path, 100); !errors.Is(err, ErrNotRegular) {
				t.Errorf("%q, %v", data, err)
			}
			file, err := OpenOwn(path, os.O_WRONLY|os.O_CREATE)
			if err != nil {
				t.Fatal(err)
			}
			_, err = file.WriteString("own")
			if err := errors.Join(err, file.Close()); err != nil {
				t.Fatal(err)
			}
			if data, err := Read(path, 100); err != nil || string(data) != "own" {
				t.Errorf("after it was replaced: %q, %v", data, err)
			}
		})
	}
}

func TestADirectoryTakesThePlaceOfAnythingElse(t *testing.T) {
	for name, put := range others {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "directory")
			if err := put(path); err != nil {
				t.Fatal(err)
			}
			if err := MakeDir(path, 0o700); err != nil {
				t.Fatal(err)
			}
			if info, err := os.Lstat(path); err != nil || !info.IsDir() {
				t.Errorf("%v, %v", info, err)
			}
			_, err := os.Stat(filepath.Join(path, "below"))
			if (err == nil) != (name == "a directory") {
				t.Errorf("what is below it: %v", err)
			}
		})
	}
}

func TestNoMoreIsReadThanExpected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, bytes.Repeat([]byte("x"), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if data, err := Read(path, 10); err != nil || len(data) != 10 {
		t.Errorf("%d bytes, %v", len(data), err)
	}
}
