package retention

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/berth-sandbox/berth/daemon/store"
)

// shares is how much each sandbox takes of something that all of them share.
type shares map[string]uint64

// fair returns the most that one may take so that all take no more than total: who takes less than an equal part leaves
// the rest of that to the others.
func (s shares) fair(total uint64) uint64 {
	taken := slices.SortedFunc(maps.Values(s), cmp.Compare)
	for i, bytes := range taken {
		part := total / uint64(len(taken)-i)
		if bytes > part {
			return part
		}
		total -= bytes
	}
	return math.MaxUint64
}

// excess is what has to go for the rest to fit.
type excess struct {
	over   shares // how much each sandbox takes beyond a fair share; nothing of those that do not
	needed uint64 // how much has to go in all
}

// excess returns what has to go for all to take no more than total.
func (s shares) excess(total uint64) excess {
	e := excess{over: shares{}}
	fair, sum := s.fair(total), uint64(0)
	for sandbox, taken := range s {
		if taken > fair {
			e.over[sandbox] = taken - fair
		}
		sum += taken
	}
	e.needed = sum - min(total, sum)
	return e
}

// take reports whether something has to go that takes so much of a sandbox's share, and counts it as gone. It
// is asked about the oldest first.
func (e *excess) take(sandbox string, much uint64) bool {
	over := e.over[sandbox]
	if over == 0 || e.needed == 0 {
		return false
	}
	e.over[sandbox], e.needed = over-min(much, over), e.needed-min(much, e.needed)
	return true
}

// ended is a job that is DONE.
type ended struct{ id, sandbox string }

// excessReceipts returns the receipts that have to go for keep to be left: the longest done of each sandbox
// that has more than a fair share, at most limit of them, the longest done first. Only keys are read, of all receipts.
func excessReceipts(tx *store.Tx, keep, limit int) ([]ended, error) {
	var all []ended
	counts := shares{}
	err := tx.EachEndedJob(func(id, sandbox string) bool {
		all = append(all, ended{id, sandbox})
		counts[sandbox]++
		return true
	})
	if err != nil {
		return nil, err
	}
	beyond := counts.excess(uint64(max(keep, 0)))
	var going []ended
	for _, job := range all {
		if len(going) == limit || beyond.needed == 0 {
			break
		}
		if beyond.take(job.sandbox, 1) {
			going = append(going, job)
		}
	}
	return going, nil
}
