package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/berth-sandbox/berth/providers"
)

// read asks the engine something. An engine that does not answer in time is unavailable: a question
// changes nothing.
func (p *Provider) read(ctx context.Context, what string, ask func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	err := ask(limited)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return p.unavailable(fmt.Errorf("%s: the engine at %s did not answer within %s", what, p.engine.DaemonHost(), readTimeout))
	}
	return p.explain(ctx, what, err)
}

// change orders the engine to do something. When it does not answer in time, or the connection breaks before
// it does, nobody knows whether it was done.
func (p *Provider) change(ctx context.Context, limit time.Duration, what string, order func(context.Context) error) error {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err := order(limited)
	if err != nil && ctx.Err() == nil && limited.Err() != nil {
		return fmt.Errorf("%s: the engine at %s did not answer within %s: %w", what, p.engine.DaemonHost(), limit, providers.ErrAmbiguous)
	}
	if ctx.Err() == nil && answerLost(err) {
		return fmt.Errorf("%s: the connection to the engine at %s broke before it answered: %w: %w", what, p.engine.DaemonHost(), err, providers.ErrAmbiguous)
	}
	return p.explain(ctx, what, err)
}

// explain says what was being done, and gives the kinds that mean the same after every call.
func (p *Provider) explain(ctx context.Context, what string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", what, ctx.Err())
	case noConnection(err), errdefs.IsUnavailable(err):
		return p.unavailable(fmt.Errorf("%s: %w", what, err))
	case isFull(err):
		return fmt.Errorf("%s: %w: %w", what, err, providers.ErrCapacity)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (p *Provider) unavailable(cause error) error { return &providers.UnavailableError{Cause: cause} }

// noConnection reports whether the engine was never reached, so that nothing can have happened.
func noConnection(err error) bool {
	var dial *net.OpError
	return client.IsErrConnectionFailed(err) || errors.As(err, &dial) && dial.Op == "dial"
}

// answerLost reports whether the connection to the engine broke while an answer was waited for.
func answerLost(err error) bool {
	for _, broken := range []error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE} {
		if errors.Is(err, broken) {
			return true
		}
	}
	return false
}

// answered reports whether the engine itself refused: whatever was asked was not done.
func answered(err error) bool {
	for _, is := range []func(error) bool{
		errdefs.IsNotFound, errdefs.IsInvalidArgument, errdefs.IsConflict, errdefs.IsUnauthorized, errdefs.IsPermissionDenied,
		errdefs.IsInternal, errdefs.IsNotImplemented, errdefs.IsFailedPrecondition, errdefs.IsResourceExhausted, errdefs.IsUnknown,
	} {
		if is(err) {
			return true
		}
	}
	return false
}

// definite makes an answered error one of the kinds that undo a create.
func definite(err error) error {
	if !answered(err) || errors.Is(err, providers.ErrCapacity) || errors.Is(err, providers.ErrRefused) {
		return err
	}
	return fmt.Errorf("%w: %w", err, providers.ErrRefused)
}

// fullTexts is how engines, runtimes and kernels say that something ran out; they give it no class of
// its own.
var fullTexts = []string{
	"no space left on device", "disk quota exceeded", "cannot allocate memory", "out of memory",
	"too many open files", "resource temporarily unavailable", "not enough free space", "no available ipv4 addresses",
	"could not find an available",
}

func isFull(err error) bool {
	text := strings.ToLower(err.Error())
	for _, full := range fullTexts {
		if strings.Contains(text, full) {
			return true
		}
	}
	return errdefs.IsResourceExhausted(err)
}
