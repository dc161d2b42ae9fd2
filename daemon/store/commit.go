package store

// Kind is a kind of record that has an id of its own.
type Kind string

// The kinds whose changes a commit names.
const (
	KindSandbox   Kind = "sandbox"
	KindMachine   Kind = "machine"
	KindJob       Kind = "job"
	KindOperation Kind = "operation"
)

// Change says that a commit wrote or removed a record.
type Change struct {
	Kind     Kind
	ID       string
	Revision uint64 // the record's own where it has one, else the ledger's when it was written
	Deleted  bool
}

// Commit is what one commit changed, in the order in which it was written. A record that was written
// several times is named as often.
type Commit struct {
	Revision uint64 // the ledger's, after the commit
	Changes  []Change
}

// note adds to what the commit of this transaction will name. What is rolled back takes its notes along.
func (tx *Tx) note(change Change) { tx.changes = append(tx.changes, change) }
