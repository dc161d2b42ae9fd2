package command

import (
	"context"
	"os"
	"syscall"

	"github.com/berth-sandbox/berth/client/cli/usage"
)

// InterruptError is why a context was cancelled by a signal.
type InterruptError struct{ Signal syscall.Signal }

func (e *InterruptError) Error() string { return "interrupted" }

// WatchInterrupts gives signals to whoever took them; without one it cancels on the first and exits on
// the second. release ends the watch.
func (p *Program) WatchInterrupts(cancel context.CancelCauseFunc) (release func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		count := 0
		for {
			select {
			case <-over:
				return
			case received := <-p.Interrupts:
				signal := signalOf(received)
				if take := p.taker(); take != nil {
					take(signal)
					continue
				}
				if count++; count > 1 {
					p.ExitNow(usage.ExitSignal + int(signal))
					return
				}
				cancel(&InterruptError{Signal: signal})
			}
		}
	}()
	return func() {
		close(over)
		<-ended
	}
}

func signalOf(received os.Signal) syscall.Signal {
	if signal, ok := received.(syscall.Signal); ok {
		return signal
	}
	return syscall.SIGINT
}

// TakeInterrupts gives signals to take until the returned function is called.
func (p *Program) TakeInterrupts(take func(syscall.Signal)) (release func()) {
	p.setTaker(take)
	return func() { p.setTaker(nil) }
}

func (p *Program) setTaker(take func(syscall.Signal)) {
	p.takeLock.Lock()
	defer p.takeLock.Unlock()
	p.take = take
}

func (p *Program) taker() func(syscall.Signal) {
	p.takeLock.Lock()
	defer p.takeLock.Unlock()
	return p.take
}

// ExitNow ends the process with the terminal as it was.
func (p *Program) ExitNow(code int) {
	p.RestoreTerminal()
	p.Exit(code)
}
