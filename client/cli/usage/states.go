package usage

import (
	"strings"
)

// ParseStates turns names as people write them into an enum's numbers.
func ParseStates(given []string, values map[string]int32, prefix string) ([]int32, error) {
	var numbers []int32
	for _, name := range given {
		number := values[prefix+strings.ToUpper(name)]
		if number == 0 {
			known := make(map[int32]string, len(values))
			for value, n := range values {
				known[n] = value
			}
			return nil, Errorf("--state %s: it must be one of %s", name, strings.Join(StateNames(known, prefix), ", "))
		}
		numbers = append(numbers, number)
	}
	return numbers, nil
}

// StateNames are an enum's names as people write them, in the enum's order.
func StateNames(names map[int32]string, prefix string) []string {
	var all []string
	for number := int32(1); names[number] != ""; number++ {
		all = append(all, strings.ToLower(strings.TrimPrefix(names[number], prefix)))
	}
	return all
}
