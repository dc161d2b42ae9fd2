package output

import (
	"errors"
	"strconv"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/daemon/fault"
	guestv1 "github.com/berth-sandbox/berth/proto/berth/guest/v1"
	berthv1 "github.com/berth-sandbox/berth/proto/berth/v1"
)

// Chunk is a chunk of a stream.
type Chunk struct {
	Data  []byte
	EOF   bool // the stream is sealed and ends after Data
	Stats *berthv1.OutputStats
}

// Read returns bytes of a stream from an offset, of which stats says what is kept.
func (s *Store) Read(jobID string, stream berthv1.Stream, stats *berthv1.OutputStats, offset, limit uint64) (*Chunk, error) {
	total := stats.GetTotalBytes()
	if offset == total {
		return &Chunk{Stats: stats, EOF: stats.GetSealed()}, nil
	}
	if offset > total {
		return nil, Beyond(stream, offset, total)
	}
	for _, kept := range stats.GetKept() {
		if offset < kept.GetFrom() {
			return nil, Expired(jobID, stream, offset, kept.GetFrom())
		}
		if offset < kept.GetTo() {
			data, err := s.readRange(jobID, stream, kept.GetFrom(), offset, min(limit, kept.GetTo()-offset))
			if errors.Is(err, errGone) {
				return nil, Expired(jobID, stream, offset, kept.GetTo())
			}
			if err != nil {
				return nil, err
			}
			return &Chunk{Data: data, Stats: stats, EOF: stats.GetSealed() && offset+uint64(len(data)) == total}, nil
		}
	}
	return nil, Expired(jobID, stream, offset, total)
}

// HeadAndTail returns the first and the last bytes of what is kept of a stream.
func (s *Store) HeadAndTail(jobID string, stream berthv1.Stream, stats *berthv1.OutputStats, limit uint64) (*guestv1.Output, error) {
	kept := stats.GetKept()
	if len(kept) == 0 {
		return &guestv1.Output{}, nil
	}
	first, last := kept[0], kept[len(kept)-1]
	half := limit / 2
	if stats.GetTotalBytes() <= limit && len(kept) == 1 {
		half = limit
	}
	output := &guestv1.Output{}
	if first.GetFrom() == 0 {
		head, err := s.readRange(jobID, stream, 0, 0, min(half, first.GetTo()))
		if err != nil && !errors.Is(err, errGone) {
			return nil, err
		}
		output.Head = head
	}
	from := max(uint64(len(output.GetHead())), last.GetFrom(), last.GetTo()-min(limit-half, last.GetTo()))
	if from >= last.GetTo() {
		return output, nil
	}
	tail, err := s.readRange(jobID, stream, last.GetFrom(), from, last.GetTo()-from)
	if errors.Is(err, errGone) {
		return output, nil
	}
	output.Tail, output.TailOffset = tail, from
	return output, err
}

// Receiver is given a stream in order.
type Receiver interface {
	Chunk(chunk *berthv1.OutputChunk) error
	Gap(gap *berthv1.OutputGap) error
}

// Replay gives a receiver what is kept of a stream from an offset on, and what is not as gaps.
func (s *Store) Replay(jobID string, stream berthv1.Stream, stats *berthv1.OutputStats, offset uint64, to Receiver) error {
	for _, kept := range stats.GetKept() {
		if offset < kept.GetFrom() {
			if err := to.Gap(gap(stream, offset, kept.GetFrom())); err != nil {
				return err
			}
			offset = kept.GetFrom()
		}
		for offset < kept.GetTo() {
			data, err := s.readRange(jobID, stream, kept.GetFrom(), offset, min(ChunkBytes, kept.GetTo()-offset))
			if errors.Is(err, errGone) {
				break // and what is missing is part of the next gap
			}
			if err != nil {
				return err
			}
			if err := to.Chunk(&berthv1.OutputChunk{Stream: stream, Offset: offset, Data: data}); err != nil {
				return err
			}
			offset += uint64(len(data))
		}
	}
	if offset < stats.GetTotalBytes() {
		return to.Gap(gap(stream, offset, stats.GetTotalBytes()))
	}
	return nil
}

func gap(stream berthv1.Stream, from, to uint64) *berthv1.OutputGap {
	return &berthv1.OutputGap{Stream: stream, Range: &berthv1.ByteRange{From: from, To: to}}
}

// Final is what can be said of a stream of which no more can be had than what is stored.
func (s *Store) Final(jobID string, stream berthv1.Stream, known *berthv1.OutputStats) *berthv1.OutputStats {
	stats := &berthv1.OutputStats{Sealed: true, TotalBytes: known.GetTotalBytes(), Kept: s.Ranges(jobID, stream)}
	if known != nil && known.Exit != nil {
		stats.Exit = &berthv1.OutputStats_EndAtExit{EndAtExit: known.GetEndAtExit()}
	}
	for _, r := range stats.GetKept() {
		stats.TotalBytes = max(stats.GetTotalBytes(), r.GetTo())
	}
	stats.DroppedBytes = stats.GetTotalBytes() - Length(stats.GetKept())
	return stats
}

// Stored is what a receipt says of a stream, less what is not there.
func (s *Store) Stored(jobID string, stream berthv1.Stream, named *berthv1.OutputStats) *berthv1.OutputStats {
	stats := proto.CloneOf(named)
	stats.Kept = nil
	for _, kept := range named.GetKept() {
		for _, there := range s.Ranges(jobID, stream) {
			if there.GetFrom() == kept.GetFrom() {
				stats.Kept = append(stats.Kept, &berthv1.ByteRange{From: kept.GetFrom(), To: min(there.GetTo(), kept.GetTo())})
			}
		}
	}
	stats.DroppedBytes = stats.GetTotalBytes() - Length(stats.GetKept())
	return stats
}

// Length is how many bytes ranges have together.
func Length(ranges []*berthv1.ByteRange) uint64 {
	var total uint64
	for _, r := range ranges {
		total += r.GetTo() - r.GetFrom()
	}
	return total
}

// Expired says that a byte is not kept, and where to read on.
func Expired(jobID string, stream berthv1.Stream, offset, next uint64) error {
	return fault.New(fault.OutputExpired, "byte %d of %s of %s is not kept (output_limit_bytes, or keep_output is off): read on at %d",
		offset, StreamName(stream), jobID, next).With("first_kept", strconv.FormatUint(next, 10))
}

// Beyond says that an offset is beyond a stream's end.
func Beyond(stream berthv1.Stream, offset, total uint64) error {
	return fault.Invalid("offset", "%d is beyond the end of %s, which has %d bytes so far", offset, StreamName(stream), total)
}
