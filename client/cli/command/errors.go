package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/present"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// HasStatus reports whether a call failed, and not something here.
func HasStatus(err error) bool {
	_, ok := statusOf(err)
	return ok
}

// PrintError writes one line to stderr: berth: what: why.
func (p *Program) PrintError(what, why string) {
	if what != "" {
		what += ": "
	}
	// A failure to write to stderr has nowhere to be reported.
	_, _ = fmt.Fprintf(p.Stderr, "berth: %s%s%s", what, present.PlainLines(why), p.lineEnd())
}

// Notice writes one line to stderr beside what a command writes to the same terminal, which may be raw: on a
// line of its own.
func (p *Program) Notice(what, why string) {
	if end := p.lineEnd(); end != "\n" {
		_, _ = fmt.Fprint(p.Stderr, end)
	}
	p.PrintError(what, why)
}

// printCallError writes what an error means and what to do about it.
func (p *Program) printCallError(what string, err error) {
	if IsUnreachable(err) {
		what = "" // it is not the command that failed
	}
	p.PrintError(what, p.Explain(err))
}

// IsDeadline reports whether a call ended by its deadline.
func IsDeadline(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded
}

// IsUnreachable reports whether no broker answered.
func IsUnreachable(err error) bool {
	var gone *client.UnreachableError
	var unknown *client.UnknownStartError
	return errors.As(err, &gone) && !errors.As(err, &unknown) && !IsDeadline(err)
}

// statusOf is the status that a call ended with, without what was wrapped around it.
func statusOf(err error) (*status.Status, bool) {
	var carrier interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &carrier) {
		return nil, false
	}
	return carrier.GRPCStatus(), true
}

// Explain is why a call failed and, in parentheses, what to do.
func (p *Program) Explain(err error) string {
	if unknown := (*client.UnknownStartError)(nil); errors.As(err, &unknown) {
		return fmt.Sprintf("it is not known whether the command began; if it did, it is killed within its disconnect grace: %s (see `berth jobs %s`)",
			unknown.Cause, unknown.SandboxID)
	}
	if client.Info(err) != nil {
		return present.WithHint(brokerWords(err), hint(err))
	}
	st, ok := statusOf(err)
	switch {
	case IsUnreachable(err):
		return st.Message() + unreachableRemedy(err)
	case IsDeadline(err) && p.Deadline.Value > 0:
		return p.Leaving(fmt.Sprintf("the --deadline of %v passed", p.Deadline.Value))
	case !ok:
		return err.Error()
	case st.Code() == codes.Unimplemented:
		return "this berthd does not know the call (is it older than this berth? see `berth version`)"
	}
	return fmt.Sprintf("%s (%s)", st.Message(), st.Code())
}

// unreachableRemedy is what to do where nobody could be dialled.
func unreachableRemedy(err error) string {
	const elsewhere = "--addr / " + client.AddressVariable
	switch {
	case errors.Is(err, client.ErrOthersSocket):
		return " (set " + elsewhere + " to your broker's own address)"
	case errors.Is(err, fs.ErrPermission):
		return " (you may not use that socket: run this as its owner, or set another " + elsewhere + ")"
	}
	return " (start it with `berthd`, or set " + elsewhere + ")"
}

// brokerWords is the broker's message, with the refused fields where the message leaves them out.
func brokerWords(err error) string {
	st, _ := statusOf(err)
	words := st.Message()
	for _, violation := range client.Violations(err) {
		if line := violation.GetField() + ": " + violation.GetDescription(); !strings.Contains(words, line) {
			words += "; " + line
		}
	}
	return words
}

// hint says what to do here, where the broker can't know: in this command line's words.
func hint(err error) string {
	metadata := client.Metadata(err)
	switch {
	case client.Is(err, berthv1.Reason_REASON_SANDBOX_NOT_FOUND):
		return "see `berth ls --all`"
	case client.Is(err, berthv1.Reason_REASON_JOB_NOT_FOUND):
		return "see `berth jobs`"
	case client.Is(err, berthv1.Reason_REASON_PROVIDER_NOT_FOUND), client.Is(err, berthv1.Reason_REASON_CAPABILITY_MISSING):
		return "see `berth providers`"
	case client.Is(err, berthv1.Reason_REASON_UNAUTHENTICATED):
		return "give the broker's token with --token-file or $" + tokenVariable
	case client.Is(err, berthv1.Reason_REASON_IMAGE_NOT_FOUND):
		return "name one that is there with --image"
	case client.Is(err, berthv1.Reason_REASON_SESSION_KEY_IN_USE) && metadata["sandbox_id"] != "":
		return "see `berth get " + metadata["sandbox_id"] + "`"
	case client.Is(err, berthv1.Reason_REASON_WRONG_STATE) && resumable(metadata["state"]):
		return "`berth resume " + OrID(metadata["sandbox_id"]) + "`"
	case client.Is(err, berthv1.Reason_REASON_REQUEST_ID_REUSED):
		return "choose another --request-id, or repeat the first call's arguments"
	case client.Is(err, berthv1.Reason_REASON_OUTPUT_EXPIRED) && metadata["first_kept"] != "":
		return "read on at --offset " + metadata["first_kept"]
	}
	if after, ok := client.RetryAfter(err); ok {
		return "try again in " + max(after, time.Second).Round(time.Second).String()
	}
	return ""
}

// OrID is an id, or what stands for one.
func OrID(id string) string {
	if id == "" {
		return "ID"
	}
	return id
}

func resumable(state string) bool {
	state = strings.TrimPrefix(state, "SANDBOX_STATE_")
	return state == "STOPPED" || state == "SUSPENDED"
}

// isBrokenPipe reports whether nobody reads this process's output any more.
func isBrokenPipe(err error) bool {
	return errors.Is(err, syscall.EPIPE) && !HasStatus(err)
}
