package docker_test

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/moby/client"
)

// rootfs is an image's content: programs in /bin, each a copy of busybox, others by path, and files.
type rootfs struct {
	programs []string
	others   map[string]string
	files    map[string]string
	dirs     []string
	changes  []string
}

var (
	// ordinary has a shell and two users.
	ordinary = rootfs{
		programs: []string{"sh", "true", "cat", "echo", "id", "sleep", "dd", "tail", "ls", "touch", "ip", "env", "head", "mkdir", "test", "stat", "tr", "grep", "setsid", "nc", "hostname"},
		files:    map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\nworker:x:1000:1000::/home:/bin/sh\n", "etc/group": "root:x:0:\nworker:x:1000:\n"},
		dirs:     []string{"tmp", "root", "home"},
	}
	// bare has one program and nothing else: no shell, no users, no /tmp, no /etc.
	bare = rootfs{programs: []string{"true"}}
	// shellOnly has a shell, which is no bash, and nothing that a script could call.
	shellOnly = rootfs{programs: []string{"sh"}}
	// numeric is for a user whom nobody has named.
	numeric = rootfs{programs: []string{"true", "id"}, changes: []string{"USER 1000:1001"}}
	// stubborn wants to be something of its own.
	stubborn = rootfs{
		programs: ordinary.programs, files: ordinary.files, dirs: ordinary.dirs,
		changes: []string{
			"USER worker", "ENV FROM_IMAGE=yes PATH=/bin:/opt", `ENTRYPOINT ["/bin/sh","-c","exit 7"]`, "CMD [\"x\"]",
			"WORKDIR /srv", "HEALTHCHECK CMD exit 1", "VOLUME /data",
		},
	}
)

// imported puts an image on the engine and returns its name.
func imported(t testing.TB, tag string, from rootfs) string {
	t.Helper()
	engine := onEngine(t)
	reference := "berth-test-" + strings.ToLower(brokerID) + ":" + tag
	if slices.Contains(yard.images, reference) {
		return reference
	}
	archive := tarOf(t, from)
	made, err := engine.ImageImport(t.Context(), client.ImageImportSource{Source: archive, SourceName: "-"}, reference, client.ImageImportOptions{Changes: from.changes})
	if err != nil {
		t.Fatal(err)
	}
	if said, err := io.ReadAll(made); err != nil || strings.Contains(string(said), "error") {
		t.Fatalf("importing an image: %s, %v", said, err)
	}
	if err := made.Close(); err != nil {
		t.Fatal(err)
	}
	yard.images = append(yard.images, reference)
	return reference
}

