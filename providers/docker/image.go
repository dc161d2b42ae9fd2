package docker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// imageInfo is what a machine needs to know of what it is made from.
type imageInfo struct {
	reference    string
	architecture string // in Go's words
	env          map[string]string
	user         string // whose the jobs are; empty: root
	entrypoint   []string
	command      []string
}

// findImage returns the image of a spec: from the engine, else pulled. A snapshot is never pulled.
// Errors: ErrNoImage with what a pull said; *UnavailableError when the context ends during a pull,
// which goes on.
func (p *Provider) findImage(ctx context.Context, spec providers.MachineSpec) (imageInfo, error) {
	reference := spec.Image
	if spec.FromSnapshot != "" {
		reference = snapshotReference(spec.FromSnapshot)
	} else if reference == "" {
		reference = p.image
	}
	found, err := p.inspectImage(ctx, reference)
	if !errdefs.IsNotFound(err) {
		return found, p.malformed(reference, err)
	}
	if spec.FromSnapshot != "" {
		return imageInfo{}, fmt.Errorf("the engine has no snapshot %s: %w", spec.FromSnapshot, providers.ErrNoImage)
	}
	if err := p.pulls.wait(ctx, p, reference); err != nil {
		return imageInfo{}, err
	}
	found, err = p.inspectImage(ctx, reference)
	if errdefs.IsNotFound(err) {
		return imageInfo{}, fmt.Errorf("image %s was pulled and is not there: %w", reference, providers.ErrNoImage)
	}
	return found, err
}

// malformed makes the engine's refusal of a name that can be no image's one of the contract's kinds.
func (p *Provider) malformed(reference string, err error) error {
	if errdefs.IsInvalidArgument(err) {
		return fmt.Errorf("%q is not an image's name (write name:tag): %w: %w", reference, err, providers.ErrNoImage)
	}
	return err
}

// imageOf returns the image of a machine that is there already.
func (p *Provider) imageOf(ctx context.Context, found container.InspectResponse) (imageInfo, error) {
	of, err := p.inspectImage(ctx, found.Image)
	if errdefs.IsNotFound(err) {
		return imageInfo{}, fmt.Errorf("its image %s was removed behind the broker's back: destroy it: %w", found.Image, providers.ErrNoImage)
	}
	return of, err
}

func (p *Provider) inspectImage(ctx context.Context, reference string) (imageInfo, error) {
	var answer client.ImageInspectResult
	err := p.read(ctx, "looking at image "+reference, func(ctx context.Context) (err error) {
		answer, err = p.engine.ImageInspect(ctx, reference)
		return err
	})
	if err != nil {
		return imageInfo{}, err
	}
	if answer.Os != "" && answer.Os != "linux" {
		return imageInfo{}, fmt.Errorf("image %s is made for %s and machines are Linux's: %w", reference, answer.Os, providers.ErrRefused)
	}
	found := imageInfo{reference: reference, architecture: answer.Architecture, env: map[string]string{"PATH": defaultPath}}
	if answer.Config == nil {
		return found, nil
	}
	maps.Copy(found.env, variables(answer.Config.Env))
	found.user = userOf(answer.Config.User)
	found.entrypoint, found.command = answer.Config.Entrypoint, answer.Config.Cmd
	return found, nil
}

func variables(lines []string) map[string]string {
	all := map[string]string{}
	for _, line := range lines {
		if key, value, found := strings.Cut(line, "="); found && key != "" {
			all[key] = value
		}
	}
	return all
}

// userOf returns the image's user, empty for root: an image without /etc/passwd has root too.
func userOf(user string) string {
	switch user {
	case "0", "root", "0:0", "root:root", "0:root", "root:0":
		return ""
	}
	return user
}

// pulls are the images that are being pulled, each once however many machines wait for it. A pull goes
// on when its waiters give up, so that another attempt finds it further along.
type pulls struct {
	mu      sync.Mutex
	closed  bool
	running map[string]*pull
	working sync.WaitGroup
}

type pull struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // set when done is closed
}

func (s *pulls) wait(ctx context.Context, p *Provider, reference string) error {
	running, err := s.join(ctx, p, reference)
	if err != nil {
		return err
	}
	select {
	case <-running.done:
		return running.err
	case <-ctx.Done():
		return &providers.UnavailableError{RetryAfter: pullRetry,
			Cause: fmt.Errorf("image %s is still being pulled: %w", reference, ctx.Err())}
	}
}

func (s *pulls) join(ctx context.Context, p *Provider, reference string) (*pull, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, p.unavailable(errors.New("the broker is stopping"))
	}
	if running := s.running[reference]; running != nil {
		return running, nil
	}
	if s.running == nil {
		s.running = map[string]*pull{}
	}
	own, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullTimeout)
	running := &pull{cancel: cancel, done: make(chan struct{})}
	s.running[reference] = running
	s.working.Go(func() {
		defer cancel()
		running.err = p.pull(own, reference)
		s.mu.Lock()
		delete(s.running, reference)
		s.mu.Unlock()
		close(running.done)
	})
	return running, nil
}

func (s *pulls) close() {
	s.mu.Lock()
	s.closed = true
	for _, running := range s.running {
		running.cancel()
	}
	s.mu.Unlock()
	s.working.Wait()
}

// pull pulls an image and logs how far it is.
func (p *Provider) pull(ctx context.Context, reference string) error {
	p.log.Info("pulling image", "image", reference)
	begun := time.Now()
	err := p.pullAll(ctx, reference)
	switch {
	case err == nil:
		p.log.Info("pulled image", "image", reference, "took", time.Since(begun).Round(time.Millisecond))
		return nil
	case noConnection(err):
		return p.unavailable(fmt.Errorf("pulling image %s: %w", reference, err))
	case isFull(err):
		return fmt.Errorf("pulling image %s: %w: %w", reference, err, providers.ErrCapacity)
	case ctx.Err() != nil:
		err = fmt.Errorf("it took longer than %s", pullTimeout)
		if errors.Is(ctx.Err(), context.Canceled) {
			return p.unavailable(fmt.Errorf("pulling image %s: the broker is stopping", reference))
		}
	}
	return fmt.Errorf("image %s is not on the engine at %s, and pulling it failed (check its name, or load it there by hand): %w: %w",
		reference, p.engine.DaemonHost(), err, providers.ErrNoImage)
}

func (p *Provider) pullAll(ctx context.Context, reference string) error {
	stream, err := p.engine.ImagePull(ctx, reference, client.ImagePullOptions{})
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }() // it was only read
	layers, reported := map[string]string{}, time.Now()
	for message, err := range stream.JSONMessages(ctx) {
		if err != nil {
			return err
		}
		if message.Error != nil {
			return message.Error
		}
		if message.ID != "" {
			layers[message.ID] = message.Status
		}
		if time.Since(reported) >= pullReport {
			reported = time.Now()
			p.log.Info("pulling image", "image", reference, "layers", len(layers), "done", completed(layers))
		}
	}
	return ctx.Err()
}

// completed counts the layers of which nothing is missing.
func completed(layers map[string]string) int {
	n := 0
	for _, status := range layers {
		if status == "Pull complete" || status == "Already exists" {
			n++
		}
	}
	return n
}
