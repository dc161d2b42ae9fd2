package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// authority signs certificates of one name.
type authority struct {
	t      *testing.T
	dir    string
	key    *ecdsa.PrivateKey
	cert   *x509.Certificate
	serial int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir(), serial: 1}
	a.key = a.newKey()
	template := a.template()
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.write("ca", "CERTIFICATE", der)
	return a
}

func (a *authority) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return key
}

func (a *authority) template() *x509.Certificate {
	a.serial++
	return &x509.Certificate{
		SerialNumber: big.NewInt(a.serial), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

// issue makes a certificate and returns its file and its key's.
func (a *authority) issue(name string) (cert, key string) {
	secret := a.newKey()
	der, err := x509.CreateCertificate(rand.Reader, a.template(), a.cert, &secret.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	encoded, err := x509.MarshalECPrivateKey(secret)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.write(name, "CERTIFICATE", der), a.write(name+".key", "EC PRIVATE KEY", encoded)
}

func (a *authority) write(name, kind string, der []byte) string {
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

// client returns credentials that trust the authority and show the certificate of name, if one is given.
func (a *authority) client(name string) credentials.TransportCredentials {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	if name != "" {
		pair, err := tls.LoadX509KeyPair(filepath.Join(a.dir, name), filepath.Join(a.dir, name+".key"))
		if err != nil {
			a.t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config)
}

// served starts a daemon and returns the address of its TCP listener.
func served(t *testing.T, args ...string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "bd-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	guest := filepath.Join(dir, "berth-guest")
	if err := os.WriteFile(guest, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	c, err := resolved(t, append(args, "--state", filepath.Join(dir, "state"), "--run", filepath.Join(dir, "run"), "--provider", "local",
		"--guest", guest, "--listen", "unix://"+filepath.Join(dir, "b.sock"), "--listen", "tcp://127.0.0.1:0")...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, done := make(chan string, 1), make(chan error, 1)
	go func() { done <- serve(ctx, c, told(ready), &strings.Builder{}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("it ended with %v", err)
		}
	})
	select {
	case line := <-ready:
		_, address, found := strings.Cut(strings.TrimSpace(line), "tcp://")
		if !found {
			t.Fatalf("it says %q", line)
		}
		return address
	case err := <-done:
		done <- err
		t.Fatalf("it ended with %v", err)
	}
	return ""
}

// calls makes a unary call, a streaming one, one of health and one of reflection, and returns their errors.
func calls(t *testing.T, address string, transport credentials.TransportCredentials, token string) map[string]error {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(transport))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", token)
	}
	errs := map[string]error{}
	_, errs["unary"] = berthv1.NewAdminServiceClient(conn).GetInfo(ctx, &berthv1.GetInfoRequest{})
	if stream, err := berthv1.NewAdminServiceClient(conn).Backup(ctx, &berthv1.BackupRequest{}); err != nil {
		errs["stream"] = err
	} else {
		_, errs["stream"] = stream.Recv()
	}
	_, errs["health"] = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	if stream, err := reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(ctx); err != nil {
		errs["reflection"] = err
	} else {
		_ = stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}})
		_, errs["reflection"] = stream.Recv()
	}
	return errs
}

func TestATCPListenerAsksEveryCallForItsToken(t *testing.T) {
	const token = "a-token-of-enough-bytes"
	address := served(t, "--token-file", file(t, token+"\n"))
	for name, err := range calls(t, address, insecure.NewCredentials(), "Bearer "+token) {
		if err != nil {
			t.Errorf("%s with the token: %v", name, err)
		}
	}
	for _, given := range []string{"", "Bearer other", token, "Bearer " + token + "x"} {
		for name, err := range calls(t, address, insecure.NewCredentials(), given) {
			if !unauthenticated(err) {
				t.Errorf("%s with %q: %v", name, given, err)
			}
		}
	}
}

func unauthenticated(err error) bool {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return status.Code(err) == codes.Unauthenticated && info.GetReason() == "UNAUTHENTICATED" && strings.Contains(err.Error(), "token")
		}
	}
	return false
}

func TestWithACertificateATCPListenerSpeaksTLSAndAsksForClientsOwn(t *testing.T) {
	const token = "a-token-of-enough-bytes"
	ours, theirs := newAuthority(t), newAuthority(t)
	cert, key := ours.issue("broker")
	ours.issue("client")
	tokenFile := file(t, token)
	for _, test := range []struct {
		name      string
		more      []string
		transport credentials.TransportCredentials
		token     string
		want      codes.Code
	}{
		{"whoever trusts it and has the token", nil, ours.client(""), "Bearer " + token, codes.OK},
		{"no token", nil, ours.client(""), "", codes.Unauthenticated},
		{"no TLS", nil, insecure.NewCredentials(), "Bearer " + token, codes.Unavailable},
		{"another authority", nil, theirs.client(""), "Bearer " + token, codes.Unavailable},
		{"a certificate of a client", []string{"--tls-client-ca", filepath.Join(ours.dir, "ca")}, ours.client("client"), "Bearer " + token, codes.OK},
		{"a certificate of a client and no token", []string{"--tls-client-ca", filepath.Join(ours.dir, "ca")}, ours.client("client"), "", codes.Unauthenticated},
		{"no certificate of a client", []string{"--tls-client-ca", filepath.Join(ours.dir, "ca")}, ours.client(""), "Bearer " + token, codes.Unavailable},
		{"a certificate that another authority has signed", []string{"--tls-client-ca", filepath.Join(theirs.dir, "ca")}, ours.client("client"), "Bearer " + token, codes.Unavailable},
	} {
		t.Run(test.name, func(t *testing.T) {
			address := served(t, append(test.more, "--token-file", tokenFile, "--tls-cert", cert, "--tls-key", key)...)
			if err := calls(t, address, test.transport, test.token)["unary"]; status.Code(err) != test.want {
				t.Errorf("the error is %v, want %s", err, test.want)
			}
		})
	}
}
