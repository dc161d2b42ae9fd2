package cli

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// longWord is from how many letters on a word may be two slips away from what was meant; a shorter one
// may be one, for every short word is two slips from another.
const longWord = 6

// suggestions are the commands that a word may have been meant as, by name.
func suggestions(root *cobra.Command, typed string) []string {
	allowed := 1
	if len(typed) >= longWord {
		allowed = 2
	}
	var meant []string
	for _, cmd := range root.Commands() {
		if !cmd.IsAvailableCommand() {
			continue
		}
		for _, name := range append([]string{cmd.Name()}, cmd.Aliases...) {
			word := strings.ToLower(typed)
			if word != "" && (strings.HasPrefix(name, word) || slips(word, name) <= allowed) {
				meant = append(meant, cmd.Name())
				break
			}
		}
	}
	slices.Sort(meant)
	return meant
}

// slips counts the letters left out, added, replaced or swapped with their neighbour between two words.
func slips(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replaced := 1
			if a[i-1] == b[j-1] {
				replaced = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+replaced)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
