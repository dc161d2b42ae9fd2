package store

import (
	"bytes"
	"encoding/binary"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-sandbox/berth/daemon/fault"
)

// The tree of the ledger's file at schema version 1. A name in angle brackets is a key, "·" is a NUL
// byte between the parts of one, and what stands behind "=" is the value. Values without a note are
// the berth.record.v1 message of that name. Integers in keys and values are big-endian, so that
// bbolt's order of bytes is the order of numbers; a time is 8 bytes of microseconds since 1970.
//
//	v1/
//	  meta/
//	    schema           = uint32, the version that this drawing shows
//	    instance         = 16 hexadecimal characters, made at creation
//	    created          = time
//	    revision         = uint64, grows with every change of a sandbox, machine or job
//	    events           = uint64, how many keys are in events/
//	    trimmed          = uint64, the highest revision whose event may be missing
//	    backup           = time at which this copy was made; absent once a broker was started on it
//	    key_fingerprint  = that of the vault's key, absent until set
//	  sandboxes/<id>     = SandboxRecord
//	  machines/<id>      = MachineRecord
//	  jobs/<id>          = JobRecord
//	  checkpoints/<id>
//	  leases/<id>
//	  pools/<name>
//	  operations/<id>    = OperationRecord, as long as it is open
//	  requests/<namespace>/<request id>   = RequestRecord
//	  sessions/<namespace>/<session key>  = SessionRecord
//	  events/<revision>  = EventRecord
//	  index/                              = empty unless noted
//	    sandboxes_by_namespace/<namespace · id>
//	    sandboxes_live/<id>               neither DESTROYED nor FAILED
//	    sandboxes_by_end/<time · id>      DESTROYED or FAILED
//	    machines_live/<id>                not GONE
//	    jobs_by_namespace/<namespace · id>
//	    jobs_by_sandbox/<sandbox id · id>
//	    jobs_open_by_machine/<machine id · id>   not DONE
//	    jobs_open_by_sandbox/<sandbox id · id>   not DONE = 1 byte, 1 when it is detached
//	    jobs_by_end/<time · id>           DONE
//	    requests_by_expiry/<time · namespace · request id>
const (
	rootBucket = "v1"

	metaBucket        = "meta"
	sandboxesBucket   = "sandboxes"
	machinesBucket    = "machines"
	jobsBucket        = "jobs"
	checkpointsBucket = "checkpoints"
	leasesBucket      = "leases"
	poolsBucket       = "pools"
	operationsBucket  = "operations"
	requestsBucket    = "requests"
	sessionsBucket    = "sessions"
	eventsBucket      = "events"
	indexBucket       = "index"

	sandboxesByNamespace = "sandboxes_by_namespace"
	sandboxesLive        = "sandboxes_live"
	sandboxesByEnd       = "sandboxes_by_end"
	machinesLive         = "machines_live"
	jobsByNamespace      = "jobs_by_namespace"
	jobsBySandbox        = "jobs_by_sandbox"
	jobsOpenByMachine    = "jobs_open_by_machine"
	jobsOpenBySandbox    = "jobs_open_by_sandbox"
	jobsByEnd            = "jobs_by_end"
	requestsByExpiry     = "requests_by_expiry"
)

// The keys of meta/.
const (
	schemaKey      = "schema"
	instanceKey    = "instance"
	createdKey     = "created"
	revisionKey    = "revision"
	eventsKey      = "events"
	trimmedKey     = "trimmed"
	droppedKey     = "dropped"
	backupKey      = "backup"
	fingerprintKey = "key_fingerprint"
)

// plainBuckets are the buckets right under the root; indexBuckets those under index/.
var (
	plainBuckets = []string{
		metaBucket, sandboxesBucket, machinesBucket, jobsBucket, checkpointsBucket, leasesBucket,
		poolsBucket, operationsBucket, requestsBucket, sessionsBucket, eventsBucket, indexBucket,
	}
	indexBuckets = []string{
		sandboxesByNamespace, sandboxesLive, sandboxesByEnd, machinesLive, jobsByNamespace,
		jobsBySandbox, jobsOpenByMachine, jobsOpenBySandbox, jobsByEnd, requestsByExpiry,
	}
)

// separator stands between the parts of an index key. No part may hold it (see checkKey), and it
// sorts before every byte that may be in one, so the keys of "a" come before those of "ab".
const separator = 0

// maxKeyBytes bounds one part of a key. The longest that the API lets in is a session key of 256
// bytes; bbolt itself allows 32 KiB.
const maxKeyBytes = 1024

// checkKey refuses what can't be a key, naming what it was meant to be.
func checkKey(what, key string) error {
	switch {
	case key == "":
		return fault.New(fault.Internal, "the ledger was given an empty %s", what)
	case len(key) > maxKeyBytes:
		return fault.New(fault.Internal, "the ledger was given a %s of %d bytes, at most %d are allowed", what, len(key), maxKeyBytes)
	case bytes.IndexByte([]byte(key), separator) >= 0:
		return fault.New(fault.Internal, "the ledger was given a %s with a NUL byte: %q", what, key)
	}
	return nil
}

// joinKey makes an index key of parts.
func joinKey(parts ...string) []byte {
	size := len(parts)
	for _, part := range parts {
		size += len(part)
	}
	key := make([]byte, 0, size)
	for i, part := range parts {
		if i > 0 {
			key = append(key, separator)
		}
		key = append(key, part...)
	}
	return key
}

// timeKey makes an index key that sorts by time, then by parts.
func timeKey(at time.Time, parts ...string) []byte {
	return append(append(timeBytes(at), separator), joinKey(parts...)...)
}

// timeBytes is at in microseconds; a time before 1970 counts as 1970.
func timeBytes(at time.Time) []byte {
	return numberBytes(uint64(max(at.UnixMicro(), 0)))
}

// timeKeyBytes is the length of the time and its separator at the start of a time key.
const timeKeyBytes = 9

func numberBytes(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// firstTime returns the first of the times that is set, else the beginning of time.
func firstTime(times ...*timestamppb.Timestamp) time.Time {
	for _, at := range times {
		if at != nil {
			return at.AsTime()
		}
	}
	return time.Unix(0, 0)
}
