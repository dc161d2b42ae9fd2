package cli

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"

	"github.com/berth-sandbox/berth/client/cli/usage"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

const token = "0123456789abcdef"

// guardedBroker answers GetInfo to whoever has the token, at a TCP address.
func guardedBroker(t *testing.T, opts ...grpc.ServerOption) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guard := func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if given := metadata.ValueFromIncomingContext(ctx, "authorization"); len(given) != 1 || given[0] != "Bearer "+token {
			return nil, failure(codes.Unauthenticated, "UNAUTHENTICATED", "no token, or a wrong one", nil)
		}
		return next(ctx, request)
	}
	server := grpc.NewServer(append(opts, grpc.UnaryInterceptor(guard))...)
	berthv1.RegisterAdminServiceServer(server, &fakeBroker{})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return "tcp://" + listener.Addr().String()
}

// certify makes a certificate that has signed itself for 127.0.0.1, and returns its files.
func certify(t *testing.T) (cert, key string, pair tls.Certificate) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert = written(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	key = written(t, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: encoded})))
	if pair, err = tls.LoadX509KeyPair(cert, key); err != nil {
		t.Fatal(err)
	}
	return cert, key, pair
}

func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestATokenGoesWithEveryCallOverTCP(t *testing.T) {
	address := guardedBroker(t)
	for _, test := range []struct {
		name string
		args []string
		env  map[string]string
		code int
		said string
	}{
		{"from a file", []string{"--token-file", written(t, token+"\n")}, nil, 0, ""},
		{"from the environment", nil, map[string]string{"BERTH_TOKEN": token}, 0, ""},
		{"the file wins", []string{"--token-file", written(t, token)}, map[string]string{"BERTH_TOKEN": "other"}, 0, ""},
		{"none", nil, nil, usage.ExitFailure, "--token-file or $BERTH_TOKEN"},
		{"a wrong one", nil, map[string]string{"BERTH_TOKEN": "other"}, usage.ExitFailure, "--token-file or $BERTH_TOKEN"},
		{"an empty file", []string{"--token-file", written(t, "\n")}, nil, usage.ExitUsage, "it is empty"},
		{"a file that is not there", []string{"--token-file", "/no/such"}, nil, usage.ExitUsage, "no such file"},
		{"two lines", []string{"--token-file", written(t, "a\nb")}, nil, usage.ExitUsage, "one line of printable ASCII"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &shell{address: address, env: test.env}
			code := s.run(t, append([]string{"info"}, test.args...)...)
			if code != test.code || !strings.Contains(s.stderr.String(), test.said) {
				t.Errorf("exit %d, stderr %q", code, s.stderr.String())
			}
		})
	}
}

func TestTLSKnowsTheBroker(t *testing.T) {
	cert, key, pair := certify(t)
	other, _, _ := certify(t)
	pool := x509.NewCertPool()
	pool.AddCert(pair.Leaf)
	address := guardedBroker(t, grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	})))
	for _, test := range []struct {
		name, address string
		args          []string
		code          int
		said          string
	}{
		{"with a certificate of its own", address, []string{"--tls-ca", cert, "--tls-cert", cert, "--tls-key", key}, 0, ""},
		{"without one", address, []string{"--tls-ca", cert}, usage.ExitFailure, "cannot reach berthd"},
		{"of another authority", address, []string{"--tls-ca", other, "--tls-cert", cert, "--tls-key", key}, usage.ExitFailure, "unknown authority"},
		{"in plain text", address, nil, usage.ExitFailure, "cannot reach berthd"},
		{"a certificate without its key", address, []string{"--tls-cert", cert}, usage.ExitUsage, "give both"},
		{"an authority that is none", address, []string{"--tls-ca", key}, usage.ExitUsage, "no certificate in PEM"},
		{"at a socket", "unix:///d.sock", []string{"--tls-ca", cert}, usage.ExitUsage, "go with tcp://"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &shell{address: test.address, env: map[string]string{"BERTH_TOKEN": token}}
			if test.code != 0 {
				s.retryTimeout = 300 * time.Millisecond // it never comes to be
			}
			code := s.run(t, append([]string{"info"}, test.args...)...)
			if code != test.code || !strings.Contains(s.stderr.String(), test.said) {
				t.Errorf("exit %d, stderr %q", code, s.stderr.String())
			}
		})
	}
}
