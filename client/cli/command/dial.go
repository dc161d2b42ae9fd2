package command

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/pflag"
	"google.golang.org/grpc/credentials"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/usage"
)

// tokenVariable is the environment variable with the token for a broker over TCP.
const tokenVariable = "BERTH_TOKEN"

// Security names the files by which a broker over TCP and this program know each other.
type Security struct{ tokenFile, ca, cert, key string }

// Bind binds the flags.
func (s *Security) Bind(flags *pflag.FlagSet) {
	flags.StringVar(&s.tokenFile, "token-file", "", "file with the token for a broker over TCP (default the token in $BERTH_TOKEN)")
	flags.StringVar(&s.ca, "tls-ca", "", "certificates, in PEM, of who may sign the broker's; turns on TLS (default the system's, with TLS beyond loopback)")
	flags.StringVar(&s.cert, "tls-cert", "", "this client's certificate, in PEM, where the broker wants one")
	flags.StringVar(&s.key, "tls-key", "", "its key, in PEM")
}

func (p *Program) dial(opts ...client.Option) (*client.Client, error) {
	address, source := p.Address, "--addr"
	if address == "" {
		address, source = client.AddressFrom(p.LookupEnv), client.AddressVariable
	}
	secure, err := p.Security.options(address, p.LookupEnv)
	if err != nil {
		return nil, err
	}
	c, err := client.Dial(address, slices.Concat(p.ClientOptions, secure, opts)...)
	if malformed := (*client.AddressError)(nil); errors.As(err, &malformed) {
		return nil, usage.Errorf("%s %q: %s", source, malformed.Address, malformed.Problem)
	}
	return c, err
}

// options are what a client needs for an address.
func (s *Security) options(address string, lookup func(string) (string, bool)) ([]client.Option, error) {
	var opts []client.Option
	token, err := s.token(lookup)
	if err != nil {
		return nil, err
	}
	if token != "" {
		opts = append(opts, client.WithToken(token))
	}
	if s.ca == "" && s.cert == "" && s.key == "" && !client.BeyondLoopback(address) {
		return opts, nil
	}
	if !strings.HasPrefix(address, "tcp://") {
		return nil, usage.Errorf("--tls-ca, --tls-cert and --tls-key go with tcp://host:port")
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if s.ca != "" {
		config.RootCAs = x509.NewCertPool()
		if pem, err := os.ReadFile(filepath.Clean(s.ca)); err != nil || !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usage.Errorf("--tls-ca %s: %s", s.ca, problem(err, "it holds no certificate in PEM"))
		}
	}
	if (s.cert == "") != (s.key == "") {
		return nil, usage.Errorf("--tls-cert and --tls-key: give both")
	}
	if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			return nil, usage.Errorf("--tls-cert %s, --tls-key %s: %v", s.cert, s.key, err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return append(opts, client.WithTransportCredentials(credentials.NewTLS(config))), nil
}

// token is the file's text, else the environment's. No error holds any of it.
func (s *Security) token(lookup func(string) (string, bool)) (string, error) {
	token, _ := lookup(tokenVariable)
	source := "$" + tokenVariable
	if s.tokenFile != "" {
		source = "--token-file " + s.tokenFile
		text, err := os.ReadFile(filepath.Clean(s.tokenFile))
		token = strings.TrimSpace(string(text))
		if err != nil || token == "" {
			return "", usage.Errorf("%s: %s", source, problem(err, "it is empty"))
		}
	}
	if strings.ContainsFunc(token, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsGraphic(r) || r == ' ' }) {
		return "", usage.Errorf("%s: a token is one line of printable ASCII without spaces", source)
	}
	return token, nil
}

// problem is an error, or what else is wrong.
func problem(err error, otherwise string) string {
	if err != nil {
		return err.Error()
	}
	return otherwise
}
