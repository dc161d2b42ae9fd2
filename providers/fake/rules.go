package fake

import (
	"context"
	"fmt"
	"net"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/fake/faultproxy"
)

// SetRules makes these the rules that change what guests say from the next reply on; none takes all away. The first
// script, also one without rules, makes brokers dial their guests anew, for from then on somebody stands in
// the middle of every connection. A rule that could never be applied is refused.
func (w Harness) SetRules(rules ...faultproxy.Rule) error {
	return faultproxy.In(w.dir).Write(rules...)
}

// Applied returns how often a rule was applied.
func (w Harness) Applied(id string) (int, error) {
	times, err := faultproxy.In(w.dir).Applied(id)
	if err != nil {
		return 0, fmt.Errorf("counting rules: %w", err)
	}
	return times, nil
}

// proxied is a dialer whose connections lead through the fault proxy where rules are wanted.
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
	if !p.rules.Wanted() {
		return p.honest(conn), nil
	}
	link := faultproxy.Between(conn, o.machine, p.rules, p.log)
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

// redial ends the connections with nobody in their middle once rules are wanted, so that they are
// dialled anew.
func (p *Provider) redial() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.plain) == 0 || !p.rules.Wanted() {
		return
	}
	for conn := range p.plain {
		_ = conn.Conn.Close()
		delete(p.plain, conn)
	}
}
