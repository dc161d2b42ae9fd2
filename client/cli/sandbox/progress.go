package sandbox

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// What the progress line keeps to.
const (
	progressDraw  = 100 * time.Millisecond // a spinner that seems to turn
	progressAsk   = 500 * time.Millisecond // how often the broker is asked
	progressWidth = 78                     // a longer line would wrap on a narrow terminal and stay there
)

// createWatch shows one create's progress until it is stopped.
type createWatch struct {
	cancel context.CancelFunc
	ended  chan struct{}
	id     string // the sandbox's, once it was seen; read it after ended
}

// watchCreate draws one line on stderr if that is a terminal, and nothing else.
func watchCreate(ctx context.Context, p *command.Program, c *client.Client, request *berthv1.CreateSandboxRequest) *createWatch {
	ctx, cancel := context.WithCancel(ctx)
	w := &createWatch{cancel: cancel, ended: make(chan struct{})}
	if !p.StderrTerminal {
		close(w.ended)
		return w
	}
	go func() {
		defer close(w.ended)
		w.draw(ctx, p, c, request)
	}()
	return w
}

// stop cleans the line and returns the sandbox's id if it was seen.
func (w *createWatch) stop() string {
	w.cancel()
	<-w.ended
	return w.id
}

func (w *createWatch) draw(ctx context.Context, p *command.Program, c *client.Client, request *berthv1.CreateSandboxRequest) {
	begun, asked, doing := time.Now(), time.Now(), "creating"
	ticker := time.NewTicker(progressDraw)
	defer ticker.Stop()
	for turn := 0; ; turn++ {
		select {
		case <-ctx.Done():
			_, _ = fmt.Fprint(p.Stderr, "\r\x1b[K")
			return
		case <-ticker.C:
		}
		if time.Since(asked) >= progressAsk {
			asked = time.Now()
			if sandbox := w.probe(ctx, c, request); sandbox != nil {
				w.id, doing = sandbox.GetId(), present.DoingWords(sandbox)
			}
		}
		line := fmt.Sprintf("%c %s… %s", `|/-\`[turn%4], doing, present.Roughly(time.Since(begun)))
		_, _ = fmt.Fprintf(p.Stderr, "\r\x1b[K%s", firstRunes(line, progressWidth))
	}
}

func (w *createWatch) probe(ctx context.Context, c *client.Client, request *berthv1.CreateSandboxRequest) *berthv1.Sandbox {
	ctx, cancel := context.WithTimeout(ctx, progressAsk)
	defer cancel()
	if w.id == "" {
		return findCreating(ctx, c, request)
	}
	reply, err := c.Sandboxes().GetSandbox(ctx, &berthv1.GetSandboxRequest{SandboxId: w.id})
	if err != nil {
		return nil // it is only drawn less well
	}
	return reply.GetSandbox()
}

// findCreating finds the sandbox that a create is making: the newest that is being created from
// these very wishes. Nil when there is none.
func findCreating(ctx context.Context, c *client.Client, request *berthv1.CreateSandboxRequest) *berthv1.Sandbox {
	reply, err := c.Sandboxes().ListSandboxes(ctx, &berthv1.ListSandboxesRequest{
		States:     []berthv1.SandboxState{berthv1.SandboxState_SANDBOX_STATE_CREATING},
		Labels:     request.GetSpec().GetLabels(),
		SessionKey: request.GetSpec().GetSessionKey(),
	})
	if err != nil {
		return nil
	}
	for _, sandbox := range reply.GetSandboxes() {
		if request.GetPool() != "" || sameWishes(sandbox.GetSpec(), request.GetSpec()) {
			return sandbox
		}
	}
	return nil
}

// sameWishes compares what a broker repeats unchanged.
func sameWishes(got, asked *berthv1.SandboxSpec) bool {
	return (asked.GetProvider() == "" || got.GetProvider() == asked.GetProvider()) &&
		(asked.GetImage() == "" || got.GetImage() == asked.GetImage()) &&
		proto.Equal(got.GetWorkspace().GetRepo(), asked.GetWorkspace().GetRepo()) &&
		present.Pairs(got.GetLabels()) == present.Pairs(asked.GetLabels()) &&
		present.Pairs(got.GetEnv()) == present.Pairs(asked.GetEnv())
}

func firstRunes(line string, limit int) string {
	runes := []rune(line)
	return string(runes[:min(len(runes), limit)])
}