func tarOf(t testing.TB, from rootfs) io.Reader {
	t.Helper()
	program := busybox(t)
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	add := func(header tar.Header, content []byte) {
		header.Size = int64(len(content))
		if err := w.WriteHeader(&header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range from.dirs {
		add(tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	}
	for at, name := range from.programs {
		if at == 0 {
			add(tar.Header{Name: "bin/" + name, Typeflag: tar.TypeReg, Mode: 0o755}, program)
			continue
		}
		add(tar.Header{Name: "bin/" + name, Typeflag: tar.TypeLink, Linkname: "bin/" + from.programs[0], Mode: 0o755}, nil)
	}
	for name, content := range from.others {
		add(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755}, []byte(content))
	}
	for name, content := range from.files {
		add(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, []byte(content))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &archive
}

// busybox returns a static busybox, which images are made of: no registry is asked for any.
func busybox(t testing.TB) []byte {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err == nil {
		var out []byte
		if out, err = exec.Command("ldd", path).CombinedOutput(); err == nil && strings.Contains(string(out), "=>") {
			err = fmt.Errorf("%s is not static", path)
		} else {
			err = nil
		}
	}
	if err != nil {
		lacking(t, fmt.Sprintf("needs a static busybox (Debian's busybox-static) to make an image: %v", err))
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// lacking skips a test that cannot make its image, or fails it where an engine is demanded.
func lacking(t testing.TB, message string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("BERTH_REQUIRE"), ","), "docker") {
		t.Fatal(message)
	}
	t.Skip(message)
}

// muslProgram says who its user is, by name, and what is in the environment, and exits with 3.
const muslProgram = `
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
	struct passwd *user = getpwuid(getuid());
	printf("%s %s\n", user ? user->pw_name : "nobody", getenv("FROM_IMAGE"));
	return 3;
}`

// musl has musl as its only libc, and a program that needs it.
func musl(t testing.TB) rootfs {
	t.Helper()
	compiler, err := exec.LookPath("musl-gcc")
	if err != nil {
		lacking(t, fmt.Sprintf("needs musl-gcc (Debian's musl-tools) to make an image: %v", err))
	}
	dir := t.TempDir()
	source, program := filepath.Join(dir, "who.c"), filepath.Join(dir, "who")
	if err := os.WriteFile(source, []byte(muslProgram), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-O", "-s", "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("compile a program: %v: %s", err, out)
	}
	binary, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = binary.Close() }()
	interpreter, err := binary.Section(".interp").Data()
	if err != nil {
		t.Fatal(err)
	}
	loader := strings.TrimRight(string(interpreter), "\x00")
	libc, err := os.ReadFile(loader)
	if err != nil {
		t.Fatal(err)
	}
	who, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	return rootfs{
		programs: []string{"sh"}, others: map[string]string{"usr/bin/musl-who": string(who), strings.TrimPrefix(loader, "/"): string(libc)},
		files: ordinary.files, changes: []string{"USER worker", "ENV FROM_IMAGE=yes"},
	}
}

func TestImagesThatLackThingsOrInsistOnThings(t *testing.T) {
	for _, test := range []struct {
		name    string
		tag     string
		from    rootfs
		options map[string]string
		run     func(t *testing.T, g guest)
	}{
		{"no bash", "ordinary", ordinary, nil, func(t *testing.T, g guest) {
			if got := g.Shell("echo $0; exit 5"); got.Out != "/bin/sh\n" || got.Code != 5 {
				t.Errorf("a script: %+v", got)
			}
		}},
		{"a shell and nothing that a script could call", "shell", shellOnly, nil, func(t *testing.T, g guest) {
			if got := g.Shell("echo $((6*7)); exit 4"); got.Out != "42\n" || got.Code != 4 {
				t.Errorf("a script: %+v", got)
			}
			if got := g.run("ls"); got.Code != 127 || !strings.HasPrefix(got.Reason, "not_found: ") {
				t.Errorf("ls: %+v", got)
			}
		}},
		{"a user without a name, and no /tmp", "numeric", numeric, nil, func(t *testing.T, g guest) {
			if got := g.run("id"); got.Out != "uid=1000 gid=1001 groups=1001\n" {
				t.Errorf("id: %+v", got)
			}
		}},
		{"nothing, in a file system that cannot be written to", "bare", bare, map[string]string{"read_only": "true"}, func(t *testing.T, g guest) {
			if got := g.run("true"); got != (result{}) {
				t.Errorf("true: %+v", got)
			}
		}},
		{"no shell, no users, no /tmp", "bare", bare, nil, func(t *testing.T, g guest) {
			if got := g.run("/bin/true"); got != (result{}) {
				t.Errorf("true: %+v", got)
			}
			if got := g.Shell("true"); got.Code != 127 || !strings.Contains(got.Reason, "shell_missing") {
				t.Errorf("a script: %+v", got)
			}
			if got := g.Run(user("worker", "")); got.Code != 126 || !strings.Contains(got.Reason, "user_unknown") {
				t.Errorf("a user: %+v", got)
			}
		}},
		{"a user, an entrypoint and an environment of its own", "stubborn", stubborn, nil, func(t *testing.T, g guest) {
			if got := g.run("id", "-un"); got.Out != "worker\n" {
				t.Errorf("jobs are %+v", got)
			}
			if got := g.Shell("echo $FROM_IMAGE $PATH; touch /workspace/file"); got.Out != "yes /bin:/opt\n" || got.Code != 0 {
				t.Errorf("its environment and workspace: %+v", got)
			}
			if got := g.Run(user("root", "id -un; cat /.berth/host/boot.json >/dev/null && echo read")); got.Out != "root\nread\n" {
				t.Errorf("root: %+v", got)
			}
			if got := g.Shell("cat /.berth/host/boot.json"); got.Code == 0 {
				t.Error("a job's user reads the token")
			}
		}},
		{"a user of its own in a file system that cannot be written to", "stubborn", stubborn, map[string]string{"read_only": "true"}, func(t *testing.T, g guest) {
			if got := g.Shell("touch /workspace/a /tmp/b && id -un"); got.Out != "worker\n" {
				t.Errorf("writing: %+v", got)
			}
		}},
		{"a file system that cannot be written to", "ordinary", ordinary, map[string]string{"read_only": "true"}, func(t *testing.T, g guest) {
			if got := g.Shell("touch /workspace/a /tmp/b && touch /c"); got.Code == 0 || !strings.Contains(got.Err, "/c: Read-only") {
				t.Errorf("writing: %+v", got)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) { inImage(t, test.tag, test.from, test.options, test.run) })
	}
}

// inImage tries something in a machine of an image.
func inImage(t *testing.T, tag string, from rootfs, options map[string]string, try func(*testing.T, guest)) {
	t.Helper()
	at, p, id := newPlace(t), provider(t), newID()
	spec := at.spec(id, imported(t, tag, from))
	spec.Options = options
	at.create(t, p, spec)
	try(t, at.reach(t, p, id))
	at.destroy(t, p, id)
}

func TestAnImageWithMusl(t *testing.T) {
	onEngine(t)
	inImage(t, "musl", musl(t), nil, func(t *testing.T, g guest) {
		if got := g.run("musl-who"); got.Out != "worker yes\n" || got.Code != 3 {
			t.Errorf("who: %+v", got)
		}
		if got := g.Shell("musl-who | (read -r a b; echo $b $a; exit 6)"); got.Out != "yes worker\n" || got.Code != 6 {
			t.Errorf("who in a script: %+v", got)
		}
	})
}
