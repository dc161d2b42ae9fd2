package connection

import (
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc/credentials/insecure"
)

func TestDefaultAddress(t *testing.T) {
	for _, test := range []struct {
		name string
		env  map[string]string
		uid  int
		want string
	}{
		{"the variable comes first", map[string]string{"BERTH_ADDR": "tcp://localhost:1"}, 0, "tcp://localhost:1"},
		{"root's is in /run", map[string]string{"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "unix:///run/berth/berthd.sock"},
		{"a user's is in the runtime directory", map[string]string{"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "unix:///run/user/7/berth/berthd.sock"},
		{"a user's without one is in /tmp", nil, 7, "unix:///tmp/berth-7/berthd.sock"},
	} {
		t.Run(test.name, func(t *testing.T) {
			lookup := func(key string) (string, bool) { value, ok := test.env[key]; return value, ok }
			if got := addressFor(lookup, test.uid); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestDialRefusesAddressesInWords(t *testing.T) {
	secured := WithTransportCredentials(insecure.NewCredentials())
	for _, test := range []struct {
		address string
		opts    []Option
		refusal string // empty: it is taken
	}{
		{"unix:///run/berth/berthd.sock", nil, ""},
		{"unix:///" + strings.Repeat("x", 106), nil, ""},
		{"unix:///" + strings.Repeat("x", 107), nil, "108 bytes, the kernel allows 107"},
		{"unix://relative.sock", nil, "must be absolute"},
		{"tcp://127.0.0.1:7070", nil, ""},
		{"tcp://[::1]:7070", nil, ""},
		{"tcp://localhost:7070", nil, ""},
		{"tcp://example.org:7070", nil, "needs TLS credentials"},
		{"tcp://10.0.0.1:7070", nil, "needs TLS credentials"},
		{"tcp://example.org:7070", []Option{secured}, ""},
		{"tcp://localhost", nil, "must be tcp://host:port"},
		{"http://localhost:1", nil, "must be unix:///path or tcp://host:port"},
		{"/run/berth/berthd.sock", nil, "must be unix:///path or tcp://host:port"},
	} {
		t.Run(test.address, func(t *testing.T) {
			c, err := Dial(test.address, test.opts...)
			if c != nil {
				defer func() {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}()
			}
			switch {
			case test.refusal == "" && err != nil:
				t.Errorf("refused: %v", err)
			case test.refusal != "" && (err == nil || !strings.Contains(err.Error(), test.refusal)):
				t.Errorf("got %v, want %q", err, test.refusal)
			}
		})
	}
}

func TestADirectoryOfAnotherUserIsNotDialled(t *testing.T) {
	if err := checkOwner(t.TempDir()); err != nil {
		t.Errorf("our own: %v", err)
	}
	if err := checkOwner("/proc/self/exe"); err == nil {
		t.Error("what is no directory was taken")
	}
	if err := checkOwner("/nowhere"); err == nil {
		t.Error("what is not there was taken")
	}
}

func TestWhatIsBeyondLoopbackIsNotSpokenToInPlainText(t *testing.T) {
	for address, beyond := range map[string]bool{
		"127.0.0.1:7000": false, "[::1]:7000": false, "127.255.0.1:7": false, "192.0.2.1:7000": true, "[2001:db8::1]:7000": true, "0.0.0.0:7000": true,
	} {
		resolved, err := net.ResolveTCPAddr("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		if isLoopback(resolved) == beyond || BeyondLoopback("tcp://"+address) != beyond {
			t.Errorf("%s: taken for loopback: %v", address, isLoopback(resolved))
		}
	}
	if BeyondLoopback("unix:///d.sock") || BeyondLoopback("tcp://localhost:7000") || !BeyondLoopback("tcp://example.com:7000") {
		t.Error("a socket or a name is taken for what it is not")
	}
}
