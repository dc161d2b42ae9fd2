package fake

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	contract "github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
)

func TestTheContract(t *testing.T) { contract.Suite(t, place) }

// place is a directory of machines as the suite has it, whose obstacles are faults of the script.
func place(t *testing.T) *contract.Place {
	_, dir := open(t)
	harness := At(filepath.Join(dir, "m"))
	scripted := func(kind Kind) contract.Obstacle {
		return contract.Obstacle{Name: "the fault " + string(kind), Put: func(t testing.TB, _ providers.MachineSpec) func() {
			must(t, harness.Script(Fault{Call: CallCreate, Kind: kind}))
			return func() { must(t, harness.Script()) }
		}}
	}
	return &contract.Place{
		Sockets: filepath.Join(dir, "s"),
		Open: func(t testing.TB, brokerID string) providers.Provider {
			t.Helper()
			p, err := New(Options{Dir: filepath.Join(dir, "m"), BrokerID: brokerID, GuestPath: guestPath(t)})
			must(t, err)
			t.Cleanup(func() { must(t, p.Close()) })
			return p
		},
		KillGuest: func(t testing.TB, id string) {
			t.Helper()
			m, err := harness.machine(id)
			must(t, err)
			must(t, m.signalGuest(9))
		},
		Traces: func(t testing.TB, id string) (left []string) {
			t.Helper()
			for _, path := range []string{filepath.Join(dir, "m", id), harness.gone(id), filepath.Join(dir, "s", id)} {
				if _, err := os.Lstat(path); err == nil {
					left = append(left, path)
				}
			}
			members, err := (&machine{dir: filepath.Join(dir, "m", id)}).members()
			must(t, err)
			for _, pid := range members {
				line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				left = append(left, fmt.Sprintf("process %d: %s", pid, bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
			}
			return left
		},
		Obstacles: []contract.Obstacle{
			scripted(Refuse), scripted(Capacity), scripted(Unavailable), scripted(Fail), scripted(LoseReply),
			{Name: "the socket directory cannot be made", Put: func(t testing.TB, spec providers.MachineSpec) func() {
				dir := filepath.Dir(spec.ListenDir)
				must(t, os.RemoveAll(dir))
				must(t, os.WriteFile(dir, nil, 0o600))
				return func() { must(t, os.Remove(dir)) }
			}},
		},
	}
}
