package docker_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// Brokers that have a new guest at the same time would take its file away from one another.
func TestBrokersThatBringTheSameGuestTakeTurns(t *testing.T) {
	const brokers = 6
	engine, image := onEngine(t), imported(t, "ordinary", ordinary)
	program, err := os.ReadFile(guestProgram)
	must(t, err)
	program = append(program, t.TempDir()...)
	guest := filepath.Join(t.TempDir(), "berth-guest")
	must(t, os.WriteFile(guest, program, 0o700))
	volume := fmt.Sprintf("berth-guest-%x", sha256.Sum256(program))[:len("berth-guest-")+12]
	t.Cleanup(func() {
		if _, err := engine.VolumeRemove(context.Background(), volume, client.VolumeRemoveOptions{}); err != nil {
			t.Error(err)
		}
	})
	at := newPlace(t)
	providersOf := make([]*docker.Provider, brokers)
	specs := make([]providers.MachineSpec, brokers)
	for i := range brokers {
		own := fmt.Sprintf("%s%d", brokerID, i)
		providersOf[i] = provider(t, func(o *docker.Options) {
			o.BrokerID, o.GuestPath = own, func(string) (string, error) { return guest, nil }
		})
		specs[i] = at.spec(newID(), image)
		specs[i].BrokerID = own
		t.Cleanup(func() {
			if err := providersOf[i].Destroy(context.Background(), at.machine(specs[i].MachineID)); err != nil {
				t.Error(err)
			}
		})
	}
	var group errgroup.Group
	for i, p := range providersOf {
		group.Go(func() error {
			_, err := p.Create(t.Context(), specs[i])
			return err
		})
	}
	must(t, group.Wait())
	for i, p := range providersOf {
		if got := at.reach(t, p, specs[i].MachineID).run("true"); got != (result{}) {
			t.Errorf("true on the machine of broker %d: %+v", i, got)
		}
	}
}

func TestAHelperThatIsAnotherBrokersIsWaitedFor(t *testing.T) {
	engine, image := onEngine(t), imported(t, "ordinary", ordinary)
	helper, err := engine.ContainerCreate(t.Context(), client.ContainerCreateOptions{
		Name:   "berth-prepare-" + guestDigest()[:12],
		Config: &container.Config{Image: image, Cmd: []string{"true"}},
	})
	must(t, err)
	removed := false
	remove := func() {
		if !removed {
			removed = true
			_, err := engine.ContainerRemove(context.Background(), helper.ID, client.ContainerRemoveOptions{Force: true})
			must(t, err)
		}
	}
	t.Cleanup(remove)
	at, id := newPlace(t), newID()
	p := provider(t) // it knows nothing of the engine yet, so it has to prepare it
	short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err = p.Create(short, at.spec(id, image))
	if err == nil || !strings.Contains(err.Error(), "berth-prepare-") {
		t.Errorf("beside another broker's helper: %v", err)
	}
	remove()
	at.create(t, p, at.spec(id, image))
	at.destroy(t, p, id)
}
