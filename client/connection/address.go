package connection

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// AddressVariable is the environment variable that names the broker.
const AddressVariable = "BERTH_ADDR"

// maxSocketPath is the kernel's limit for a unix socket's path, in bytes, without the closing NUL.
const maxSocketPath = 107

// DefaultAddress returns where the broker is by this process's environment: $BERTH_ADDR, else
// unix:///run/berth/berthd.sock for root, else $XDG_RUNTIME_DIR/berth/berthd.sock, else
// /tmp/berth-<uid>/berthd.sock.
func DefaultAddress() string { return AddressFrom(os.LookupEnv) }

// AddressFrom is DefaultAddress with another environment, looked up as by os.LookupEnv.
func AddressFrom(lookup func(string) (string, bool)) string {
	return addressFor(lookup, os.Getuid())
}

func addressFor(lookup func(string) (string, bool), uid int) string {
	if address, _ := lookup(AddressVariable); address != "" {
		return address
	}
	if uid == 0 {
		return "unix:///run/berth/berthd.sock"
	}
	if dir, _ := lookup("XDG_RUNTIME_DIR"); dir != "" {
		return "unix://" + filepath.Join(dir, "berth", "berthd.sock")
	}
	return "unix://" + filepath.Join(sharedDir(uid), "berthd.sock")
}

// sharedDir is the socket's directory where a user has no runtime directory. Anybody could have made
// it first, so its owner is checked before every dial.
func sharedDir(uid int) string { return "/tmp/berth-" + strconv.Itoa(uid) }

// AddressError says that an address is none of a broker's: nothing was dialled.
type AddressError struct {
	Address string
	// Problem says how an address must be.
	Problem string
}

// Error names the address and what is wrong with it.
func (e *AddressError) Error() string { return fmt.Sprintf("address %q: %s", e.Address, e.Problem) }

func refuse(address, format string, args ...any) error {
	return &AddressError{Address: address, Problem: fmt.Sprintf(format, args...)}
}

// target is where to dial.
type target struct {
	network   string // unix or tcp
	address   string // a path, or host:port
	authority string // what gRPC and TLS call the peer
}

func parseAddress(address string, secured bool) (target, error) {
	scheme, rest, found := strings.Cut(address, "://")
	switch {
	case found && scheme == "unix":
		return parseSocket(address, rest)
	case found && scheme == "tcp":
		return parseTCP(address, rest, secured)
	default:
		return target{}, refuse(address, "it must be unix:///path or tcp://host:port")
	}
}

func parseSocket(address, path string) (target, error) {
	if !filepath.IsAbs(path) {
		return target{}, refuse(address, "the socket's path must be absolute, as in unix:///run/berth/berthd.sock")
	}
	if len(path) > maxSocketPath {
		return target{}, refuse(address, "the socket's path has %d bytes, the kernel allows %d: choose a shorter one", len(path), maxSocketPath)
	}
	return target{network: "unix", address: path, authority: "localhost"}, nil
}

func parseTCP(address, hostPort string, secured bool) (target, error) {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil || host == "" || port == "" {
		return target{}, refuse(address, "it must be tcp://host:port")
	}
	if !secured && !namesLoopback(host) {
		return target{}, refuse(address, "beyond loopback the connection needs TLS credentials; without them only localhost, 127.0.0.1 and [::1] are dialled")
	}
	return target{network: "tcp", address: hostPort, authority: hostPort}, nil
}

func namesLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// BeyondLoopback reports whether an address is one that is dialled under TLS only.
func BeyondLoopback(address string) bool {
	hostPort, isTCP := strings.CutPrefix(address, "tcp://")
	host, _, err := net.SplitHostPort(hostPort)
	return isTCP && err == nil && !namesLoopback(host)
}
