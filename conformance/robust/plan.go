package robust

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
)

// Work is what a planned command does.
type Work string

// The works. Each first appends its token to the file that counts starts.
const (
	WorkLines   Work = "lines"   // lines to both streams, some with pauses between them
	WorkBulk    Work = "bulk"    // much output at once
	WorkEndless Work = "endless" // one line, and then it waits to be ended
	WorkCat     Work = "cat"     // copies its open standard input
	WorkGiven   Work = "given"   // copies the standard input that it is given
	WorkChild   Work = "child"   // leaves a child behind that writes a line after its exit
)

// Bounds of a plan, small enough that a run is many commands rather than long ones.
const (
	maxLines      = 60
	maxPauseMS    = 40
	maxBulkBytes  = 600 << 10
	maxInputBytes = 96 << 10
	maxChildMS    = 2000
)

// Plan is what a command does and how it must end when nothing ends it before: everything about it
// follows from the plan, so that what the broker says of it can be checked.
type Plan struct {
	Token     string `json:"token"` // of this command alone
	Work      Work   `json:"work"`
	Code      int    `json:"code"` // its exit code, when it is let end
	Lines     int    `json:"lines,omitempty"`
	PauseMS   int    `json:"pause_ms,omitempty"`
	Bytes     int    `json:"bytes,omitempty"`      // of bulk output or of input
	TimeoutMS int    `json:"timeout_ms,omitempty"` // the job's timeout; 0: none
}

// NewPlan draws a plan of one of the works.
func NewPlan(random *rand.Rand, token string, works ...Work) Plan {
	p := Plan{Token: token, Work: works[random.IntN(len(works))], Code: random.IntN(120)}
	switch p.Work {
	case WorkLines:
		p.Lines = random.IntN(maxLines)
		if random.IntN(3) == 0 {
			p.PauseMS = 1 + random.IntN(maxPauseMS)
		}
	case WorkBulk:
		p.Bytes = 1 + random.IntN(maxBulkBytes)
	case WorkChild:
		p.PauseMS = 1 + random.IntN(maxChildMS)
	case WorkCat, WorkGiven:
		p.Bytes = 1 + random.IntN(maxInputBytes)
	case WorkEndless:
		if random.IntN(3) == 0 {
			p.TimeoutMS = 100 + random.IntN(900)
		}
	}
	return p
}

// Script is the shell script that does it. counter is the file that counts starts.
func (p Plan) Script(counter string) string {
	begin := fmt.Sprintf("echo %s >> '%s'; ", p.Token, counter)
	end := fmt.Sprintf("; exit %d", p.Code)
	switch p.Work {
	case WorkLines:
		pause := ""
		if p.PauseMS > 0 {
			pause = fmt.Sprintf("sleep %.3f; ", float64(p.PauseMS)/1000)
		}
		return begin + fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo %s $i; echo e $i >&2; i=$((i+1)); %sdone", p.Lines, p.Token, pause) + end
	case WorkBulk:
		return begin + fmt.Sprintf("yes '%s bulk' | head -c %d", p.Token, p.Bytes) + end
	case WorkEndless:
		return begin + fmt.Sprintf("echo %s; sleep 1000", p.Token) + end
	case WorkCat, WorkGiven:
		return begin + "cat" + end
	case WorkChild:
		return begin + fmt.Sprintf("(sleep %.3f; echo late) & echo %s", float64(p.PauseMS)/1000, p.Token) + end
	}
	return "exit 99"
}

// Input is the standard input of a command that copies it.
func (p Plan) Input() []byte {
	if p.Work != WorkCat && p.Work != WorkGiven {
		return nil
	}
	return repeat(p.Token+" in\n", p.Bytes)
}

// Stdout is all that it writes there when it is let end.
func (p Plan) Stdout() []byte {
	switch p.Work {
	case WorkLines:
		var all bytes.Buffer
		for i := range p.Lines {
			fmt.Fprintf(&all, "%s %d\n", p.Token, i)
		}
		return all.Bytes()
	case WorkBulk:
		return repeat(p.Token+" bulk\n", p.Bytes)
	case WorkEndless:
		return []byte(p.Token + "\n")
	case WorkChild:
		return []byte(p.Token + "\nlate\n")
	}
	return p.Input()
}

// Stderr is all that it writes there when it is let end.
func (p Plan) Stderr() []byte {
	var all bytes.Buffer
	if p.Work == WorkLines {
		for i := range p.Lines {
			fmt.Fprintf(&all, "e %d\n", i)
		}
	}
	return all.Bytes()
}

func repeat(text string, length int) []byte {
	return bytes.Repeat([]byte(text), length/len(text)+1)[:length]
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Sum is the checksum of a Chunk's bytes.
func Sum(data []byte) uint32 { return crc32.Checksum(data, castagnoli) }
