package record

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/berth-sandbox/berth/providers/guest/regular"
)

// ULID is the part of a job's id that names it, as 16 bytes; its first six are milliseconds since
// 1970 by the broker's clock.
type ULID [16]byte

// Time returns when the id was made, by the broker's clock.
func (u ULID) Time() time.Time {
	var ms int64
	for _, b := range u[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms)
}

const (
	idPrefix = "job_"
	// ulidDigits of five bits each make 130 bits: the first digit is at most 7.
	ulidDigits = 26
	crockford  = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
)

// digits maps a character to its value, 0xFF to none.
var digits = func() (d [256]byte) {
	for i := range d {
		d[i] = 0xFF
	}
	for value, char := range []byte(crockford) {
		d[char] = byte(value)
	}
	return d
}()

// ParseID parses a job's id: "job_" and a ULID in capitals.
func ParseID(id string) (ULID, error) {
	var u ULID
	if len(id) != len(idPrefix)+ulidDigits || id[:len(idPrefix)] != idPrefix || id[len(idPrefix)] > '7' {
		return u, fmt.Errorf("%q is no job id: want job_ and a ULID", id)
	}
	var high, low uint64
	for _, char := range []byte(id[len(idPrefix):]) {
		value := digits[char]
		if value == 0xFF {
			return u, fmt.Errorf("%q is no job id: want job_ and a ULID", id)
		}
		high = high<<5 | low>>59
		low = low<<5 | uint64(value)
	}
	for i := range 8 {
		u[i] = byte(high >> (56 - 8*i))
		u[8+i] = byte(low >> (56 - 8*i))
	}
	return u, nil
}

// Check returns why a job without a directory must not be started, and records its id's time.
func (d *Directory) Check(id ULID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, forgotten := d.tombstones[id]; forgotten {
		return ErrForgotten
	}
	if _, recent := d.recent[id]; recent {
		return ErrForgotten
	}
	// The ids' own times are compared, never the machine's clock, which may be wrong.
	if d.newest.Sub(id.Time()) > forgetAfter {
		return ErrExpired
	}
	d.see(id)
	return nil
}

// WriteTombstone records that jobs were started and are forgotten, for durable ones on disk. Only then may
// their directories be removed.
func (d *Directory) WriteTombstone(durable, others []ULID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range others {
		d.remember(id)
	}
	var data []byte
	for _, id := range durable {
		if _, forgotten := d.tombstones[id]; !forgotten {
			data = append(data, id[:]...)
		}
	}
	if len(data) == 0 {
		return nil
	}
	// gofail: var guestBeforeTombstone struct{}
	// os.Exit(137)
	_, err := d.forgotten.Write(data)
	if err == nil {
		err = d.forgotten.Sync()
	}
	if err != nil {
		// The next entry must start where a complete one ends.
		return fmt.Errorf("write tombstones: %w", errors.Join(err, d.forgotten.Truncate(d.size)))
	}
	// gofail: var guestAfterTombstone struct{}
	// os.Exit(137)
	d.size += int64(len(data))
	for _, id := range durable {
		d.tombstones[id] = struct{}{}
	}
	if len(d.tombstones) < d.compactAt {
		return nil
	}
	return d.compact()
}

func (d *Directory) remember(id ULID) {
	if len(d.ring) < memoryTombstones {
		d.ring = append(d.ring, id)
	} else {
		delete(d.recent, d.ring[d.next])
		d.ring[d.next] = id
		d.next = (d.next + 1) % len(d.ring)
	}
	d.recent[id] = struct{}{}
}

// see records the time of an id. One from the future, by more than clocks differ, must not expire the ids of
// today.
func (d *Directory) see(id ULID) {
	made := id.Time()
	if latest := time.Now().Add(clockSlack); made.After(latest) {
		made = latest
	}
	if made.After(d.newest) {
		d.newest = made
	}
}

// loadForgotten reads the forgotten ids.
func (d *Directory) loadForgotten() error {
	data, err := regular.Read(d.forgottenFile(), maxForgotten)
	if errors.Is(err, regular.ErrNotRegular) {
		err = os.RemoveAll(d.forgottenFile())
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the forgotten jobs: %w", err)
	}
	for ; len(data) >= len(ULID{}); data = data[len(ULID{}):] { // a torn last entry was never acknowledged
		id := ULID(data[:len(ULID{})])
		d.tombstones[id] = struct{}{}
		d.see(id)
	}
	return d.compact()
}

// compact rewrites the file without the ids that are so old that they are refused as expired.
func (d *Directory) compact() error {
	var kept []byte
	for id := range d.tombstones {
		if d.newest.Sub(id.Time()) > forgetAfter {
			delete(d.tombstones, id)
		} else {
			kept = append(kept, id[:]...)
		}
	}
	if err := replace(d.forgottenFile(), kept); err != nil {
		return err
	}
	file, err := regular.Open(d.forgottenFile(), os.O_WRONLY|os.O_APPEND)
	if err != nil {
		return fmt.Errorf("open the forgotten jobs: %w", err)
	}
	if d.forgotten != nil {
		_ = d.forgotten.Close()
	}
	d.forgotten, d.size = file, int64(len(kept))
	d.compactAt = max(2*len(d.tombstones), compactFrom)
	return nil
}

func (d *Directory) forgottenFile() string { return filepath.Join(d.path, "forgotten") }
