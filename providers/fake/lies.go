package fake

import (
	"context"
	"fmt"
	"net"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

// Lie makes these the lies that guests tell from the next reply on; none takes all away. The first
// script, also one without lies, makes brokers dial their guests anew, for from then on somebody stands in
// the middle of every connection. A lie that could never be told is refused.
func (w World) Lie(lies ...faultproxy.Lie) error { return faultproxy.In(w.dir).Write(lies...) }

// Told returns how often a lie was told.
func (w World) Told(id string) (int, error) {
	told, err := faultproxy.In(w.dir).Told(id)
	if err != nil {
		return 0, fmt.Errorf("counting lies: %w", err)
	}
	return told, nil
}

// proxied is a dialer whose connections lead through the fault proxy where lies are wanted.
type proxied struct {
	providers.Dialer
	provider *Provider
	machine  string
}

func (o proxied) Dial(ctx context.Context) (net.Conn, error) {
	conn, err := o.Dialer.Dial(ctx)
	if err != nil {
		return nil, err
	}
	p := o.provider
	if !p.lies.Wanted() {
		return p.honest(conn), nil
	}
	link := faultproxy.Between(conn, o.machine, p.lies, p.log)
	p.work.Go(func() { link.Run(p.ctx) })
	return link.Conn(), nil
}

// honestConn is a connection with nobody in its middle.
type honestConn struct {
	net.Conn
	provider *Provider
}

func (p *Provider) honest(conn net.Conn) net.Conn {
	c := &honestConn{Conn: conn, provider: p}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.plain[c] = true
	return c
}

// Close closes the connection.
func (c *honestConn) Close() error {
	c.provider.mu.Lock()
	delete(c.provider.plain, c)
	c.provider.mu.Unlock()
	return c.Conn.Close()
}

// redial ends the connections with nobody in their middle once lies are wanted, so that they are
// dialled anew.
func (p *Provider) redial() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.plain) == 0 || !p.lies.Wanted() {
		return
	}
	for conn := range p.plain {
		_ = conn.Conn.Close()
		delete(p.plain, conn)
	}
}
