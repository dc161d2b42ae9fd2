package api

import (
	"fmt"
	"strings"
	"unicode/utf8"

	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// bounded is a stream's head and tail as the API shows them.
func bounded(output *guestv1.Output, stats *berthv1.OutputStats, asText bool) *berthv1.BoundedOutput {
	shown := &berthv1.BoundedOutput{Head: output.GetHead(), Tail: output.GetTail(), TailOffset: output.GetTailOffset(), Stats: stats}
	have := uint64(len(shown.GetHead()) + len(shown.GetTail()))
	if total := stats.GetTotalBytes(); total > have {
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
