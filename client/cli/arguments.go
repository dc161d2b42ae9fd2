package cli

import "github.com/spf13/cobra"

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
		}
		return nil
	}
}
