package cli

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// noArgs refuses arguments.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("it takes no arguments, got %q", args[0])
	}
	return nil
}

// exactlyOne wants one argument.
func exactlyOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("it takes %s, got %d arguments", wanted, len(args))
		}
		return nil
	}
}

// atLeastOne wants one argument or more.
func atLeastOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usagef("it takes %s, or several", wanted)
		}
		return nil
	}
}

// atMostOne wants one argument or none.
func atMostOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > 1 {
			return usagef("it takes %s or nothing, got %d arguments", wanted, len(args))
		}
		return nil
	}
}

// commandAfterDash wants an id, and then a command after -- unless a shell script is given.
func commandAfterDash(script *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		dash := cmd.ArgsLenAtDash()
		switch {
		case len(args) == 0 || dash == 0:
			return usagef("it takes a sandbox's id: `%s ID -- CMD…`", cmd.CommandPath())
		case cmd.Flags().Changed("shell") && len(args) > 1:
			return usagef("-c and a command: give one of them")
		case cmd.Flags().Changed("shell") && *script == "":
			return usagef("-c: the script is empty")
		case cmd.Flags().Changed("shell"):
			return nil
		case dash > 1 || dash < 0 && len(args) > 1:
			return usagef("put -- between the sandbox's id and the command: `%s ID -- CMD…`", cmd.CommandPath())
		case len(args) == 1:
			return usagef("it takes a command after --, or a shell script after -c")
		case args[1] == "":
			return usagef("the command's name after -- is empty")
		}
		return nil
	}
}

// onlyACommand wants a command after --, or a shell script.
func onlyACommand(script *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		scripted := cmd.Flags().Changed("shell")
		switch {
		case scripted && len(args) > 0:
			return usagef("-c and a command: give one of them")
		case scripted && *script == "":
			return usagef("-c: the script is empty")
		case scripted:
			return nil
		case len(args) == 0:
			return usagef("it takes a command after --, or a shell script after -c")
		case cmd.ArgsLenAtDash() != 0:
			return usagef("put -- before the command: `%s -- CMD…`", cmd.CommandPath())
		case args[0] == "":
			return usagef("the command's name after -- is empty")
		}
		return nil
	}
}

// flagWords is what is wrong with a flag, in this program's words.
func flagWords(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	flag := invalid.GetFlag()
	if flag.Value.Type() == "bool" {
		return usagef("--%s=%s: it must be true or false, or stand alone", flag.Name, invalid.GetValue())
	}
	return usagef("--%s %s: %v", flag.Name, invalid.GetValue(), invalid.Unwrap())
}

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
