package docker_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/moby/moby/client"

	contract "github.com/berth-sandbox/berth/conformance/provider"
	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

func TestTheContract(t *testing.T) {
	onEngine(t)
	contract.Suite(t, func(t *testing.T) *contract.Place { return newPlace(t).contract(t) })
}

// contract is the place as the suite has it, on the engine behind a proxy that can fail it.
func (l place) contract(t *testing.T) *contract.Place {
	t.Helper()
	engine, proxy := onEngine(t), newProxy(t, filepath.Join(l.sockets, "engine"))
	return &contract.Place{
		Slow: true, BrokerID: brokerID, Image: imported(t, "ordinary", ordinary), Sockets: filepath.Join(l.sockets, "s"),
		Open: func(t testing.TB, brokerID string) providers.Provider {
			t.Helper()
			return provider(t, func(o *docker.Options) { o.BrokerID, o.Host = brokerID, proxy.host })
		},
		KillGuest: func(t testing.TB, id string) {
			t.Helper()
			_, err := engine.ContainerKill(t.Context(), "berth-"+id, client.ContainerKillOptions{})
			must(t, err)
		},
		Traces: func(t testing.TB, id string) []string {
			t.Helper()
			labels := client.Filters{}.Add("label", "dev.berth.machine="+id)
			var left []string
			containers, err := engine.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: labels})
			must(t, err)
			for _, c := range containers.Items {
				left = append(left, "container "+strings.Join(c.Names, " ")+" "+string(c.State))
			}
			for _, volume := range volumesOf(t, engine, brokerID, id) {
				left = append(left, "volume "+volume)
			}
			if _, err := os.Lstat(filepath.Join(l.sockets, "s", id)); err == nil {
				left = append(left, "socket directory")
			}
			return left
		},
		Failpoints: buildCrasher(t), Crash: crash,
		Obstacles: []contract.Obstacle{
			{Name: "the socket directory cannot be made", Put: func(t testing.TB, spec providers.MachineSpec) func() {
				// Whatever was there is gone, as after a reboot of the host.
				dir := filepath.Dir(spec.ListenDir)
				must(t, os.RemoveAll(dir))
				must(t, os.WriteFile(dir, nil, 0o600))
				return func() { must(t, os.Remove(dir)) }
			}},
			proxy.fails("the engine refuses to make the container", "POST .*/containers/create", 500),
			proxy.fails("the engine is away when a container is to be made", "POST .*/containers/create", 503),
			proxy.fails("the engine refuses to start the container", "POST .*/containers/[^/]+/start", 500),
			proxy.fails("the engine is away when the container is to be started", "POST .*/containers/[^/]+/start", 503),
			proxy.fails("the engine does not say that the container was made", "POST .*/containers/create", 0),
			proxy.fails("the engine does not say that the container was started", "POST .*/containers/[^/]+/start", 0),
			proxy.fails("the engine is away when the container is looked at", "GET .*/containers/[^/]+/json", 503),
			proxy.fails("the engine refuses to make the network", "POST .*/networks/create", 500),
			proxy.fails("the engine does not say that the network was made", "POST .*/networks/create", 0),
			proxy.fails("the engine is away when the networks are listed", "GET .*/networks", 503),
			proxy.fails("the engine is away when the network is looked at", "GET .*/networks/[^/]+", 503),
			proxy.fails("the engine is away when the image is looked at", "GET .*/images/.*", 503),
		},
	}
}

// proxy passes on what a provider says to the engine, and fails what it is told to.
type proxy struct {
	host  string
	fault atomic.Pointer[fault]
}

// fault fails requests; with the status 0 they are passed on, and it is the answer that is lost.
type fault struct {
	requests *regexp.Regexp // METHOD path
	status   int
}

func newProxy(t *testing.T, socket string) *proxy {
	t.Helper()
	p := &proxy{host: "unix://" + socket}
	network, address, found := strings.Cut(onEngine(t).DaemonHost(), "://")
	if !found {
		t.Fatalf("the engine is at %q", onEngine(t).DaemonHost())
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	forward := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1,
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "engine"}) },
		ModifyResponse: func(r *http.Response) error {
			if fault := p.met(r.Request); fault != nil {
				return http.ErrAbortHandler
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }, // the connection breaks
	}
	listener, err := net.Listen("unix", socket)
	must(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fault := p.met(r); fault != nil && fault.status != 0 {
			refuse(fault.status, "as the test has it")(w, r)
			return
		}
		forward.ServeHTTP(w, r)
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		_ = server.Close()
		if err := <-served; err == nil {
			t.Error("the proxy ended by itself")
		}
		transport.CloseIdleConnections()
	})
	return p
}

func (p *proxy) met(r *http.Request) *fault {
	fault := p.fault.Load()
	if fault == nil || !fault.requests.MatchString(r.Method+" "+r.URL.Path) {
		return nil
	}
	return fault
}

func (p *proxy) fails(name, requests string, status int) contract.Obstacle {
	return contract.Obstacle{Name: name, Put: func(testing.TB, providers.MachineSpec) func() {
		p.fault.Store(&fault{requests: regexp.MustCompile("^" + requests + "$"), status: status})
		return func() { p.fault.Store(nil) }
	}}
}
