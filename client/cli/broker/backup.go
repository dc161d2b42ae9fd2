package broker

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/client/cli/command"
	"github.com/berth-sandbox/berth/client/cli/present"
	"github.com/berth-sandbox/berth/client/cli/usage"
)

// PartialSuffix is that of a backup that is not whole yet.
const PartialSuffix = ".partial"

// BackupCommand is `berth backup`.
func BackupCommand(p *command.Program) *cobra.Command {
	var compact, force bool
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Copy the broker's ledger to a file, while it runs",
		Long: `Copy the broker's ledger to a file of this host, mode 0600: consistent, checked, on disk, or not at all.
FILE may be -, for stdout. Until it is whole it is FILE.partial.

Two things are not in it: the broker's key (the file key in its state directory, without which a backup
can't be used: copy it once), and the kept output of jobs (the directory output there).
docs/operations.md says how a backup is restored.`,
		Example: `  berth backup ledger.backup
  berth backup --compact --force /mnt/backups/berth.db
  berth backup - | zstd > ledger.zst`,
		Args: usage.ExactlyOne("one file"),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveDefault
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&compact, "compact", false, "leave out free pages; the broker needs twice the space meanwhile")
	flags.BoolVar(&force, "force", false, "replace a file that is there")
	cmd.RunE = p.Call(usage.ExitFailure, func(ctx context.Context, c *client.Client, args []string) error {
		if args[0] == "-" {
			return backupToStdout(ctx, p, c, compact)
		}
		if err := mayWrite(args[0], force); err != nil {
			return err
		}
		return backupToFile(ctx, p, c, args[0], compact)
	})
	return cmd
}

func backupToStdout(ctx context.Context, p *command.Program, c *client.Client, compact bool) error {
	if p.StdoutTerminal {
		return usage.Errorf("a backup is no text for a terminal: name a file, or send stdout somewhere")
	}
	_, _, err := c.Backup(ctx, compact, p.Stdout)
	return err
}

// mayWrite refuses to replace what is there, unless that is a file and is to be replaced.
func mayWrite(path string, force bool) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return usage.Errorf("%s: %v", path, err)
	case !info.Mode().IsRegular():
		return usage.Errorf("%s is there and is no file: name another", path)
	case !force:
		return usage.Errorf("%s is there: name another file, or replace it with --force", path)
	}
	return nil
}

func backupToFile(ctx context.Context, p *command.Program, c *client.Client, path string, compact bool) error {
	length, sum, err := backupAs(ctx, c, path, compact)
	if err != nil {
		return err
	}
	return printBackup(p, path, length, hex.EncodeToString(sum))
}

// backupAs makes a backup that is whole, on disk and at path, or leaves what was there.
func backupAs(ctx context.Context, c *client.Client, path string, compact bool) (length uint64, sum []byte, err error) {
	partial := path + PartialSuffix
	if err := os.Remove(partial); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, nil, fmt.Errorf("remove what an earlier backup left: %w", err)
	}
	file, err := os.OpenFile(filepath.Clean(partial), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, nil, err
	}
	length, sum, err = backupTo(ctx, c, file, compact)
	if err == nil {
		err = os.Rename(partial, path)
	}
	if err != nil {
		return 0, nil, errors.Join(err, os.Remove(partial))
	}
	syncDir(filepath.Dir(path))
	return length, sum, nil
}

func backupTo(ctx context.Context, c *client.Client, file *os.File, compact bool) (length uint64, sum []byte, err error) {
	length, sum, err = c.Backup(ctx, compact, file)
	if err == nil {
		err = file.Sync()
	}
	return length, sum, errors.Join(err, file.Close())
}

// syncDir makes a name in a directory durable, where the system can.
func syncDir(path string) {
	dir, err := os.Open(filepath.Clean(path))
	if err != nil {
		return
	}
	_, _ = dir.Sync(), dir.Close() // not every system syncs a directory; the file itself is on disk
}

func printBackup(p *command.Program, path string, length uint64, sum string) error {
	switch p.Output {
	case command.OutputID:
		return p.PrintLine(path)
	case command.OutputJSON:
		line, err := json.Marshal(struct {
			File   string `json:"file"`
			Bytes  uint64 `json:"bytes"`
			SHA256 string `json:"sha256"`
		}{path, length, sum})
		if err != nil {
			return fmt.Errorf("writing the backup's stats as JSON: %w", err)
		}
		return p.PrintLine(string(line))
	}
	return p.PrintLine(present.Plain(fmt.Sprintf("%s: %s, sha256 %s", path, present.BytesWords(length), sum)))
}
