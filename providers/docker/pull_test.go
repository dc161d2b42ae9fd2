package docker_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// registry serves one image on loopback, where engines speak plain HTTP.
type registry struct {
	name     string        // of the image, with the registry's address
	stall    chan struct{} // not nil: layers break off halfway until it is closed
	stalled  chan struct{} // has a token when one did
	requests atomic.Int32  // for the layer
}

const (
	manifestType = "application/vnd.docker.distribution.manifest.v2+json"
	configType   = "application/vnd.docker.container.image.v1+json"
	layerType    = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

func newRegistry(t *testing.T, from rootfs) *registry {
	t.Helper()
	engine := onEngine(t)
	// A layer that the engine has from elsewhere is not asked for.
	from.files = maps.Clone(from.files)
	from.files["of"] = t.TempDir()
	layer, err := io.ReadAll(tarOf(t, from))
	must(t, err)
	var packed bytes.Buffer
	packer := gzip.NewWriter(&packed)
	_, err = packer.Write(layer)
	must(t, errors.Join(err, packer.Close()))
	config := encoded(t, map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Env": []string{"PULLED=yes"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	manifest := encoded(t, map[string]any{
		"schemaVersion": 2, "mediaType": manifestType,
		"config": map[string]any{"mediaType": configType, "size": len(config), "digest": digest(config)},
		"layers": []any{map[string]any{"mediaType": layerType, "size": packed.Len(), "digest": digest(packed.Bytes())}},
	})
	r := &registry{stalled: make(chan struct{}, 1)}
	mux := http.NewServeMux()
	mux.HandleFunc("/v2/{$}", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v2/it/manifests/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", manifestType)
		w.Header().Set("Docker-Content-Digest", digest(manifest))
		_, _ = w.Write(manifest)
	})
	mux.HandleFunc("/v2/it/blobs/"+digest(config), func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(config) })
	mux.HandleFunc("/v2/it/blobs/"+digest(packed.Bytes()), func(w http.ResponseWriter, req *http.Request) {
		r.requests.Add(1)
		r.layer(w, req, packed.Bytes())
	})
	server := httptest.NewServer(mux)
	r.name = strings.TrimPrefix(server.URL, "http://") + "/it:1"
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		// An image that a test never got is none to remove.
		_, _ = engine.ImageRemove(context.Background(), r.name, client.ImageRemoveOptions{Force: true, PruneChildren: true})
	})
	return r
}

// layer sends the layer, or the half of it and then nothing.
func (r *registry) layer(w http.ResponseWriter, req *http.Request, content []byte) {
	if r.stall == nil {
		_, _ = w.Write(content)
		return
	}
	select {
	case <-r.stall:
		_, _ = w.Write(content)
		return
	default:
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(content)))
	_, _ = w.Write(content[:len(content)/2])
	_ = http.NewResponseController(w).Flush()
	select {
	case r.stalled <- struct{}{}:
	default:
	}
	select {
	case <-r.stall:
	case <-req.Context().Done():
	}
}

func encoded(t *testing.T, value any) []byte {
	t.Helper()
	text, err := json.Marshal(value)
	must(t, err)
	return text
}

func digest(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

func TestAnImageIsPulledThatTheEngineHasNot(t *testing.T) {
	r := newRegistry(t, ordinary)
	at, p, id := newPlace(t), provider(t), newID()
	at.create(t, p, at.spec(id, r.name))
	if got := at.reach(t, p, id).Shell("echo $PULLED"); got.Out != "yes\n" {
		t.Errorf("in the pulled image: %+v", got)
	}
	at.destroy(t, p, id)
	must(t, r.vanish(t))
	second := newID()
	_, err := p.Create(t.Context(), at.spec(second, strings.Replace(r.name, "/it:", "/another:", 1)))
	if !errors.Is(err, providers.ErrNoImage) || !strings.Contains(err.Error(), "check its name") {
		t.Errorf("an image that no registry has: %v", err)
	}
	if _, err := p.Inspect(t.Context(), second); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("a machine without an image is there: %v", err)
	}
}

// vanish removes the image from the engine.
func (r *registry) vanish(t *testing.T) error {
	_, err := onEngine(t).ImageRemove(t.Context(), r.name, client.ImageRemoveOptions{Force: true, PruneChildren: true})
	return err
}

func TestAPullThatABrokerBeganIsFinishedByTheNext(t *testing.T) {
	r := newRegistry(t, ordinary)
	r.stall = make(chan struct{})
	at, id := newPlace(t), newID()
	first := provider(t)
	short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := first.Create(short, at.spec(id, r.name))
	var unavailable *providers.UnavailableError
	if !errors.As(err, &unavailable) {
		t.Fatalf("a pull that does not end: %v", err)
	}
	<-r.stalled // halfway
	must(t, first.Close())
	if _, err := provider(t).Inspect(t.Context(), id); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("a machine whose image is missing is there: %v", err)
	}

	close(r.stall)
	next := provider(t)
	at.create(t, next, at.spec(id, r.name))
	if got := at.reach(t, next, id).run("true"); got != (result{}) {
		t.Errorf("true: %+v", got)
	}
	at.destroy(t, next, id)
	if n := r.requests.Load(); n < 2 {
		t.Errorf("the layer was asked for %d times: the first pull was not broken off", n)
	}
}
