package docker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/providers"
	"github.com/berth-sandbox/berth/providers/docker"
)

// An engine that answers as told: real engines do not fail on demand. Each answer is for the paths that
// hold its key; an engine with no machines and one image answers the rest.
func faulty(t *testing.T, answers map[string]func(http.ResponseWriter, *http.Request)) *docker.Provider {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for path, answer := range answers {
			if strings.Contains(r.Method+" "+r.URL.Path, path) {
				answer(w, r)
				return
			}
		}
		switch {
		case strings.HasSuffix(r.URL.Path, "/_ping"):
			w.Header().Set("Api-Version", "1.41")
		case strings.HasSuffix(r.URL.Path, "/containers/json"):
			_, _ = io.WriteString(w, "[]")
		case strings.HasSuffix(r.URL.Path, "/version"):
			_, _ = io.WriteString(w, `{"Version":"20.10.24","ApiVersion":"1.41","Os":"linux","Arch":"amd64"}`)
		case strings.Contains(r.URL.Path, "/images/"):
			_, _ = io.WriteString(w, `{"Id":"sha256:1","Os":"linux","Architecture":"amd64"}`)
		default:
			refuse(http.StatusNotFound, "no such thing")(w, r)
		}
	}))
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	return provider(t, func(o *docker.Options) { o.Host = "tcp://" + strings.TrimPrefix(server.URL, "http://") })
}

func refuse(status int, message string) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = fmt.Fprintf(w, `{"message":%q}`, message)
	}
}

func TestWhatAnEngineSaysBecomesAKindOfError(t *testing.T) {
	for name, test := range map[string]struct {
		path    string
		status  int
		message string
		want    error // nil: unavailable
	}{
		"a full disk":                {"POST /v1.41/volumes/create", 500, "write /var/lib/docker/x: no space left on device", providers.ErrCapacity},
		"no memory for a volume":     {"POST /v1.41/volumes/create", 500, "fork/exec: cannot allocate memory", providers.ErrCapacity},
		"no addresses":               {"POST /v1.41/volumes/create", 500, "no available IPv4 addresses on this network's address pools", providers.ErrCapacity},
		"a name that is none":        {"GET /v1.41/images/", 400, "invalid reference format", providers.ErrNoImage},
		"a registry that is away":    {"/images/", 404, "Get https://registry: no such host", providers.ErrNoImage},
		"an engine that shuts down":  {"POST /v1.41/volumes/create", 503, "shutting down", nil},
		"something that is not held": {"POST /v1.41/volumes/create", 400, "bad volume", providers.ErrRefused},
	} {
		t.Run(name, func(t *testing.T) {
			at := newPlace(t)
			p := faulty(t, map[string]func(http.ResponseWriter, *http.Request){test.path: refuse(test.status, test.message)})
			_, err := p.Create(t.Context(), at.spec(newID(), "image"))
			var unavailable *providers.UnavailableError
			if test.want == nil && !errors.As(err, &unavailable) || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("got %v", err)
			}
			if err == nil || !strings.Contains(err.Error(), test.message) {
				t.Errorf("%v does not say %q", err, test.message)
			}
		})
	}
}

func TestAnEngineThatIsTooOldIsSaidToBe(t *testing.T) {
	for name, test := range map[string]struct{ version, says string }{
		"too old":        {`{"Version":"19.03","ApiVersion":"1.40","Os":"linux","Arch":"amd64"}`, "20.10 or later"},
		"not for Linux":  {`{"Version":"24.0","ApiVersion":"1.43","Os":"windows","Arch":"amd64"}`, "windows"},
		"old and proper": {`{"Version":"20.10.24","ApiVersion":"1.41","Os":"linux","Arch":"amd64"}`, "20.10.24"},
		"new and proper": {`{"Version":"99.0","ApiVersion":"1.99","Os":"linux","Arch":"amd64"}`, "99.0"},
	} {
		t.Run(name, func(t *testing.T) {
			p := faulty(t, map[string]func(http.ResponseWriter, *http.Request){
				"/version": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, test.version) },
			})
			info, err := p.Info(t.Context())
			if err != nil || info.Healthy != strings.Contains(name, "proper") || !strings.Contains(info.Message, test.says) {
				t.Errorf("%+v, %v", info, err)
			}
		})
	}
}

func TestAPullOutlivesWhoWaitsForItAndNotTheProvider(t *testing.T) {
	at := newPlace(t)
	begun, ended := make(chan struct{}, 2), make(chan struct{}, 2)
	p := faulty(t, map[string]func(http.ResponseWriter, *http.Request){
		"POST /v1.41/images/create": func(w http.ResponseWriter, r *http.Request) {
			begun <- struct{}{}
			_, _ = io.WriteString(w, `{"status":"Pulling"}`)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			ended <- struct{}{}
		},
		"GET /v1.41/images/": refuse(http.StatusNotFound, "No such image"),
	})
	for range 2 { // the second joins the first one's
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		_, err := p.Create(short, at.spec(newID(), "image"))
		cancel()
		var unavailable *providers.UnavailableError
		if !errors.As(err, &unavailable) || unavailable.RetryAfter == 0 || !strings.Contains(err.Error(), "still being pulled") {
			t.Errorf("got %v", err)
		}
	}
	<-begun
	select {
	case <-begun:
		t.Error("it was pulled twice")
	case <-ended:
		t.Error("it ended with who waited")
	default:
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if left, _ := filepath.Glob(filepath.Join(at.sockets, "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
