package robust

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"
)

// linearTimeout bounds the search for one order of one request id's or one sandbox's calls.
const linearTimeout = 2 * time.Minute

// never is the end of a call that was not answered: what it asked for may be done at any later time.
const never = math.MaxInt64

// linear looks, for every request id and for every sandbox, for one order of the calls that explains
// their answers, in which each call stands between its begin and its end.
func linear(events []Event) (problems []string, checked int) {
	for what, operations := range requests(events) {
		checked++
		problems = append(problems, ordered(requestModel.ToModel(), "request id "+what, operations)...)
	}
	for what, operations := range destroys(events) {
		checked++
		problems = append(problems, ordered(destroyModel.ToModel(), "the end of sandbox "+what, operations)...)
	}
	sort.Strings(problems)
	return problems, checked
}

func ordered(model porcupine.Model, what string, operations []porcupine.Operation) []string {
	switch porcupine.CheckOperationsTimeout(model, operations, linearTimeout) {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return []string{fmt.Sprintf("%s: no order was found or refuted in %s among %d calls", what, linearTimeout, len(operations))}
	}
	text := what + ": no order of its calls explains their answers:"
	for _, o := range operations {
		text += "\n    " + model.DescribeOperation(o.Input, o.Output) + " [" + strconv.FormatInt(o.Call, 10) + ", " + strconv.FormatInt(o.Return, 10) + "]"
	}
	return []string{text}
}

// asked is what a call under a request id says, and answered what it was answered.
type asked struct{ method, body string }

type answered struct {
	id     string // the result, of a call that was answered
	reused bool   // refused for another body
}

// remembered is what a broker knows of a request id: nothing, or which body it took. The id of the
// result is not known as long as nobody was told.
type remembered struct {
	taken asked
	id    string
}

// requestModel is what a request id promises: the first body that is taken gives the result, the same
// body gives it again, and any other is refused.
var requestModel = porcupine.NondeterministicModel{
	Init: func() []any { return []any{remembered{}} },
	Step: func(state, input, output any) []any {
		is, in, out := state.(remembered), input.(asked), output.(answered)
		fresh := is.taken == asked{}
		switch {
		case out.reused:
			return keep(is, !fresh && is.taken != in)
		case out.id == "": // it may have been taken or not
			if fresh {
				return []any{is, remembered{taken: in}}
			}
			return []any{is}
		case fresh, is.taken == in && is.id == "":
			return []any{remembered{in, out.id}}
		}
		return keep(is, is.taken == in && is.id == out.id)
	},
	DescribeOperation: func(input, output any) string {
		in, out := input.(asked), output.(answered)
		answer := out.id
		switch {
		case out.reused:
			answer = "refused, it was used with another body"
		case answer == "":
			answer = "no answer that tells"
		}
		return fmt.Sprintf("%s with body %s: %s", in.method, in.body, answer)
	},
}

func keep(state any, legal bool) []any {
	if legal {
		return []any{state}
	}
	return nil
}

func requests(events []Event) map[string][]porcupine.Operation {
	type unanswered struct {
		request string
		in      asked
	}
	open := map[unanswered]int64{}
	byRequest := map[string][]porcupine.Operation{}
	for _, e := range events {
		if e.Kind != KindCall || e.RequestID == "" {
			continue
		}
		in, out := asked{e.Op, e.Body}, answered{}
		switch e.Result {
		case ResultOK:
			out.id = e.ID
		case "REQUEST_ID_REUSED":
			out.reused = true
		default:
			// Several of these do no more than the first: taking the same again changes nothing.
			key := unanswered{e.RequestID, in}
			if first, known := open[key]; !known || e.Begin < first {
				open[key] = e.Begin
			}
			continue
		}
		byRequest[e.RequestID] = append(byRequest[e.RequestID], porcupine.Operation{
			ClientId: e.Client, Input: in, Call: e.Begin, Output: out, Return: e.End,
		})
	}
	for key, begin := range open {
		byRequest[key.request] = append(byRequest[key.request], porcupine.Operation{Input: key.in, Call: begin, Output: answered{}, Return: never})
	}
	return byRequest
}

// look is a call on a sandbox that tells whether it is destroyed, or asks for it.
type look struct{ destroy bool }

// destroyModel is what a destroy promises: a sandbox that was seen DESTROYED is never seen otherwise.
// The state is whether it is.
var destroyModel = porcupine.NondeterministicModel{
	Init: func() []any { return []any{false} },
	Step: func(state, input, output any) []any {
		destroyed, in, seen := state.(bool), input.(look), output.(string)
		switch {
		case in.destroy && seen == "": // not answered
			return []any{destroyed, true}
		case in.destroy:
			return []any{true}
		}
		return keep(destroyed, destroyed == (seen == "DESTROYED"))
	},
	DescribeOperation: func(input, output any) string {
		if input.(look).destroy {
			return fmt.Sprintf("destroy: %q", output)
		}
		return fmt.Sprintf("seen as %v", output)
	},
}

func destroys(events []Event) map[string][]porcupine.Operation {
	open := map[string]int64{}
	bySandbox := map[string][]porcupine.Operation{}
	for _, e := range events {
		if e.Kind != KindCall || e.Sandbox == "" {
			continue
		}
		in := look{destroy: e.Op == "DestroySandbox"}
		switch {
		case e.Result == ResultOK && e.State != "":
		case in.destroy:
			if first, known := open[e.Sandbox]; !known || e.Begin < first {
				open[e.Sandbox] = e.Begin
			}
			continue
		default:
			continue
		}
		bySandbox[e.Sandbox] = append(bySandbox[e.Sandbox], porcupine.Operation{
			ClientId: e.Client, Input: in, Call: e.Begin, Output: e.State, Return: e.End,
		})
	}
	for sandbox, begin := range open {
		bySandbox[sandbox] = append(bySandbox[sandbox], porcupine.Operation{Input: look{destroy: true}, Call: begin, Output: "", Return: never})
	}
	return bySandbox
}
