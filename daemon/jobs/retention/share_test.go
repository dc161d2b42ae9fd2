package retention

import (
	"maps"
	"strings"
	"testing"
)

// TestTheOldestOfWhoHasMostGoes is about things of one unit each, a letter for each one's sandbox, the oldest first.
func TestTheOldestOfWhoHasMostGoes(t *testing.T) {
	for _, test := range []struct {
		name, things string
		total        uint64
		left         string
	}{
		{"there is nothing", "", 10, ""},
		{"there is enough", "aabb", 4, "aabb"},
		{"of one sandbox the oldest go", "aaaaa", 2, "aa"},
		{"one that has much loses its own", "qqq" + strings.Repeat("n", 1000), 10, "qqq" + strings.Repeat("n", 7)},
		{"two that have the same lose the same", "aaaabbbb", 4, "aabb"},
		{"what little ones leave is for the others", "abbcccccddddddd", 9, "abbcccddd"},
		{"of equal ones the oldest go first", "abcdef", 4, "cdef"},
		{"where it does not divide, the oldest go", "aabbcc", 5, "abbcc"},
		{"nothing may be left", "aab", 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			taken := shares{}
			for _, thing := range test.things {
				taken[string(thing)]++
			}
			beyond, left := taken.excess(test.total), ""
			for _, thing := range test.things {
				if !beyond.take(string(thing), 1) {
					left += string(thing)
				}
			}
			if left != test.left {
				t.Errorf("%q is left, want %q", left, test.left)
			}
		})
	}
}

func TestWhatHasToGoIsCounted(t *testing.T) {
	beyond := shares{"a": 10, "b": 1}.excess(6)
	if beyond.needed != 5 || !maps.Equal(beyond.over, shares{"a": 5}) {
		t.Errorf("%+v has to go, want 5 of a", beyond)
	}
	for i, want := range []bool{true, true, false} {
		if got := beyond.take("a", 3); got != want {
			t.Errorf("piece %d: %v, want %v", i, got, want)
		}
	}
	if beyond.take("b", 1) {
		t.Error("b loses something")
	}
}
