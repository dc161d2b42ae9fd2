package client

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"

	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// ErrIncomplete is a backup that is not whole.
var ErrIncomplete = errors.New("the backup is not whole")

// Backup writes a consistent copy of the broker's ledger to w, without free pages if it is compact, and
// returns its length in bytes and its SHA-256. What was written beside an error is no backup. It is not
// repeated by itself. Errors: ErrIncomplete, STORE_FULL, what w returned, *UnreachableError, ctx's end.
func (c *Client) Backup(ctx context.Context, compact bool, w io.Writer) (length uint64, sum []byte, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream also when w fails
	stream, err := c.Admin().Backup(ctx, &berthv1.BackupRequest{Compact: compact})
	if err != nil {
		return 0, nil, err
	}
	hash := sha256.New()
	for {
		chunk, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return length, nil, fmt.Errorf("%w: the broker ended it after %d bytes", ErrIncomplete, length)
		case err != nil:
			return length, nil, err
		}
		length += uint64(len(chunk.GetData()))
		_, _ = hash.Write(chunk.GetData()) // a hash takes everything
		if _, err := w.Write(chunk.GetData()); err != nil {
			return length, nil, err
		}
		if len(chunk.GetSha256()) == 0 {
			continue
		}
		if sum := hash.Sum(nil); !bytes.Equal(sum, chunk.GetSha256()) || length != chunk.GetTotalBytes() {
			return length, nil, fmt.Errorf("%w: %d bytes of %d came, and their checksum is %x, not %x", ErrIncomplete, length, chunk.GetTotalBytes(), sum, chunk.GetSha256())
		}
		return length, chunk.GetSha256(), nil
	}
}
