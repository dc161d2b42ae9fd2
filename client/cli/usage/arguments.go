package usage

import (
	"errors"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// CheckUTF8 names the first argument that can't be sent: what a broker gets is text.
func CheckUTF8(args []string) error {
	for i, arg := range args {
		if !utf8.ValidString(arg) {
			return Errorf("argument %d, %q, is not UTF-8, and only that can be sent: let a shell in the sandbox make it, as with -c and printf", i+1, arg)
		}
	}
	return nil
}

// NoArgs refuses arguments.
func NoArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return Errorf("it takes no arguments, got %q", args[0])
	}
	return nil
}

// ExactlyOne wants one argument.
func ExactlyOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return Errorf("it takes %s, got %d arguments", wanted, len(args))
		}
		return nil
	}
}

// AtLeastOne wants one argument or more.
func AtLeastOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) == 0 {
			return Errorf("it takes %s, or several", wanted)
		}
		return nil
	}
}

// AtMostOne wants one argument or none.
func AtMostOne(wanted string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) > 1 {
			return Errorf("it takes %s or nothing, got %d arguments", wanted, len(args))
		}
		return nil
	}
}

// CommandAfterDash wants an id, and then a command after -- unless a shell script is given.
func CommandAfterDash(script *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		dash := cmd.ArgsLenAtDash()
		switch {
		case len(args) == 0 || dash == 0:
			return Errorf("it takes a sandbox's id: `%s ID -- CMD…`", cmd.CommandPath())
		case cmd.Flags().Changed("shell") && len(args) > 1:
			return Errorf("-c and a command: give one of them")
		case cmd.Flags().Changed("shell") && *script == "":
			return Errorf("-c: the script is empty")
		case cmd.Flags().Changed("shell"):
			return nil
		case dash > 1 || dash < 0 && len(args) > 1:
			return Errorf("put -- between the sandbox's id and the command: `%s ID -- CMD…`", cmd.CommandPath())
		case len(args) == 1:
			return Errorf("it takes a command after --, or a shell script after -c")
		case args[1] == "":
			return Errorf("the command's name after -- is empty")
		}
		return nil
	}
}

// OnlyACommand wants a command after --, or a shell script.
func OnlyACommand(script *string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		scripted := cmd.Flags().Changed("shell")
		switch {
		case scripted && len(args) > 0:
			return Errorf("-c and a command: give one of them")
		case scripted && *script == "":
			return Errorf("-c: the script is empty")
		case scripted:
			return nil
		case len(args) == 0:
			return Errorf("it takes a command after --, or a shell script after -c")
		case cmd.ArgsLenAtDash() != 0:
			return Errorf("put -- before the command: `%s -- CMD…`", cmd.CommandPath())
		case args[0] == "":
			return Errorf("the command's name after -- is empty")
		}
		return nil
	}
}

// FlagError is what is wrong with a flag, in this program's words.
func FlagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	flag := invalid.GetFlag()
	if flag.Value.Type() == "bool" {
		return Errorf("--%s=%s: it must be true or false, or stand alone", flag.Name, invalid.GetValue())
	}
	return Errorf("--%s %s: %v", flag.Name, invalid.GetValue(), invalid.Unwrap())
}
