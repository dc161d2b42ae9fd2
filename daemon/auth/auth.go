// Package auth turns the credentials of a connection into a principal and the namespace that it works in,
// and carries both in a context. Only daemon/api asks it; packages below get a namespace in their calls.
package auth

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// DefaultNamespace is that of every credential that names none.
const DefaultNamespace = "default"

// Bounds of a token, in bytes. The least is what cannot be guessed over a network.
const (
	minToken = 16
	maxToken = 4096
)

// Principal is who calls, and in which namespace.
type Principal struct{ Name, Namespace string }

type contextKey struct{}

// NewContext returns a context that carries a principal.
func NewContext(ctx context.Context, principal Principal) context.Context {
	return context.WithValue(ctx, contextKey{}, principal)
}

// FromContext returns the principal of a context. Without one it is nobody, whose namespace has no name
// and holds nothing.
func FromContext(ctx context.Context) Principal {
	principal, _ := ctx.Value(contextKey{}).(Principal)
	return principal
}

// Credential is what a call says of its caller.
type Credential struct {
	Network       string   // of the connection, as net.Addr names it; a unix socket is guarded by its file's mode
	Authorization []string // values of the metadata key `authorization`
}

// Authenticator knows the credentials that are accepted.
type Authenticator struct {
	token [sha256.Size]byte // of the bearer token, so that tokens of every length compare in the same time
	set   bool
}

// New returns an authenticator for a bearer token; with an empty one only unix sockets are let in.
func New(token string) *Authenticator {
	return &Authenticator{token: sha256.Sum256([]byte(token)), set: token != ""}
}

// Authenticate returns whose credential it is. Its error is UNAUTHENTICATED.
func (a *Authenticator) Authenticate(credential Credential) (Principal, error) {
	if credential.Network == "unix" {
		return Principal{Name: "local", Namespace: DefaultNamespace}, nil
	}
	if len(credential.Authorization) == 0 {
		return Principal{}, fault.New(fault.Unauthenticated, "this listener asks for a token: "+
			"give berth --token-file or $BERTH_TOKEN; other clients send the metadata `authorization: Bearer TOKEN`")
	}
	scheme, token, _ := strings.Cut(credential.Authorization[0], " ")
	given := sha256.Sum256([]byte(strings.TrimSpace(token)))
	known := subtle.ConstantTimeCompare(given[:], a.token[:]) == 1
	if !known || !a.set || !strings.EqualFold(scheme, "bearer") || len(credential.Authorization) > 1 {
		return Principal{}, fault.New(fault.Unauthenticated, "the token is not this broker's: "+
			"give the content of the file that berthd --token-file names, as `authorization: Bearer TOKEN`")
	}
	return Principal{Name: "token", Namespace: DefaultNamespace}, nil
}

// ReadToken reads a token from a file that not everybody may read. White space around it is left out.
func ReadToken(path string) (string, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe must not block
	if err != nil {
		return "", err
	}
	data, err := readPrivate(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return "", err
	}
	token := string(bytes.TrimSpace(data))
	switch {
	case len(token) < minToken:
		return "", fmt.Errorf("the token in %s has %d bytes, and at least %d are needed: make one with `head -c 24 /dev/urandom | base64`", path, len(token), minToken)
	case strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return "", fmt.Errorf("the token in %s is not one word of printable ASCII: make one with `head -c 24 /dev/urandom | base64`", path)
	}
	return token, nil
}

func readPrivate(file *os.File) ([]byte, error) {
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", file.Name())
	case info.Mode().Perm()&0o007 != 0:
		return nil, fmt.Errorf("everybody on this host may read or change %s: chmod o= it", file.Name())
	case info.Size() > maxToken:
		return nil, fmt.Errorf("%s has %d bytes, and a token at most %d", file.Name(), info.Size(), maxToken)
	}
	return io.ReadAll(io.LimitReader(file, maxToken))
}
