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

// ErrCutOff is a backup that is not whole.
var ErrCutOff = errors.New("the backup is not whole")

// Backup writes a consistent copy of the broker's ledger to w, without free pages if it is compact, and
// returns its length in bytes and its SHA-256. What was written beside an error is no backup. It is not
// repeated by itself. Errors: ErrCutOff, STORE_FULL, what w returned, *UnreachableError, ctx's end.
func (c *Client) Backup(ctx context.Context, compact bool, w io.Writer) (length uint64, sum []byte, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream also when w fails
	stream, err := c.Admin().Backup(ctx, &berthv1.BackupRequest{Compact: compact})
	if err != nil {
		return 0, nil, err
	}
	hash := sha256.New()
	for {
		piece, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return length, nil, fmt.Errorf("%w: the broker ended it after %d bytes", ErrCutOff, length)
		case err != nil:
			return length, nil, err
		}
		length += uint64(len(piece.GetData()))
		_, _ = hash.Write(piece.GetData()) // a hash takes everything
		if _, err := w.Write(piece.GetData()); err != nil {
			return length, nil, err
		}
		if len(piece.GetSha256()) == 0 {
			continue
		}
		if sum := hash.Sum(nil); !bytes.Equal(sum, piece.GetSha256()) || length != piece.GetTotalBytes() {
			return length, nil, fmt.Errorf("%w: %d bytes of %d came, and their checksum is %x, not %x", ErrCutOff, length, piece.GetTotalBytes(), sum, piece.GetSha256())
		}
		return length, piece.GetSha256(), nil
	}
}
