package auth

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/berth-sandbox/berth/daemon/fault"
)

const token = "0123456789abcdef"

func TestWhoIsLetIn(t *testing.T) {
	for _, test := range []struct {
		name          string
		token         string
		network       string
		authorization []string
		want          string // empty: nobody
	}{
		{"whoever may open the socket", token, "unix", nil, "local"},
		{"the same without a token", "", "unix", nil, "local"},
		{"who knows the token", token, "tcp", []string{"Bearer " + token}, "token"},
		{"a scheme in other letters", token, "tcp", []string{"bearer " + token}, "token"},
		{"nobody", token, "tcp", nil, ""},
		{"nothing but the scheme", token, "tcp", []string{"Bearer "}, ""},
		{"another token", token, "tcp", []string{"Bearer 0123456789abcdeF"}, ""},
		{"a longer token", token, "tcp", []string{"Bearer " + token + "0"}, ""},
		{"the beginning of the token", token, "tcp", []string{"Bearer " + token[:15]}, ""},
		{"another scheme", token, "tcp", []string{"Basic " + token}, ""},
		{"the token without a scheme", token, "tcp", []string{token}, ""},
		{"two tokens", token, "tcp", []string{"Bearer " + token, "Bearer other"}, ""},
		{"an empty token where there is none", "", "tcp", []string{"Bearer "}, ""},
		{"a network that nobody knows", token, "", nil, ""},
	} {
		principal, err := New(test.token).Authenticate(Credential{Network: test.network, Authorization: test.authorization})
		if principal.Name != test.want || (principal.Namespace == DefaultNamespace) != (test.want != "") {
			t.Errorf("%s: it is %+v", test.name, principal)
		}
		if test.want == "" && (!fault.Is(err, fault.Unauthenticated) || !strings.Contains(err.Error(), "authorization: Bearer TOKEN")) {
			t.Errorf("%s: the error is %v", test.name, err)
		}
		if test.want != "" && err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

func TestAContextCarriesItsPrincipalAndNobodyWithoutOne(t *testing.T) {
	want := Principal{Name: "somebody", Namespace: "theirs"}
	if got := FromContext(NewContext(context.Background(), want)); got != want {
		t.Errorf("it is %+v", got)
	}
	if got := FromContext(context.Background()); got != (Principal{}) {
		t.Errorf("without one it is %+v", got)
	}
}

func TestATokenIsReadFromAFileThatIsNotForEverybody(t *testing.T) {
	for _, test := range []struct {
		name, content string
		mode          os.FileMode
		want          string // part of the error; empty: it is read
	}{
		{"one line", token + "\n", 0o600, ""},
		{"white space around it", " \r\n" + token + "\t\n", 0o400, ""},
		{"for a group", token, 0o640, ""},
		{"for everybody to read", token, 0o604, "chmod o="},
		{"for everybody to write", token, 0o602, "chmod o="},
		{"a byte too short", token[:15] + "\n", 0o600, "at least 16"},
		{"nothing", "", 0o600, "at least 16"},
		{"two words", token + " " + token, 0o600, "one word"},
		{"what no metadata can hold", token + "ü", 0o600, "one word"},
		{"too long", strings.Repeat("x", maxToken+1), 0o600, "at most"},
	} {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, test.mode); err != nil {
			t.Fatal(err)
		}
		got, err := ReadToken(path)
		switch {
		case test.want == "" && (err != nil || got != token):
			t.Errorf("%s: it is %q, %v", test.name, got, err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), token)):
			t.Errorf("%s: the error is %v", test.name, err)
		}
	}
	if _, err := ReadToken(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a file that is not there was read")
	}
	if _, err := ReadToken(t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a directory: %v", err)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadToken(pipe); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a pipe: %v", err)
	}
}
