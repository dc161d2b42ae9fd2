package api

import (
	"encoding/base64"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/berth-sandbox/berth/daemon/fault"
	"github.com/berth-sandbox/berth/daemon/lifecycle"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Page bounds, as the API documents.
const (
	defaultPage = 100
	maxPage     = 1000
	maxToken    = 512
)

// bounded is a stream's head and tail as the API shows them.
func bounded(output *guestv1.Output, facts *berthv1.OutputFacts, asText bool) *berthv1.BoundedOutput {
	shown := &berthv1.BoundedOutput{Head: output.GetHead(), Tail: output.GetTail(), TailOffset: output.GetTailOffset(), Facts: facts}
	have := uint64(len(shown.GetHead()) + len(shown.GetTail()))
	if total := facts.GetTotalBytes(); total > have {
		shown.OmittedBytes = total - have
	}
	if !asText {
		return shown
	}
	head, headReplaced := text(shown.GetHead())
	tail, tailReplaced := text(shown.GetTail())
	if gap := shown.GetTailOffset() - min(shown.GetTailOffset(), uint64(len(shown.GetHead()))); len(tail) > 0 && gap > 0 {
		head += fmt.Sprintf("\n[… %d bytes left out …]\n", gap)
	}
	shown.Text, shown.TextReplaced = head+tail, headReplaced || tailReplaced
	return shown
}

// text is output as text, and whether invalid UTF-8 was replaced in it.
func text(data []byte) (string, bool) {
	if utf8.Valid(data) {
		return string(data), false
	}
	return strings.ToValidUTF8(string(data), "\uFFFD"), true
}

// pageOf reads where a list begins and how long it is.
func pageOf(size uint32, token string) (lifecycle.Page, error) {
	page := lifecycle.Page{Size: int(min(size, maxPage))}
	if size == 0 {
		page.Size = defaultPage
	}
	after, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(token) > maxToken {
		return page, fault.Invalid("page_token", "is not one that this broker gave: take next_page_token as it is")
	}
	page.After = string(after)
	return page, nil
}

func tokenOf(next string) string { return base64.RawURLEncoding.EncodeToString([]byte(next)) }
