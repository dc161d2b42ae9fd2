package crash

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/berth-sandbox/berth/conformance/fixture"

	"github.com/berth-sandbox/berth/conformance/failpoint"
)

// explosiveGuest is a guest program that has its failpoint switched on for its first start only.
func explosiveGuest(t *testing.T, guest, term string) string {
	t.Helper()
	dir := t.TempDir()
	fuse := filepath.Join(dir, "fuse")
	if err := os.WriteFile(fuse, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\nif rm '%s' 2>/dev/null; then export %s='%s'; fi\nexec '%s' \"$@\"\n",
		fuse, failpoint.EnvironmentVariable, term, guest)
	path := filepath.Join(dir, "berth-guest")
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// explosiveGuestOfOneFile is explosiveGuest for machines that see nothing of this host: a script with
// the program behind it, which explodes at the first start of each machine.
func explosiveGuestOfOneFile(t *testing.T, guest, term string) string {
	t.Helper()
	program, err := os.ReadFile(guest)
	if err != nil {
		t.Fatal(err)
	}
	const lines = 5
	script := fmt.Sprintf(`#!/bin/sh
[ -x /guest ] || { tail -n +%d "$0" >/guest.$$ && chmod 0755 /guest.$$ && mv /guest.$$ /guest; }
if [ "$1" = init ] && mkdir /fuse 2>/dev/null; then export %s='%s'; fi
exec /guest "$@"
exit
`, lines+1, failpoint.EnvironmentVariable, term)
	return writeGuest(t, append([]byte(script), program...))
}

// guestOfItsOwn is the same guest with another digest.
func guestOfItsOwn(t *testing.T, guest string) string {
	t.Helper()
	program, err := os.ReadFile(guest)
	if err != nil {
		t.Fatal(err)
	}
	return writeGuest(t, append(program, t.TempDir()...))
}

// writeGuest writes a guest program, and removes the engine's copy of it when the test is over.
func writeGuest(t *testing.T, program []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "berth-guest")
	if err := os.WriteFile(path, program, 0o700); err != nil {
		t.Fatal(err)
	}
	if fixture.OnDocker() {
		sum := sha256.Sum256(program)
		t.Cleanup(func() {
			volume := "berth-guest-" + hex.EncodeToString(sum[:])[:12] // as the docker provider names it
			if out, err := exec.Command("docker", "volume", "rm", "-f", volume).CombinedOutput(); err != nil {
				t.Errorf("remove the volume of a guest: %v: %s", err, out)
			}
		})
	}
	return path
}
