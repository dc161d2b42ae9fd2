package provider

import (
	"context"
	"errors"
	"time"

	"github.com/berth-sandbox/berth/providers"
)

// deadDialTime is how long a dead guest is dialled: it ends by the context, whenever that is.
const deadDialTime = 300 * time.Millisecond

func (m *machine) dialer() providers.Dialer {
	m.Helper()
	dialer, err := m.provider.Dialer(m.Context(), m.found())
	if err != nil {
		m.Fatalf("Dialer: %v", err)
	}
	m.Cleanup(func() { _ = dialer.Close() }) // a second time is as good
	return dialer
}

func (h *harness) dial() {
	m := h.created()
	dialer := m.dialer()
	for range 5 { // each stream is its own, and the ones before stay
		g, err := ConnectThrough(m, dialer, m.spec)
		if err != nil {
			m.Fatal(err)
		}
		g.shell("true")
	}
	guests := make([]*Guest, 6)
	each(h, len(guests), func(i int) (err error) {
		guests[i], err = ConnectThrough(m, dialer, m.spec)
		return err
	})
	cancelled, cancel := context.WithCancel(m.Context())
	cancel()
	if conn, err := dialer.Dial(cancelled); !errors.Is(err, context.Canceled) {
		if err == nil {
			_ = conn.Close()
		}
		m.Errorf("a dial with a cancelled context: %v, want context.Canceled", err)
	}
	if err := dialer.Close(); err != nil {
		m.Errorf("closing the dialer: %v", err)
	}
	for _, g := range guests {
		if g != nil {
			g.shell("true") // the streams outlive their dialer
		}
	}
	next, err := ConnectThrough(m, m.dialer(), m.spec)
	if err != nil {
		m.Fatal(err)
	}
	next.shell("true")
	m.destroy()
}

func (h *harness) dialDead() {
	m := h.stopped()
	dialer := m.dialer()
	ctx, cancel := context.WithTimeout(m.Context(), deadDialTime)
	defer cancel()
	if conn, err := dialer.Dial(ctx); err == nil {
		_ = conn.Close()
		m.Error("a dead guest was reached")
	}
	if err := dialer.Close(); err != nil {
		m.Errorf("closing the dialer: %v", err)
	}
	m.create(m.provider)
	m.works(m.provider)
}
